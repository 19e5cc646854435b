"""However many ranks train a mixture of experts, its tokens go where the engine sent them."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe import routed, save_moe
from rank_processes import require_success, run_stages, stage_results, started_ranks
from tiny import backward, random_samples, take_gradients
from trireme.config.trainer import ActivationCheckpointing, Experts, TrainerModel
from trireme.trainer.model.model import load_model
from trireme.trainer.model.moe import expert_metrics
from trireme.trainer.parallel.mesh import World

CAPACITY = 41
LENGTHS = [31, 18, 23, 9]
STAGES = [SimpleNamespace(name=f"{cp} to a row", ranks=2, replicas=1, cp=cp) for cp in (1, 2)]


def train(folder: Path, world: World) -> dict[str, Any]:
    config = TrainerModel(cp=world.cp_size, ac=ActivationCheckpointing(), moe=Experts(router_replay=True))
    model = load_model(config, str(folder), world)
    samples = routed(random_samples(LENGTHS))
    metrics = backward(model, samples, world, capacity=CAPACITY)
    found = {"metrics": metrics | expert_metrics(model), "gradients": take_gradients(model)}
    return found | {"cp": world.cp_size}


def test_two_ranks_send_tokens_where_one_does(tmp_path: Path, world: World) -> None:
    model = save_moe(tmp_path / "model", num_key_value_heads=2)
    with started_ranks(__file__, model, tmp_path, num_ports=len(STAGES)) as processes:
        require_success(processes)
    alone = train(model, world)
    assert alone["metrics"]["moe/rerouted_frac"] > 0.5
    for first, second in stage_results(STAGES, tmp_path).values():
        assert first["metrics"] == second["metrics"]
        for name in ("loss", "mismatch_kl", "moe/rerouted_frac", "moe/busiest_expert", "moe/idle_experts_frac"):
            padding = 0.1 if name.startswith("moe") and first["cp"] > 1 else 0  # a part may be longer than its tokens
            expected = pytest.approx(alone["metrics"][name], rel=1e-5 + padding, abs=1e-7)
            assert first["metrics"][name] == expected, name
        torch.testing.assert_close(first["gradients"], alone["gradients"], rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    model, folder = map(Path, sys.argv[1:])
    run_stages(STAGES, lambda _, world: train(model, world), folder)
