"""Whatever the optimizer: two ranks train as one does, and each goes on with what the other saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rank_processes import run_rank, run_ranks
from tiny import (
    are_equal,
    content_of,
    largest_difference,
    random_samples,
    save,
    save_tiny_model,
    train_step,
    weights_of,
)
from trireme.config.trainer import Optimizer, TrainerModel
from trireme.trainer.checkpoint import TrainerState, load_checkpoint
from trireme.trainer.mesh import World
from trireme.trainer.model import load_model
from trireme.trainer.optim import build_optimizer

pytestmark = pytest.mark.e2e  # real ranks beside one another

KINDS = ("adamw", "adamw_8bit", "muon", "sgd")
BECOMES = " becomes "
LOADED = (*KINDS, f"adamw{BECOMES}adamw_8bit", f"adamw_8bit{BECOMES}adamw")
CAPACITY = 48
LENGTHS = [40, 30, 18, 33, 15, 44]
STEPS = 3


def open_with(kind: str, model: Path, world: World) -> TrainerState:
    loaded = load_model(TrainerModel(), str(model), world)
    return TrainerState(loaded, build_optimizer(loaded, Optimizer(type=kind, lr=1e-3, weight_decay=0.1)))


def train(kind: str, model: Path, folder: Path, world: World) -> dict[str, Any]:
    """Some steps, and a checkpoint of the last."""
    state = open_with(kind, model, world)
    for step in range(STEPS):
        train_step(state, random_samples(LENGTHS, seed=step), world, capacity=CAPACITY)
    save(folder / kind, state, world)
    return {"weights": weights_of(state.model), "content": content_of(state)}


def loaded(kind: str, model: Path, folder: Path, world: World) -> dict[str, torch.Tensor]:
    """What this number of ranks has after loading what another saved."""
    saved_by, _, kind = kind.rpartition(BECOMES)
    state = open_with(kind, model, world)
    load_checkpoint(state, folder / (saved_by or kind) / f"step_{STEPS}", rank=world.rank)
    return content_of(state)


def train_and_load(model: Path, folder: Path, world: World) -> dict[str, Any]:
    trained = {kind: train(kind, model, folder / "by_two", world) for kind in KINDS}
    return {"trained": trained, "loaded": {kind: loaded(kind, model, folder / "by_one", world) for kind in LOADED}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, world: World) -> tuple[Path, Path, dict[str, Any], list[Any]]:
    """The model, the folder, what one rank trained and what each of two ranks trained and loaded."""
    model = save_tiny_model(tmp_path_factory.mktemp("model"), hidden=64, layers=1)
    folder = tmp_path_factory.mktemp("ranks")
    alone = {kind: train(kind, model, folder / "by_one", world) for kind in KINDS}
    return model, folder, alone, run_ranks(__file__, model, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_and_each_has_what_the_other_saved_to_the_bit(
    kind: str, runs: tuple[Path, Path, dict[str, Any], list[Any]], world: World
) -> None:
    model, folder, alone, together = runs
    trained = [rank["trained"][kind] for rank in together]
    assert are_equal(trained[0]["weights"], trained[1]["weights"])
    tolerance = 1e-2 if kind == "adamw_8bit" else 1e-3
    assert largest_difference(alone[kind]["weights"], trained[0]["weights"]) < tolerance
    assert all(are_equal(alone[kind]["content"], rank["loaded"][kind]) for rank in together)
    assert are_equal(trained[0]["content"], loaded(kind, model, folder / "by_two", world))
    if kind == "adamw_8bit":
        assert sum(name.startswith("exp_avg_scale of") for name in trained[1]["content"]) > 3
        assert {tensor.dtype for tensor in trained[1]["content"].values()} == {torch.float32, torch.uint8}


@pytest.mark.parametrize("change", LOADED[len(KINDS) :])
def test_moments_in_another_format_are_the_same_on_two_ranks_as_on_one(
    change: str, runs: tuple[Path, Path, dict[str, Any], list[Any]], world: World
) -> None:
    model, folder, _, together = runs
    expected = loaded(change, model, folder / "by_one", world)
    assert all(are_equal(expected, rank["loaded"][change]) for rank in together)


if __name__ == "__main__":
    run_rank(train_and_load)
