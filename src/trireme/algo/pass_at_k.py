"""pass@k: the probability that at least one of k answers passes, estimated from n answers of which c passed.

Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, equation 1:

    pass@k = E over examples of  1 - C(n - c, k) / C(n, k)

Without bias for any n >= k. The plug-in 1 - (1 - c/n)^k is not: with n = k it says too little.
"""

from __future__ import annotations

import numpy as np


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return pass@k of one example.

    The quotient of the binomials is the product of (1 - k/i) for i = n-c+1 .. n: factors between 0 and 1, so nothing
    overflows for any n.
    """
    n, c = num_samples, num_passed
    assert 0 <= c <= n, f"{c} of {n} passed"
    assert 1 <= k <= n, f"k = {k} of {n}"
    if n - c < k:  # no k answers without one that passed
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def mean_pass_at_k(num_samples: int, num_passed: list[int], k: int) -> float:
    """Return the mean over examples with `num_samples` answers each."""
    return float(np.mean([pass_at_k(num_samples, passed, k) for passed in num_passed]))


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to `most`.

    Example:
        powers_of_two(6)  # (1, 2, 4)
    """
    return tuple(2**exponent for exponent in range(most.bit_length()))
