"""What any number of ranks saved, any other number goes on with: every tensor to the bit, and the same next step."""

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import tiny
from rank_processes import require_success, run_stages, stage_results, started_ranks
from tiny import are_equal, content_of, largest_difference, open_store, random_samples, train_step
from trireme.journal.manifest import read_manifest
from trireme.trainer.checkpoint.state import load_tensors, tensors_of
from trireme.trainer.parallel.mesh import World
from trireme.trainer.parallel.shards import open_checkpoint, shard_of

CAPACITY = 48
LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]


class Stage(NamedTuple):
    name: str
    ranks: int
    replicas: int
    begins_with: str | None  # the stage whose checkpoint it goes on from
    cp: int = 1


STAGES = (
    Stage("one", 1, 1, None),
    Stage("two", 2, 1, "one"),
    Stage("four_replicated", 4, 2, "two"),
    Stage("four", 4, 1, "four_replicated"),
    Stage("one_again", 1, 1, "two"),
)


def run(stage: Stage, model: Path, folder: Path, world: World) -> dict[str, Any]:
    state = tiny.open_state(model, world)
    loaded, num_read = {}, 0
    if stage.begins_with:
        open_store(folder / stage.begins_with / "checkpoints", world).resume(state, resume=True)
        with open_checkpoint(folder / stage.begins_with / f"checkpoints/step_{state.version}") as stored:
            load_tensors(state, stored)
            num_read = stored.num_bytes_read
        loaded = content_of(state)
    metrics = train_step(state, random_samples(LENGTHS, seed=state.version), world, capacity=CAPACITY)
    tiny.save_run(folder / stage.name, state, model, world)
    held = sum(shard_of(tensor).num_bytes for tensor in tensors_of(state).values())
    return {"loaded": loaded, "after": content_of(state), "metrics": metrics, "held": held, "read": num_read}


def save_odd_model(folder: Path) -> Path:
    """Nothing in it can be divided by the number of ranks, and the norms of its heads are smaller than that."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 131, "hidden_size": 18, "intermediate_size": 37, "num_hidden_layers": 2, "head_dim": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(folder)
    tiny.load_script("make_tiny_model").build_tokenizer().save_pretrained(folder)
    return folder


def size_of(folder: Path) -> int:
    (checkpoint,) = folder.glob("checkpoints/step_*")
    files = read_manifest(checkpoint).files
    return sum(entry.size for file, entry in files.items() if re.fullmatch(r"rank_\d+\.safetensors", file))


def test_every_rank_has_what_was_saved_to_the_bit_and_takes_the_same_next_step(tmp_path: Path) -> None:
    model, ports = save_odd_model(tmp_path / "model"), len(STAGES)
    with started_ranks(__file__, model, tmp_path, count=4, num_ports=ports) as ranks:
        require_success(ranks)
    found = stage_results(STAGES, tmp_path)
    for stage in STAGES:
        first = found[stage.name][0]["after"]
        saved = found[stage.begins_with][0]["after"] if stage.begins_with else {}
        assert all(are_equal(rank["loaded"], saved) for rank in found[stage.name])
        assert any("exp_avg" in name for name in first)
        # A checkpoint of copies is no larger than that of one rank, but for headers.
        assert size_of(tmp_path / stage.name) == pytest.approx(size_of(tmp_path / "one"), abs=stage.ranks * 20_000)
        (exported,) = (tmp_path / stage.name).glob("weights/step_*")
        weights = tiny.weights_of(AutoModelForCausalLM.from_pretrained(exported))
        assert all(torch.equal(tensor, first[name]) for name, tensor in weights.items())
    (alone,) = found["one_again"]
    for rank in found["four_replicated"]:  # it goes on from `two`, too
        assert largest_difference(alone["after"], rank["after"]) < 1e-4
        assert rank["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-6)
    for rank in found["four"]:  # it holds and reads a part of what one does
        assert rank["read"] == rank["held"] < 0.35 * alone["held"]


if __name__ == "__main__":
    model, folder = map(Path, sys.argv[1:])
    run_stages(STAGES, lambda stage, world: run(stage, model, folder, world), folder)
