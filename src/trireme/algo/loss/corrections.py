"""Corrections: weights for the difference of the proximal policy from the one that sampled, which the ratio misses.

    w_t = prox(t) / mu(t)    W_s = the product of w_t over the sample

The trainer's weights at the start of the batch over those that sampled each token, as the engine saw them: staleness
and the mismatch of trainer and engine together. Value and slope of a token are multiplied by its weight:

- `token_truncate`: min(w_t, high). Truncated importance sampling (TIS; Yao et al. 2025, "Your Efficient RL Framework
  Secretly Brings You Off-Policy RL Training"). With high = inf it is the behaviour weight of AReaL's decoupled
  objective (Fu et al. 2025, arXiv 2505.24298, section 5.2), after Hilton et al. 2022 (arXiv 2110.00641).
- `token_mask`: w_t if low <= w_t <= high, else 0. IcePop (Ling Team 2025, arXiv 2510.18855), with its 0.5 and 5.
- `sequence_truncate`: min(W_s, high). Exact off-policy weighting, cut (Liu, Li et al. 2025, "When Speed Kills
  Stability: Demystifying RL Collapse from the Training-Inference Mismatch", sequence-level TIS).
- `sequence_mask`: W_s if low <= W_s <= high, else 0 (the same, sequence-level masked importance sampling).
- `geometric_mask`: 1 if low <= W_s^(1/|s|) <= high, else 0. Samples that drifted are left out, at any length.
  Rejection by the geometric mean, as in verl's rollout correction; why drift is to be bounded by sample: Li,
  Liu et al. 2025, "Trust Region Masking for Long-Horizon LLM Reinforcement Learning" (arXiv 2512.23075).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from trireme.algo.columns import Columns, TokenLoss, times
from trireme.config.losses import Loss


def corrected(token: TokenLoss, columns: Columns, recipe: Loss) -> TokenLoss:
    """Return the loss with each token multiplied by its weight."""
    if recipe.correction in (None, "none"):
        return token

    measured, _, action = recipe.correction.partition("_")
    log_weight = torch.where(columns.mask, columns.proximal - columns.behaviour, 0.0)
    # Logarithms are added up in float64, as a product over thousands of tokens would overflow or vanish.
    if measured != "token":
        log_weight = columns.sample_sums(log_weight)
    if measured == "geometric":
        log_weight = log_weight / columns.lengths()
    weight = log_weight.exp()

    # The metrics tell a weight that was cut to its bound (`capped`) from a token that gets no gradient (`masked`).
    if action == "truncate":
        kept, masked = weight.clamp(max=recipe.correction_high), token.masked
        capped = (weight > recipe.correction_high) & columns.mask
    else:
        inside = (weight >= recipe.correction_low) & (weight <= recipe.correction_high)
        kept, capped = torch.where(inside, weight, 0.0), None
        masked = (~inside if token.masked is None else token.masked | ~inside) & columns.mask

    # The geometric mean measures drift and is no importance weight, so it only decides which samples remain.
    if measured == "geometric":
        kept = (kept > 0).to(kept.dtype)
    kept = kept.to(token.slope.dtype)
    return replace(token, value=times(token.value, kept), slope=times(token.slope, kept), masked=masked, capped=capped)
