"""Every architecture is the model that transformers would have loaded, and stays itself in packed rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import families
from families import ATTENTION, CONFIGS, build_config, build_vision_config, logits, row, save_family
from tiny import whole
from trireme.base.errors import ConfigError
from trireme.config.trainer import TrainerModel
from trireme.trainer.hub_names import hub_names, sources_of
from trireme.trainer.mesh import World
from trireme.trainer.model import load_model
from trireme.trainer.sharding import decoder_layers


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {kind: save_family(root / kind, build_config(kind)) for kind in CONFIGS}


def settings(kind: str, **changes: object) -> TrainerModel:
    return TrainerModel(attn=ATTENTION.get(kind, "sdpa")).model_copy(update=changes)


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_is_the_model_that_transformers_loads(checkpoints: dict[str, Path], kind: str, world: World) -> None:
    attention = ATTENTION.get(kind, "sdpa")
    expected = AutoModelForCausalLM.from_pretrained(
        checkpoints[kind], dtype=torch.float32, attn_implementation=attention
    ).train()
    found = load_model(settings(kind), str(checkpoints[kind]), world)
    held = found.state_dict()
    assert list(held) == list(expected.state_dict())
    assert all(torch.equal(whole(held[name]), tensor) for name, tensor in expected.state_dict().items())
    buffers = dict(found.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in expected.named_buffers())
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    ids, positions = row(12)
    with torch.no_grad():
        assert torch.equal(logits(found, ids, positions), logits(expected, ids, positions))


@pytest.mark.parametrize("kind", CONFIGS)
def test_samples_of_a_packed_row_are_computed_as_each_alone(
    checkpoints: dict[str, Path], kind: str, world: World
) -> None:
    model = load_model(settings(kind), str(checkpoints[kind]), world)
    lengths = (9, 14, 1, 7)
    ids, positions = row(*lengths)
    with torch.no_grad():
        together = logits(model, ids, positions).split(lengths)
        for found, one, place in zip(together, ids.split(lengths, 1), positions.split(lengths, 1), strict=True):
            torch.testing.assert_close(found, logits(model, one, place), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3_text"])
def test_eager_attention_computes_the_same(checkpoints: dict[str, Path], kind: str, world: World) -> None:
    """With windows of 5 tokens in some layers."""
    ids, positions = row(9, 14)
    with torch.no_grad():
        found, expected = (
            logits(load_model(settings(kind, attn=name), str(checkpoints[kind]), world), ids, positions)
            for name in ("eager", "sdpa")
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_from_scratch_are_those_that_transformers_draws(
    checkpoints: dict[str, Path], kind: str, world: World
) -> None:
    torch.manual_seed(5)
    found = load_model(settings(kind, from_scratch=True), str(checkpoints[kind]), world)
    after = torch.rand(1)
    torch.manual_seed(5)
    expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoints[kind]), dtype=torch.float32)
    held = found.state_dict()
    assert all(torch.equal(whole(held[name]), tensor) for name, tensor in expected.state_dict().items())
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("kind", CONFIGS)
def test_published_names_lead_to_the_model_and_back(checkpoints: dict[str, Path], kind: str) -> None:
    saved = load_file(checkpoints[kind] / "model.safetensors")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoints[kind]), dtype=torch.float32)
    sources = sources_of(model, {name: tuple(tensor.shape) for name, tensor in saved.items()})
    assert sources.unexpected == []
    names, back = hub_names(model), {}
    for name in names.parameters:
        tensor = sources.layouts[name].tensor(lambda source, region: saved[source][region])
        published = names.to_hub(name, tensor)
        assert [(key, part.shape) for key, part in published] == names.specs(name)
        back |= dict(published)
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[name], saved[name]) for name in saved)


def test_experts_are_published_one_by_one_and_are_views_of_what_the_model_holds() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_config("qwen3_moe"))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    held = torch.randn(4, 32, 32)  # [experts, gate and up, hidden]
    published = dict(hub_names(model).to_hub(name, held))
    assert list(published)[:2] == [f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" for expert in (0, 1)]
    assert torch.equal(published["model.layers.1.mlp.experts.2.up_proj.weight"], held[2, 16:])
    assert all(part.untyped_storage().data_ptr() == held.untyped_storage().data_ptr() for part in published.values())


def test_a_decoder_within_a_model_that_sees_is_found_and_trained(tmp_path: Path, world: World) -> None:
    folder = str(save_family(tmp_path, build_vision_config()))
    model = load_model(TrainerModel(), folder, world)
    assert decoder_layers(model) == list(model.model.language_model.layers)
    families.backward(model, *row(9, 14))
    trained = {name.split(".")[1] for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {"language_model"}


@pytest.mark.parametrize("kind", families.NOT_FOR_PACKED_ROWS)
def test_models_in_which_samples_of_a_row_would_meet_are_refused(kind: str, tmp_path: Path, world: World) -> None:
    build_config(kind).save_pretrained(tmp_path)
    config = TrainerModel(attn="sdpa" if kind == "lfm2" else "eager", from_scratch=True)
    with pytest.raises(ConfigError, match="cannot be trained on packed rows"):
        load_model(config, str(tmp_path), world)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save_family(tmp_path / "plain", build_config("llama"))


def change(folder: Path, **changes: torch.Tensor | None) -> str:
    """None takes a tensor away."""
    tensors = load_file(folder / "model.safetensors") | {
        name.replace("__", "."): tensor for name, tensor in changes.items()
    }
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_weights_of_another_model_are_refused_by_name(plain: Path, world: World) -> None:
    folder = change(
        plain,
        model__norm__weight=None,
        model__extra__weight=torch.zeros(1),
        model__layers__0__mlp__up_proj__weight=torch.zeros(3, 32),
    )
    with pytest.raises(ConfigError) as error:
        load_model(TrainerModel(), folder, world)
    message = str(error.value)
    assert "1 missing: model.norm.weight" in message
    assert "1 without a place in the model: model.extra.weight" in message
    assert "1 of another shape: model.layers.0.mlp.up_proj.weight ([3, 32] for [48, 32])" in message


def test_a_missing_expert_is_refused(tmp_path: Path, world: World) -> None:
    folder = save_family(tmp_path, build_config("qwen3_moe"))
    change(folder, model__layers__1__mlp__experts__3__down_proj__weight=None)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.down_proj \(\[3, 32, 16\] for \[4, 32, 16\]"):
        load_model(TrainerModel(), str(folder), world)


def test_a_head_that_is_tied_may_be_in_the_files_if_it_agrees(tmp_path: Path, world: World) -> None:
    folder = save_family(tmp_path, build_config("qwen3"))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    model = load_model(TrainerModel(), change(folder, lm_head__weight=embedding.clone()), world)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(ConfigError, match=r"lm_head.weight and model.embed_tokens.weight, which differ"):
        load_model(TrainerModel(), change(folder, lm_head__weight=embedding + 1), world)


def test_files_in_parts_and_in_half_precision_are_read(tmp_path: Path, world: World) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(build_config("qwen3_moe"), dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    held = load_model(TrainerModel(), str(tmp_path), world).state_dict()
    assert all(torch.equal(whole(held[name]), tensor.float()) for name, tensor in plain.state_dict().items())


def test_damaged_files_are_said_to_be_damaged(plain: Path, world: World) -> None:
    (plain / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0 garbage")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(TrainerModel(), str(plain), world)


def test_quantized_weights_are_refused(plain: Path, world: World) -> None:
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (plain / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantized \(fp8\)"):
        load_model(TrainerModel(), str(plain), world)


def test_an_attention_that_the_model_lacks_is_a_question_of_configuration(tmp_path: Path, world: World) -> None:
    build_config("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r'`model.attn = "sdpa"`(.|\n)*Set `model.attn`'):
        load_model(TrainerModel(from_scratch=True), str(tmp_path), world)
