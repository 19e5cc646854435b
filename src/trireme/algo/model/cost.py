"""The relative cost of packed rows, by which micro-batches are balanced over ranks.

The cost is the number of floating-point operations of the forward pass: 2 per token and weight, and in attention 4 per
pair of tokens and channel (compare and add up). The backward pass takes twice as many of both, so ratios are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trireme.algo.model.architecture import Config, architecture_of


@dataclass(frozen=True)
class Cost:
    """The cost of rows, in operations or any other unit, as only ratios count.

    Example:
        Cost(linear=10.0, attention=((None, 1.0),)).of_row([3, 2])  # 10 * 5 tokens + 1 * (6 + 3) pairs
    """

    linear: float = 1.0  # per token
    attention: tuple[tuple[int | None, float], ...] = ()  # (window, per pair of tokens)
    is_by_row: bool = False  # attention computes all pairs of a row, and masks those of different samples

    def of_sample(self, length: int) -> float:
        """Return what a sample adds to the cost of its row, as far as that does not depend on other samples."""
        pairs = 0.0 if self.is_by_row else sum(each * _pairs(length, window) for window, each in self.attention)
        return self.linear * length + pairs

    def of_row(self, lengths: Sequence[int]) -> float:
        if not self.is_by_row:
            return sum(map(self.of_sample, lengths))
        tokens = sum(lengths)
        return self.linear * tokens + sum(each for _, each in self.attention) * tokens**2


LINEAR = Cost()  # the cost of an unknown model: the number of tokens


def _pairs(length: int, window: int | None) -> float:
    """Return the pairs of a token and one that it attends to: itself and those before it, within a window."""
    # The first `full` tokens attend to 1, 2, 3 … tokens, and each later one to `full`.
    full = min(length, window or length)
    return full * (full + 1) / 2 + (length - full) * full


def cost_of(config: Config, *, attention: str, cp: int = 1) -> Cost:
    """Return the cost of a model by its `config.json`, or by tokens alone if that lacks the sizes.

    Args:
        attention: `trainer.model.attn`. With `eager`, and with `sdpa` if samples cannot attend apart, all pairs of
            a row are computed, and most of them masked.
        cp: ranks that share a row.
    """
    try:
        architecture = architecture_of(config)
    except (KeyError, TypeError, AttributeError):
        return LINEAR
    windows = Counter(layer.window for layer in architecture.layers if layer.attends)
    return Cost(
        linear=2.0 * architecture.active_parameters,
        attention=tuple((window, 4.0 * architecture.query * count) for window, count in windows.items()),
        is_by_row=attention == "eager" or (attention == "sdpa" and not architecture.attends_apart(attention, cp)),
    )
