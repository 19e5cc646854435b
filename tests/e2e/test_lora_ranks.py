"""However many ranks train adapters, it is the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from rank_processes import run_rank, run_ranks
from tiny import are_equal, batch_reply, content_of, largest_difference, open_exporter, open_store, random_samples
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Lora, Loss, Optimizer, TrainerConfig, TrainerModel
from trireme.trainer.checkpoint import load_checkpoint
from trireme.trainer.lora import is_adapter, peft_name
from trireme.trainer.mesh import World
from trireme.trainer.served import merged_tensors
from trireme.trainer.stepper import Stepper, base_state

pytestmark = pytest.mark.e2e  # real ranks beside one another

CAPACITY = 48
LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]  # five rows of at most 48, so one of two ranks is a row short
SAVED_AT = 2
STEPS = 3


def config_of(model: Path) -> RunConfig:
    return RunConfig(
        model=Model(name=str(model)),
        trainer=TrainerConfig(
            model=TrainerModel(lora=Lora(rank=3, alpha=6)),  # 3 rows for two ranks: uneven pieces
            optim=Optimizer(lr=1e-2),
            loss=Loss(beta=0.2, reference_update_every=2),
        ),
    )


def train(model: Path, folder: Path, world: World) -> dict[str, Any]:
    """Some steps from the base model, with a checkpoint on the way and the weights at the end."""
    config = config_of(model)
    state = base_state(config, world)
    begun = tiny.weights_of(state.model)
    exporter = open_exporter(folder / "weights", model, world)
    store = open_store(folder / "checkpoints", world, exporter=exporter)
    metrics = []
    while state.version < STEPS:
        samples = random_samples(LENGTHS, seed=state.version)
        reply = batch_reply(samples, world, capacity=CAPACITY, step=state.version)
        metrics.append(Stepper(config, state, world).step(reply))
        if state.version == SAVED_AT:
            saved = content_of(state)
            store.save(state)
    store.wait()
    merged = dict(merged_tensors(state.model, torch.float32))
    return {
        "begun": begun,
        "metrics": metrics,
        "saved": saved,
        "weights": tiny.weights_of(state.model),
        "merged": merged,
    }


def loaded(model: Path, checkpoint: Path, world: World) -> dict[str, torch.Tensor]:
    """What this number of ranks has after loading."""
    state = base_state(config_of(model), world)
    load_checkpoint(state, checkpoint, rank=world.rank)
    return content_of(state)


def train_and_load(model: Path, folder: Path, world: World) -> dict[str, Any]:
    result = train(model, folder / "by_two", world)
    return result | {"loaded": loaded(model, folder / f"by_one/checkpoints/step_{SAVED_AT}", world)}


def test_one_rank_and_two_train_adapters_alike_and_load_what_the_other_saved(
    tiny_model: Path, tmp_path: Path, world: World
) -> None:
    """But for the order in which gradients are added up. The reference moves on the way."""
    one = train(tiny_model, tmp_path / "by_one", world)
    two, _ = run_ranks(__file__, tiny_model, tmp_path)
    assert are_equal(one["begun"], two["begun"])
    assert largest_difference(one["weights"], two["weights"]) < 1e-4
    assert largest_difference(one["merged"], two["merged"]) < 1e-5
    for ours, theirs in zip(one["metrics"], two["metrics"], strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-3, abs=1e-5)
        assert theirs["reference_kl"] == pytest.approx(ours["reference_kl"], rel=1e-3, abs=1e-6)
    assert are_equal(two["loaded"], one["saved"])
    assert are_equal(loaded(tiny_model, tmp_path / f"by_two/checkpoints/step_{SAVED_AT}", world), two["saved"])
    in_file = load_file(tmp_path / f"by_two/weights/step_{SAVED_AT}/adapter_model.safetensors")
    trained = {name for name in two["saved"] if is_adapter(name) and name.startswith("model.")}
    assert are_equal(in_file, {peft_name(name): two["saved"][name] for name in trained})


if __name__ == "__main__":
    run_rank(train_and_load)
