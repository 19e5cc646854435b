"""What was said in a turn: from the tokens that an engine sampled to what the environment is shown.

Where the run names a parser (`inference.model.reasoning_parser`, `tool_call_parser`), the engine's own parsers read the
tokens, as they would for its OpenAI routes; thinking is then apart from the content. Otherwise the text is the content,
and tool calls are read in the hermes form. A turn that cannot be parsed stays text: its rollout goes on, and what it is
worth is the environment's to say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trireme.base.log import get_logger
from trireme.config.inference import InferenceModel
from trireme.orchestrator.engines.pool import Generation, InferencePool
from trireme.orchestrator.engines.responses import Message
from trireme.orchestrator.environments.wire import ToolCall
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.tool_calls import call_id, split_tool_calls

log = get_logger("turns")

_SEED_TOKENS = 16  # of the prompt: enough for the text of the first sampled token


@dataclass(frozen=True)
class Said:
    """A turn of the model, as the environment is shown it."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def is_in(self, message: dict[str, Any]) -> bool:
        """Whether this message of a conversation is that turn, unchanged."""
        given = message.get("reasoning_content") or message.get("reasoning") or ""
        return (
            message.get("role") == "assistant"
            and (message.get("content") or "") == self.content
            and given == (self.reasoning or "")
            and _calls_in(message) == [(call.name, _comparable(call.arguments)) for call in self.tool_calls]
        )


def _calls_in(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call.get("function", call) for call in message.get("tool_calls") or []]
    return [(function.get("name"), _comparable(function.get("arguments"))) for function in functions]


def _comparable(arguments: Any) -> Any:
    """Text, or what it stands for: `{"a":1}` and `{"a": 1}` are the same arguments."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


class TurnReader:
    """Reads the turns of all rollouts."""

    def __init__(self, model: InferenceModel, tokenizer: ChatTokenizer, pool: InferencePool) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._reads_thinking = model.reasoning_parser is not None
        self._reads_calls = model.tool_call_parser is not None
        self.num_unparsed = 0

    async def read(
        self, prompt: list[int], turn: Generation, tools: list[dict] | None, *, number: int, keeps_stop: bool = False
    ) -> Said:
        """The `number`th turn of a rollout.

        Args:
            keeps_stop: leave the string that ended it in what was said (`include_stop_str_in_output`).
        """
        by_engine = self._reads_thinking or (self._reads_calls and tools)
        if by_engine and turn.spoken and (message := await self._by_engine(prompt, turn, tools)) is not None:
            content, reasoning = message.content or "", message.reasoning
            calls = [
                ToolCall(id=call_id(number, place), name=call.function.name, arguments=call.function.arguments)
                for place, call in enumerate(message.tool_calls)
            ]
        else:
            content, reasoning, calls = self._tokenizer.decode(turn.spoken), None, []
        if not keeps_stop and isinstance(turn.stop_reason, str):
            content, reasoning = _without_stop(content, reasoning, turn.stop_reason)
        if tools and not self._reads_calls:
            content, calls = split_tool_calls(content, number)
        return Said(content, reasoning, tuple(calls))

    async def _by_engine(self, prompt: list[int], turn: Generation, tools: list[dict] | None) -> Message | None:
        """None where its parsers cannot make anything of this turn."""
        try:
            return await self._pool.parse(derender_request(prompt, turn, tools))
        except ValueError as error:
            self.num_unparsed += 1
            if self.num_unparsed == 1:
                log.warning("%s. The turn stays text, like all that follow and cannot be parsed.", error)
            return None


def derender_request(prompt: list[int], turn: Generation, tools: list[dict] | None) -> dict[str, Any]:
    """Body for `/v1/chat/completions/derender`: of the conversation, parsers read the prompt's tokens and the tools."""
    choice = {"index": 0, "token_ids": turn.spoken, "finish_reason": turn.finish_reason}
    chat_request: dict[str, Any] = {"messages": []}
    if tools:
        chat_request |= {"tools": tools, "tool_choice": "auto"}
    return {
        "generate_response": {"request_id": "turn", "choices": [choice], "prompt_token_ids": prompt},
        "prompt_token_ids": prompt[-_SEED_TOKENS:],
        "chat_request": chat_request,
    }


def _without_stop(content: str, reasoning: str | None, stop: str) -> tuple[str, str | None]:
    """As vLLM's text has it: the turn ends before the string that ended it."""
    if stop in content:
        return content[: content.rfind(stop)], reasoning
    if reasoning and stop in reasoning:
        return content, reasoning[: reasoning.rfind(stop)]
    return content, reasoning
