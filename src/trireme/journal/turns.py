"""A rollout under way on disk: its turns, each before its environment or agent program sees it, and its requests.

If what plays a rollout dies (its worker, or an agent program, which outlives worker and orchestrator), the rollout is
played again from its beginning, and a turn whose prompt is the same as before is answered with the tokens that were
sampled then. So no finished turn is sampled twice, as long as what plays the rollout does the same again.

A program may outlive the orchestrator. The next one asks itself what the program had asked for, gets the turns that are
on disk, and so knows the conversations that the program continues. Requests are of one run of the program, and are
removed when its rollout is over. They need not survive the machine, as the program does not either.

Two files per attempt of a rollout, `NAME.ATTEMPT.turns` and `.requests`. Each record is 4 bytes of length, 4 bytes of
CRC-32, and msgpack (turns) or JSON (requests). A record that was cut off by a crash ends the file: its turn was never
shown to anybody.
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

import msgspec
import numpy as np

from trireme.base.log import get_logger
from trireme.base.paths import sync_folder
from trireme.journal.model_turn import Turn, TurnRequest
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


class KeptRequest(TurnRequest, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request that was answered with a turn. In the file it lacks what it shares with the one before."""

    session: str  # id of one run of the program; a new run has another
    number: int  # its place among all requests of the session, from 1
    shared: int = 0  # messages at the beginning that the request before has too
    has_same_tools: bool = False  # the tools are those of the request before, and left out here

    def continues(self, other: KeptRequest) -> bool:
        """Return whether its conversation is a longer one with the same beginning."""
        num_messages = len(other.messages)
        return len(self.messages) > num_messages and self.messages[:num_messages] == other.messages


class RolloutLog:
    """The turns and requests of one attempt of a rollout.

    Example:
        log = RolloutLog(turns_file(journal, "17-3", 0))
        record = log.replay(prompt)  # None: sample it, then
        log.write(record)
        log.add(record, log.life)
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
        self.keeps_requests = False  # its program may outlive this process
        self._requests = path.with_suffix(".requests")
        self._last: KeptRequest | None = None  # the request that was written last
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

    def write_request(self, request: KeptRequest) -> None:
        """Add a request. The first one of another session begins the file again.

        If it cannot be written, no requests are kept: the program cannot outlive this process.
        """
        last, self._last = self._last, request
        is_first = last is None or last.session != request.session

        # Each request carries its whole conversation: store only what is new, or the file would grow with its square.
        if last is not None and not is_first:
            most = min(len(request.messages), len(last.messages))
            shared = next((n for n in range(most) if request.messages[n] != last.messages[n]), most)
            has_same_tools = request.tools == last.tools
            request = msgspec.structs.replace(
                request,
                shared=shared,
                messages=request.messages[shared:],
                has_same_tools=has_same_tools,
                tools=None if has_same_tools else request.tools,
            )

        # Truncate at a new session: requests of an earlier run of the program must not be replayed to this one.
        how = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if is_first else os.O_APPEND)
        try:
            if is_first:
                self._requests.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self._requests, how, 0o600), "wb") as file:
                # JSON, as it came: msgpack has no integers above 64 bits
                file.write(framed(msgspec.json.encode(request)))
        except Exception as error:  # the disk failed, or a value cannot be encoded; the turn itself is on disk
            log.warning("%r; after a restart, the program of this rollout is started again.", error)
            self._requests.unlink(missing_ok=True)
            self.keeps_requests = False

    def read_requests(self, session: str) -> list[KeptRequest]:
        """Return the requests of a session, whole, and continue its file.

        Raises: msgspec.DecodeError if another version of Trireme has written them.
        """
        data = self._requests.read_bytes() if self._requests.exists() else b""
        found: list[KeptRequest] = []

        # Put back what each request shares with the one before.
        for payload in payloads_of(data):
            request = msgspec.json.decode(payload, type=KeptRequest)
            if found:
                before = found[-1]
                request.messages = [*before.messages[: request.shared], *request.messages]
                request.tools = before.tools if request.has_same_tools else request.tools
            found.append(request)

        if not found or found[0].session != session:
            return []

        # A crash may have cut the last request short: the next one must not follow half a record.
        os.truncate(self._requests, whole_length(data))
        self._last = found[-1]
        return found

    def close(self) -> None:
        """Write no more turns, and remove the requests: the rollout is over."""
        with self._lock:  # a write under way must not continue in a file that got the same descriptor
            self._is_closed = True
            if self._file is not None:
                os.close(self._file)
                self._file = None
        if self.keeps_requests:
            self._requests.unlink(missing_ok=True)


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
