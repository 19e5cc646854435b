"""The lanes of a run as they are drawn: a stretch of time, what each lane did in it, what held it, what to change."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trireme.monitor.lanes import (
    OTHER,
    Shares,
    advice,
    few_requests,
    is_engine,
    lanes_of,
    mean_shares,
    reasons,
    shares,
    steady,
    thin,
    waits_for_environments,
)
from trireme.monitor.metrics import Row
from trireme.monitor.spans import TRAINER, Span, read_spans

MOST_SPANS = 4000  # drawn at once
TOUCH_S = 2e-6
UNKNOWN: Shares = {OTHER: 1.0}
STEP_PARTS = {
    "time/wait_for_batch": "wait",
    "time/forward_backward": "train",
    "time/optimizer": "train",
    "time/publish": "transfer",
    "time/confirm": "transfer",
    "time/checkpoint": "save",
}
"""What the trainer's metrics tell of its time, where nobody wrote spans."""


class SpanStore:
    """The spans of a run as its file grows, by lane and time; pieces of one thing are put together as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lanes: dict[str, list[Span]] = {}
        self._lock = threading.Lock()

    def refresh(self) -> bool:
        """Reads what is new; whether anything is. Blocks."""
        with self._lock:
            spans, offset = read_spans(self._path, self._offset)
            if offset < self._offset:  # another file has taken its place
                self._lanes = {}
            self._offset = offset
            for span in spans:
                self._put(self._lanes.setdefault(span.lane, []), span)
            return bool(spans)

    def _put(self, lane: list[Span], span: Span) -> None:
        if lane and _goes_on(lane[-1], span):
            first = lane.pop()
            span = Span(first.lane, first.what, first.begin_s, span.end_s - first.begin_s, first.step, first.why)
        if lane and span.begin_s < lane[-1].begin_s:
            lane.insert(bisect_right(lane, span.begin_s, key=lambda other: other.begin_s), span)
        else:
            lane.append(span)

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def extent(self) -> tuple[float, float]:
        """From the first to the last that is known of any lane."""
        lanes = [lane for lane in self._lanes.values() if lane]
        if not lanes:
            return 0.0, 0.0
        return min(lane[0].begin_s for lane in lanes), max(lane[-1].end_s for lane in lanes)

    def within(self, begin_s: float, end_s: float, lane: str) -> list[Span]:
        return _touching(self._lanes.get(lane, []), begin_s, end_s)

    def names(self) -> list[str]:
        return lanes_of(lane[0] for lane in self._lanes.values() if lane)

    def steady(self) -> tuple[float, float]:
        """Without start and end, of which no advice can be taken."""
        trainer = self._lanes.get(TRAINER, [])
        begin_s, end_s = self.extent()
        return steady([*trainer, Span("", "", begin_s, end_s - begin_s)]) if self else (0.0, 0.0)


def _goes_on(span: Span, following: Span) -> bool:
    same = (span.what, span.step, span.why) == (following.what, following.step, following.why)
    return same and abs(following.begin_s - span.end_s) <= TOUCH_S


def _touching(lane: list[Span], begin_s: float, end_s: float) -> list[Span]:
    """Spans of one lane do not overlap, so only the one before the first may reach into the stretch."""
    first = bisect_left(lane, begin_s, key=lambda span: span.begin_s)
    last = bisect_left(lane, end_s, key=lambda span: span.begin_s)
    if first and lane[first - 1].end_s > begin_s:
        first -= 1
    return lane[first:last]


@dataclass(frozen=True)
class LaneView:
    """One look."""

    begin_s: float
    end_s: float
    lanes: list[str]
    spans: list[Span]  # thinned
    shares: dict[str, Shares]  # by lane
    held_by: dict[str, list[tuple[str, float]]]  # by lane: what it waited for, and how much of all time
    advice: str
    engines: Shares = field(default_factory=dict)  # all of them as if they were one
    told: tuple[float, float] = (0.0, 0.0)  # what shares and words are about: start and end say nothing about balance

    def blocks(self) -> Iterator[tuple[int, float, float, str, int, str]]:
        """Place of the lane, seconds since the beginning of the stretch, seconds long, what, step, why."""
        place = {lane: index for index, lane in enumerate(self.lanes)}
        for span in self.spans:
            yield place[span.lane], span.begin_s - self.begin_s, span.seconds, span.what, span.step, span.why


def look(store: SpanStore, begin_s: float, end_s: float, *, most: int = MOST_SPANS) -> LaneView:
    lanes = store.names()
    by_lane = {lane: store.within(begin_s, end_s, lane) for lane in lanes}
    known = [span for spans in by_lane.values() for span in spans]
    told = _told(store, begin_s, end_s)
    of_lanes = {lane: shares(spans, lane, *told) for lane, spans in by_lane.items()}
    engines = [of_lanes[lane] for lane in lanes if is_engine(lane)]
    of_engines = mean_shares(engines) if engines else UNKNOWN
    held_by = {lane: reasons(spans, lane, *told) for lane, spans in by_lane.items()}
    return LaneView(
        begin_s=begin_s,
        end_s=end_s,
        lanes=lanes,
        spans=thin(known, begin_s, end_s, most),
        shares=of_lanes,
        held_by={lane: [found for found in held if found[0]] for lane, held in held_by.items()},
        advice=advice(
            of_lanes.get(TRAINER, UNKNOWN),
            of_engines,
            few=few_requests(known, *told),
            environments=waits_for_environments(known, *told),
        ),
        engines=of_engines if len(engines) > 1 else {},
        told=told,
    )


def _told(store: SpanStore, begin_s: float, end_s: float) -> tuple[float, float]:
    """The steady part of a stretch; all of it where there is none."""
    first_s, last_s = store.steady()
    first_s, last_s = max(begin_s, first_s), min(end_s, last_s)
    return (first_s, last_s) if first_s < last_s else (begin_s, end_s)


def trainer_shares(rows: Iterable[Row]) -> Shares:
    """Of a run without spans: what the trainer did with its steps, by its metrics. Empty where they say nothing."""
    seconds = dict.fromkeys(["train", "wait", "transfer", "save"], 0.0)
    total = 0.0
    for row in rows:
        step_s = row.get("time/step")
        if isinstance(step_s, int | float) and step_s > 0:
            total += step_s
            for name, what in STEP_PARTS.items():
                value = row.get(name)
                seconds[what] += value if isinstance(value, int | float) and value == value else 0.0
    if not total:
        return {}
    total = max(total, sum(seconds.values()))
    known = {what: value / total for what, value in seconds.items() if value > 0}
    return known | {"other": max(0.0, 1.0 - sum(known.values()))}


def advice_without_spans(of_trainer: Shares) -> str:
    """Half of an answer: the engines' side is not known."""
    waits = of_trainer.get("wait", 0.0)
    if not of_trainer:
        return "nothing is known yet of what the trainer did with its time"
    if waits > 0.3:
        return (
            f"the trainer waits {waits:.0%} of its time for batches: generation or environments hold it up, and more "
            "GPUs for inference would help where the engines are busy"
        )
    if waits < 0.05:
        return f"the trainer waits {waits:.0%} of its time: training itself is what a step takes"
    return f"the trainer waits {waits:.0%} of its time for batches: the two sides are not far from balanced"
