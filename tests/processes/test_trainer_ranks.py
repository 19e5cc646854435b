"""However many ranks train, it is the same training."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tiny
from rank_processes import require_success, results_of, run_rank, started_ranks
from trireme.algo.packing import Sample
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Loss, Optimizer, TrainerConfig
from trireme.trainer.parallel.mesh import KeepAlive, World, open_world
from trireme.trainer.step import Stepper, base_state

PATIENCE_S = 6.0

CAPACITY = 48
LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]  # six rows of at most 48, some of several samples
FEW = [40, 30, 33, 44, 26]  # five rows, so one of two ranks is a row short
STEPS = 3


def batch(step: int) -> list[Sample]:
    return tiny.random_samples(FEW if step % 2 else LENGTHS, seed=step)


def train(model: Path, world: World) -> dict[str, Any]:
    """Gradients of a loss by sequence, whose samples lie on different ranks. Then several iterations, a reference model
    that moves, an entropy bonus, a correction by sequence."""
    plain, gradients = tiny.open_state(model, world).model, {}
    for normalize in ("token", "sequence", "constant"):
        loss = Loss(type="gspo", clip_low=0.5, clip_high=2.0, normalize=normalize)
        tiny.backward(plain, batch(0), world, capacity=CAPACITY, loss=loss)
        gradients[normalize] = tiny.take_gradients(plain)
    loss = Loss(type="decoupled", correction="sequence_truncate", normalize="sequence", entropy_bonus=0.1)
    loss = loss.model_copy(update={"beta": 0.2, "kl_estimator": "k2", "reference_update_every": 2})
    trainer = TrainerConfig(optim=Optimizer(lr=1e-3), num_iterations=2, loss=loss)
    config = RunConfig(model=Model(name=str(model)), trainer=trainer)
    state = base_state(config, world)
    stepper = Stepper(config, state, world)
    replies = (tiny.batch_reply(batch(step), world, capacity=CAPACITY, step=step) for step in range(STEPS))
    metrics = [stepper.step(reply) for reply in replies]
    assert state.reference is not None
    return {
        "gradients": gradients,
        "metrics": metrics,
        "weights": tiny.weights_of(state.model),
        "reference": tiny.weights_of(state.reference.model),
    }


def test_two_ranks_train_as_one(tiny_model: Path, tmp_path: Path, world: World) -> None:
    with started_ranks(__file__, tiny_model, tmp_path) as processes:
        alone = train(tiny_model, world)
        require_success(processes)
    together = results_of(tmp_path)
    for rank in together:
        for name, expected in alone["gradients"].items():
            assert tiny.largest_difference(expected, rank["gradients"][name]) < 1e-5, name
        for part in ("weights", "reference"):
            assert tiny.largest_difference(alone[part], rank[part]) < 1e-3
        for ours, theirs in zip(alone["metrics"], rank["metrics"], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-5)
    assert tiny.are_equal(*(rank["weights"] for rank in together))  # to the bit


def test_ranks_wait_for_the_first_one_longer_than_their_timeout_where_it_tells_them_to(tmp_path: Path) -> None:
    """As it does while the orchestrator evaluates, or waits for room on a disk."""
    with started_ranks(__file__, tmp_path) as processes:
        require_success(processes)
    assert [(tmp_path / f"said_{rank}").read_text() for rank in range(2)] == ["7", "7"]


def wait_longer(folder: Path) -> None:
    with open_world("cpu", threads=1, timeout_s=PATIENCE_S) as world:
        world.barrier()
        hold_on, began = KeepAlive(world, timeout_s=PATIENCE_S), time.monotonic()
        while world.is_main and time.monotonic() - began < 1.5 * PATIENCE_S:
            time.sleep(0.05)
            hold_on()
        (folder / f"said_{world.rank}").write_text(str(world.agree(7 if world.is_main else 0)))


if __name__ == "__main__":
    run_rank(lambda model, _, world: train(model, world)) if len(sys.argv) > 2 else wait_longer(Path(sys.argv[1]))
