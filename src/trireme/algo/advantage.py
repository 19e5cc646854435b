"""How much better a rollout was than its siblings of the same example.

G is the group: the rollouts of one example.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Estimator = Callable[[np.ndarray], np.ndarray]


def group_mean(rewards_G: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean(r).

    The group-relative advantage of GRPO (Shao et al. 2024, arXiv 2402.03300) without the division by the standard
    deviation, which favours examples that are nearly solved or nearly hopeless (Liu et al. 2025, "Dr. GRPO",
    arXiv 2503.20783, section 3.1).
    """
    return rewards_G - rewards_G.mean()


def group_mean_std(rewards_G: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """A_i = (r_i - mean(r)) / (std(r) + eps), the original of GRPO (arXiv 2402.03300, section 4.1.2)."""
    return group_mean(rewards_G) / (rewards_G.std() + eps)


ESTIMATORS: dict[str, Estimator] = {"group_mean": group_mean, "group_mean_std": group_mean_std}
