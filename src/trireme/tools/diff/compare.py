"""Comparison of two runs from their folders, causes before effects.

    version n -> its evaluation -> batch n -> step n -> version n + 1 -> ...

The runs may be finished, killed or running: they are compared as far as both go. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trireme.base.paths import RunPaths, step_of
from trireme.journal.journal import Journal
from trireme.journal.logprobs import read_logprobs
from trireme.journal.provenance import read_provenance
from trireme.journal.versions import Versions
from trireme.monitor.metrics import Row, latest_by_step, read_metrics
from trireme.tools.diff.batches import BATCH_ASPECTS, Decode, compare_batches, compare_scored, first_place
from trireme.tools.diff.configuration import (
    KeyDifference,
    Table,
    compare_configurations,
    count_keys,
    read_configuration,
)
from trireme.tools.diff.differences import Difference, Found
from trireme.tools.diff.training import STEP_ASPECTS, Weights, compare_evaluations, compare_steps, compare_weights
from trireme.tools.tokenizer import find_decoder


class Side:
    """One of the two runs."""

    def __init__(self, folder: Path) -> None:
        """Open a run.

        Raises:
            ConfigError: the folder holds no run.
            JournalCorrupt: a batch before the newest is missing.
        """
        self.folder = folder
        self.configuration: Table = read_configuration(folder)
        paths = RunPaths(folder)
        self.journal = Journal(paths.journal)
        self.logprobs = paths.logprobs
        self.batches = set(self.journal.require_all())
        self.weights = Weights(paths)
        self._rows = latest_by_step(read_metrics(paths.metrics)[0])
        self.steps = {step for process, step in self._rows if process == "trainer"}
        self.versions = {*Versions(paths.journal).known(), *_exported(paths)}
        self.surroundings = read_provenance(paths)

    def row(self, process: str, step: int) -> Row:
        """Return a row of metrics; empty where there is none."""
        return self._rows.get((process, step), {})

    @property
    def end(self) -> int:
        """Return one more than the highest number of anything."""
        return max((*self.batches, *self.steps, *self.versions), default=-1) + 1

    def __str__(self) -> str:
        newest = f"newest version {max(self.versions)}" if self.versions else "no version recorded"
        return f"{len(self.batches)} batches, {len(self.steps)} steps, {newest}"


def _exported(paths: RunPaths) -> Iterator[int]:
    steps = (step_of(folder) for folder in paths.weights.glob("step_*"))
    return (step for step in steps if step is not None)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    a: Side
    b: Side
    keys: list[KeyDifference]
    surroundings: list[KeyDifference]
    found: Found

    @property
    def telling_keys(self) -> list[KeyDifference]:
        """Return configuration keys that differ, without those that only say where a run runs."""
        return [key for key in self.keys if not key.is_place]

    @property
    def same(self) -> bool:
        return not self.telling_keys and self.found.first is None

    @property
    def num_keys(self) -> int:
        return max(count_keys(self.a.configuration), count_keys(self.b.configuration))


def compare_runs(a: Path, b: Path) -> Comparison:
    """Compare two runs.

    Raises:
        ConfigError: one of the folders holds no run.
        JournalCorrupt: an entry is damaged or missing.
    """
    ours, theirs = Side(a), Side(b)
    keys = compare_configurations(ours.configuration, theirs.configuration)
    surroundings = compare_configurations(ours.surroundings, theirs.surroundings)
    found = Found()
    has_reasons = any(not key.is_place for key in keys)
    decode = find_decoder(a)
    for step in range(min(ours.end, theirs.end)):
        for difference in _compare_at(step, ours, theirs, found, decode):
            if difference.aspect != "rules" or not has_reasons:  # these say once more what the configuration says
                found.take(difference)
        if found.says_all:
            break
    return Comparison(ours, theirs, keys, surroundings, found)


def _compare_at(step: int, a: Side, b: Side, found: Found, decode: Decode | None) -> Iterator[Difference]:
    """Compare version, evaluation, batch and step of one number, where both have them."""
    is_there, difference = compare_weights(step, a.weights, b.weights)
    found.compared["weights"] += is_there
    if difference:
        yield difference
    evaluated_a, evaluated_b = a.row("orchestrator", step), b.row("orchestrator", step)
    found.compared["evaluation"] += any(name.startswith("eval/") for name in evaluated_a.keys() & evaluated_b.keys())
    yield from compare_evaluations(step, evaluated_a, evaluated_b)
    if step in a.batches and step in b.batches:
        found.compared.update(BATCH_ASPECTS)
        if not _are_one(a.journal.path(step), b.journal.path(step)):
            yield from compare_batches(a.journal.read(step), b.journal.read(step), decode)
        yield from _compare_scored(step, a, b, found)
    if step in a.steps and step in b.steps:
        found.compared.update(STEP_ASPECTS)
        yield from compare_steps(step, a.row("trainer", step), b.row("trainer", step))


def _compare_scored(step: int, a: Side, b: Side, found: Found) -> Iterator[Difference]:
    ours, theirs = read_logprobs(a.logprobs, step), read_logprobs(b.logprobs, step)
    common = ours.keys() & theirs.keys()
    found.compared["scored"] += bool(common)
    if any(first_place(ours[sample], theirs[sample]) is not None for sample in common):
        yield from compare_scored(a.journal.read(step), ours, theirs)


def _are_one(a: Path, b: Path) -> bool:
    """Compare two entries byte by byte, without decoding: entries of runs that do the same are equal."""
    return a.stat().st_size == b.stat().st_size and a.read_bytes() == b.read_bytes()
