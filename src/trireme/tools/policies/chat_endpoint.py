"""A policy behind a chat endpoint: any server with OpenAI's chat completions. It returns text, and counts of tokens."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from trireme.base.errors import ConfigError, PeerDied, message_of
from trireme.base.token import bearer
from trireme.base.waiting import Wait, Waits
from trireme.config.orchestrator import OrchestratorConfig
from trireme.config.section import merged
from trireme.journal.model_turn import ToolCall
from trireme.journal.records import Rollout
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.driver import build_rollout
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.orchestrator.rollout.sampling import (
    ArgumentNotes,
    merge_template_kwargs,
    replaced_arguments,
    sampling_arguments,
)
from trireme.orchestrator.session.session import RolloutFailed, Session
from trireme.orchestrator.session.wire import Ask, FinishReason, Reply
from trireme.tools.policies.endpoint_file import is_local
from trireme.tools.policies.script import estimated_prompt

LOOK_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
RETRIED = {408, 409, 425, 429}  # and all from 500
FINAL = {
    401: "the key was refused",
    402: "the account has no credit",
    403: "the key may not do that",
    404: "there is no such route or model",
}
BUSY = re.compile(r"rate.?limit|too many requests|overloaded|unavailable|timed? ?out|try again|temporar", re.IGNORECASE)
"""Words of an error without a status of its own for which a retry may help."""
BROKEN_OFF = frozenset(
    {"error", "content_filter", "abort", "aborted", "cancelled", "canceled", "timeout"}
    | {"safety", "recitation", "blocked", "insufficient_system_resource"}
)
"""Reasons for the end of an answer that are the provider's, not the model's. None at all is one too."""
OVERLONG = ("context length", "context_length", "maximum context", "too long")

NOT_SAMPLING = frozenset({"model", "messages", "tools", "stream", "stream_options", "n"})
"""Keys of a request that are decided here. All others are passed on, as OpenAI's clients do."""


@dataclass(frozen=True)
class Server:
    """A server that answers at a base URL."""

    root: str  # without `/v1`
    api: str  # base of the routes: `/chat/completions` is appended to it
    models: tuple[str, ...] = ()
    base_model: str | None = None  # folder or hub name of the first of them, as it was started with
    max_model_len: int | None = None
    weights: str | None = None  # the version of its weights; None if it is no engine that takes token ids


async def look_at(base_url: str, *, key: str | None = None) -> Server:
    """Ask a server what it is. Raises: ConfigError if there is no answer, or the URL is not one."""
    url = base_url.rstrip("/")
    # users paste the address with and without `/v1`
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"--base-url {base_url!r} is no address - expected one such as http://127.0.0.1:8000/v1. Correct it."
        )

    root, api = url.removesuffix("/v1"), url if parts.path else f"{url}/v1"
    timeout = aiohttp.ClientTimeout(LOOK_TIMEOUT_S)
    answers: list[dict[str, Any]] = []
    # an engine of ours answers the first, every server the second
    async with aiohttp.ClientSession(timeout=timeout, headers=bearer(key), trust_env=not is_local(root)) as session:
        for address in (f"{root}/weight_info", f"{api}/models"):
            try:
                async with session.get(address) as response:
                    answer = await response.json(content_type=None) if response.status == 200 else {}
            except (aiohttp.ClientConnectionError, TimeoutError) as error:
                raise ConfigError(
                    f"nothing answers at {base_url} ({message_of(error)}) - expected an engine, or a "
                    "server with OpenAI's chat completions. Start it, or correct `--base-url`."
                ) from error
            except (aiohttp.ClientError, ValueError, RecursionError):
                answer = {}  # it has no such route
            answers.append(answer if isinstance(answer, dict) else {})

    about, listed = answers
    cards = listed.get("data") if isinstance(listed.get("data"), list) else []
    cards = [card for card in cards or [] if isinstance(card, dict) and isinstance(card.get("id"), str)]
    first = cards[0] if cards else {}
    # vLLM names the folder that it was started with as `root`
    longest, base_model = first.get("max_model_len"), first.get("root") or first.get("id")
    return Server(
        root=root,
        api=api,
        weights=str(about["weight_version"]) if "weight_version" in about else None,
        models=tuple(card["id"] for card in cards),
        base_model=base_model if isinstance(base_model, str) else None,
        max_model_len=longest if isinstance(longest, int) and longest > 0 else None,
    )


