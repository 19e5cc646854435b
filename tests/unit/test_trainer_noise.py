"""Logprobs follow from weights and tokens: whatever else a model draws at random in training is switched off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from tiny import random_samples
from trireme.algo.packing import micro_batches_of_rank
from trireme.config.trainer import Lora, TrainerModel
from trireme.trainer.export import describe_model
from trireme.trainer.forward import compute_columns
from trireme.trainer.mesh import World
from trireme.trainer.model import load_model
from trireme.trainer.noise import published_config

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
NOISY = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=128)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**SIZES, ffn_dim=128, max_position_embeddings=128, word_embed_proj_dim=64, layerdrop=0.2)
    ),
    "phi": lambda: PhiForCausalLM(PhiConfig(**SIZES, intermediate_size=128, resid_pdrop=0.1)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=128, attention_dropout=0.1)),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**SIZES, hidden_dropout=0.1, attention_dropout=0.1)),
}


@pytest.fixture(params=NOISY)
def noisy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    NOISY[request.param]().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logprobs(model: PreTrainedModel, world: World) -> torch.Tensor:
    (row,) = micro_batches_of_rank(random_samples([40, 20]), capacity=64, rank=0, world=1)
    with torch.no_grad():
        return compute_columns(model, row, world.device).logprobs


def test_a_model_with_dropout_of_its_own_says_the_same_twice_as_it_does_in_an_engine(noisy: Path, world: World) -> None:
    model = load_model(TrainerModel(), str(noisy), world)
    once, again = logprobs(model, world), logprobs(model, world)
    assert torch.equal(once, again)
    assert torch.equal(once, logprobs(model.eval(), world))


def test_what_is_exported_says_what_was_published(noisy: Path, world: World, tmp_path: Path) -> None:
    model = load_model(TrainerModel(), str(noisy), world)
    describe_model(tmp_path, published_config(model), None, torch.float32, type(model).__name__)
    published, exported = (json.loads((folder / "config.json").read_text()) for folder in (noisy, tmp_path))
    drops = {name: value for name, value in published.items() if "drop" in name}
    assert any(value for value in drops.values())
    assert {name: exported[name] for name in drops} == drops


def test_dropout_of_adapters_stays(tmp_path: Path, world: World) -> None:
    torch.manual_seed(0)
    NOISY["llama"]().save_pretrained(tmp_path)
    model = load_model(TrainerModel(lora=Lora(dropout=0.3)), str(tmp_path), world)
    found = {layer.p for layer in model.modules() if isinstance(layer, torch.nn.Dropout)}
    assert found == {0.3}
