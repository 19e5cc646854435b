"""SGD by the sign of the gradient, which holds no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SignSgd(torch.optim.Optimizer):
    """Move each weight by the learning rate against the sign of its gradient; leave it where the gradient is 0.

    signSGD (Bernstein et al. 2018, arXiv 1802.04434, algorithm 1), or AdamW with betas and epsilon of 0. Weight decay
    is decoupled, as in prime-rl's `sign_sgd`: w <- (1 - lr * weight_decay) * w - lr * sign(g).
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None, "no optimizer of the trainer's evaluates the loss again"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
