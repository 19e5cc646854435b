"""AdamW's two moments in 8 bits each, block by block: the blocks of Dettmers et al. 2021 (arXiv 2110.02861, section
2.1), with other codes.

A step of AdamW is the first moment m over the root s of the second one, so what counts is the relative error of s and
the absolute error of m / s. Both are held so, whatever the sizes of a block's gradients:

    s        its logarithm, evenly from the smallest to the largest of its block; a code of its own for 0
    m / s    evenly from minus the largest of its block to the largest

Deviation: the paper holds m and s^2 as parts of the largest of their block, by codes that are coarse for small parts. A
gradient 2,500 times smaller than the largest of its block keeps its m there, and loses its s: a step of m / eps.

L values of a row in blocks of B.
"""

from __future__ import annotations

import torch

SPAN = 11.5
"""Logarithm of the largest s over the smallest that has a code of its own, 1e5: what is smaller is raised to it, which
makes its steps smaller."""

RANGES = 3
"""Numbers per block beside its codes: the largest |m / s|, the smallest log s, and the distance between its codes."""


def encode(
    mean: torch.Tensor, square: torch.Tensor, blocks: int, rounding: torch.Tensor | float = 0.5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of both, [..., L] uint8, and [..., RANGES * blocks] float32: the inverse of `decode`, but for rounding.

    Args:
        mean: [..., L] m.
        square: [..., L] s^2.
        rounding: added to the codes of s before what is behind the point is cut off, 0 to 1; 0.5 gives the nearest one.
    """
    root = square.sqrt().unflatten(-1, (blocks, -1))
    logs = root.log()
    highest = logs.amax(-1, keepdim=True).clamp(min=-100.0)  # where all are 0
    lowest = torch.where(root > 0, logs, highest).amin(-1, keepdim=True).maximum(highest - SPAN)
    width = ((highest - lowest) / 254).clamp(min=1e-6)
    codes = torch.where(root > 0, (1 + (logs - lowest) / width + rounding).floor().clamp(1, 255), 0.0)
    held = _roots(codes, lowest, width)
    steps = torch.where(held > 0, mean.unflatten(-1, (blocks, -1)) / held, 0.0)
    largest = steps.abs().amax(-1, keepdim=True)
    signed = 128 + (steps / largest.clamp(min=1e-12) * 127).round()
    ranges = torch.cat([largest, lowest, width], dim=-1).flatten(-2)
    return signed.flatten(-2).to(torch.uint8), codes.flatten(-2).to(torch.uint8), ranges


def decode(mean: torch.Tensor, square: torch.Tensor, ranges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments, [..., L] float32.

    Args:
        mean: [..., L] uint8, as `square`.
        ranges: [..., RANGES * blocks].
    """
    per_block = ranges.unflatten(-1, (-1, RANGES))
    largest, lowest, width = per_block.split(1, dim=-1)
    root = _roots(square.unflatten(-1, (per_block.shape[-2], -1)).float(), lowest, width)
    steps = (mean.unflatten(-1, (per_block.shape[-2], -1)).float() - 128) / 127 * largest
    return (steps * root).flatten(-2), root.square().flatten(-2)


def _roots(codes: torch.Tensor, lowest: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """[..., blocks, B] s."""
    return torch.where(codes > 0, (lowest + (codes - 1) * width).exp(), 0.0)
