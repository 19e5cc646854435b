"""The report of an audit, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trireme.tools.audit.findings import Findings


@dataclass(frozen=True)
class Summary:
    """Counts of what the run folder has."""

    batches: int
    trained: int  # rollouts
    dropped: int
    dropped_for: dict[str, int]
    open_groups: int
    groups: int  # begun
    epochs: tuple[int, int] | None  # lowest and highest that an environment is in
    trained_tokens: int
    lag: tuple[int, int] | None
    versions_used: int
    versions_confirmed: int
    checkpoints: list[int]
    set_aside: list[str]

    def lines(self) -> list[str]:
        tokens = f"{_count(self.trained_tokens, 'trained token')}"
        if self.lag is not None:
            tokens += f", lag {self.lag[0]} to {self.lag[1]}, of {_count(self.versions_used, 'version')}"
        lines = [
            f"{_count(self.batches, 'batch', 'batches')}, {_count(self.trained, 'rollout')} trained, "
            f"{self.dropped:,} dropped{self._reasons()}, {_count(self.open_groups, 'group')} open",
            f"{_count(self.groups, 'group')} begun"
            + (f", up to epoch {self.epochs[1]} of the data" if self.epochs else ""),
            f"{tokens}; {_count(self.versions_confirmed, 'version')} confirmed by digest",
            f"checkpoints: {_steps(self.checkpoints)}",
        ]
        if self.set_aside:
            lines.append(f"ways not taken, set aside: {', '.join(self.set_aside[:3])}{_more(self.set_aside, 3)}")
        return lines

    def _reasons(self) -> str:
        often = sorted(self.dropped_for.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{reason} {count:,}" for reason, count in often[:5])
        return f" ({shown}{_more(often, 5)})" if often else ""


PROMISES = (
    "every rollout has one fate, and every group is the example that the data order says",
    "every trained token is by a confirmed version and as old as allowed; advantages follow from rewards",
    "versions, checkpoints and metrics agree with the journal",
)


@dataclass(frozen=True)
class Report:
    """The outcome of an audit."""

    run: Path
    summary: Summary
    findings: Findings

    @property
    def holds(self) -> bool:
        return self.findings.total == 0

    def text(self, *, everything: bool) -> str:
        """Return the report as text.

        Args:
            everything: show all recorded contradictions, not only the first.
        """
        lines = [f"{self.run}: {self._verdict()}", *(f"  {line}" for line in self.summary.lines())]
        if self.holds:
            lines += [f"  {promise}" for promise in PROMISES]
        lines += self._notes(len(self.findings.notes) if everything else 3)
        contradictions = self.findings.in_order()
        for contradiction in contradictions if everything else contradictions[:1]:
            lines += ["", str(contradiction)]
        if everything and (left_out := self.findings.total - len(contradictions)):
            lines += ["", f"and {left_out} more like these"]
        return "\n".join(lines)

    def _verdict(self) -> str:
        match self.findings.total:
            case 0:
                return "nothing was lost, and nothing was trained twice"
            case 1:
                return "one contradiction"
            case number:
                return f"{number} contradictions, in order of steps (--all shows more than the first)"

    def _notes(self, most: int) -> list[str]:
        notes = [f"  note: {note}" for note in self.findings.notes[:most]]
        more = len(self.findings.notes) - most
        return [*notes, f"  {more} more notes: --all shows them"] if more > 0 else notes

    def as_json(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "holds": self.holds,
            "summary": asdict(self.summary),
            "num_contradictions": self.findings.total,
            "contradictions": [asdict(contradiction) for contradiction in self.findings.in_order()],
            "notes": self.findings.notes,
        }


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _steps(steps: list[int]) -> str:
    if len(steps) > 6:
        return f"{steps[0]} {steps[1]} .. {steps[-1]}"
    return " ".join(map(str, steps)) or "none"


def _more(values: list[Any], shown: int) -> str:
    return f" and {len(values) - shown} more" if len(values) > shown else ""
