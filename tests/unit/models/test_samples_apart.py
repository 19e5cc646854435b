"""Samples of a packed row that attend one by one learn what they learn under a mask of the whole row.

So do samples whose common beginnings are computed once, and rows that several ranks share.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
    modeling_flash_attention_utils,
)

from families import VOCABULARY, build_config
from tiny import take_gradients
from trireme.algo.packing import buckets, positions, share_prefixes, unsampled_row
from trireme.base.errors import ConfigError
from trireme.config.trainer import TrainerModel
from trireme.messages import MicroBatch
from trireme.trainer.model.cpu_attention import attend_on_cpu
from trireme.trainer.model.forward import Scorer, attach_scorer, scorer_of, shared_frac
from trireme.trainer.model.head import Head
from trireme.trainer.model.packing import attention as packed_attention
from trireme.trainer.parallel.context_parallel import SharedRow, Team, share_attention
from trireme.trainer.parallel.mesh import World

CPU = torch.device("cpu")
SAMPLES = [[3, 4, 5, 6, 7], [3, 4, 5, 9], [8, 3, 4], [3, 4, 5, 6, 7], [3], [3, 4, 5, 6, 11, 12]]


def model_of(kind: str = "qwen3", **settings: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    config = build_config(kind, **settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()


def passed(model: PreTrainedModel, lengths: list[int], *, apart: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradient of the embedding under a loss that weighs every token otherwise."""
    total = sum(lengths)
    context = {packed_attention.ARGUMENT: packed_attention.PackedRow(lengths, CPU)} if apart else {}
    ids = torch.arange(total)[None] * 7 % VOCABULARY
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with packed_attention.row_given() if context else nullcontext():
        logits = model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, **context).logits[0]
    (logits.logsumexp(-1) * torch.linspace(-1, 1, total)).sum().backward()
    return logits.detach(), take_gradients(model)["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        *((kind, [5, 9, 1, 30, 6, 6]) for kind in ("qwen3", "mistral", "granite", "qwen3_moe")),
        *(("qwen3", lengths) for lengths in ([12], [8, 8, 8], [1, 1])),
    ],
)
def test_logits_and_gradients_are_those_of_the_masked_row(kind: str, lengths: list[int]) -> None:
    """Also in layers that are checkpointed; and the mask is back where the row is not given."""
    model = model_of(kind, **{"sliding_window": None} if kind == "mistral" else {})
    masked = passed(model, lengths)
    assert packed_attention.supports_packed_attention(model)
    packed_attention.use_packed_attention(model)
    apart = passed(model, lengths, apart=True)
    for ours, theirs in zip(apart, masked, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    without = passed(model, lengths)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = passed(model, lengths, apart=True)
    packed_attention.use_masked_attention(model)
    for ours, theirs in zip((*again, *without, *passed(model, lengths)), (*apart, *masked, *masked), strict=True):
        assert torch.equal(ours, theirs)


def test_models_whose_layers_do_not_see_everything_keep_the_mask() -> None:
    assert not packed_attention.supports_packed_attention(model_of("mistral", sliding_window=8))
    assert not packed_attention.supports_packed_attention(model_of("gemma3_text", sliding_window=8, head_dim=8))
    assert packed_attention.supports_packed_attention(model_of("qwen2", sliding_window=8, use_sliding_window=False))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_buckets_hold_every_sample_once_and_waste_less_than_a_quarter(lengths: list[int]) -> None:
    found = buckets(lengths)
    assert sorted(index for bucket in found for index in bucket) == list(range(len(lengths)))
    for bucket in found:
        theirs = [lengths[index] for index in bucket]
        assert max(theirs) <= 1.25 * min(theirs)
    assert len(found) <= 40  # log 5000 / log 1.25


@given(st.lists(st.lists(st.sampled_from([1, 256, 65536]), min_size=1, max_size=8), min_size=1, max_size=12))
def test_tokens_are_shared_where_everything_up_to_them_is_the_same_and_nowhere_else(samples: list[list[int]]) -> None:
    found = share_prefixes(np.concatenate(samples).astype(np.int32), [len(sample) for sample in samples])
    beginnings = [tuple(sample[: end + 1]) for sample in samples for end in range(len(sample))]
    place_of: dict[tuple[int, ...], int] = {}
    for beginning, place in zip(beginnings, found.places.tolist(), strict=True):
        assert place_of.setdefault(beginning, place) == place
    assert len(found.kept) == len(place_of) == len(set(place_of.values()))


def row_of(samples: list[list[int]]) -> MicroBatch:
    return unsampled_row(np.concatenate(samples).tolist(), [len(sample) for sample in samples])


def test_logprobs_and_gradients_of_samples_that_share_are_those_of_samples_that_share_nothing() -> None:
    found = []
    for shares in (False, True):
        model = model_of().eval()
        packed_attention.use_packed_attention(model)
        options = {"head": Head(model), "is_packed": True, "shares_prefixes": shares, "is_tried": True}
        scorer = Scorer(model, Team(), chunk=1024, tolerance=1e-3, **options)
        starts = np.cumsum([0, *map(len, SAMPLES[:-1])])
        scored = scorer.score(row_of(SAMPLES), np.setdiff1d(np.arange(sum(map(len, SAMPLES))), starts), CPU)
        (scored.logprobs * torch.linspace(-1, 2, len(scored.logprobs))).sum().backward()  # each token counts otherwise
        found.append((scored, take_gradients(model)))
    (plain, plain_gradients), (ours, our_gradients) = found
    torch.testing.assert_close(ours.logprobs, plain.logprobs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.entropies, plain.entropies, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_gradients, plain_gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dropout", "shares"), [(0.0, True), (0.1, False)])
def test_nothing_is_shared_where_chance_has_a_say(world: World, dropout: float, shares: bool) -> None:
    model = model_of().eval()
    model.model.layers[0].mlp.adapter_drops = torch.nn.Dropout(dropout)
    attach_scorer(model, TrainerModel(), world)
    scorer = scorer_of(model, CPU)
    assert (scorer.is_packed, scorer.shares_prefixes) == (True, shares)
    assert shared_frac(model, [row_of(SAMPLES)]) == (pytest.approx(1 - 11 / 24) if shares else 0)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (6, 3), (8, 1)])
