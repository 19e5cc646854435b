"""However many ranks train a mixture of experts, its tokens go where the engine sent them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moe_ranks
from moe import save_moe
from rank_processes import require_success, started_ranks
from trireme.trainer.mesh import World

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_moe(tmp_path_factory.mktemp("model"), num_key_value_heads=2)


@pytest.fixture(scope="module")
def together(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """By rank, then by stage."""
    folder = tmp_path_factory.mktemp("two_ranks")
    with started_ranks(moe_ranks.__file__, model, folder, num_ports=len(moe_ranks.TEAMS)) as processes:
        require_success(processes)
    return [torch.load(folder / f"result_{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("stage", range(len(moe_ranks.TEAMS)), ids=["rows of their own", "a part of each row"])
def test_two_ranks_send_tokens_where_one_does(
    together: list[list[dict[str, Any]]], model: Path, world: World, stage: int
) -> None:
    alone = moe_ranks.train(model, world)
    first, second = (rank[stage] for rank in together)
    assert first["metrics"] == second["metrics"]
    for name in ("loss", "mismatch_kl", "moe/rerouted_frac", "moe/busiest_expert", "moe/idle_experts_frac"):
        padding = 0.1 if name.startswith("moe") and stage else 0  # a part may be longer than its tokens
        assert first["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-5 + padding, abs=1e-7), name
    assert first["gradients"].keys() == alone["gradients"].keys()
    for name, gradient in alone["gradients"].items():
        torch.testing.assert_close(first["gradients"][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert alone["metrics"]["moe/rerouted_frac"] > 0.5
