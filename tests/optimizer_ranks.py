"""One trainer rank of two, for `test_optimizer_ranks`: every optimizer, to be compared with a single rank's.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=… python tests/optimizer_ranks.py MODEL_FOLDER OUTPUT_FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tiny import content_of, random_samples, save, train_step, weights_of
from trireme.config.trainer import Optimizer, TrainerModel
from trireme.trainer.checkpoint import TrainerState, load_checkpoint
from trireme.trainer.mesh import World, open_world
from trireme.trainer.model import load_model
from trireme.trainer.optim import build_optimizer

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


def load(kind: str, model: Path, folder: Path, world: World) -> dict[str, torch.Tensor]:
    """What this number of ranks has after loading what another saved."""
    saved_by, _, kind = kind.rpartition(BECOMES)
    state = open_with(kind, model, world)
    load_checkpoint(state, folder / (saved_by or kind) / f"step_{STEPS}", rank=world.rank)
    return content_of(state)


def main() -> None:
    model, folder = map(Path, sys.argv[1:])
    with open_world("cpu", threads=1, timeout_s=240) as world:
        trained = {kind: train(kind, model, folder / "by_two", world) for kind in KINDS}
        loaded = {kind: load(kind, model, folder / "by_one", world) for kind in LOADED}
        torch.save({"trained": trained, "loaded": loaded}, folder / f"result_{world.rank}.pt")


if __name__ == "__main__":
    main()
    os._exit(0)  # as the trainer's door does, and why, see `run_door`
