"""Analysis of a run's timeline: shares of time, causes of waiting, and which side should get more GPUs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from trireme.monitor.spans import ENGINE, ENVIRONMENTS, FEW, ORCHESTRATOR, TRAINER, Span, reason_of

OTHER = "other"
IDLE = ("wait", "idle")
WHATS = ("start", "generate", "train", "wait", "transfer", "evaluate", "save", "journal", "idle", OTHER)
"""Lanes in the order in which they are shown."""

GRAIN = 1 << 30
"""Shares are multiples of 1 / GRAIN: however they are added, the sum is 1.0 to the bit."""

NOTICEABLE = 0.05
"""A side that is idle for less is as good as busy: goal of a balanced run."""

WORTH_TELLING = 0.005
TOUCH_S = 2e-6  # times are written in microseconds

Shares = dict[str, float]


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Return the lanes in order: trainer, orchestrator, engines by name, others."""
    order = {TRAINER: 0, ORCHESTRATOR: 1}
    return sorted({span.lane for span in spans}, key=lambda lane: (order.get(lane, 2), not is_engine(lane), lane))


def is_engine(lane: str) -> bool:
    return lane.startswith(f"{ENGINE} ")


def joined(spans: Iterable[Span]) -> list[Span]:
    """Join spans that were written in pieces, by lane and time."""
    whole: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.lane, span.begin_s)):
        last = whole[-1] if whole else None
        if (
            last is not None
            and (last.lane, last.what, last.step, last.why) == (span.lane, span.what, span.step, span.why)
            and abs(span.begin_s - last.end_s) <= TOUCH_S
        ):
            whole[-1] = Span(last.lane, last.what, last.begin_s, span.end_s - last.begin_s, last.step, last.why)
        else:
            whole.append(span)
    return whole


def steady(spans: Iterable[Span]) -> tuple[float, float]:
    """Return the typical part of a run: from the trainer's first step after its last start to the end of its work.

    Where no step has begun, return everything there is; (0, 0) where there is nothing.
    """
    known = list(spans)
    if not known:
        return 0.0, 0.0
    trainer = [span for span in known if span.lane == TRAINER]
    up_s = max((span.end_s for span in trainer if span.what == "start"), default=0.0)
    since_up = [span for span in trainer if span.begin_s >= up_s - TOUCH_S]
    steps = [span.begin_s for span in since_up if span.what == "train"]
    ends = [span.begin_s for span in since_up if span.what == "idle"]
    last_s = max(span.end_s for span in known)
    return min(steps or [span.begin_s for span in known]), min(ends, default=last_s)


def shares(spans: Iterable[Span], lane: str, begin_s: float, end_s: float) -> Shares:
    """Return the shares of a lane's time, which add up to exactly 1.0; "other" is unaccounted time."""
    sums_us: dict[str, int] = defaultdict(int)
    for what, begin_us, stop_us, _ in _within(spans, lane, begin_s, end_s):
        sums_us[what] += stop_us - begin_us
    total_us = round(end_s * 1e6) - round(begin_s * 1e6)
    known = {what: math.floor(sum_us / total_us * GRAIN) / GRAIN for what, sum_us in sums_us.items() if total_us > 0}
    ordered = {what: known[what] for what in sorted(known, key=_place)}
    return ordered | {OTHER: 1.0 - sum(ordered.values())}


def _within(spans: Iterable[Span], lane: str, begin_s: float, end_s: float) -> Iterable[tuple[str, int, int, str]]:
    """Clip spans to a time range, in order and without overlaps, whatever the file has."""
    reached_us, last_us = round(begin_s * 1e6), round(end_s * 1e6)
    for span in sorted((span for span in spans if span.lane == lane), key=lambda span: span.begin_s):
        begin_us, stop_us = round(span.begin_s * 1e6), round(span.end_s * 1e6)
        begin_us, stop_us = max(begin_us, reached_us), min(stop_us, last_us)
        if stop_us > begin_us:
            yield span.what, begin_us, stop_us, span.why
            reached_us = stop_us


def _place(what: str) -> int:
    return WHATS.index(what) if what in WHATS else len(WHATS)


def mean_shares(several: Iterable[Shares]) -> Shares:
    """Return the mean shares of several lanes, such as engines."""
    found = list(several)
    whats = {what for one in found for what in one if what != OTHER}
    sums = {what: math.floor(sum(one.get(what, 0.0) for one in found) / len(found) * GRAIN) for what in whats}
    ordered = {what: sums[what] / GRAIN for what in sorted(sums, key=_place)}
    return ordered | {OTHER: 1.0 - sum(ordered.values())}


