"""Going back to an earlier version takes everything of the old way aside, once, however often it is interrupted."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from stage import write_checkpoint
from trireme.base.paths import RunPaths, step_folder, step_of
from trireme.launch.folder import prepare_folder
from trireme.launch.rewind import rewind
from trireme.ledger.journal import Journal
from trireme.ledger.records import BatchRecord, State
from trireme.ledger.versions import Versions

LAST = 6


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run of six steps, with a checkpoint, weights and an evaluation of every second version."""
    paths = RunPaths(tmp_path / "run")
    journal, versions = Journal(paths.journal), Versions(paths.journal)
    for step in range(LAST):
        journal.append(BatchRecord(step, [], [], State(next_batch=step + 1)))
    for version in range(LAST + 1):
        versions.record(version, ["http://e"], {"w": str(version)}, 0.0)
    for version in (2, 4, 6):
        write_checkpoint(paths, version)
        step_folder(paths.weights, version).mkdir(parents=True)
    for version in (0, 2, 4, 6):
        step_folder(paths.evals, version).mkdir(parents=True)
    paths.metrics.write_text("{}")
    return paths


def steps_in(folder: Path) -> list[int]:
    return sorted(step for entry in folder.iterdir() if (step := step_of(entry)) is not None)


def left(paths: RunPaths) -> dict[str, list[int]]:
    """What counts, by kind."""
    kinds = {"checkpoints": paths.checkpoints, "weights": paths.weights, "evals": paths.evals}
    in_ledger = {"batches": Journal(paths.journal).steps(), "versions": Versions(paths.journal).known()}
    return in_ledger | {kind: steps_in(folder) for kind, folder in kinds.items()}


AT_2 = {"batches": [0, 1], "versions": [0, 1, 2], "checkpoints": [2], "weights": [2], "evals": [0, 2]}
AT_0 = {"batches": [], "versions": [0], "checkpoints": [], "weights": [], "evals": [0]}


@pytest.mark.parametrize(("version", "expected"), [(2, AT_2), (0, AT_0)])
def test_what_came_after_a_version_is_set_aside_and_nothing_is_deleted(paths: RunPaths, version, expected) -> None:
    def files() -> list[str]:
        return sorted(path.name for path in paths.root.rglob("*") if not path.name.startswith("set_aside"))

    before = files()
    for _ in range(2):  # the second time there is nothing to do
        prepare_folder(paths, resume=False, resume_step=version)
        assert left(paths) == expected
    assert files() == before
    assert len(list(paths.root.rglob("set_aside*"))) == 5  # one for each kind


def test_the_newest_checkpoint_sets_nothing_aside_and_a_half_one_goes_too(paths: RunPaths) -> None:
    before = left(paths)
    for resume_step in (-1, None):
        prepare_folder(paths, resume=True, resume_step=resume_step)
        assert left(paths) == before
    step_folder(paths.checkpoints, 5).mkdir()  # half a checkpoint of the old way
    rewind(paths, 4)
    assert steps_in(paths.checkpoints) == [2, 4]


class Killed(BaseException):
    """Stands for `kill -9` of the launcher."""


def rewind_killed(paths: RunPaths, monkeypatch: pytest.MonkeyPatch, *, after: int) -> int:
    """Rewinds to version 2 and is killed after so many moves; returns how many there were."""
    moves, rename = [], Path.rename

    def counted(self: Path, target: Path) -> Path:
        if len(moves) == after:
            raise Killed
        moves.append(target)
        return rename(self, target)

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(Path, "rename", counted)
        rewind(paths, 2)
    return len(moves)


NUM_MOVES = 4 + 4 + 2 + 2 + 2


@pytest.mark.parametrize("after", range(NUM_MOVES + 1))
def test_a_launcher_killed_anywhere_leaves_a_run_that_either_way_can_go_on(paths: RunPaths, monkeypatch, after) -> None:
    assert rewind_killed(paths, monkeypatch, after=after) == after
    now = left(paths)
    for kind in ("batches", "versions"):
        assert now[kind] == list(range(len(now[kind]))), "a gap"
    assert len(now["batches"]) >= max(now["checkpoints"]), "a checkpoint whose batches are gone"
    assert len(now["batches"]) >= max(now["versions"]), "a version that cannot be trained again"
    assert max(now["checkpoints"]) <= max(now["versions"]), "a checkpoint of a version that nobody confirmed"
    if len(now["batches"]) < LAST:
        assert now | {"batches": [0, 1]} == AT_2, "batches go last"
    rewind(paths, 2)
    assert left(paths) == AT_2


def test_moves_of_one_rewind_do_not_meet_those_of_another(paths: RunPaths) -> None:
    rewind(paths, 4)
    write_checkpoint(paths, 6)
    rewind(paths, 4)
    asides = sorted(path for path in paths.checkpoints.iterdir() if path.name.startswith("set_aside"))
    assert [os.listdir(aside) for aside in asides] == [["step_6"], ["step_6"]]
