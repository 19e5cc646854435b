"""Several losses in one batch: tokens of each source are trained by that source's own.

    L = sum over sources e of L_e    with the N and S of the whole batch in each n_t (see `loss.py`)

So with `token` a source weighs as its share of the batch's tokens, N_e / N, and with `sequence` and `constant` as its
share of the samples, S_e / S: the gradient of a batch of two sources is that of each alone, weighted so. If all sources
have one loss, that is the gradient which the loss has over the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from trireme.algo.columns import Columns, LossFunction, LossTerms, Totals

OTHERS = ""
"""The name under which the loss of all sources without one of their own is given."""

OF = "@"
"""Separates a sum from the name of its source. A metric's name has none, and "/" may be in both."""

Losses = Mapping[str, tuple[LossFunction, bool]]
"""The loss of each source, and whether its proximal policy is recomputed."""


def mixed_loss(columns: Columns, totals: Totals, *, losses: Losses, names: tuple[str, ...]) -> LossTerms:
    """Compute each source's loss on its own tokens of a row, and add them up.

    Args:
        names: all sources of the run. Each has its sums under its name, so that all ranks add up the same ones.
    """
    # A row without tokens that count, or one that is made up to try the model, is no source's.
    parts: dict[str, LossTerms] = {}
    counts: dict[str, int] = {}
    found = [] if columns.sources and columns.mask.any() else [losses[OTHERS][0](columns, totals)]
    for name in names if not found else ():
        which = torch.tensor([source == name for source in columns.sources], device=columns.samples.device)
        which = which[columns.samples]
        if which.any():
            loss, recomputed = losses.get(name, losses[OTHERS])
            own = columns.only(which)
            own = own if recomputed else replace(own, proximal=own.behaviour)
            parts[name], counts[name] = loss(own, totals), len(own.logprobs)
            found.append(parts[name])

    # Every row has all sums, as 0 for sources that it has no token of. Importance weights are of the batch alone.
    zero = columns.logprobs.new_zeros((), dtype=torch.float64)
    sums = {key: torch.stack([part.sums[key].double() for part in found]).sum() for key in found[0].sums}
    for name in names:
        part = parts.get(name)
        for key in found[0].sums.keys() - {"weights", "squared_weights"}:
            sums[f"{key}{OF}{name}"] = part.sums[key].double() if part else zero
        sums[f"loss{OF}{name}"] = part.value if part else zero
        sums[f"tokens{OF}{name}"] = zero + counts.get(name, 0)
    return LossTerms(
        loss=torch.stack([part.loss for part in found]).sum(),
        value=torch.stack([part.value for part in found]).sum(),
        sums=sums,
    )
