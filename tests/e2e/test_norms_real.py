"""The norms that vLLM's engine computes with on a CPU, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.e2e

EPSILON = 1e-6


@pytest.fixture(scope="module")
def norms():
    """As the engine's process has them."""
    from vllm import ir
    from vllm.platforms import current_platform

    from trireme.inference import norms
    from trireme.inference.plugin import register

    current_platform.import_kernels()
    register()
    register()  # as vLLM may
    return {name: getattr(ir.ops, name).impls[norms.PROVIDER] for name in ("rms_norm", "fused_add_rms_norm")}


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019, eq. 4)."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(1, 32), (7, 128), (5, 4, 32), (300, 384)])
def test_a_norm_is_that_of_the_formula(norms, dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    x, weight = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype)
    assert norms["rms_norm"].supports_args(x, weight, EPSILON)
    found = norms["rms_norm"].impl_fn(x, weight, EPSILON)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), rms_norm(x, weight), rtol=tolerance, atol=tolerance)


def test_queries_and_keys_are_normed_where_they_lie_among_others(norms) -> None:
    """As slices of what one projection made of both."""
    both, weight = drawn(9, 6 * 32, dtype=torch.float32), drawn(32, dtype=torch.float32)
    keys = both[:, 4 * 32 :].view(9, 2, 32)
    assert not keys.is_contiguous()
    found = norms["rms_norm"].impl_fn(keys, weight, EPSILON)
    torch.testing.assert_close(found.double(), rms_norm(keys, weight), rtol=1e-6, atol=1e-6)


def test_what_is_added_is_kept_for_the_next_layer(norms) -> None:
    x, before, weight = (drawn(*shape, dtype=torch.float32) for shape in ((6, 128), (6, 128), (128,)))
    before = before.flip(0)
    total = x + before
    found, residual = norms["fused_add_rms_norm"].impl_fn(x.clone(), before.clone(), weight, EPSILON)
    torch.testing.assert_close(residual, total, rtol=0, atol=0)
    torch.testing.assert_close(found.double(), rms_norm(total, weight), rtol=1e-6, atol=1e-6)


def test_what_the_kernels_do_not_know_is_left_to_torch(norms) -> None:
    x, weight = drawn(6, 128, dtype=torch.float32), drawn(128, dtype=torch.float32)
    assert not norms["rms_norm"].supports_args(x, None, EPSILON)
    assert not norms["rms_norm"].supports_args(x, weight.bfloat16(), EPSILON)
    assert not norms["rms_norm"].supports_args(x, weight, EPSILON, 64)
    assert not norms["fused_add_rms_norm"].supports_args(x.T.contiguous().T, x, weight, EPSILON)
