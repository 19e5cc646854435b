"""Somebody's server answers a check: any that speaks OpenAI's chat completions. Of its tokens only counts reach us."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from trireme.base.errors import ConfigError, PeerDied
from trireme.base.waiting import Wait, Waits
from trireme.config.orchestrator import Sampling
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, FinishReason, Reply, ToolCall
from trireme.orchestrator.rollout.driver import RolloutSpec
from trireme.orchestrator.rollout.runner import Finished
from trireme.orchestrator.rollout.sampling import sampling_arguments

LOOK_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
TRY_AGAIN = {408, 409, 425, 429}
NO_USE = {401: "the key was refused", 403: "the key may not do that", 404: "there is no such route or model"}

EVERYBODYS_KEYS = frozenset(
    {"temperature", "top_p", "max_tokens", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias"}
)
"""What of an environment's sampling arguments every such server knows."""


@dataclass(frozen=True)
class Server:
    """What answers at a base URL."""

    root: str  # without `/v1`
    api: str  # what `/chat/completions` is appended to
    is_ours: bool  # an engine that takes token ids
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    weights: str | None = None  # what an engine of ours calls those that it holds


async def look_at(base_url: str, *, key: str | None = None) -> Server:
    """Raises: ConfigError where nobody answers, or it is no address."""
    root, api = _addresses(base_url)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LOOK_TIMEOUT_S), trust_env=_is_far(root)) as session:
        weights = await _get(session, f"{root}/weight_info", key, base_url)
        listed = await _get(session, f"{api}/models", key, base_url)
    cards = [card for card in _list(listed.get("data")) if isinstance(card, dict) and isinstance(card.get("id"), str)]
    longest = cards[0].get("max_model_len") if cards else None
    return Server(
        root=root,
        api=api,
        is_ours="weight_version" in weights,
        weights=str(weights["weight_version"]) if "weight_version" in weights else None,
        models=tuple(card["id"] for card in cards),
        max_model_len=longest if isinstance(longest, int) and longest > 0 else None,
    )


