"""The state that a trainer rank changes, and all its tensors that a checkpoint must restore.

`tensors_of` names everything that is in a checkpoint; writing and reading follow from it. AdamW and its 8-bit form load
each other's moments, encoding or decoding them. Other optimizers load only their own; `sign_sgd` has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trireme.base.errors import ConfigError
from trireme.trainer.model.loading import untrained_of
from trireme.trainer.model.lora import adapters_of, is_adapter
from trireme.trainer.model.reference import Reference
from trireme.trainer.optim.adamw_8bit import MOMENTS, RANGE, AdamW8bit, in_eight_bits, in_float32
from trireme.trainer.optim.sign_sgd import SignSgd
from trireme.trainer.parallel.shards import StoredShards

MODEL, REFERENCE, OPTIMIZER = "model", "reference", "optimizer"
MOMENTUM = "momentum_buffer"
SKIPPED = "progress.skipped_in_a_row"

Remembered = dict[str, torch.Tensor]
"""The state of an optimizer for one parameter, by key."""


@dataclass
class TrainerState:
    """The model that is trained, its optimizer, and its version."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    version: int = 0  # batches that the weights have seen
    reference: Reference | None = None  # the model of `loss.beta`
    skipped_in_a_row: int = 0  # optimizer steps up to the last one whose gradient was not finite


def tensors_of(state: TrainerState) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint; they share their memory with the state.

    The reference model is among them only if it is no longer the base model.
    """
    tensors = model_tensors(state.model) | _optimizer_tensors(state.model, state.optimizer)
    tensors[SKIPPED] = torch.tensor(state.skipped_in_a_row)
    if state.reference and not state.reference.is_base:
        tensors |= _reference_tensors(state.reference)
    return tensors


def load_tensors(state: TrainerState, stored: StoredShards, *, with_optimizer: bool = True) -> None:
    """Load this rank's part of all tensors of a checkpoint, or of those of the model alone.

    Raises:
        ConfigError: the checkpoint is of another model, other adapters or another kind of optimizer: a tensor of it has
            no place, or a place has no tensor.
        JournalCorrupt: tensors are missing.
    """
    _require_same_parts(state, stored)

    for name, tensor in model_tensors(state.model).items():
        stored.read_into(name, tensor)
    if with_optimizer:
        _load_optimizer(state.model, state.optimizer, stored)
        state.skipped_in_a_row = int(stored.read(SKIPPED, ())) if SKIPPED in stored.names() else 0

    # A checkpoint without a reference was saved before the first update of it: the reference stays the base model.
    if state.reference and any(name.startswith(f"{REFERENCE}.") for name in stored.names()):
        for name, tensor in _reference_tensors(state.reference).items():
            stored.read_into(name, tensor)
        state.reference.is_base = False


def _require_same_parts(state: TrainerState, stored: StoredShards) -> None:
    """Check that the checkpoint holds what this run trains, and nothing else."""
    # A run with adapters cannot resume from a whole model, nor the other way round.
    trained = model_tensors(state.model)
    has_adapters = any(is_adapter(name) for name in stored.names() if name.startswith(f"{MODEL}."))
    trains_adapters = any(map(is_adapter, trained))
    if has_adapters != trains_adapters:
        found, advice = (
            ("holds adapters only, and the whole model is trained", "Add the table `lora` that the run began with")
            if has_adapters
            else ("holds the whole model, and adapters are trained", "Remove the table `lora`")
        )
        raise ConfigError(f"The checkpoint {found} - expected the same of both. {advice}, or start a new run.")

    # A tensor without a place would be dropped silently. It shows that the checkpoint is another model's.
    places = {SKIPPED, *trained, *(f"{MODEL}.{name}" for name in untrained_of(state.model).names)}
    places |= set(_reference_tensors(state.reference)) if state.reference else set()
    parameters = {name for name, parameter in state.model.named_parameters() if parameter.requires_grad}
    strange = [name for name in stored.names() if name not in places and _parameter_of(name) not in parameters]
    if strange:
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise ConfigError(
            f"The checkpoint holds {strange[0]}{more}, for which this run has no place - expected a checkpoint of the "
            "same model, adapters and loss. Set `model.name` and `lora` as they were when the run began, or start a "
            "new run."
        )


def model_tensors(model: PreTrainedModel, kind: str = MODEL) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, tied ones once; with adapters, what is trained. They share the model's memory."""
    names = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    found = {name: tensor for name, tensor in names.values() if tensor.requires_grad or adapters_of(model) is None}
    return {f"{kind}.{name}": tensor.detach() for name, tensor in found.items()}


def _reference_tensors(reference: Reference) -> dict[str, torch.Tensor]:
    if reference.adapters is None:
        return model_tensors(reference.model, kind=REFERENCE)
    return {f"{REFERENCE}.{name}": tensor for name, tensor in reference.adapters.items()}


def _optimizer_tensors(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return tensors by `optimizer.KEY.PARAMETER`. Learning rate and betas follow from configuration and step."""
    return {
        f"{OPTIMIZER}.{key}.{name}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
        if isinstance(tensor, torch.Tensor)
    }


def _parameter_of(name: str) -> str | None:
    """Return the parameter that a tensor of an optimizer belongs to; None for other tensors of a checkpoint."""
    kind, _, rest = name.partition(".")
    return rest.partition(".")[2] if kind == OPTIMIZER else None


def _load_optimizer(model: PreTrainedModel, optimizer: torch.optim.Optimizer, stored: StoredShards) -> None:
    """Load this rank's part of an optimizer's state.

    Raises:
        ConfigError: it was saved by another kind of optimizer, or in an earlier format.
    """
    saved = _read_optimizer(dict(model.named_parameters()), stored)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer.state.clear()

    # Learning rate and betas are not restored: they follow from the configuration.
    for group in optimizer.param_groups:
        expected, possible = _keys_of(optimizer, group)
        for parameter in group["params"]:
            if remembered := saved.get(names[id(parameter)]):
                if not expected <= remembered.keys() or not possible:
                    raise _another_kind(optimizer, saved)
                if strange := remembered.keys() - possible:
                    raise ConfigError(
                        f"The checkpoint holds {OPTIMIZER}.{min(strange)}.{names[id(parameter)]}, for which "
                        f"{type(optimizer).__name__} has no place - expected {OPTIMIZER} states of the same kind. "
                        "Resume from another step, or begin a new run with the weights of this one as `model.name`."
                    )
                optimizer.state[parameter] = _as_held(remembered, parameter, optimizer)


def _keys_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the keys that a parameter's state in this group must have, and all that it may have."""
    if isinstance(optimizer, SignSgd):
        return set(), set()
    if isinstance(optimizer, torch.optim.SGD) or group.get("is_hidden"):
        return {MOMENTUM}, {MOMENTUM}
    return set(MOMENTS), {*MOMENTS, RANGE, "step"}


def _read_optimizer(parameters: dict[str, torch.nn.Parameter], stored: StoredShards) -> dict[str, Remembered]:
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
    kinds = {"adamw8bit": "adamw_8bit", "signsgd": "sign_sgd"}
    ours = type(optimizer).__name__.lower()
    ours = kinds.get(ours, ours)
    return ConfigError(
        f"The checkpoint's optimizer is {theirs!r}, and `optim.type` is {ours!r} - the same was expected (or "
        f"'adamw' and 'adamw_8bit', which load each other's moments) - set `optim.type = {theirs!r}`, or begin a "
        "new run with the weights of this one as `model.name`."
    )
