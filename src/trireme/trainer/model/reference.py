"""The reference model (`trainer.loss.beta`), and the logprobs that stay fixed while a batch is trained on.

The reference is a copy of the policy that is not trained. With adapters it is the policy's own model with other
adapters, so that the base model is in memory once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from trireme.algo.columns import Columns
from trireme.base.log import get_logger
from trireme.config.run import RunConfig
from trireme.messages import MicroBatch
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.model.lora import adapters_of, copy_trained, exchanged
from trireme.trainer.model.model import load_model
from trireme.trainer.parallel.mesh import World
from trireme.trainer.parallel.shards import local_part

log = get_logger("reference")


@dataclass
class Reference:
    """The reference model, sharded like the policy and in the same precision: equal weights give equal logprobs."""

    model: PreTrainedModel  # a model of its own; with adapters, the policy's
    update_every: int | None = None  # versions
    is_base: bool = True  # otherwise checkpoints must hold it
    adapters: dict[str, torch.Tensor] | None = None  # the reference's values of all that is trained

    @contextmanager
    def ready(self) -> Iterator[PreTrainedModel]:
        """Yield the reference model. The policy must not be used meanwhile."""
        with nullcontext() if self.adapters is None else exchanged(self.model, self.adapters):
            yield self.model

    def update_if_due(self, policy: PreTrainedModel, version: int) -> None:
        if self.update_every and version % self.update_every == 0:
            if self.adapters is None:
                copy_weights(policy, self.model)
            else:
                self.adapters = copy_trained(policy)
            self.is_base = False
            log.info("version %d is the reference from now on", version)


def load_reference(config: RunConfig, policy: PreTrainedModel, world: World) -> Reference:
    """Load the reference model. A collective.

    Args:
        policy: version 0, which may have random weights (`from_scratch`).
    """
    trainer, losses = config.trainer, [own.trainer.loss for own in config.losses.values()]
    update_every = next((loss.reference_update_every for loss in losses if loss.reference_update_every), None)
    if adapters_of(policy) is not None:
        return Reference(policy, update_every, adapters=copy_trained(policy))

    # A reference has no backward pass, so nothing of it is recomputed.
    settings = trainer.model.model_copy(update={"ac": None})
    model = load_model(settings, trainer.model.name or config.model.name, world)
    model.requires_grad_(False).eval()
    copy_weights(policy, model)
    return Reference(model, update_every)


@torch.no_grad()
def copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy this rank's part of every parameter."""
    pairs = zip(source.named_parameters(), target.named_parameters(), strict=True)
    for (name, one), (other_name, other) in pairs:
        assert name == other_name, f"{name} in one model, {other_name} in the other"
        local_part(other).copy_(local_part(one))


@dataclass
class FixedLogprobs:
    """The logprobs of one batch on one rank that all its iterations are compared with, by number of the row.

    They are those of the proximal policy and of the reference model. A recomputed proximal policy is that of the
    trainer's weights at the start of the batch, so its logprobs are those of the first pass and cost nothing extra.
    """

    recomputed: bool = False  # otherwise the proximal policy is the behaviour policy
    reference: Reference | None = None
    _proximal: dict[int, torch.Tensor] = field(default_factory=dict)
    _reference: dict[int, torch.Tensor] = field(default_factory=dict)

    def compute_reference(self, row: int, micro_batch: MicroBatch, device: torch.device) -> None:
        """Compute the reference's logprobs of a row once. A collective.

        Called before the policy's own pass over the row: the reference may be the policy's model with other adapters,
        which must not be exchanged between a forward and its backward pass.
        """
        if self.reference is not None and row not in self._reference:
            with torch.no_grad(), self.reference.ready() as model:
                self._reference[row] = compute_columns(model, micro_batch, device).logprobs

    def add_to(self, row: int, columns: Columns) -> Columns:
        """Return the columns of a row with the fixed logprobs in them."""
        if self.recomputed:
            proximal = self._proximal.setdefault(row, columns.logprobs.detach())
            columns = replace(columns, proximal=proximal)
        if self.reference is not None:
            columns = replace(columns, reference=self._reference[row])
        return columns
