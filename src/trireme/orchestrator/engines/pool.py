"""The engines of a run: which may be asked, and a request to one of them, retried until it is answered.

An engine is quarantined until it has confirmed the current policy version, and a request waits rather than be answered
by unconfirmed weights. A request that an engine drops (it died, or was restarted) is retried with another engine, or
with its successor, which starts in quarantine.

    starting  ------>  quarantined  ------>  live
       ^   it answers                confirmed  |
       +----------------------------------------+
         it died, or is another process
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import msgspec

from trireme.algo.pictures import collapse
from trireme.base.errors import DeadlineExceeded, EngineRefused, PeerDied, message_of
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.inference import KeepPrefixCache
from trireme.config.sampling import is_cut
from trireme.journal.model_turn import Turn
from trireme.messages import Picture
from trireme.orchestrator.engines.affinity import Affinity, Place, prefix_hashes
from trireme.orchestrator.engines.engine import (
    LARGEST_ANSWER,
    REQUEST_ERRORS,
    Engine,
    Member,
    open_engine_session,
    words_of,
)
from trireme.orchestrator.engines.expert_routes import ExpertShape
from trireme.orchestrator.engines.generation import Unconfirmed, largest_answer, read_turn
from trireme.orchestrator.engines.responses import (
    Parsed,
    ParsedMessage,
    Response,
    check_prompt,
    choice_of,
    prompt_logprobs_of,
    read_answer,
    read_choice,
)
from trireme.orchestrator.engines.window import Window

log = get_logger("engines")

OF_PROMPT = {"max_tokens": 1, "prompt_logprobs": 0, "logprobs": 0, "top_k": 1}
"""Sampling parameters of a request for the logprobs of its prompt, at temperature 1."""

FIRST = -1  # priority, for vLLM: ahead of all requests that wait for a slot

Answer = TypeVar("Answer")


class PromptTooLong(Exception):
    """The prompt leaves no room for a single token."""


class RequestRefused(ValueError):
    """An engine refused a request, with the status that it gave."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"The engine refused a request ({status}): {words}")
        self.status = status


