"""However many ranks train a mixture of experts, its tokens go where the engine sent them."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe import routed, save_moe
from rank_processes import require_success, results_of, started_ranks
from tiny import backward, random_samples, take_gradients
from trireme.config.trainer import ActivationCheckpointing, Experts, TrainerModel
from trireme.trainer.model.model import load_model
from trireme.trainer.model.moe import expert_metrics
from trireme.trainer.parallel.mesh import World, open_world

CAPACITY = 41
LENGTHS = [31, 18, 23, 9]
TEAMS = (1, 2)  # ranks that share a row


def train(folder: Path, world: World) -> dict[str, Any]:
    config = TrainerModel(cp=world.cp_size, ac=ActivationCheckpointing(), moe=Experts(router_replay=True))
    model = load_model(config, str(folder), world)
    samples = routed(random_samples(LENGTHS))
    metrics = backward(model, samples, world, capacity=CAPACITY)
    return {"metrics": metrics | expert_metrics(model, world), "gradients": take_gradients(model)}


def main() -> None:
    model, folder = map(Path, sys.argv[1:])
    found = []
    for port, team in zip(os.environ["PORTS"].split(","), TEAMS, strict=True):
        os.environ["MASTER_PORT"] = port
        with open_world("cpu", threads=1, timeout_s=240, cp=team) as world:
            found.append(train(model, world))
    torch.save(found, folder / f"result_{os.environ['RANK']}.pt")


def test_two_ranks_send_tokens_where_one_does(tmp_path: Path, world: World) -> None:
    model = save_moe(tmp_path / "model", num_key_value_heads=2)
    with started_ranks(__file__, model, tmp_path, num_ports=len(TEAMS)) as processes:
        require_success(processes)
    alone = train(model, world)
    assert alone["metrics"]["moe/rerouted_frac"] > 0.5
    for stage, (first, second) in enumerate(zip(*results_of(tmp_path), strict=True)):
        assert first["metrics"] == second["metrics"]
        for name in ("loss", "mismatch_kl", "moe/rerouted_frac", "moe/busiest_expert", "moe/idle_experts_frac"):
            padding = 0.1 if name.startswith("moe") and stage else 0  # a part may be longer than its tokens
            expected = pytest.approx(alone["metrics"][name], rel=1e-5 + padding, abs=1e-7)
            assert first["metrics"][name] == expected, name
        torch.testing.assert_close(first["gradients"], alone["gradients"], rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main()
