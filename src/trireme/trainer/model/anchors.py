"""What the logprobs of a batch are compared with. It stays as it is however often the batch is trained on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from trireme.algo.columns import Columns
from trireme.messages import MicroBatch
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.model.reference import Reference


@dataclass
class Anchors:
    """Of one batch on one rank, by number of its row.

    The proximal policy is the trainer's at the start of the batch, so its logprobs are those of the first pass: no
    forward pass is spent on them.
    """

    recomputed: bool = False  # the proximal policy is this trainer's, not the behaviour policy
    reference: Reference | None = None
    _proximal: dict[int, torch.Tensor] = field(default_factory=dict)
    _reference: dict[int, torch.Tensor] = field(default_factory=dict)

    def look_ahead(self, row: int, micro_batch: MicroBatch, device: torch.device) -> None:
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
