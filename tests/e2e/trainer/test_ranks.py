"""Whatever is trained, and however ranks are divided: they train as one does, and load what any others saved."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.models import tiny
from support.models.families import build_config, flash_on_cpu, save_family
from support.processes.rank_processes import run_rank, run_ranks
from trireme.algo.packing import unsampled_row
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import ActivationCheckpointing, Lora, Loss, Optimizer, TrainerConfig, TrainerModel
from trireme.journal.manifest import read_manifest
from trireme.trainer.checkpoint.checkpoint import load_checkpoint
from trireme.trainer.checkpoint.state import load_tensors, tensors_of
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.model.lora import is_adapter, peft_name
from trireme.trainer.model.model import load_model
from trireme.trainer.parallel.mesh import World, build_world
from trireme.trainer.parallel.shards import open_shards, shard_files, shard_of
from trireme.trainer.publish.served_weights import served_tensors
from trireme.trainer.step import base_state

KINDS = ("adamw", "adamw_8bit", "muon", "sgd", "sign_sgd", "adapters", "iterations")  # the last two with AdamW
SWITCHES = ("adamw becomes adamw_8bit", "adamw_8bit becomes adamw")
BATCHES: dict[str, Any] = {"capacity": 48, "lengths": [40, 30, 18, 33, 15, 44, 20, 9, 13]}
"""Five rows of at most 48 tokens, so one of two ranks is a row short."""
SAVED_AT, STEPS = 2, 3

GSPO = {"type": "gspo", "clip_low": 0.5, "clip_high": 2.0}  # samples of a sequence's group lie on different ranks
LOSSES = {"muon": Loss(**GSPO, normalize="sequence"), "sgd": Loss(**GSPO, normalize="constant")}

ODD = {"vocab_size": 131, "hidden_size": 96, "intermediate_size": 149}
ODD |= {"head_dim": 2, "num_attention_heads": 33, "num_key_value_heads": 11}
"""Little in it can be divided by the number of ranks, and the norms of its heads are smaller than that."""


def config_of(kind: str, model: Path, **settings: Any) -> RunConfig:
    if kind == "adapters":  # 3 rows for two ranks: uneven pieces; and a reference that moves
        lora, loss = Lora(rank=3, alpha=6), Loss(type="importance", beta=0.2, reference_update_every=2)
        trainer = TrainerConfig(model=TrainerModel(lora=lora), optim=Optimizer(lr=1e-2), loss=loss)
    elif kind == "iterations":
        terms = {"entropy_bonus": 0.1, "beta": 0.2, "kl_estimator": "k2", "reference_update_every": 2}
        loss = Loss(type="decoupled", correction="sequence_truncate", normalize="sequence", **terms)
        optim = Optimizer(lr=1e-3)
        trainer = TrainerConfig(model=TrainerModel(**settings), optim=optim, num_iterations=2, loss=loss)
    else:
        optim = Optimizer(type=kind, lr=1e-3, weight_decay=0.1)  # type: ignore[arg-type]
        # No gradient may be 0 but for rounding, whose sign SignSGD would take: `kl_tau` pulls at each token.
        trainer = TrainerConfig(optim=optim, loss=LOSSES.get(kind, Loss(type="importance", kl_tau=0.1)))
    return RunConfig(model=Model(name=str(model)), trainer=trainer)


def train(kind: str, model: Path, folder: Path, world: World) -> dict[str, Any]:
    config = config_of(kind, model)
    state = base_state(config, world)
    begun = tiny.weights_of(state.model)
    exporter = tiny.open_exporter(folder / kind / "weights", model, state.model, world)
    store = tiny.open_store(folder / kind, world, exporter=exporter)
    metrics = tiny.train(config, state, world, until=SAVED_AT, **BATCHES)
    saved = tiny.content_of(state)
    store.save(state)
    metrics += tiny.train(config, state, world, until=STEPS, **BATCHES)
    store.wait()
    served = dict(served_tensors(state.model, torch.float32))
    weights = tiny.weights_of(state.model)
    return {"begun": begun, "metrics": metrics, "saved": saved, "weights": weights, "served": served}


def loaded(kind: str, model: Path, folder: Path, world: World) -> dict[str, torch.Tensor]:
    before, _, after = kind.rpartition(" becomes ")
    state = base_state(config_of(after, model), world)
    load_checkpoint(state, folder / (before or after) / f"step_{SAVED_AT}", rank=world.rank)
    return tiny.content_of(state)


def train_and_load(model: Path, folder: Path, world: World) -> dict[str, Any]:
    if world.size == 4:
        return {
            "copies": go_on("by_two/adamw", 2, model, folder, world),
            "parts": go_on("of_2", 1, model, folder, world),
        }
    trained = {kind: train(kind, model, folder / "by_two", world) for kind in KINDS}
    return trained | {"loaded": {kind: loaded(kind, model, folder / "by_one", world) for kind in (*KINDS, *SWITCHES)}}


def go_on(before: str, copies: int, model: Path, folder: Path, world: World) -> dict[str, Any]:
    """Resume from another run's checkpoint with so many copies of the model, train, and save a run of their own."""
    world = build_world(world.rank, world.size, world.device, replicas=copies, cp=1)
    config = config_of("adamw", model)
    state = base_state(config, world)
    tiny.open_store(folder / before, world).resume(state, resume=True)
    with open_shards(shard_files(folder / before / f"step_{state.version}")) as stored:
        load_tensors(state, stored)
        num_read = stored.num_bytes_read
    content = tiny.content_of(state)
    metrics = tiny.train(config, state, world, until=STEPS, **BATCHES)
    exporter = tiny.open_exporter(folder / f"weights_of_{copies}", model, state.model, world)
    store = tiny.open_store(folder / f"of_{copies}", world, exporter=exporter)
    store.save(state)
    store.wait()
    held = sum(shard_of(tensor).tensor.nbytes for tensor in tensors_of(state).values())
    return {"loaded": content, "after": tiny.content_of(state), "metrics": metrics, "held": held, "read": num_read}


