"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch

from trireme.base.log import get_logger
from trireme.config.trainer import Optimizer, Scheduler
from trireme.trainer.optim.adamw_8bit import AdamW8bit
from trireme.trainer.optim.muon import Muon
from trireme.trainer.optim.sign_sgd import SignSgd
from trireme.trainer.optim.state_offload import with_offload

log = get_logger("optim")

Named = tuple[str, torch.nn.Parameter]


def build_optimizer(model: torch.nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """Build the optimizer of the parameters that are trained; with `cpu_offload`, its state lives in CPU memory."""
    optimizer = _build(model, config)
    if not config.cpu_offload:
        return optimizer
    if not next(model.parameters()).is_cuda:
        log.warning("optim.cpu_offload has no effect here: parameters and optimizer state are in CPU memory already")
        return optimizer
    return with_offload(optimizer)


def _build(model: torch.nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """Build the optimizer itself.

    Weight decay applies to matrices only, not to norms and biases; it is decoupled, but for SGD, of which torch has the
    L2 form alone (added to the gradient, before momentum).

    AdamW is fused, on GPUs and CPUs: one kernel for all parameters, and one pass over memory. torch has no fused SGD
    for sharded parameters.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    adam: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    match config.type:
        case "sgd":
            groups = _groups(trained, config.weight_decay)
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.betas[0])
        case "sign_sgd":
            return SignSgd(_groups(trained, config.weight_decay), lr=config.lr)
        case "muon":
            # Embeddings and head, whose rows belong to single tokens: they are no linear maps.
            tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
            if (head := getattr(model, "get_output_embeddings", lambda: None)()) is not None:
                tables.append(head)
            outside = {parameter for module in tables for parameter in module.parameters(recurse=False)}
            return Muon(_groups(trained, config.weight_decay, outside=outside), **adam)
        case "adamw_8bit":
            return AdamW8bit(_groups(trained, config.weight_decay), **adam)
        case "adamw":
            return torch.optim.AdamW(_groups(trained, config.weight_decay), **adam, fused=True)


def _groups(
    trained: list[Named], weight_decay: float, *, outside: set[torch.nn.Parameter] | None = None
) -> list[dict[str, Any]]:
    """
    Args:
        outside: parameters that Muon leaves to AdamW though they are matrices; if given, groups say which are Muon's.
    """
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in trained:
        # Weight decay is for matrices, Muon for those that are linear maps.
        is_matrix = parameter.ndim >= 2 and not name.endswith("bias")  # biases of experts have two dimensions
        is_stack = parameter.ndim == 2 or (parameter.ndim == 3 and ".experts." in name)  # a matrix per expert
        is_hidden = outside is not None and parameter not in outside and is_matrix and is_stack
        groups.setdefault((is_hidden, is_matrix), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if is_matrix else 0.0, "decays": is_matrix}
        | ({} if outside is None else {"is_hidden": is_hidden})
        for (is_hidden, is_matrix), parameters in groups.items()
    ]


def set_lr(
    optimizer: torch.optim.Optimizer, optim: Optimizer, scheduler: Scheduler, *, step: int, max_steps: int
) -> float:
    """Set and return the learning rate, a function of the step alone, so that resuming needs no scheduler state.

    Weight decay, betas and epsilon are set too: a run that is resumed may have others than the steps that it repeats.
    """
    lr = optim.lr * lr_factor(step, optim, scheduler, max_steps=max_steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = optim.weight_decay if group["decays"] else 0.0
        if "betas" in group:
            group |= {"betas": optim.betas, "eps": optim.eps}
        elif "momentum" in group:
            group["momentum"] = optim.betas[0]
    return lr


def lr_factor(step: int, optim: Optimizer, scheduler: Scheduler, *, max_steps: int) -> float:
    """Return the factor of the peak learning rate at optimizer step `step` (0-based).

    Rises linearly over `warmup_steps`, the first step already above 0; then stays (`constant`), falls to `min_lr` at
    `max_steps` along a line or half a cosine, or stays until the last `decay_steps` and falls along a line in these
    (`wsd`: warm-up, stable, decay; Hu et al. 2024, arXiv 2404.06395, section 4.2, with the linear fall of Haegele et
    al. 2024, arXiv 2405.18392).
    """
    first, floor = scheduler.warmup_steps, min(1.0, scheduler.min_lr / optim.lr) if optim.lr else 1.0
    if step < first:
        return (step + 1) / first
    if scheduler.type == "constant":
        return 1.0

    if scheduler.type == "wsd":
        first = max(first, max_steps - scheduler.decay_of(max_steps))

    done = min(1.0, max(0, step - first) / max(1, max_steps - first))
    shape = 0.5 * (1.0 + math.cos(math.pi * done)) if scheduler.type == "cosine" else 1.0 - done
    return floor + (1.0 - floor) * shape
