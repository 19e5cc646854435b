"""KL divergences between policies, from single tokens.

The penalty of a reference model has a value and a slope per token, with d = log pi - log ref and w = min(pi / mu, 8):

- `k1`: value d, slope w d. "k1 in the reward": the gradient of KL(pi || ref), E_pi[d grad log pi], without bias also
  for stale tokens as long as no weight is cut. Differentiating d itself would give grad log pi, which is 0 on average:
  a penalty that does nothing (Tang and Munos 2025, arXiv 2506.09477; Liu et al. 2025, arXiv 2510.01555). k3 times a
  ratio that has a gradient, of DeepSeek-V3.2 (arXiv 2512.02556), comes to the same slope: w (k3 + 1 - exp(-d)) = w d.
- `k2`: value d^2 / 2, slope d. On tokens of pi the gradient of KL(pi || ref), as k1's (arXiv 2510.01555).
- `k3`: value exp(-d) - 1 + d, slope 1 - exp(-d), as in GRPO (Shao et al. 2024, arXiv 2402.03300, equation 4). The value
  estimates KL(pi || ref); the slope, on tokens of pi, is the gradient of the other one, KL(ref || pi) (arXiv
  2506.09477): if pi comes to rule a token out that ref likes, it pulls without bound.
"""

from __future__ import annotations

import torch

from trireme.algo.columns import Columns
from trireme.config.losses import KlEstimator

_MOST_WEIGHT = 8.0


def kl_estimate(log_ratio: torch.Tensor) -> torch.Tensor:
    """Estimate KL(mu || pi) per token, from tokens of mu: exp(d) - 1 - d with d = log pi - log mu.

    Unbiased and never negative (Schulman 2020, "Approximating KL Divergence", k3). In double precision: at d around
    1e-6 the difference would drown in float32.
    """
    double = log_ratio.double()
    return torch.expm1(double) - double


def reference_penalty(columns: Columns, estimator: KlEstimator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [K] value and slope of the divergence to the reference model."""
    d = reference_difference(columns)
    match estimator:
        case "k1":
            log_weight = torch.where(columns.mask, columns.logprobs.detach() - columns.behaviour, 0.0)
            return d, log_weight.exp().clamp(max=_MOST_WEIGHT) * d
        case "k2":
            return d.square() / 2, d
        case "k3":
            return kl_estimate(-d), -torch.expm1(-d)


def reference_difference(columns: Columns) -> torch.Tensor:
    """Return [K] d = log pi - log ref."""
    assert columns.reference is not None, "a penalty without a reference model"
    return torch.where(columns.mask, columns.logprobs.detach() - columns.reference, 0.0)
