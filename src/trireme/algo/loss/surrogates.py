"""Surrogates: the part of a loss that combines the ratio r = pi / prox and the advantage A.

Each function returns, per token, a value and a slope: the gradient of the loss is the sum of slope * grad log pi. All
of these losses have such a gradient, so nothing here is differentiated, a token that is clipped gets exactly 0, and a
ratio that overflows does not turn a masked token into NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from trireme.algo.columns import MOST_LOG_RATIO, Columns, TokenLoss, times
from trireme.algo.loss.masks import dppo_kl, dppo_tv, importance, ipo
from trireme.config.losses import Loss

_ROUNDING = 1e-5  # rounding of a difference of logprobs in float32
_LOG_WEIGHTS = (math.log(1e-8), MOST_LOG_RATIO)


def clip(columns: Columns, recipe: Loss) -> TokenLoss:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO (Schulman et al. 2017, arXiv 1707.06347, equation 7).

    Two bounds as in DAPO (Yu et al. 2025, arXiv 2503.14476, "clip-higher"). `dual_clip` c bounds it by c A if A < 0
    (Ye et al. 2020, arXiv 1912.09729); without it a token with A < 0 pulls without bound as its ratio grows.
    """
    return _clipped(columns.log_ratio().exp(), columns, recipe, dual=recipe.dual_clip)


def sequence_clip(columns: Columns, recipe: Loss) -> TokenLoss:
    """PPO's clip of a ratio that all tokens of a sample share: s = (pi(s) / prox(s))^(1/|s|), their geometric mean.

    GSPO (Zheng et al. 2025, arXiv 2507.18071, equations 5 and 7) in its token form (GSPO-token, section 4.3): the slope
    of token t is - s A_t, so with one advantage per sample and `normalize = "sequence"` the gradient is GSPO's.
    """
    log_ratio = columns.log_ratio()
    mean = columns.sample_sums(log_ratio) / columns.lengths()
    return _clipped(mean.to(log_ratio.dtype).exp(), columns, recipe, dual=None)


def geometric_mean(columns: Columns, recipe: Loss) -> TokenLoss:
    """A times the geometric mean of the sample's clipped ratios: GMPO (Zhao et al. 2025, arXiv 2507.20673).

    Logarithms of ratios are clipped to [-clip_low, clip_high], each only on the side towards which its advantage pushes
    it; the paper's range is exp(-0.4) to exp(0.4). A clipped token counts in the mean and has a slope of 0. In the
    paper all tokens of a sample have one advantage; here each has its own, and with one and `normalize = "sequence"`
    the gradient is the paper's.
    """
    assert recipe.clip_low is not None, f"not resolved: {recipe}"
    assert recipe.clip_high is not None, f"not resolved: {recipe}"
    log_ratio, advantages = columns.log_ratio(), torch.where(columns.mask, columns.advantages, 0.0)
    too_low = (advantages < 0) & (log_ratio < -recipe.clip_low)
    too_high = (advantages > 0) & (log_ratio > recipe.clip_high)

    clipped = torch.where(too_low, -recipe.clip_low, torch.where(too_high, recipe.clip_high, log_ratio))
    mean = columns.sample_sums(clipped) / columns.lengths()
    gain = times(advantages, mean.to(log_ratio.dtype).exp())
    slope = torch.where(too_low | too_high, 0.0, -gain)
    return TokenLoss(-gain, slope, clipped_low=too_low, clipped_high=too_high)


def clip_cov(columns: Columns, recipe: Loss) -> TokenLoss:
    """Clip as `clip` does, and count tokens that `algo/covariance.py` chose as 0: Clip-Cov (arXiv 2505.22617)."""
    token, chosen = clip(columns, recipe), _restrained(columns)
    value, slope = (torch.where(chosen, 0.0, each) for each in (token.value, token.slope))
    return replace(token, value=value, slope=slope, masked=chosen)


def kl_cov(columns: Columns, recipe: Loss) -> TokenLoss:
    """r A - cov_penalty |log r|, the latter for tokens that `algo/covariance.py` chose: KL-Cov (arXiv 2505.22617).

    The absolute log ratio stands for the KL divergence as in the authors' code. Ratios are not clipped. A log ratio
    that is rounding has no slope: on fresh tokens its sign would be chance.
    """
    log_ratio, chosen = columns.log_ratio(), _restrained(columns)
    gain = times(torch.where(columns.mask, columns.advantages, 0.0), log_ratio.exp())
    assert recipe.cov_penalty is not None, f"not resolved: {recipe}"
    weight = torch.where(chosen, log_ratio.new_tensor(recipe.cov_penalty), 0.0)
    drift = log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    direction = torch.where(drift.abs() > _ROUNDING, drift.sign(), 0.0)
    return TokenLoss(weight * drift.abs() - gain, weight * direction - gain)


