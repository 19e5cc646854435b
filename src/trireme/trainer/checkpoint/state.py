"""The state that a trainer rank changes, and all its tensors that a checkpoint must restore.

`tensors_of` names everything that is in a checkpoint; writing and reading follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from trireme.trainer.model.lora import adapters_of
from trireme.trainer.model.reference import Reference
from trireme.trainer.optim.optimizer_state import load_optimizer, optimizer_tensors
from trireme.trainer.parallel.shards import StoredShards

MODEL, REFERENCE = "model", "reference"
SKIPPED = "progress.skipped_in_a_row"


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
    tensors = model_tensors(state.model) | optimizer_tensors(state.model, state.optimizer)
    tensors[SKIPPED] = torch.tensor(state.skipped_in_a_row)
    if state.reference and not state.reference.is_base:
        tensors |= _reference_tensors(state.reference)
    return tensors


def load_tensors(state: TrainerState, stored: StoredShards) -> None:
    """Load this rank's part of all tensors of a checkpoint.

    Raises:
        ConfigError: the checkpoint is of another model or another kind of optimizer.
        JournalCorrupt: tensors are missing.
    """
    for name, tensor in model_tensors(state.model).items():
        stored.read_into(name, tensor)
    load_optimizer(state.model, state.optimizer, stored)
    # A checkpoint without a reference was saved before the first update of it: the reference stays the base model.
    if state.reference and any(name.startswith(f"{REFERENCE}.") for name in stored.names()):
        for name, tensor in _reference_tensors(state.reference).items():
            stored.read_into(name, tensor)
        state.reference.is_base = False
    state.skipped_in_a_row = int(stored.read(SKIPPED, ())) if SKIPPED in stored.names() else 0


def model_tensors(model: PreTrainedModel, kind: str = MODEL) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, tied ones once; with adapters, what is trained. They share the model's memory."""
    names = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    found = {name: tensor for name, tensor in names.values() if tensor.requires_grad or adapters_of(model) is None}
    return {f"{kind}.{name}": tensor.detach() for name, tensor in found.items()}


def _reference_tensors(reference: Reference) -> dict[str, torch.Tensor]:
    if reference.adapters is None:
        return model_tensors(reference.model, kind=REFERENCE)
    return {f"{REFERENCE}.{name}": tensor for name, tensor in reference.adapters.items()}
