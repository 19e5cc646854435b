"""Four processes that train as one, two and four ranks, for `test_resharding`: what some save, others go on with.

RANK=0..3 MASTER_ADDR=127.0.0.1 PORTS=a,b,c,… python tests/resharding.py MODEL_FOLDER OUTPUT_FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rank_processes import stages_of_this_rank
from tiny import content_of, open_exporter, open_state, open_store, random_samples, train_step
from trireme.trainer.mesh import World, open_world
from trireme.trainer.pieces import open_checkpoint, piece_of
from trireme.trainer.state import TrainerState, load_tensors, tensors_of

CAPACITY = 48
LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]


class Stage(NamedTuple):
    """Ranks that go on from what others saved, for one step, and save that."""

    name: str
    ranks: int
    replicas: int
    begins_with: str | None  # the stage whose checkpoint it goes on from


STAGES = (
    Stage("one", 1, 1, None),
    Stage("two", 2, 1, "one"),
    Stage("four_replicated", 4, 2, "two"),
    Stage("four", 4, 1, "four_replicated"),
    Stage("four_copies", 4, 4, "four"),
    Stage("one_again", 1, 1, "two"),
)


def run(stage: Stage, model: Path, folder: Path, world: World) -> dict[str, Any]:
    """What this rank had after loading and after a step of training, and how much it read."""
    state = open_state(model, world)
    exporter = open_exporter(folder / stage.name / "weights", model, world)
    if stage.begins_with:
        open_store(folder / stage.begins_with / "checkpoints", world).resume(state, resume=True)
    loaded = content_of(state) if stage.begins_with else {}
    num_read = read_bytes(state, folder / stage.begins_with / "checkpoints") if stage.begins_with else 0
    metrics = step(state, world)
    store = open_store(folder / stage.name / "checkpoints", world, exporter=exporter)
    store.save(state)
    store.wait()
    return {
        "loaded": loaded,
        "after": content_of(state),
        "metrics": metrics,
        "held": held_bytes(state),
        "read": num_read,
    }


def step(state: TrainerState, world: World) -> dict[str, float]:
    return train_step(state, random_samples(LENGTHS, seed=state.version), world, capacity=CAPACITY)


def read_bytes(state: TrainerState, checkpoints: Path) -> int:
    """That loading the checkpoint (again) takes from its files."""
    with open_checkpoint(checkpoints / f"step_{state.version}") as stored:
        load_tensors(state, stored)
        return stored.num_bytes_read


def held_bytes(state: TrainerState) -> int:
    """Of what this rank holds of all that a checkpoint brings back."""
    return sum(piece_of(tensor).num_bytes for tensor in tensors_of(state).values())


def main() -> None:
    model, folder = map(Path, sys.argv[1:])
    for stage in stages_of_this_rank(STAGES, folder):
        with open_world("cpu", threads=1, timeout_s=240, replicas=stage.replicas) as world:
            result = run(stage, model, folder, world)
            torch.save(result, folder / f"{stage.name}_{world.rank}.pt")
            world.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the trainer's door does, and why, see `run_door`
