"""Digests of tensors that are the same on any device.

A digest is integer arithmetic modulo 2^64 on the raw bits. So neither the device nor the order of summation matters,
and only one number leaves the GPU. It detects corruption, loss, exchange and reordering, but not deliberate forgery.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch

ROW = 1 << 16  # words that share a table of weights: 512 KiB, which fits a CPU's cache
_ROWS_AT_ONCE = {"cpu": 1, "cuda": 256}  # a row stays in a CPU's cache; a GPU needs many to be busy


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return 32 hexadecimal digits that depend on the values, their places, the dtype and the shape.

    The bytes are read as signed 64-bit words x_i, the last one filled up with zeros. With rows of `ROW` words,
    i = row * ROW + k:

        sum_i  (x_i xor (x_i >> 29)) * weight_k * (2 row + 1)   mod 2^64

    The weights are odd, so any flipped bit shows; the shift, which keeps the sign, lets high bits reach low ones, so
    exchanged words show even if they differ in their highest bit alone.
    """
    words = _to_words(tensor)
    total = 0
    at_once = _ROWS_AT_ONCE.get(words.device.type, 1) * ROW
    for start in range(0, words.numel(), at_once):
        total += _weighted_sum(words[start : start + at_once], start // ROW)
    text = f"{tensor.dtype} {list(tensor.shape)} {total % 2**64}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _weighted_sum(words: torch.Tensor, first_row: int) -> int:
    """Return the sum of whole rows and of a last, shorter one."""
    rows, rest = divmod(words.numel(), ROW)
    weights = _weights(words.device)
    # int64 wraps at 2^64, which is the modulus, so nothing is lost on the device.
    mixed = (words >> 29).bitwise_xor_(words)
    sums = (mixed[: rows * ROW].view(rows, ROW) * weights).sum(1).tolist() if rows else []
    if rest:
        sums.append(int((mixed[rows * ROW :] * weights[:rest]).sum()))
    return sum(value * (2 * (first_row + row) + 1) for row, value in enumerate(sums))


def _to_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return [W] int64 words; a view if size and alignment of the tensor allow it."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        # A view as 64-bit words needs whole words at an aligned offset.
        padded = torch.zeros(-(-data.numel() // 8) * 8, dtype=torch.uint8, device=data.device)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int64)


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """Return [ROW] odd numbers: splitmix64 of 0, 1, 2, … with the lowest bit set (Steele et al. 2014)."""
    z = np.arange(1, ROW + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # unsigned numbers wrap at 2^64
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)


def model_digest(digests: dict[str, str]) -> str:
    """Return one digest of all tensors, by name."""
    lines = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:32]