@dataclass
class InferencePool:
    """All engines of the run."""

    engines: list[Engine]
    session: aiohttp.ClientSession
    waits: Waits
    max_model_len: int
    timeout_s: float
    slots: asyncio.Semaphore  # requests for turns at once
    request_timeout: aiohttp.ClientTimeout  # timeout of a request for a turn
    vocab_size: int | None = None  # size of the model's vocabulary: an answer with a token beyond it is rejected
    adapter: str | None = None  # the policy's name in engines that hold it as adapters on the base model
    experts: ExpertShape | None = None  # sizes of the model, if engines report which experts they use (router replay)
    keeps_top_logprobs: bool = False  # turns have the logprobs of the likeliest tokens, for the loss
    shares_prefixes: bool = True  # engines may reuse a prompt's beginning from an earlier request
    keep_prefix_cache: KeepPrefixCache = "never"  # caches that outlive an update
    affinity: Affinity = field(default_factory=Affinity)
    # called when the state of an engine, or whether it has (few) requests, changes
    watch: Callable[[Engine], None] = lambda engine: None
    # called to send an engine away that joined, with the reason
    expel: Callable[[Engine, str], None] = lambda engine, reason: None
    is_begun: bool = False  # the run has a confirmed version: from then on, engines may stay away for long
    live: asyncio.Event = field(default_factory=asyncio.Event)  # set when some engine may be asked, or has gone live
    num_requests: int = 0
    interruptions: int = 0  # times that an engine stopped being live: requests may have been frozen meanwhile
    retry_s: float = 1.0  # before a request that an engine dropped is retried
    health_interval_s: float = 2.0

    def __post_init__(self) -> None:
        self.window = Window(self.live_engines, self.waits, self.max_model_len, lambda: self.affinity.token_s)

    # requests

    async def generate(
        self,
        ids: list[int],
        sampling: dict[str, Any],
        *,
        pictures: Sequence[Picture] = (),
        content_parts: Sequence[dict[str, str]] = (),
        routes_from: int | None = None,
        since: int | None = None,
    ) -> Turn:
        """Generate one turn with the live engine that will answer it soonest (`affinity`).

        Args:
            pictures: in `ids`.
            content_parts: the pictures themselves, in the same order, as vLLM's route takes them.
            routes_from: with router replay, the first token of the prompt whose experts the engine has to report;
                it reports none if this is None.
            since: the oldest version that the conversation has attended to; None if this is its first turn.

        Raises:
            PromptTooLong: `ids` fills the context.
            ValueError: the engine refuses the request, or its answer makes no sense; a retry would not help.
            DeadlineExceeded: engines were live all the time, and none answered.
        """
        room = self.max_model_len - len(ids)
        if room <= 0:
            raise PromptTooLong(f"The prompt has {len(ids)} tokens, the model takes {self.max_model_len}.")

        # The limit never exceeds the context, so the engine answers `length` for both limits. `cut` below tells which.
        max_tokens = min(room, sampling.get("max_tokens") or room)
        params = {"logprobs": 0} | sampling | {"max_tokens": max_tokens}

        # The routes of a prompt are long: the engine reports only those that the sample still lacks.
        if self.experts is not None:
            params["routed_experts_prompt_start"] = len(ids) if routes_from is None else routes_from
        request: dict[str, Any] = {"token_ids": ids, "sampling_params": params} | self._model()
        if pictures:
            short = with_placeholders(ids, pictures)
            request |= {"token_ids": short, "content_parts": content_parts, "return_token_ids": True}

        # A salt of its own keeps the request from using cached beginnings of other prompts.
        if not self.shares_prefixes:
            request["cache_salt"] = uuid.uuid4().hex

        max_bytes = largest_answer(
            num_prompt=len(ids), max_tokens=max_tokens, num_kept=params["logprobs"], experts=self.experts
        )

        # With one core there is nothing to choose, except which of its caches to read.
        keeps, reads_older = self.keep_prefix_cache != "never", self.keep_prefix_cache == "always"
        has_choice = reads_older or len(self.engines) != 1 or self.engines[0].num_cores > 1
        hashes = prefix_hashes(ids) if self.shares_prefixes and has_choice else []

        async def ask(place: Place) -> Turn:
            engine, life, version = place.engine, place.engine.life, place.engine.version or 0
            if keeps and self.shares_prefixes:
                request["cache_salt"] = str(place.salt)
            body = msgspec.json.encode(request)
            began, load = time.monotonic(), self.affinity.send(place, hashes) if has_choice else 1
            response = await self.post_generate(engine, body, max_bytes=max_bytes, core=place.core)
            seconds = time.monotonic() - began
            if pictures:
                check_prompt(response, ids)
            choice = choice_of(response, max_tokens=max_tokens, vocab_size=self.vocab_size)

            # The turn counts only if its weights are confirmed, so a turn that an update met waits for the end of it.
            while engine.life == life and engine.state not in ("live", "starting"):
                self.live.clear()  # an update is under way, whose weights may turn out to be wrong
                await self.live.wait()
            if engine.life != life or engine.state != "live":
                raise Unconfirmed("the engine died before it had confirmed the weights that this answer came from")
            turn = read_turn(
                choice,
                newest=engine.version or 0,
                vocab_size=self.vocab_size,
                is_cut=params["logprobs"] > 0 and is_cut(params),
                num_top=params["logprobs"] if self.keeps_top_logprobs else 0,
                experts=None if routes_from is None else self.experts,
                num_computed=len(ids) - (routes_from or 0),
                num_prompt=len(ids),
                num_cached=response.num_cached,
                cached_since=engine.cached_since,
            )

            # What the request read, and what it computed itself: its prompt, perhaps before an update, and its tokens.
            if keeps:
                read = [] if response.num_cached == 0 else [place.salt]
                turn.oldest = min(version, *turn.versions[:1], *read)

            if response.num_cached is not None:
                engine.num_prompt += len(ids)
                engine.num_cached += response.num_cached
            self.affinity.learn(place, hashes, ids, turn, response, seconds=seconds, load=load)
            return turn

        async with self.slots:
            turn = await self._retry(ask, hashes, len(ids), since if reads_older else None)

        # vLLM says `length` for both limits.
        if turn.finish_reason == "length" and len(turn.ids) >= max_tokens:
            turn.cut = "context_full" if max_tokens == room else "max_tokens"
        return turn

    def _model(self) -> dict[str, str]:
        """The field of a request that names the policy. Without it, the base model answers."""
        return {} if self.adapter is None else {"model": self.adapter}

    async def parse(self, body: dict[str, Any]) -> ParsedMessage:
        """Parse thinking and tool calls of a turn with the engine's own parsers, by a DerenderChatRequest of vLLM.

        Raises:
            ValueError: they cannot, and say why.
            DeadlineExceeded: as with `generate`.
        """
        data = msgspec.json.encode(body)

        async def ask(place: Place) -> ParsedMessage:
            engine = place.engine
            status, answer = await engine.request("v1/chat/completions/derender", data, timeout=self.request_timeout)
            if status >= 400:
                raise ValueError(f"The engine could not parse a turn ({status}): {words_of(answer)}")
            return read_choice(answer, Parsed).message

        return await self._retry(ask)

    async def score(self, ids: list[int]) -> list[float]:
        """Return [T - 1] logprobs of a prompt by a live engine. Raises: as `generate`."""
        body = msgspec.json.encode({"token_ids": ids, "sampling_params": OF_PROMPT} | self._model())

        async def ask(place: Place) -> list[float]:
            return prompt_logprobs_of(await self.post_generate(place.engine, body, core=place.core), ids)

        return await self._retry(ask, num_tokens=len(ids))

    async def prompt_logprobs(self, engine: Engine, ids: list[int], *, core: int = 0) -> list[float]:
        """Return [T - 1] logprobs of a prompt by this core of an engine, at temperature 1.

        Raises:
            EngineRefused: with the engine's words, if it takes the request for invalid.
            PeerDied: it did not answer.
        """
        body = msgspec.json.encode({"token_ids": ids, "sampling_params": OF_PROMPT, "priority": FIRST} | self._model())
        try:  # each core holds its own copy of the weights, so each is probed by itself
            return prompt_logprobs_of(await self.post_generate(engine, body, core=core), ids)
        except RequestRefused as error:
            if error.status != 400:  # a successor may answer so that was not given the policy's name yet
                raise PeerDied(f"{engine.url} did not answer the probe: {error}") from error
            raise EngineRefused(
                f"{engine.url} refused the probe, a prompt of {len(ids)} tokens by which it shows that it has the "
                f"trainer's weights - expected their logprobs. {error}. Correct what the engine names, such as "
                "`inference.model.max_model_len` or an entry of `[inference.args]`."
            ) from error
        except (*REQUEST_ERRORS, ValueError) as error:
            raise PeerDied(f"{engine.url} did not answer the probe: {message_of(error)}") from error

    async def _retry(
        self,
        ask: Callable[[Place], Awaitable[Answer]],
        hashes: Sequence[int] = (),
        num_tokens: int = 0,
        since: int | None = None,
    ) -> Answer:
        """Ask a live engine, until one does not drop the request. `Affinity.choose` has the arguments.

        Waits without a deadline while no engine may be asked. The wait for the batch has one, and says why.
        """
        # The deadline runs from the first drop on. An engine that stopped being live explains a drop, and restarts it.
        began, interruptions, dropped_at = time.monotonic(), self.interruptions, math.inf

        while True:
            while not (askable := self.live_engines()):
                self.live.clear()
                await self.live.wait()

            place = self.affinity.choose(askable, hashes, num_tokens, since)
            engine = place.engine
            try:
                return await ask(place)
            except (*REQUEST_ERRORS, Unconfirmed) as error:
                words = message_of(error)
                if interruptions != self.interruptions:
                    interruptions, dropped_at = self.interruptions, math.inf
                elif isinstance(error, TimeoutError) or time.monotonic() > dropped_at + self.timeout_s:
                    raise DeadlineExceeded(
                        f"orchestrator waited {time.monotonic() - began:.0f} s for {engine.url} to answer a request "
                        f"that it dropped again and again, last: {words}. Look at logs/inference.stdout"
                    ) from error

                log.warning("%s dropped a request: %s; retrying", engine.url, words)
                dropped_at = min(dropped_at, time.monotonic())
                # Wakes the health check, which finds out whether the engine is still there.
                engine.suspected.set()
                await asyncio.sleep(self.retry_s)

    async def post_generate(
        self,
        engine: Engine,
        body: bytes,
        *,
        max_bytes: int = LARGEST_ANSWER,
        core: int = 0,
    ) -> Response:
        """Send one request for tokens to this core of an engine."""
        headers = {"X-data-parallel-rank": str(core)} if engine.num_cores > 1 else None
        self.count(engine, 1)
        engine.in_flight_by_core[core] += 1
        self.num_requests += 1
        try:
            status, data = await engine.request(
                "inference/v1/generate", body, timeout=self.request_timeout, max_bytes=max_bytes, headers=headers
            )
        finally:
            self.count(engine, -1)
            engine.in_flight_by_core[core] -= 1

        # A refusal is not retried, because every engine would repeat it. Any other failure is.
        if 400 <= status < 500:
            raise RequestRefused(status, words_of(data))
        if status != 200:
            raise ConnectionError(f"status {status}: {words_of(data)}")
        return read_answer(data, Response)

    def count(self, engine: Engine, more: int) -> None:
        """Count requests at the engine."""
        before = engine.in_flight > 0, engine.has_few
        engine.in_flight += more
        engine.most_in_flight = max(engine.most_in_flight, engine.in_flight)
        if before != (engine.in_flight > 0, engine.has_few):
            self.watch(engine)

    # which engines there are

    def reachable(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.state != "starting" and not engine.is_leaving]

    def is_missed(self, engine: Engine) -> bool:
        """Return whether the run cannot begin without this engine: it begins with all of `hosts.inference`."""
        return engine.life == 0 and not self.is_begun and engine.member is None

    def live_engines(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.state == "live" and not engine.is_leaving]

    def describe(self) -> str:
        return ", ".join(f"{engine.url} is {engine.state}" for engine in self.engines) or "none has joined yet"

    def add(self, url: str, member: Member) -> Engine:
        """Add an engine that has joined."""
        self.engines.append(engine := Engine(url, self.session, member=member))
        self.watch(engine)
        return engine

    def remove(self, engine: Engine) -> None:
        """Forget an engine that joined."""
        self.engines.remove(engine)
        self.lose(engine)

    # changes of an engine's state

    def go_live(self, engine: Engine, version: int, *, keeps_caches: bool = False) -> None:
        """Send requests to an engine that has confirmed `version`. Its caches were emptied, unless it keeps them."""
        engine.state, engine.version = "live", version
        engine.cached_since = engine.cached_since if keeps_caches else version
        engine.is_confirmed, engine.num_failures = True, 0
        self.is_begun = True
        self.live.set()
        self.window.engines_changed()
        self.is_given(engine, None)

    def quarantine(self, engine: Engine) -> None:
        """Send no new requests until the engine goes live again."""
        self.interruptions += engine.state == "live"
        engine.state, engine.version = "quarantined", None
        self.window.engines_changed()
        self.watch(engine)

    def lose(self, engine: Engine) -> None:
        """End all requests to an engine that is gone, most of which go to others: a cut cable breaks no connection for
        a while."""
        self.interruptions += 1  # restarts the deadline of these requests
        engine.state, engine.version = "starting", None
        self.window.engines_changed()
        self.is_given(engine, None)
        limits, engine.limits = engine.limits, set()
        for limit in limits:
            limit.reschedule(0)
        self.live.set()

    def is_given(self, engine: Engine, version: int | None, *, is_paused: bool = False) -> None:
        """Note that the engine is being given a version, and whether it is paused meanwhile; None: no more."""
        engine.receives, engine.is_paused = version, is_paused
        self.watch(engine)


