"""Two ranks that train a mixture of experts with the engine's routes, for `test_moe_ranks`: each with rows of its own,
then both with a part of each row.

RANK=0..1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 PORTS=a,b python tests/moe_ranks.py MODEL_FOLDER OUTPUT_FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe import NUM_EXPERTS, TOP_K
from tiny import num_loss_samples, num_loss_tokens, random_samples, take_gradients
from trireme.algo.packing import Sample, micro_batches_of_rank
from trireme.config.trainer import ActivationCheckpointing, Experts, Loss, TrainerModel
from trireme.messages import Routed, build_tokens
from trireme.trainer.mesh import World, open_world
from trireme.trainer.model import load_model
from trireme.trainer.moe import expert_metrics
from trireme.trainer.step import forward_backward, policy_gradient

CAPACITY = 41
LENGTHS = [31, 18, 23, 9]
LAYERS = 2
TEAMS = (1, 2)  # ranks that share a row


def routed_samples() -> list[Sample]:
    """Sent anywhere: the trainer's own routers would hardly ever choose so."""
    rng = np.random.default_rng(1)
    return [_routed(sample, rng) for sample in random_samples(LENGTHS)]


def _routed(sample: Sample, rng: np.random.Generator) -> Sample:
    tokens = sample.tokens
    chosen = [rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range((tokens.length - 1) * LAYERS)]
    known = np.ones(tokens.length, np.uint8)
    known[-1] = 0
    columns = {name: getattr(tokens, name) for name in ("ids", "loss_mask", "logprobs", "advantages", "versions")}
    routed = Routed(known, np.concatenate(chosen).astype(np.uint8), LAYERS, TOP_K)
    return Sample(build_tokens(**columns, routed=routed), sample.temperature)


def train(folder: Path, world: World) -> dict[str, Any]:
    """Gradients of one batch, and what is said of its experts."""
    config = TrainerModel(cp=world.cp_size, ac=ActivationCheckpointing(), moe=Experts(router_replay=True))
    model = load_model(config, str(folder), world)
    samples = routed_samples()
    metrics = forward_backward(
        model,
        micro_batches_of_rank(samples, capacity=CAPACITY, rank=world.dp_rank, world=world.dp_size),
        loss_tokens=num_loss_tokens(samples),
        loss_samples=num_loss_samples(samples),
        step=0,
        loss_function=policy_gradient(Loss()),
        world=world,
    )
    return {"metrics": metrics | expert_metrics(model, world), "gradients": take_gradients(model)}


def main() -> None:
    model, folder = map(Path, sys.argv[1:])
    found = []
    for port, team in zip(os.environ["PORTS"].split(","), TEAMS, strict=True):
        os.environ["MASTER_PORT"] = port
        with open_world("cpu", threads=1, timeout_s=240, cp=team) as world:
            found.append(train(model, world))
    torch.save(found, folder / f"result_{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
    os._exit(0)  # as the trainer's door does, and why, see `run_door`
