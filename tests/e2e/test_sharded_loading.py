"""Two ranks hold half of a model each, read half of its files each, and compute what one rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import loading_ranks
from families import ATTENTION, logits, row
from loading_ranks import KINDS, READ_BYTES, WAYS
from rank_processes import require_success, started_ranks
from tiny import are_equal, largest_difference
from trireme.trainer.mesh import World

pytestmark = pytest.mark.e2e  # real ranks beside one another


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    loading_ranks.save_models(folder)
    return folder


@pytest.fixture(scope="module")
def together(folder: Path) -> list[dict[str, Any]]:
    with started_ranks(loading_ranks.__file__, folder) as ranks:
        require_success(ranks)
    return [torch.load(folder / f"result_{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(folder: Path, world: World) -> dict[str, Any]:
    return loading_ranks.run(folder, world)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_hold_half_each_and_compute_the_model(
    together: list[dict[str, Any]], alone: dict[str, Any], folder: Path, kind: str
) -> None:
    attention = ATTENTION.get(kind, "sdpa")
    plain = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32, attn_implementation=attention)
    ids, positions = row(9, 14)
    with torch.no_grad():
        apart = zip(ids.split((9, 14), 1), positions.split((9, 14), 1), strict=True)
        expected = torch.cat([logits(plain, *each) for each in apart])
    for rank in together:
        found = rank["models"][kind]
        assert found["held"] == pytest.approx(0.5, abs=0.01)
        torch.testing.assert_close(found["logits"], expected, rtol=1e-4, atol=2e-5)
        assert largest_difference(alone["models"][kind]["gradients"], found["gradients"]) < 1e-5


@pytest.mark.parametrize("way", [way for way in WAYS if "bfloat16" not in way])
def test_how_parameters_and_activations_are_held_changes_no_gradient(
    together: list[dict[str, Any]], alone: dict[str, Any], way: str
) -> None:
    for rank in together:
        found = rank["ways"][way]
        assert found["held"] == pytest.approx(1.0 if way == "two copies" else 0.5, abs=0.01)
        assert largest_difference(alone["models"]["qwen3"]["gradients"], found["gradients"]) < 1e-5


@pytest.mark.parametrize("way", [way for way in WAYS if "bfloat16" in way])
def test_in_half_precision_parameters_and_gradients_stay_float32(
    together: list[dict[str, Any]], alone: dict[str, Any], way: str
) -> None:
    for rank in together:
        found = rank["ways"][way]
        assert found["dtypes"] == ["torch.float32"]
        assert {gradient.dtype for gradient in found["gradients"].values()} == {torch.float32}
        assert 1e-4 < largest_difference(alone["models"]["qwen3"]["gradients"], found["gradients"]) < 0.2
    one, other = (rank["ways"]["bfloat16, summed in it"]["gradients"] for rank in together)
    assert are_equal(one, other)


def test_weights_from_scratch_are_the_same_on_any_number_of_ranks(
    together: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert all(are_equal(rank["drawn"], alone["drawn"]) for rank in together)


def test_a_rank_reads_its_half_a_little_at_a_time_and_needs_no_more_memory(
    together: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    total = alone["large"]["held"]
    assert total > 16 << 20
    for rank in together:
        sizes = rank["large"]
        assert sizes["held"] == sizes["read"] == pytest.approx(total / 2, rel=0.01)
        assert sizes["largest_read"] <= READ_BYTES
        assert sizes["peak"] < sizes["held"] + 4 * READ_BYTES
        assert sizes["peak"] < 1.1 * sizes["held"]
        assert sizes["peak_of_drawing"] < sizes["held"] + 3 * 4 * 4000 * 256  # its largest matrix, the embedding
