"""Floating-point operations per token, for `perf/mfu` and for the times of `trireme plan`."""

from __future__ import annotations

from trireme.algo.model.architecture import Architecture


def flops_per_token(matrices: float, trained: float, *, layers: int, width: int, mean_length: float) -> float:
    """Return the operations of the forward and backward pass per token.

    2 per parameter that a token is multiplied with, and 4 * width for each token that attention looks at, of which
    there are mean_length / 2 (Kaplan et al. 2020, arXiv 2001.08361, table 1; Chowdhery et al. 2022, PaLM, appendix B).
    The backward pass has the same again for the gradient of what came in, and for that of the weights if they are
    trained: 6 per parameter, or 4 if it is frozen (LoRA). What activation checkpointing repeats is no part of it.

    Args:
        matrices: parameters in them; of a mixture of experts, those that one token meets. An embedding that is only
            looked up in is none.
        trained: those of them that are trained.
        width: width of all heads together.
        mean_length: mean tokens of a sample.
    """
    return 3 * (2 * matrices + 2 * layers * width * mean_length) - 2 * (matrices - trained)


def model_forward_flops(model: Architecture, mean_length: float) -> float:
    """Return the operations of the forward pass per token. Attention looks at no more than the layer's window."""
    # Twice what a token attends to: half of its sample on average, or its whole window.
    looked_at = sum(min(mean_length, 2 * (layer.window or mean_length)) for layer in model.layers if layer.attends)
    return 2 * model.active_parameters + 2 * model.query * looked_at


def model_flops(model: Architecture, mean_length: float, *, trained: float | None = None) -> float:
    """Return the operations of both passes per token; the whole model is trained if `trained` is not given."""
    frozen = 0.0 if trained is None else model.active_parameters - trained
    return 3 * model_forward_flops(model, mean_length) - 2 * frozen
