"""Where the time of a run went, from its lanes; of a run without them, from what its trainer measured of each step."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.monitor import timeline as lanes
from trireme.tools.report.facts import Facts
from trireme.tools.report.page import Block, Section, Table, Words
from trireme.tools.report.plots import LEAST_SHARE, share_words, shares_figure

MEASURED = {
    "time/forward_backward": "train",
    "time/optimizer": "train",
    "time/wait_for_batch": "wait",
    "time/publish": "transfer",
    "time/confirm": "transfer",
    "time/checkpoint": "save",
}
MOST_REASONS = 3
TITLE = "Where the time went"


def hours_section(facts: Facts) -> Section | None:
    """None where nothing was measured."""
    blocks = list(_of_lanes(facts) if facts.spans else _of_trainer(facts))
    return Section(TITLE, blocks) if blocks else None


def _of_lanes(facts: Facts) -> Iterator[Block]:
    begin_s, end_s = lanes.steady(facts.spans)
    if end_s <= begin_s:
        return
    shares = {lane: lanes.shares(facts.spans, lane, begin_s, end_s) for lane in lanes.lanes_of(facts.spans)}
    trainer = shares.get(lanes.TRAINER, {lanes.OTHER: 1.0})
    few = lanes.few_requests(facts.spans, begin_s, end_s)
    slow = lanes.waits_for_environments(facts.spans, begin_s, end_s)
    advice = lanes.advice(trainer, lanes.engine_shares(facts.spans, begin_s, end_s), few=few, environments=slow)
    yield Words(f"Over {end_s - begin_s:,.0f} s, from the first step to the last: {advice}.")
    yield shares_figure("time", "What each process did", shares)
    rows = [
        (lane, f"{share:.0%}", why)
        for lane in shares
        for why, share in lanes.reasons(facts.spans, lane, begin_s, end_s)[:MOST_REASONS]
        if share >= LEAST_SHARE
    ]
    if rows:
        yield Table(rows, head=("who waited", "of the time", "for what"))


def _of_trainer(facts: Facts) -> Iterator[Block]:
    total_s = sum(value for _, value in facts.points("time/step"))
    if not total_s > 0:
        return
    shares: dict[str, float] = {}
    for name, what in MEASURED.items():
        seconds = sum(value for _, value in facts.points(name, "trainer"))
        shares[what] = shares.get(what, 0.0) + seconds / total_s
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    yield Words(
        f"The run wrote down no lanes, only what its trainer did in {total_s:,.0f} s of steps: {share_words(shares)}. "
        "What the engines did meanwhile is not known."
    )
    yield shares_figure("time", "What the trainer did", {"trainer": shares})
