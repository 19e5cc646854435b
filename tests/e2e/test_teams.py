"""However ranks are divided into teams that share rows and copies of the model, it is the same training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import teams
from rank_processes import Ranks, require_success, started_ranks
from tiny import largest_difference
from trireme.trainer.mesh import World

pytestmark = pytest.mark.e2e  # real ranks beside one another


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    teams.save_models(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teams")


@pytest.fixture(scope="module")
def processes(models: Path, folder: Path) -> Iterator[Ranks]:
    with started_ranks(teams.__file__, models, folder, count=4, num_ports=len(teams.STAGES)) as started:
        yield started


@pytest.fixture(scope="module")
def alone(
    processes: Ranks, models: Path, tmp_path_factory: pytest.TempPathFactory, world: World
) -> dict[str, dict[str, Any]]:
    """Of each model; runs while the ranks run."""
    folder = tmp_path_factory.mktemp("alone")
    return {model: teams.run(stage, models, folder / model, world) for model, stage in teams.EXPECTED.items()}


@pytest.fixture(scope="module")
def found(alone: dict[str, Any], processes: Ranks, folder: Path) -> dict[str, list[dict[str, Any]]]:
    require_success(processes)
    return {
        stage.name: [torch.load(folder / f"{stage.name}_{rank}.pt", weights_only=True) for rank in range(stage.ranks)]
        for stage in teams.STAGES
    }


stages = pytest.mark.parametrize("stage", teams.STAGES, ids=lambda stage: stage.name)


@stages
@pytest.mark.parametrize("loss", teams.LOSSES)
def test_ranks_however_divided_have_the_gradients_and_metrics_of_one(
    alone: dict[str, Any], found: dict[str, Any], stage: teams.Stage, loss: str
) -> None:
    expected = alone[stage.model]["gradients"][loss]
    for rank in found[stage.name]:
        assert largest_difference(expected["gradients"], rank["gradients"][loss]["gradients"]) < 1e-5
        assert rank["gradients"][loss]["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-6)


@stages
def test_ranks_however_divided_train_as_one(alone: dict[str, Any], found: dict[str, Any], stage: teams.Stage) -> None:
    """Iterations, a reference model, a correction by sequence."""
    expected = alone[stage.model]["trained"]
    for rank in found[stage.name]:
        assert largest_difference(expected["weights"], rank["trained"]["weights"]) < 1e-3
        for ours, theirs in zip(expected["metrics"], rank["trained"]["metrics"], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-5)


@stages
def test_ranks_however_divided_stay_together_to_the_bit(found: dict[str, Any], stage: teams.Stage) -> None:
    first, *others = (rank["trained"]["weights"] for rank in found[stage.name])
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@stages
def test_a_checkpoint_brings_back_what_ranks_held_however_divided(found: dict[str, Any], stage: teams.Stage) -> None:
    assert all(rank["trained"]["is_back"] for rank in found[stage.name])


@stages
def test_a_row_of_fewer_tokens_than_ranks_takes_part(found: dict[str, Any], stage: teams.Stage) -> None:
    assert all(rank["empty"] == [False] for rank in found[stage.name])


def test_an_attention_that_cannot_be_shared_is_a_question_of_configuration(found: dict[str, Any]) -> None:
    for rank in found["team"]:
        (message,) = rank["refusals"]
        assert 'trainer.model.attn = "eager"' in message
        assert "cp = 1" in message