@dataclass
class ChatEndpoint:
    """One model of one server."""

    api: str
    model: str
    session: aiohttp.ClientSession
    config: OrchestratorConfig  # its sampling, and how long an engine may take
    waits: Waits
    pause_s: float = FIRST_PAUSE_S  # before the first retry; it doubles with each

    def __post_init__(self) -> None:
        self._notes = ArgumentNotes()

    @property
    def name(self) -> str:
        return f"{self.model} at {self.api}, temperature {self.config.sampling.temperature:g}"

    async def rollout(self, environment: Environment, spec: RolloutSpec) -> Rollout:
        """Raises: ConfigError if the server refuses what every question has; DeadlineExceeded."""
        num_sampled = num_tokens = 0

        async def ask(question: Ask) -> Reply:
            # counted here, as no token ids are known: the longest request is the rollout's length
            nonlocal num_sampled, num_tokens
            if question.only_counts:
                return estimated_prompt(question)
            answer = await self._answer(question, environment)
            if isinstance(answer, Reply):
                return answer
            usage = answer.usage or _Usage()
            sampled, read = usage.completion_tokens or 0, usage.prompt_tokens or 0
            num_sampled += sampled
            num_tokens = max(num_tokens, read + sampled)
            assert answer.choices, answer
            return _to_reply(answer.choices[0])

        done = await environment.run(Session(spec.task(environment), ask))
        return build_rollout(done, environment, spec, num_sampled=num_sampled or None, num_tokens=num_tokens or None)

    def _arguments(self, theirs: dict[str, Any], environment: Environment) -> dict[str, Any]:
        """Return the keys of a request besides its conversation: the environment's, which the user's own replace.

        Those of the chat template are merged, the environment's last, as in training (`rollout.sampling`).

        Raises: ValueError if the environment gives the template what is no table.
        """
        sampling = merged(self.config.sampling, getattr(environment.config, "sampling", None))
        own = sampling_arguments(sampling)
        passed_on = {name: value for name, value in theirs.items() if name not in NOT_SAMPLING}
        # notes tell once which arguments of the environment have no effect
        ignored = {name: f"{name} is ignored" for name in theirs.keys() - passed_on.keys() - {"n"}}
        self._notes.log(environment.name, ignored | replaced_arguments(passed_on, own))

        # the server decides what an effort means for its template
        table = {"chat_template_kwargs": environment.config.chat_template_kwargs}
        requests = (sampling.template_request, table, theirs)
        kwargs = merge_template_kwargs(*({**each, "reasoning_effort": None} for each in requests))
        efforts = [each["reasoning_effort"] for each in requests if each.get("reasoning_effort") is not None]
        template = {"chat_template_kwargs": kwargs or None, "reasoning_effort": efforts[-1] if efforts else None}
        return passed_on | own | {name: value for name, value in template.items() if value is not None}

    async def _answer(self, question: Ask, environment: Environment) -> _Completion | Reply:
        """Ask until there is an answer, with exponential backoff. A `Reply` says that the prompt is too long.

        Raises: RolloutFailed if there is none, whatever the environment would make of that.
        """
        try:
            body = self._arguments(question.sampling, environment)
        except ValueError as error:
            raise RolloutFailed("rollout", str(error), is_final=True) from error

        body |= {"model": self.model, "messages": question.messages}
        body |= {"tools": question.tools} if question.tools else {}

        pause_s = self.pause_s
        with self.waits.waiting("an answer", peer=self.api, deadline_s=self.config.engine_timeout_s) as wait:
            while True:
                try:
                    async with self.session.post(f"{self.api}/chat/completions", json=body) as response:
                        answer = self._read(response.status, await response.read(), wait)
                    if answer is not None:
                        return answer
                # a refused connection on this machine means that the server has ended; elsewhere it may come back
                except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                    if isinstance(error, aiohttp.ClientConnectorError) and is_local(self.api):
                        raise PeerDied(
                            f"{self.api} is gone: {error} - expected the server to answer until the end. Look at its "
                            "log, restart it, and type the same command."
                        ) from error
                    wait.note = f"the last try: {message_of(error)}"
                wait.check()
                await asyncio.sleep(min(LONGEST_PAUSE_S, pause_s, max(0.0, wait.left_s)))
                pause_s *= 2

    def _read(self, status: int, data: bytes, wait: Wait) -> _Completion | Reply | None:
        """Return None if a retry may help; the wait's note has the reason."""
        text = data[:300].decode(errors="replace")
        # busy or broken for now
        if status in RETRIED or status >= 500:
            wait.note = f"the last answer: {status} {text}"
            return None

        # nothing that another question could change
        if status in FINAL:
            raise ConfigError(
                f"{self.api} answered {status} to a question for {self.model!r} ({FINAL[status]}): {text} - expected "
                "a chat completion. Correct `--model`, `--base-url`, or the variable that `--api-key-var` names."
            )

        # this question alone is refused
        if status >= 400:
            words = f"The endpoint refused a question ({status}): {text}"
            if any(hint in text.lower() for hint in OVERLONG):
                return Reply(error=words, error_kind="overlong_prompt")
            raise RolloutFailed("rollout", words, is_final=True)

        try:
            answer = _DECODER.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RolloutFailed("rollout", f"The endpoint gave no chat completion ({error}): {text}") from error

        # some providers put an error of their own into an answer with status 200
        if (inside := answer.first_error) is not None:
            inner = _status_of(inside)
            if inner is None:
                raise RolloutFailed("rollout", f"The endpoint answered with an error: {text}")
            return self._read(inner, data, wait)
        if problem := answer.problem:
            raise RolloutFailed("rollout", f"The endpoint {problem}: {text}")
        return answer


