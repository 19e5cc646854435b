"""Attention over a packed row without a mask: each sample attends by itself, in buckets of similar length.

For packed samples, transformers' `sdpa` masks the whole row: T x T pairs per layer where samples of L tokens need T x
L, and no fast kernel. Here the tokens of each sample are gathered into [samples, L], transformers' own `sdpa` runs on
them as plain causal attention (`cpu_attention` for short samples on a CPU), and the results go back to their places.

Letters: T tokens of a row, S samples of a bucket, L tokens of its longest sample, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from trireme.algo.packing import buckets
from trireme.trainer.model.cpu_attention import attend_on_cpu, is_faster_on_cpu

NAME = "packed_samples"
ARGUMENT = "packed_row"  # the argument under which a row travels through the model's forward pass

_is_row_given: ContextVar[bool] = ContextVar("is_row_given", default=False)


class Bucket:
    """Samples of about the same length."""

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, in_row: np.ndarray, device: torch.device) -> None:
        within = np.arange(int(lengths.max()))[None]
        real = within < lengths[:, None]
        places = in_row[starts[:, None] + np.minimum(within, lengths[:, None] - 1)]
        on_device = partial(torch.as_tensor, dtype=torch.int64, device=device)
        self.shape = places.shape  # (S, L)
        # [S * L] each sample's tokens in the row; beyond its end, its last token
        self.places = on_device(places.ravel())
        # [tokens] which of the S * L are no padding; None if all are
        self.kept = None if real.all() else on_device(np.flatnonzero(real))
        # [tokens] the places of these in the row
        self.targets = on_device(places[real])

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather [1, heads, T, D] into [S, heads, L, D]."""
        _, heads, _, size = tensor.shape
        return tensor[0].index_select(1, self.places).view(heads, *self.shape, size).transpose(0, 1)

    def without_padding(self, found: torch.Tensor) -> torch.Tensor:
        """Flatten [S, L, heads, D] to [tokens, heads, D]."""
        flat = found.flatten(0, 1)
        return flat if self.kept is None else flat.index_select(0, self.kept)


class PackedRow:
    """The samples of a packed row, for the attention layers.

    It is an argument of the model's forward pass, so that activation checkpointing has it in the backward pass too.
    """

    def __init__(self, lengths: list[int], device: torch.device, places: np.ndarray | None = None) -> None:
        """
        Args:
            places: [tokens of all samples] where each is in the row, if samples share prefixes (`algo.packing`).
        """
        self.is_one_sample = len(lengths) == 1
        places = np.arange(sum(lengths)) if places is None else places
        starts = np.cumsum([0, *lengths[:-1]])
        self.buckets = [
            Bucket(starts[samples], np.array(lengths)[samples], places, device) for samples in buckets(lengths)
        ]
        targets = torch.cat([bucket.targets for bucket in self.buckets]).cpu().numpy()
        order = np.unique(targets, return_index=True)[1]  # the first result of a shared token
        self.order = torch.from_numpy(order).to(device)  # [T]: where each token's result lies among all buckets'


def supports_packed_attention(model: PreTrainedModel) -> bool:
    """Return whether every layer that attends sees all tokens before it, through transformers' `sdpa`.

    Windows and chunks are not supported, because not every model passes them to its attention.
    """
    text = model.config.get_text_config()
    layers = getattr(text, "layer_types", None) or []
    windowed = getattr(text, "sliding_window", None) if not layers else None
    return (
        model.config._attn_implementation == "sdpa"
        and set(layers) <= {"full_attention", "linear_attention", "conv", "mlp", "moe", "hybrid"}
        and not windowed
        and not getattr(text, "attention_chunk_size", None)
    )


def use_packed_attention(model: PreTrainedModel) -> None:
    """Let forward passes that are given their row, as `ARGUMENT`, run without a mask. Other passes are unchanged."""
    AttentionInterface.register(NAME, _attention())
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)


@contextmanager
def row_given() -> Iterator[None]:
    """Build no mask in the forward pass inside, which is given its row."""
    token = _is_row_given.set(True)
    try:
        yield
    finally:
        _is_row_given.reset(token)


def _mask(*arguments: Any, **options: Any) -> torch.Tensor | None:
    return None if _is_row_given.get() else AttentionMaskInterface()["sdpa"](*arguments, **options)


def _attention() -> Callable[..., tuple[torch.Tensor, Any]]:
    plain = AttentionInterface()["sdpa"]

    @torch.compiler.disable
    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *,
        packed_row: PackedRow | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        if packed_row is None or packed_row.is_one_sample:
            return plain(module, query, key, value, attention_mask, **options)
        found = []
        for bucket in packed_row.buckets:
            theirs = tuple(map(bucket.gather, (query, key, value)))
            if is_faster_on_cpu(theirs[0]):
                attended = attend_on_cpu(*theirs, scaling=options["scaling"])
            else:
                attended, _weights = plain(module, *theirs, None, **options)
            found.append(bucket.without_padding(attended))
        return torch.cat(found).index_select(0, packed_row.order)[None], None

    return attend
