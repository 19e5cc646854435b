"""Corrections: weights w for the difference of the proximal policy from the one that sampled, which the ratio misses.

    w_t = prox(t) / mu(t)

The trainer's weights at the start of the batch over those that sampled each token, as the engine saw them: staleness
and the mismatch of trainer and engine together. Value and slope of a token are multiplied by its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from trireme.algo.columns import Columns, TokenLoss, times
from trireme.config.losses import Loss


@dataclass(frozen=True)
class Weights:
    weight: torch.Tensor  # [K]
    masked: torch.Tensor | None = None  # [K] bool
    capped: torch.Tensor | None = None  # [K] bool


def token_truncate(log_weight: torch.Tensor, columns: Columns, recipe: Loss) -> Weights:
    """min(w_t, high): truncated importance sampling (TIS; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training"). With high = inf it is the behaviour weight of AReaL's decoupled objective (Fu et al.
    2025, arXiv 2505.24298, section 5.2), after Hilton et al. 2022 (arXiv 2110.00641).
    """
    return _truncated(log_weight, recipe)


def token_mask(log_weight: torch.Tensor, columns: Columns, recipe: Loss) -> Weights:
    """w_t where low <= w_t <= high, else 0: IcePop (Ling Team 2025, arXiv 2510.18855), with its 0.5 and 5."""
    return _masked(log_weight, recipe)


def sequence_truncate(log_weight: torch.Tensor, columns: Columns, recipe: Loss) -> Weights:
    """min(W_s, high), W_s = the product of w_t over the sample: exact off-policy weighting, cut (Liu, Li et al. 2025,
    "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch", sequence-level TIS).
    """
    return _truncated(columns.sample_sums(log_weight), recipe)


def sequence_mask(log_weight: torch.Tensor, columns: Columns, recipe: Loss) -> Weights:
    """W_s where low <= W_s <= high, else 0 (the same, sequence-level masked importance sampling)."""
    return _masked(columns.sample_sums(log_weight), recipe)


def geometric_mask(log_weight: torch.Tensor, columns: Columns, recipe: Loss) -> Weights:
    """1 where low <= W_s^(1/|s|) <= high, else 0: samples that drifted are left out, whatever their length, the others
    stay as they are. Rejection by the geometric mean, as in verl's rollout correction; why drift is to be bounded by
    sample: Li, Liu et al. 2025, "Trust Region Masking for Long-Horizon LLM Reinforcement Learning" (arXiv 2512.23075).

    The mean is a measure of drift and no importance weight, so it weighs nothing.
    """
    found = _masked(columns.sample_sums(log_weight) / columns.lengths(), recipe)
    return replace(found, weight=(found.weight > 0).to(found.weight.dtype))


CORRECTIONS: dict[str, Callable[[torch.Tensor, Columns, Loss], Weights]] = {
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
}


def corrected(token: TokenLoss, columns: Columns, recipe: Loss) -> TokenLoss:
    """Return the loss with each token multiplied by its weight."""
    if recipe.correction in (None, "none"):
        return token
    log_weight = torch.where(columns.mask, columns.proximal - columns.behaviour, 0.0)
    found = CORRECTIONS[recipe.correction](log_weight, columns, recipe)
    weight, masked = found.weight.to(token.slope.dtype), token.masked
    if found.masked is not None:
        masked = (found.masked if masked is None else masked | found.masked) & columns.mask
    return replace(
        token,
        value=times(token.value, weight),
        slope=times(token.slope, weight),
        masked=masked,
        capped=None if found.capped is None else found.capped & columns.mask,
    )


def _truncated(log_weight: torch.Tensor, recipe: Loss) -> Weights:
    weight = log_weight.exp()
    return Weights(weight.clamp(max=recipe.correction_high), capped=weight > recipe.correction_high)


def _masked(log_weight: torch.Tensor, recipe: Loss) -> Weights:
    weight = log_weight.exp()
    inside = (weight >= recipe.correction_low) & (weight <= recipe.correction_high)
    return Weights(torch.where(inside, weight, 0.0), masked=~inside)
