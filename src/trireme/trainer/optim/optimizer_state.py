"""The state of an optimizer in a checkpoint.

AdamW and its 8-bit form load each other's moments, encoding or decoding them. Other optimizers load only their own.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trireme.base.errors import ConfigError
from trireme.trainer.optim.adamw_8bit import MOMENTS, RANGE, AdamW8bit, in_eight_bits, in_float32
from trireme.trainer.parallel.shards import StoredShards

OPTIMIZER = "optimizer"
MOMENTUM = "momentum_buffer"

Remembered = dict[str, torch.Tensor]


def optimizer_tensors(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return tensors by `optimizer.KEY.PARAMETER`. Learning rate and betas follow from configuration and step."""
    return {
        f"{OPTIMIZER}.{key}.{name}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
        if isinstance(tensor, torch.Tensor)
    }


def parameter_of(name: str) -> str | None:
    """Return the parameter that a tensor of an optimizer belongs to; None for other tensors of a checkpoint."""
    kind, _, rest = name.partition(".")
    return rest.partition(".")[2] if kind == OPTIMIZER else None


def load_optimizer(model: PreTrainedModel, optimizer: torch.optim.Optimizer, stored: StoredShards) -> None:
    """Load this rank's part of an optimizer's state.

    Raises:
        ConfigError: it was saved by another kind of optimizer, or in an earlier format.
    """
    saved = _read(dict(model.named_parameters()), stored)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer.state.clear()

    # Learning rate and betas are not restored: they follow from the configuration.
    for group in optimizer.param_groups:
        has_momentum = isinstance(optimizer, torch.optim.SGD) or group.get("is_hidden")
        for parameter in group["params"]:
            if remembered := saved.get(names[id(parameter)]):
                if not ({MOMENTUM} if has_momentum else set(MOMENTS)) <= remembered.keys():
                    raise _another_kind(optimizer, saved)
                if strange := remembered.keys() - ({MOMENTUM} if has_momentum else {*MOMENTS, RANGE, "step"}):
                    raise ConfigError(
                        f"The checkpoint holds {OPTIMIZER}.{min(strange)}.{names[id(parameter)]}, for which "
                        f"{type(optimizer).__name__} has no place - expected {OPTIMIZER} states of the same kind. "
                        "Resume from another step, or begin a new run with the weights of this one as `model.name`."
                    )
                optimizer.state[parameter] = _as_held(remembered, parameter, optimizer)


def _read(parameters: dict[str, torch.nn.Parameter], stored: StoredShards) -> dict[str, Remembered]:
    """Read the saved state, by parameter and then by key."""
    saved: dict[str, Remembered] = {}
    for full_name in stored.names():
        kind, _, rest = full_name.partition(".")
        key, _, name = rest.partition(".")
        if kind != OPTIMIZER or name not in parameters:
            continue

        # A moment is sharded like its parameter. Ranges and step counters are read whole.
        parameter, shape, dtype = parameters[name], stored.shape(full_name), stored.dtype(full_name)
        if isinstance(parameter, DTensor) and shape == tuple(parameter.shape):
            tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:  # whole on every rank, like a step counter
            tensor = torch.empty(shape, dtype=dtype)
        stored.read_into(full_name, tensor)
        saved.setdefault(name, {})[key] = tensor
    return saved


def _as_held(remembered: Remembered, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> Remembered:
    if not remembered.keys() >= set(MOMENTS):
        return remembered
    if remembered[MOMENTS[0]].dtype == torch.uint8 and RANGE not in remembered:
        raise ConfigError(
            f"The checkpoint's optimizer holds its moments as codes without `{RANGE}`, as earlier versions of Trireme "
            "did - codes with them were expected, as small moments are lost without. Begin a new run with the weights "
            "of this one as `model.name`, or resume with the version that wrote the checkpoint."
        )
    if isinstance(optimizer, AdamW8bit):
        return in_eight_bits(remembered, parameter)
    held = in_float32(remembered, parameter)
    return held | {"step": held["step"].to(parameter.device)}  # the fused kernel counts steps on this device


def _another_kind(optimizer: torch.optim.Optimizer, saved: dict[str, Remembered]) -> ConfigError:
    keys = {key for remembered in saved.values() for key in remembered}
    theirs = ("muon" if keys & set(MOMENTS) else "sgd") if MOMENTUM in keys else "adamw"
    ours = type(optimizer).__name__.lower().replace("adamw8bit", "adamw_8bit")
    return ConfigError(
        f"The checkpoint's optimizer is {theirs!r}, and `optim.type` is {ours!r} - the same was expected (or "
        f"'adamw' and 'adamw_8bit', which load each other's moments) - set `optim.type = {theirs!r}`, or begin a "
        "new run with the weights of this one as `model.name`."
    )
