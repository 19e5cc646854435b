"""Analysis of a run's timeline: shares of time, causes of waiting, and which side should get more GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping

from trireme.monitor.spans import ENGINE, ENVIRONMENTS, FEW, ORCHESTRATOR, TRAINER, Span, reason_of

OTHER = "other"
IDLE = ("wait", "idle")
WHATS = ("start", "generate", "train", "wait", "transfer", "evaluate", "save", "journal", "idle", OTHER)
"""Lanes in the order in which they are shown."""

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

    If no step has begun, return everything there is; (0, 0) for no spans.
    """
    known = list(spans)
    if not known:
        return 0.0, 0.0

    # Start-up and the end of the run are not typical. A restarted trainer begins again with "start".
    trainer = [span for span in known if span.lane == TRAINER]
    up_s = max((span.end_s for span in trainer if span.what == "start"), default=0.0)
    since_up = [span for span in trainer if span.begin_s >= up_s - TOUCH_S]
    steps = [span.begin_s for span in since_up if span.what == "train"]
    ends = [span.begin_s for span in since_up if span.what == "idle"]

    last_s = max(span.end_s for span in known)
    return min(steps or [span.begin_s for span in known]), min(ends, default=last_s)


def shares(spans: Iterable[Span], lane: str, begin_s: float, end_s: float) -> Shares:
    """Return the shares of a lane's time, which add up to 1; "other" is unaccounted time.

    Args:
        lane: its name, or `ENGINE` for the mean of all engines.
    """
    sums: dict[str, float] = defaultdict(float)
    for (what, _), share in _spent(spans, lane, begin_s, end_s).items():
        sums[what] += share
    ordered = {what: sums[what] for what in sorted(sums, key=lambda what: WHATS.index(what) if what in WHATS else 99)}
    return ordered | {OTHER: max(0.0, round(1.0 - sum(ordered.values()), 9))}


def reasons(
    spans: Iterable[Span], lane: str, begin_s: float, end_s: float, *, whats: Container[str] = IDLE
) -> list[tuple[str, float]]:
    """Return the reasons of a lane's waiting, or of other activities, with their shares of all time, longest first.

    Args:
        lane: see `shares`.
    """
    sums: dict[str, float] = defaultdict(float)
    for (what, why), share in _spent(spans, lane, begin_s, end_s).items():
        if what in whats:
            sums[why] += share
    return sorted(sums.items(), key=lambda item: -item[1])


def _spent(spans: Iterable[Span], lane: str, begin_s: float, end_s: float) -> dict[tuple[str, str], float]:
    """Return shares of the time by activity and reason. If spans of a lane overlap, the time counts once."""
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.lane == lane or (lane == ENGINE and is_engine(span.lane)):
            lanes[span.lane].append(span)

    # Integer microseconds, as the spans were measured: shares then add up to 1.
    first_us, last_us = round(begin_s * 1e6), round(end_s * 1e6)
    sums_us: dict[tuple[str, str], int] = defaultdict(int)

    # `reached_us` is the end of what was counted, so that time of two spans is not counted twice.
    for of_lane in lanes.values():
        reached_us = first_us
        for span in sorted(of_lane, key=lambda span: span.begin_s):
            begin_us, stop_us = max(round(span.begin_s * 1e6), reached_us), min(round(span.end_s * 1e6), last_us)
            if stop_us > begin_us:
                sums_us[span.what, reason_of(span.why)] += stop_us - begin_us
                reached_us = stop_us

    return {spent: sum_us / (last_us - first_us) / len(lanes) for spent, sum_us in sums_us.items()}


def idle(of: Mapping[str, float]) -> float:
    """Return the share of time spent waiting for others."""
    return sum(of.get(what, 0.0) for what in IDLE)


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
    has_engines = any(is_engine(span.lane) for span in known)
    lines = [
        f"{name}: {in_words(shares(known, lane, begin_s, end_s), reasons(known, lane, begin_s, end_s))}"
        for name, lane in (("trainer", TRAINER), ("engines", ENGINE))[: 1 + has_engines]
    ]
    return [*lines, advice_for(known, begin_s, end_s)] if has_engines else lines


