"""The example of each group and the outcome of those that ended, recomputed from group 0 on.

Difficulty pools and the curriculum depend on results. The journal tells their order: groups below `State.next_group` of
a batch were taken before that batch was closed, and `BatchRecord.outcomes` are the results that it closed with.
"""

from __future__ import annotations

import math

import numpy as np

from trireme.algo.data.curriculum import Place
from trireme.algo.data.difficulty import Outcome, Scores
from trireme.algo.data.order import DataOrder
from trireme.algo.filters import FLAWS
from trireme.algo.rules import Rules
from trireme.journal.records import BatchRecord, OpenGroup
from trireme.journal.targets import by_group, outcome_of
from trireme.tools.audit.report import Report

CAME_TO_THEIR_END = ("no signal", "little signal", *FLAWS)
"""Kinds of reasons for which a group was dropped whose rewards were all there, and counted."""


class OrderAudit:
    """Walk the groups in the order of their numbers. Needs the sizes of the data sets from the journal."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._sizes: dict[str, int] | None = None  # None before the first entry; empty if they are unusable
        self._order = DataOrder({})
        self._is_lost = False  # a batch is missing, and what was learnt with it decides what came next

    def begin(self, record: BatchRecord, rules: Rules, *, after_gap: bool) -> None:
        """Take the sizes of the data sets from the first entry. They may never change."""

        step, sizes = record.step, record.state.sizes
        if self._sizes is None:
            self._sizes = sizes
            if sizes.keys() != rules.weights.keys() or not all(size > 0 for size in sizes.values()):
                self._sizes = {}
                self._report.add(
                    "order",
                    step,
                    f"batch {step}: the journal gives the sizes of the training sets as {sizes or 'nothing'}",
                    expected=f"one size above 0 for each of {', '.join(sorted(rules.weights))}",
                    advice="Which examples should have come cannot be worked out; that part is left out.",
                )
            self._order = DataOrder(self._sizes)

        elif self._sizes:
            self._report.compare(
                "order",
                step,
                {"state.sizes": (sizes, self._sizes)},
                by="as in the batches before",
                advice="The data set changed, so places in it mean other examples. Look at the environments' `args`.",
            )
        # a missing batch hides results, on which pools and the curriculum depend
        self._is_lost = after_gap and (rules.pools is not None or len(rules.curriculum) > 0)

    def task(self, group: int, rules: Rules) -> OpenGroup | None:
        """Return the example that a group must have. Call it once for each group, in order."""
        if not self._sizes or self._is_lost:
            return None
        name, example = self._order.take(group, rules)
        return OpenGroup(id=group, env=name, example=example)

    def close(self, record: BatchRecord, rules: Rules) -> None:
        """Compare the position in the data, the difficulty scores and the stage after the batch."""
        state, sizes = record.state, self._order.sizes

        if not self._sizes:
            return
        if self._is_lost:  # continue from the journal's own state, with nothing left to compare
            known = {name: scores for name, scores in state.scores.items() if _fit(scores, sizes.get(name, 0))}
            self._order.resume_from(state.cursors, known, Place(state.stage, state.stage_reward))
            return
        # a damaged outcome must not end the audit: it is reported by `check_outcomes`
        outcomes = [
            one for one in record.outcomes if 0 <= one.example < sizes.get(one.env, 0) and math.isfinite(one.mean)
        ]
        self._order.close_batch(outcomes, rules, next_step=record.step + 1)
        self._report.compare(
            "order",
            record.step,
            {
                "state.cursors": (state.cursors, self._order.cursors),
                "state.scores": (state.scores, self._order.scores),
                "state.stage": (state.stage, self._order.place.stage),
                "state.stage_reward": (state.stage_reward, self._order.place.reward),
            },
            by=f"by the data order after {state.next_group} groups, and the outcomes of those that ended",
        )


def _fit(scores: Scores, size: int) -> bool:
    """Return whether scores are of examples of a data set of this size, one for each."""
    examples = scores.examples
    return len(examples) == len(scores.means) and bool(np.all((examples >= 0) & (examples < size)))


def check_outcomes(record: BatchRecord, rules: Rules, report: Report) -> None:
    """Check that each group that was trained, or dropped with all its rewards there, has one outcome.

    Outcomes drive difficulty pools and the curriculum.
    """
    if rules.filters is None:  # written before outcomes were
        return

    groups = by_group(record.rollouts)
    dropped = {one.group: one for one in record.dropped if one.reason.partition(":")[0] in CAME_TO_THEIR_END}
    means = {outcome.group: outcome.mean for outcome in record.outcomes}
    due = {group: outcome_of(rollouts) for group, rollouts in groups.items()}
    for group, one in dropped.items():  # its rewards are kept nowhere else
        due.setdefault(group, Outcome(group, one.env, one.example, means.get(group, math.nan)))
    # outcomes are written in the order of groups
    report.compare(
        "outcomes",
        record.step,
        {"outcomes": (record.outcomes, [due[group] for group in sorted(due)])},
        by="by the groups that were trained, or dropped when their rewards were in, in order",
    )