@dataclass
class ChatEndpoint:
    """One model of one server."""

    api: str
    model: str
    session: aiohttp.ClientSession
    sampling: Sampling
    waits: Waits
    timeout_s: float
    pause_s: float = FIRST_PAUSE_S  # before the second try
    is_policy: bool = field(default=True, init=False)

    @property
    def name(self) -> str:
        return f"{self.model} at {self.api}, temperature {self.sampling.temperature:g}"

    async def rollout(self, environment: Environment, spec: RolloutSpec) -> Finished:
        """Raises: ConfigError where the server refuses what every question has; DeadlineExceeded."""
        num_sampled = num_tokens = 0

        async def ask(question: Ask) -> Reply:
            nonlocal num_sampled, num_tokens
            answer = await self._answer(question)
            if isinstance(answer, Reply):
                return answer
            num_sampled += answer.usage.completion_tokens
            num_tokens = max(num_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
            return _to_reply(answer)

        done = await environment.run(spec.task(environment), ask)
        return Finished.from_environment(done, num_sampled=num_sampled or None, num_tokens=num_tokens or None)

    async def _answer(self, question: Ask) -> _Answer | Reply:
        body = self._body(question)
        with self.waits.waiting("an answer", peer=self.api, deadline_s=self.timeout_s) as wait:
            for number in range(1 << 16):
                answer = await self._try(body, wait)
                if answer is not None:
                    return answer
                wait.check()
                await asyncio.sleep(min(LONGEST_PAUSE_S, self.pause_s * 2**number, max(0.0, wait.left_s)))
        raise AssertionError("unreachable")

    async def _try(self, body: dict[str, Any], wait: Wait) -> _Answer | Reply | None:
        """None where it is worth another try; the wait's note says why."""
        try:
            async with self.session.post(f"{self.api}/chat/completions", json=body) as response:
                return self._read(response.status, await response.read(), wait)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            if isinstance(error, aiohttp.ClientConnectorError) and not _is_far(self.api):
                raise PeerDied(
                    f"{self.api} is gone: {error} - expected the server to answer until the end. Look at its log, "
                    "start it again, and type the same command."
                ) from error
            wait.note = f"the last try: {error or type(error).__name__}"
            return None

    def _read(self, status: int, data: bytes, wait: Wait) -> _Answer | Reply | None:
        words = data[:300].decode(errors="replace")
        if status in TRY_AGAIN or status >= 500:
            wait.note = f"the last answer: {status} {words}"
            return None
        if status in NO_USE:
            raise ConfigError(
                f"{self.api} answered {status} to a question for {self.model!r} ({NO_USE[status]}): {words} - expected "
                "a chat completion. Correct `--model`, `--base-url`, or the variable that `--api-key-var` names."
            )
        if status >= 400:
            kind = "overlong_prompt" if _says_overlong(words) else "engine"
            return Reply(error=f"The endpoint refused a question ({status}): {words}", error_kind=kind)  # type: ignore[arg-type]
        try:
            return _decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return Reply(error=f"The endpoint gave no chat completion ({error}): {words}", error_kind="engine")

    def _body(self, question: Ask) -> dict[str, Any]:
        asked = {name: value for name, value in question.sampling.items() if name in EVERYBODYS_KEYS}
        body = {"model": self.model, "messages": question.messages} | asked | sampling_arguments(self.sampling)
        return body | ({"tools": question.tools} if question.tools else {})


@asynccontextmanager
async def open_chat_endpoint(
    server: Server, *, model: str | None, key: str | None, sampling: Sampling, timeout_s: float, waits: Waits
) -> AsyncIterator[ChatEndpoint]:
    """Raises: ConfigError where it is not clear which model is meant."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # the environment's `max_concurrent` is the limit
        timeout=aiohttp.ClientTimeout(timeout_s),
        headers=_headers(key),
        trust_env=_is_far(server.root),
    )
    async with session:
        yield ChatEndpoint(server.api, _model(server, model), session, sampling, waits, timeout_s)


def _model(server: Server, model: str | None) -> str:
    if model:
        return model
    if len(server.models) == 1:
        return server.models[0]
    has = f"serves {', '.join(server.models[:10])}" if server.models else "does not say what it serves"
    raise ConfigError(f"{server.api} {has}, and no model was named - expected one. Add `--model NAME`.")


def _addresses(base_url: str) -> tuple[str, str]:
    url = base_url.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"--base-url {base_url!r} is no address - expected one such as http://127.0.0.1:8000/v1. Correct it."
        )
    return url.removesuffix("/v1"), url if parts.path else f"{url}/v1"


def _is_far(url: str) -> bool:
    """Proxies are for servers elsewhere."""
    return urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1", "0.0.0.0")


async def _get(session: aiohttp.ClientSession, url: str, key: str | None, base_url: str) -> dict[str, Any]:
    """Nothing where it has no such route."""
    try:
        async with session.get(url, headers=_headers(key)) as response:
            answer = await response.json(content_type=None) if response.status == 200 else {}
    except (aiohttp.ClientConnectionError, TimeoutError) as error:
        raise ConfigError(
            f"nobody answers at {base_url} ({error or type(error).__name__}) - expected an engine, or a server with "
            "OpenAI's chat completions. Start it, or correct `--base-url`."
        ) from error
    except (aiohttp.ClientError, ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# a chat completion, as far as it is read


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage = msgspec.field(default_factory=_Usage)


_DECODER = msgspec.json.Decoder(_Answer)


def _decode(data: bytes) -> _Answer:
    answer = _DECODER.decode(data)
    if not answer.choices:
        raise ValueError("it has no choice")
    return answer


def _to_reply(answer: _Answer) -> Reply:
    choice = answer.choices[0]
    message = choice.message
    calls = [
        ToolCall(id=call.id or f"call-{number}", name=call.function.name, arguments=call.function.arguments)
        for number, call in enumerate(message.tool_calls or [])
    ]
    reason: FinishReason = "tool_calls" if calls else "length" if choice.finish_reason == "length" else "stop"
    return Reply(
        content=message.content if message.content is not None or calls else "",
        reasoning=message.reasoning_content or message.reasoning,
        tool_calls=calls or None,
        finish_reason=reason,
    )


def _says_overlong(words: str) -> bool:
    words = words.lower()
    return any(hint in words for hint in ("context length", "context_length", "maximum context", "too long"))
