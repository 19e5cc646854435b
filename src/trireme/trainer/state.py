"""What one trainer rank changes as it goes, and all the tensors of it that a checkpoint must bring back.

Whatever is to be in a checkpoint is named here, once, by `tensors_of`; writing and reading follow from that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trireme.trainer.lora import adapters_of
from trireme.trainer.pieces import Stored
from trireme.trainer.reference import Reference

MODEL, OPTIMIZER, REFERENCE = "model", "optimizer", "reference"
SKIPPED = "progress.skipped_in_a_row"


@dataclass
class TrainerState:
    """The model being trained, its optimizer, and how far it has come."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    version: int = 0  # batches that the weights have seen
    reference: Reference | None = None  # where the policy is held near another
    skipped_in_a_row: int = 0  # optimizer steps whose gradient was not finite, up to the last one


def tensors_of(state: TrainerState) -> dict[str, torch.Tensor]:
    """All that must come back; the reference model only where it is no longer the base model. They share their memory
    with the state."""
    tensors = model_tensors(state.model) | _optimizer_tensors(state) | {SKIPPED: torch.tensor(state.skipped_in_a_row)}
    if state.reference and not state.reference.is_base:
        tensors |= _reference_tensors(state.reference)
    return tensors


def load_tensors(state: TrainerState, stored: Stored) -> None:
    """The inverse: this rank's part of all of them.

    Raises:
        ConfigError: they are another model's.
        JournalCorrupt: some are missing.
    """
    for name, tensor in model_tensors(state.model).items():
        stored.read_into(name, tensor)
    _load_optimizer(state, stored)
    _load_reference(state, stored)
    _load_skipped(state, stored)


def model_tensors(model: PreTrainedModel, kind: str = MODEL) -> dict[str, torch.Tensor]:
    """Parameters and buffers, tied ones once; beside adapters, only what is trained. They share their memory with the
    model."""
    names = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    found = {name: tensor for name, tensor in names.values() if tensor.requires_grad or adapters_of(model) is None}
    return {f"{kind}.{name}": tensor.detach() for name, tensor in found.items()}


def _load_skipped(state: TrainerState, stored: Stored) -> None:
    count = torch.tensor(0)
    if SKIPPED in stored.names():
        stored.read_into(SKIPPED, count)
    state.skipped_in_a_row = int(count)


def _load_reference(state: TrainerState, stored: Stored) -> None:
    """Where the checkpoint has none, its run had not come to update it: it stays the base model."""
    if state.reference and any(name.startswith(f"{REFERENCE}.") for name in stored.names()):
        for name, tensor in _reference_tensors(state.reference).items():
            stored.read_into(name, tensor)
        state.reference.is_base = False


def _reference_tensors(reference: Reference) -> dict[str, torch.Tensor]:
    if reference.adapters is None:
        return model_tensors(reference.model, kind=REFERENCE)
    return {f"{REFERENCE}.{name}": tensor for name, tensor in reference.adapters.items()}


def _optimizer_tensors(state: TrainerState) -> dict[str, torch.Tensor]:
    """`optimizer.KEY.PARAMETER`. The rest of its state (learning rate, betas) follows from configuration and step."""
    return {
        f"{OPTIMIZER}.{key}.{name}": tensor
        for name, parameter in state.model.named_parameters()
        for key, tensor in state.optimizer.state.get(parameter, {}).items()
        if isinstance(tensor, torch.Tensor)
    }


def _load_optimizer(state: TrainerState, stored: Stored) -> None:
    parameters = dict(state.model.named_parameters())
    tensors: dict[str, dict[str, torch.Tensor]] = {}  # by parameter, then key
    for full_name, key, name in _optimizer_names(stored):
        if name in parameters:
            tensor = _like(parameters[name], stored, full_name)
            stored.read_into(full_name, tensor)
            tensors.setdefault(name, {})[key] = tensor
    names = {id(parameter): name for name, parameter in parameters.items()}
    in_order = [names[id(parameter)] for group in state.optimizer.param_groups for parameter in group["params"]]
    state.optimizer.load_state_dict(
        {
            "state": {number: tensors[name] for number, name in enumerate(in_order) if name in tensors},
            "param_groups": state.optimizer.state_dict()["param_groups"],
        }
    )


def _optimizer_names(stored: Stored) -> Iterator[tuple[str, str, str]]:
    """Full name, key, parameter."""
    for full_name in stored.names():
        kind, _, rest = full_name.partition(".")
        key, _, name = rest.partition(".")
        if kind == OPTIMIZER:
            yield full_name, key, name


def _like(parameter: torch.Tensor, stored: Stored, name: str) -> torch.Tensor:
    """Room for a tensor of the optimizer: sharded as its parameter, or, like a counter of steps, on every rank."""
    shape, dtype = stored.shape(name), stored.dtype(name)
    if isinstance(parameter, DTensor) and shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype)
