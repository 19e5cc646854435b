"""A turn of the model: from the tokens that an engine sampled to the message that the environment is shown.

If the run names a parser (`inference.model.reasoning_parser`, `tool_call_parser`), the engine's own parsers read the
tokens, as they would for its OpenAI routes, and thinking is apart from the content. Otherwise the text is the content,
and tool calls are read in the hermes form: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A turn that
cannot be parsed stays text: the rollout continues, and the environment decides what the turn is worth.
"""

from __future__ import annotations

import json
from typing import Any

from trireme.base.log import get_logger
from trireme.config.inference import InferenceModel
from trireme.journal.model_turn import Message, ToolCall, Turn, assistant_message
from trireme.orchestrator.engines.pool import InferencePool
from trireme.orchestrator.engines.responses import ParsedMessage
from trireme.orchestrator.rollout.chat import ChatTokenizer

log = get_logger("turns")

_SEED_TOKENS = 16  # last tokens of the prompt, enough to decode the text of the first sampled token
BEGIN, END = "<tool_call>", "</tool_call>"


class TurnReader:
    """Reads the turns of all rollouts."""

    def __init__(self, model: InferenceModel, tokenizer: ChatTokenizer, pool: InferencePool) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._reads_thinking = model.reasoning_parser is not None
        self._reads_calls = model.tool_call_parser is not None
        self._has_warned = False

    async def read(
        self,
        prompt: list[int],
        turn: Turn,
        tools: list[dict] | None,
        *,
        number: int,
        keeps_stop: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> Message:
        """Return what the `number`th turn of a rollout says, as a chat message.

        Args:
            keeps_stop: leave the stop string that ended it in the text (`include_stop_str_in_output`).
            template_kwargs: variables of its prompt, by which parsers know whether the model thinks.
        """
        # a request to an engine, so only if there may be thinking or calls for its parsers to find
        by_engine = self._reads_thinking or (self._reads_calls and tools)
        message = None
        if by_engine and turn.spoken:
            message = await self._by_engine(prompt, turn, tools, template_kwargs or {})
        if message is not None:
            content, reasoning = message.content or "", message.reasoning
            calls = [
                ToolCall(id=call_id(number, place), name=call.function.name, arguments=call.function.arguments)
                for place, call in enumerate(message.tool_calls)
            ]
        else:
            content, reasoning, calls = self._tokenizer.decode(turn.spoken), None, []

        # the message ends before the stop string, as vLLM's own answers do; the tokens still have it
        if not keeps_stop and isinstance(turn.stop_reason, str):
            if turn.stop_reason in content:
                content = content[: content.rfind(turn.stop_reason)]
            elif reasoning and turn.stop_reason in reasoning:
                reasoning = reasoning[: reasoning.rfind(turn.stop_reason)]

        # without a parser of the engine, calls are in the hermes form
        if tools and not self._reads_calls:
            content, calls = split_tool_calls(content, number)

        return assistant_message(content, reasoning, calls)

    async def _by_engine(
        self, prompt: list[int], turn: Turn, tools: list[dict] | None, template_kwargs: dict[str, Any]
    ) -> ParsedMessage | None:
        """Parse the turn with the engine's parsers, which read the prompt and the tools too; None if they fail."""
        chat_request: dict[str, Any] = {"messages": []}
        if template_kwargs:
            chat_request["chat_template_kwargs"] = template_kwargs
        if tools:
            chat_request |= {"tools": tools, "tool_choice": "auto"}

        # the parsers get ids and not text, so that special tokens that mark thinking and calls are not lost
        choice = {"index": 0, "token_ids": turn.spoken, "finish_reason": turn.finish_reason}
        body = {
            "generate_response": {"request_id": "turn", "choices": [choice], "prompt_token_ids": prompt},
            "prompt_token_ids": prompt[-_SEED_TOKENS:],
            "chat_request": chat_request,
        }
        try:
            return await self._pool.parse(body)
        except ValueError as error:
            # once: a model that has not learned the form yet fails in most of its turns
            if not self._has_warned:
                log.warning("%s. The turn stays text, as will all later ones that cannot be parsed.", error)
            self._has_warned = True
            return None


def split_tool_calls(text: str, turn: int) -> tuple[str, list[ToolCall]]:
    """Split a text into the rest and its tool calls. A call that is no JSON stays in the rest.

    Args:
        turn: number of the turn, which makes the ids of its calls unique within a rollout.
    """
    if BEGIN not in text:
        return text, []
    calls: list[ToolCall] = []
    rest, at = list[str](), 0
    # no regular expression: one that backtracks takes hours for a tag that is never closed
    while (begin := text.find(BEGIN, at)) >= 0 and (end := text.find(END, begin)) >= 0:
        written = text[begin + len(BEGIN) : end]
        rest.append(text[at:begin])
        at = end + len(END)
        try:
            name, arguments = _read_call(written.strip())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            rest.append(text[begin:at])
        else:
            calls.append(ToolCall(id=call_id(turn, len(calls)), name=name, arguments=arguments))
    return "".join([*rest, text[at:]]).strip(), calls


def _read_call(written: str) -> tuple[str, str]:
    call = json.loads(written)
    name, arguments = str(call["name"]), call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    (name + text).encode()  # half a surrogate pair can be written in JSON, and cannot be sent
    return name, text


def call_id(turn: int, place: int) -> str:
    """Build an id of nine letters and digits, as the strictest chat templates (Mistral's) want."""
    return f"call{turn:03d}{place:02d}"
