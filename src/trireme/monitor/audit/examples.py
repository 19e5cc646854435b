"""Which example each group had to be: the data order from group 0 on, worked out again from its definition."""

from __future__ import annotations

import numpy as np

from trireme.algo.order import environment_of, example_order, names_and_shares
from trireme.ledger.records import BatchRecord, Cursor, OpenGroup
from trireme.ledger.rules import Rules
from trireme.monitor.audit.findings import Findings

Which = tuple[int, int, int, int, bool]
"""What `example_order` is asked for."""


class DataOrder:
    """Walks the groups in the order of their numbers. Knows nothing where the journal does not tell the sizes."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._sizes: dict[str, int] | None = None  # None before the first entry; empty where they are unusable
        self._cursors: dict[str, Cursor] = {}
        self._orders: dict[str, tuple[Which, np.ndarray]] = {}  # of the epoch that each environment is in

    def begin(self, record: BatchRecord, rules: Rules) -> None:
        """Takes the sizes from the first entry; they may never change."""
        step, sizes = record.step, record.state.sizes
        if self._sizes is None:
            self._sizes = sizes if self._are_usable(step, sizes, rules) else {}
            self._cursors = {name: Cursor() for name in sorted(self._sizes)}
        elif self._sizes and sizes != self._sizes:
            self._findings.add(
                "order",
                step,
                f"batch {step}: the environments have {_sized(sizes)} training examples",
                expected=f"{_sized(self._sizes)}, as in the batches before",
                meaning="The data set changed while the run went on, so positions in it mean other examples. Look at "
                "the environments' `args` and data.",
            )

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
        """What group `group` is; to be asked once for each, in order."""
        if not self._sizes:
            return None
        names, shares = names_and_shares(rules.weights)
        place = environment_of(group, rules.seed, shares)
        name = names[place]
        cursor = self._cursors[name]
        if cursor.position >= self._sizes[name]:
            cursor.epoch, cursor.position = cursor.epoch + 1, 0
        order = self._order(name, (rules.seed, place, cursor.epoch, self._sizes[name], rules.shuffle))
        example = int(order[cursor.position])
        cursor.position += 1
        return OpenGroup(id=group, env=name, example=example)

    def _order(self, name: str, which: Which) -> np.ndarray:
        if name not in self._orders or self._orders[name][0] != which:
            self._orders[name] = which, example_order(*which)
        return self._orders[name][1]

    def compare_cursors(self, record: BatchRecord) -> None:
        if not self._sizes or record.state.cursors == self._cursors:
            return
        self._findings.add(
            "order",
            record.step,
            f"batch {record.step}: the journal's place in the data is {_placed(record.state.cursors)}",
            expected=f"{_placed(self._cursors)} after {record.state.next_group} groups",
            meaning="A run that goes on from here would skip examples, or hand them out again. Look at `state.cursors` "
            "of this batch.",
        )

    @property
    def epochs(self) -> tuple[int, int]:
        """The lowest and the highest that an environment is in."""
        epochs = [cursor.epoch for cursor in self._cursors.values()] or [0]
        return min(epochs), max(epochs)


def _sized(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sorted(sizes.items())) or "none"


def _placed(cursors: dict[str, Cursor]) -> str:
    placed = (f"{name} epoch {at.epoch} position {at.position}" for name, at in sorted(cursors.items()))
    return ", ".join(placed) or "nowhere"
