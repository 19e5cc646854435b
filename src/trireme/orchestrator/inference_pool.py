"""The engines: who is alive, who serves which version, and a request to any of them.

An engine is quarantined until it has confirmed the current policy version; a request waits rather than be answered by
weights that nobody has confirmed. An engine that dies is waited for: its requests are sent again, to another one or to
its successor, and its successor starts in quarantine.

    starting  ------>  quarantined  ------>  live
       ^   it answers                confirmed  |
       +----------------------------------------+
         it fell silent, or is another process
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from trireme.base.errors import DeadlineExceeded, PeerDied
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.orchestrator.engine_answers import (
    BadAnswer,
    Choice,
    Response,
    choice_of,
    number_of,
    prompt_logprobs_of,
    read_response,
    text_of,
    weight_reports_of,
)

log = get_logger("engines")

HEALTH_INTERVAL_S = 2.0
HEALTH_MISSES = 5  # in a row, before an engine counts as dead
MOST_WORKERS = 1 << 16
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
    state: Literal["starting", "quarantined", "live"] = "starting"
    version: int | None = None  # that it has confirmed
    num_workers: int = 1  # ranks in the weight group
    in_flight: int = 0
    life: int = 0  # counts up each time that it comes up
    suspected: asyncio.Event = field(default_factory=asyncio.Event)  # it dropped a request, or is not who it was


@dataclass(frozen=True)
class WeightReport:
    """What an engine says that it holds."""

    version: str  # "default" before the first update
    digests: dict[str, str]  # as received by the last update
    incomplete: list[str]  # layers that the last update left with old weights

    def is_version(self, version: int, digests: dict[str, str]) -> bool:
        return self.version == str(version) and self.digests == digests and not self.incomplete


class OverlongPrompt(Exception):
    """The prompt leaves no room for a single token."""


class _Unconfirmed(Exception):
    """An answer by weights that nobody has confirmed: its engine is not the process that it was."""


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
    interruptions: int = 0  # times that an engine stopped being live: requests may have stood still meanwhile
    retry_s: float = RETRY_S
    health_interval_s: float = HEALTH_INTERVAL_S

    async def generate(self, ids: list[int], sampling: dict[str, Any]) -> Generation:
        """One turn, from whichever live engine has the least to do.

        A request that an engine drops (it died, or was restarted) is sent again, to another or to its successor.

        Raises:
            OverlongPrompt: `ids` fills the context.
            ValueError: the engine refuses the request for what it says; trying again would not help.
            DeadlineExceeded: engines were live all the time, and none answered.
        """
        room = self.max_model_len - len(ids)
        if room <= 0:
            raise OverlongPrompt(f"The prompt has {len(ids)} tokens, the model takes {self.max_model_len}.")
        sampling = sampling | {"max_tokens": min(room, sampling.get("max_tokens") or room), "logprobs": 0}
        body = _encode({"token_ids": ids, "sampling_params": sampling})
        interruptions, give_up = self.interruptions, time.monotonic() + self.timeout_s
        async with self.places:
            while True:
                engine = await self._least_busy()
                try:
                    return await self._generate(engine, body, sampling["max_tokens"])
                except (aiohttp.ClientError, TimeoutError, ConnectionError, _Unconfirmed) as error:
                    words = str(error) or type(error).__name__
                    if interruptions != self.interruptions:
                        interruptions, give_up = self.interruptions, time.monotonic() + self.timeout_s
                    elif time.monotonic() > give_up:
                        raise DeadlineExceeded(
                            f"orchestrator waited {self.timeout_s:.0f} s for {engine.url} to answer a request that it "
                            f"dropped again and again, last: {words}. Look at logs/inference.stdout"
                        ) from error
                    log.warning("%s dropped a request: %s; it is sent again", engine.url, words)
                    engine.suspected.set()
                    await asyncio.sleep(self.retry_s)

    async def _generate(self, engine: Engine, body: bytes, max_tokens: int) -> Generation:
        life = engine.life
        choice = choice_of(await self._post_generate(engine, body), max_tokens=max_tokens)
        await self._until_live(engine)  # during an update it may be the answer of weights that turn out to be wrong
        if engine.life != life:
            raise _Unconfirmed("the engine died before it had confirmed the weights that this answer came from")
        return _to_generation(choice, newest=engine.version or 0)

    async def _until_live(self, engine: Engine) -> None:
        while engine.state != "live":
            self.live.clear()
            await self.live.wait()

    async def _least_busy(self) -> Engine:
        """Waits for as long as no engine is live: whoever waits for the batch has the deadline, and says why."""
        while not (live := self.live_engines()):
            self.live.clear()
            await self.live.wait()
        return min(live, key=lambda engine: engine.in_flight)

    async def _post_generate(self, engine: Engine, body: bytes) -> Response:
        engine.in_flight += 1
        self.num_requests += 1
        try:
            async with self.session.post(
                f"{engine.url}/inference/v1/generate", data=body, headers={"Content-Type": "application/json"}
            ) as response:
                data = await response.read()
                if 400 <= response.status < 500:
                    words = data[:500].decode(errors="replace")
                    raise ValueError(f"The engine refused a request ({response.status}): {words}")
                response.raise_for_status()
                return read_response(data)
        finally:
            engine.in_flight -= 1

    async def prompt_logprobs(self, engine: Engine, ids: list[int]) -> list[float]:
        """[T - 1] what this engine says about a prompt, at temperature 1."""
        body = _encode({"token_ids": ids, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "logprobs": 0}})
        try:
            return prompt_logprobs_of(await self._post_generate(engine, body), ids)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise PeerDied(f"{engine.url} did not answer the probe: {error or type(error).__name__}") from error

    async def post(self, engine: Engine, path: str, body: dict[str, Any] | None = None) -> Any:
        """One of the engine's control routes. Raises PeerDied with its words where it fails."""
        try:
            async with self.session.post(f"{engine.url}/{path}", json=body) as response:
                if response.status >= 400:
                    raise PeerDied(f"{engine.url}/{path} failed ({response.status}): {(await response.text())[:500]}")
                return await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            engine.suspected.set()
            raise PeerDied(f"{engine.url}/{path} got no answer: {error or type(error).__name__}") from error

    async def report(self, engine: Engine) -> WeightReport:
        """What it holds, from its first worker: after an update all of them are compared."""
        try:
            async with self.session.get(f"{engine.url}/weight_info") as response:
                version = text_of(await response.json(), "weight_version")
            digests, incomplete = (await self.worker_reports(engine))[0]
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            raise PeerDied(f"{engine.url}/weight_info got no answer: {error or type(error).__name__}") from error
        return WeightReport(version, digests, incomplete)

    async def worker_reports(self, engine: Engine) -> list[tuple[dict[str, str], list[str]]]:
        """Digests and incomplete layers of each of its workers. Raises PeerDied where any is missing."""
        answer = await self.post(engine, "collective_rpc", {"method": "trireme_weight_report"})
        try:
            return weight_reports_of(answer, num_workers=engine.num_workers)
        except BadAnswer as error:
            raise PeerDied(f"{engine.url}: {error}") from error

    def reachable(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.state != "starting"]

    def live_engines(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.state == "live"]

    def go_live(self, engine: Engine, version: int) -> None:
        """It has confirmed `version`."""
        engine.state, engine.version = "live", version
        self.live.set()

    def quarantine(self, engine: Engine) -> None:
        """No new requests until it goes live again."""
        self.interruptions += engine.state == "live"
        engine.state, engine.version = "quarantined", None

    async def keep(self, judge: Callable[[Engine], Awaitable[bool]], *, start_timeout_s: float) -> None:
        """Knows at any time who is there. Runs until cancelled.

        Args:
            judge: whether an engine that has come up goes live as it is (and has gone); else it is put in quarantine.

        Raises:
            DeadlineExceeded: an engine did not come up (again).
        """
        async with asyncio.TaskGroup() as keepers:
            for engine in self.engines:
                keepers.create_task(self._keep(engine, judge, start_timeout_s))

    async def _keep(self, engine: Engine, judge: Callable[[Engine], Awaitable[bool]], start_timeout_s: float) -> None:
        """Produces the engine's state; waits for the clock, or for a request that it dropped."""
        while True:
            await self._until_up(engine, start_timeout_s)
            try:
                if not await judge(engine):
                    engine.state = "quarantined"
            except PeerDied as error:
                log.warning("%s came up and went: %s", engine.url, error)
                continue
            await self._until_gone(engine)
            self.quarantine(engine)
            engine.state = "starting"

    async def _until_up(self, engine: Engine, deadline_s: float) -> None:
        with self.waits.waiting(f"{engine.url} to come up", peer="inference", deadline_s=deadline_s) as wait:
            while (num_workers := await self._world_size(engine)) is None:
                wait.check()
                await asyncio.sleep(0.25)
        engine.num_workers = num_workers
        engine.suspected.clear()
        engine.life += 1
        log.info("%s is up after %.0f s", engine.url, wait.waited_s)

    async def _world_size(self, engine: Engine) -> int | None:
        """None while it is not there."""
        if not await self._is_healthy(engine):
            return None
        with suppress(aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
            async with self.session.get(f"{engine.url}/get_world_size") as response:
                return number_of(await response.json(), "world_size", low=1, high=MOST_WORKERS)
        return None

    async def _until_gone(self, engine: Engine) -> None:
        """Until it has not been healthy for a while, or another process has taken its place."""
        misses = 0
        while misses < HEALTH_MISSES:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.health_interval_s):
                    await engine.suspected.wait()
            engine.suspected.clear()
            if not await self._is_healthy(engine):
                misses += 1
                if not await self._is_listening(engine):
                    break
            elif await self._is_another(engine):
                log.warning("%s is not the process that it was: it has lost its weights", engine.url)
                return
            else:
                misses = 0
        log.warning("%s is gone: it is waited for, and its requests are sent again", engine.url)

    async def _is_healthy(self, engine: Engine) -> bool:
        """vLLM answers 503 here when its engine core is dead, though its HTTP server still stands."""
        try:
            async with self.session.get(f"{engine.url}/health", timeout=aiohttp.ClientTimeout(5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _is_listening(self, engine: Engine) -> bool:
        """Whether there is anything at its port."""
        try:
            async with self.session.get(f"{engine.url}/health", timeout=aiohttp.ClientTimeout(5)):
                return True
        except aiohttp.ClientConnectorError:
            return False
        except (aiohttp.ClientError, TimeoutError):
            return True

    async def _is_another(self, engine: Engine) -> bool:
        """A successor that came up between two looks: it is live by our books, and has never been given our version."""
        if engine.state != "live":
            return False
        before = engine.life, engine.version
        try:
            timeout = aiohttp.ClientTimeout(5)
            async with self.session.get(f"{engine.url}/weight_info", timeout=timeout) as response:
                version = text_of(await response.json(), "weight_version")
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
            return False  # busy, or going: `_is_healthy` will tell
        is_as_before = engine.state == "live" and before == (engine.life, engine.version)
        return is_as_before and version != str(engine.version)

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


def _to_generation(choice: Choice, *, newest: int) -> Generation:
    """Raises _Unconfirmed where a token was sampled by weights that were never confirmed to us."""
    spans = choice.weight_versions
    strange = [span.version for span in spans if not _is_version(span.version, newest)]
    if strange:
        raise _Unconfirmed(f"it sampled under version {strange[0][:40]!r}, known is {newest}")
    return Generation(
        ids=choice.token_ids,
        logprobs=[entry.logprob for entry in choice.logprobs.content],
        versions=[int(span.version) for span in spans for _ in range(span.start, span.end)],
        finish_reason=choice.finish_reason,
    )


def _is_version(text: str, newest: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 19 and int(text) <= newest
