"""`[orchestrator.sampling]`: the parameters of a request to the engine, and what the chat template is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from trireme.config.section import Section


class Sampling(Section):
    """`[orchestrator.sampling]`: one request to the engine."""

    max_tokens: PositiveInt | None = None
    """Most tokens per model turn (not per rollout); up to the context if not set."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Softmax temperature; the trainer's logprobs are taken at the same one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the behaviour logprobs are those of the cut distribution."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Sample from this many most likely tokens only; all if not set."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out tokens less likely than this times the most likely one."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1 makes tokens that occurred less likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occurred."""
    frequency_penalty: float = 0.0
    """Subtracted from logits for each occurrence."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """No end of sequence before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn."""
    seed: int | None = None
    """Decides the engine's seed of a turn, together with the group, the place in it and the turn."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, as `{ enable_thinking = false }`; those of an environment's table, and then of a
    turn's own request, take precedence."""
    extra_body: dict[str, Any] = {}
    """More sampling parameters of vLLM, by its own names, and `chat_template_kwargs`. `reasoning_effort` goes to the
    chat template, as in vLLM."""

    @property
    def template_request(self) -> dict[str, Any]:
        """The part of a request that the chat template is given (`template_kwargs_of`); empty without any."""
        given = {"chat_template_kwargs": self.chat_template_kwargs} | self.extra_body
        return {name: given[name] for name in OF_TEMPLATE if given.get(name)}

    @property
    def cuts(self) -> bool:
        """Return whether the sampler chooses among a part of the vocabulary only."""
        return self.top_p < 1 or self.min_p > 0 or (self.top_k or 0) > 0

    @property
    def most_kept(self) -> int:
        """The number of tokens that a cut sampler may choose from."""
        return max(MOST_KEPT, self.top_k or 0)


OF_TEMPLATE = ("chat_template_kwargs", "reasoning_effort")
"""Keys of a request that are for the chat template."""


def template_kwargs_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a request gives the chat template, as vLLM reads it.

    `reasoning_effort` is one of them, and decides `enable_thinking` if the request does not.

    Raises: ValueError if they are no table, or name what is rendered.
    """
    given, effort = request.get("chat_template_kwargs") or {}, request.get("reasoning_effort")
    if not given and effort is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"chat_template_kwargs is {given!r:.80}, expected an object, as {{'enable_thinking': false}}")
    if reserved := sorted(NOT_TEMPLATE_KWARGS & given.keys()):
        raise ValueError(f"chat_template_kwargs holds {reserved[0]!r}, expected variables besides what is rendered")
    return dict(given) if effort is None else {"enable_thinking": effort != "none", **given, "reasoning_effort": effort}


def template_fallback(own: Sampling, trained: Sampling) -> dict[str, Any]:
    """Return the keys of a sampling table by which evaluation renders as training, unless the table says how."""
    # A table that says anything about rendering decides all of it.
    if {*own.extra_body, *own.model_fields_set} & {*OF_TEMPLATE}:
        return {}
    more = {name: trained.extra_body[name] for name in OF_TEMPLATE if name in trained.extra_body}
    return {"chat_template_kwargs": trained.chat_template_kwargs, "extra_body": own.extra_body | more}


NOT_TEMPLATE_KWARGS = {"messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"} | {
    *("chat_template", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length")
}
"""Arguments of transformers' `apply_chat_template` that decide what is rendered, and in which form."""


MOST_KEPT = 64
"""The `top_k` of requests whose `top_p` or `min_p` cut while no `top_k` is given.

A token's logprob under a cut sampler is its logprob among the tokens that were kept, so the trainer must know which
those were. Engines say so through the logprobs of the likeliest tokens: those that were left out have none. That needs
a limit on how many are kept.
"""


def is_cut(arguments: Mapping[str, Any]) -> bool:
    """Return whether a request's sampler chooses among a part of the vocabulary. At temperature 0, it never chooses."""
    cuts = arguments.get("top_p", 1.0) < 1 or arguments.get("min_p", 0.0) > 0 or arguments.get("top_k", 0) > 0
    return cuts and arguments.get("temperature", 1.0) > 0


def slots_for(top_k: int) -> int:
    """Return how many of the likeliest tokens to ask for: more than `top_k`, as tokens that tie for its last place are
    all kept."""
    return top_k + top_k // 4 + 8