def engine_shares(spans: Iterable[Span], begin_s: float, end_s: float) -> Shares:
    """Return the mean shares of all engines; all "other" where there is none."""
    known = list(spans)
    engines = [lane for lane in lanes_of(known) if is_engine(lane)]
    return mean_shares(shares(known, lane, begin_s, end_s) for lane in engines) if engines else {OTHER: 1.0}


def idle(of: Mapping[str, float]) -> float:
    """Return the share of time spent waiting for others."""
    return sum(of.get(what, 0.0) for what in IDLE)


def reasons(spans: Iterable[Span], lane: str, begin_s: float, end_s: float) -> list[tuple[str, float]]:
    """Return the reasons of a lane's waiting with their shares of all time, the longest first."""
    sums: dict[str, int] = defaultdict(int)
    for what, begin_us, stop_us, why in _within(spans, lane, begin_s, end_s):
        if what in IDLE:
            sums[reason_of(why)] += stop_us - begin_us
    total_us = max(1, round((end_s - begin_s) * 1e6))
    return sorted(((why, sum_us / total_us) for why, sum_us in sums.items()), key=lambda item: -item[1])


def engine_reasons(spans: Iterable[Span], begin_s: float, end_s: float) -> list[tuple[str, float]]:
    """Return the waiting reasons of all engines together."""
    known = list(spans)
    engines = [lane for lane in lanes_of(known) if is_engine(lane)]
    sums: dict[str, float] = defaultdict(float)
    for lane in engines:
        for why, share in reasons(known, lane, begin_s, end_s):
            sums[why] += share / len(engines)
    return sorted(sums.items(), key=lambda item: -item[1])


def waits_for_environments(spans: Iterable[Span], begin_s: float, end_s: float) -> float:
    """Return the share of time in which engines were idle because environments were working."""
    return dict(engine_reasons(spans, begin_s, end_s)).get(ENVIRONMENTS, 0.0)


def in_words(of: Mapping[str, float], held_by: Iterable[tuple[str, float]] = ()) -> str:
    """Describe shares in one line, the largest first.

    Example:
        in_words({"train": 0.7, "wait": 0.25, "other": 0.05}, [("no batch yet", 0.25)])
        # "train 70%, wait 25% (no batch yet), other 5%"
    """
    known = sorted(((share, what) for what, share in of.items() if share >= WORTH_TELLING), reverse=True)
    why = next((why for why, share in held_by if why and share >= WORTH_TELLING), None)
    return ", ".join(f"{what} {share:.0%}" + (f" ({why})" if why and what == "wait" else "") for share, what in known)


def time_lines(spans: Iterable[Span]) -> list[str]:
    """Describe how each side spends its time, with advice; nothing before the first step."""
    known = list(spans)
    begin_s, end_s = steady(known)
    if not any(span.what == "train" for span in known):
        return []
    trainer, engines = shares(known, TRAINER, begin_s, end_s), engine_shares(known, begin_s, end_s)
    if not any(is_engine(span.lane) for span in known):
        return [f"trainer: {in_words(trainer, reasons(known, TRAINER, begin_s, end_s))}"]
    return [
        f"trainer: {in_words(trainer, reasons(known, TRAINER, begin_s, end_s))}",
        f"engines: {in_words(engines, engine_reasons(known, begin_s, end_s))}",
        advice(
            trainer,
            engines,
            few=few_requests(known, begin_s, end_s),
            environments=waits_for_environments(known, begin_s, end_s),
        ),
    ]


def few_requests(spans: Iterable[Span], begin_s: float, end_s: float) -> float:
    """Return the share of time in which engines generated with most of their slots empty; mean of all engines."""
    known = [span for span in spans if is_engine(span.lane)]
    total_us = max(1, round(end_s * 1e6) - round(begin_s * 1e6)) * max(1, len(lanes_of(known)))
    few = (
        stop_us - begin_us
        for lane in lanes_of(known)
        for what, begin_us, stop_us, why in _within(known, lane, begin_s, end_s)
        if what == "generate" and reason_of(why) == FEW
    )
    return sum(few) / total_us


