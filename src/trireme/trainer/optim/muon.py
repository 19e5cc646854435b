"""An optimizer that uses Muon for the matrices of a model's layers and AdamW for all other parameters.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; at scale Liu et al. 2025, arXiv 2502.16982) steps
along the momentum with all its singular values made about 1. So an update has the same size in all directions, and it
needs one moment where AdamW has two.

The arithmetic is that of `torch.optim.Muon` with `match_rms_adamw`. Deviations:
1. A matrix may be sharded. Its singular values are those of the whole, so each rank gathers the momentum of one matrix
   at a time, computes the whole update, and keeps its own part. All ranks do the same work.
2. Each expert of a layer is a matrix of its own, although transformers holds all of them in one tensor.
3. On a CPU the iteration runs in float32, because bfloat16 is both slower and less precise there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from trireme.trainer.parallel.shards import local_part, shard_of, whole_tensor

MOMENTUM = 0.95

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic: small singular values grow fast, and all end between about 0.7 and 1.2."""

ITERATIONS = 5
EPS = 1e-7

ADAMW_RMS = 0.2  # the root mean square of an update of AdamW (arXiv 2502.16982, section 2.2)


class Muon(torch.optim.AdamW):
    """Uses Muon for groups with `is_hidden`. Their `lr` has the same meaning as AdamW's."""

    param_groups: list[dict[str, Any]]

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        groups = self.param_groups
        hidden = [(group, parameter) for group in groups if group["is_hidden"] for parameter in group["params"]]
        for group, parameter in hidden:
            if (gradient := parameter.grad) is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)

            momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
            ahead = gradient.lerp(momentum, MOMENTUM)  # Nesterov
            # Singular values are those of the whole matrix, and each rank keeps its own part of the update.
            update = orthogonal(whole_tensor(ahead))[shard_of(parameter).region]
            local = local_part(parameter)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update, alpha=-group["lr"] * rate_of(parameter.shape))

        # AdamW sees only its own groups, and the learning rate schedule all of them.
        self.param_groups = [group for group in groups if not group["is_hidden"]]
        try:
            return super().step(closure)  # AdamW for the other groups
        finally:
            self.param_groups = groups


def rate_of(shape: torch.Size) -> float:
    """Return the factor of `lr` that makes updates as large as AdamW's (arXiv 2502.16982, equation 4)."""
    return ADAMW_RMS * math.sqrt(max(shape[-2:]))


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return [..., A, B] the nearest matrices with all singular values about 1, by Newton-Schulz iteration."""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)

    # The norm bounds the singular values by 1, which the iteration needs to converge.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)

    # The smaller of the two Gram matrices costs less.
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)
