"""Surrogates: the part of a loss that combines the ratio r = pi / prox and the advantage A.

Each function returns, per token, a value and a slope: the gradient of the loss is the sum of slope * grad log pi. All
of these losses have such a gradient, so nothing here is differentiated, a token that is clipped gets exactly 0, and a
ratio that overflows does not turn a masked token into NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trireme.algo.columns import Columns, TokenLoss, times
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
    log_ratio = token_log_ratio(columns)
    ratio = log_ratio.exp()
    kept = columns.mask & (ratio >= recipe.ratio_low) & (ratio <= recipe.ratio_high)
    drift = recipe.kl_tau * log_ratio if recipe.kl_tau else torch.zeros_like(log_ratio)
    # `times`: a ratio of 0 pulls nowhere, as r log r is then 0.
    pull = torch.where(kept, times(ratio, columns.advantages - drift), 0.0)
    value = -torch.where(kept, ratio * columns.advantages, 0.0)
    return TokenLoss(value, -pull, masked=columns.mask & ~kept)


def clip(columns: Columns, recipe: Loss) -> TokenLoss:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO (Schulman et al. 2017, arXiv 1707.06347, equation 7).

    Two bounds as in DAPO (Yu et al. 2025, arXiv 2503.14476, "clip-higher"). `dual_clip` c bounds it by c A if A < 0
    (Ye et al. 2020, arXiv 1912.09729); without it a token with A < 0 pulls without bound as its ratio grows.
    """
    return _clipped(token_log_ratio(columns).exp(), columns, recipe, dual=recipe.dual_clip)


def sequence_clip(columns: Columns, recipe: Loss) -> TokenLoss:
    """PPO's clip of a ratio that all tokens of a sample share: s = (pi(s) / prox(s))^(1/|s|), their geometric mean.

    GSPO (Zheng et al. 2025, arXiv 2507.18071, equations 5 and 7) in its token form (GSPO-token, section 4.3): the slope
    of token t is - s A_t, so with one advantage per sample and `normalize = "sequence"` the gradient is GSPO's.
    """
    log_ratio = token_log_ratio(columns)
    mean = columns.sample_sums(log_ratio) / columns.lengths()
    return _clipped(mean.to(log_ratio.dtype).exp(), columns, recipe, dual=None)


def clipped_weight(columns: Columns, recipe: Loss) -> TokenLoss:
    """sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: every token keeps its gradient, its weight is bounded.

    CISPO (MiniMax 2025, arXiv 2506.13585, equations 4 and 5). No lower bound (clip_low = 1), as there; for the upper
    one, of which that report names no number, weights up to 5.
    """
    low, high = _bounds(recipe)
    ratio = token_log_ratio(columns).exp()
    pull = times(torch.where(columns.mask, columns.advantages, 0.0), ratio.clamp(low, high))
    value = -times(columns.logprobs.detach(), pull)
    return TokenLoss(value, -pull, clipped_low=columns.mask & (ratio < low), clipped_high=columns.mask & (ratio > high))


def reinforce(columns: Columns, recipe: Loss) -> TokenLoss:
    """A log pi, no ratio (Williams 1992). Its direction is that of RLOO (Ahmadian et al. 2024, arXiv 2402.14740) with
    `leave_one_out`, and of REINFORCE++ (Hu 2025, arXiv 2501.03262) with `batch`, at one iteration on fresh tokens.

    Deviation: RLOO sums over a completion's tokens and averages over completions, here it is averaged over tokens;
    REINFORCE++ clips as PPO does.
    """
    pull = torch.where(columns.mask, columns.advantages, 0.0)
    return TokenLoss(-times(columns.logprobs.detach(), pull), -pull)


def cross_entropy(columns: Columns, recipe: Loss) -> TokenLoss:
    """log pi of the tokens with A > 0, each alike: rollouts that did better than what they are compared with are
    imitated, the others are left out (as in RAFT, Dong et al. 2023, arXiv 2304.06767).

    With `orchestrator.advantage.type = "none"` the advantage is the reward, and the filter is a reward above 0. Tokens
    left out still count in the average: a batch with few good rollouts takes a small step.
    """
    good = columns.mask & (columns.advantages > 0)
    pull = good.to(columns.advantages.dtype)
    return TokenLoss(-times(columns.logprobs.detach(), pull), -pull)


SURROGATES: dict[str, Callable[[Columns, Loss], TokenLoss]] = {
    "importance": importance,
    "clip": clip,
    "sequence_clip": sequence_clip,
    "clipped_weight": clipped_weight,
    "reinforce": reinforce,
    "cross_entropy": cross_entropy,
}


def _bounds(recipe: Loss) -> tuple[float, float]:
    """Return the smallest and the largest ratio that are not clipped."""
    assert recipe.clip_low is not None, f"not resolved: {recipe}"
    assert recipe.clip_high is not None, f"not resolved: {recipe}"
    return 1 - recipe.clip_low, 1 + recipe.clip_high


def token_log_ratio(columns: Columns) -> torch.Tensor:
    """Return [K] log r, 0 for tokens that do not count."""
    return torch.where(columns.mask, columns.logprobs.detach() - columns.proximal, 0.0)


def _clipped(ratio: torch.Tensor, columns: Columns, recipe: Loss, *, dual: float | None) -> TokenLoss:
    """Clip r A to the recipe's bounds, and to `dual` times A from below; clipped tokens have a slope of exactly 0."""
    advantages = torch.where(columns.mask, columns.advantages, 0.0)
    low, high = _bounds(recipe)
    # A ratio is clipped only on the side towards which its advantage pushes it.
    too_low = (advantages < 0) & (ratio < low)
    too_high = (advantages > 0) & (ratio > high)
    gain = times(advantages, ratio)
    gain = torch.where(too_low, low * advantages, torch.where(too_high, high * advantages, gain))
    if dual is not None:
        too_bad = (advantages < 0) & (ratio > dual)
        gain = torch.where(too_bad, dual * advantages, gain)
        too_high = too_high | too_bad
    slope = torch.where(too_low | too_high, 0.0, -gain)
    return TokenLoss(-gain, slope, clipped_low=too_low, clipped_high=too_high)
