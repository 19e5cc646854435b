"""Numbers in 8 bits each, block by block: dynamic tree quantisation (Dettmers 2015, arXiv 1511.04561, section 3.2) of
blocks with a scale each (Dettmers et al. 2021, arXiv 2110.02861, section 2.1)."""

from __future__ import annotations

from functools import lru_cache

import torch

DECADES = 7
"""Powers of ten that the codes span, the largest at 1. The larger, the more codes it has: each has twice as many as the
one below."""


@lru_cache
def code_values(signed: bool, device: torch.device) -> torch.Tensor:
    """[256] float32, ascending: what each code means, as a part of its block's largest value.

    Within a decade the values are evenly spaced. Without a sign there are twice as many of them; 0 and 1 are exact.
    """
    magnitudes = [
        10.0 ** (decade - DECADES + 1) * (0.1 + 0.9 * (place + 0.5) / count)
        for decade in range(DECADES)
        for count in [2 ** (decade + (not signed))]
        for place in range(count)
    ]
    values = sorted([*magnitudes, *(-value for value in magnitudes if signed), 0.0, 1.0])
    return torch.tensor(values, dtype=torch.float32, device=device)


def decode(codes: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[..., L] float32.

    Args:
        codes: [..., L] uint8.
        scale: [..., L / B] the largest magnitude of each block of B.
        values: [256] of `code_values`.
    """
    return (values[codes.int()].unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)


def encode(numbers: torch.Tensor, blocks: int, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., L] uint8 of the nearest codes, and [..., blocks] scales: the inverse of `decode`, if there is one."""
    parts = numbers.unflatten(-1, (blocks, -1))
    scale = parts.abs().amax(-1).clamp(min=1e-12)
    halfway = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(parts / scale.unsqueeze(-1), halfway, right=True)
    return codes.flatten(-2).to(torch.uint8), scale
