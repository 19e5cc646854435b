"""Whatever the optimizer: two ranks train as one does, and each goes on with what the other saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import optimizer_ranks as ranks
from rank_processes import require_success, started_ranks
from tiny import are_equal, largest_difference, save_tiny_model
from trireme.trainer.mesh import World

pytestmark = pytest.mark.e2e  # real ranks beside one another


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=64, layers=1)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory, world: World) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    trained = {kind: ranks.train(kind, model, folder / "by_one", world) for kind in ranks.KINDS}
    return {"folder": folder, "trained": trained}


@pytest.fixture(scope="module")
def together(alone: dict[str, Any], model: Path) -> list[dict[str, Any]]:
    folder = alone["folder"]
    with started_ranks(ranks.__file__, model, folder) as processes:
        require_success(processes)
    return [torch.load(folder / f"result_{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("kind", ranks.KINDS)
def test_two_ranks_train_as_one(kind: str, alone: dict[str, Any], together: list[dict[str, Any]]) -> None:
    expected = alone["trained"][kind]["weights"]
    for rank in together:
        assert largest_difference(expected, rank["trained"][kind]["weights"]) < (1e-2 if kind == "adamw_8bit" else 1e-3)
    one, other = (rank["trained"][kind]["weights"] for rank in together)
    assert are_equal(one, other)


@pytest.mark.parametrize("kind", ranks.KINDS)
def test_two_ranks_have_what_one_saved_to_the_bit(
    kind: str, alone: dict[str, Any], together: list[dict[str, Any]]
) -> None:
    for rank in together:
        assert are_equal(alone["trained"][kind]["content"], rank["loaded"][kind])


@pytest.mark.parametrize("kind", ranks.KINDS)
def test_one_rank_has_what_two_saved_to_the_bit(
    kind: str, alone: dict[str, Any], together: list[dict[str, Any]], model: Path, world: World
) -> None:
    assert are_equal(
        together[0]["trained"][kind]["content"], ranks.load(kind, model, alone["folder"] / "by_two", world)
    )


@pytest.mark.parametrize("change", ranks.LOADED[len(ranks.KINDS) :])
def test_moments_in_another_format_are_the_same_on_two_ranks_as_on_one(
    change: str, alone: dict[str, Any], together: list[dict[str, Any]], model: Path, world: World
) -> None:
    expected = ranks.load(change, model, alone["folder"] / "by_one", world)
    for rank in together:
        assert are_equal(expected, rank["loaded"][change])


def test_some_moments_are_held_in_8_bits_on_both(together: list[dict[str, Any]]) -> None:
    for rank in together:
        content = rank["trained"]["adamw_8bit"]["content"]
        assert sum(name.startswith("ranges of") for name in content) > 3
        assert {tensor.dtype for tensor in content.values()} == {torch.float32, torch.uint8}
