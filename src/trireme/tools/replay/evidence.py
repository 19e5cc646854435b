"""Records of a run's weights to compare a replay with: confirmed digests, exported weights, metrics.

Everything is compared to the last bit. Nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from trireme.algo.digest import tensor_digest
from trireme.base.paths import RunPaths, step_folder
from trireme.journal.versions import Versions
from trireme.monitor.metrics import Row, latest_by_step, read_metrics

Digests = Mapping[str, str]


@dataclass(frozen=True)
class Retraced:
    """A version that was trained again."""

    version: int
    digests: Digests  # by tensor, in the precision in which weights are served; empty but on rank 0
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the step that made it
    adapters: Digests = field(default_factory=dict)  # by tensor, as they are exported; empty where there are none


@dataclass(frozen=True)
class Comparison:
    """One version and all that is recorded of it."""

    version: int
    num_tensors: int
    is_confirmed: bool  # engines had confirmed it, or its weights were exported
    differences: tuple[str, ...]  # in words; the first is the most telling one

    def __str__(self) -> str:
        if self.differences:
            return "\n".join(f"version {self.version}: {difference}" for difference in self.differences)
        if not self.is_confirmed:
            return f"version {self.version}: no engine confirmed it, so there is nothing to compare it with"
        return f"version {self.version}: {self.num_tensors} tensors, bit-identical"


class Evidence:
    """The records of the run in a folder."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._versions = Versions(paths.journal)
        rows, _ = read_metrics(paths.metrics)
        self._rows = latest_by_step(rows)

    def compare(self, retraced: Retraced) -> Comparison:
        """Compare a version. Raises JournalCorrupt where its record is damaged."""
        recorded = list(self._recorded(retraced))
        differences = [_difference(ours, theirs, source) for source, ours, theirs in recorded]
        differences += self._other_metrics(retraced)
        return Comparison(retraced.version, len(retraced.digests), bool(recorded), tuple(filter(None, differences)))

    def _recorded(self, retraced: Retraced) -> Iterator[tuple[str, Digests, Digests]]:
        """Yield source, our digests, recorded digests. A version has several confirmations after restarts."""
        if self._versions.has(retraced.version):
            confirmations = self._versions.read(retraced.version).confirmations
            for number, confirmation in enumerate(confirmations, 1):
                which = f" (confirmation {number} of {len(confirmations)})" if len(confirmations) > 1 else ""
                source = f"{' and '.join(confirmation.engines)} confirmed{which}"
                yield source, retraced.digests, confirmation.digests
        export = self._export(retraced.version)
        if export.is_dir():
            yield f"{export} holds", retraced.adapters or retraced.digests, digests_of_export(export)

    def _export(self, version: int) -> Path:
        return step_folder(self._paths.weights, version)

    def _other_metrics(self, retraced: Retraced) -> Iterator[str]:
        row = self._row(retraced.version)
        for name in sorted(retraced.metrics, key=_how_telling):
            value = retraced.metrics[name]
            number = value if math.isfinite(value) else None
            if name in row and row[name] != number:
                yield f"{name} of the step that made it was {row[name]} then ({self._paths.metrics}), is {number} now"
                return

    def _row(self, version: int) -> Row:
        """Return the trainer's metrics of the step that made `version`.

        A line that is older than the version's confirmation belongs to abandoned steps: the run was rewound, and
        stopped again before it repeated this step.
        """
        row = self._rows.get(("trainer", version - 1), {})
        if row and self._versions.has(version):
            confirmed = min(confirmation.time for confirmation in self._versions.read(version).confirmations)
            return row if row.get("time_s", confirmed) >= confirmed else {}
        return row


def _how_telling(metric: str) -> int:
    """Sort differences so that causes come before effects."""
    first = ("lr", "loss", "grad_norm")
    return first.index(metric) if metric in first else len(first)


def digests_of_export(folder: Path) -> Digests:
    digests: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            digests |= {name: tensor_digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - no dict
    return digests


def _difference(ours: Digests, theirs: Digests, source: str) -> str:
    """Return what differs; empty where nothing does."""
    differ = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not differ:
        return ""
    name = differ[0]
    return (
        f"{len(differ)} of {len(ours)} tensors differ from what {source}, the first is {name}: "
        f"{theirs.get(name, 'nothing')} then, {ours.get(name, 'nothing')} now"
    )
