"""The optimizer and its learning rate."""

from __future__ import annotations

import torch

from trireme.algo.schedule import lr_factor
from trireme.config.trainer import Optimizer, Scheduler


def build_optimizer(model: torch.nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """Weight decay applies to matrices only, not to norms and biases."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.type == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.betas[0])
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def set_lr(
    optimizer: torch.optim.Optimizer, optim: Optimizer, scheduler: Scheduler, *, step: int, max_steps: int
) -> float:
    """The rate is a function of the step alone, so a resumed run needs no schedule state."""
    lr = optim.lr * lr_factor(
        step,
        kind=scheduler.type,
        warmup_steps=scheduler.warmup_steps,
        max_steps=max_steps,
        floor=min(1.0, scheduler.min_lr / optim.lr),
    )
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
