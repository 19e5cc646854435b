"""AdamW whose two moments are held in 8 bits each, by the codes below: 2 bytes per parameter instead of 8
(after Dettmers et al. 2021, arXiv 2110.02861).

The state is plain tensors in which every block is within a row of its parameter, so that shards can be cut and joined
between blocks. Any number of ranks can resume what any other number saved, to the bit.

What counts for a step of AdamW, the first moment m over the root s of the second one, is the relative error of s and
the absolute error of m / s. So each block holds

    s        its logarithm, evenly from the smallest to the largest of its block; a code of its own for 0
    m / s    evenly from minus the largest of its block to the largest

Deviation: the paper holds m and s^2 as parts of the largest of their block, by codes that are coarse for small parts. A
gradient 2,500 times smaller than the largest of its block keeps its m there and loses its s: a step of m / eps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trireme.trainer.parallel.shards import local_part, shard_of

BLOCKS = (128, 64, 32)  # values that share a range: the largest of these numbers that divides a row evenly

SMALLEST = 4096
"""Fewest values of a parameter with moments in 8 bits. Smaller ones, norms and biases have them in float32."""

MOMENTS = ("exp_avg", "exp_avg_sq")
RANGE = "ranges"  # the key of the ranges that the codes (uint8) of each block span

GOLDEN = (5**0.5 - 1) / 2
"""The fractional parts of its multiples fill the range from 0 to 1 as evenly as any sequence."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments in 8 bits.

    `state[parameter]` has `exp_avg` and `exp_avg_sq`, sharded as the parameter. If these are codes (uint8), it also has
    `ranges`, with `RANGES` numbers per block.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None, "no optimizer of the trainer's evaluates the loss again"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]

        # The state exists from the first step on, as with torch's own optimizers.
        if not state:
            block = block_of(parameter)
            dtype = None if block is None else torch.uint8
            state |= {"step": torch.tensor(0.0)} | {key: torch.zeros_like(parameter, dtype=dtype) for key in MOMENTS}
            if block is not None:  # with ranges of 0, code 0 means 0
                *rows, length = local_part(parameter).shape
                state[RANGE] = _sharded_as(parameter, torch.zeros(*rows, RANGES * (length // block)))
        state["step"] += 1
        if not local_part(parameter).numel():  # not every rank holds a part of a small parameter
            return
        assert parameter.grad is not None

        held = [state.get(key) for key in (*MOMENTS, RANGE)]
        (_compiled() if parameter.is_cuda else _take_step)(
            local_part(parameter),
            local_part(parameter.grad),
            state["step"],
            *(None if value is None else local_part(value) for value in held),
            lr=torch.tensor(group["lr"]),  # a Python number would be compiled in
            rounding=torch.tensor(GOLDEN * float(state["step"]) % 1),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )


def block_of(parameter: torch.Tensor) -> int | None:
    """Return the number of values that share a range; None for moments in float32."""
    last = parameter.ndim - 1
    is_cut_within_rows = isinstance(parameter, DTensor) and any(each.is_shard(last) for each in parameter.placements)
    if parameter.ndim < 2 or parameter.numel() < SMALLEST or is_cut_within_rows:
        return None
    return next((block for block in BLOCKS if parameter.shape[-1] % block == 0), None)


def in_eight_bits(saved: dict[str, torch.Tensor], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Convert the saved state of a parameter, in either form, to what this optimizer holds."""
    block = block_of(parameter)
    if block is None:
        return in_float32(saved, parameter)
    if RANGE in saved:  # whole on every rank, and sharded as the parameter except for the last dimension
        ranges = saved[RANGE][shard_of(parameter).region[:-1]]
        return saved | {RANGE: _sharded_as(parameter, ranges.contiguous())}
    mean, square = (local_part(saved[key]) for key in MOMENTS)
    *codes, ranges = encode(mean, square, mean.shape[-1] // block)
    held = {key: _filled(parameter, each) for key, each in zip(MOMENTS, codes, strict=True)}
    return saved | held | {RANGE: _sharded_as(parameter, ranges)}


def in_float32(saved: dict[str, torch.Tensor], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Convert the saved state of a parameter, in either form, to what AdamW holds."""
    if (ranges := saved.get(RANGE)) is None:
        return saved
    mean, square = (local_part(saved[key]) for key in MOMENTS)
    moments = decode(mean, square, ranges[shard_of(parameter).region[:-1]].to(mean.device))
    held = {key: _filled(parameter, each) for key, each in zip(MOMENTS, moments, strict=True)}
    return {key: value for key, value in saved.items() if key != RANGE} | held


def _filled(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor like the parameter with `local` as this rank's part."""
    tensor = torch.empty_like(parameter, dtype=local.dtype, requires_grad=False)
    local_part(tensor).copy_(local)
    return tensor


def _take_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    step: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    ranges: torch.Tensor | None,
    *,
    lr: torch.Tensor,
    rounding: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101, algorithm 2) in float32, on one rank's part of a parameter.

    Args:
        first: the moment's codes, whose ranges are given; without these the moment itself.
        second: the same of the squares.
        rounding: of the codes of squares, different at each step. A step changes a square by a small part of the
            distance between two codes. Rounding to the nearest code would lose that every time; so the mean is kept.
    """
    mean, square = (first, second) if ranges is None else decode(first, second, ranges)
    mean, square = mean.lerp(gradient, 1 - betas[0]), square.lerp(gradient.square(), 1 - betas[1])

    if ranges is None:
        first.copy_(mean)
        second.copy_(square)
    else:
        for held, new in zip(
            (first, second, ranges), encode(mean, square, ranges.shape[-1] // RANGES, rounding), strict=True
        ):
            held.copy_(new)

    # As in the paper: bias corrections, and weight decay apart from the gradient.
    size = (square.sqrt() / (1 - betas[1] ** step).sqrt()).add_(eps)
    weight.mul_(1 - lr * weight_decay).sub_(lr * (mean / (1 - betas[0] ** step)) / size)


COMPILED: dict[str, Any] = {"dynamic": False, "recompile_limit": 256}
"""Options of the compiler. The step is compiled for each shape; by default torch stops after eight, which a plain model
has, and runs the function eagerly for all others."""


@cache
def _compiled() -> Callable[..., None]:
    """Return the step, compiled on a GPU to save passes over memory. A CPU runs it as it is: compiling takes half a
    minute, and importing the compiler a second."""
    return torch.compile(_take_step, **COMPILED)


def _sharded_as(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor with this part, whose whole has the shape of the parameter except for the last dimension."""
    if not isinstance(parameter, DTensor):
        return local.to(parameter.device)
    shape = torch.Size((*parameter.shape[:-1], local.shape[-1]))
    whole = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return whole.to(parameter.device)  # with parameters in CPU memory, the mesh's device is another


SPAN = 11.5
"""Logarithm of the largest s over the smallest that has a code of its own, 1e5: what is smaller is raised to it, which
makes its steps smaller."""

RANGES = 3
"""Numbers per block besides its codes: the largest |m / s|, the smallest log s, and the distance between codes."""


def encode(
    mean: torch.Tensor, square: torch.Tensor, blocks: int, rounding: torch.Tensor | float = 0.5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes of both moments, [..., L] uint8, and ranges, [..., RANGES * blocks] float32: inverse of `decode`.

    Args:
        mean: [..., L] m.
        square: [..., L] s^2.
        rounding: added to the codes of s before what is behind the point is cut off, 0 to 1; 0.5 gives the nearest one.
    """
    # s by its logarithm, evenly over the block's own range; code 0 is kept for 0.
    root = square.sqrt().unflatten(-1, (blocks, -1))
    logs = root.log()
    highest = logs.amax(-1, keepdim=True).clamp(min=-100.0)  # limited for blocks of zeros
    lowest = torch.where(root > 0, logs, highest).amin(-1, keepdim=True).maximum(highest - SPAN)
    width = ((highest - lowest) / 254).clamp(min=1e-6)
    codes = torch.where(root > 0, (1 + (logs - lowest) / width + rounding).floor().clamp(1, 255), 0.0)

    # m is relative to the s that will be decoded, so that decoding restores m in spite of the error of s.
    held = _roots(codes, lowest, width)
    steps = torch.where(held > 0, mean.unflatten(-1, (blocks, -1)) / held, 0.0)
    largest = steps.abs().amax(-1, keepdim=True)
    signed = 128 + (steps / largest.clamp(min=1e-12) * 127).round()

    ranges = torch.cat([largest, lowest, width], dim=-1).flatten(-2)
    return signed.flatten(-2).to(torch.uint8), codes.flatten(-2).to(torch.uint8), ranges


def decode(mean: torch.Tensor, square: torch.Tensor, ranges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments, [..., L] float32.

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
    """Return [..., blocks, B] s."""
    return torch.where(codes > 0, (lowest + (codes - 1) * width).exp(), 0.0)
