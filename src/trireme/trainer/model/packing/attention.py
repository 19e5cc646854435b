"""Attention over a packed row without a mask: each sample attends by itself.

For packed samples, transformers' `sdpa` masks the whole row: T x T pairs per layer where samples of L tokens need T x
L, and no fast kernel. Here are two ways without a mask:

- `sdpa`, in buckets of samples of similar length: the tokens of each sample are gathered into [samples, L],
  transformers' own `sdpa` runs on them as plain causal attention (`attend_on_cpu` for short samples on a CPU), and the
  results go back to their places.
- `flash`: torch's own kernel of flash attention takes the samples one behind the other with the places where they end.
  It needs no package, and it knows windows.

Letters: T tokens of a row, S samples (of a bucket), L tokens of the longest, H heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from trireme.algo.model import activations
from trireme.algo.packing import buckets

SDPA, FLASH = "packed_samples", "packed_varlen"
"""Names under which transformers knows them. None contains "flash": its models would prepare arguments of another
kernel for that."""

LARGEST_HEAD = 256
"""Numbers of a head that the kernel of flash attention takes at most; it takes multiples of 8."""

UNKNOWN_TO_FLASH = ("softcap", "s_aux", "position_bias", "indices", "block_indices")
"""Arguments of transformers' attention functions that change scores, or choose them, and that the kernel lacks."""

SHORT = {dtype: activations.SHORT[dtype.itemsize] for dtype in (torch.bfloat16, torch.float32)}
"""Tokens of a sample up to which `attend_on_cpu` is faster."""

ARGUMENT = "packed_row"  # the argument under which a row travels through the model's forward pass

_is_row_given: ContextVar[bool] = ContextVar("is_row_given", default=False)


