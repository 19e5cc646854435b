"""The turns of a rollout that is under way, each on disk before its environment or agent program sees it.

If what plays a rollout dies (its worker, or an agent program, which outlives worker and orchestrator; `requests.py`),
the rollout is played again from its beginning, and a turn whose prompt is the same as before is answered with the
tokens that were sampled then. So no finished turn is sampled twice, as long as what plays the rollout does the same
again.

A file per attempt of a rollout. Each record is 4 bytes of length, 4 bytes of CRC-32, and msgpack. A record that was cut
off by a crash ends the file: its turn was never shown to anybody.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trireme.base.log import get_logger
from trireme.base.paths import sync_folder
from trireme.journal.model_turn import Turn
from trireme.messages import Picture, Tokens, decode_as, encode

log = get_logger("journal")

HEAD = struct.Struct("<II")
MISSING = "missing"
UNSAFE = re.compile(r"[^\w.-]")


class ComparedTurn(NamedTuple):
    """A turn in a rollout's samples, and how it differs from what was answered."""

    sample: int
    begin: int  # its first token
    is_first: bool  # it is the first of its sample, and continues no turn there
    difference: str = ""  # the column that differs, MISSING if there is no such turn, or nothing


class TurnLog:
    """The turns of one attempt of a rollout.

    Example:
        turns = TurnLog(folder / "17-3.0.turns")
        record = turns.replay(prompt)  # None: sample it, then
        turns.write(record)
        turns.add(record, turns.life)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = read_turns(path)
        self.prompts = [record.prompt for record in self._records]  # digests of the prompts of all turns on disk
        self.call_ids = {call.id for record in self._records for call in record.calls}
        self._file: int | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # guards `_file` and `_is_closed`
        self.life = 0  # how often the rollout was begun, counting the first time
        self.rewind()

    def rewind(self) -> None:
        """Begin the rollout again: all turns may be replayed."""
        self.life += 1
        self._left: dict[str, deque[Turn]] = defaultdict(deque)
        for record in self._records:
            self._left[record.prompt].append(record)

    def replay(self, prompt: str) -> Turn | None:
        """Return the next turn that was sampled for a prompt, if there is one."""
        return self._left[prompt].popleft() if self._left.get(prompt) else None

    def add(self, record: Turn, life: int) -> None:
        """Add a turn that was written.

        Args:
            life: the `life` in which the turn was asked for. If the rollout has begun again since, the turn may be
                replayed.
        """
        self._records.append(record)
        self.call_ids |= {call.id for call in record.calls}
        if life != self.life:
            self._left[record.prompt].append(record)

    def write(self, record: Turn) -> None:
        """Write a turn and return when it is on disk. Several threads may write turns of one rollout at once.

        Nothing is written once the rollout is over, as nothing will see the turn.

        Raises: OSError if it could not be written; nothing was.
        """
        with self._lock:
            if self._is_closed:
                return

            # Cut off what a crash left of a record: the next one would follow it, and could not be read.
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.ftruncate(self._file, whole_length(self.path.read_bytes()))
                sync_folder(self.path.parent)

            end, data = os.fstat(self._file).st_size, framed(encode(record))
            try:
                while data:
                    data = data[os.write(self._file, data) :]
                os.fsync(self._file)
                self.prompts.append(record.prompt)
            except OSError:
                # A full disk may have taken a part of the record. Without it, the turn can be written again later.
                os.ftruncate(self._file, end)
                raise

    def close(self) -> None:
        with self._lock:  # a write under way must not continue in a file that got the same descriptor
            self._is_closed = True
            if self._file is not None:
                os.close(self._file)
                self._file = None


def turns_folder(journal: Path) -> Path:
    return journal / "turns"


def turns_file(journal: Path, rollout: str, attempt: int) -> Path:
    """Return the file of an attempt's turns, in the journal's folder."""
    return turns_folder(journal) / f"{UNSAFE.sub('_', rollout)}.{attempt}.turns"


def newest_attempts(journal: Path) -> dict[str, int]:
    """Return the newest attempt that has turns in the journal's folder, by the rollout's name in it."""
    newest: dict[str, int] = {}
    for file in turns_folder(journal).glob("*.turns"):
        rollout, _, attempt = file.stem.rpartition(".")
        if attempt.isdecimal():
            newest[rollout] = max(int(attempt), newest.get(rollout, 0))
    return newest


def prompt_digest(ids: list[int], pictures: Sequence[Picture] = ()) -> str:
    """Return a digest of a prompt's token ids and pictures."""
    return PromptDigests(ids, pictures).before(len(ids))


