"""What the trainer exports is what `transformers` loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from limits import file_size_limit
from tiny import VOCABULARY, load_script, open_exporter, open_state, random_samples, train_step, weights_of
from trireme.config.trainer import TrainerModel
from trireme.trainer.mesh import World
from trireme.trainer.model import load_model

IDS = torch.arange(20)[None] * 5 % VOCABULARY


def export(model: PreTrainedModel, folder: Path, world: World, *, tokenizer: Path, dtype: torch.dtype) -> Path:
    """Under `folder`, as version 1."""
    open_exporter(folder, tokenizer, world, dtype).gather(model, 1)()
    return folder / "step_1"


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


def test_training_on_does_not_change_what_was_gathered(tiny_model: Path, tmp_path: Path, world: World) -> None:
    state = open_state(tiny_model, world)
    write = open_exporter(tmp_path, tiny_model, world).gather(state.model, 0)
    expected = weights_of(state.model)
    train_step(state, random_samples([20, 30]), world)
    write()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "step_0")
    assert all(torch.equal(parameter, expected[name]) for name, parameter in exported.named_parameters())


def test_what_cannot_be_written_leaves_nothing_and_is_written_when_it_can_be(
    trained: PreTrainedModel, tiny_model: Path, tmp_path: Path, world: World
) -> None:
    write = open_exporter(tmp_path / "weights", tiny_model, world).gather(trained, 1)
    with file_size_limit(10_000), pytest.raises(Exception, match="File too large"):
        write()
    assert list((tmp_path / "weights").iterdir()) == []
    write()
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "weights/step_1")), logits_of(trained))
