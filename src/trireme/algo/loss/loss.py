"""The losses. `LOSSES` names the recipes of the literature; each is made of choices that can be taken one by one:

    L = sum over tokens t of  n_t * (w_t * surrogate_t + beta * penalty_t - entropy_bonus * H_t)

    surrogate_t    minus what is to grow, from the ratio r_t = pi(t) / prox(t) and the advantage   `surrogates.py`
    prox           what the ratio is against: the behaviour policy mu, or the trainer's own weights at the start of the
                   batch (`recomputed`); the latter come from the first pass over the batch, which costs nothing extra
    w_t            correction prox(t) / mu(t) for staleness and mismatch; 1 if prox is mu         `corrections.py`
    n_t            normalisation: token 1/N, sequence 1/(S |s|), constant 1/(S C)                  here
    penalty_t      KL divergence to a reference model                                             `divergence.py`
    H_t            entropy of the distribution that the token was drawn from

N tokens and S samples are those of the whole batch, over all ranks and micro-batches, so the gradient does not depend
on how the batch is split. `sequence` is GRPO's mean over samples of the mean over tokens (arXiv 2402.03300, equation
3), `token` is DAPO's (arXiv 2503.14476, equation 8) but over the batch and not within each group, `constant` is Dr.
GRPO's (arXiv 2503.20783, section 3.1).

Tokens that the policy did not sample (`Tokens.ce_weights`) are in none of these sums: `cross_entropy` adds their own.

The default is `importance` against the behaviour policy, over tokens (prime-rl's default of December 2025):

    r_t = pi(t) / mu(t)                                       computed per token, from logprobs
    m_t = 1 if ratio_low <= r_t <= ratio_high else 0
    L   = - 1/N * sum_t  m_t * stop_gradient(r_t * (A_t - kl_tau * log r_t)) * log pi(t)
"""

from __future__ import annotations

from dataclasses import replace

import torch

from trireme.algo.columns import MOST_LOG_RATIO, Columns, CustomLoss, LossTerms, TokenLoss, Totals
from trireme.algo.loss.centering import centering
from trireme.algo.loss.corrections import corrected
from trireme.algo.loss.divergence import kl_estimate, reference_difference, reference_penalty
from trireme.algo.loss.surrogates import SURROGATES
from trireme.config.losses import Loss, centers_scores


def policy_loss(columns: Columns, totals: Totals, recipe: Loss, custom: CustomLoss | None = None) -> LossTerms:
    """Compute the module's formula.

    Args:
        recipe: as `resolve_loss` returns it, with every key that it reads.
        custom: the function of the surrogate `custom`.
    """
    assert recipe.surrogate is not None, f"not resolved: {recipe}"
    columns = replace(columns, advantages=recipe.adv_tau * columns.advantages)

    own = custom(columns) if custom else None
    # A custom loss has a gradient of its own, so its slope is 0 here and `_differentiable` adds it as it is.
    if own is not None:
        given = torch.where(columns.mask, own.detach(), 0.0)
        token = TokenLoss(given, slope=torch.zeros_like(given))
    else:
        token = SURROGATES[recipe.surrogate](columns, recipe)

    token = corrected(token, columns, recipe)

    # After the correction, which weighs the surrogate alone.
    if recipe.beta:
        assert recipe.kl_estimator is not None, f"not resolved: {recipe}"
        penalty, slope = (recipe.beta * each for each in reference_penalty(columns, recipe.kl_estimator))
        dtype = token.slope.dtype
        token = replace(token, value=token.value + penalty.to(dtype), slope=token.slope + slope.to(dtype))

    # The bonus adds only its value here. Its gradient goes through the entropies, not through log pi.
    value = token.value
    if recipe.entropy_bonus:
        value = value - recipe.entropy_bonus * torch.where(columns.mask, columns.entropies.detach(), 0.0)

    return LossTerms(
        loss=normalized(_differentiable(token, own, columns, recipe), columns, totals, recipe),
        value=normalized(value.double(), columns, totals, recipe),
        sums=_sums(token, columns),
    )


