"""What the trainer exports is what `transformers` loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from limits import file_size_limit
from tiny import (
    VOCABULARY,
    are_equal,
    load_script,
    open_exporter,
    open_state,
    open_store,
    random_samples,
    train_step,
)
from trireme.config.trainer import Optimizer, TrainerModel
from trireme.ledger.manifest import read_manifest
from trireme.trainer.checkpoint import CheckpointStore
from trireme.trainer.export import Exporter
from trireme.trainer.export_layout import layout_of
from trireme.trainer.mesh import World
from trireme.trainer.model import load_model
from trireme.trainer.optim import build_optimizer
from trireme.trainer.served import served_tensors
from trireme.trainer.state import TrainerState

IDS = torch.arange(20)[None] * 5 % VOCABULARY


def export(model: PreTrainedModel, folder: Path, world: World, *, tokenizer: Path, dtype: torch.dtype) -> Path:
    """Under `folder`, as version 1, out of a checkpoint beside it."""
    save(model, folder, world, open_exporter(folder, tokenizer, world, dtype)).wait()
    return folder / "step_1"


def save(model: PreTrainedModel, folder: Path, world: World, exporter: Exporter) -> CheckpointStore:
    store = open_store(folder.with_name(f"{folder.name}_checkpoints"), world, exporter=exporter)
    store.save(TrainerState(model, build_optimizer(model, Optimizer()), version=1))
    return store


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.fixture(scope="module")
def trained(tiny_model: Path, world: World) -> PreTrainedModel:
    state = open_state(tiny_model, world)
    train_step(state, random_samples([20, 30]), world)
    return state.model


@pytest.fixture(scope="module")
def exported(
    trained: PreTrainedModel, tiny_model: Path, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return export(trained, tmp_path_factory.mktemp("exported"), world, tokenizer=tiny_model, dtype=torch.float32)


def test_the_exported_model_gives_the_same_logits_to_the_bit(trained: PreTrainedModel, exported: Path) -> None:
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(exported)), logits_of(trained))


def test_tied_embeddings_are_written_once_and_stay_tied(exported: Path) -> None:
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a dict
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_tokenizer_comes_along_with_its_chat_template(exported: Path, tiny_model: Path) -> None:
    messages = [{"role": "user", "content": "Reverse abc."}]
    ours, theirs = (
        AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)
        for folder in (exported, tiny_model)
    )
    assert list(ours["input_ids"]) == list(theirs["input_ids"])
    assert AutoTokenizer.from_pretrained(exported).eos_token == "<|im_end|>"


def test_the_configuration_describes_the_file_and_not_the_training(
    trained: PreTrainedModel, tiny_model: Path, tmp_path: Path, world: World
) -> None:
    folder = export(trained, tmp_path / "half", world, tokenizer=tiny_model, dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["use_cache"]) == ("bfloat16", True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    expected = {name: parameter.full_tensor().bfloat16() for name, parameter in trained.named_parameters()}
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


def test_an_export_of_the_same_step_takes_the_place_of_the_last(
    trained: PreTrainedModel, tiny_model: Path, tmp_path: Path, world: World
) -> None:
    folder = tmp_path / "step_1"
    folder.mkdir()
    (folder / "left_over").touch()
    (tmp_path / ".step_1.partial").mkdir()
    export(trained, tmp_path, world, tokenizer=tiny_model, dtype=torch.float32)
    assert not (folder / "left_over").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_an_untied_model_of_another_family_comes_back_too(tmp_path: Path, world: World) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    load_script("make_tiny_model").build_tokenizer().save_pretrained(tmp_path / "base")
    model = load_model(TrainerModel(), str(tmp_path / "base"), world)
    folder = export(model, tmp_path, world, tokenizer=tmp_path / "base", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_an_export_has_the_tensors_that_engines_get(trained: PreTrainedModel, exported: Path) -> None:
    served = dict(served_tensors(trained, torch.float32))
    found = load_file(exported / "model.safetensors")
    assert list(served) == [spec.name for spec in layout_of(trained, torch.float32).specs]
    assert are_equal(found, served)


def test_the_description_of_an_export_lies_in_the_checkpoint(exported: Path) -> None:
    """So that it can be made again, wherever the base model is by then."""
    checkpoint = exported.parent.with_name(f"{exported.parent.name}_checkpoints") / "step_1"
    described = {path.name: path.read_bytes() for path in (checkpoint / "model").iterdir()}
    assert described == {path.name: path.read_bytes() for path in exported.iterdir() if path.suffix != ".safetensors"}
    listed = set(read_manifest(checkpoint).files)
    assert {f"model/{name}" for name in described} | {"layout.json"} < listed


def test_a_generation_config_that_transformers_would_not_save_is_exported_as_it_is(
    tiny_model: Path, tmp_path: Path, world: World
) -> None:
    model = load_model(TrainerModel(), str(tiny_model), world)
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, False
    folder = export(model, tmp_path / "weights", world, tokenizer=tiny_model, dtype=torch.float32)
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.6


def test_what_cannot_be_written_is_raised_and_leaves_nothing(
    trained: PreTrainedModel, tiny_model: Path, tmp_path: Path, world: World
) -> None:
    with file_size_limit(10_000):
        store = save(trained, tmp_path / "weights", world, open_exporter(tmp_path / "weights", tiny_model, world))
        with pytest.raises(Exception, match="File too large"):
            store.wait()
    assert not (tmp_path / "weights").exists() or list((tmp_path / "weights").iterdir()) == []