@asynccontextmanager
async def open_inference_pool(
    urls: list[str], *, timeout_s: float, max_concurrent: int, request_timeout_s: float | None = None, **others: Any
) -> AsyncIterator[InferencePool]:
    """
    Args:
        request_timeout_s: for the answer to a turn, if that may take longer than other answers.
        others: further fields of `InferencePool`.
    """
    async with open_engine_session(timeout_s=timeout_s) as session:
        yield InferencePool(
            engines=[Engine(url, session) for url in urls],
            session=session,
            timeout_s=timeout_s,
            slots=asyncio.Semaphore(max_concurrent),
            request_timeout=aiohttp.ClientTimeout(total=request_timeout_s or timeout_s),
            **others,
        )


def with_placeholders(ids: list[int], pictures: Sequence[Picture]) -> list[int]:
    """Return a prompt with one token for each picture, as an engine takes it.

    Raises: ValueError if there is another such token, which the engine might take for a picture's. vLLM's server
        ends if one is missing.
    """
    short, token = collapse(ids, pictures), ids[pictures[0].place]
    if (found := short.count(token)) != len(pictures):
        raise ValueError(
            f"a prompt with {len(pictures)} pictures and {found} placeholders (token {token}) - expected as many. The "
            "model sampled one, or a text contains it."
        )
    return short
