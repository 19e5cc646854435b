"""One trainer rank of two with adapters, for `e2e/test_lora_ranks`: the same training as that of a single rank.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=… python tests/lora_ranks.py MODEL_FOLDER OUTPUT_FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tiny import batch_reply, content_of, open_exporter, open_store, random_samples, weights_of
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Lora, Loss, Optimizer, TrainerConfig, TrainerModel
from trireme.trainer.checkpoint import load_checkpoint
from trireme.trainer.mesh import World, open_world
from trireme.trainer.served import merged_tensors
from trireme.trainer.state import TrainerState
from trireme.trainer.stepper import Stepper, base_state

CAPACITY = 48
LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]  # five rows of at most 48, so one of two ranks is a row short
SAVED_AT = 2
STEPS = 3


def config_of(model: Path) -> RunConfig:
    return RunConfig(
        model=Model(name=str(model)),
        trainer=TrainerConfig(
            model=TrainerModel(lora=Lora(rank=3, alpha=6)),  # 3 rows for two ranks: uneven pieces
            optim=Optimizer(lr=1e-2),
            loss=Loss(beta=0.2, reference_update_every=2),
        ),
    )


def step(config: RunConfig, state: TrainerState, world: World) -> dict[str, float]:
    samples = random_samples(LENGTHS, seed=state.version)
    return Stepper(config, state, world).step(batch_reply(samples, world, capacity=CAPACITY, step=state.version))


def train(model: Path, folder: Path, world: World) -> dict[str, Any]:
    """Some steps from the base model, with a checkpoint on the way and the weights at the end."""
    config = config_of(model)
    state = base_state(config, world)
    begun = weights_of(state.model)
    exporter = open_exporter(folder / "weights", model, world)
    store = open_store(folder / "checkpoints", world, exporter=exporter)
    metrics = []
    while state.version < STEPS:
        metrics.append(step(config, state, world))
        if state.version == SAVED_AT:
            saved = content_of(state)
            store.save(state)
    store.wait()
    merged = dict(merged_tensors(state.model, torch.float32))
    return {"begun": begun, "metrics": metrics, "saved": saved, "weights": weights_of(state.model), "merged": merged}


def load(model: Path, checkpoint: Path, world: World) -> dict[str, torch.Tensor]:
    """What this number of ranks has after loading."""
    state = base_state(config_of(model), world)
    load_checkpoint(state, checkpoint, rank=world.rank)
    return content_of(state)


def main() -> None:
    model, folder = map(Path, sys.argv[1:])
    with open_world("cpu", threads=1, timeout_s=240) as world:
        result = train(model, folder / "by_two", world)
        result |= {"loaded": load(model, folder / "by_one/checkpoints" / f"step_{SAVED_AT}", world)}
        torch.save(result, folder / f"result_{world.rank}.pt")


if __name__ == "__main__":
    main()
    os._exit(0)  # as the trainer's door does, and why, see `run_door`
