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
    try:
        with atomic_write(path, replace=replace) as file:
            file.write(whole)
    except FileExistsError as error:
        if path.read_bytes() != whole:  # else it was written before, and only its folder could not be synced
            raise JournalCorrupt(
                f"{path} was written by another process - expected one orchestrator for each run folder. End the "
                "other one, and start again with --resume."
            ) from error


def read_entry(path: Path, number: int, kind: type[T], *, ways_out: str) -> T:
    """Read an entry. Raises JournalCorrupt where it is not what was written; `ways_out` says what to do then."""
    head, _, payload = path.read_bytes().partition(b"\n")
    try:
        header = msgspec.json.decode(head, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalCorrupt(f"{path} does not begin with an entry's header: {error}. {ways_out}") from error
    if header.format != FORMAT:
        raise JournalCorrupt(
            f"{path} has format {header.format}, this version of Trireme reads {FORMAT}. "
            "Go on with the version that wrote it, or start a new run."
        )
    if len(payload) != header.length or hashlib.sha256(payload).hexdigest() != header.sha256:
        raise JournalCorrupt(
            f"{path} holds {len(payload)} bytes that do not match its checksum (of {header.length} bytes). {ways_out}"
        )
    if header.step != number:
        raise JournalCorrupt(f"{path} holds entry {header.step}, by its name entry {number}. {ways_out}")
    try:
        return decode_as(kind, payload)
    except Exception as error:  # whatever a decoder can raise. The checksum is right: it was written so
        raise JournalCorrupt(f"{path} is no {kind.__name__}: {error}. {ways_out}") from error
