"""The forward pass over one packed row: logprobs of the tokens that count, beside all that belongs to them."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from trireme.algo.columns import Columns
from trireme.algo.packing import positions
from trireme.messages import MicroBatch
from trireme.trainer.model.scorer import scorer_of


def compute_columns(
    model: PreTrainedModel, micro_batch: MicroBatch, device: torch.device, *, entropy_gradient: bool = False
) -> Columns:
    """K of the row's T tokens count. A collective; of a team, all ranks get the columns of the whole row."""
    places, has_places = places_of(micro_batch)
    found = scorer_of(model, device).score(micro_batch, places, device, entropy_gradient=entropy_gradient)
    tokens, samples = micro_batch.tokens, np.repeat(np.arange(len(micro_batch.lengths)), micro_batch.lengths)

    def column(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array[places]).to(device=device, dtype=dtype)

    behaviour = column(tokens.logprobs, torch.float32)
    return Columns(
        logprobs=found.logprobs,
        entropies=found.entropies,
        behaviour=behaviour,
        proximal=behaviour,
        advantages=column(tokens.advantages, torch.float32),
        versions=column(tokens.versions, torch.int64),
        samples=column(samples, torch.int64),
        num_samples=len(micro_batch.lengths),
        mask=torch.full((len(places),), has_places, dtype=torch.bool, device=device),
    )


def places_of(micro_batch: MicroBatch) -> tuple[np.ndarray, bool]:
    """[K] places of the tokens that count, ascending, and whether there are any: every rank must run the same
    collectives, so a row without tokens that count runs with its first one."""
    has_past = positions(micro_batch.lengths) > 0  # what stands before a sample's first token is another sample
    places = np.flatnonzero(micro_batch.tokens.loss_mask.astype(bool) & has_past)
    return (places, True) if len(places) else (np.zeros(1, np.int64), False)
