"""The two shapes of a model turn: what is asked for (`TurnRequest`) and what was sampled (`Turn`).

Views of them, where bytes come in or go out: `Ask` and `Reply` on a worker's socket (`session/wire.py`),
`ClientRequest` over HTTP (`gateway/dialects/`), `KeptRequest` on disk (`turns.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np

Message = dict[str, Any]
"""A chat message as OpenAI's API has it; tool calls are nested, their arguments JSON text."""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call of the model.

    Example:
        ToolCall(id="call00100", name="bash", arguments='{"command": "ls"}')
    """

    id: str
    name: str
    arguments: str  # JSON text as the model wrote it, perhaps invalid: the environment handles that

    def to_chat(self) -> dict[str, Any]:
        """Return the call as chat messages have it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class TurnRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request for one model turn.

    Example:
        TurnRequest(messages=[{"role": "user", "content": "Count to 3."}], sampling={"max_tokens": 64})
    """

    messages: list[Message]  # the whole conversation; pictures are parts
    # `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}` of a content
    tools: list[dict[str, Any]] | None = None  # OpenAI function tools
    sampling: dict[str, Any] = {}  # one flat dict, with `reasoning_effort` and `chat_template_kwargs`; the run decides
    calls_tools: bool = True  # false: text that looks like a tool call stays text
    trace: str = ""  # the agent run that asks, if a rollout has several


class Turn(msgspec.Struct, omit_defaults=True):
    """One turn of the model: the tokens that an engine sampled, and the message that they say.

    The engine fills in the tokens, `TurnReader` the message. On disk a turn also names its prompt.

    Example:
        Turn(ids=[7, 2], logprobs=[-0.1, -0.2], versions=[3, 3], finish_reason="stop",
             message={"role": "assistant", "content": "x"})
    """

    ids: list[int]  # [C]
    logprobs: list[float]  # [C] under the distribution that was sampled from
    versions: list[int]  # [C] policy version of each token
    finish_reason: str  # "stop", "length", "repetition"
    stop_reason: int | str | None = None  # the stop token or string that ended it; None at the end of sequence
    kept: list[list[int]] | None = None  # [C] what each token was chosen from; None if from the whole vocabulary
    top_logprobs: list[dict[int, float]] | None = None  # [C] the likeliest tokens; None if the loss needs none
    routes: np.ndarray | None = None  # [N, layers, experts] see `routes_of`; None if not asked for
    cut: Literal["max_tokens", "context_full"] | None = None  # the limit that ended it, if one did
    message: Message = {}  # the message that environments and programs are shown
    prompt: str = ""  # `prompt_digest`
    routes_shape: tuple[int, ...] = ()  # shape of `routes`, which are flat on disk
    num_computed: int | None = None  # tokens that the engine computed for it, prompt included; None if it did not say
    oldest: int | None = None  # oldest version that its tokens attended to; None: each to its own and later ones

    @property
    def spoken(self) -> list[int]:
        """Its tokens without the one that ended the turn, which is no part of its text."""
        ended = self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
        return self.ids[:-1] if ended else self.ids

    @property
    def calls(self) -> list[ToolCall]:
        """Return its tool calls."""
        return [ToolCall(id=call["id"], **call["function"]) for call in self.message.get("tool_calls", ())]


def assistant_message(content: str, reasoning: str | None = None, tool_calls: Iterable[ToolCall] = ()) -> Message:
    """Return what the model says in a turn as a message of a conversation."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [call.to_chat() for call in tool_calls]
    return message | ({"tool_calls": calls} if calls else {})


def is_same(said: Message, given: Message) -> bool:
    """Return whether a message of a conversation is a turn of the model, unchanged.

    Args:
        said: an `assistant_message`.
        given: a message that an environment or a program has sent.
    """
    return (
        given.get("role") == "assistant"
        and (given.get("content") or "") == said["content"]
        and (given.get("reasoning_content") or given.get("reasoning") or "") == said.get("reasoning_content", "")
        and _has_calls_of(said, given)
    )


def is_like(said: Message, given: Message) -> bool:
    """Return whether a message is a turn of the model, although the program that returns it changed it.

    Programs strip whitespace, drop reasoning, and write arguments in another form. They return ids of tool calls.
    """
    reasoning = (given.get("reasoning_content") or "").strip()
    return (
        given.get("role") == "assistant"
        and (given.get("content") or "").strip() == said["content"].strip()
        and reasoning in ("", said.get("reasoning_content", "").strip())
        and (_call_ids(said) == _call_ids(given) or _has_calls_of(said, given))
    )


def _call_ids(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or []]


def _has_calls_of(said: Message, given: Message) -> bool:
    def written(message: Message) -> list[tuple[Any, Any]]:
        functions = [call.get("function", call) for call in message.get("tool_calls") or []]
        return [(each.get("name"), _comparable(each.get("arguments"))) for each in functions]

    return written(said) == written(given)


def _comparable(arguments: Any) -> Any:
    """Return arguments in a form that can be compared: `{"a":1}` and `{"a": 1}` are the same."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