def soft_gate(columns: Columns, recipe: Loss) -> TokenLoss:
    """4 / tau sigmoid(tau (r - 1)) A: SAPO (Gao et al. 2025, arXiv 2511.20347), a gate instead of a clip.

    tau is tau_pos where A > 0, else tau_neg. The gradient is 4 s (1 - s) r A with s the sigmoid: r A at r = 1, and it
    vanishes smoothly on either side. The paper averages over samples (`normalize = "sequence"`), and has these values.
    """
    ratio, advantages = columns.log_ratio().exp(), torch.where(columns.mask, columns.advantages, 0.0)
    tau = _by_sign(advantages > 0, recipe.tau_pos, recipe.tau_neg, like=ratio)
    gate = torch.sigmoid(tau * (ratio - 1))
    rise = 4 * times(gate * torch.sigmoid(-tau * (ratio - 1)), ratio)
    return TokenLoss(-4 / tau * gate * advantages, -rise * advantages)


def clipped_weight(columns: Columns, recipe: Loss) -> TokenLoss:
    """sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: every token keeps its gradient, its weight is bounded.

    CISPO (MiniMax 2025, arXiv 2506.13585, equations 4 and 5). No lower bound (clip_low = 1), as there; for the upper
    one, of which that report names no number, weights up to 5.
    """
    low, high = _bounds(recipe)
    ratio = columns.log_ratio().exp()
    pull = times(torch.where(columns.mask, columns.advantages, 0.0), ratio.clamp(low, high))
    value = -times(columns.logprobs.detach(), pull)
    return TokenLoss(value, -pull, clipped_low=columns.mask & (ratio < low), clipped_high=columns.mask & (ratio > high))


def gamma_weight(columns: Columns, recipe: Loss) -> TokenLoss:
    """phi(W) A log pi, phi a fixed number, W^k exp(lambda (1 - W)), W = pi(s) / prox(s) without a root.

    VESPO (Shen et al. 2026, arXiv 2602.10693, section 3.4: k and lambda are its c1 and c2), with one pair for A >= 0
    and one for A < 0. Values, bounds of log W (log 1e-8 to 20) and the average over all tokens are those of TRL's
    `vespo`.
    """
    log_ratio, advantages = columns.log_ratio(), torch.where(columns.mask, columns.advantages, 0.0)
    log_weight = columns.sample_sums(log_ratio).clamp(*_LOG_WEIGHTS)
    k = _by_sign(advantages >= 0, recipe.k_pos, recipe.k_neg, like=log_weight)
    decay = _by_sign(advantages >= 0, recipe.lambda_pos, recipe.lambda_neg, like=log_weight)
    phi = (k * log_weight - decay * torch.expm1(log_weight)).exp()
    pull = times(advantages, phi.to(log_ratio.dtype))
    return TokenLoss(-times(columns.logprobs.detach(), pull), -pull)


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
    "ipo": ipo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip": clip,
    "sequence_clip": sequence_clip,
    "geometric_mean": geometric_mean,
    "soft_gate": soft_gate,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "clipped_weight": clipped_weight,
    "gamma_weight": gamma_weight,
    "reinforce": reinforce,
    "cross_entropy": cross_entropy,
}


def _bounds(recipe: Loss) -> tuple[float, float]:
    """Return the smallest and the largest ratio that are not clipped."""
    assert recipe.clip_low is not None, f"not resolved: {recipe}"
    assert recipe.clip_high is not None, f"not resolved: {recipe}"
    return 1 - recipe.clip_low, 1 + recipe.clip_high


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


def _restrained(columns: Columns) -> torch.Tensor:
    return torch.zeros_like(columns.mask) if columns.restrained is None else columns.restrained & columns.mask


def _by_sign(is_good: torch.Tensor, good: float | None, bad: float | None, *, like: torch.Tensor) -> torch.Tensor:
    """Return [K] the value of a recipe for good tokens, and that for bad ones."""
    assert good is not None, "not resolved"
    assert bad is not None, "not resolved"
    return torch.where(is_good, like.new_tensor(good), like.new_tensor(bad))
