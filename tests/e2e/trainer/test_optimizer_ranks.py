"""Whatever is trained, with whichever optimizer and loss: two ranks train as one does, and each loads what the other
saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from rank_processes import run_rank, run_ranks
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Lora, Loss, Optimizer, TrainerConfig, TrainerModel
from trireme.trainer.checkpoint.checkpoint import load_checkpoint
from trireme.trainer.model.lora import is_adapter, peft_name
from trireme.trainer.parallel.mesh import World
from trireme.trainer.publish.served_weights import served_tensors
from trireme.trainer.step import base_state

KINDS = ("adamw", "adamw_8bit", "muon", "sgd", "adapters", "iterations")  # the last two with AdamW
SWITCHES = ("adamw becomes adamw_8bit", "adamw_8bit becomes adamw")
CAPACITY = 48
LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]  # five rows of at most 48, so one of two ranks is a row short
SAVED_AT, STEPS = 2, 3


GSPO = {"type": "gspo", "clip_low": 0.5, "clip_high": 2.0}  # samples of a sequence's group lie on different ranks
LOSSES = {"muon": Loss(**GSPO, normalize="sequence"), "sgd": Loss(**GSPO, normalize="constant")}


def config_of(kind: str, model: Path) -> RunConfig:
    if kind == "adapters":  # 3 rows for two ranks: uneven pieces; and a reference that moves
        settings, optim = TrainerModel(lora=Lora(rank=3, alpha=6)), Optimizer(lr=1e-2)
        trainer = TrainerConfig(model=settings, optim=optim, loss=Loss(beta=0.2, reference_update_every=2))
    elif kind == "iterations":
        terms = {"entropy_bonus": 0.1, "beta": 0.2, "kl_estimator": "k2", "reference_update_every": 2}
        loss = Loss(type="decoupled", correction="sequence_truncate", normalize="sequence", **terms)
        trainer = TrainerConfig(optim=Optimizer(lr=1e-3), num_iterations=2, loss=loss)
    else:
        optim = Optimizer(type=kind, lr=1e-3, weight_decay=0.1)  # type: ignore[arg-type]
        trainer = TrainerConfig(optim=optim, loss=LOSSES.get(kind, Loss(kl_tau=0.1)))
    return RunConfig(model=Model(name=str(model)), trainer=trainer)


def train(kind: str, model: Path, folder: Path, world: World) -> dict[str, Any]:
    config = config_of(kind, model)
    state = base_state(config, world)
    begun = tiny.weights_of(state.model)
    exporter = tiny.open_exporter(folder / kind / "weights", model, state.model, world)
    store = tiny.open_store(folder / kind, world, exporter=exporter)
    metrics = tiny.train(config, state, world, until=SAVED_AT, lengths=LENGTHS, capacity=CAPACITY)
    saved = tiny.content_of(state)
    store.save(state)
    metrics += tiny.train(config, state, world, until=STEPS, lengths=LENGTHS, capacity=CAPACITY)
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
    trained = {kind: train(kind, model, folder / "by_two", world) for kind in KINDS}
    return trained | {"loaded": {kind: loaded(kind, model, folder / "by_one", world) for kind in (*KINDS, *SWITCHES)}}


def test_two_ranks_train_as_one_and_each_has_what_the_other_saved_to_the_bit(tiny_model, tmp_path, world):
    alone = {kind: train(kind, tiny_model, tmp_path / "by_one", world) for kind in KINDS}
    together = run_ranks(__file__, tiny_model, tmp_path)
    for kind in KINDS:
        one, (two, other) = alone[kind], (rank[kind] for rank in together)
        assert tiny.are_equal(one["begun"], two["begun"])
        tolerance = {"adamw_8bit": 1e-2, "adapters": 1e-4}.get(kind, 1e-3)
        for part in ("weights", "served"):
            assert tiny.largest_difference(one[part], two[part]) < tolerance, kind
        assert tiny.are_equal(two["weights"], other["weights"])
        for ours, theirs in zip(one["metrics"], two["metrics"], strict=True):
            assert theirs == pytest.approx(ours, rel=max(tolerance, 1e-3), abs=1e-5)
        assert tiny.are_equal(two["saved"], loaded(kind, tiny_model, tmp_path / "by_two", world))
        assert all(tiny.are_equal(rank["loaded"][kind], one["saved"]) for rank in together)
    for switch in SWITCHES:  # moments in another format are the same on two ranks as on one
        expected = loaded(switch, tiny_model, tmp_path / "by_one", world)
        assert all(tiny.are_equal(rank["loaded"][switch], expected) for rank in together)
    in_8_bits = together[1]["adamw_8bit"]["saved"]
    assert sum(name.startswith("ranges of") for name in in_8_bits) > 3
    assert {tensor.dtype for tensor in in_8_bits.values()} == {torch.float32, torch.uint8}
    saved = together[0]["adapters"]["saved"]
    in_file = load_file(tmp_path / f"by_two/adapters/weights/step_{SAVED_AT}/adapter_model.safetensors")
    trained = {name for name in saved if is_adapter(name) and name.startswith("model.")}
    assert tiny.are_equal(in_file, {peft_name(name): saved[name] for name in trained})


if __name__ == "__main__":
    run_rank(train_and_load)