class Bucket:
    """Samples of about the same length."""

    def __init__(self, shape: tuple[int, int], places: torch.Tensor, kept: torch.Tensor | None) -> None:
        self.shape = shape  # (S, L)
        self.places = places  # [S * L] each sample's tokens in the row; beyond its end, its last token
        self.kept = kept  # [tokens] which of the S * L are no padding; None if all are

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
    All is computed on the CPU and copied to the device at once, when a layer first needs it: nothing waits for a GPU.
    """

    def __init__(self, lengths: list[int], device: torch.device, places: np.ndarray | None = None) -> None:
        """
        Args:
            places: [tokens of all samples] where each is in the row, if samples share prefixes (`algo.packing`).
        """
        self.is_one_sample = len(lengths) == 1
        self.longest = max(lengths)
        self._lengths, self._device, self._places = lengths, device, places

    @property
    def buckets(self) -> list[Bucket]:
        return self._in_buckets[0]

    @property
    def order(self) -> torch.Tensor:
        """Return [T] where each token's result lies among the results of all buckets."""
        return self._in_buckets[1]

    @cached_property
    def _in_buckets(self) -> tuple[list[Bucket], torch.Tensor]:
        places = np.arange(sum(self._lengths)) if self._places is None else self._places
        lengths = np.array(self._lengths)
        starts = np.cumsum(lengths) - lengths
        shapes, arrays, targets = [], [], []
        for samples in buckets(self._lengths):
            # The places of a bucket's tokens, with the last token of a sample repeated up to the longest.
            within = np.arange(lengths[samples].max())[None]
            real = within < lengths[samples, None]
            at = places[starts[samples, None] + np.minimum(within, lengths[samples, None] - 1)]
            shapes.append(at.shape)
            arrays += [at.ravel(), np.array([], np.int64) if real.all() else np.flatnonzero(real)]
            targets.append(at[real])

        arrays.append(np.unique(np.concatenate(targets), return_index=True)[1])  # the first result of a shared token
        *tensors, order = _on_device(arrays, self._device)
        kept = [each if len(each) else None for each in tensors[1::2]]
        return [Bucket(*each) for each in zip(shapes, tensors[::2], kept, strict=True)], order

    @cached_property
    def ends(self) -> torch.Tensor:
        """Return [S + 1] int32 where samples that lie one behind the other end, from 0."""
        return torch.from_numpy(np.cumsum([0, *self._lengths], dtype=np.int32)).to(self._device)

    @cached_property
    def shared(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return [tokens of all samples] their places in the row, and [T] the first of the samples' tokens at each
        place of the row; None if samples share none."""
        if self._places is None or len(self._places) == int(self._places.max()) + 1:
            return None
        places, firsts = _on_device([self._places, np.unique(self._places, return_index=True)[1]], self._device)
        return places, firsts


def _on_device(arrays: list[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Copy arrays to the device as one, as int64."""
    whole = torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(device)
    return whole.split([len(each) for each in arrays])


def supports_packed_attention(model: PreTrainedModel, name: str = SDPA) -> bool:
    """Return whether every layer that attends sees all tokens before it, or with `FLASH` those in its window, through
    transformers' `sdpa`.

    With `SDPA`, windows are not supported. Chunks are with neither.
    """
    text = model.config.get_text_config()
    layers = getattr(text, "layer_types", None) or []
    windowed = getattr(text, "sliding_window", None) if not layers else None
    known = {"full_attention", "linear_attention", "conv", "mlp", "moe", "hybrid"}
    return (
        model.config._attn_implementation == "sdpa"
        and set(layers) <= (known | {"sliding_attention"} if name == FLASH else known)
        and (name == FLASH or not windowed)
        and not getattr(text, "attention_chunk_size", None)
    )


def use_packed_attention(model: PreTrainedModel, name: str = SDPA) -> None:
    """Let forward passes that are given their row, as `ARGUMENT`, run without a mask. Other passes are unchanged."""
    AttentionInterface.register(name, _attention(_flash if name == FLASH else _bucket_by_bucket))
    AttentionMaskInterface.register(name, _mask)
    model.set_attn_implementation(name)


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


Attend = Callable[..., torch.Tensor]


def _attention(attend_packed: Attend) -> Callable[..., tuple[torch.Tensor, Any]]:
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
        if packed_row is None or (packed_row.is_one_sample and attend_packed is _bucket_by_bucket):
            return plain(module, query, key, value, attention_mask, **options)
        return attend_packed(module, query, key, value, packed_row, **options), None

    return attend


def _bucket_by_bucket(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedRow, **options: Any
) -> torch.Tensor:
    # In buckets of similar length, little of the computation is padding.
    plain, found = AttentionInterface()["sdpa"], []
    for bucket in row.buckets:
        theirs = tuple(map(bucket.gather, (query, key, value)))
        if is_faster_on_cpu(theirs[0]):
            attended = attend_on_cpu(*theirs, scaling=options["scaling"])
        else:
            attended, _weights = plain(module, *theirs, None, **options)
        found.append(bucket.without_padding(attended))
    return torch.cat(found).index_select(0, row.order)[None]


def _flash(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: PackedRow,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Run torch's kernel of flash attention (Dao 2023, arXiv 2307.08691) on the samples of a row.

    Raises:
        ValueError: the kernel does not compute this layer's attention. `forward.py` then keeps masks.
    """
    # The kernel would compute something else without an error, so what it does not know is refused here.
    size = value.shape[-1]
    width = -(-max(query.shape[-1], size) // 8) * 8
    if width > LARGEST_HEAD:
        raise ValueError(f"flash attention with heads of {width} numbers, above {LARGEST_HEAD}")
    if unknown := [name for name in UNKNOWN_TO_FLASH if options.get(name) is not None]:
        raise ValueError(f"flash attention with {', '.join(unknown)}")
    if (sliding_window is not None) != _has_window(module):
        raise ValueError(f"layer {module.layer_idx} is given a window of {sliding_window}, unlike its configuration")

    # [tokens of all samples, H, D], with zeros up to a size that the kernel takes, which change no score.
    flat = [each[0].transpose(0, 1) for each in (query, key, value)]
    flat = [each if each.shape[-1] == width else pad(each, (0, width - each.shape[-1])) for each in flat]
    if row.shared:
        flat = [each.index_select(0, row.shared[0]) for each in flat]

    before = -1 if sliding_window is None else sliding_window - 1  # a window counts the token itself
    found = varlen_attn(
        *flat, row.ends, row.ends, row.longest, row.longest,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling, window_size=(before, 0), enable_gqa=True,
    )  # fmt: skip
    found = found[..., :size]
    return (found.index_select(0, row.shared[1]) if row.shared else found)[None]


def _has_window(module: nn.Module) -> bool:
    """Return whether the configuration gives a layer a window. Not every model passes it on to its attention."""
    layers = getattr(module.config, "layer_types", None)
    if layers:
        return layers[module.layer_idx] == "sliding_attention"
    return bool(getattr(module.config, "sliding_window", None))


def is_faster_on_cpu(query: torch.Tensor) -> bool:
    """Return whether `attend_on_cpu` is faster for `query` [S, H, L, D]."""
    return query.device.type == "cpu" and query.shape[2] <= SHORT.get(query.dtype, 0)


def attend_on_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float) -> torch.Tensor:
    """Compute softmax(scaling q k^T) v over each token and those before it (Vaswani et al. 2017, equation 1).

    torch's kernel keeps nothing of the size L x L and is faster for long samples. For short ones its backward pass is
    several times slower: written out, a training step of 20M parameters on samples of 142 tokens takes 4.66 instead of
    5.83 s (`benchmarks/trainer/attention.py`, docs/benchmarks.md).

    Args:
        query: [S, H, L, D], of H heads.
        key: [S, K, L, D], K a divisor of H: consecutive heads of queries share a head of keys.
        value: as `key`, or with another size of a head, as in latent attention.

    Returns:
        [S, L, H, D], D as of `value`.
    """
    samples, heads, length, size = query.shape

    # Queries that share a head of keys are stacked, so that one product serves all of them.
    shared = key.shape[1]
    together = (query * scaling).reshape(samples, shared, heads // shared * length, size)
    scores = (together @ key.transpose(-1, -2)).view(samples, heads, length, length)
    weights = (scores + _causal_mask(length, query.dtype)).softmax(-1)
    found = weights.view(samples, shared, -1, length) @ value
    return found.view(samples, heads, length, -1).transpose(1, 2)


@lru_cache(64)
def _causal_mask(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [L, L] -inf where a token would see a later one."""
    return torch.full((length, length), -torch.inf, dtype=dtype).triu(1)