def size_of(checkpoint: Path) -> int:
    files = read_manifest(checkpoint).files
    return sum(entry.size for file, entry in files.items() if re.fullmatch(r"rank_\d+\.safetensors", file))


def test_ranks_train_like_a_single_process(tmp_path, world):
    model = save_family(tmp_path / "model", build_config("qwen3", **ODD))
    tiny.load_script("make_tiny_model").build_tokenizer().save_pretrained(model)
    alone = {kind: train(kind, model, tmp_path / "by_one", world) for kind in KINDS}
    together = run_ranks(__file__, model, tmp_path)
    for kind in KINDS:
        one, (two, other) = alone[kind], (rank[kind] for rank in together)
        assert tiny.are_equal(one["begun"], two["begun"])
        tolerance = {"adamw_8bit": 1e-2, "adapters": 1e-2}.get(kind, 1e-3)
        for part in ("weights", "served"):
            assert tiny.largest_difference(one[part], two[part]) < tolerance, kind
        assert tiny.are_equal(two["weights"], other["weights"])
        for ours, theirs in zip(one["metrics"], two["metrics"], strict=True):
            assert theirs == pytest.approx(ours, rel=tolerance if kind == "adamw_8bit" else 1e-3, abs=1e-5)
        assert tiny.are_equal(two["saved"], loaded(kind, model, tmp_path / "by_two", world))
        assert all(tiny.are_equal(rank["loaded"][kind], one["saved"]) for rank in together)
    for switch in SWITCHES:  # moments in another format are the same on two ranks as on one
        expected = loaded(switch, model, tmp_path / "by_one", world)
        assert all(tiny.are_equal(rank["loaded"][switch], expected) for rank in together)
    in_8_bits = together[1]["adamw_8bit"]["saved"]
    assert sum(name.startswith("ranges of") for name in in_8_bits) > 3
    assert {tensor.dtype for tensor in in_8_bits.values()} == {torch.float32, torch.uint8}
    saved = together[0]["adapters"]["saved"]
    in_file = load_file(tmp_path / f"by_two/adapters/weights/step_{SAVED_AT}/adapter_model.safetensors")
    trained = {name for name in saved if is_adapter(name) and name.startswith("model.")}
    assert tiny.are_equal(in_file, {peft_name(name): saved[name] for name in trained})
    check_four(alone["adamw"], together[0]["adamw"], run_ranks(__file__, model, tmp_path, count=4), tmp_path)


