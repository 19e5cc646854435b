"""Muon for the matrices of a model's layers, AdamW for all the rest: one optimizer.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; at scale Liu et al. 2025, arXiv 2502.16982) steps
along the momentum with all its singular values made about 1. So an update has the same size in all directions, and
needs one moment where AdamW has two.

Other than in `torch.optim.Muon` with `match_rms_adamw`, whose arithmetic it is:
1. A matrix may be sharded. Its singular values are those of the whole, so each rank gathers the momentum of one matrix
   at a time, works out the whole update, and keeps its own part. Ranks do the same work; nobody waits for an owner.
2. The experts of a layer, which transformers holds in one tensor, are a matrix each.
3. On a CPU the iteration runs in float32: there, bfloat16 is slower as well as rougher.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trireme.trainer.parallel.shards import shard_of

MOMENTUM = 0.95

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic: they bring small singular values up fast, and leave all between about 0.7 and 1.2."""

ITERATIONS = 5
EPS = 1e-7

ADAMW_RMS = 0.2
"""What the mean square of an update of AdamW's comes to (arXiv 2502.16982, section 2.2)."""


class Muon(torch.optim.AdamW):
    """Groups with `is_hidden` are Muon's. `lr` means for them what it means for AdamW."""

    param_groups: list[dict[str, Any]]

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        groups = self.param_groups
        for group in groups:
            if group["is_hidden"]:
                self._step_matrices(group)
        self.param_groups = [group for group in groups if not group["is_hidden"]]
        try:
            return super().step(closure)  # AdamW, of what is left
        finally:
            self.param_groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        """AdamW's looks for counters of steps, which matrices do not have."""
        torch.optim.Optimizer.__setstate__(self, state)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            update = _own_part(orthogonal(_whole(self._nesterov(parameter))), parameter)
            local = _local(parameter)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update, alpha=-group["lr"] * rate_of(parameter.shape))

    def _nesterov(self, parameter: torch.Tensor) -> torch.Tensor:
        """Sharded as the parameter."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum, gradient = state["momentum_buffer"], parameter.grad
        assert gradient is not None
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


def rate_of(shape: torch.Size) -> float:
    """What `lr` is multiplied by, so that updates are as large as AdamW's (arXiv 2502.16982, equation 4)."""
    return ADAMW_RMS * math.sqrt(max(shape[-2:]))


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """[..., A, B] the nearest with all singular values about 1, by Newton and Schulz's iteration. A new tensor."""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _own_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    piece = shard_of(parameter)
    ends = zip(piece.offset, piece.tensor.shape, strict=True)
    return whole[tuple(slice(first, first + length) for first, length in ends)]
