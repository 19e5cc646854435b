"""The policy-gradient loss.

Letters: T tokens of a row; r importance ratio; A advantage; mu the behaviour policy that sampled (the engine, at the
version of each token), pi the policy being trained.

`importance`, the default, for tokens t that the policy sampled:

    r_t = pi(t) / mu(t)                                       computed per token, from logprobs
    m_t = 1 if ratio_low <= r_t <= ratio_high else 0
    L   = - 1/N * sum_t  m_t * stop_gradient(r_t * (A_t - kl_tau * log r_t)) * log pi(t)

N is the number of such tokens in the whole batch, over all ranks and micro-batches, so the gradient does not depend
on how the batch is split. With kl_tau = 0 and no masking this is the gradient of -1/N * sum r_t A_t: off-policy
policy gradient with per-token importance sampling. Its parts:

1. The ratio is taken against the logprobs that the *engine* reported, not recomputed by the trainer, so it corrects
   for both staleness and any numeric mismatch between the two (Yao et al. 2025, "Your Efficient RL Framework Secretly
   Brings You Off-Policy RL Training").
2. Two-sided masking instead of clipping: a token whose ratio left the band gets no gradient at all, in either
   direction of A (Ling Team 2025, "Every Step Evolves", arXiv 2510.18855, IcePop). We use its form with a wider band.
3. The KL term is the gradient of KL(pi || mu) estimated on tokens of mu: grad E_mu[r log r] = E_mu[r (1 + log r)
   grad log pi]; the constant 1 only adds a baseline and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossTerms:
    """Sums over the tokens of one row; the trainer adds them up over rows and ranks and divides once."""

    loss: torch.Tensor  # scalar, already divided by the batch's tokens: call backward on it
    sums: dict[str, torch.Tensor]  # scalars without gradient


def importance_loss(
    logprobs_T: torch.Tensor,
    behaviour_T: torch.Tensor,
    advantages_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    loss_tokens: int,
    ratio_low: float,
    ratio_high: float,
    kl_tau: float,
) -> LossTerms:
    """See the module's formula.

    Args:
        logprobs_T: [T] float32, log pi, with gradient.
        behaviour_T: [T] float32, log mu.
        advantages_T: [T] float32.
        mask_T: [T] bool, tokens that count.
        loss_tokens: N.
    """
    log_ratio = torch.where(mask_T, logprobs_T.detach() - behaviour_T, 0.0)
    ratio = log_ratio.exp()
    kept = mask_T & (ratio >= ratio_low) & (ratio <= ratio_high)
    coefficient = torch.where(kept, ratio * (advantages_T - kl_tau * log_ratio), 0.0)
    loss = -(coefficient * torch.where(kept, logprobs_T, 0.0)).sum() / loss_tokens
    sums = {
        "loss": -torch.where(kept, ratio * advantages_T, 0.0).sum(),
        "importance_ratio": torch.where(mask_T, ratio, 0.0).sum(),
        "masked_frac": (mask_T & ~kept).sum().float(),
        "policy/kl": torch.where(mask_T, kl_estimate(log_ratio), 0.0).sum(),
    }
    return LossTerms(loss=loss, sums=sums)


def kl_estimate(log_ratio: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(mu || pi) from a token of mu: exp(d) - 1 - d with d = log pi - log mu.

    Unbiased and never negative (Schulman 2020, "Approximating KL Divergence", k3). In double precision: at d around
    1e-6 the difference would drown in float32.
    """
    double = log_ratio.double()
    return torch.expm1(double) - double
