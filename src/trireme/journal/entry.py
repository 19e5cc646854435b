"""The file format of journal entries: a header line (format, number, length, SHA-256), then a msgpack payload.

An entry is written under another name, synced and renamed, so it is complete or absent. A file that was truncated or
changed afterwards fails its checksum.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trireme.base.errors import JournalCorrupt
from trireme.base.paths import atomic_write
from trireme.messages import decode_as, encode

T = TypeVar("T")

FORMAT = 1
"""Version of the stored format. It outlives wire versions: a later Trireme may resume a run."""


class Header(msgspec.Struct):
    format: int
    step: int
    length: int
    sha256: str


def write_entry(path: Path, number: int, content: Any, *, replace: bool = True) -> None:
    """Write an entry and return when it is on disk.

    Raises:
        OSError: it could not be written (a full disk); nothing was.
        JournalCorrupt: `replace` is false and there is another entry of that name.
    """
    payload = encode(content)
    header = Header(FORMAT, number, len(payload), hashlib.sha256(payload).hexdigest())
    whole = msgspec.json.encode(header) + b"\n" + payload

    # With `replace=False`, a second orchestrator in the folder is noticed here, before it overwrites a batch.
    try:
        with atomic_write(path, replace=replace) as file:
            file.write(whole)
    except FileExistsError as error:
        if path.read_bytes() != whole:  # equal bytes: an earlier try wrote it, and only failed to sync its folder
            raise JournalCorrupt(
                f"{path} was written by another process - expected one orchestrator for each run folder. End the "
                "other one, and start again with --resume."
            ) from error


def read_entry(path: Path, number: int, kind: type[T], *, ways_out: str) -> T:
    """Read an entry. Raises JournalCorrupt if it is not what was written; `ways_out` is the advice in the message."""
    head, _, payload = path.read_bytes().partition(b"\n")
    try:
        header = msgspec.json.decode(head, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalCorrupt(f"{path} does not begin with an entry's header: {error}. {ways_out}") from error

    # Checked before the checksum, which another format may compute differently.
    if header.format != FORMAT:
        raise JournalCorrupt(
            f"{path} has format {header.format}, this version of Trireme reads {FORMAT}. "
            "Go on with the version that wrote it, or start a new run."
        )

    if len(payload) != header.length or hashlib.sha256(payload).hexdigest() != header.sha256:
        raise JournalCorrupt(
            f"{path} holds {len(payload)} bytes that do not match its checksum (of {header.length} bytes). {ways_out}"
        )

    # A whole entry under a wrong name was copied or renamed by hand.
    if header.step != number:
        raise JournalCorrupt(f"{path} holds entry {header.step}, by its name entry {number}. {ways_out}")

    try:
        return decode_as(kind, payload)
    except Exception as error:  # any error of a decoder. The checksum is right, so these bytes were written
        raise JournalCorrupt(f"{path} is no {kind.__name__}: {error}. {ways_out}") from error
