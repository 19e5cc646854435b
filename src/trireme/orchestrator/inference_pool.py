"""The engines: who is alive, who serves which version, and a request to any of them.

An engine is quarantined until it has confirmed the current policy version; a request waits rather than be answered by
weights that nobody has confirmed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from trireme.base.errors import DeadlineExceeded, PeerDied
from trireme.base.log import get_logger
from trireme.base.waiting import Wait, Waits

log = get_logger("engines")

HEALTH_INTERVAL_S = 2.0
HEALTH_MISSES = 5  # in a row, before an engine counts as dead
RETRY_S = 1.0  # before a request that an engine dropped is sent again


@dataclass(frozen=True)
class Generation:
    """One model turn."""

    ids: list[int]  # [C]
    logprobs: list[float]  # [C] under the distribution that was sampled from
    versions: list[int]  # [C] policy version of each token
    finish_reason: str


@dataclass
class Engine:
    """One vLLM server."""

    url: str
    state: Literal["starting", "quarantined", "live", "dead"] = "starting"
    version: int | None = None
    num_workers: int = 1  # ranks in the weight group
    in_flight: int = 0


class OverlongPrompt(Exception):
    """The prompt leaves no room for a single token."""


# what the route answers, as far as we read it


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs
    weight_versions: list[_Span]


class _Response(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _TokenLogprob] | None] | None = None


_decode = msgspec.json.Decoder(_Response).decode
_encode = msgspec.json.Encoder().encode


@dataclass
class InferencePool:
    """All engines of the run."""

    engines: list[Engine]
    session: aiohttp.ClientSession
    waits: Waits
    max_model_len: int
    timeout_s: float
    places: asyncio.Semaphore
    live: asyncio.Event = field(default_factory=asyncio.Event)  # some engine may be asked
    num_requests: int = 0
    retry_s: float = RETRY_S
    health_interval_s: float = HEALTH_INTERVAL_S

    async def generate(self, ids: list[int], sampling: dict[str, Any]) -> Generation:
        """One turn, from whichever live engine has the least to do.

        A request that an engine drops (it died, or was restarted) is sent again, to another or to its successor.

        Raises:
            OverlongPrompt: `ids` fills the context.
            ValueError: the engine refuses the request for what it says; trying again would not help.
            DeadlineExceeded: no engine answered in time.
        """
        room = self.max_model_len - len(ids)
        if room <= 0:
            raise OverlongPrompt(f"The prompt has {len(ids)} tokens, the model takes {self.max_model_len}.")
        sampling = sampling | {"max_tokens": min(room, sampling.get("max_tokens") or room), "logprobs": 0}
        body = _encode({"token_ids": ids, "sampling_params": sampling})
        give_up = time.monotonic() + self.timeout_s
        async with self.places:
            while True:
                engine = await self._least_busy(give_up)
                try:
                    turn = _to_generation(await self._post_generate(engine, body))
                    await self._confirmed(engine)
                    return turn
                except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                    words = str(error) or type(error).__name__
                    if time.monotonic() > give_up:
                        raise DeadlineExceeded(
                            f"orchestrator waited {self.timeout_s:.0f} s for {engine.url} to answer a request that it "
                            f"dropped again and again, last: {words}. Look at logs/inference.stdout"
                        ) from error
                    log.warning("%s dropped a request: %s; it is sent again", engine.url, words)
                    await asyncio.sleep(self.retry_s)

    async def _confirmed(self, engine: Engine) -> None:
        """An answer that comes during an update may be that of weights which will turn out to be wrong."""
        while engine.state != "live":
            self.live.clear()
            await self.live.wait()

    async def _least_busy(self, give_up: float) -> Engine:
        while True:
            live = [engine for engine in self.engines if engine.state == "live"]
            if live:
                return min(live, key=lambda engine: engine.in_flight)
            self.live.clear()
            try:
                async with asyncio.timeout(max(0.0, give_up - time.monotonic())):
                    await self.live.wait()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"orchestrator waited {self.timeout_s:.0f} s for an engine to become live - "
                    f"{self.describe()}. Look at logs/inference.stdout"
                ) from None

    async def _post_generate(self, engine: Engine, body: bytes) -> _Response:
        engine.in_flight += 1
        self.num_requests += 1
        try:
            async with self.session.post(
                f"{engine.url}/inference/v1/generate", data=body, headers={"Content-Type": "application/json"}
            ) as response:
                data = await response.read()
                if 400 <= response.status < 500:
                    raise ValueError(f"The engine refused a request ({response.status}): {data[:500].decode()}")
                response.raise_for_status()
                return _decode(data)
        finally:
            engine.in_flight -= 1

    async def prompt_logprobs(self, engine: Engine, ids: list[int]) -> list[float]:
        """[T - 1] what this engine says about a prompt, at temperature 1."""
        body = _encode({"token_ids": ids, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "logprobs": 0}})
        response = await self._post_generate(engine, body)
        assert response.prompt_logprobs is not None
        given = response.prompt_logprobs[1:]
        return [(entry or {})[str(token)].logprob for token, entry in zip(ids[1:], given, strict=True)]

    async def post(self, engine: Engine, path: str, body: dict[str, Any] | None = None) -> Any:
        """One of the engine's control routes. Raises PeerDied with its words where it fails."""
        try:
            async with self.session.post(f"{engine.url}/{path}", json=body) as response:
                if response.status >= 400:
                    raise PeerDied(f"{engine.url}/{path} failed ({response.status}): {(await response.text())[:500]}")
                return await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerDied(f"{engine.url}/{path} got no answer: {error or type(error).__name__}") from error

    async def pause(self) -> None:
        """Freezes what is under way; it goes on where it stopped, under whatever weights are there by then."""
        await asyncio.gather(*(self.post(engine, "pause?mode=keep") for engine in self.reachable()))

    async def resume(self) -> None:
        await asyncio.gather(*(self.post(engine, "resume") for engine in self.reachable()))

    def reachable(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.state in ("quarantined", "live")]

    def go_live(self, version: int) -> None:
        """Every reachable engine has confirmed `version`."""
        for engine in self.reachable():
            engine.state, engine.version = "live", version
        self.live.set()

    def quarantine(self) -> None:
        """No new requests until the next `go_live`."""
        for engine in self.reachable():
            engine.state = "quarantined"

    async def wait_until_up(self, deadline_s: float) -> None:
        """Until every engine answers."""
        await asyncio.gather(*(self._until_up(engine, deadline_s) for engine in self.engines))

    async def _until_up(self, engine: Engine, deadline_s: float) -> None:
        with self.waits.waiting(f"{engine.url} to come up", peer="inference", deadline_s=deadline_s) as wait:
            while not await self._is_healthy(engine):
                wait.check()
                await asyncio.sleep(0.25)
        engine.num_workers = await self._world_size(engine, wait)
        engine.state = "quarantined"
        log.info("%s is up after %.0f s", engine.url, wait.waited_s)

    async def _world_size(self, engine: Engine, wait: Wait) -> int:
        async with self.session.get(f"{engine.url}/get_world_size") as response:
            return int((await response.json())["world_size"])

    async def _is_healthy(self, engine: Engine) -> bool:
        """vLLM answers 503 here when its engine core is dead, though its HTTP server still stands."""
        try:
            async with self.session.get(f"{engine.url}/health", timeout=aiohttp.ClientTimeout(5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def watch(self) -> None:
        """Notices engines that die. Produces engine states; waits for the clock; runs until cancelled.

        Raises:
            PeerDied: an engine has not been healthy for a while.
        """
        misses = dict.fromkeys((engine.url for engine in self.engines), 0)
        while True:
            await asyncio.sleep(self.health_interval_s)
            for engine in self.reachable():
                misses[engine.url] = 0 if await self._is_healthy(engine) else misses[engine.url] + 1
                if misses[engine.url] >= HEALTH_MISSES:
                    engine.state = "dead"
                    raise PeerDied(
                        f"{engine.url} has not been healthy for {HEALTH_MISSES * self.health_interval_s:.0f} s. "
                        "Look at logs/inference.stdout"
                    )

    def describe(self) -> str:
        return ", ".join(f"{engine.url} is {engine.state}" for engine in self.engines)


@asynccontextmanager
async def open_inference_pool(
    urls: list[str], *, waits: Waits, max_model_len: int, timeout_s: float, max_concurrent: int
) -> AsyncIterator[InferencePool]:
    connector = aiohttp.TCPConnector(limit=0)  # `max_concurrent` is the limit
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        yield InferencePool(
            engines=[Engine(url) for url in urls],
            session=session,
            waits=waits,
            max_model_len=max_model_len,
            timeout_s=timeout_s,
            places=asyncio.Semaphore(max_concurrent),
        )


def _to_generation(response: _Response) -> Generation:
    choice = response.choices[0]
    versions = [int(span.version) for span in choice.weight_versions for _ in range(span.start, span.end)]
    if len(versions) != len(choice.token_ids):
        raise ValueError(f"The engine gave {len(choice.token_ids)} tokens but versions for {len(versions)}.")
    return Generation(
        ids=choice.token_ids,
        logprobs=[entry.logprob for entry in choice.logprobs.content],
        versions=versions,
        finish_reason=choice.finish_reason,
    )