def _status_of(error: Any) -> int | None:
    """Return the HTTP status that an error inside of an answer stands for; None if it does not say.

    Example:
        _status_of({"message": "Provider returned error", "code": 429})  # 429
    """
    fields = error if isinstance(error, dict) else {"message": error}
    for name in ("code", "status", "status_code", "http_status"):
        number = str(fields.get(name))
        if number.isdecimal() and 400 <= int(number) < 600:
            return int(number)
    return 429 if BUSY.search(" ".join(str(fields.get(name)) for name in ("code", "type", "message"))) else None


@asynccontextmanager
async def open_chat_endpoint(
    server: Server, model: str | None, key: str | None, config: OrchestratorConfig, waits: Waits
) -> AsyncIterator[ChatEndpoint]:
    """Raises: ConfigError if no model is named and the server has none or several; for keys that are no sampling."""
    if taken := sorted(NOT_SAMPLING & config.sampling.extra_body.keys()):
        raise ConfigError(
            f"`{taken[0]}` = {config.sampling.extra_body[taken[0]]!r:.80} among the sampling arguments - expected "
            "arguments that decide what is sampled: this one is decided by the command. Remove it."
        )
    if not model and len(server.models) != 1:
        has = f"serves {', '.join(server.models[:10])}" if server.models else "does not say what it serves"
        raise ConfigError(f"{server.api} {has}, and no model was named - expected one. Add `--model NAME`.")
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # the environment's `max_concurrent` is the limit
        timeout=aiohttp.ClientTimeout(config.engine_timeout_s),
        headers=bearer(key),
        trust_env=not is_local(server.root),
    )
    async with session:
        yield ChatEndpoint(server.api, model or server.models[0], session, config, waits)


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    content: str | list[dict[str, Any] | str] | None = None  # text, or parts of it
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None

    @property
    def text(self) -> str | None:
        if isinstance(self.content, list):
            return _text_of(self.content, ("text", "output_text"))
        return self.content if self.content is not None else self.refusal

    @property
    def thinking(self) -> str | None:
        parts = _text_of(self.content, ("thinking", "reasoning")) if isinstance(self.content, list) else None
        return self.reasoning_content or self.reasoning or parts or None


def _text_of(parts: list[dict[str, Any] | str], kinds: tuple[str, ...]) -> str:
    """Return the text of some kinds of parts. That of thinking may be in parts again."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part if "text" in kinds else "")
        elif part.get("type", "text") in kinds:
            inside = next((part[name] for name in ("text", *kinds) if name in part), "")
            texts.append(_text_of(inside, ("text",)) if isinstance(inside, list) else str(inside or ""))
    return "".join(texts)


class _Choice(msgspec.Struct):
    message: _Message = msgspec.field(default_factory=_Message)
    finish_reason: str | None = None
    error: Any = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completion(msgspec.Struct):
    """A chat completion, as far as it is read. Some providers answer with status 200 and an error in its place."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None

    @property
    def first_error(self) -> Any:
        """The error of the whole answer, or of its only choice."""
        return next((error for error in (self.error, *(each.error for each in self.choices or [])) if error), None)

    @property
    def problem(self) -> str:
        """Why the answer is none of the model's, if so."""
        if not self.choices:
            return "gave no chat completion"
        choice = self.choices[0]
        message, reason = choice.message, choice.finish_reason
        if reason is None or reason.lower() in BROKEN_OFF:
            return f"broke its answer off (finish_reason {'null' if reason is None else repr(reason)})"
        # a reasoning model may spend all its tokens on thinking, so an answer cut off at its length may be empty
        is_empty = not (message.text or message.tool_calls or message.thinking)
        return "gave an empty answer" if is_empty and not _is_length(reason) else ""


_DECODER = msgspec.json.Decoder(_Completion)


def _is_length(reason: str | None) -> bool:
    return reason is not None and reason.lower() in ("length", "max_tokens", "max_output_tokens", "model_length")


def _to_reply(choice: _Choice) -> Reply:
    message = choice.message
    calls = [
        ToolCall(id=call.id or f"call-{number}", name=call.function.name, arguments=_arguments(call.function))
        for number, call in enumerate(message.tool_calls or [])
    ]
    reason: FinishReason = "tool_calls" if calls else "length" if _is_length(choice.finish_reason) else "stop"
    return Reply(
        content=message.text if message.text is not None or calls else "",
        reasoning=message.thinking,
        tool_calls=calls or None,
        finish_reason=reason,
    )


def _arguments(function: _Function) -> str:
    given = function.arguments
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