def _differentiable(token: TokenLoss, own: torch.Tensor | None, columns: Columns, recipe: Loss) -> torch.Tensor:
    """Return [K] a loss per token whose gradient is right; its value is not (see `LossTerms`)."""
    # A slope of 0 must not meet a logprob of -inf.
    pulled = columns.mask & (token.slope != 0)
    per_token = token.slope * torch.where(pulled, columns.logprobs, 0.0)
    if own is not None:
        per_token = per_token + torch.where(columns.mask, own, 0.0)
    if recipe.entropy_bonus:
        per_token = per_token - recipe.entropy_bonus * torch.where(columns.mask, columns.entropies, 0.0)
    if centers_scores(recipe):
        per_token = per_token + centering(columns, recipe)
    return per_token


def normalized(per_token: torch.Tensor, columns: Columns, totals: Totals, recipe: Loss) -> torch.Tensor:
    """Return the sum over tokens, each multiplied by its n_t."""
    assert recipe.normalize == "token" or totals.samples or not totals.tokens, f"an average over no samples: {totals}"
    match recipe.normalize:
        case "sequence":
            return (per_token / columns.lengths().to(per_token.dtype)).sum() / max(1, totals.samples)
        case "constant":
            assert recipe.normalize_length is not None, f"not resolved: {recipe}"
            return per_token.sum() / (max(1, totals.samples) * recipe.normalize_length)
    return per_token.sum() / max(1, totals.tokens)


def _sums(token: TokenLoss, columns: Columns) -> dict[str, torch.Tensor]:
    log_ratio = torch.where(columns.mask, columns.logprobs.detach() - columns.behaviour, 0.0)
    sums = {
        "importance_ratio": torch.where(columns.mask, log_ratio.exp(), 0.0).sum(),
        "policy/kl": torch.where(columns.mask, kl_estimate(log_ratio), 0.0).sum(),
        "masked_frac": _count(token.masked, columns),
        "capped_frac": _count(token.capped, columns),
        "clip_frac/low": _count(token.clipped_low, columns),
        "clip_frac/high": _count(token.clipped_high, columns),
    }

    # For `effective_share`: bounded and in float64, as the squares of large ratios would overflow.
    weight = torch.where(columns.mask, log_ratio.double().clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp(), 0.0)
    sums |= {"weights": weight.sum(), "squared_weights": weight.square().sum()}

    if columns.top_behaviour is not None:
        sums["top_mass"] = torch.where(columns.mask, columns.top_behaviour.exp().sum(0), 0.0).sum()
    if columns.reference is not None:
        sums["reference_kl"] = kl_estimate(-reference_difference(columns)).sum()
    return sums


def effective_share(weights: float, squared_weights: float, tokens: int) -> float:
    """`ess`: (sum r)^2 / (N sum r^2), r = pi / mu per token. 1 if all weigh the same, 1/N if one weighs all (Kong
    1992). A ratio counts as at most e^20 here, so that a single token does not turn the number into NaN."""
    return weights**2 / (tokens * squared_weights)


def _count(which: torch.Tensor | None, columns: Columns) -> torch.Tensor:
    return columns.logprobs.new_zeros(()) if which is None else which.sum().to(columns.logprobs.dtype)


def cross_entropy(columns: Columns, totals: Totals) -> LossTerms:
    """Supervised fine-tuning: -log pi(t), mean over the tokens that count in the whole batch.

    In reinforcement learning, of the tokens with a weight: 1/N_ce * sum of -w_t * log pi(t). N_ce counts these tokens
    in the whole batch, whatever their weights, and they are not among the N of the policy loss.
    """
    nll = -torch.where(columns.mask, columns.logprobs, 0.0)
    sums: dict[str, torch.Tensor] = {}
    if columns.ce_weights is not None:
        sums["nll"] = nll.detach().double().sum()
        nll = nll * columns.ce_weights
    total = nll.sum()
    loss, value = total / max(1, totals.tokens), total.detach().double() / max(1, totals.tokens)
    return LossTerms(loss=loss, value=value, sums=sums)
