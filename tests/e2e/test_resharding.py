"""What any number of ranks saved, any other number goes on with: every tensor to the bit, and the same next step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import resharding
from rank_processes import require_success, started_ranks
from tiny import are_equal, largest_difference, load_script, weights_of
from trireme.ledger.manifest import read_manifest

pytestmark = pytest.mark.e2e

CONTINUED = [stage for stage in resharding.STAGES if stage.begins_with]
RANKS = max(stage.ranks for stage in resharding.STAGES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing in it can be divided by the number of ranks, and the norms of its heads are smaller than that."""
    folder = tmp_path_factory.mktemp("odd")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=131,
        hidden_size=18,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=2,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    load_script("make_tiny_model").build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all stages have been."""
    folder = tmp_path_factory.mktemp("resharding")
    with started_ranks(resharding.__file__, model, folder, count=RANKS, num_ports=len(resharding.STAGES)) as ranks:
        require_success(ranks)
    return folder


def results(folder: Path, name: str) -> list[dict[str, Any]]:
    stage = next(stage for stage in resharding.STAGES if stage.name == name)
    return [torch.load(folder / f"{name}_{rank}.pt", weights_only=True) for rank in range(stage.ranks)]


@pytest.mark.parametrize("stage", CONTINUED, ids=lambda stage: f"{stage.begins_with}-to-{stage.name}")
def test_every_rank_has_what_was_saved_to_the_bit(folder: Path, stage: resharding.Stage) -> None:
    saved = results(folder, stage.begins_with)[0]["after"]
    assert any("exp_avg" in name for name in saved)
    for rank in results(folder, stage.name):
        assert are_equal(rank["loaded"], saved)


def test_the_next_step_is_the_same_however_many_take_it(folder: Path) -> None:
    """`one_again` and `four_replicated` both go on from `two`."""
    (alone,), together = results(folder, "one_again"), results(folder, "four_replicated")
    for rank in together:
        assert largest_difference(alone["after"], rank["after"]) < 1e-4
        assert rank["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("stage", [stage for stage in resharding.STAGES if stage.ranks > 1], ids=lambda s: s.name)
def test_what_several_hold_is_written_once(folder: Path, stage: resharding.Stage) -> None:
    """So a checkpoint of copies is no larger than that of one rank."""

    def size(name: str) -> int:
        (checkpoint,) = (folder / name / "checkpoints").glob("step_*")
        files = read_manifest(checkpoint).files
        return sum(entry.size for file, entry in files.items() if re.fullmatch(r"rank_\d+\.safetensors", file))

    assert size(stage.name) == pytest.approx(size("one"), abs=stage.ranks * 20_000)  # headers


def test_a_rank_of_four_holds_and_reads_a_part_of_what_one_does(folder: Path) -> None:
    (alone,), together = results(folder, "one_again"), results(folder, "four")
    assert max(rank["held"] for rank in together) < 0.35 * alone["held"]
    assert [rank["read"] for rank in together] == [rank["held"] for rank in together]


@pytest.mark.parametrize("stage", resharding.STAGES, ids=lambda stage: stage.name)
def test_the_weights_that_come_with_it_are_what_the_ranks_held(folder: Path, stage: resharding.Stage) -> None:
    (exported,) = (folder / stage.name / "weights").glob("step_*")
    held = results(folder, stage.name)[0]["after"]
    weights = weights_of(AutoModelForCausalLM.from_pretrained(exported))
    assert all(torch.equal(tensor, held[name]) for name, tensor in weights.items())
