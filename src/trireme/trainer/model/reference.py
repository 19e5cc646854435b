"""The reference model: a copy of the policy that is not trained, near which it is held (`trainer.loss.beta`).

With adapters it is the policy itself with other adapters, so that nothing of the base model is held twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trireme.algo.columns import Columns
from trireme.base.log import get_logger
from trireme.config.run import RunConfig
from trireme.messages import MicroBatch
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.model.lora import adapters_of, copy_trained, exchanged
from trireme.trainer.model.model import load_model
from trireme.trainer.parallel.mesh import World

log = get_logger("reference")


@dataclass
class Reference:
    """Sharded like the policy, in the same precision: where the two are equal, so are their logprobs, to the bit."""

    model: PreTrainedModel  # of its own; with adapters, the policy's
    update_every: int | None = None  # versions
    is_base: bool = True  # else it is part of what a checkpoint must hold
    adapters: dict[str, torch.Tensor] | None = None  # with which the policy's model is the reference

    @contextmanager
    def ready(self) -> Iterator[PreTrainedModel]:
        """The reference model; meanwhile the policy may not be used."""
        if self.adapters is None:
            yield self.model
            return
        with exchanged(self.model, self.adapters):
            yield self.model

    def update_if_due(self, policy: PreTrainedModel, version: int) -> None:
        if self.update_every and version % self.update_every == 0:
            if self.adapters is None:
                copy_weights(policy, self.model)
            else:
                self.adapters = copy_trained(policy)
            self.is_base = False
            log.info("version %d is the reference from now on", version)


def load_reference(config: RunConfig, policy: PreTrainedModel, world: World) -> Reference | None:
    """None where no divergence to it is asked for. A collective.

    Args:
        policy: at version 0, which may have been drawn from scratch.
    """
    trainer = config.trainer
    if not trainer.loss.beta:
        return None
    if adapters_of(policy) is not None:
        return Reference(policy, trainer.loss.reference_update_every, adapters=copy_trained(policy))
    settings = trainer.model.model_copy(update={"ac": None})
    model = load_model(settings, trainer.model.name or config.model.name, world)
    model.requires_grad_(False).eval()
    copy_weights(policy, model)
    return Reference(model, trainer.loss.reference_update_every)


@torch.no_grad()
def copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Each rank its own part."""
    pairs = zip(source.named_parameters(), target.named_parameters(), strict=True)
    for (name, one), (other_name, other) in pairs:
        assert name == other_name, f"{name} of the one model beside {other_name} of the other"
        _local(other).copy_(_local(one))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class FixedLogprobs:
    """Of one batch on one rank, by number of its row.

    The proximal policy is the trainer's at the start of the batch, so its logprobs are those of the first pass: no
    forward pass is spent on them.
    """

    recomputed: bool = False  # the proximal policy is this trainer's, not the behaviour policy
    reference: Reference | None = None
    _proximal: dict[int, torch.Tensor] = field(default_factory=dict)
    _reference: dict[int, torch.Tensor] = field(default_factory=dict)

    def compute_reference(self, row: int, micro_batch: MicroBatch, device: torch.device) -> None:
        """To be called before the policy's own pass over the row: the reference may be the policy's model with other
        adapters, which are not to be exchanged between its forward and its backward pass. A collective."""
        if self.reference is not None and row not in self._reference:
            with torch.no_grad(), self.reference.ready() as model:
                self._reference[row] = compute_columns(model, micro_batch, device).logprobs

    def complete(self, row: int, columns: Columns) -> Columns:
        """The columns of a row with all that they are compared with."""
        if self.recomputed:
            proximal = self._proximal.setdefault(row, columns.logprobs.detach())
            columns = replace(columns, proximal=proximal)
        if self.reference is not None:
            columns = replace(columns, reference=self._reference[row])
        return columns
