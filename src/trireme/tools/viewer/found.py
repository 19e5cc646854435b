"""What lies below a folder: evaluations and batches of training, told by the names of their files alone.

RUN/journal/batch_000012.msgpack           a batch of training
RUN/evals/step_20/ENV.jsonl                an evaluation of version 20
.../evals/ENV--MODEL/RUN_ID/results.jsonl  an evaluation outside a run, `metadata.json` beside it
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trireme.base.errors import ConfigError
from trireme.base.paths import step_of

Kind = Literal["batch", "results"]
TRAINING = "training"
RESULTS = "results.jsonl"
PASSED_BY = {"checkpoints", "weights", "broadcast", "logs", "wandb", "node_modules", "__pycache__", "site-packages"}
"""Folders that hold none, and may hold very much else."""


@dataclass(frozen=True)
class Source:
    """One file whose rollouts can be looked at.

    Example:
        Source(Path("outputs/evals/step_20/wordle.jsonl"), "results", home=Path("outputs"), shelf="wordle", version=20)
    """

    path: Path
    kind: Kind
    home: Path  # the run's folder, or what comes nearest to one
    shelf: str  # what it stands with: `training`, the environment, or ENV--MODEL
    version: int | None = None  # of the policy; the number of a batch; None outside runs

    @property
    def label(self) -> str:
        if self.version is not None:
            return f"step {self.version}"
        is_named_by_folder = self.path.name == RESULTS and self.shelf != self.path.stem
        return self.path.parent.name if is_named_by_folder else self.path.name

    @property
    def order(self) -> tuple[bool, int, str]:
        return self.version is None, self.version or 0, self.label


@dataclass
class Shelf:
    """Sources that are comparable with each other, in their order."""

    name: str
    sources: list[Source] = field(default_factory=list)


@dataclass
class Home:
    """A run, or a folder of evaluations."""

    folder: Path
    title: str  # the folder, from the one on that was asked for
    shelves: dict[str, Shelf] = field(default_factory=dict)


def require_folders(folders: Sequence[Path]) -> None:
    """Raises: ConfigError for what is not there."""
    for folder in folders:
        if not folder.exists():
            raise ConfigError(
                f"{folder} does not exist - expected the folder of a run, one with runs or evaluations below it, or a "
                ".jsonl file of results. Check the path; runs are in `outputs` where nothing else was said."
            )


def find(folders: Sequence[Path]) -> list[Home]:
    """All that is there now. What appears or goes away on the way is no error."""
    homes: dict[Path, Home] = {}
    found = {source.path: source for folder in folders for source in _sources(folder)}
    for source in found.values():
        home = homes.setdefault(source.home, Home(source.home, _title(source.home, folders)))
        home.shelves.setdefault(source.shelf, Shelf(source.shelf)).sources.append(source)
    for home in homes.values():
        home.shelves = dict(sorted(home.shelves.items(), key=lambda item: (item[0] != TRAINING, item[0])))
        for shelf in home.shelves.values():
            shelf.sources.sort(key=lambda source: source.order)
    return sorted(homes.values(), key=lambda home: home.folder)


def _title(home: Path, folders: Sequence[Path]) -> str:
    """ "runs/mine" where `/data/runs` was asked for."""
    above = (folder.resolve().parent for folder in folders if home.resolve().is_relative_to(folder.resolve()))
    nearest = max(above, key=lambda parent: len(parent.parts), default=home.resolve().parent)
    return str(home.resolve().relative_to(nearest))


def _sources(folder: Path) -> Iterator[Source]:
    if folder.is_file():
        yield _alone(folder) if folder.suffix == ".jsonl" else _source(folder) or _alone(folder)
        return
    for path in _files(folder):
        if source := _source(path):
            yield source


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        inside = [] if Path(parent).name == "journal" else folders
        folders[:] = sorted(name for name in inside if not name.startswith(".") and name not in PASSED_BY)
        yield from (Path(parent, name) for name in names)


def _source(path: Path) -> Source | None:
    """None where the name is that of something else."""
    parent = path.parent
    number = path.stem.removeprefix("batch_")
    if parent.name == "journal" and path.suffix == ".msgpack" and number.isdigit():
        return Source(path, "batch", home=parent.parent, shelf=TRAINING, version=int(number))
    if path.suffix != ".jsonl":
        return None
    if (step := step_of(parent)) is not None:
        return Source(path, "results", home=_above_evals(parent.parent), shelf=path.stem, version=step)
    if path.name == RESULTS and "evals" in (folder.name for folder in path.parents):
        return Source(path, "results", home=_above_evals(parent.parent.parent), shelf=parent.parent.name)
    return Source(path, "results", home=parent, shelf=path.stem) if path.name == RESULTS else None


def _above_evals(folder: Path) -> Path:
    return folder.parent if folder.name == "evals" else folder


def _alone(path: Path) -> Source:
    known = _source(path)
    return known or Source(path, "results", home=path.parent, shelf=path.stem)


def neighbours(source: Source, homes: Sequence[Home]) -> list[Source]:
    """Those on its shelf, itself among them; only itself where it has gone away."""
    for home in homes:
        if home.folder == source.home and source.shelf in home.shelves:
            return home.shelves[source.shelf].sources
    return [source]
