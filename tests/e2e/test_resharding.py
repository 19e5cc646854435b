"""What any number of ranks saved, any other number goes on with: every tensor to the bit, and the same next step."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import tiny
from rank_processes import require_success, stages_of_this_rank, started_ranks
from tiny import are_equal, content_of, largest_difference, open_store, random_samples, train_step
from trireme.ledger.manifest import read_manifest
from trireme.trainer.mesh import World, open_world
from trireme.trainer.pieces import open_checkpoint, piece_of
from trireme.trainer.state import TrainerState, load_tensors, tensors_of

pytestmark = pytest.mark.e2e

CAPACITY = 48
LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]


class Stage(NamedTuple):
    """Ranks that go on from what others saved, for one step, and save that."""

    name: str
    ranks: int
    replicas: int
    begins_with: str | None  # the stage whose checkpoint it goes on from


STAGES = (
    Stage("one", 1, 1, None),
    Stage("two", 2, 1, "one"),
    Stage("four_replicated", 4, 2, "two"),
    Stage("four", 4, 1, "four_replicated"),
    Stage("four_copies", 4, 4, "four"),
    Stage("one_again", 1, 1, "two"),
)


def run(stage: Stage, model: Path, folder: Path, world: World) -> dict[str, Any]:
    """What this rank had after loading and after a step of training, and how much it read."""
    state = tiny.open_state(model, world)
    exporter = tiny.open_exporter(folder / stage.name / "weights", model, world)
    if stage.begins_with:
        open_store(folder / stage.begins_with / "checkpoints", world).resume(state, resume=True)
    loaded = content_of(state) if stage.begins_with else {}
    num_read = read_bytes(state, folder / stage.begins_with / "checkpoints") if stage.begins_with else 0
    metrics = train_step(state, random_samples(LENGTHS, seed=state.version), world, capacity=CAPACITY)
    store = open_store(folder / stage.name / "checkpoints", world, exporter=exporter)
    store.save(state)
    store.wait()
    held = sum(piece_of(tensor).num_bytes for tensor in tensors_of(state).values())
    return {"loaded": loaded, "after": content_of(state), "metrics": metrics, "held": held, "read": num_read}


def read_bytes(state: TrainerState, checkpoints: Path) -> int:
    """That loading the checkpoint (again) takes from its files."""
    with open_checkpoint(checkpoints / f"step_{state.version}") as stored:
        load_tensors(state, stored)
        return stored.num_bytes_read


def main() -> None:
    model, folder = map(Path, sys.argv[1:])
    for stage in stages_of_this_rank(STAGES, folder):
        with open_world("cpu", threads=1, timeout_s=240, replicas=stage.replicas) as world:
            result = run(stage, model, folder, world)
            torch.save(result, folder / f"{stage.name}_{world.rank}.pt")
            world.barrier()


CONTINUED = [stage for stage in STAGES if stage.begins_with]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing in it can be divided by the number of ranks, and the norms of its heads are smaller than that."""
    folder = tmp_path_factory.mktemp("odd")
    torch.manual_seed(0)
    sizes = {"vocab_size": 131, "hidden_size": 18, "intermediate_size": 37, "num_hidden_layers": 2, "head_dim": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(folder)
    tiny.load_script("make_tiny_model").build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all stages have been."""
    folder = tmp_path_factory.mktemp("resharding")
    with started_ranks(__file__, model, folder, count=4, num_ports=len(STAGES)) as ranks:
        require_success(ranks)
    return folder


def results(folder: Path, name: str) -> list[dict[str, Any]]:
    stage = next(stage for stage in STAGES if stage.name == name)
    return [torch.load(folder / f"{name}_{rank}.pt", weights_only=True) for rank in range(stage.ranks)]


@pytest.mark.parametrize("stage", CONTINUED, ids=lambda stage: f"{stage.begins_with}-to-{stage.name}")
def test_every_rank_has_what_was_saved_to_the_bit(folder: Path, stage: Stage) -> None:
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


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage.ranks > 1], ids=lambda s: s.name)
def test_what_several_hold_is_written_once(folder: Path, stage: Stage) -> None:
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


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_the_weights_that_come_with_it_are_what_the_ranks_held(folder: Path, stage: Stage) -> None:
    (exported,) = (folder / stage.name / "weights").glob("step_*")
    held = results(folder, stage.name)[0]["after"]
    weights = tiny.weights_of(AutoModelForCausalLM.from_pretrained(exported))
    assert all(torch.equal(tensor, held[name]) for name, tensor in weights.items())


if __name__ == "__main__":
    main()
