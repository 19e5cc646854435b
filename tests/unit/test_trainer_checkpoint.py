"""Checkpoints: whole or not at all, and training goes on from one as if nothing had been."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tiny import open_state, random_samples, train_step, weights_of
from trireme.base.errors import ConfigError
from trireme.config.trainer import Checkpoints
from trireme.trainer.checkpoint import MANIFEST, CheckpointStore, TrainerState, complete_steps, version_to_resume
from trireme.trainer.mesh import World


def go_on(state: TrainerState, world: World, *, until: int) -> TrainerState:
    while state.version < until:
        train_step(state, random_samples([30, 20, 12], seed=state.version), world)
    return state


def save_steps(
    folder: Path, steps: list[int], model: Path, world: World, config: Checkpoints | None = None
) -> TrainerState:
    """Checkpoints of an untrained model under these numbers."""
    state = open_state(model, world)
    store = CheckpointStore(folder, config or Checkpoints(), world)
    for step in steps:
        state.version = step
        store.save(state)
    return state


@pytest.fixture(scope="module")
def saved_at_2(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, world: World) -> Path:
    """A folder with one real checkpoint; tests that break it copy it first."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save_steps(folder, [2], tiny_model, world)
    return folder


@pytest.fixture
def copy_of_2(saved_at_2: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_at_2, tmp_path / "checkpoints"))


def test_training_goes_on_from_a_checkpoint_to_the_same_weights_to_the_bit(
    tmp_path: Path, tiny_model: Path, world: World
) -> None:
    straight = go_on(open_state(tiny_model, world), world, until=2)
    CheckpointStore(tmp_path, Checkpoints(), world).save(straight)
    expected = weights_of(go_on(straight, world, until=5).model)

    resumed = open_state(tiny_model, world)
    CheckpointStore(tmp_path, Checkpoints(), world).load(resumed, 2)
    assert resumed.version == 2
    found = weights_of(go_on(resumed, world, until=5).model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_random_numbers_go_on_where_they_were(tmp_path: Path, tiny_model: Path, world: World) -> None:
    torch.manual_seed(5)
    state = save_steps(tmp_path, [1], tiny_model, world)
    expected = torch.rand(4)
    torch.manual_seed(6)
    CheckpointStore(tmp_path, Checkpoints(), world).load(state, 1)
    assert torch.equal(torch.rand(4), expected)


def test_a_checkpoint_without_its_manifest_is_never_chosen(copy_of_2: Path) -> None:
    assert complete_steps(copy_of_2) == [2]
    (copy_of_2 / "step_2" / MANIFEST).unlink()
    assert complete_steps(copy_of_2) == []


def test_a_checkpoint_whose_files_are_cut_short_is_never_chosen(copy_of_2: Path) -> None:
    names = [path for path in (copy_of_2 / "step_2").iterdir() if path.name != MANIFEST]
    assert len(names) >= 3  # weights and optimizer state, their index, and the random state
    for path in names:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert complete_steps(copy_of_2) == [], path
        path.write_bytes(whole)
    assert complete_steps(copy_of_2) == [2]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", '{"files": 3}'])
def test_a_manifest_that_makes_no_sense_is_no_manifest(copy_of_2: Path, content: str) -> None:
    (copy_of_2 / "step_2" / MANIFEST).write_text(content)
    assert complete_steps(copy_of_2) == []


def test_what_was_being_written_at_a_crash_is_never_chosen_and_gives_way(
    copy_of_2: Path, tiny_model: Path, world: World
) -> None:
    (copy_of_2 / "step_2").rename(copy_of_2 / ".step_2.partial")
    assert complete_steps(copy_of_2) == []
    save_steps(copy_of_2, [2], tiny_model, world)
    assert [path.name for path in copy_of_2.iterdir()] == ["step_2"]
    assert complete_steps(copy_of_2) == [2]


def test_the_manifest_lists_every_file(saved_at_2: Path) -> None:
    folder = saved_at_2 / "step_2"
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["version"] == 2
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST}
    assert manifest["files"] == sizes


def test_a_fresh_run_starts_at_zero_whatever_lies_there(saved_at_2: Path) -> None:
    assert version_to_resume(saved_at_2, Checkpoints(), resume=False) == 0
    assert version_to_resume(saved_at_2, Checkpoints(resume_step=0), resume=True) == 0


@pytest.mark.parametrize(("config", "resume"), [(Checkpoints(resume_step=-1), False), (Checkpoints(), True)])
def test_a_resumed_run_takes_the_newest_that_is_whole(
    tmp_path: Path, tiny_model: Path, world: World, config: Checkpoints, resume: bool
) -> None:
    assert version_to_resume(tmp_path, config, resume=resume) == 0
    save_steps(tmp_path, [3, 9, 10], tiny_model, world)
    (tmp_path / "step_10" / MANIFEST).unlink()
    assert version_to_resume(tmp_path, config, resume=resume) == 9


def test_a_step_that_is_not_there_is_refused_with_those_that_are(
    tmp_path: Path, tiny_model: Path, world: World
) -> None:
    save_steps(tmp_path, [3, 9], tiny_model, world)
    with pytest.raises(ConfigError, match=re.escape(f"step 7 in {tmp_path} (complete: [3, 9])")):
        version_to_resume(tmp_path, Checkpoints(resume_step=7), resume=False)
    with pytest.raises(ConfigError, match=re.escape("(complete: none)")):
        version_to_resume(tmp_path / "nowhere", Checkpoints(resume_step=7), resume=False)


def test_the_newest_stay_and_so_do_those_of_the_interval(tmp_path: Path, tiny_model: Path, world: World) -> None:
    config = Checkpoints(keep_last=2, keep_interval=4)
    save_steps(tmp_path, list(range(1, 8)), tiny_model, world, config)
    assert complete_steps(tmp_path) == [4, 6, 7]


def test_all_stay_where_nothing_else_was_asked_for(tmp_path: Path, tiny_model: Path, world: World) -> None:
    save_steps(tmp_path, [1, 2, 3], tiny_model, world)
    assert complete_steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("back_to", [0, 2])
def test_after_going_back_the_checkpoints_of_the_old_way_are_never_chosen_again(
    tmp_path: Path, tiny_model: Path, world: World, back_to: int
) -> None:
    state = save_steps(tmp_path, [2, 6, 8], tiny_model, world)
    state.version = 0
    store = CheckpointStore(tmp_path, Checkpoints(resume_step=back_to, keep_last=1), world)
    store.resume(state, resume=True)
    assert state.version == back_to
    state.version = 3
    store.save(state)
    assert version_to_resume(tmp_path, Checkpoints(), resume=True) == 3
    (aside,) = tmp_path.glob("set_aside_*")  # nothing was deleted
    assert complete_steps(aside) == [step for step in [2, 6, 8] if step > back_to]


def test_resuming_the_newest_sets_nothing_aside(copy_of_2: Path, tiny_model: Path, world: World) -> None:
    state = open_state(tiny_model, world)
    CheckpointStore(copy_of_2, Checkpoints(), world).resume(state, resume=True)
    assert state.version == 2
    assert [path.name for path in copy_of_2.iterdir()] == ["step_2"]


@pytest.mark.parametrize(
    ("interval", "due"), [(None, [7]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7])], ids=["end", "every", "third"]
)
def test_checkpoints_are_due_at_the_interval_and_at_the_end(
    tmp_path: Path, world: World, interval: int | None, due: list[int]
) -> None:
    store = CheckpointStore(tmp_path, Checkpoints(interval=interval), world)
    assert [version for version in range(1, 8) if store.is_due(version, last=7)] == due
