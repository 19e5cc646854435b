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
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from trireme.base.errors import DeadlineExceeded, PeerDied
from trireme.base.log import get_logger
from trireme.base.network import watched_socket
from trireme.base.token import bearer, token
from trireme.base.waiting import Waits
from trireme.orchestrator.engines.expert_routes import ExpertShape
from trireme.orchestrator.engines.generation import Generation, Reader, Unconfirmed
from trireme.orchestrator.engines.health import is_near
from trireme.orchestrator.engines.responses import (
    BadAnswer,
    Message,
    Response,
    WeightReport,
    prompt_logprobs_of,
    read_message,
    read_response,
    text_of,
    weight_reports_of,
)
from trireme.transport.posts import Posts, open_posts

log = get_logger("engines")

HEALTH_INTERVAL_S = 2.0
RETRY_S = 1.0  # before a request that an engine dropped is sent again
FIRST = -1  # priority, for vLLM: ahead of all requests that wait for a place
KEEP_IDLE_S = 4.0  # a connection without requests: vLLM closes it after 5 s, and a request just then would be dropped

Answer = TypeVar("Answer")


@dataclass
class Engine:
    """One vLLM server."""

    url: str
    state: Literal["starting", "quarantined", "live"] = "starting"
    version: int | None = None  # that it has confirmed
    num_workers: int = 1  # ranks in the weight group
    in_flight: int = 0
    most_in_flight: int = 0  # since the batch before
    receives: int | None = None  # version that it is being given
    is_paused: bool = False  # for it: requests stand still
    is_offered: bool = False  # requests may be sent meanwhile: that version will answer them
    life: int = 0  # counts up each time that it comes up
    suspected: asyncio.Event = field(default_factory=asyncio.Event)  # it dropped a request, or is not who it was

    @property
    def may_be_asked(self) -> bool:
        return self.state == "live" or (self.state == "quarantined" and self.is_offered)

    @property
    def has_few(self) -> bool:
        """Less than half of the requests that it had: the last ones of a batch leave most of its places empty."""
        return 2 * self.in_flight < self.most_in_flight


class OverlongPrompt(Exception):
    """The prompt leaves no room for a single token."""


_encode = msgspec.json.Encoder().encode


def _nobody(engine: Engine) -> None:
    """Watches."""


