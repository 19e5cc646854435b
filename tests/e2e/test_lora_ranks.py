"""However many ranks train adapters, it is the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lora_ranks
from rank_processes import require_success, started_ranks
from tiny import are_equal, largest_difference
from trireme.trainer.lora import is_adapter, peft_name
from trireme.trainer.mesh import World

pytestmark = pytest.mark.e2e  # real ranks beside one another


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora_ranks")


@pytest.fixture(scope="module")
def one(tiny_model: Path, folder: Path, world: World) -> dict[str, Any]:
    return lora_ranks.train(tiny_model, folder / "by_one", world)


@pytest.fixture(scope="module")
def two(tiny_model: Path, folder: Path, one: dict[str, Any]) -> dict[str, Any]:
    with started_ranks(lora_ranks.__file__, tiny_model, folder) as processes:
        require_success(processes)
    return torch.load(folder / "result_0.pt")


def test_adapters_begin_the_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert are_equal(one["begun"], two["begun"])


def test_adapters_and_what_engines_get_become_the_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    """But for the order in which gradients are added up. The reference moves on the way."""
    assert largest_difference(one["weights"], two["weights"]) < 1e-4
    assert largest_difference(one["merged"], two["merged"]) < 1e-5
    for ours, theirs in zip(one["metrics"], two["metrics"], strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-3, abs=1e-5)
        assert theirs["reference_kl"] == pytest.approx(ours["reference_kl"], rel=1e-3, abs=1e-6)


def test_a_checkpoint_of_any_number_is_loaded_by_any_number(
    one: dict[str, Any], two: dict[str, Any], tiny_model: Path, folder: Path, world: World
) -> None:
    assert are_equal(two["loaded"], one["saved"])
    ours = lora_ranks.load(tiny_model, folder / f"by_two/checkpoints/step_{lora_ranks.SAVED_AT}", world)
    assert are_equal(ours, two["saved"])


def test_the_adapters_in_files_are_those_that_were_saved(two: dict[str, Any], folder: Path) -> None:
    found = load_file(folder / f"by_two/weights/step_{lora_ranks.SAVED_AT}/adapter_model.safetensors")
    trained = {name for name in two["saved"] if is_adapter(name) and name.startswith("model.")}
    assert are_equal(found, {peft_name(name): two["saved"][name] for name in trained})
