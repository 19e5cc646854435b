"""What the trainer exports is what `transformers` loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tiny import (
    VOCABULARY,
    are_equal,
    open_exporter,
    open_state,
    open_store,
    random_samples,
    train_step,
)
from trireme.config.trainer import Optimizer, TrainerModel
from trireme.ledger.manifest import read_manifest
from trireme.trainer.export_layout import layout_of
from trireme.trainer.mesh import World
from trireme.trainer.model import load_model
from trireme.trainer.optim import build_optimizer
from trireme.trainer.served import served_tensors
from trireme.trainer.state import TrainerState

IDS = torch.arange(20)[None] * 5 % VOCABULARY


def export(model: PreTrainedModel, folder: Path, world: World, *, tokenizer: Path, dtype: torch.dtype) -> Path:
    """Export version 1 under `folder`, with a checkpoint beside it."""
    exporter = open_exporter(folder, tokenizer, world, dtype)
    store = open_store(folder.with_name(f"{folder.name}_checkpoints"), world, exporter=exporter)
    store.save(TrainerState(model, build_optimizer(model, Optimizer()), version=1))
    store.wait()
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


def test_transformers_loads_an_export_as_the_model_that_was_trained(
    trained: PreTrainedModel, exported: Path, tiny_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert torch.equal(logits_of(model), logits_of(trained))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found, served = load_file(exported / "model.safetensors"), dict(served_tensors(trained, torch.float32))
    assert "lm_head.weight" not in found  # tied embeddings are written once
    assert are_equal(found, served)
    assert list(served) == [spec.name for spec in layout_of(trained, torch.float32).specs]
    messages = [{"role": "user", "content": "Reverse abc."}]
    ours, theirs = (
        AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)
        for folder in (exported, tiny_model)
    )
    assert list(ours["input_ids"]) == list(theirs["input_ids"])


def test_an_exported_configuration_describes_the_exported_file(
    trained: PreTrainedModel, tiny_model: Path, tmp_path: Path, world: World
) -> None:
    folder = export(trained, tmp_path / "half", world, tokenizer=tiny_model, dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["use_cache"]) == ("bfloat16", True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    expected = {name: parameter.full_tensor().bfloat16() for name, parameter in trained.named_parameters()}
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


def test_an_export_replaces_the_one_of_the_same_step(
    trained: PreTrainedModel, tiny_model: Path, tmp_path: Path, world: World
) -> None:
    folder = tmp_path / "step_1"
    folder.mkdir()
    (folder / "left_over").touch()
    (tmp_path / ".step_1.partial").mkdir()
    export(trained, tmp_path, world, tokenizer=tiny_model, dtype=torch.float32)
    assert not (folder / "left_over").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_checkpoint_contains_the_files_that_describe_its_export(exported: Path) -> None:
    """So the export can be repeated when the base model is gone."""
    checkpoint = exported.parent.with_name(f"{exported.parent.name}_checkpoints") / "step_1"
    described = {path.name: path.read_bytes() for path in (checkpoint / "model").iterdir()}
    assert described == {path.name: path.read_bytes() for path in exported.iterdir() if path.suffix != ".safetensors"}
    listed = set(read_manifest(checkpoint).files)
    assert {f"model/{name}" for name in described} | {"layout.json"} < listed


def test_a_generation_config_that_transformers_would_reject_is_exported_unchanged(
    tiny_model: Path, tmp_path: Path, world: World
) -> None:
    model = load_model(TrainerModel(), str(tiny_model), world)
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, False
    folder = export(model, tmp_path / "weights", world, tokenizer=tiny_model, dtype=torch.float32)
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.6
