"""KL divergences between policies, from single tokens. d is a difference of logprobs; sources at each function."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trireme.algo.columns import Columns

_MOST_WEIGHT = 8.0


def kl_estimate(log_ratio: torch.Tensor) -> torch.Tensor:
    """Estimate KL(mu || pi) per token, from tokens of mu: exp(d) - 1 - d with d = log pi - log mu.

    Unbiased and never negative (Schulman 2020, "Approximating KL Divergence", k3). In double precision: at d around
    1e-6 the difference would drown in float32.
    """
    double = log_ratio.double()
    return torch.expm1(double) - double


def k1(d: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """value d, slope w d with w = min(pi / mu, 8).

    "k1 in the reward": the gradient of KL(pi || ref), E_pi[d grad log pi], without bias also for stale tokens as long
    as no weight is cut. Differentiating d itself would give grad log pi, which is 0 on average: a penalty that does
    nothing (Tang and Munos 2025, arXiv 2506.09477; Liu et al. 2025, arXiv 2510.01555). k3 times a ratio that has a
    gradient, of DeepSeek-V3.2 (arXiv 2512.02556), comes to the same slope: w (k3 + 1 - exp(-d)) = w d.
    """
    return d, weight * d


def k2(d: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """value d^2 / 2, slope d: on tokens of pi the gradient of KL(pi || ref), as k1's (arXiv 2510.01555)."""
    return d.square() / 2, d


def k3(d: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """value exp(-d) - 1 + d, slope 1 - exp(-d), as in GRPO (Shao et al. 2024, arXiv 2402.03300, equation 4).

    The value estimates KL(pi || ref); the slope, on tokens of pi, is the gradient of the other one, KL(ref || pi)
    (arXiv 2506.09477): where pi comes to rule a token out that ref likes, it pulls without bound.
    """
    return kl_estimate(-d), -torch.expm1(-d)


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}


def reference_penalty(columns: Columns, estimator: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [K] value and slope of the divergence to the reference model."""
    assert columns.reference is not None, "a penalty without a reference model"
    logprobs = columns.logprobs.detach()
    weight = torch.where(columns.mask, logprobs - columns.behaviour, 0.0).exp().clamp(max=_MOST_WEIGHT)
    return KL_ESTIMATORS[estimator](reference_difference(columns), weight)


def reference_difference(columns: Columns) -> torch.Tensor:
    """Return [K] d = log pi - log ref."""
    assert columns.reference is not None, "a penalty without a reference model"
    return torch.where(columns.mask, columns.logprobs.detach() - columns.reference, 0.0)
