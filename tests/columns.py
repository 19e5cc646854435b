"""Columns of tokens as the losses get them, from numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trireme.algo.columns import Columns


def columns_of(
    logprobs: torch.Tensor,
    *,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    samples: Sequence[int] | torch.Tensor | None = None,
    proximal: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
    entropies: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> Columns:
    """One sample where none are named; the proximal policy is the behaviour policy where none is given."""
    count = len(logprobs)
    numbers = torch.zeros(count, dtype=torch.int64) if samples is None else torch.as_tensor(samples)
    return Columns(
        logprobs=logprobs,
        entropies=torch.zeros(count, dtype=logprobs.dtype) if entropies is None else entropies,
        behaviour=behaviour,
        proximal=behaviour if proximal is None else proximal,
        advantages=advantages,
        versions=torch.zeros(count, dtype=torch.int64),
        samples=numbers,
        num_samples=int(numbers.max()) + 1 if count else 0,
        mask=torch.ones(count, dtype=torch.bool) if mask is None else mask,
        reference=reference,
    )