@dataclass
class InferencePool:
    """All engines of the run."""

    engines: list[Engine]
    session: aiohttp.ClientSession
    posts: Posts  # for what is asked every turn
    waits: Waits
    max_model_len: int
    timeout_s: float
    places: asyncio.Semaphore
    vocab_size: int | None = None  # of the model: an engine that answers with tokens beyond it is not believed
    adapter: str | None = None  # the policy's name in engines that hold it as adapters beside the base model
    experts: ExpertShape | None = None  # of the model, where engines say which of them they use (router replay)
    shares_prefixes: bool = True  # engines may take a prompt's beginning from a request before
    watch: Callable[[Engine], None] = _nobody  # told when an engine's state changes, or whether it has (few) requests
    is_begun: bool = False  # the run has a confirmed version: from then on, engines may stay away for long
    live: asyncio.Event = field(default_factory=asyncio.Event)  # some engine may be asked, or has gone live
    num_requests: int = 0
    interruptions: int = 0  # times that an engine stopped being live: requests may have stood still meanwhile
    retry_s: float = RETRY_S
    health_interval_s: float = HEALTH_INTERVAL_S

    async def generate(self, ids: list[int], sampling: dict[str, Any], *, routes_from: int | None = None) -> Generation:
        """One turn, from whichever live engine has the least to do.

        A request that an engine drops (it died, or was restarted) is sent again, to another or to its successor.

        Args:
            routes_from: with router replay, the token of the prompt from which on it is to be told which experts were
                used; not at all where not given.

        Raises:
            OverlongPrompt: `ids` fills the context.
            ValueError: the engine refuses the request for what it says; trying again would not help.
            DeadlineExceeded: engines were live all the time, and none answered.
        """
        room = self.max_model_len - len(ids)
        if room <= 0:
            raise OverlongPrompt(f"The prompt has {len(ids)} tokens, the model takes {self.max_model_len}.")
        max_tokens = min(room, sampling.get("max_tokens") or room)
        asked = {"logprobs": 0} | sampling | {"max_tokens": max_tokens}
        if self.experts is not None:
            asked["routed_experts_prompt_start"] = len(ids) if routes_from is None else routes_from
        body = _encode({"token_ids": ids, "sampling_params": asked} | self._whom() | self._own_prefix())
        read = Reader(
            max_tokens=max_tokens,
            vocab_size=self.vocab_size,
            with_kept=sampling.get("logprobs", 0) > 0,
            experts=None if routes_from is None else self.experts,
            num_computed=len(ids) - (routes_from or 0),
        )

        async def ask(engine: Engine) -> Generation:
            turn = await self._generate(engine, body, read)
            ran_out = turn.finish_reason == "length" and len(turn.ids) >= max_tokens
            return replace(turn, cut=("context_full" if max_tokens == room else "max_tokens") if ran_out else None)

        async with self.places:
            return await self._until_answered(ask)

    def _whom(self) -> dict[str, str]:
        """A request that names nobody is answered by the base model."""
        return {} if self.adapter is None else {"model": self.adapter}

    def _own_prefix(self) -> dict[str, str]:
        """Where prefixes are not shared, a salt that no other request has."""
        return {} if self.shares_prefixes else {"cache_salt": uuid.uuid4().hex}

    async def parse(self, body: dict[str, Any]) -> Message:
        """A turn as the engine's own parsers of thinking and tool calls read it; `body` is a DerenderChatRequest.

        Raises:
            ValueError: they cannot, and say why.
            DeadlineExceeded: as with `generate`.
        """
        data = _encode(body)

        async def ask(engine: Engine) -> Message:
            status, answer = await self._post(engine, "v1/chat/completions/derender", data)
            if status >= 400:
                raise ValueError(f"The engine could not parse a turn ({status}): {_words(answer)}")
            return read_message(answer)

        return await self._until_answered(ask)

    async def _until_answered(self, ask: Callable[[Engine], Awaitable[Answer]]) -> Answer:
        """Asks an engine, the least busy first, until one does not drop the request."""
        began, interruptions, dropped_at = time.monotonic(), self.interruptions, math.inf
        while True:
            engine = await self._least_busy()
            try:
                return await ask(engine)
            except (aiohttp.ClientError, TimeoutError, ConnectionError, Unconfirmed) as error:
                words = str(error) or type(error).__name__
                if interruptions != self.interruptions:
                    interruptions, dropped_at = self.interruptions, math.inf
                elif isinstance(error, TimeoutError) or time.monotonic() > dropped_at + self.timeout_s:
                    raise DeadlineExceeded(
                        f"orchestrator waited {time.monotonic() - began:.0f} s for {engine.url} to answer a request "
                        f"that it dropped again and again, last: {words}. Look at logs/inference.stdout"
                    ) from error
                log.warning("%s dropped a request: %s; it is sent again", engine.url, words)
                dropped_at = min(dropped_at, time.monotonic())
                engine.suspected.set()
                await asyncio.sleep(self.retry_s)

    async def _generate(self, engine: Engine, body: bytes, read: Reader) -> Generation:
        life = engine.life
        choice = read.choice(await self._post_generate(engine, body))
        await self._until_live(engine, life)  # during an update it may be the answer of weights that are wrong
        return read.generation(choice, newest=engine.version or 0)

    async def _until_live(self, engine: Engine, life: int) -> None:
        """Raises: Unconfirmed where it is gone, or is not who it was."""
        while engine.life == life and engine.state not in ("live", "starting"):
            self.live.clear()
            await self.live.wait()
        if engine.life != life or engine.state != "live":
            raise Unconfirmed("the engine died before it had confirmed the weights that this answer came from")

    async def _least_busy(self) -> Engine:
        """Waits for as long as none may be asked: whoever waits for the batch has the deadline, and says why."""
        while not (askable := [engine for engine in self.engines if engine.may_be_asked]):
            self.live.clear()
            await self.live.wait()
        return min(askable, key=lambda engine: engine.in_flight)

    async def _post_generate(self, engine: Engine, body: bytes) -> Response:
        self._count(engine, 1)
        self.num_requests += 1
        try:
            status, data = await self._post(engine, "inference/v1/generate", body)
        finally:
            self._count(engine, -1)
        if 400 <= status < 500:
            raise ValueError(f"The engine refused a request ({status}): {_words(data)}")
        if status >= 500:
            raise ConnectionError(f"status {status}: {_words(data)}")
        return read_response(data)

    def _count(self, engine: Engine, more: int) -> None:
        """Requests at the engine."""
        before = engine.in_flight > 0, engine.has_few
        engine.in_flight += more
        engine.most_in_flight = max(engine.most_in_flight, engine.in_flight)
        if before != (engine.in_flight > 0, engine.has_few):
            self.watch(engine)

    async def _post(self, engine: Engine, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and answer."""
        if engine.url.startswith("http://"):
            return await self.posts.post(engine.url, path, body)
        headers = {"Content-Type": "application/json"}
        async with self.session.post(f"{engine.url}/{path}", data=body, headers=headers) as response:
            return response.status, await response.read()

    async def prompt_logprobs(self, engine: Engine, ids: list[int]) -> list[float]:
        """[T - 1] what this engine says about a prompt, at temperature 1."""
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "logprobs": 0, "top_k": 1}
        body = _encode({"token_ids": ids, "sampling_params": sampling, "priority": FIRST} | self._whom())
        try:
            return prompt_logprobs_of(await self._post_generate(engine, body), ids)
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
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

    def is_missed(self, engine: Engine) -> bool:
        """A run begins with all of its engines."""
        return engine.life == 0 and not self.is_begun

    def live_engines(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.state == "live"]

    def go_live(self, engine: Engine, version: int) -> None:
        """It has confirmed `version`."""
        engine.state, engine.version, engine.is_offered = "live", version, False
        self.is_begun = True
        self.live.set()
        self.is_given(engine, None)

    def quarantine(self, engine: Engine) -> None:
        """No new requests until it goes live again, or is offered."""
        self.interruptions += engine.state == "live"
        engine.state, engine.version, engine.is_offered = "quarantined", None, False
        self.watch(engine)

    def offer(self, engine: Engine) -> None:
        """It stands still, and new requests may already wait in it: they are answered by the weights that it is given,
        and nobody sees an answer before those are confirmed."""
        engine.is_offered = True
        self.live.set()

    def is_given(self, engine: Engine, version: int | None, *, is_paused: bool = False) -> None:
        """A version, and whether requests stand still meanwhile. None: no more."""
        engine.receives, engine.is_paused = version, is_paused
        self.watch(engine)

    def describe(self) -> str:
        return ", ".join(f"{engine.url} is {engine.state}" for engine in self.engines)


@asynccontextmanager
async def open_inference_pool(
    urls: list[str],
    *,
    waits: Waits,
    max_model_len: int,
    timeout_s: float,
    max_concurrent: int,
    request_timeout_s: float | None = None,
    vocab_size: int | None = None,
    adapter: str | None = None,
    experts: ExpertShape | None = None,
    shares_prefixes: bool = True,
) -> AsyncIterator[InferencePool]:
    """
    Args:
        request_timeout_s: for the answer to a turn, where that may take longer than other answers.
    """
    is_far = not all(map(is_near, urls))
    with open_posts(timeout_s=request_timeout_s or timeout_s, watched=is_far) as posts:
        async with _open_session(urls, timeout_s) as session:
            yield InferencePool(
                engines=[Engine(url) for url in urls],
                session=session,
                posts=posts,
                waits=waits,
                max_model_len=max_model_len,
                timeout_s=timeout_s,
                places=asyncio.Semaphore(max_concurrent),
                vocab_size=vocab_size,
                adapter=adapter,
                experts=experts,
                shares_prefixes=shares_prefixes,
            )


def _open_session(urls: list[str], timeout_s: float) -> aiohttp.ClientSession:
    """With the run's token where there is one; connections to other machines do not outlive a cut cable."""
    watched = None if all(map(is_near, urls)) else watched_socket
    connector = aiohttp.TCPConnector(limit=0, socket_factory=watched, keepalive_timeout=KEEP_IDLE_S)
    return aiohttp.ClientSession(
        connector=connector,  # without a limit: `max_concurrent` is one
        headers=bearer(token()),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
    )


def _words(data: bytes) -> str:
    return data[:500].decode(errors="replace")
