"""The example of each group and the outcome of those that ended, recomputed from group 0 on.

Difficulty pools and the curriculum depend on results. The journal tells their order: groups below `State.next_group` of
a batch were taken before that batch was closed, and `BatchRecord.outcomes` are the results that it closed with.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from trireme.algo.data.curriculum import Place
from trireme.algo.data.difficulty import Scores
from trireme.algo.data.order import Cursor, DataOrder
from trireme.algo.filters import FLAWS
from trireme.algo.rules import Rules
from trireme.journal.records import BatchRecord, OpenGroup
from trireme.journal.targets import by_group, outcome_of
from trireme.tools.audit.report import Findings, shown, some

CAME_TO_THEIR_END = ("no signal", "little signal", *FLAWS)
"""Kinds of reasons for which a group was dropped whose rewards were all there, and counted."""


class OrderAudit:
    """Walk the groups in the order of their numbers. Needs the sizes of the data sets from the journal."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._sizes: dict[str, int] | None = None  # None before the first entry; empty where they are unusable
        self._order = DataOrder({})
        self._is_lost = False  # a batch is missing, and what was learnt with it decides what came next

    @property
    def epochs(self) -> tuple[int, int] | None:
        """Return the lowest and the highest epoch of the environments; None where the order is unknown."""
        epochs = [cursor.epoch for cursor in self._order.cursors.values()] or [0]
        return (min(epochs), max(epochs)) if self._sizes else None

    def begin(self, record: BatchRecord, rules: Rules, *, after_gap: bool) -> None:
        """Take the sizes of the data sets from the first entry. They may never change."""
        step, sizes = record.step, record.state.sizes
        add = partial(self._findings.add, "order", step)
        if self._sizes is None:
            self._sizes = sizes
            if sizes.keys() != rules.weights.keys() or not all(size > 0 for size in sizes.values()):
                self._sizes = {}
                add(
                    f"batch {step}: the journal gives the sizes of the training sets as {_sized(sizes)}",
                    expected=f"one size above 0 for each of {', '.join(sorted(rules.weights))}",
                    meaning="Which examples should have come cannot be worked out; that part is left out.",
                )
            self._order = DataOrder(self._sizes)
        elif self._sizes and sizes != self._sizes:
            add(
                f"batch {step}: the environments have {_sized(sizes)} training examples",
                expected=f"{_sized(self._sizes)}, as in the batches before",
                meaning="The data set changed while the run went on, so positions in it mean other examples. Look at "
                "the environments' `args` and data.",
            )
        self._is_lost = after_gap and (rules.pools is not None or len(rules.curriculum) > 0)

    def task(self, group: int, rules: Rules) -> OpenGroup | None:
        """Return the example that a group must have. Call it once for each group, in order."""
        if not self._sizes or self._is_lost:
            return None
        name, example = self._order.take(group, rules)
        return OpenGroup(id=group, env=name, example=example)

    def close(self, record: BatchRecord, rules: Rules) -> None:
        """Compare the position in the data, then the difficulty scores and the stage after the batch."""
        step, state, sizes = record.step, record.state, self._order.sizes
        add = partial(self._findings.add, "order", step)
        if not self._sizes:
            return
        if self._is_lost:  # continue from the journal's own state, with nothing left to compare
            known = {name: scores for name, scores in state.scores.items() if _fit(scores, sizes.get(name, 0))}
            self._order.resume_from(state.cursors, known, Place(state.stage, state.stage_reward))
            return
        if state.cursors != self._order.cursors:
            add(
                f"batch {step}: the journal's place in the data is {_placed(state.cursors)}",
                expected=f"{_placed(self._order.cursors)} after {state.next_group} groups",
                meaning="A run that resumes from here would skip examples, or hand them out again. Look at "
                "`state.cursors` of this batch.",
            )
        outcomes = [
            one for one in record.outcomes if 0 <= one.example < sizes.get(one.env, 0) and math.isfinite(one.mean)
        ]
        self._order.close_batch(outcomes, rules, next_step=step + 1)
        for name in sorted(state.scores.keys() | self._order.scores.keys()):
            scores = state.scores.get(name)
            given, right = _by_example(scores), _by_example(self._order.scores.get(name))
            wrong = next((n for n in sorted(given.keys() | right.keys()) if given.get(n) != right.get(n)), None)
            is_in_order = scores is None or (
                len(scores.examples) == len(scores.means) and bool((np.diff(scores.examples) > 0).all())
            )
            if wrong is not None or not is_in_order:
                example = wrong or 0
                add(
                    f"batch {step}: the journal's score of {name} example {example} is {shown(given.get(example))}",
                    expected=f"{shown(right.get(example))}, by its groups up to this batch, and the examples in order",
                    meaning="A run that resumes from here would take an easy example for a hard one, or the other way "
                    "round. Look at `state.scores` of this batch.",
                )
                break
        found, due = Place(state.stage, state.stage_reward), self._order.place
        if found != due:
            add(
                f"batch {step}: the journal is in stage {found.stage} of the curriculum, at a mean reward of "
                f"{shown(found.reward)}",
                expected=f"stage {due.stage}, at {shown(due.reward)}, by the groups that ended",
                meaning="A run that resumes from here would draw from other environments. Look at `state.stage` and "
                "`state.stage_reward` of this batch.",
            )


