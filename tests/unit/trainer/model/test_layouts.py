"""Checkpoints as they are published, joined or in few bits, are trained, served and exported as what they mean."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from support.models import moe
from support.models.families import MROPE, build_config, logits, publish, row, save_family
from support.models.low_bit import LOW_BIT, save_low_bit
from support.models.tiny import are_equal, content_of, open_store, random_samples, save_run, train_step, weights_of
from trireme.config.trainer import Lora, Optimizer, TrainerModel, Vlm
from trireme.tools.export.export import command as export
from trireme.tools.export.merging import export_merged
from trireme.tools.export.weights_folder import open_model
from trireme.trainer.checkpoint.state import TrainerState
from trireme.trainer.model.layouts import Region, UnsupportedLayout, identity_layout
from trireme.trainer.model.model import load_model
from trireme.trainer.optim.optimizer import build_optimizer
from trireme.trainer.publish.served_weights import served_specs, served_tensors

SOURCES = {name: torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate("abcd")}


def experts(of):
    """As a checkpoint's experts become one tensor: joined in pairs, stacked, turned."""
    pairs = [torch.cat([of("a"), of("b")]), torch.cat([of("c"), of("d")])]
    return torch.transpose(torch.stack(pairs), 1, 2)


@pytest.mark.parametrize("region", [(0, 2, 1, 5, 3, 7), (1, 2, 0, 6, 0, 1), (0, 1, 5, 6, 2, 8), (1, 1, 0, 6, 0, 8)])
def test_a_part_is_read_from_the_parts_of_the_sources_that_it_needs(region):
    parts = tuple(slice(*region[i : i + 2]) for i in (0, 2, 4))
    read: list[torch.Tensor] = []

    def reading(name: str, region: Region) -> torch.Tensor:
        read.append(SOURCES[name][region])
        return read[-1]

    expected = experts(SOURCES.get)[parts]
    target = torch.full(expected.shape, torch.nan, dtype=torch.float64)
    experts(laid).at(parts).read_into(target, reading)
    assert torch.equal(target, expected.double())
    assert sum(each.numel() for each in read) == target.numel()


def laid(name):
    return identity_layout(name, SOURCES[name].shape)


def test_a_single_number_is_read_and_what_is_computed_has_no_layout():
    found = identity_layout("a", ()).tensor(lambda name, region: torch.tensor(2.5)[region])
    assert (found.shape, found.item()) == ((), 2.5)
    with pytest.raises(UnsupportedLayout, match="mul"):
        torch.mul(laid("a"), 2)  # type: ignore[call-overload]
    with pytest.raises(UnsupportedLayout, match=r"joined along dimension 0: \[\(4, 6\), \(4, 7\)\]"):
        torch.cat([laid("a"), identity_layout("e", (4, 7))])  # type: ignore[list-item]


CONFIGS = [build_config(kind, **changes) for kind, changes in LOW_BIT.items()]
CONFIGS += [build_config("qwen3", intermediate_size=300), moe.build_config("deepseek_v3", kv_lora_rank=136)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_low_bit_model_trains_serves_and_exports_like_a_plain_one(config, tiny_model, tmp_path, world):
    folder, run = tmp_path / "model", tmp_path / "run"
    meant = save_low_bit(folder, config, tiny_model)
    model = load_model(TrainerModel(attn="eager"), str(folder), world)
    assert are_equal(dict(served_tensors(model, torch.float32)), {name: each.float() for name, each in meant.items()})
    assert {each.dtype for each in model.parameters()} == {torch.float32}  # experts too
    assert are_equal(dict(open_model(folder).tensors()), meant)
    save_run(run, TrainerState(model, build_optimizer(model, Optimizer())), folder, world)
    exported = run / "weights" / "step_0"
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    assert are_equal(weights_of(AutoModelForCausalLM.from_pretrained(exported)), weights_of(model))
    if config.model_type == "qwen3":
        model = load_model(TrainerModel(lora=Lora(rank=2)), str(folder), world)
        save_run(tmp_path / "adapters", TrainerState(model, build_optimizer(model, Optimizer())), folder, world)
        export_merged(tmp_path / "adapters/checkpoints/step_0", tmp_path / "merged", dtype="bfloat16")
        assert are_equal(dict(open_model(tmp_path / "merged").tensors()), meant)


@pytest.mark.parametrize(
    ("kind", "vlm", "lora"),
    [
        *(("qwen3_5_moe", None, Lora(rank=2)), ("qwen3_next", None, None), ("qwen3_5", Vlm(), Lora(rank=2))),
        *(("qwen3_5_moe", Vlm(), None), ("qwen2_5_vl", Vlm(), None)),
    ],
)
def test_untrained_parts_of_a_published_checkpoint_are_exported_to_the_bit(
    kind, vlm, lora, tiny_model, tmp_path, world
):
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
    assert not are_equal(content_of(state), content_of(resumed))
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
    assert json.loads((exported / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert (exported / "preprocessor_config.json").is_file()
    whole = AutoModelForCausalLM if kind == "qwen3_next" else AutoModelForImageTextToText
    model, info = whole.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        torch.testing.assert_close(logits(model, *row(24)), logits(state.model, *row(24)), rtol=1e-4, atol=1e-4)
