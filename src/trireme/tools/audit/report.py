"""The report of an audit: counts, and contradictions in three parts, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trireme.base.safe_text import clean
from trireme.tools.record_differences import counted, first_difference, shown, some

KEPT_PER_AREA = 200
"""Contradictions of each area that are kept; the rest are counted. Areas report in the order of steps."""

MOST_SHOWN = 5
"""Contradictions, and notes, in the text."""

AREAS = {
    "journal": "What it held is lost, or was damaged after it was written, by the disk or by hand.",
    "fates": "A rollout was lost or counted twice, or will be by a run that resumes from here.",
    "order": "An example came out of turn, or will in a run that resumes from here.",
    "tokens": "The step was not trained on what was sampled, or not towards what its rewards say.",
    "turns": "The step was not trained on what the agent program was answered, or a turn was lost.",
    "outcomes": "Examples, or a stage of the curriculum, were judged by rewards that were not theirs.",
    "versions": "Tokens are by weights that are not known.",
    "checkpoints": "It cannot be resumed from as it was saved.",
    "metrics": "What was shown of the run is not what it did: a line was lost (a full disk), or the file was changed.",
}
"""The meaning of a contradiction in each area. Within a step the likelier cause comes first."""

PROMISES = (
    "every rollout has one fate, and every group is the example that the data order says",
    "every trained token is by a confirmed version and as old as allowed; advantages follow from rewards",
    "versions, checkpoints and metrics agree with the journal",
)


@dataclass(frozen=True)
class Contradiction:
    """Two things on disk that cannot both be true of one run.

    Example:
        Contradiction(area="fates", step=12, found="batch 12: group 40, place 3 has no fate", expected="one fate ...",
                      meaning="A rollout was lost. Look at journal/batch_000012.msgpack")
    """

    area: str
    step: int  # batch or version
    found: str  # with its values
    expected: str
    meaning: str  # and what to look at

    def __str__(self) -> str:
        return f"{self.found}\n  expected: {self.expected}\n  {self.meaning}"


@dataclass
class Summary:
    """Counts of what the run folder has."""

    batches: int = 0
    trained: int = 0  # rollouts
    dropped: int = 0
    dropped_for: dict[str, int] = field(default_factory=dict)
    open_groups: int = 0
    groups: int = 0  # begun
    trained_tokens: int = 0
    lag: tuple[int, int] | None = None  # lowest and highest, in versions
    turns: dict[str, int] = field(default_factory=dict)  # turns of agent programs, by what became of them
    versions_used: int = 0
    versions_confirmed: int = 0
    checkpoints: list[int] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)
    began_from: str = ""  # another run

    def lines(self) -> list[str]:
        often = sorted(self.dropped_for.items(), key=lambda item: (-item[1], item[0]))
        reasons = some([f"{reason} {count:,}" for reason, count in often], 5)

        lag = f", lag {self.lag[0]} to {self.lag[1]}, of {counted(self.versions_used, 'version')}" if self.lag else ""
        newest = f", the newest of version {self.checkpoints[-1]}" if self.checkpoints else ""
        lines = [
            f"{counted(self.batches, 'batch', 'batches')}, {counted(self.trained, 'rollout')} trained, "
            f"{self.dropped:,} dropped{f' ({reasons})' if often else ''}, {counted(self.open_groups, 'group')} open",
            f"{counted(self.groups, 'group')} begun",
            f"{counted(self.trained_tokens, 'trained token')}{lag}; "
            f"{counted(self.versions_confirmed, 'version')} confirmed by digest",
            f"{counted(len(self.checkpoints), 'checkpoint')}{newest}",
        ]
        # only runs with agent programs have turns
        if total := sum(self.turns.values()):
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in self.turns.items() if number)
            lines.insert(3, f"{counted(total, 'turn')} of agent programs on disk: {kinds}")
        if self.began_from:
            lines.append(f"began from {self.began_from}")
        if self.set_aside:
            lines.append(f"ways not taken, set aside: {some(self.set_aside, 3)}")
        return lines


class Report:
    """The outcome of an audit: counts, contradictions, and notes on what is unusual but no contradiction."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.summary = Summary()
        self.notes: list[str] = []
        self._kept: list[Contradiction] = []
        self._counts: Counter[str] = Counter()

    def add(self, area: str, step: int, found: str, *, expected: str, advice: str = "") -> None:
        """Report a contradiction.

        Args:
            step: batch or version.
            advice: what to do, if that is more than to look at the file.
        """
        self._counts[area] += 1
        # a broken run can have millions of contradictions: the first ones are kept, all are counted
        if self._counts[area] <= KEPT_PER_AREA:
            file = {
                "versions": f"journal/version_{step:06d}.msgpack",
                "checkpoints": f"checkpoints/step_{step}",
                "metrics": f"metrics.jsonl and journal/batch_{step:06d}.msgpack",
            }.get(area, f"journal/batch_{step:06d}.msgpack")
            meaning = f"{AREAS[area]} {advice or f'Look at {file}.'}"
            self._kept.append(Contradiction(area, step, found, expected, meaning))

    def compare(
        self,
        area: str,
        step: int,
        values: Mapping[str, tuple[Any, Any]],
        *,
        of: str = "",
        by: str,
        advice: str = "",
        rtol: float = 0.0,
    ) -> bool:
        """Report the first value of a record that differs from what it should be, and return whether there is one.

        Args:
            values: what was found and what was expected, by the place in the record, such as `state.cursors.a`.
            of: a part of the batch.
            by: what the expected values follow from.
            rtol: relative tolerance of numbers that are not computed in the same order again.
        """
        for name, (found, due) in values.items():
            # one contradiction per comparison: later values often follow from the first wrong one
            if difference := first_difference(found, due, rtol):
                place, one, other = difference
                where = f"batch {step}: {of}{name}{place} is {shown(one)}"
                self.add(area, step, where, expected=f"{shown(other)}, {by}", advice=advice)
                return True
        return False

    def note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < KEPT_PER_AREA:
            self.notes.append(text)

    @property
    def total(self) -> int:
        """Return the number of contradictions."""
        return self._counts.total()

    @property
    def holds(self) -> bool:
        return self.total == 0

    def in_order(self) -> list[Contradiction]:
        """Return the contradictions by step; within a step the likelier cause comes first."""
        areas = list(AREAS)
        return sorted(self._kept, key=lambda one: (one.step, areas.index(one.area)))

    def text(self) -> str:
        verdict = "nothing was lost, and nothing was trained twice"
        if not self.holds:
            verdict = f"{counted(self.total, 'contradiction')}, in order of steps"

        lines = [f"{self.run}: {verdict}", *(f"  {line}" for line in self.summary.lines())]
        if self.holds:
            lines += [f"  {promise}" for promise in PROMISES]
        lines += [f"  note: {note}" for note in self.notes[:MOST_SHOWN]]
        # the earliest cause first, as later contradictions often follow from it
        for contradiction in self.in_order()[:MOST_SHOWN]:
            lines += ["", str(contradiction)]
        if (left_out := max(self.total, len(self.notes)) - MOST_SHOWN) > 0:
            lines += ["", f"{left_out} more: `trireme audit --json` lists them"]
        return clean("\n".join(lines))

    def as_json(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "holds": self.holds,
            "summary": asdict(self.summary),
            "num_contradictions": self.total,
            "contradictions": [asdict(contradiction) for contradiction in self.in_order()],
            "notes": self.notes,
        }