def test_short_attention_has_the_results_and_gradients_of_the_formula(heads: int, groups: int) -> None:
    draw = torch.Generator().manual_seed(heads * 100 + groups)
    inputs = [
        torch.randn(5, count, 23, size, generator=draw, dtype=torch.float64, requires_grad=True)
        for count, size in ((heads, 16), (groups, 16), (groups, 12))  # values may be smaller: latent attention
    ]
    expected = scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
    found = attend_on_cpu(*inputs, scaling=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(output, inputs, upstream) for output in (found, expected))
    for gradient, right in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_of_a_shared_row_sees_a_tokens_own_sample_and_window(window: int | None) -> None:
    row = SharedRow(Team(1, 2), [5, 6], CPU)  # rank 1's part begins within the second sample
    query = torch.zeros(1, 1, 12, 4)
    mask = row.mask("sdpa", window, query)[0, 0]
    sample, place = np.repeat([0, 1, 2], [5, 6, 1]), positions([5, 6, 1])  # what the row lacks is a sample of its own
    distance = place[:, None] - place
    expected = (sample[:, None] == sample) & (distance >= 0) & (distance < (window or 99))
    assert mask.bool().tolist() == expected.tolist()
    assert row.mask("sdpa", window, query) is row.mask("sdpa", window, query)


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_a_team_runs_flash_attention_by_the_name_that_transformers_knows(name: str, monkeypatch: Any) -> None:
    """With a stand-in for the kernels, which no CPU runs. transformers loads them by the name in a module's config."""

    def varlen(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, softmax_scale: Any = None, causal: Any = None, **_: Any
    ) -> Any:
        samples = (each.tensor_split(cu_seqlens_q[1:-1].tolist()) for each in (q, k, v))
        heads_first = ([part.transpose(0, 1) for part in sample] for sample in zip(*samples, strict=True))
        attend = partial(scaled_dot_product_attention, is_causal=causal, scale=softmax_scale, enable_gqa=True)
        return torch.cat([attend(*sample).transpose(0, 1) for sample in heads_first])

    loaded = {name: (varlen, varlen, None, None, None)}
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda asked, *_, **__: loaded[asked])
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface.register(name, interface()["flash_attention_2"])
    model, row = model_of(), SharedRow(Team(), [5, 6], CPU)
    inputs = {"input_ids": torch.arange(11)[None], "position_ids": row.position_ids, "use_cache": False}
    with torch.no_grad():
        expected = model(**inputs).logits
        model.config._attn_implementation = name
        share_attention(model, 1)
        torch.testing.assert_close(model(**inputs, shared_row=row).logits, expected)


@pytest.mark.parametrize(("attention", "team_size", "problem"), [("eager", 2, '"eager"'), ("sdpa", 3, "4 attention")])
def test_attention_that_cannot_be_shared_is_refused(attention: str, team_size: int, problem: str) -> None:
    model = model_of()
    model.set_attn_implementation(attention)
    with pytest.raises(ConfigError, match=problem):
        share_attention(model, team_size)