def check_four(alone: dict[str, Any], two: dict[str, Any], four: list[dict[str, Any]], folder: Path) -> None:
    first = four[0]["copies"]["after"]
    whole = sum(tensor.nbytes for tensor in two["saved"].values())
    for copies, parts in ((rank["copies"], rank["parts"]) for rank in four):
        assert tiny.are_equal(copies["loaded"], two["saved"])
        assert copies["metrics"] == [pytest.approx(alone["metrics"][-1], rel=1e-3, abs=1e-5)]
        weights = {name: copies["after"][name] for name in alone["weights"]}
        assert tiny.largest_difference(alone["weights"], weights) < 1e-3
        assert tiny.are_equal(parts["loaded"], first)
        assert parts["read"] == parts["held"] < 0.35 * whole  # it holds and reads a part of what one does
    exported = tiny.weights_of(AutoModelForCausalLM.from_pretrained(folder / f"weights_of_2/step_{STEPS}"))
    assert all(torch.equal(tensor, first[name]) for name, tensor in exported.items())
    # A checkpoint of copies is no larger than that of one rank, but for headers.
    sizes = [size_of(folder / run) for run in (f"by_one/adamw/step_{SAVED_AT}", f"of_2/step_{STEPS}")]
    assert sizes[1] == pytest.approx(sizes[0], abs=80_000)


TEAMS: dict[str, dict[str, Any]] = {
    "windows": {"cp": 2},
    "windows, flash": {"cp": 2, "attn": "flash_attention_2"},
    "a team of four": {"cp": 4, "ac": ActivationCheckpointing()},
    "copies of teams": {"cp": 2, "dp_replicate": 2, "ac": ActivationCheckpointing(mode="selective")},
}
TEAM_LOSSES = (
    Loss(type="importance", kl_tau=0.1),
    Loss(**GSPO, normalize="sequence"),
    Loss(type="ppo", entropy_bonus=0.1),
)
TEAM_LOSSES += (Loss(type="reinforce", score_centering=True),)


def train_as(
    name: str, folder: Path, world: World, *, cp: int = 1, dp_replicate: int = 1, **how: Any
) -> dict[str, Any]:
    """In teams of `cp` ranks, which share rows, and with so many copies of the model."""
    if (dp_replicate, cp) != (2, 2):
        world = build_world(world.rank, world.size, world.device, replicas=dp_replicate, cp=cp)
    settings = {"cp": cp, "dp_replicate": dp_replicate, "head_chunk": 16, **how}
    config = config_of("iterations", folder / ("mistral" if name.startswith("windows") else "qwen3"), **settings)
    model = load_model(config.trainer.model, str(config.model.name), world)
    gradients = []
    for loss in TEAM_LOSSES:
        samples = [tiny.with_likeliest(sample)[0] for sample in tiny.random_samples(BATCHES["lengths"])]
        metrics = tiny.backward(model, samples, world, capacity=BATCHES["capacity"], loss=loss)
        gradients.append((metrics, tiny.take_gradients(model)))
    empty = compute_columns(model, unsampled_row([0], [1]), world.device)  # fewer tokens than ranks
    empty.logprobs.sum().backward()
    state = base_state(config, world)
    metrics = tiny.train(config, state, world, until=2, **BATCHES)
    found = {"metrics": metrics, "weights": tiny.weights_of(state.model)}
    return found | {"gradients": gradients, "empty": empty.mask.tolist()}


def train_in_teams(folder: Path, world: World) -> dict[str, Any]:
    with flash_on_cpu():
        return {name: train_as(name, folder, world, **settings) for name, settings in TEAMS.items()}


@pytest.mark.slow
def test_ranks_however_divided_into_teams_that_share_rows_train_as_one(tmp_path, world):
    folder = tmp_path / "teams"
    for kind, special in (("qwen3", {}), ("mistral", {"sliding_window": 12})):
        sizes = {"vocab_size": tiny.VOCABULARY, "num_attention_heads": 8}
        save_family(folder / kind, build_config(kind, **sizes, **special))
    with_windows, without = (train_as(name, folder, world) for name in ("windows", "no windows"))
    ranks = run_ranks(__file__, folder, count=4)
    for name in TEAMS:
        expected, first = with_windows if name.startswith("windows") else without, ranks[0][name]
        for found in (rank[name] for rank in ranks):
            for (ours, gradient), (theirs, right) in zip(found["gradients"], expected["gradients"], strict=True):
                assert tiny.largest_difference(right, gradient) < 1e-5, name
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name
            assert tiny.are_equal(first["weights"], found["weights"]), name
            assert tiny.largest_difference(expected["weights"], found["weights"]) < 1e-3, name
            for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), name
            assert found["empty"] == [False], name


if __name__ == "__main__":
    if Path(sys.argv[-1]).name == "teams":
        run_rank(train_in_teams, replicas=2, cp=2)
    else:
        run_rank(train_and_load)