class PromptDigests:
    """The digests of the prompts of a sample's turns, from its first turn to its last. Each token is hashed once."""

    def __init__(self, ids: Sequence[int] | np.ndarray, pictures: Sequence[Picture]) -> None:
        self._ids, self._pictures = np.asarray(ids, dtype=np.int64), pictures
        self._hash, self._num_hashed = hashlib.sha256(), 0

    def before(self, begin: int) -> str:
        """Return the digest of the prompt of the turn that begins at a token, behind those of earlier calls."""
        self._hash.update(self._ids[self._num_hashed : begin].tobytes())
        self._num_hashed = begin
        digest = self._hash.copy()
        for picture in self._pictures:
            if picture.place < begin:
                digest.update(picture.digest.encode())
        return digest.hexdigest()


def read_turns(path: Path) -> list[Turn]:
    """Read the whole records of a file; none if it does not exist."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    if (end := whole_length(data)) < len(data):
        log.warning("%s ends with %d bytes of a turn that was not written to its end", path, len(data) - end)
    turns = [decode_as(Turn, payload) for payload in payloads_of(data)]
    for turn in turns:
        if turn.routes is not None:
            turn.routes = turn.routes.reshape(turn.routes_shape)
    return turns


def compare_turns(
    samples: Sequence[Tokens], records: Sequence[Turn], columns: Sequence[str] = ("ids", "logprobs", "versions")
) -> tuple[list[ComparedTurn], list[Turn]]:
    """Compare the turns in a rollout's samples with those that were answered, token by token.

    A turn is found by all tokens before it, so its prompt is compared too.

    Returns: The turns in the samples, and the answered ones that are in none.
    """
    # A prompt may have been answered several times, so each digest has a list.
    answered: dict[str, list[Turn]] = defaultdict(list)
    for record in records:
        if record.ids:
            answered[record.prompt].append(record)

    compared = []

    # A turn is a run of sampled tokens; given ones (prompts, tool results) separate it from the next.
    for number, sample in enumerate(samples):
        sampled = np.flatnonzero(sample.loss_mask == 1)
        given = np.append(np.flatnonzero(sample.loss_mask != 1), sample.length)
        prompts, end = PromptDigests(sample.ids, sample.pictures), 0
        while (place := int(np.searchsorted(sampled, end))) < len(sampled):
            is_first, begin = end == 0, int(sampled[place])
            prompt = prompts.before(begin)
            end = int(given[np.searchsorted(given, begin)])  # end of one turn, or of several without a gap

            # Compare with all answers to this prompt: an equal one ("") sorts before those that differ.
            differences: dict[str, Turn] = {}
            for record in answered[prompt]:
                part = slice(begin, begin + len(record.ids))
                found = {name: getattr(sample, name)[part] for name in columns}
                wrong = [
                    name
                    for name, column in found.items()
                    if not np.array_equal(np.array(getattr(record, name), dtype=column.dtype), column)
                ]
                differences.setdefault(wrong[0] if wrong else "", record)

            difference = min(differences, default=MISSING)

            # An answer explains one turn only. Its length shows where the turn ends if another follows without a gap.
            if difference != MISSING:
                answered[prompt].remove(record := differences[difference])
                end = min(end, begin + len(record.ids))
            compared.append(ComparedTurn(number, begin, is_first, difference))
    return compared, [record for left in answered.values() for record in left]


def framed(payload: bytes) -> bytes:
    """Return a record with its length and its checksum before it."""
    return HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def payloads_of(data: bytes) -> Iterator[bytes]:
    """Yield the whole records at the beginning of a file."""
    at = 0
    while at + HEAD.size <= len(data):
        length, checksum = HEAD.unpack_from(data, at)
        payload = data[at + HEAD.size : at + HEAD.size + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield payload
        at += HEAD.size + length


def whole_length(data: bytes) -> int:
    """Return the byte at which the last whole record ends."""
    return sum(HEAD.size + len(payload) for payload in payloads_of(data))
