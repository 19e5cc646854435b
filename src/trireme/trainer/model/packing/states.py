"""Layers that carry a state from token to token, over a packed row: each sample begins with an empty state.

State spaces, linear attention and convolutions over time (`MIXERS`) know no borders in transformers' PyTorch code: the
positions, `cu_seq_lens_q` and `seq_idx` that it accepts are ignored without its fast kernels. Here the tokens of each
sample are gathered into [samples, L], padded at the end, where a causal layer cannot see the padding from the tokens
before it. The layer runs on these as on a batch, and the results go back to their places. `check_packing` shows for
each model whether that is exact.

Letters: T tokens of a row, S samples of a bucket, L tokens of its longest sample, D size of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trireme.config.model.state_layers import MIXERS
from trireme.trainer.model.packing.attention import ARGUMENT, PackedRow
from trireme.trainer.model.sharding import class_name, decoder_layers, decoder_of

STATES = "row_of_states"
"""The argument under which a row reaches the decoder's blocks where attention does not need it."""

_row: ContextVar[PackedRow | None] = ContextVar("row", default=None)

Forward = Callable[..., Any]


def state_mixers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a model that carry a state from token to token."""
    return [module for module in decoder_of(model).modules() if class_name(module).endswith(MIXERS)]


def keep_states_apart(model: PreTrainedModel) -> None:
    """Let each sample of a packed row begin with an empty state, in all forward passes of the model from now on.

    The borders are those of the row that a pass is given (`packed_attention.ARGUMENT`), else the places at which
    `position_ids` begin again. A block passes them on within its own `forward`, so that recomputing it finds them too.
    """
    mixers = state_mixers(model)
    if not mixers:
        return

    for mixer in mixers:
        mixer.forward = _sample_by_sample(mixer.forward)
    for layer in decoder_layers(model):
        layer.forward = _with_row(layer.forward)
    model.base_model.register_forward_pre_hook(_give_row, with_kwargs=True)
    model.forward = _with_row(model.forward)  # Mamba-2's head keeps positions and all else from its decoder


def _give_row(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {STATES: _row_of(kwargs) or _row.get()}


def _row_of(kwargs: dict[str, Any]) -> PackedRow | None:
    positions, row = kwargs.get("position_ids"), kwargs.get(STATES) or kwargs.get(ARGUMENT)
    if row is not None or positions is None:
        return row

    # Positions begin again with each sample, which shows the borders.
    ids = positions.reshape(-1, positions.shape[-1])[0]
    begins = (ids == 0).nonzero()[:, 0].tolist()
    lengths = [end - begin for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True)]
    return PackedRow(lengths, positions.device)


def _with_row(forward: Forward) -> Forward:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _row.set(_row_of(kwargs) or _row.get())
        kwargs.pop(STATES, None)
        try:
            return forward(*args, **kwargs)
        finally:
            _row.reset(token)

    return run


def _sample_by_sample(forward: Forward) -> Forward:
    @wraps(forward)
    @torch.compiler.disable
    def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        row = _row.get()
        if row is None or row.is_one_sample:
            return forward(hidden_states, *args, **kwargs)

        # Each sample is a row of the batch, so its state begins empty.
        found = []
        for bucket in row.buckets:
            theirs = hidden_states[0].index_select(0, bucket.places).view(*bucket.shape, -1)  # [S, L, D]
            found.append(bucket.without_padding(forward(theirs, *args, **kwargs)))
        return torch.cat(found).index_select(0, row.order)[None]

    return run
