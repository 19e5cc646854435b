"""Samples of a packed row that attend one by one learn what they learn under a mask of the whole row."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trireme.algo.packing import buckets
from trireme.trainer.samples_apart import ARGUMENT, ApartRow, attend_apart, attend_masked, can_attend_apart, row_given

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
}
CPU = torch.device("cpu")


def model_of(kind: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **SMALL | settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()


def passed(model: PreTrainedModel, lengths: list[int], **context: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradient of the embedding under a loss that weighs every token otherwise."""
    total = sum(lengths)
    ids = torch.arange(total)[None] * 7 % SMALL["vocab_size"]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    model.zero_grad()
    with row_given() if context else nullcontext():
        logits = model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, **context).logits[0]
    (logits.logsumexp(-1) * torch.linspace(-1, 1, total)).sum().backward()
    gradient = model.get_input_embeddings().weight.grad
    assert gradient is not None
    return logits.detach(), gradient.clone()


def apart(lengths: list[int]) -> dict[str, Any]:
    return {ARGUMENT: ApartRow(lengths, CPU)}


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "gemma", "qwen3_moe"])
@pytest.mark.parametrize("lengths", [[5, 9, 1, 30, 6, 6], [12], [8, 8, 8], [1, 1], [40, 3]], ids=str)
def test_logits_and_gradients_are_those_of_the_masked_row(kind: str, lengths: list[int]) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    more = {"qwen3_moe": experts, "mistral": {"sliding_window": None}, "gemma": {"head_dim": 8}}.get(kind, {})
    model = model_of(kind, **more)
    masked = passed(model, lengths)
    assert can_attend_apart(model)
    attend_apart(model)
    found = passed(model, lengths, **apart(lengths))
    for ours, theirs in zip(found, masked, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_a_sample_is_not_changed_by_its_neighbours() -> None:
    model = model_of("qwen3")
    attend_apart(model)
    lengths = [11, 4, 11, 7]
    logits, _ = passed(model, lengths, **apart(lengths))
    ids = torch.arange(sum(lengths))[None] * 7 % SMALL["vocab_size"]
    for first, length in zip([0, 11, 15, 26], lengths, strict=True):
        alone = model(input_ids=ids[:, first : first + length], **apart([length])).logits[0]
        torch.testing.assert_close(logits[first : first + length], alone, rtol=1e-4, atol=1e-5)


def test_checkpointed_layers_find_their_row_again() -> None:
    model = model_of("qwen3")
    attend_apart(model)
    lengths = [5, 17, 5]
    plain = passed(model, lengths, **apart(lengths))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for again, before in zip(passed(model, lengths, **apart(lengths)), plain, strict=True):
        assert torch.equal(again, before)


def test_models_whose_layers_do_not_see_everything_keep_the_mask() -> None:
    assert not can_attend_apart(model_of("mistral", sliding_window=8))
    assert not can_attend_apart(model_of("gemma3_text", sliding_window=8, head_dim=8))
    assert can_attend_apart(model_of("qwen2", sliding_window=8, use_sliding_window=False))


def test_a_pass_that_is_not_given_its_row_is_masked_as_before() -> None:
    model = model_of("qwen3")
    before = passed(model, [5, 9])
    attend_apart(model)
    without = passed(model, [5, 9])
    attend_masked(model)
    for again, first in zip((*without, *passed(model, [5, 9])), (*before, *before), strict=True):
        assert torch.equal(again, first)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_buckets_hold_every_sample_once_and_waste_less_than_a_quarter(lengths: list[int]) -> None:
    found = buckets(lengths)
    assert sorted(index for bucket in found for index in bucket) == list(range(len(lengths)))
    for bucket in found:
        theirs = [lengths[index] for index in bucket]
        assert max(theirs) <= 1.25 * min(theirs)
    assert len(found) <= 40  # log 5000 / log 1.25
