"""AdamW whose two moments are held in 8 bits each: 2 bytes per parameter instead of 8 (Dettmers et al. 2021, arXiv
2110.02861).

The state is plain tensors, of which every block lies within a row of its parameter, so that shards can be cut and
joined between blocks. What any number of ranks saved, any other number goes on with to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trireme.algo.codes import code_values, decode, encode
from trireme.trainer.pieces import piece_of

BLOCKS = (256, 128, 64, 32)
"""Values that share a scale: as many as divide a row evenly."""

SMALLEST = 4096
"""Values of a parameter that is worth it; smaller ones, norms and biases have their moments in float32."""

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Both moments, and whether they have a sign."""


class AdamW8bit(torch.optim.Optimizer):
    """`state[parameter]` has `exp_avg` and `exp_avg_sq`, sharded as the parameter. Where these are codes (uint8), each
    has a `..._scale` beside it, with one number per block."""

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
        if not state:
            state |= _first_state(parameter)
        state["step"] += 1
        if not _local(parameter).numel():  # of a small parameter not every rank holds a part
            return
        assert parameter.grad is not None
        moments = [value for key in MOMENTS for value in (state[key], state.get(_scale_of(key)))]
        _arithmetic(parameter)(
            _local(parameter),
            _local(parameter.grad),
            state["step"],
            *(None if value is None else _local(value) for value in moments),
            lr=torch.tensor(group["lr"]),  # a number would be compiled in
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """torch's own would turn codes into floats. Scales may come whole: each rank takes its part."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state.clear()
        for number, saved in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = {key: _as_held(key, tensor, parameter) for key, tensor in saved.items()}


def block_of(parameter: torch.Tensor) -> int | None:
    """Values that share a scale; None where its moments are kept in float32."""
    if parameter.ndim < 2 or parameter.numel() < SMALLEST or _is_cut_within_rows(parameter):
        return None
    return next((block for block in BLOCKS if parameter.shape[-1] % block == 0), None)


def _is_cut_within_rows(parameter: torch.Tensor) -> bool:
    last = parameter.ndim - 1
    return isinstance(parameter, DTensor) and any(placement.is_shard(last) for placement in parameter.placements)


def in_eight_bits(saved: dict[str, torch.Tensor], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What was saved of a parameter, in either form, as this optimizer holds it. Scales may be whole."""
    block = block_of(parameter)
    if block is None:
        return in_float32(saved, parameter)
    if _scale_of(next(iter(MOMENTS))) in saved:
        return saved
    held = {key: value for key, value in saved.items() if key not in MOMENTS}
    for key, signed in MOMENTS.items():
        moment = _local(saved[key])
        *rows, length = moment.shape
        codes, scales = torch.empty_like(moment, dtype=torch.uint8), moment.new_empty(*rows, length // block)
        if moment.numel():
            codes, scales = encode(moment, length // block, code_values(signed, moment.device))
        held[key] = _filled(parameter, codes)
        held[_scale_of(key)] = _sharded_as(parameter, scales)
    return held


def in_float32(saved: dict[str, torch.Tensor], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Likewise, as AdamW holds it."""
    held = {key: value for key, value in saved.items() if key not in map(_scale_of, MOMENTS)}
    for key, signed in MOMENTS.items():
        if (scale := saved.get(_scale_of(key))) is not None:
            codes, (*rows, columns) = _local(saved[key]), _own_region(parameter)
            scales = scale[tuple(rows)].to(codes.device)
            each = scales.repeat_interleave(parameter.shape[-1] // scale.shape[-1], dim=-1)[..., columns]
            held[key] = _filled(parameter, code_values(signed, codes.device)[codes.int()] * each)
    return held


def _scale_of(key: str) -> str:
    return f"{key}_scale"


def _own_region(parameter: torch.Tensor) -> tuple[slice, ...]:
    """Of the whole, what this rank holds."""
    ours = piece_of(parameter)
    return tuple(slice(at, at + size) for at, size in zip(ours.offset, ours.tensor.shape, strict=True))


def _filled(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor like it, of which this is our part."""
    tensor = torch.empty_like(parameter, dtype=local.dtype, requires_grad=False)
    _local(tensor).copy_(local)
    return tensor


def _first_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    block = block_of(parameter)
    state = {"step": torch.tensor(0.0)}
    for key in MOMENTS:
        state[key] = torch.zeros_like(parameter, dtype=None if block is None else torch.uint8)
        if block is not None:  # with a scale of 0, whatever code means 0
            *rows, length = _local(parameter).shape
            state[_scale_of(key)] = _sharded_as(parameter, torch.zeros(*rows, length // block))
    return state


def _take_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    step: torch.Tensor,
    first: torch.Tensor,
    first_scale: torch.Tensor | None,
    second: torch.Tensor,
    second_scale: torch.Tensor | None,
    *,
    lr: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101, algorithm 2) in float32, on one rank's part of a parameter.

    Args:
        first: the moment's codes, of which `first_scale` has the scales; without those the moment itself.
        second: likewise, of the squares.
    """
    mean = _read(first, first_scale, signed=MOMENTS["exp_avg"]).lerp(gradient, 1 - betas[0])
    square = _read(second, second_scale, signed=MOMENTS["exp_avg_sq"]).lerp(gradient.square(), 1 - betas[1])
    _write(first, first_scale, mean, signed=MOMENTS["exp_avg"])
    _write(second, second_scale, square, signed=MOMENTS["exp_avg_sq"])
    size = (square.sqrt() / (1 - betas[1] ** step).sqrt()).add_(eps)
    weight.mul_(1 - lr * weight_decay).sub_(lr * (mean / (1 - betas[0] ** step)) / size)


def _read(held: torch.Tensor, scale: torch.Tensor | None, *, signed: bool) -> torch.Tensor:
    return held if scale is None else decode(held, scale, code_values(signed, held.device))


def _write(held: torch.Tensor, scale: torch.Tensor | None, moment: torch.Tensor, *, signed: bool) -> None:
    if scale is None:
        held.copy_(moment)
        return
    codes, scales = encode(moment, scale.shape[-1], code_values(signed, held.device))
    held.copy_(codes)
    scale.copy_(scales)


def _arithmetic(parameter: torch.Tensor) -> Callable[..., None]:
    """Compiled on a GPU, which saves passes over memory. On a CPU, where nobody trains for speed, it needs no compiler
    and not the half minute that one takes."""
    if not parameter.is_cuda:
        return _take_step
    for signed in MOMENTS.values():
        code_values(signed, parameter.device)  # made outside of what is compiled
    return _compiled


_compiled = torch.compile(_take_step, dynamic=False)


def _as_held(key: str, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if key == "step" or isinstance(tensor, DTensor):
        return tensor
    if not isinstance(parameter, DTensor):
        return tensor.to(parameter.device)
    rows = _own_region(parameter)[:-1]  # a scale is cut as its parameter is, but for the last dimension
    return _sharded_as(parameter, tensor[rows].contiguous())


def _sharded_as(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor of this part, whose whole has the shape of the parameter but for the last dimension."""
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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
