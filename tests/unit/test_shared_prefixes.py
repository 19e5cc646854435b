"""What samples have in common at their beginning is computed once, and nobody can tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trireme.algo.prefixes import shared
from trireme.config.trainer import TrainerModel
from trireme.messages import MicroBatch, build_tokens
from trireme.trainer.context import Team
from trireme.trainer.head import Head, HeadOutput
from trireme.trainer.mesh import World
from trireme.trainer.samples_apart import attend_apart
from trireme.trainer.scorer import Scorer, attach_scorer, scorer_of, shared_frac

CPU = torch.device("cpu")
SAMPLES = [[3, 4, 5, 6, 7], [3, 4, 5, 9], [8, 3, 4], [3, 4, 5, 6, 7], [3], [3, 4, 5, 6, 11, 12]]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12))
def test_tokens_are_shared_where_everything_up_to_them_is_the_same_and_nowhere_else(samples: list[list[int]]) -> None:
    found = shared(np.concatenate(samples), [len(sample) for sample in samples])
    beginnings = [tuple(sample[: end + 1]) for sample in samples for end in range(len(sample))]
    place_of: dict[tuple[int, ...], int] = {}
    for beginning, place in zip(beginnings, found.places.tolist(), strict=True):
        assert place_of.setdefault(beginning, place) == place
    assert len(found.kept) == len(place_of) == len(set(place_of.values()))


def test_ids_larger_than_a_byte_are_told_apart() -> None:
    found = shared(np.array([1, 256, 257, 1, 256, 65536], np.int32), [3, 3])
    assert found.kept.tolist() == [0, 1, 2, 5]
    assert found.places.tolist() == [0, 1, 2, 0, 1, 3]


def test_logprobs_and_gradients_are_those_of_samples_that_share_nothing() -> None:
    plain, plain_gradients = scored(shares=False)
    found, gradients = scored(shares=True)
    torch.testing.assert_close(found.logprobs, plain.logprobs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.entropies, plain.entropies, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dropout", "shares"), [(0.0, True), (0.1, False)])
def test_nothing_is_shared_where_chance_has_a_say(world: World, dropout: float, shares: bool) -> None:
    model = small_model(attention_dropout=dropout)
    attach_scorer(model, TrainerModel(), world)
    scorer = scorer_of(model, CPU)
    assert scorer.is_apart
    assert scorer.shares_prefixes == shares
    assert shared_frac(model, [row_of(SAMPLES)]) == (pytest.approx(1 - 11 / 24) if shares else 0)


def scored(*, shares: bool) -> tuple[HeadOutput, dict[str, torch.Tensor]]:
    """With a loss in which every token counts for something else."""
    model = small_model()
    found = score(model, shares=shares)
    (found.logprobs * torch.linspace(-1, 2, len(found.logprobs))).sum().backward()
    return found, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def score(model: PreTrainedModel, *, shares: bool) -> HeadOutput:
    attend_apart(model)
    scorer = Scorer(
        model,
        Team(),
        chunk=1024,
        tolerance=1e-3,
        head=Head(model),
        is_apart=True,
        shares_prefixes=shares,
        is_tried=True,
    )
    lengths = [len(sample) for sample in SAMPLES]
    starts = np.cumsum([0, *lengths[:-1]])
    places = np.setdiff1d(np.arange(sum(lengths)), starts)
    return scorer.score(row_of(SAMPLES), places, CPU)


def row_of(samples: list[list[int]]) -> MicroBatch:
    ids = np.concatenate(samples).tolist()
    zeros = [0.0] * len(ids)
    tokens = build_tokens(ids=ids, loss_mask=[1] * len(ids), logprobs=zeros, advantages=zeros, versions=[0] * len(ids))
    return MicroBatch(tokens=tokens, lengths=[len(sample) for sample in samples], temperatures=[1.0] * len(samples))


def small_model(**settings: float) -> PreTrainedModel:
    torch.manual_seed(7)
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=64,
        **settings,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
