"""The probe of a version: a fixed prompt's logprobs, and how far rounding alone may move an engine's from them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from trireme.algo.packing import unsampled_row
from trireme.algo.weight_checks import probe_ids
from trireme.messages import Probe
from trireme.trainer.model.forward import scorer_of
from trireme.trainer.model.sharding import decoder_layers

PROBE_TOKENS = 32
COPIES = 8  # copies of the prompt, each with other noise
PLACES = 8192
"""Number of places in the pool at which a layer's random errors may begin: few layers get the same ones."""

SHIFT = 17  # numbers of the pool from the beginning of a token's errors to that of the next token's


@torch.no_grad()
def compute_probe(model: PreTrainedModel, device: torch.device, *, context: int | None = None) -> Probe:
    """Compute the trainer's logprobs of the fixed prompt. A collective.

    Args:
        context: tokens that an engine takes, one of which it samples after the prompt.
    """
    # The engine samples one token after the prompt, so it must fit the context too.
    length = PROBE_TOKENS if context is None else max(2, min(PROBE_TOKENS, context - 1))
    ids = probe_ids(model.config.get_text_config().vocab_size, length)
    row, places = unsampled_row(ids, [length]), np.arange(1, length)
    return Probe(ids=ids, logprobs=scorer_of(model, device).score(row, places, device).logprobs.tolist())


@torch.no_grad()
def compute_noise(
    model: PreTrainedModel,
    device: torch.device,
    probe: Probe,
    dtypes: tuple[torch.dtype, ...],
    *,
    low_bit: float = 0.0,
) -> float:
    """Compute how far rounding in the given precisions moves the logprobs of a probe. A collective.

    This is the mean change of the logprobs when the outputs of all layers are off by random errors as large as those of
    rounding, in the copy of the prompt where it is largest: in mixtures of experts, few copies take other experts. The
    mean change by bfloat16 was up to 1.6 times that for dense models, and up to 2.9 times for mixtures
    (`benchmarks/weights/probe.py`).

    Args:
        dtypes: the precisions of the two sides that are compared.
        low_bit: largest relative error of the outputs of the decoder's matrices, if the engine holds these in few bits.
    """
    # The largest relative error of a rounded value; 0 in float32.
    error = math.hypot(*(torch.finfo(dtype).eps / 2 for dtype in dtypes if dtype != torch.float32))
    if error == low_bit == 0:
        return 0.0

    # Copies share nothing, and the head runs as the module that noise is added to.
    scorer = replace(scorer_of(model, device), head=None, shares_prefixes=False)
    length = len(probe.ids)
    row = unsampled_row(probe.ids * COPIES, [length] * COPIES)
    places = np.concatenate([np.arange(1, length) + copy * length for copy in range(COPIES)])

    pool = _Pool(device)
    blocks = decoder_layers(model)
    matrices = {each for block in blocks for each in block.modules() if any(p.ndim > 1 for p in each.parameters(False))}
    layers = [*(module for module in model.modules() if not list(module.children())), *blocks]
    errors = {layer: math.hypot(error, low_bit if layer in matrices else 0.0) for layer in layers}
    hooks = [layer.register_forward_hook(_add_noise(each, pool)) for layer, each in errors.items()]

    try:
        # Compiled blocks would run without the hooks.
        with torch.compiler.set_stance("force_eager"):
            noisy = scorer.score(row, places, device).logprobs
    finally:
        for hook in hooks:
            hook.remove()

    # The worst copy counts: an engine with ordinary rounding must not fail the probe.
    exact = torch.tensor(probe.logprobs, dtype=noisy.dtype, device=noisy.device)
    return float((noisy.view(COPIES, -1) - exact).abs().mean(dim=1).max())


class _Pool:
    """Random errors between -1 and 1, the same for each probe. A layer's errors are a view of the pool from a random
    place on: to draw them for every layer doubles the time of a probe on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator, self._places = torch.Generator(device).manual_seed(0), random.Random(0)
        self._numbers = torch.empty(0, device=device)

    def errors(self, rows: int, columns: int) -> torch.Tensor:
        # Numbers are drawn when the largest layer so far needs them, and reused by all others.
        needed = PLACES + (rows - 1) * SHIFT + columns
        if len(self._numbers) < needed:
            self._numbers = self._numbers.new_empty(needed).uniform_(-1, 1, generator=self._generator)
        return self._numbers.as_strided((rows, columns), (SHIFT, 1), self._places.randrange(PLACES))


def _add_noise(error: float, pool: _Pool) -> Callable[..., Any]:
    def noisy(_: nn.Module, __: Any, output: Any) -> Any:
        if not torch.is_tensor(output) or not output.is_floating_point() or not output.numel():
            return output
        errors = pool.errors(output[..., 0].numel(), output.shape[-1]).view(output.shape)
        return torch.addcmul(output, output, errors, value=error).to(output.dtype)

    return noisy
