"""How samples of a packed row attend one by one, and share their common beginnings; and ranks a row.

`test_model.py` compares their logprobs and gradients with those of each sample alone.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from support.models.families import build_attending_model, build_config, flash_on_cpu
from trireme.algo.packing import buckets, positions, share_prefixes, unsampled_row
from trireme.config.trainer import TrainerModel
from trireme.trainer.model.forward import attach_scorer, computed_fracs, scorer_of
from trireme.trainer.model.packing.attention import ARGUMENT, FLASH, PackedRow, attend_on_cpu, use_packed_attention

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_buckets_hold_every_sample_once_and_waste_less_than_a_quarter(lengths):
    found = buckets(lengths)
    assert sorted(index for bucket in found for index in bucket) == list(range(len(lengths)))
    for bucket in found:
        theirs = [lengths[index] for index in bucket]
        assert max(theirs) <= 1.25 * min(theirs)
    assert len(found) <= 40  # log 5000 / log 1.25


@given(st.lists(st.lists(st.sampled_from([1, 256, 65536]), min_size=1, max_size=8), min_size=1, max_size=12))
def test_packed_samples_share_exactly_their_common_prefixes(samples):
    found = share_prefixes(np.concatenate(samples).astype(np.int32), [len(sample) for sample in samples])
    beginnings = [tuple(sample[: end + 1]) for sample in samples for end in range(len(sample))]
    place_of: dict[tuple[int, ...], int] = {}
    for beginning, place in zip(beginnings, found.places.tolist(), strict=True):
        assert place_of.setdefault(beginning, place) == place
    assert len(found.kept) == len(place_of) == len(set(place_of.values()))


@pytest.mark.parametrize(("dropout", "shares"), [(0.0, True), (0.1, False)])
def test_nothing_is_shared_where_chance_has_a_say(dropout, shares, world):
    model = build_attending_model().eval()
    model.model.layers[0].mlp.adapter_drops = torch.nn.Dropout(dropout)
    attach_scorer(model, TrainerModel(), world)
    scorer = scorer_of(model, CPU)
    assert (scorer.is_packed, scorer.shares_prefixes) == (True, shares)
    ids = [3, 4, 5, 6, 7, 3, 4, 5, 9, 8, 3, 4, 3, 4, 5, 6, 7, 3, 3, 4, 5, 6, 11, 12]
    in_one_row = [unsampled_row(ids, [5, 4, 3, 5, 1, 6])]
    assert computed_fracs(model, in_one_row) == pytest.approx((11 / 24, 1) if shares else (1, 24 / 11))
    in_two = [unsampled_row(ids[:9], [5, 4]), unsampled_row(ids[9:], [3, 5, 1, 6])]  # 6 and 10 are distinct
    assert computed_fracs(model, in_two) == pytest.approx((16 / 24, 16 / 11) if shares else (1, 24 / 11))


def test_a_model_whose_samples_see_one_another_without_a_mask_keeps_it(world):
    model = build_attending_model()

    def lose_row(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {name: value for name, value in kwargs.items() if name != ARGUMENT}

    model.model.layers[0].self_attn.register_forward_pre_hook(lose_row, with_kwargs=True)
    attach_scorer(model, TrainerModel(), world)
    assert not scorer_of(model, CPU).is_packed
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (6, 3), (8, 1)])
def test_short_attention_has_the_results_and_gradients_of_the_formula(heads, groups):
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


ROW = [5, 6, 1, 9]
SHAPES = [(4, 4, 16, 16, None), (4, 2, 16, 16, 1), (6, 3, 20, 12, 3), (4, 1, 5, 9, None), (2, 2, 8, 8, 30)]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("heads", "groups", "size", "value_size", "window"), SHAPES)
def test_flash_attention_of_a_row_is_that_of_sdpa_with_a_mask(heads, groups, size, value_size, window, is_shared):
    """In results and gradients; heads may be of any size, those of values of another, and prefixes shared."""
    places = np.concatenate([np.arange(11), [0], np.arange(5), np.arange(11, 15)]) if is_shared else None
    model, row = build_attending_model(), PackedRow(ROW, CPU, places)
    at = torch.arange(21) if places is None else torch.from_numpy(places)
    draw = torch.Generator().manual_seed(heads)
    inputs = [
        torch.randn(1, int(at.max()) + 1, count, each, generator=draw, dtype=torch.float64).transpose(1, 2)
        for count, each in ((heads, size), (groups, size), (groups, value_size))
    ]
    inputs = [each.requires_grad_() for each in inputs]
    layer = SimpleNamespace(config=SimpleNamespace(sliding_window=window), layer_idx=0)
    use_packed_attention(model, FLASH)
    with flash_on_cpu():
        attend = partial(AttentionInterface()[FLASH], layer, *inputs, None, sliding_window=window, scaling=0.3)
        found, _ = attend(packed_row=row)
        upstream = torch.randn(found.shape, generator=draw, dtype=torch.float64)
        gradients = torch.autograd.grad(found, inputs, upstream)

    sample, place = np.repeat(np.arange(4), ROW), positions(ROW)
    distance = place[:, None] - place
    mask = torch.from_numpy((sample[:, None] == sample) & (distance >= 0) & (distance < (window or 99)))
    each = [tensor[:, :, at] for tensor in inputs]
    right = scaled_dot_product_attention(*each, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    right = right[:, np.unique(at, return_index=True)[1]]
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    for gradient, other in zip(gradients, torch.autograd.grad(right, inputs, upstream), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fault", [{"sliding_window": 5, "layer": 1}, {"sliding_window": None}, {"softcap": 9.0}])
def test_attention_that_the_flash_kernel_lacks_keeps_its_masks(fault, world):
    """A window that a layer has not by its configuration, one that it does not pass on, and capped scores."""
    config = build_config("gemma3_text")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    attention = model.model.layers[fault.get("layer", 0)].self_attn
    if "softcap" in fault:
        attention.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | fault), with_kwargs=True)
    else:
        attention.sliding_window = fault["sliding_window"]
    attach_scorer(model, TrainerModel(attn="flash_attention_2"), world)
    with flash_on_cpu() as windows:
        assert not scorer_of(model, CPU).is_packed
    assert len(windows) == fault.get("layer", 0)  # layers before it
    assert model.config._attn_implementation == "sdpa"
