"""`spans.jsonl`: the timeline of a run, what each lane (a process or an engine) did from when to when. Writer and
reader.

    {"lane": "trainer", "what": "wait", "begin_s": 1700000000.25, "seconds": 0.41, "step": 12, "why": "no batch yet"}

A lane does one thing at a time, so its spans never overlap; time between two spans is "other". A long span is written
in pieces, every `FLUSH_S`: readers see current activity, and of a killed process only the last seconds are missing. The
observed thread itself writes nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from trireme.monitor.lines import LinesFile, last_bytes, read_lines

What = Literal["start", "generate", "train", "wait", "transfer", "evaluate", "save", "journal", "idle"]

TRAINER = "trainer"
ORCHESTRATOR = "orchestrator"
ENGINE = "engine"
"""Names of lanes; those of engines are "engine HOST:PORT"."""

ENVIRONMENTS = "environments are working"
"""Reason of an engine's wait: environments are processing its answers."""

FEW = "few requests"
"""Reason why an engine is not full: only the last rollouts of a batch are left."""

FLUSH_S = 2.0
LAST_WRITE_S = 5.0
MOST_A_SECOND = 40
SLOT_US = 100_000
"""Pieces per second beyond which only the sums of each slot are written: the file does not grow with requests."""

TAIL_BYTES = 1 << 18


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """One activity of a lane."""

    lane: str
    what: str  # a `What`, or one that a later version has
    begin_s: float  # unix time, by the clock of the lane's machine
    seconds: float
    step: int = -1  # the batch that it was for, or the version of `transfer`, `evaluate` and `save`; -1: none
    why: str = ""  # the reason of a wait; details of a single case follow a colon

    @property
    def end_s(self) -> float:
        return self.begin_s + self.seconds


def reason_of(why: str) -> str:
    """Return a reason without the details of a single case, for grouping."""
    return why.partition(":")[0]


class Piece(NamedTuple):
    """A span in memory, in integer microseconds, which add up exactly."""

    what: str
    step: int
    why: str
    begin_us: int
    end_us: int


