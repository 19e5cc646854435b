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
from trireme.trainer.checkpoint import load_checkpoint
from trireme.trainer.mesh import World, open_world

CAPACITY = 48
LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]  # five rows of at most 48, so one of two ranks is a row short
SAVED_AT = 2
STEPS = 3


def batch(step: int) -> list[Sample]:
    return random_samples(LENGTHS, seed=step)


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
    return {"metrics": metrics, "gradients": gradients, "saved": saved, "weights": weights_of(state.model)}


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
