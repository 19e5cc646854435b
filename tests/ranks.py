"""One trainer rank of two, for `test_trainer_ranks`: the same training, to be compared with that of a single rank.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=… python tests/ranks.py MODEL_FOLDER OUTPUT_FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tiny import (
    backward,
    batch_reply,
    content_of,
    open_exporter,
    open_state,
    open_store,
    random_samples,
    take_gradients,
    train_step,
    weights_of,
)
from trireme.algo.packing import Sample
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Loss, Optimizer, TrainerConfig
from trireme.trainer.checkpoint import load_checkpoint
from trireme.trainer.mesh import World, open_world
from trireme.trainer.stepper import Stepper, base_state

CAPACITY = 48
LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]  # six rows of at most 48, some of several samples
FEW = [40, 30, 33, 44, 26]  # five rows, so one of two ranks is a row short
SAVED_AT = 2
STEPS = 3


def batch(step: int) -> list[Sample]:
    return random_samples(FEW if step % 2 else LENGTHS, seed=step)


def train(model: Path, folder: Path, world: World) -> dict[str, Any]:
    """Some steps from the base model, with a checkpoint on the way and the weights at the end."""
    state = open_state(model, world)
    store = open_store(folder / "checkpoints", world, exporter=open_exporter(folder / "weights", model, world))
    metrics = [backward(state, batch(0), world, capacity=CAPACITY)]
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
        backward(state, batch(0), world, capacity=CAPACITY, loss=loss)
        found[normalize] = take_gradients(state.model)
    return found


def train_with_everything(model: Path, world: World) -> dict[str, Any]:
    """Several iterations, a reference model that moves, an entropy bonus, a correction by sequence."""
    config = RunConfig(
        model=Model(name=str(model)),
        trainer=TrainerConfig(
            optim=Optimizer(lr=1e-3),
            num_iterations=2,
            loss=Loss(
                type="decoupled",
                correction="sequence_truncate",
                normalize="sequence",
                beta=0.2,
                kl_estimator="k2",
                reference_update_every=2,
                entropy_bonus=0.1,
            ),
        ),
    )
    state = base_state(config, world)
    stepper = Stepper(config, state, world)
    replies = (batch_reply(batch(step), world, capacity=CAPACITY, step=step) for step in range(STEPS))
    metrics = [stepper.step(reply) for reply in replies]
    assert state.reference is not None
    return {
        "metrics": metrics,
        "weights": weights_of(state.model),
        "reference": weights_of(state.reference.model),
    }


def load(model: Path, checkpoint: Path, world: World) -> dict[str, torch.Tensor]:
    """What this number of ranks has after loading."""
    state = open_state(model, world)
    load_checkpoint(state, checkpoint, rank=world.rank)
    return content_of(state)


def main() -> None:
    model, folder = map(Path, sys.argv[1:])
    with open_world("cpu", threads=1, timeout_s=240) as world:
        result = train(model, folder, world) | {"loaded": load(model, folder / "by_one" / "step_1", world)}
        torch.save(result, folder / f"result_{world.rank}.pt")


if __name__ == "__main__":
    main()
    os._exit(0)  # as the trainer's door does, and why, see `run_door`
