"""Checkpoints as they are published, with parts that text training leaves out, are trained and exported whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from families import MROPE, build_config, logits, publish, row, save_family
from tiny import are_equal, content_of, open_store, random_samples, save_run, train_step, weights_of
from trireme.cli.runs.export import export
from trireme.config.trainer import Lora, Optimizer, TrainerModel, Vlm
from trireme.trainer.checkpoint.state import TrainerState
from trireme.trainer.model.model import load_model
from trireme.trainer.optim.optimizer import build_optimizer
from trireme.trainer.parallel.mesh import World
from trireme.trainer.publish.served_weights import served_specs


@pytest.mark.parametrize(
    ("kind", "vlm", "lora"),
    [
        *(("qwen3_5", None, None), ("qwen3_5_moe", None, Lora(rank=2)), ("qwen3_next", None, None)),
        *(("qwen3_5", Vlm(), Lora(rank=2)), ("qwen3_5_moe", Vlm(), None), ("qwen2_5_vl", Vlm(), None)),
    ],
)
def test_what_is_not_trained_of_a_published_checkpoint_is_exported_to_the_bit(
    kind: str, vlm: Vlm | None, lora: Lora | None, tiny_model: Path, tmp_path: Path, world: World
) -> None:
    """A vision encoder that is held (`vlm`) is served, and exported in the precision of the rest."""
    rope = {"rope_parameters": MROPE} if vlm else {}
    folder = save_family(tmp_path / "model", build_config(kind, vocab_size=128, **rope))
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, folder)
    if kind == "qwen3_next":
        publish(folder / "model.safetensors")
        (folder / "preprocessor_config.json").write_text("{}")
    published = load_file(folder / "model.safetensors")
    frozen = {name for name in published if name.startswith(("mtp.", "model.visual.", "visual."))}
    kept = {name for name in frozen if vlm is None or name.startswith("mtp.")}
    published |= {name: published[name].bfloat16() for name in frozen}
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})

    def open_state() -> TrainerState:
        model = load_model(TrainerModel(lora=lora, vlm=vlm), str(folder), world)
        return TrainerState(model=model, optimizer=build_optimizer(model, Optimizer(lr=1e-2)))

    state, resumed = open_state(), open_state()
    assert {spec.name for spec in served_specs(state.model, torch.bfloat16)} == published.keys() - kept
    train_step(state, random_samples([20, 30]), world)
    save_run(tmp_path / "run", state, folder, world)
    open_store(tmp_path / "run" / "checkpoints", world).resume(resumed, resume=True)
    assert are_equal(content_of(state), content_of(resumed))
    exported = tmp_path / "exported"
    words = ("--merge", "--dtype", "float32") if lora else ()
    assert export([str(tmp_path / "run"), "--to", str(exported), *words]) == 0
    found = load_file(exported / "model.safetensors")
    assert {name: each.shape for name, each in found.items()} == {name: each.shape for name, each in published.items()}
    assert all(torch.equal(found[name], published[name].to(found[name].dtype)) for name in frozen)
    assert {found[name].dtype for name in kept} <= {torch.bfloat16}
    config, before = (json.loads((each / "config.json").read_text()) for each in (exported, folder))
    assert config == before
    assert (exported / "preprocessor_config.json").is_file()
    whole = AutoModelForCausalLM if kind == "qwen3_next" else AutoModelForImageTextToText
    model, info = whole.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    assert type(model).__name__ == before["architectures"][0]
    ids, positions = row(24)
    with torch.no_grad():
        trained = logits(state.model, ids, positions)
        torch.testing.assert_close(logits(model, ids, positions), trained, rtol=1e-4, atol=1e-4)
    loaded = (weights_of(load_model(TrainerModel(vlm=vlm), str(each), world)) for each in (exported, folder))
    assert not are_equal(*loaded)
