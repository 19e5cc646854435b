"""However many ranks train, it is the same training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import patient_ranks
import ranks
from rank_processes import Ranks, require_success, started_ranks
from tiny import are_equal, content_of, largest_difference, open_state, open_store, save, train_step, weights_of
from trireme.algo.packing import micro_batches_of_rank
from trireme.ledger.manifest import complete_steps, read_manifest
from trireme.trainer.mesh import World

pytestmark = pytest.mark.e2e  # real ranks beside one another


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def saved_by_one(tiny_model: Path, folder: Path, world: World) -> dict[str, torch.Tensor]:
    """What is in the checkpoint of a single rank, for the two to load."""
    state = open_state(tiny_model, world)
    train_step(state, ranks.batch(0), world, capacity=ranks.CAPACITY)
    save(folder / "by_one", state, world)
    return content_of(state)


@pytest.fixture(scope="module")
def processes(tiny_model: Path, folder: Path, saved_by_one: dict[str, torch.Tensor]) -> Iterator[Ranks]:
    with started_ranks(ranks.__file__, tiny_model, folder) as started:
        yield started


@pytest.fixture(scope="module")
def alone(processes: Ranks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, world: World) -> dict[str, Any]:
    """Runs while the two ranks run."""
    return ranks.train(tiny_model, tmp_path_factory.mktemp("one_rank"), world)


@pytest.fixture(scope="module")
def together(alone: dict[str, Any], processes: Ranks, folder: Path) -> list[dict[str, Any]]:
    require_success(processes)
    return [torch.load(folder / f"result_{rank}.pt", weights_only=True) for rank in range(2)]


def test_a_batch_leaves_one_of_the_two_ranks_a_row_short_and_the_others_have_rows_of_several_samples() -> None:
    full, short = (
        [micro_batches_of_rank(ranks.batch(step), capacity=ranks.CAPACITY, rank=rank, world=2) for rank in range(2)]
        for step in range(2)
    )
    assert [len(share) for share in (*full, *short)] == [3, 3, 3, 3]
    assert [sum(row.tokens.length == 1 for row in share) for share in full] == [0, 0]
    assert max(len(row.lengths) for share in full for row in share) > 1
    assert sorted(share[-1].tokens.length == 1 for share in short) == [False, True]


def test_two_ranks_have_the_gradients_of_one(alone: dict[str, Any], together: list[dict[str, Any]]) -> None:
    for rank in together:
        assert largest_difference(alone["gradients"], rank["gradients"]) < 1e-5


@pytest.mark.parametrize("normalize", ["token", "sequence", "constant"])
def test_two_ranks_have_the_gradients_of_one_however_they_are_normalized(
    alone: dict[str, Any], together: list[dict[str, Any]], normalize: str
) -> None:
    for rank in together:
        assert largest_difference(alone["normalized"][normalize], rank["normalized"][normalize]) < 1e-5


def test_two_ranks_with_all_terms_of_a_loss_train_as_one(alone: dict[str, Any], together: list[dict[str, Any]]) -> None:
    expected = alone["everything"]
    for rank in together:
        found = rank["everything"]
        assert largest_difference(expected["weights"], found["weights"]) < 1e-3
        assert largest_difference(expected["reference"], found["reference"]) < 1e-3
        for ours, theirs in zip(expected["metrics"], found["metrics"], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-5)


def test_two_ranks_report_the_metrics_of_one(alone: dict[str, Any], together: list[dict[str, Any]]) -> None:
    for rank in together:
        for expected, found in zip(alone["metrics"], rank["metrics"], strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_two_ranks_end_with_the_weights_of_one(alone: dict[str, Any], together: list[dict[str, Any]]) -> None:
    for rank in together:
        assert largest_difference(alone["weights"], rank["weights"]) < 1e-4


def test_two_ranks_end_with_the_same_weights_to_the_bit(together: list[dict[str, Any]]) -> None:
    first, second = (rank["weights"] for rank in together)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_two_ranks_saved_one_rank_goes_on_with(
    together: list[dict[str, Any]], folder: Path, tiny_model: Path, world: World
) -> None:
    checkpoints = folder / "checkpoints"
    assert complete_steps(checkpoints) == [ranks.SAVED_AT]
    state = open_state(tiny_model, world)
    open_store(checkpoints, world).resume(state, resume=True)
    assert state.version == ranks.SAVED_AT
    assert are_equal(content_of(state), together[0]["saved"])
    while state.version < ranks.STEPS:
        train_step(state, ranks.batch(state.version), world, capacity=ranks.CAPACITY)
    assert largest_difference(together[0]["weights"], weights_of(state.model)) < 1e-4


def test_what_one_rank_saved_two_ranks_have_to_the_bit(
    together: list[dict[str, Any]], saved_by_one: dict[str, torch.Tensor]
) -> None:
    for rank in together:
        assert are_equal(rank["loaded"], saved_by_one)


def test_each_of_two_ranks_writes_its_own_half(together: list[dict[str, Any]], folder: Path) -> None:
    manifest = read_manifest(folder / "checkpoints" / f"step_{ranks.SAVED_AT}")
    assert manifest.world_size == 2
    sizes = [manifest.files[f"rank_{rank}.safetensors"].size for rank in range(2)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


def test_two_ranks_export_the_weights_that_they_held(together: list[dict[str, Any]], folder: Path) -> None:
    exported = AutoModelForCausalLM.from_pretrained(folder / "weights" / f"step_{ranks.SAVED_AT}")
    held = together[0]["saved"]
    assert all(torch.equal(parameter, held[name]) for name, parameter in exported.named_parameters())


def test_ranks_wait_for_the_first_one_longer_than_their_patience_where_it_tells_them_to(tmp_path: Path) -> None:
    """As it does while the orchestrator evaluates, or waits for room on a disk."""
    with started_ranks(patient_ranks.__file__, tmp_path) as processes:
        require_success(processes)
    assert [(tmp_path / f"said_{rank}").read_text() for rank in range(2)] == ["7", "7"]
