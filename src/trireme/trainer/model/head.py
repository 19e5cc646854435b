"""Logprobs and entropies from hidden states, with the logits of a few tokens at a time.

The [tokens, vocabulary] tensor would be the largest of a step: 16,000 tokens with a vocabulary of 150,000 take 9 GiB in
float32, and several such tensors exist in the backward pass. Here each chunk's logits are computed in the forward pass,
discarded, and computed again in the backward pass.

Letters: K positions of a row whose next token counts, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from trireme.algo.loss.logprobs import Choices, logprobs_of, token_logprobs

Result = TypeVar("Result")


class HeadOutput(NamedTuple):
    """The results for the tokens that count."""

    logprobs: torch.Tensor  # [K] float32
    entropies: torch.Tensor  # [K] float32, nats
    top: torch.Tensor | None = None  # [W, K] float32, logprobs of `Targets.top`


class Targets(NamedTuple):
    """The tokens that count, and how they were drawn."""

    ids: torch.Tensor  # [K] int64
    temperatures: torch.Tensor  # [K] float32
    choices: Choices | None  # tokens that could be sampled, if sampling was cut
    top: torch.Tensor | None = None  # [W, K] int64: other tokens whose logprobs are wanted; any token fills gaps

    def within(self, first: int, last: int) -> Targets:
        choices = self.choices.within(first, last) if self.choices else None
        top = None if self.top is None else self.top[:, first:last]
        return Targets(self.ids[first:last], self.temperatures[first:last], choices, top)


class Head:
    """Turns hidden states into logits as the model does: tied or not, with a bias, adapters, a scale or a soft cap."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = _without_decoder(model)

    def logits(self, hidden_KH: torch.Tensor) -> torch.Tensor:
        """Return [K, V] logits, each from its own hidden state."""
        return self._model.forward(inputs_embeds=hidden_KH[None], use_cache=False).logits[0]

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters that logits depend on. They are whole while the root's are gathered."""
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]


class NoHead(Head):
    """Passes logits through that take the place of hidden states."""

    def __init__(self) -> None:
        self._model = nn.Identity()

    def logits(self, hidden_KH: torch.Tensor) -> torch.Tensor:
        return hidden_KH


def score_in_chunks(
    head: Head, hidden_KH: torch.Tensor, targets: Targets, *, chunk: int, entropy_gradient: bool = False
) -> HeadOutput:
    """Compute logprobs and entropies, with the logits of `chunk` tokens at once."""

    def score(first: int, hidden_kH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids, temperatures, choices, top = targets.within(first, first + len(hidden_kH))
        logits = head.logits(hidden_kH)
        found = token_logprobs(logits, ids, temperatures, choices=choices, entropy_gradient=entropy_gradient)
        return found if top is None else (*found, logprobs_of(top, logits, ids, temperatures, found[0]))

    options = (head, score, chunk, entropy_gradient)
    return HeadOutput(*_InChunks.apply(*options, hidden_KH, *head.parameters()))


class _InChunks(torch.autograd.Function):
    """Computes each chunk's logits again in the backward pass, and adds up the chunks' gradients of the parameters.

    The sum is in float32, because autograd would round to the parameters' bfloat16 after every chunk. Both passes
    compute the same, as nothing is dropped in a head: adapters with dropout are refused there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        score: Callable[[int, torch.Tensor], tuple[torch.Tensor, ...]],
        chunk: int,
        entropy_gradient: bool,
        hidden_KH: torch.Tensor,
        *_: nn.Parameter,
    ) -> tuple[torch.Tensor, ...]:
        # Only the hidden states are kept. The logits of all chunks together would be the largest tensor of a step.
        ctx.head, ctx.score, ctx.chunk = head, score, chunk
        ctx.save_for_backward(hidden_KH)
        parts = [score(first, hidden_KH[first : first + chunk]) for first in _starts(hidden_KH, chunk)]

        outputs = tuple(torch.cat(each, dim=-1) for each in zip(*parts, strict=True))  # logprobs, entropies, and top
        if not entropy_gradient:
            ctx.mark_non_differentiable(outputs[1])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream_K: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden_KH,) = ctx.saved_tensors
        parameters, starts = ctx.head.parameters(), _starts(hidden_KH, ctx.chunk)
        of_hidden, sums = torch.empty_like(hidden_KH), [None] * len(parameters)

        # Each chunk's logits exist once more, for their gradient only.
        with torch.enable_grad():
            for first in starts:
                chunk = slice(first, first + ctx.chunk)
                hidden_kH = hidden_KH[chunk].detach().requires_grad_()
                pairs = zip(ctx.score(first, hidden_kH), upstream_K, strict=True)
                trained = [(each, gradient[..., chunk]) for each, gradient in pairs if each.requires_grad]
                outputs, upstream = zip(*trained, strict=True)
                inputs = (hidden_kH, *parameters)
                of_hidden[chunk], *found = torch.autograd.grad(outputs, inputs, upstream, allow_unused=True)
                added = zip(sums, found, strict=True)
                sums = [_added(total, gradient, is_only=len(starts) == 1) for total, gradient in added]

        # Rounded to the parameters' precision once, after all chunks are added up.
        summed = zip(sums, parameters, strict=True)
        of_parameters = [None if total is None else total.to(parameter.dtype) for total, parameter in summed]
        return None, None, None, None, of_hidden, *of_parameters


def _starts(hidden_KH: torch.Tensor, chunk: int) -> range:
    """Return the first token of each chunk. There is at least one: a rank without tokens takes part in collectives."""
    return range(0, max(1, len(hidden_KH)), chunk)


def _added(total: torch.Tensor | None, gradient: torch.Tensor | None, *, is_only: bool) -> torch.Tensor | None:
    """Add a chunk's gradient to the sum so far: of several chunks, in float32 at least."""
    if gradient is None or is_only:
        return total if gradient is None else gradient
    if total is None:  # a copy: autograd may hand out one tensor for two parameters
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
    return total.add_(gradient)


@dataclass
class _Echoed(MoeModelOutputWithPast):
    rope_deltas: None = None  # models with pictures read it off their decoder


class _Echo(nn.Module):
    """Takes the place of a decoder and returns the embeddings it is given as hidden states."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Echoed:
        return _Echoed(last_hidden_state=inputs_embeds)


def _without_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same model, sharing all its modules, with an echo as its decoder: its `forward` is only the head.

    So all that a model does to its logits is done, without a list of what models do.
    """
    # FSDP has made a subclass of the model's class. The shadow is of the model's own class.
    plain = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    shadow: PreTrainedModel = object.__new__(plain)
    shadow.__dict__.update(model.__dict__)
    shadow.__dict__.pop("forward", None)  # a wrapper (`packing/states.py`) runs the model that it was made for
    shadow.__dict__["_modules"] = {**model._modules, model.base_model_prefix: _Echo()}
    return shadow


def run_gathered(model: nn.Module, compute: Callable[[], Result]) -> Result:
    """Run `compute` as the forward pass of `model`: the root's parameters are whole, also in the backward pass.

    Tensors with gradient must be in the tuple that it returns.
    """
    if not hasattr(model, "_compute_gathered"):
        setattr(model, "_compute_gathered", _call)  # noqa: B010 - no attribute that a model is known to have
        register_fsdp_forward_method(model, "_compute_gathered")
    return model._compute_gathered(compute)


def _call(compute: Callable[[], Result]) -> Result:
    """Call a closure: FSDP would cast temperatures among arguments to the precision of the forward pass."""
    return compute()