def advice_for(spans: Iterable[Span], begin_s: float, end_s: float) -> str:
    """Say which side should get more of the machine, by what both did between two times."""
    known = list(spans)
    trainer, engines = (shares(known, lane, begin_s, end_s) for lane in (TRAINER, ENGINE))
    few = dict(reasons(known, ENGINE, begin_s, end_s, whats=("generate",))).get(FEW, 0.0)
    environments = dict(reasons(known, ENGINE, begin_s, end_s)).get(ENVIRONMENTS, 0.0)
    return advice(trainer, engines, few=few, environments=environments)


def advice(
    trainer: Mapping[str, float], engines: Mapping[str, float], *, few: float = 0.0, environments: float = 0.0
) -> str:
    """Say which side should get more of the machine.

    Args:
        few: share of time in which engines generate with most of their slots empty.
        environments: share of time in which engines wait for environments.
    """
    waits, rests = idle(trainer), idle(engines)
    busy = 1.0 - rests - engines.get(OTHER, 0.0)

    # Shares mean little if more than half of a side's time is unaccounted for.
    if trainer.get(OTHER, 0.0) > 0.5 or engines.get(OTHER, 0.0) > 0.5:
        return "too little is known of what trainer and engines did to say which side should get more GPUs"

    # Neither side can use more GPUs while weights move, so this comes before their waits.
    if (moved := max(trainer.get("transfer", 0.0), engines.get("transfer", 0.0))) > max(waits, rests, 0.2):
        return (
            f"{moved:.0%} of the time goes into moving weights: more GPUs on either side would not change that - look "
            "at `[weight_broadcast]` (its type, deltas), or train on larger batches"
        )

    if max(waits, rests) < NOTICEABLE:
        return f"balanced: the trainer waits {waits:.0%} of the time, the engines {rests:.0%}"

    # The trainer waits for engines that themselves wait for environments: look behind the engines.
    if waits >= NOTICEABLE and environments > max(rests, waits) / 2:
        return (
            f"the trainer waits {waits:.0%} of the time and the engines {rests:.0%}, most of it for environments: more "
            "GPUs would not help - faster environments, more of their workers (`num_workers`), more rollouts at a time "
            "(`max_concurrent`) or a higher `max_async_level` would"
        )

    # Engines with few requests count as busy, but more of them would have even fewer.
    if rests < waits / 2 and few > waits / 2:
        return (
            f"the trainer waits {waits:.0%} of the time for batches, and for {few:.0%} the engines have few requests, "
            "the last ones of each batch: more GPUs would not help - a higher `oversampling_factor` or "
            "`max_async_level`, or answers of more even length would"
        )

    # Only one side waits: the other one is the bottleneck.
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

    # Each slot holds at most one span per activity and lane, so their number follows from `most`.
    lanes = lanes_of(shown)
    num_slots = max(1, most // (len(lanes) * (len(WHATS) + 1)))
    slot_s = (end_s - begin_s) / num_slots

    # Cut spans at the borders of slots, so that each slot keeps its exact sums.
    by_slot: dict[tuple[str, int], dict[str, list[Span]]] = defaultdict(dict)
    for span in shown:
        first = max(0, int((span.begin_s - begin_s) / slot_s))
        last = min(num_slots - 1, int((span.end_s - begin_s) / slot_s))
        for slot in range(first, last + 1):
            lower = max(span.begin_s, begin_s + slot * slot_s)
            upper = min(span.end_s, begin_s + (slot + 1) * slot_s)
            if upper > lower:
                piece = Span(span.lane, span.what, lower, upper - lower, span.step, span.why)
                by_slot[span.lane, slot].setdefault(span.what, []).append(piece)

    # Within a slot, draw one span per activity, in order of first appearance.
    drawn = []
    for by_what in by_slot.values():
        at_s = next(iter(by_what.values()))[0].begin_s
        for what, same in by_what.items():
            longest, seconds = max(same, key=lambda piece: piece.seconds), sum(piece.seconds for piece in same)
            drawn.append(Span(longest.lane, what, at_s, seconds, longest.step, longest.why))
            at_s += seconds
    return joined(drawn)
