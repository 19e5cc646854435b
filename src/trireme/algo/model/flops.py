"""Floating-point operations of a model: per token, for `perf/mfu` and the times of `trireme plan`, and per packed row,
by which micro-batches are balanced over ranks.

The forward pass takes 2 per token and weight, and in attention 4 per pair of tokens and channel (compare and add up).
The backward pass takes the same again for the gradient of what came in, and for that of the weights if they are trained
(Kaplan et al. 2020, arXiv 2001.08361, table 1; Chowdhery et al. 2022, PaLM, appendix B). What activation checkpointing
repeats is no part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trireme.algo.model.architecture import Architecture, Config, architecture_of


def flops_per_token(matrices: float, trained: float, *, attention: float) -> float:
    """Return the operations of the forward and backward pass per token: 6 per parameter, or 4 if it is frozen (LoRA).

    Args:
        matrices: parameters in them; of a mixture of experts, those that one token meets. An embedding that is only
            looked up in is none.
        trained: those of them that are trained.
        attention: operations of attention in the forward pass.
    """
    return 3 * (2 * matrices + attention) - 2 * (matrices - trained)


def attention_flops(model: Architecture, mean_length: float) -> float:
    """Return the operations of attention per token in the forward pass. It looks at no more than the layer's window."""
    # Twice what a token attends to: half of its sample on average, or its whole window.
    looked_at = sum(min(mean_length, 2 * (layer.window or mean_length)) for layer in model.layers if layer.attends)
    return 2 * model.query * looked_at


def model_forward_flops(model: Architecture, mean_length: float) -> float:
    """Return the operations of the forward pass per token."""
    return 2 * model.active_parameters + attention_flops(model, mean_length)


def model_flops(model: Architecture, mean_length: float, *, trained: float | None = None) -> float:
    """Return the operations of both passes per token; the whole model is trained if `trained` is not given."""
    matrices = model.active_parameters
    trained = matrices if trained is None else trained
    return flops_per_token(matrices, trained, attention=attention_flops(model, mean_length))


@dataclass(frozen=True)
class Cost:
    """The cost of rows, in operations or any other unit, as only ratios count.

    It is that of the forward pass: the backward pass takes twice as many operations of both kinds.

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