def steady_clock(not_before_us: int = 0) -> Callable[[], int]:
    """Return a clock in microseconds of unix time that is monotonic, even if the machine's clock is set.

    Args:
        not_before_us: the end of the previous process's spans, whose clock may have been ahead.
    """
    first = max(time.time_ns() // 1000, not_before_us)
    zero = time.monotonic_ns()
    return lambda: first + (time.monotonic_ns() - zero) // 1000


class Lane:
    """The activity of one process or one engine. Thread-safe.

    Example:
        with lane.doing("train", step=12): ...
        lane.enter("wait", step=13, why="no batch yet")
        lane.take()  # {"train": 0.41, "wait": 0.02}: seconds since the last `take`
    """

    def __init__(
        self,
        name: str,
        *,
        clock: Callable[[], int] | None = None,
        what: What | None = None,
        since_us: int | None = None,
        words: Callable[[], str] = str,
    ) -> None:
        """Create a lane.

        Args:
            what: the activity so far, and since when.
            words: called now and then during a wait; returns what is waited for. May be called from any thread.
        """
        self.name = name
        self.words = words
        self._clock = clock or steady_clock()
        self._lock = threading.Lock()
        self.now = what  # the current activity; None for unnamed time
        self.step = -1
        self._why = ""
        self._since_us = self._counted_us = self._clock() if since_us is None else since_us
        self._done: list[Piece] = []
        self._sums_us: dict[str, int] = defaultdict(int)

    def enter(self, what: What | None, *, step: int = -1, why: str = "") -> None:
        """Switch to another activity."""
        with self._lock:
            if (what, step, why) != (self.now, self.step, self._why):
                self._close(self._clock())
                self.now, self.step, self._why = what, step, why

    def explain(self, why: str) -> None:
        """Set what the current wait is for. Other details of the same reason change nothing."""
        with self._lock:
            # A count in the details ("3 of 8 groups") changes every moment, and must not begin a span each time.
            if not why or self.now is None or (":" in self._why and reason_of(why) == reason_of(self._why)):
                return

            if self._why not in ("", reason_of(why)):
                self._close(self._clock())
            self._why = why

    @contextmanager
    def doing(self, what: What, *, step: int = -1, why: str = "") -> Iterator[None]:
        """Do something for the duration of the context, then return to the activity before."""
        before = self.now, self.step, self._why
        self.enter(what, step=step, why=why)
        try:
            yield
        finally:
            self.enter(before[0], step=before[1], why=before[2])

    def take(self) -> dict[str, float]:
        """Return seconds by activity since the last `take`, including "other"; they add up to the time that passed."""
        with self._lock:
            self._count(self._clock())
            taken, self._sums_us = self._sums_us, defaultdict(int)
        return {what: microseconds / 1e6 for what, microseconds in taken.items()}

    def drain(self) -> list[Piece]:
        """Return the spans since the last `drain`, up to now."""
        with self._lock:
            self._close(self._clock())
            done, self._done = self._done, []
        return done

    def _close(self, now_us: int) -> None:
        """End a piece; the activity continues."""
        self._count(now_us)
        if self.now is not None and now_us > self._since_us:
            self._done.append(Piece(self.now, self.step, self._why, self._since_us, now_us))
        self._since_us = now_us

    def _count(self, now_us: int) -> None:
        self._sums_us[self.now or "other"] += now_us - self._counted_us
        self._counted_us = now_us


class SpansFile:
    """Write the lanes of one process; other processes append theirs."""

    def __init__(self, path: Path) -> None:
        self._lines = LinesFile(path)
        self._ends_us = _last_ends(path)
        self._lanes: list[Lane] = []
        self._flushing = threading.Lock()

    def lane(self, name: str, *, what: What | None = None, ago_s: float = 0.0, words: Callable[[], str] = str) -> Lane:
        """Return the lane of that name. A lane that is already in the file continues after its end.

        Args:
            what: the activity so far, and for how long already.
            words: see `Lane`.
        """
        # A process that was restarted continues its lane. Its spans must not overlap those of the one before.
        end_us = self._ends_us.get(name, 0)
        clock = steady_clock(end_us)
        since_us = max(end_us, clock() - int(ago_s * 1e6))

        lane = Lane(name, clock=clock, what=what, since_us=since_us, words=words)
        self._lanes.append(lane)
        return lane

    def flush(self) -> None:
        """Write the spans of all lanes up to now, in one write."""
        with self._flushing:
            for lane in self._lanes:
                # The reason is asked for here and not by the observed thread, which is blocked in its wait.
                if lane.now == "wait":
                    lane.explain(lane.words())

                for piece in settled(lane.drain()):
                    seconds = (piece.end_us - piece.begin_us) / 1e6
                    span = Span(lane.name, piece.what, piece.begin_us / 1e6, seconds, piece.step, piece.why)
                    self._lines.put(_encode(span))
            self._lines.flush()

    def close(self) -> None:
        self.flush()
        self._lines.close()


@contextmanager
def open_spans(path: Path | None) -> Iterator[SpansFile]:
    """Open a spans file that a thread writes every few seconds and at the end; None keeps only the sums of lanes."""
    spans, is_over = SpansFile(path or Path(os.devnull)), threading.Event()

    def keep_writing() -> None:
        while not is_over.wait(FLUSH_S):
            spans.flush()

    writer = threading.Thread(target=keep_writing, name="spans", daemon=True)
    writer.start()
    try:
        yield spans
    finally:
        is_over.set()
        writer.join(LAST_WRITE_S)  # a disk that hangs must not keep the process
        spans.close()


def settled(pieces: list[Piece]) -> Iterator[Piece]:
    """Replace very many short pieces of one second by one per activity and slot, of the same total lengths."""
    for _, second in groupby(pieces, lambda piece: piece.begin_us // 1_000_000):
        together = list(second)
        if len(together) <= MOST_A_SECOND:
            yield from together
        else:
            for _, slot in groupby(together, lambda piece: piece.begin_us // SLOT_US):
                yield from _summed(list(slot))


def _summed(pieces: list[Piece]) -> Iterator[Piece]:
    """Sum pieces by activity, in order of first appearance. Unaccounted time comes last."""
    # Lay the sums end to end from the first piece on: totals stay exact, and spans do not overlap.
    sums_us: dict[tuple[str, int, str], int] = defaultdict(int)
    for piece in pieces:
        sums_us[piece[:3]] += piece.end_us - piece.begin_us

    begin_us = pieces[0].begin_us
    for (what, step, why), sum_us in sums_us.items():
        yield Piece(what, step, why, begin_us, begin_us + sum_us)
        begin_us += sum_us


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Span).decode


def read_spans(path: Path, offset: int = 0, most_bytes: int = -1) -> tuple[list[Span], int]:
    """Read spans from byte `offset` on, as written. Return them and the offset to continue from.

    Spans of one lane are in order; lanes are mixed.
    """
    lines, offset = read_lines(path, offset, most_bytes)
    spans = []
    for line in lines:
        with suppress(msgspec.DecodeError, ValueError, RecursionError):
            spans.append(_decode(line))
    return spans, offset


def _last_ends(path: Path) -> dict[str, int]:
    """Return the end of each recently written lane, in microseconds."""
    # The newest spans are at the end; reading all of a long run's file would delay its start.
    ends: dict[str, int] = {}
    for span in read_spans(path, last_bytes(path, TAIL_BYTES))[0]:
        ends[span.lane] = max(ends.get(span.lane, 0), round(span.end_s * 1e6))
    return ends
