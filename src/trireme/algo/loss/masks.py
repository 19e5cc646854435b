"""Surrogates that weigh a token by its ratio and drop it if it has moved too far: `importance`, IPO and DPPO.

Values and slopes are those of `surrogates.py`, which has the table of all.
"""

from __future__ import annotations

import torch

from trireme.algo.columns import MOST_LOG_RATIO, Columns, TokenLoss, times
from trireme.config.losses import Loss


def importance(columns: Columns, recipe: Loss) -> TokenLoss:
    """m r A, where m masks ratios outside [ratio_low, ratio_high]; slope - m r (A - kl_tau log r). The default.

    With kl_tau = 0 and no masking this is off-policy policy gradient with per-token importance sampling. Form and
    bounds are those of prime-rl's default loss of December 2025. Its parts:

    1. The ratio is taken against the logprobs that the *engine* reported, so it corrects for both staleness and any
       numeric mismatch between the two (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
       Training").
    2. Two-sided masking instead of clipping: a token whose ratio left the band gets no gradient at all, in either
       direction of A (Ling Team 2025, "Every Step Evolves", arXiv 2510.18855, IcePop). Its form with a wider band.
    3. The KL term is the gradient of KL(pi || mu) estimated on tokens of mu: grad E_mu[r log r] = E_mu[r (1 + log r)
       grad log pi]; the constant 1 only adds a baseline and is left out.
    """
    log_ratio = columns.log_ratio()
    ratio = log_ratio.exp()
    kept = columns.mask & (ratio >= recipe.ratio_low) & (ratio <= recipe.ratio_high)
    drift = recipe.kl_tau * log_ratio if recipe.kl_tau else torch.zeros_like(log_ratio)
    # `times`: a ratio of 0 pulls nowhere, as r log r is then 0.
    pull = torch.where(kept, times(ratio, columns.advantages - drift), 0.0)
    value = -torch.where(kept, ratio * columns.advantages, 0.0)
    return TokenLoss(value, -pull, masked=columns.mask & ~kept)


def ipo(columns: Columns, recipe: Loss) -> TokenLoss:
    """m min(r, cap) A - kl_tau (log r)^2, where m drops tokens with |pi - prox| > eps.

    prime-rl's default since 2026-08-27, with the values of its pull request 3586 (2026-09-18); they were eps = 0.1 and
    kl_tau = 0.001 before. Differences of probabilities instead of ratios: a rare token may grow a lot, a likely one may
    not. It is the binary TV mask of DPPO (arXiv 2602.04879) on both sides, whatever the sign of A, with the squared log
    ratio of Kimi K2.5 (arXiv 2602.02276), which masked tokens have too. The cap is prime-rl's `max_importance_ratio`.
    """
    return _masked_importance(columns, recipe, _shift(columns).abs() > recipe.eps)


def dppo_tv(columns: Columns, recipe: Loss) -> TokenLoss:
    """Drop a token as `ipo` does, but only if it has moved far towards where its advantage still pushes it.

    Dropped where A > 0 and pi - prox > mask_high, or A < 0 and prox - pi > mask_low. DPPO with the binary total
    variation (arXiv 2602.04879); prime-rl's default from April to August 2026 with 0.2 on both sides, there with
    kl_tau = 0.001 and without a cap. The cap of 20 is that of verl's `dppo_tv` (`clip_ratio_c`).
    """
    shift = _shift(columns)
    return _masked_importance(columns, recipe, *_one_sided(shift, shift.abs(), columns, recipe))


def dppo_kl(columns: Columns, recipe: Loss) -> TokenLoss:
    """Mask as `dppo_tv`, with the binary KL divergence prox log(prox / pi) + (1 - prox) log((1 - prox) / (1 - pi)).

    DPPO with the binary KL (arXiv 2602.04879), as verl's `dppo_kl`; both bounds are 0.05 in verl's recipe.
    """
    log_ratio = columns.log_ratio()
    other, other_before = (_complement(logprobs) for logprobs in (columns.logprobs.detach(), columns.proximal))
    divergence = other_before * (other_before / other).log() - times(columns.proximal.exp(), log_ratio)
    return _masked_importance(columns, recipe, *_one_sided(_shift(columns), divergence, columns, recipe))


def _masked_importance(
    columns: Columns, recipe: Loss, too_high: torch.Tensor, too_low: torch.Tensor | None = None
) -> TokenLoss:
    """Weigh tokens by their ratio, up to the recipe's cap, drop those that moved too far, and add kl_tau (log r)^2."""
    log_ratio = columns.log_ratio()
    outside = columns.mask & (too_high if too_low is None else too_high | too_low)
    weight = torch.where(outside, 0.0, log_ratio.exp().clamp(max=recipe.max_importance_ratio))
    gain = times(weight, torch.where(columns.mask, columns.advantages, 0.0))

    # A token that the policy rules out would have an infinite penalty.
    value, slope = -gain, -gain
    if recipe.kl_tau:
        drift = log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
        value, slope = value + recipe.kl_tau * drift.square(), slope + 2 * recipe.kl_tau * drift
    return TokenLoss(value, slope, masked=outside)


def _one_sided(
    shift: torch.Tensor, distance: torch.Tensor, columns: Columns, recipe: Loss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [K] which tokens rose too far with A > 0, and which fell too far with A < 0."""
    too_high = (columns.advantages > 0) & (shift > 0) & (distance > recipe.mask_high)
    too_low = (columns.advantages < 0) & (shift < 0) & (distance > recipe.mask_low)
    return too_high, too_low


def _shift(columns: Columns) -> torch.Tensor:
    """Return [K] pi - prox, 0 for tokens that do not count. By expm1, as a difference of equals would be rounding."""
    log_ratio = columns.log_ratio()
    larger = torch.maximum(columns.logprobs.detach(), columns.proximal).clamp(max=0.0)
    return torch.where(columns.mask, -log_ratio.sign() * larger.exp() * torch.expm1(-log_ratio.abs()), 0.0)


def _complement(logprobs: torch.Tensor) -> torch.Tensor:
    """Return the probability of any other token, which in float32 would be 0 for a token that is all but certain."""
    return -torch.expm1(logprobs.clamp(max=-1e-8))
