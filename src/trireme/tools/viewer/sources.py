"""Files of rollouts below a folder, found by their names alone, and the mean reward of each.

RUN/journal/batch_000012.msgpack           a batch of training
RUN/evals/step_20/ENV.jsonl                an evaluation of version 20
.../evals/ENV--MODEL/RUN_ID/results.jsonl  an evaluation outside a run, with a `metadata.json`
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.paths import step_of
from trireme.tools.rollouts import ResultsFile, identity_of
from trireme.tools.run_reader import RunReader

TRAINING = "training"
RESULTS = "results.jsonl"
SKIPPED = {"checkpoints", "weights", "broadcast", "logs", "wandb", "node_modules", "__pycache__", "site-packages"}
"""Folders that hold no rollouts and may hold many files."""


@dataclass(frozen=True)
class Source:
    """A file of rollouts.

    Example:
        Source(Path("outputs/evals/step_20/wordle.jsonl"), run=Path("outputs"), series="wordle", version=20)
    """

    path: Path
    run: Path  # the run's folder, or the nearest to one
    series: str  # files to compare with each other: `training`, the environment, or ENV--MODEL
    version: int | None = None  # version of the policy, or number of a batch; None outside of runs

    @property
    def label(self) -> str:
        if self.version is not None:
            return f"step {self.version}"
        is_named_by_folder = self.path.name == RESULTS and self.series != self.path.stem
        return self.path.parent.name if is_named_by_folder else self.path.name


def require_folders(folders: Sequence[Path]) -> None:
    """Raises: ConfigError if one of them does not exist."""
    for folder in folders:
        if not folder.exists():
            raise ConfigError(
                f"{folder} does not exist. Expected the folder of a run, a folder with runs or evaluations in it, or a "
                ".jsonl file of results. Check the path; runs are in `outputs` unless configured otherwise."
            )


def find_sources(folders: Sequence[Path]) -> list[Source]:
    """Return all files of rollouts, by run, training first, then by version. Links to folders are not followed."""
    found: dict[Path, Source] = {}
    for folder in folders:
        # A file that the user names is taken whatever it is called.
        if folder.is_file():
            found[folder] = _source(folder) or Source(folder, run=folder.parent, series=folder.stem)
        for parent, folders_in, names in os.walk(folder):
            # `os.walk` goes into the folders that are left in its list.
            inside = [] if Path(parent).name == "journal" else folders_in
            folders_in[:] = sorted(name for name in inside if not name.startswith(".") and name not in SKIPPED)
            found |= {source.path: source for name in names if (source := _source(Path(parent, name)))}
    return sorted(
        found.values(),
        key=lambda one: (one.run, one.series != TRAINING, one.series, one.version is None, one.version or 0, one.label),
    )


def _source(path: Path) -> Source | None:
    """Return None if the file's name is not that of a file of rollouts."""
    parent = path.parent
    number = path.stem.removeprefix("batch_")
    if parent.name == "journal" and path.suffix == ".msgpack" and number.isdigit():
        return Source(path, run=parent.parent, series=TRAINING, version=int(number))
    if path.suffix == ".jsonl" and (step := step_of(parent)) is not None:
        return Source(path, run=_above_evals(parent.parent), series=path.stem, version=step)
    if path.name == RESULTS and "evals" in (folder.name for folder in path.parents):
        return Source(path, run=_above_evals(parent.parent.parent), series=parent.parent.name)
    return Source(path, run=parent, series=path.stem) if path.name == RESULTS else None


def _above_evals(folder: Path) -> Path:
    return folder.parent if folder.name == "evals" else folder


def run_title(run: Path, folders: Sequence[Path]) -> str:
    """Return the run's folder below the one that the user named: "runs/mine" for `/data/runs`."""
    above = (folder.resolve().parent for folder in folders if run.resolve().is_relative_to(folder.resolve()))
    nearest = max(above, key=lambda parent: len(parent.parts), default=run.resolve().parent)
    return str(run.resolve().relative_to(nearest))


class MeanRewards:
    """Mean rewards by file: of batches from the run's metrics, of evaluations from the files themselves.

    A file is read again only if it has changed.
    """

    def __init__(self) -> None:
        self.known: dict[Path, float | None] = {}
        self._seen: dict[Path, tuple[int, int, int] | None] = {}
        self._runs: dict[Path, RunReader] = {}

    def update(self, sources: Sequence[Source]) -> Iterator[None]:
        """Read what is new. Yield after each part of a file."""
        # The metrics have the means of all batches, so no journal is read.
        for path in {source.run for source in sources if source.series == TRAINING}:
            run = self._runs.setdefault(path, RunReader(path))
            for rows, _ in run.new_rows():
                # A run that trained a step again has written it again: the later value counts.
                means = ((row["step"], row.get("reward/mean")) for row in rows)
                self.known |= {run.journal.path(step): mean for step, mean in means if isinstance(mean, int | float)}
                yield

        # An evaluation is read in parts, of which only the sums stay in memory.
        for path in [source.path for source in sources if source.series != TRAINING]:
            identity = identity_of(path)
            if identity in (None, self._seen.get(path)):
                continue
            file, total, count, has_more = ResultsFile(path), 0.0, 0, True
            while has_more:
                has_more = file.read_more()
                rewards = [row.reward for row in file.rows if row.reward is not None]
                total, count = total + sum(rewards), count + len(rewards)
                file.rows.clear()
                yield
            self._seen[path], self.known[path] = identity, total / count if count else None
