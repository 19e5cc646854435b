"""Score centring: a token's gradient without its average over the tokens that could have been sampled in its place.

    L += n_t A_t sum over v in H of  sg(mu(v) w(v) - alpha pi(v)) log pi(v)

H are the W likeliest tokens of mu at token t's place, and w(v) is the weight that the surrogate would give to v: r for
`importance` within its band, min(r, cap) for `ipo` within eps, 1 for `reinforce`. Without it, an advantage that all
tokens of a place share pulls pi towards mu or away from it, unless w is exactly pi / mu; with it, it does nothing
(Marek and Ryabinin 2026, "Score Centering Stabilizes Off-policy Reinforcement Learning", arXiv 2609.20807, equation 12
and appendix A.2).

Beyond H, mu is taken to be proportional to pi: rho = (1 - mu(H)) / (1 - pi(H)), alpha = rho f(1 / rho), f the weight as
a function of the ratio alone. Since sum_v pi(v) grad log pi(v) = 0, the tail then needs no logprobs of its own. If the
sampler was cut, H is all it could choose from and there is no tail; that is what prime-rl's flag of IPO does.
"""

from __future__ import annotations

import torch

from trireme.algo.columns import Columns
from trireme.config.losses import Loss

_LEAST_TAIL = 1e-6  # probability beyond H: below it, its ratio is rounding


def centering(columns: Columns, recipe: Loss) -> torch.Tensor:
    """Return [K] the term of each token, without n_t. Its gradient is right, its value means nothing.

    It is 0 where nothing is known of what mu could have sampled.
    """
    if columns.top_logprobs is None or columns.top_behaviour is None:
        return torch.zeros_like(columns.logprobs)

    known = columns.top_behaviour > -torch.inf
    log_pi = torch.where(known, columns.top_logprobs.detach(), -torch.inf).double()
    log_mu = columns.top_behaviour.double()
    pi, mu = log_pi.exp(), log_mu.exp()

    tail = [(1 - share.sum(0)).clamp(min=0.0) for share in (mu, pi)]
    rho = tail[0] / tail[1].clamp(min=_LEAST_TAIL)
    log_ratio = torch.where(known, columns.top_logprobs.detach() - columns.top_behaviour, 0.0).double()
    kept = mu * _weight(log_ratio.exp(), (pi - mu).abs(), recipe)
    coefficients = kept - rho * _weight(1 / rho.clamp(min=_LEAST_TAIL), torch.zeros_like(rho), recipe) * pi

    pull = torch.where(columns.mask & known.any(0), columns.advantages, 0.0)
    # A coefficient of 0 must not meet a logprob of -inf.
    logprobs = torch.where(known & (coefficients != 0), columns.top_logprobs, 0.0)
    return pull * (coefficients.to(logprobs.dtype) * logprobs).sum(0)


def _weight(ratio: torch.Tensor, shift: torch.Tensor, recipe: Loss) -> torch.Tensor:
    """Return the surrogate's weight for a token of this ratio, whose probability has changed by `shift`."""
    match recipe.surrogate:
        case "importance":
            return torch.where((ratio >= recipe.ratio_low) & (ratio <= recipe.ratio_high), ratio, 0.0)
        case "ipo":
            return torch.where(shift <= recipe.eps, ratio.clamp(max=recipe.max_importance_ratio), 0.0)
    assert recipe.surrogate == "reinforce", f"no weight of {recipe.surrogate}"
    return torch.ones_like(ratio)