def _fit(scores: Scores, size: int) -> bool:
    """Return whether scores are of examples of a data set of this size, one for each."""
    examples = scores.examples
    return len(examples) == len(scores.means) and bool(np.all((examples >= 0) & (examples < size)))


def _by_example(scores: Scores | None) -> dict[int, float]:
    return dict(zip(scores.examples.tolist(), scores.means.tolist(), strict=False)) if scores else {}


def _sized(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sorted(sizes.items())) or "none"


def _placed(cursors: dict[str, Cursor]) -> str:
    placed = (f"{name} epoch {at.epoch} position {at.position}" for name, at in sorted(cursors.items()))
    return ", ".join(placed) or "nowhere"


def check_outcomes(record: BatchRecord, rules: Rules, findings: Findings) -> None:
    """Check that each group that was trained, or dropped with all its rewards there, has one outcome.

    Outcomes drive difficulty pools and the curriculum.
    """
    if rules.filters is None:  # written before outcomes were
        return
    step, add = record.step, partial(findings.add, "outcomes", record.step)
    trained = {number: outcome_of(group) for number, group in by_group(record.rollouts).items()}
    dropped = {one.group: one for one in record.dropped if one.reason.partition(":")[0] in CAME_TO_THEIR_END}
    listed = [outcome.group for outcome in record.outcomes]
    due = sorted(trained.keys() | dropped.keys())
    if listed != due:
        add(
            f"batch {step} says how groups {some(listed) or 'none'} did",
            expected=f"groups {some(due)}, each once: trained, or dropped when their rewards were in",
            meaning="The difficulty of examples, or the stage of the curriculum, was judged by other groups. Look at "
            "`outcomes` of this batch.",
        )
        return
    for outcome in record.outcomes:
        if (right := trained.get(outcome.group)) is not None:
            agrees = outcome == right
            expected = f"{right.env} example {right.example}, with {right.mean:.9g}, by its rollouts"
        else:  # the rewards of a group that was dropped are kept nowhere else
            gone = dropped[outcome.group]
            agrees = (outcome.env, outcome.example) == (gone.env, gone.example)
            expected = f"{gone.env} example {gone.example}, by those of it that were dropped"
        if not agrees:
            add(
                f"batch {step}: by its outcome, group {outcome.group} is {outcome.env} example {outcome.example}, with "
                f"a mean reward of {outcome.mean:.9g}",
                expected=expected,
                meaning="An example was judged by rewards that were not its own. Compare `outcomes` of this batch with "
                "the rollouts.",
            )
            return
