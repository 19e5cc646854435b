"""Causal attention of short samples on a CPU, written out: two matrix products and a softmax.

torch's kernel keeps nothing of the size L x L and is faster for long samples. For short ones its backward pass is
several times slower: written out, a training step of 20M parameters on samples of 142 tokens takes 4.66 instead of
5.83 s (`benchmarks/trainer/attention.py`, docs/benchmarks.md).

Letters: S samples, L tokens of each, H heads of queries, K heads of keys and values, D size of a head.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from trireme.algo.model import activations

SHORT = {dtype: activations.SHORT[dtype.itemsize] for dtype in (torch.bfloat16, torch.float32)}
"""Tokens of a sample up to which this is faster."""


def is_faster_on_cpu(query: torch.Tensor) -> bool:
    """Return whether `attend_on_cpu` is faster for `query` [S, H, L, D]."""
    return query.device.type == "cpu" and query.shape[2] <= SHORT.get(query.dtype, 0)


def attend_on_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float) -> torch.Tensor:
    """Compute softmax(scaling q k^T) v over each token and those before it (Vaswani et al. 2017, equation 1).

    Args:
        query: [S, H, L, D].
        key: [S, K, L, D], K a divisor of H: consecutive heads of queries share a head of keys.
        value: as `key`, or with another size of a head, as in latent attention.

    Returns:
        [S, L, H, D], D as of `value`.
    """
    samples, heads, length, size = query.shape

    # Queries that share a head of keys are stacked, so that one product serves all of them.
    shared = key.shape[1]
    together = (query * scaling).reshape(samples, shared, heads // shared * length, size)
    scores = (together @ key.transpose(-1, -2)).view(samples, heads, length, length)
    weights = (scores + _mask(length, query.dtype)).softmax(-1)
    found = weights.view(samples, shared, -1, length) @ value
    return found.view(samples, heads, length, -1).transpose(1, 2)


@lru_cache(64)
def _mask(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [L, L] -inf where a token would see a later one."""
    return torch.full((length, length), -torch.inf, dtype=dtype).triu(1)
