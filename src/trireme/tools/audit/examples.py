"""The example of each group, recomputed from the definition of the data order, from group 0 on.

Difficulty pools and the curriculum depend on results. The journal tells their order: groups below `State.next_group` of
a batch were taken before that batch was closed, and `BatchRecord.outcomes` are the results that it closed with.
"""

from __future__ import annotations

import math

import numpy as np

from trireme.algo.curriculum import Place
from trireme.algo.difficulty import Outcome, Scores
from trireme.algo.order import Cursor, DataOrder
from trireme.algo.rules import Rules
from trireme.journal.records import BatchRecord, OpenGroup, State
from trireme.tools.audit.findings import Findings


class OrderAudit:
    """Walk the groups in the order of their numbers. Needs the sizes of the data sets from the journal."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._sizes: dict[str, int] | None = None  # None before the first entry; empty where they are unusable
        self._order = DataOrder({})
        self._is_lost = False  # a batch is missing, and what was learnt with it decides what came next

    def begin(self, record: BatchRecord, rules: Rules, *, after_gap: bool) -> None:
        """Take the sizes of the data sets from the first entry. They may never change."""
        step, sizes = record.step, record.state.sizes
        if self._sizes is None:
            self._sizes = sizes if self._are_usable(step, sizes, rules) else {}
            self._order = DataOrder(self._sizes)
        elif self._sizes and sizes != self._sizes:
            self._findings.add(
                "order",
                step,
                f"batch {step}: the environments have {_sized(sizes)} training examples",
                expected=f"{_sized(self._sizes)}, as in the batches before",
                meaning="The data set changed while the run went on, so positions in it mean other examples. Look at "
                "the environments' `args` and data.",
            )
        self._is_lost = after_gap and (rules.pools is not None or len(rules.curriculum) > 0)

    def _are_usable(self, step: int, sizes: dict[str, int], rules: Rules) -> bool:
        if sizes.keys() == rules.weights.keys() and all(size > 0 for size in sizes.values()):
            return True
        self._findings.add(
            "order",
            step,
            f"batch {step}: the journal gives the sizes of the training sets as {_sized(sizes)}",
            expected=f"one size above 0 for each of {', '.join(sorted(rules.weights))}",
            meaning="Which examples should have come cannot be worked out; that part is left out.",
        )
        return False

    @property
    def is_known(self) -> bool:
        return bool(self._sizes)

    def task(self, group: int, rules: Rules) -> OpenGroup | None:
        """Return the example that a group must have. Call it once for each group, in order."""
        if not self._sizes or self._is_lost:
            return None
        name, example = self._order.take(group, rules)
        return OpenGroup(id=group, env=name, example=example)

    def close(self, record: BatchRecord, rules: Rules) -> None:
        """Compare the position in the data, then the difficulty scores and the stage after the batch."""
        if not self._sizes:
            return
        if self._is_lost:
            self._go_on_from(record.state)
            return
        self._compare_cursors(record)
        outcomes = [outcome for outcome in record.outcomes if self._is_of_an_example(outcome)]
        self._order.close_batch(outcomes, rules, next_step=record.step + 1)
        self._compare_scores(record)
        self._compare_stage(record)

    def _is_of_an_example(self, outcome: Outcome) -> bool:
        return 0 <= outcome.example < self._order.sizes.get(outcome.env, 0) and math.isfinite(outcome.mean)

    def _go_on_from(self, state: State) -> None:
        """Continue from the journal's own state after a gap, with nothing left to compare."""
        known = {name: scores for name, scores in state.scores.items() if self._fit(name, scores)}
        self._order.resume_from(state.cursors, known, Place(state.stage, state.stage_reward))

    def _fit(self, name: str, scores: Scores) -> bool:
        examples = scores.examples
        return len(examples) == len(scores.means) and bool(
            np.all((examples >= 0) & (examples < self._order.sizes.get(name, 0)))
        )

    def _compare_cursors(self, record: BatchRecord) -> None:
        if record.state.cursors == self._order.cursors:
            return
        self._findings.add(
            "order",
            record.step,
            f"batch {record.step}: the journal's place in the data is {_placed(record.state.cursors)}",
            expected=f"{_placed(self._order.cursors)} after {record.state.next_group} groups",
            meaning="A run that goes on from here would skip examples, or hand them out again. Look at `state.cursors` "
            "of this batch.",
        )

    def _compare_scores(self, record: BatchRecord) -> None:
        found, due = record.state.scores, self._order.scores
        for name in sorted(found.keys() | due.keys()):
            one, other = _by_example(found.get(name)), _by_example(due.get(name))
            wrong = next((n for n in sorted(one.keys() | other.keys()) if one.get(n) != other.get(n)), None)
            if wrong is None and _is_in_order(found.get(name)):
                continue
            example = 0 if wrong is None else wrong
            self._findings.add(
                "order",
                record.step,
                f"batch {record.step}: the journal's score of {name} example {example} is {_shown(one.get(example))}",
                expected=f"{_shown(other.get(example))}, by its groups up to this batch, and the examples in order",
                meaning="A run that goes on from here would take an easy example for a hard one, or the other way "
                "round. Look at `state.scores` of this batch.",
            )
            return

    def _compare_stage(self, record: BatchRecord) -> None:
        found, due = Place(record.state.stage, record.state.stage_reward), self._order.place
        if found == due:
            return
        self._findings.add(
            "order",
            record.step,
            f"batch {record.step}: the journal is in stage {found.stage} of the curriculum, at a mean reward of "
            f"{_shown(found.reward)}",
            expected=f"stage {due.stage}, at {_shown(due.reward)}, by the groups that ended",
            meaning="A run that goes on from here would draw from other environments. Look at `state.stage` and "
            "`state.stage_reward` of this batch.",
        )

    @property
    def epochs(self) -> tuple[int, int]:
        """Return the lowest and the highest epoch of the environments."""
        epochs = [cursor.epoch for cursor in self._order.cursors.values()] or [0]
        return min(epochs), max(epochs)


def _by_example(scores: Scores | None) -> dict[int, float]:
    return dict(zip(scores.examples.tolist(), scores.means.tolist(), strict=False)) if scores else {}


def _is_in_order(scores: Scores | None) -> bool:
    """Return whether there is one mean for each example, in ascending order."""
    if scores is None:
        return True
    return len(scores.examples) == len(scores.means) and bool((np.diff(scores.examples) > 0).all())


def _sized(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sorted(sizes.items())) or "none"


def _placed(cursors: dict[str, Cursor]) -> str:
    placed = (f"{name} epoch {at.epoch} position {at.position}" for name, at in sorted(cursors.items()))
    return ", ".join(placed) or "nowhere"


def _shown(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.9g}"
