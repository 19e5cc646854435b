"""Logprobs that a pass computes: at the tokens that are trained on, and in the precision that they need."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.models.tiny import one_row, random_samples
from trireme.config.trainer import TrainerModel
from trireme.messages import MicroBatch
from trireme.trainer.checkpoint.export import describe_model
from trireme.trainer.model.forward import compute_columns, scorer_of
from trireme.trainer.model.model import load_model


def test_logprob_chunks_hold_only_tokens_that_are_trained_on(tiny_model, world):
    row = one_row(random_samples([30, 22, 9]))
    num_scored = int(row.tokens.loss_mask.sum())
    for chunk in (5, 1024):
        model, lengths = load_model(TrainerModel(head_chunk=chunk), str(tiny_model), world), []
        scorer_of(model, world.device)
        hook = model.lm_head.register_forward_pre_hook(lambda _, args, to=lengths: to.append(args[0].shape[-2]))
        compute_columns(model, row, world.device)
        hook.remove()
        assert (sum(lengths), max(lengths)) == (num_scored, min(chunk, num_scored))


def test_temperatures_keep_their_precision_where_the_model_runs_in_less(tiny_model, world):
    model = load_model(TrainerModel(optimization_dtype="bfloat16"), str(tiny_model), world)
    row = one_row(random_samples([30]))
    found = []
    for temperature in (0.7, float(torch.tensor(0.7, dtype=torch.bfloat16))):
        other = MicroBatch(tokens=row.tokens, lengths=row.lengths, temperatures=[temperature])
        found.append(compute_columns(model, other, world.device).logprobs)
    assert not torch.equal(*found)


SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
NOISY = {
    "gpt2": {"n_positions": 128},
    "opt": {"ffn_dim": 128, "max_position_embeddings": 128, "word_embed_proj_dim": 64, "layerdrop": 0.2},
    "phi": {"intermediate_size": 128, "resid_pdrop": 0.1},
    "llama": {"intermediate_size": 128, "attention_dropout": 0.1},
    "falcon": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
}


@pytest.mark.parametrize("kind", NOISY)
def test_dropout_of_a_model_is_switched_off_and_published_again(kind, tmp_path, world):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **NOISY[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder := tmp_path / "published")
    model = load_model(TrainerModel(), str(folder), world)
    row = one_row(random_samples([40, 20]))
    with torch.no_grad():
        trained = compute_columns(model, row, world.device).logprobs
        assert torch.equal(trained, compute_columns(model.eval(), row, world.device).logprobs)
    (exported := tmp_path / "exported").mkdir()
    describe_model(exported, model, torch.float32)
    published, found = (json.loads((each / "config.json").read_text()) for each in (folder, exported))
    drops = {name: value for name, value in published.items() if "drop" in name}
    assert any(drops.values())
    assert {name: found[name] for name in drops} == drops
