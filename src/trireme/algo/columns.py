"""The inputs and outputs of a loss; `Columns` is also what a `custom` loss function is called with.

Letters, here and in the losses: K tokens of a row that count (sampled by the policy, trained on); s the sample that a
token belongs to, |s| its number of such tokens; pi the policy being trained, mu the behaviour policy that sampled (the
engine, at the version of each token), prox the proximal policy, ref the reference model; A advantage. N tokens and S
samples that count in the whole batch, over all ranks, rows and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

MOST_LOG_RATIO = 20.0  # larger differences of logprobs count as this much where infinity would do harm


@dataclass(frozen=True)
class Columns:
    """The tokens of a row that count, as tensors on the trainer's device.

    Example:
        two samples of two tokens and one: samples=[0, 0, 1], num_samples=2, lengths()=[2, 2, 1]
    """

    logprobs: torch.Tensor  # [K] float32, log pi at the sampling temperature, with gradient
    entropies: torch.Tensor  # [K] float32, nats, of the distribution each token was drawn from; gradient if needed
    behaviour: torch.Tensor  # [K] float32, log mu
    proximal: torch.Tensor  # [K] float32, log prox: `behaviour`, or log pi at the start of the batch
    advantages: torch.Tensor  # [K] float32
    versions: torch.Tensor  # [K] int64, the policy version that sampled it
    samples: torch.Tensor  # [K] int64, counted from 0 within the row, ascending
    num_samples: int  # in the row
    mask: torch.Tensor  # [K] bool; all True but in a row that has no token that counts
    reference: torch.Tensor | None = None  # [K] float32, log ref, if `beta` is above 0
    sources: tuple[str, ...] = ()  # the environment of each of the row's samples, if some have losses of their own
    restrained: torch.Tensor | None = None  # [K] bool: chosen by `algo/covariance.py`, if the loss restrains tokens
    ce_weights: torch.Tensor | None = None  # [K] float32: above 0 for tokens that cross-entropy trains
    oldest: torch.Tensor | None = None  # [K] int64, the oldest version that it attended to, if engines kept caches
    # With `score_centering`, of the W likeliest tokens of mu at each place:
    top_logprobs: torch.Tensor | None = None  # [W, K] float32, log pi, with gradient
    top_behaviour: torch.Tensor | None = None  # [W, K] float32, log mu; -inf where fewer are known

    def only(self, which: torch.Tensor) -> Columns:
        """Return the tokens for which [K] bool `which` is set. Samples keep their numbers."""
        names = [each.name for each in fields(self) if isinstance(getattr(self, each.name), torch.Tensor)]
        return replace(self, **{name: getattr(self, name)[..., which] for name in names})

    def split(self) -> tuple[Columns, Columns | None]:
        """Return the tokens that the policy loss trains, and those that cross-entropy trains; None if the row has none.

        A row without a token of the first kind keeps one that does not count, as losses expect of such rows.
        """
        if self.ce_weights is None:
            return self, None
        weighted = self.ce_weights > 0
        if weighted.all():
            first = torch.arange(len(weighted), device=weighted.device) == 0
            return replace(self.only(first), mask=self.mask[:1] & False), self
        return self.only(~weighted), self.only(weighted) if weighted.any() else None

    def sample_sums(self, values: torch.Tensor) -> torch.Tensor:
        """[K] float64: for each token the sum over its sample. A sample is never split over rows."""
        sums = torch.zeros(self.num_samples, dtype=torch.float64, device=values.device)
        sums.index_add_(0, self.samples, torch.where(self.mask, values.double(), 0.0))
        return sums[self.samples]

    def lengths(self) -> torch.Tensor:
        """[K] float64: for each token |s|, at least 1."""
        return self.sample_sums(torch.ones_like(self.logprobs.detach())).clamp(min=1)

    def log_ratio(self) -> torch.Tensor:
        """[K] log r = log pi - log prox, 0 for tokens that do not count."""
        return torch.where(self.mask, self.logprobs.detach() - self.proximal, 0.0)


@dataclass(frozen=True)
class Totals:
    """Totals of the whole batch, over all ranks. Dividing by them gives the same gradient however it is split."""

    tokens: int  # N
    samples: int  # S


@dataclass(frozen=True)
class TokenLoss:
    """A surrogate's result per token: the loss is L = sum of `value`, and dL = sum of `slope` * d log pi."""

    value: torch.Tensor  # [K] without gradient
    slope: torch.Tensor  # [K] without gradient
    masked: torch.Tensor | None = None  # [K] bool: gets no gradient because of a mask
    clipped_low: torch.Tensor | None = None  # [K] bool: the ratio was too low
    clipped_high: torch.Tensor | None = None  # [K] bool: it was too high
    capped: torch.Tensor | None = None  # [K] bool: its correction was cut down to the bound


@dataclass(frozen=True)
class LossTerms:
    """The loss of one row. The trainer adds it up over rows and ranks."""

    loss: torch.Tensor  # scalar; call backward on it. Its gradient is right, its value is not: that is `value`
    value: torch.Tensor  # scalar without gradient: this row's share of the batch's loss
    sums: dict[str, torch.Tensor]  # scalars without gradient: sums over tokens, to be divided by N


def times(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Multiply; 0 times anything, also infinity or NaN, is 0."""
    return torch.where((one == 0) | (other == 0), 0.0, one * other)


LossFunction = Callable[[Columns, Totals], LossTerms]
CustomLoss = Callable[[Columns], torch.Tensor]
"""Each token's loss, [K] with gradient; the trainer masks, normalises and adds up."""
