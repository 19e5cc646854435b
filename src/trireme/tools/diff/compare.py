"""Comparison of two runs from their folders, causes before effects.

    version n -> its evaluation -> batch n -> step n -> version n + 1 -> ...

The runs may be finished, killed or running: they are compared as far as both go. Nothing is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trireme.base.paths import step_folder
from trireme.config.files import toml_value
from trireme.config.resume import flatten, when_of
from trireme.journal.provenance import read_provenance
from trireme.monitor.metrics import Row
from trireme.tools.diff.aspects import MAIN, Difference, compare_tables
from trireme.tools.diff.batches import BATCH_ASPECTS, compare_batches
from trireme.tools.record_differences import differences
from trireme.tools.run_reader import RunReader
from trireme.tools.tokenizer import Decode

STEP_ASPECTS = ("lr", "loss", "grad_norm", "training")
CLOCKED = ("time/", "perf/", "weights/", "time_s", "memory/")
"""Metrics of how long something took and what it took, and not of what came out."""
ABSENT = "not there"  # value of a key that a configuration lacks

Table = dict[str, Any]


class Side(RunReader):
    """One of the two runs, with what it had when the comparison began."""

    def __init__(self, path: Path) -> None:
        """Open a run.

        Raises:
            ConfigError: the folder holds no run.
            JournalCorrupt: a batch before the newest is missing.
        """
        super().__init__(path)
        self.configuration = self.read_raw_config()
        self.surroundings = read_provenance(self.paths)
        self.batches = set(self.journal.require_all())
        self.metric_rows = self.rows()
        self.steps = {step for process, step in self.metric_rows if process == "trainer"}
        self.known_versions = {*self.versions.known(), *self.exports()}
        self.end = max((*self.batches, *self.steps, *self.known_versions), default=-1) + 1

    def confirmed(self, version: int) -> dict[str, str] | None:
        """Return confirmed digests by tensor. Raises JournalCorrupt if the record is damaged."""
        return self.versions.read(version).digests if self.versions.has(version) else None

    def exported(self, version: int) -> dict[str, str] | None:
        """Return digests of exported tensors, reading all of them; None if the version was not exported as
        tensors."""
        files = sorted(step_folder(self.paths.weights, version).glob("*.safetensors"))
        if not files:
            return None

        # torch is slow to import, and most comparisons need no export
        from safetensors import SafetensorError

        from trireme.transport.weights.published_files import PublishedFiles  # with torch

        try:
            return PublishedFiles(files).digests()
        except (SafetensorError, OSError):  # half of one, which a live run is writing or has just removed
            return None

    def __str__(self) -> str:
        newest = f"newest version {max(self.known_versions)}" if self.known_versions else "no version recorded"
        return f"{len(self.batches)} batches, {len(self.steps)} steps, {newest}"


@dataclass
class Comparison:
    """The result of a comparison."""

    a: Side
    b: Side
    keys: list[KeyDifference]
    surroundings: list[KeyDifference]
    firsts: dict[str, Difference] = field(default_factory=dict)  # first difference of each aspect, in the order found
    compared: Counter[str] = field(default_factory=Counter)  # batches, steps or versions, by aspect

    @property
    def telling_keys(self) -> list[KeyDifference]:
        """Return configuration keys that differ, without those that only say where a run runs."""
        return [key for key in self.keys if not key.is_place]

    @property
    def first(self) -> Difference | None:
        """Return the first difference. An evaluation has no effects, so it is named only if nothing else differs."""
        leading = [difference for aspect, difference in self.firsts.items() if aspect != "evaluation"]
        return next(iter(leading), self.firsts.get("evaluation"))

    @property
    def says_all(self) -> bool:
        return all(aspect in self.firsts for aspect in MAIN)

    @property
    def same(self) -> bool:
        return not self.telling_keys and self.first is None


def compare_runs(a: Path, b: Path) -> Comparison:
    """Compare two runs.

    Raises:
        ConfigError: one of the folders holds no run.
        JournalCorrupt: an entry is damaged or missing.
    """
    ours, theirs = Side(a), Side(b)
    keys = compare_configurations(ours.configuration, theirs.configuration)
    comparison = Comparison(ours, theirs, keys, compare_configurations(ours.surroundings, theirs.surroundings))
    decode = ours.decoder()
    for step in range(min(ours.end, theirs.end)):
        for difference in _compare_at(step, ours, theirs, comparison.compared, decode):
            # rules of the journal only repeat keys of the configuration that differ
            if difference.aspect != "rules" or not comparison.telling_keys:
                comparison.firsts.setdefault(difference.aspect, difference)
        if comparison.says_all:
            break
    return comparison


def _compare_at(step: int, a: Side, b: Side, compared: Counter[str], decode: Decode | None) -> Iterator[Difference]:
    """Compare version, evaluation, batch and step of one number, if both have them."""
    # the engines' digests are cheap; exports are read only if a record is missing
    ours, theirs, source = a.confirmed(step), b.confirmed(step), "confirmed"
    if ours is None or theirs is None:
        ours, theirs, source = a.exported(step), b.exported(step), "exported"
    if ours is not None and theirs is not None:
        compared["weights"] += 1
        yield from compare_tables("weights", step, f"version {step}, ", ours, theirs, unit=f"tensors, as {source}")

    row_a, row_b = (side.metric_rows.get(("orchestrator", step), {}) for side in (a, b))
    if evaluated := [name for name in row_a if name.startswith("eval/") and name in row_b]:
        compared["evaluation"] += 1
        yield from _compare_metrics("evaluation", step, f"version {step}", evaluated, row_a, row_b)

    if step in a.batches and step in b.batches:
        compared.update(BATCH_ASPECTS)
        path_a, path_b = a.journal.path(step), b.journal.path(step)
        # equal batches have equal bytes, and need not be decoded
        if path_a.stat().st_size != path_b.stat().st_size or path_a.read_bytes() != path_b.read_bytes():
            yield from compare_batches(a.journal.read(step), b.journal.read(step), decode)

    if step in a.steps and step in b.steps:
        compared.update(STEP_ASPECTS)
        row_a, row_b = a.metric_rows["trainer", step], b.metric_rows["trainer", step]
        # only those that both have: another version of Trireme may record more
        names = sorted(row_a.keys() & row_b.keys() - {"step", "process", *STEP_ASPECTS})
        rest = [name for name in names if not name.startswith(CLOCKED)]
        for aspect in STEP_ASPECTS:
            own = rest if aspect == "training" else [aspect]
            yield from _compare_metrics(aspect, step, f"step {step}", own, row_a, row_b)


def _compare_metrics(aspect: str, step: int, where: str, names: list[str], a: Row, b: Row) -> Iterator[Difference]:
    rows = ({name: row.get(name) for name in names} for row in (a, b))  # JSON has null for what is not finite
    yield from compare_tables(aspect, step, f"{where}, ", *rows, unit="metrics")


# configurations, as they are on disk: those of other versions of Trireme can be compared too


@dataclass(frozen=True)
class KeyDifference:
    """One key that differs.

    Example:
        KeyDifference("trainer.optim.lr", "0.0005", "0.001")
    """

    key: str
    a: str  # value as a file would have it
    b: str

    @property
    def is_place(self) -> bool:
        """Return whether it decides where a run runs, what it keeps and how long it waits, not what it computes."""
        return "at once" in (when_of(self.key), when_of(self.key, is_sft=True))

    def __str__(self) -> str:
        return f"{self.key}: {self.a} in A, {self.b} in B"


def compare_configurations(a: Table, b: Table) -> list[KeyDifference]:
    """Return differing keys, those that affect results first, in the order of the file."""
    flat_a, flat_b = dict(flatten(a)), dict(flatten(b))
    keys = [KeyDifference(key, _shown(flat_a, key), _shown(flat_b, key)) for key in differences(flat_a, flat_b)]
    # a stable sort: keys stay in the order of the file within each half
    return sorted(keys, key=lambda key: key.is_place)


def _shown(flat: Table, key: str) -> str:
    return toml_value(flat[key]) if key in flat else ABSENT
