"""However many ranks train, it is the same training."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from rank_processes import require_success, results_of, run_rank, started_ranks
from tiny import (
    are_equal,
    content_of,
    largest_difference,
    open_state,
    open_store,
    take_gradients,
    train_step,
    weights_of,
)
from trireme.algo.packing import Sample, micro_batches_of_rank
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Loss, Optimizer, TrainerConfig
from trireme.ledger.manifest import complete_steps, read_manifest
from trireme.trainer.checkpoint import load_checkpoint
from trireme.trainer.mesh import HoldOn, World, open_world
from trireme.trainer.stepper import Stepper, base_state

pytestmark = pytest.mark.e2e  # real ranks beside one another

PATIENCE_S = 6.0

CAPACITY = 48
LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]  # six rows of at most 48, some of several samples
FEW = [40, 30, 33, 44, 26]  # five rows, so one of two ranks is a row short
SAVED_AT = 2
STEPS = 3


def batch(step: int) -> list[Sample]:
    return tiny.random_samples(FEW if step % 2 else LENGTHS, seed=step)


def train(model: Path, folder: Path, world: World) -> dict[str, Any]:
    """Some steps from the base model, with a checkpoint on the way and the weights at the end."""
    state = open_state(model, world)
    store = open_store(folder / "checkpoints", world, exporter=tiny.open_exporter(folder / "weights", model, world))
    metrics = [tiny.backward(state, batch(0), world, capacity=CAPACITY)]
    gradients = take_gradients(state.model)
    while state.version < STEPS:
        metrics.append(train_step(state, batch(state.version), world, capacity=CAPACITY))
        if state.version == SAVED_AT:
            saved = content_of(state)
            store.save(state)
    store.wait()
    return {
        "metrics": metrics,
        "gradients": gradients,
        "saved": saved,
        "weights": weights_of(state.model),
        "normalized": gradients_by_normalization(model, world),
        "everything": train_with_everything(model, world),
    }


def gradients_by_normalization(model: Path, world: World) -> dict[str, dict[str, torch.Tensor]]:
    """Of a loss by sequence, whose samples lie on different ranks."""
    state = open_state(model, world)
    found = {}
    for normalize in ("token", "sequence", "constant"):
        loss = Loss(type="gspo", clip_low=0.5, clip_high=2.0, normalize=normalize)
        tiny.backward(state, batch(0), world, capacity=CAPACITY, loss=loss)
        found[normalize] = take_gradients(state.model)
    return found


def train_with_everything(model: Path, world: World) -> dict[str, Any]:
    """Several iterations, a reference model that moves, an entropy bonus, a correction by sequence."""
    loss = Loss(type="decoupled", correction="sequence_truncate", normalize="sequence", entropy_bonus=0.1)
    loss = loss.model_copy(update={"beta": 0.2, "kl_estimator": "k2", "reference_update_every": 2})
    trainer = TrainerConfig(optim=Optimizer(lr=1e-3), num_iterations=2, loss=loss)
    config = RunConfig(model=Model(name=str(model)), trainer=trainer)
    state = base_state(config, world)
    stepper = Stepper(config, state, world)
    replies = (tiny.batch_reply(batch(step), world, capacity=CAPACITY, step=step) for step in range(STEPS))
    metrics = [stepper.step(reply) for reply in replies]
    assert state.reference is not None
    return {"metrics": metrics, "weights": weights_of(state.model), "reference": weights_of(state.reference.model)}


def loaded(model: Path, checkpoint: Path, world: World) -> dict[str, torch.Tensor]:
    """What this number of ranks has after loading."""
    state = open_state(model, world)
    load_checkpoint(state, checkpoint, rank=world.rank)
    return content_of(state)


def train_and_load(model: Path, folder: Path, world: World) -> dict[str, Any]:
    return train(model, folder, world) | {"loaded": loaded(model, folder / "by_one" / "step_1", world)}


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, world: World
) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """The folder, what one rank trained, and what two did, which loaded what one had saved."""
    folder = tmp_path_factory.mktemp("two_ranks")
    state = open_state(tiny_model, world)
    train_step(state, batch(0), world, capacity=CAPACITY)
    tiny.save(folder / "by_one", state, world)
    with started_ranks(__file__, tiny_model, folder) as processes:
        alone = train(tiny_model, tmp_path_factory.mktemp("one_rank"), world) | {"loaded": content_of(state)}
        require_success(processes)
    return folder, alone, results_of(folder)


def test_a_batch_leaves_one_of_the_two_ranks_a_row_short_and_the_others_have_rows_of_several_samples() -> None:
    full, short = (
        [micro_batches_of_rank(batch(step), capacity=CAPACITY, rank=rank, world=2) for rank in range(2)]
        for step in range(2)
    )
    assert [len(share) for share in (*full, *short)] == [3, 3, 3, 3]
    assert [sum(row.tokens.length == 1 for row in share) for share in full] == [0, 0]
    assert max(len(row.lengths) for share in full for row in share) > 1
    assert sorted(share[-1].tokens.length == 1 for share in short) == [False, True]


def test_two_ranks_train_as_one_however_losses_are_normalized_and_with_all_terms(
    runs: tuple[Path, dict[str, Any], list[dict[str, Any]]],
) -> None:
    _, alone, together = runs
    for rank in together:
        for name, expected in {"gradients": alone["gradients"], **alone["normalized"]}.items():
            assert largest_difference(expected, rank["normalized"].get(name, rank["gradients"])) < 1e-5, name
        assert largest_difference(alone["weights"], rank["weights"]) < 1e-4
        for expected, found in zip(alone["metrics"], rank["metrics"], strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        expected, found = alone["everything"], rank["everything"]
        assert largest_difference(expected["weights"], found["weights"]) < 1e-3
        assert largest_difference(expected["reference"], found["reference"]) < 1e-3
        for ours, theirs in zip(expected["metrics"], found["metrics"], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-5)
        assert are_equal(rank["loaded"], alone["loaded"])
    assert are_equal(*(rank["weights"] for rank in together))  # to the bit


def test_what_two_ranks_saved_half_each_one_rank_goes_on_with(
    runs: tuple[Path, dict[str, Any], list[dict[str, Any]]], tiny_model: Path, world: World
) -> None:
    folder, _, (first, _) = runs
    assert complete_steps(folder / "checkpoints") == [SAVED_AT]
    manifest = read_manifest(folder / "checkpoints" / f"step_{SAVED_AT}")
    assert manifest.world_size == 2
    sizes = [manifest.files[f"rank_{rank}.safetensors"].size for rank in range(2)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
    exported = AutoModelForCausalLM.from_pretrained(folder / "weights" / f"step_{SAVED_AT}")
    assert all(torch.equal(parameter, first["saved"][name]) for name, parameter in exported.named_parameters())
    state = open_state(tiny_model, world)
    open_store(folder / "checkpoints", world).resume(state, resume=True)
    assert state.version == SAVED_AT
    assert are_equal(content_of(state), first["saved"])
    while state.version < STEPS:
        train_step(state, batch(state.version), world, capacity=CAPACITY)
    assert largest_difference(first["weights"], weights_of(state.model)) < 1e-4


def test_ranks_wait_for_the_first_one_longer_than_their_timeout_where_it_tells_them_to(tmp_path: Path) -> None:
    """As it does while the orchestrator evaluates, or waits for room on a disk."""
    with started_ranks(__file__, tmp_path) as processes:
        require_success(processes)
    assert [(tmp_path / f"said_{rank}").read_text() for rank in range(2)] == ["7", "7"]


def wait_longer(folder: Path) -> None:
    """Within a rank."""
    with open_world("cpu", threads=1, timeout_s=PATIENCE_S) as world:
        world.barrier()
        hold_on, began = HoldOn(world, timeout_s=PATIENCE_S), time.monotonic()
        while world.is_main and time.monotonic() - began < 1.5 * PATIENCE_S:
            time.sleep(0.05)
            hold_on()
        (folder / f"said_{world.rank}").write_text(str(world.agree(7 if world.is_main else 0)))


if __name__ == "__main__":
    run_rank(train_and_load) if len(sys.argv) > 2 else wait_longer(Path(sys.argv[1]))
