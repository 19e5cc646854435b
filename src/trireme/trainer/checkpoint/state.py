"""What one trainer rank changes as it goes, and all the tensors of it that a checkpoint must bring back.

Whatever is to be in a checkpoint is named here, once, by `tensors_of`; writing and reading follow from that.
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
    """The model being trained, its optimizer, and how far it has come."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    version: int = 0  # batches that the weights have seen
    reference: Reference | None = None  # where the policy is held near another
    skipped_in_a_row: int = 0  # optimizer steps whose gradient was not finite, up to the last one


def tensors_of(state: TrainerState) -> dict[str, torch.Tensor]:
    """All that must come back; the reference model only where it is no longer the base model. They share their memory
    with the state."""
    tensors = model_tensors(state.model) | optimizer_tensors(state.model, state.optimizer)
    tensors[SKIPPED] = torch.tensor(state.skipped_in_a_row)
    if state.reference and not state.reference.is_base:
        tensors |= _reference_tensors(state.reference)
    return tensors


def load_tensors(state: TrainerState, stored: StoredShards) -> None:
    """The inverse: this rank's part of all of them.

    Raises:
        ConfigError: they are another model's, or another kind of optimizer's.
        JournalCorrupt: some are missing.
    """
    for name, tensor in model_tensors(state.model).items():
        stored.read_into(name, tensor)
    load_optimizer(state.model, state.optimizer, stored)
    _load_reference(state, stored)
    _load_skipped(state, stored)


def model_tensors(model: PreTrainedModel, kind: str = MODEL) -> dict[str, torch.Tensor]:
    """Parameters and buffers, tied ones once; beside adapters, only what is trained. They share their memory with the
    model."""
    names = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    found = {name: tensor for name, tensor in names.values() if tensor.requires_grad or adapters_of(model) is None}
    return {f"{kind}.{name}": tensor.detach() for name, tensor in found.items()}


def _load_skipped(state: TrainerState, stored: StoredShards) -> None:
    count = torch.tensor(0)
    if SKIPPED in stored.names():
        stored.read_into(SKIPPED, count)
    state.skipped_in_a_row = int(count)


def _load_reference(state: TrainerState, stored: StoredShards) -> None:
    """Where the checkpoint has none, its run had not come to update it: it stays the base model."""
    if state.reference and any(name.startswith(f"{REFERENCE}.") for name in stored.names()):
        for name, tensor in _reference_tensors(state.reference).items():
            stored.read_into(name, tensor)
        state.reference.is_base = False


def _reference_tensors(reference: Reference) -> dict[str, torch.Tensor]:
    if reference.adapters is None:
        return model_tensors(reference.model, kind=REFERENCE)
    return {f"{REFERENCE}.{name}": tensor for name, tensor in reference.adapters.items()}
