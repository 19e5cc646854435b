"""Causal attention of short samples on a CPU: two matrix products and a softmax, as the formula has it.

torch's own kernel keeps nothing of the size L x L and is quicker for long samples; for short ones its backward pass is
several times slower (`benchmarks/attention.py`). What is kept here for it is at most as wide as `SHORT` per head and
token.

S samples, L tokens of each, H heads of queries, K of keys and values, D size of a head.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from trireme.algo import activations

SHORT = {dtype: activations.SHORT[dtype.itemsize] for dtype in (torch.bfloat16, torch.float32)}
"""Tokens of a sample up to which this is quicker."""


def is_faster_on_cpu(query: torch.Tensor) -> bool:
    """Whether `attend_on_cpu` is to be preferred for `query` [S, H, L, D]."""
    return query.device.type == "cpu" and query.shape[2] <= SHORT.get(query.dtype, 0)


def attend_on_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float) -> torch.Tensor:
    """softmax(scaling q k^T) v, each token with those up to itself (Vaswani et al. 2017, equation 1).

    Args:
        query: [S, H, L, D].
        key: [S, K, L, D], K a divisor of H: heads of queries in a row share one of keys.
        value: as `key`.

    Returns:
        [S, L, H, D].
    """
    samples, heads, length, size = query.shape
    shared = key.shape[1]
    together = (query * scaling).reshape(samples, shared, heads // shared * length, size)
    scores = (together @ key.transpose(-1, -2)).view(samples, heads, length, length)
    weights = (scores + _mask(length, query.dtype)).softmax(-1)
    found = weights.view(samples, shared, -1, length) @ value
    return found.view(samples, heads, length, size).transpose(1, 2)


@lru_cache(64)
def _mask(length: int, dtype: torch.dtype) -> torch.Tensor:
    """[L, L]: nobody sees what comes after."""
    return torch.full((length, length), -torch.inf, dtype=dtype).triu(1)
