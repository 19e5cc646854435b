"""Attention written out, against torch's own in double precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trireme.trainer.short_attention import SHORT, attend_short, is_short

SCALING = 0.3


def random_inputs(*, heads: int, shared: int, length: int = 23) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(heads * 100 + shared)
    return [
        torch.randn(5, count, length, 16, generator=draw, dtype=torch.float64, requires_grad=True)
        for count in (heads, shared, shared)
    ]


@pytest.mark.parametrize(("heads", "shared"), [(1, 1), (4, 4), (6, 3), (8, 1)])
def test_results_and_gradients_are_those_of_the_formula(heads: int, shared: int) -> None:
    inputs = random_inputs(heads=heads, shared=shared)
    expected = scaled_dot_product_attention(*inputs, is_causal=True, scale=SCALING, enable_gqa=True).transpose(1, 2)
    found = attend_short(*inputs, scaling=SCALING)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for gradient, right in zip(torch.autograd.grad(found, inputs, upstream), wanted, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=1e-12)


def test_a_token_sees_itself_and_those_before_it_by_hand() -> None:
    """Keys of 0 make all weights equal, so each token has the mean of the values up to its own."""
    values = torch.tensor([2.0, 4.0, 9.0, 1.0]).view(1, 1, 4, 1)
    nothing = torch.zeros_like(values)
    assert attend_short(nothing, nothing, values, scaling=1.0).flatten().tolist() == [2.0, 3.0, 5.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_for_short_samples_in_the_precisions_that_were_measured(dtype: torch.dtype) -> None:
    assert is_short(torch.empty(1, 2, SHORT[dtype], 4, dtype=dtype))
    assert not is_short(torch.empty(1, 2, SHORT[dtype] + 1, 4, dtype=dtype))
    assert not is_short(torch.empty(1, 2, 3, 4, dtype=torch.float16))
    assert not is_short(torch.empty(1, 2, 3, 4, dtype=dtype, device="meta"))
