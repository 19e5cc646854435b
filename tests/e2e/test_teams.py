"""However ranks are divided into teams that share rows and copies of the model, it is the same training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import teams
from rank_processes import require_success, started_ranks
from tiny import largest_difference
from trireme.trainer.parallel.mesh import World

pytestmark = pytest.mark.slow


def test_ranks_however_divided_train_as_one(tmp_path: Path, world: World) -> None:
    """Their gradients and metrics for each loss; two steps of two iterations with a reference model; a checkpoint."""
    teams.save_models(tmp_path)
    with started_ranks(teams.__file__, tmp_path, tmp_path, count=4, num_ports=len(teams.STAGES)) as processes:
        alone = {
            model: teams.run(stage, tmp_path, tmp_path / "alone" / model, world)
            for model, stage in teams.EXPECTED.items()
        }
        require_success(processes)
    for stage in teams.STAGES:
        expected = alone[stage.model]
        ranks = [torch.load(tmp_path / f"{stage.name}_{rank}.pt", weights_only=True) for rank in range(stage.ranks)]
        first = ranks[0]["trained"]["weights"]
        for rank in ranks:
            for loss in teams.LOSSES:
                ours, theirs = rank["gradients"][loss], expected["gradients"][loss]
                assert largest_difference(theirs["gradients"], ours["gradients"]) < 1e-5, (stage, loss)
                assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4, abs=1e-6), (stage, loss)
            trained = rank["trained"]
            assert all(torch.equal(first[name], trained["weights"][name]) for name in first), stage
            assert largest_difference(expected["trained"]["weights"], trained["weights"]) < 1e-3, stage
            for ours, theirs in zip(trained["metrics"], expected["trained"]["metrics"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), stage
            assert trained["is_back"], f"a checkpoint of {stage} brings back something else"
            assert rank["empty"] == [False], f"a row of fewer tokens than ranks, in {stage}"
            if stage.name == "team":
                (message,) = rank["refusals"]
                assert 'trainer.model.attn = "eager"' in message
                assert "cp = 1" in message
