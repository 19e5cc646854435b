"""The norms that vLLM's engine computes with on a CPU, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

EPSILON = 1e-6


@pytest.fixture(scope="module")
def norms():
    """As the engine's process has them."""
    from vllm import ir
    from vllm.platforms import current_platform

    from trireme.inference.cpu import norms
    from trireme.inference.plugin import register

    current_platform.import_kernels()
    register()
    register()  # as vLLM may
    return {name: getattr(ir.ops, name).impls[norms.PROVIDER] for name in ("rms_norm", "fused_add_rms_norm")}


def assert_norm(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, tolerance: float = 1e-6) -> None:
    """x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019, eq. 4)."""
    x = x.double()
    expected = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(1, 32), (7, 128), (5, 4, 32), (300, 384)])
def test_a_norm_is_that_of_the_formula(norms, dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    x, weight = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype)
    assert norms["rms_norm"].supports_args(x, weight, EPSILON)
    found = norms["rms_norm"].impl_fn(x, weight, EPSILON)
    assert found.dtype == dtype
    assert_norm(found, x, weight, tolerance)


def test_norms_of_slices_and_of_sums_are_those_of_the_formula(norms) -> None:
    """Keys, which lie among what one projection made; and what is added is kept for the next layer."""
    weight = drawn(32)
    keys = drawn(9, 6 * 32)[:, 4 * 32 :].view(9, 2, 32)
    assert not keys.is_contiguous()
    assert_norm(norms["rms_norm"].impl_fn(keys, weight, EPSILON), keys, weight)
    x, before, weight = drawn(6, 128), drawn(6, 128).flip(0), drawn(128)
    total = x + before
    found, residual = norms["fused_add_rms_norm"].impl_fn(x.clone(), before.clone(), weight, EPSILON)
    torch.testing.assert_close(residual, total, rtol=0, atol=0)
    assert_norm(found, total, weight)


def test_what_the_kernels_do_not_know_is_left_to_torch(norms) -> None:
    x, weight = drawn(6, 128), drawn(128)
    assert not norms["rms_norm"].supports_args(x, None, EPSILON)
    assert not norms["rms_norm"].supports_args(x, weight.bfloat16(), EPSILON)
    assert not norms["rms_norm"].supports_args(x, weight, EPSILON, 64)
    assert not norms["fused_add_rms_norm"].supports_args(x.T.contiguous().T, x, weight, EPSILON)
