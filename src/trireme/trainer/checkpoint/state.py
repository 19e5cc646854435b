"""The state that a trainer rank changes, and all its tensors that a checkpoint must restore.

`tensors_of` names everything that is in a checkpoint; writing and reading follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from trireme.base.errors import ConfigError
from trireme.trainer.model.loading import untrained_of
from trireme.trainer.model.lora import adapters_of, is_adapter
from trireme.trainer.model.reference import Reference
from trireme.trainer.optim.optimizer_state import load_optimizer, optimizer_tensors, parameter_of
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
        ConfigError: the checkpoint is of another model, other adapters or another kind of optimizer: a tensor of it has
            no place, or a place has no tensor.
        JournalCorrupt: tensors are missing.
    """
    _require_same_parts(state, stored)

    for name, tensor in model_tensors(state.model).items():
        stored.read_into(name, tensor)
    load_optimizer(state.model, state.optimizer, stored)
    # A checkpoint without a reference was saved before the first update of it: the reference stays the base model.
    if state.reference and any(name.startswith(f"{REFERENCE}.") for name in stored.names()):
        for name, tensor in _reference_tensors(state.reference).items():
            stored.read_into(name, tensor)
        state.reference.is_base = False

    state.skipped_in_a_row = int(stored.read(SKIPPED, ())) if SKIPPED in stored.names() else 0


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
    strange = [name for name in stored.names() if name not in places and parameter_of(name) not in parameters]
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