def advice(
    trainer: Mapping[str, float], engines: Mapping[str, float], *, few: float = 0.0, environments: float = 0.0
) -> str:
    """Say which side should get more of the machine.

    Args:
        few: see `few_requests`.
        environments: share of time in which engines wait for environments.
    """
    waits, rests = idle(trainer), idle(engines)
    busy = 1.0 - rests - engines.get(OTHER, 0.0)
    if trainer.get(OTHER, 0.0) > 0.5 or engines.get(OTHER, 0.0) > 0.5:
        return "too little is known of what trainer and engines did to say which side should get more GPUs"
    if (moved := max(trainer.get("transfer", 0.0), engines.get("transfer", 0.0))) > max(waits, rests, 0.2):
        return (
            f"{moved:.0%} of the time goes into moving weights: more GPUs on either side would not change that - look "
            "at `[weight_broadcast]` (its type, deltas), or train on larger batches"
        )
    if max(waits, rests) < NOTICEABLE:
        return f"balanced: the trainer waits {waits:.0%} of the time, the engines {rests:.0%}"
    if waits >= NOTICEABLE and environments > max(rests, waits) / 2:
        return (
            f"the trainer waits {waits:.0%} of the time and the engines {rests:.0%}, most of it for environments: more "
            "GPUs would not help - faster environments, more of their workers (`num_workers`), more rollouts at a time "
            "(`max_concurrent`) or a higher `max_async_level` would"
        )
    if rests < waits / 2 and few > waits / 2:
        return (
            f"the trainer waits {waits:.0%} of the time for batches, and for {few:.0%} the engines have few requests, "
            "the last ones of each batch: more GPUs would not help - a higher `max_async_level`, an "
            "`oversampling_factor` above 1, or answers of more even length would"
        )
    if rests < waits / 2:
        return (
            f"the trainer waits {waits:.0%} of the time for batches while the engines are busy {busy:.0%}: give more "
            "GPUs to inference"
        )
    if waits < rests / 2:
        return (
            f"the engines wait {rests:.0%} of the time while the trainer waits {waits:.0%}: give more GPUs to the "
            "trainer"
        )
    return (
        f"the trainer waits {waits:.0%} of the time and the engines {rests:.0%}: they wait for each other, or both for "
        "environments - more GPUs on one side would not help; a higher `max_async_level`, more rollouts at a time "
        "(`max_concurrent`) or faster environments would"
    )


def thin(spans: Iterable[Span], begin_s: float, end_s: float, most: int) -> list[Span]:
    """Reduce spans to at most `most` that look the same between two times: close spans of a lane are drawn as one.

    Each lane gets its part of `most`. Shares stay exact within every slot of the picture.
    """
    shown = [span for span in joined(spans) if span.begin_s < end_s and span.end_s > begin_s]
    if len(shown) <= most:
        return shown
    lanes = lanes_of(shown)
    num_slots = max(1, most // (len(lanes) * (len(WHATS) + 1)))
    slot_s = (end_s - begin_s) / num_slots
    by_slot: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in shown:
        for piece, slot in _cut(span, begin_s, slot_s, num_slots):
            by_slot[span.lane, slot].append(piece)
    return joined(piece for pieces in by_slot.values() for piece in _one_of_each(pieces))


def _cut(span: Span, begin_s: float, slot_s: float, num_slots: int) -> Iterable[tuple[Span, int]]:
    first = max(0, int((span.begin_s - begin_s) / slot_s))
    last = min(num_slots - 1, int((span.end_s - begin_s) / slot_s))
    for slot in range(first, last + 1):
        lower = max(span.begin_s, begin_s + slot * slot_s)
        upper = min(span.end_s, begin_s + (slot + 1) * slot_s)
        if upper > lower:
            yield Span(span.lane, span.what, lower, upper - lower, span.step, span.why), slot


def _one_of_each(pieces: list[Span]) -> Iterable[Span]:
    """Sum the spans of a slot by activity, in order of first appearance, each with the text of its longest."""
    by_what: dict[str, list[Span]] = defaultdict(list)
    for piece in pieces:
        by_what[piece.what].append(piece)
    begin_s = pieces[0].begin_s
    for what, same in by_what.items():
        longest = max(same, key=lambda piece: piece.seconds)
        seconds = sum(piece.seconds for piece in same)
        begin_s = same[0].begin_s if len(pieces) == 1 else begin_s
        yield Span(longest.lane, what, begin_s, seconds, longest.step, longest.why)
        begin_s += seconds
