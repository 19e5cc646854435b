"""One optimizer step: forward and backward over this rank's micro-batches, clip, update.

T tokens of a row, K of them count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trireme.algo.logprobs import token_logprobs
from trireme.algo.loss import LossTerms, importance_loss, kl_estimate
from trireme.algo.packing import positions
from trireme.base.log import get_logger
from trireme.config.trainer import Loss
from trireme.messages import MicroBatch
from trireme.trainer.mesh import World
from trireme.trainer.model import logits_at

log = get_logger("step")


@dataclass(frozen=True)
class Columns:
    """The tokens of a row that count, as tensors."""

    logprobs: torch.Tensor  # [K] float32, with gradient
    entropies: torch.Tensor  # [K] float32
    behaviour: torch.Tensor  # [K] float32
    advantages: torch.Tensor  # [K] float32
    versions: torch.Tensor  # [K] int64
    mask: torch.Tensor  # [K] bool; all True but in a row that has no token that counts


LossFunction = Callable[[Columns, int], LossTerms]


def policy_gradient(config: Loss) -> LossFunction:
    """The reinforcement-learning loss of `algo.loss`."""

    def loss(columns: Columns, loss_tokens: int) -> LossTerms:
        return importance_loss(
            columns.logprobs,
            columns.behaviour,
            columns.advantages,
            columns.mask,
            loss_tokens=loss_tokens,
            ratio_low=config.ratio_low,
            ratio_high=config.ratio_high,
            kl_tau=config.kl_tau,
        )

    return loss


def cross_entropy(columns: Columns, loss_tokens: int) -> LossTerms:
    """Supervised fine-tuning: -log pi(t), mean over the tokens that count in the whole batch."""
    total = -torch.where(columns.mask, columns.logprobs, 0.0).sum()
    return LossTerms(loss=total / loss_tokens, sums={"loss": total.detach()})


def forward_backward(
    model: PreTrainedModel,
    micro_batches: list[MicroBatch],
    *,
    loss_tokens: int,
    step: int,
    loss_function: LossFunction,
    world: World,
) -> dict[str, float]:
    """Accumulates gradients of the whole batch's loss; returns metrics, averaged over all ranks' tokens.

    FSDP averages gradients over ranks while the loss is already divided by all ranks' tokens: hence `* world.size`.
    """
    sums: dict[str, float] = defaultdict(float)
    for micro_batch in micro_batches:
        columns = compute_columns(model, micro_batch, world.device)
        terms = loss_function(columns, loss_tokens)
        (terms.loss * world.size).backward()
        for name, value in (terms.sums | _mismatch(columns, step)).items():
            sums[name] += float(value)
    return _means(world.sum(sums), loss_tokens)


def compute_columns(model: PreTrainedModel, micro_batch: MicroBatch, device: torch.device) -> Columns:
    tokens = micro_batch.tokens
    has_past = positions(micro_batch.lengths) > 0  # what stands before a sample's first token is another sample
    targets = torch.from_numpy(tokens.loss_mask.astype(bool) & has_past).nonzero().squeeze(-1)
    has_targets = len(targets) > 0
    if not has_targets:  # every rank must run the same collectives, so a row without tokens runs too
        targets = torch.zeros(1, dtype=torch.int64)
    keep = (targets - 1).clamp(min=0)
    logits = logits_at(model, micro_batch, keep.to(device), device)
    temperatures = torch.repeat_interleave(torch.tensor(micro_batch.temperatures), torch.tensor(micro_batch.lengths))

    def column(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array.copy())[targets].to(device=device, dtype=dtype)

    logprobs, entropies = token_logprobs(logits, column(tokens.ids, torch.int64), temperatures[targets].to(device))
    return Columns(
        logprobs=logprobs,
        entropies=entropies,
        behaviour=column(tokens.logprobs, torch.float32),
        advantages=column(tokens.advantages, torch.float32),
        versions=column(tokens.versions, torch.int64),
        mask=torch.full((len(targets),), has_targets, dtype=torch.bool, device=device),
    )


def _mismatch(columns: Columns, step: int) -> dict[str, torch.Tensor]:
    """Tokens at lag 0 were sampled with the very weights that are being trained: any difference is numeric."""
    fresh = columns.mask & (columns.versions == step)
    difference = torch.where(fresh, columns.logprobs.detach() - columns.behaviour, 0.0)
    return {
        "entropy_sum": torch.where(columns.mask, columns.entropies, 0.0).sum(),
        "fresh_tokens": fresh.sum(),
        "mismatch_sum": kl_estimate(difference).sum(),
    }


def _means(sums: dict[str, float], loss_tokens: int) -> dict[str, float]:
    fresh, mismatch = sums.pop("fresh_tokens"), sums.pop("mismatch_sum")
    means = {name: total / max(1, loss_tokens) for name, total in sums.items()}
    means["policy/entropy"] = means.pop("entropy_sum")
    if fresh:
        means["mismatch_kl"] = mismatch / fresh
    return means


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, max_norm: float) -> dict[str, float]:
    """Clips the global gradient norm, steps, and clears the gradients.

    A gradient that is not finite is thrown away: the weights stay as they are, and `skipped_update` says so. Clipping
    would turn it into weights that are NaN throughout.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    is_finite = math.isfinite(grad_norm)
    if is_finite:
        optimizer.step()
    else:
        log.warning("the gradient is not finite (norm %s): this step leaves the weights as they are", grad_norm)
    optimizer.zero_grad(set_to_none=True)
    return {"grad_norm": grad_norm, "skipped_update": float(not is_finite)}
