"""One vLLM server: its state, and HTTP requests to it. Answers are bounded, redirects are not followed.

Any failure of a control route is a PeerDied with the engine's address and words. The update that it interrupts is
retried once the engine, or its successor, is there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from trireme.base.errors import PeerDied, message_of
from trireme.base.log import RateLimitedLog, get_logger
from trireme.base.network import is_loopback, watched_socket
from trireme.base.token import TOKEN, bearer, token
from trireme.orchestrator.engines.responses import (
    Answer,
    BadAnswer,
    Load,
    WeightInfo,
    WeightReport,
    WorkerAnswer,
    WorldSize,
    read_answer,
)

log = get_logger("engines")
rate_limited = RateLimitedLog(log)

Told = TypeVar("Told", bound=WorkerAnswer)

LARGEST_ANSWER = 64 << 20
"""Bytes of an answer to a control route. Digests of a hundred thousand tensors are a tenth of it."""

KEEP_IDLE_S = 4.0
"""Seconds for which a connection without requests is kept. vLLM closes it after 5 s, and would drop a request just
then."""

HEALTH_TIMEOUT_S, CONNECT_S = 5.0, 3.0

REQUEST_ERRORS = (aiohttp.ClientError, TimeoutError, ConnectionError)
"""Raised by a request that got no whole answer."""


def words_of(answer: bytes) -> str:
    """Return the beginning of an answer, for messages."""
    return answer[:500].decode(errors="replace")


@asynccontextmanager
async def open_engine_session(*, timeout_s: float) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session with the run's token, whose connections to other machines do not outlive a cut cable.

    A whole request has `timeout_s`, unless it sets another timeout.
    """
    connector = aiohttp.TCPConnector(
        limit=0,  # the pool's `max_concurrent` is one
        socket_factory=watched_socket,
        keepalive_timeout=KEEP_IDLE_S,
    )
    async with aiohttp.ClientSession(
        connector=connector,
        headers=bearer(token()) | {"Content-Type": "application/json", "Accept-Encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        auto_decompress=False,  # an answer is bounded as it is sent
    ) as session:
        yield session


@dataclass
class Member:
    """An engine's membership in a run that it joined."""

    id: int  # never given twice in a run
    ticket: str  # the secret of its registration
    facts: dict[str, str]  # those of `config/engine_facts.py`
    since: float = field(default_factory=time.time)
    heard: float = field(default_factory=time.monotonic)  # its last sign of life
    has_beaten: bool = False  # so it knows that it is a member
    keeper: asyncio.Task[None] | None = None  # follows its state


@dataclass
class Engine:
    """One vLLM server. `InferencePool` and `keep_engines` change its state."""

    url: str
    session: aiohttp.ClientSession
    state: Literal["starting", "quarantined", "live"] = "starting"
    version: int | None = None  # the version that it has confirmed
    cached_since: int = 0  # the version at which its caches were emptied last
    num_workers: int = 1  # ranks in the weight group
    num_cores: int = 1  # engine cores, one for each data-parallel replica, each with its share of the workers
    in_flight: int = 0
    in_flight_by_core: Counter[int] = field(default_factory=Counter)
    most_in_flight: int = 0  # since the batch before
    num_prompt: int = 0  # tokens of all prompts whose answers say how many of them were in the prefix cache
    num_cached: int = 0  # tokens of them that were
    load: Load | None = None  # the newest; None if it does not report one
    receives: int | None = None  # version that it is being given
    is_paused: bool = False  # for that version: its requests are frozen
    life: int = 0  # counts up each time that it comes up
    member: Member | None = None  # given if it joined the run (`joined.py`); engines of `hosts.inference` did not
    is_confirmed: bool = False  # it has been live
    is_leaving: bool = False  # it gets no new requests and no new weights
    num_failures: int = 0  # transfers in a row that failed with it
    limits: set[asyncio.Timeout] = field(default_factory=set)  # timeouts of its requests, which expire once it is lost
    suspected: asyncio.Event = field(default_factory=asyncio.Event)  # it dropped a request, or may have been replaced

    @property
    def has_few(self) -> bool:
        """Less than half of the requests that it had: the last ones of a batch leave most of its slots empty."""
        return 2 * self.in_flight < self.most_in_flight

    @property
    def prefix_hit_frac(self) -> float | None:
        """Share of prompts' tokens that were in the prefix cache; None before an answer tells."""
        return self.num_cached / self.num_prompt if self.num_prompt else None

    @property
    def is_newcomer(self) -> bool:
        """Return whether it joined the run and has yet to show that it holds the right weights."""
        return self.member is not None and not self.is_confirmed

    # requests

    async def request(
        self,
        path: str,
        body: bytes | None = None,
        *,
        max_bytes: int = LARGEST_ANSWER,
        timeout: aiohttp.ClientTimeout | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Send a GET request, or a POST request if there is a body. Returns status and answer.

        Cancelling it closes the connection, so that the engine aborts the request.

        Raises:
            BadAnswer: the answer is larger than `max_bytes`.
            REQUEST_ERRORS: there was no whole answer.
        """
        asking = self.session.request(
            "GET" if body is None else "POST",
            f"{self.url}/{path}",
            data=None if body is None else aiohttp.BytesPayload(body),  # otherwise aiohttp looks the type up
            allow_redirects=False,
            timeout=timeout or self.session.timeout,
            headers=headers,
        )
        self.limits.add(limit := asyncio.timeout(None))
        try:
            async with limit, asking as response:
                # Read in pieces, so that an answer without end cannot fill the memory.
                pieces, size = [], 0
                while piece := await response.content.readany():
                    size += len(piece)
                    if size > max_bytes:
                        response.close()
                        raise BadAnswer(f"{self.url}/{path} answered more than {max_bytes} bytes, the most allowed.")
                    pieces.append(piece)
                return response.status, b"".join(pieces)
        finally:
            self.limits.discard(limit)

    async def post(self, path: str, body: dict[str, Any] | None = None, *, returns: Any = Any) -> Any:
        """Call a control route and return its answer, decoded from JSON as a `returns`.

        Raises: PeerDied with the engine's words, or because the answer is no `returns`.
        """
        return await self._call(path, b"" if body is None else msgspec.json.encode(body), returns)

    async def get(self, path: str, *, returns: Any = Any) -> Any:
        """Read a control route, see `post`."""
        return await self._call(path, None, returns)

    async def _call(self, path: str, body: bytes | None, returns: Any) -> Any:
        # uvicorn closes a connection on which a handler has raised, and would drop what is posted there next
        headers = None if body is None else {"Connection": "close"}
        try:
            status, answer = await self.request(path, body, headers=headers)
            if status >= 400:
                raise PeerDied(f"{self.url}/{path} failed ({status}): {words_of(answer)}")
            return read_answer(answer or b"null", returns)
        except (*REQUEST_ERRORS, ValueError) as error:
            self.suspected.set()
            raise PeerDied(f"{self.url}/{path} got no answer: {message_of(error)}") from error

    async def ask_workers(self, method: str, *args: Any, returns: type[Told]) -> list[Told]:
        """Call one of our methods in each of its workers, which answers `returns`, a `WorkerAnswer`.

        Raises: PeerDied if a worker has failed or not answered.
        """
        body = {"method": method} | ({"args": args} if args else {})
        results: list[Told] = (await self.post("collective_rpc", body, returns=Answer[returns])).results  # type: ignore[valid-type]

        # A worker that is missing from the answer must not count as one that agrees.
        if len(results) != self.num_workers:
            raise PeerDied(
                f"{self.url}: {len(results)} workers answered `{method}` - expected {self.num_workers}, as many as "
                "its /get_world_size counts. Look at its log: logs/inference.stdout of a run."
            )
        for number, result in enumerate(results, 1):
            if result.failure is not None:
                worker = f"worker {number} of {self.num_workers}"
                raise PeerDied(f"{self.url}, {worker}, failed `{method}`: {result.failure}")
        return results

    async def weight_version(self) -> str:
        """Return the name of its weights: a version, or "default" before the first update. Raises PeerDied."""
        return str((await self.get("weight_info", returns=WeightInfo)).weight_version)

    async def weight_reports(self) -> list[WeightReport]:
        """Return what each of its workers holds. Raises PeerDied."""
        return await self.ask_workers("trireme_weight_report", returns=WeightReport)

    async def health(self) -> Literal["good", "bad", "gone"]:
        """Return "gone" if nothing listens at its port, or another machine does not even accept connections.

        vLLM answers 503 when its engine core is dead, though its HTTP server still runs.
        """
        url = urlsplit(self.url)
        if not is_loopback(url.hostname or ""):
            # The kernel of a machine accepts connections however busy its server is. An idle one shows a cut late.
            try:
                async with asyncio.timeout(CONNECT_S):
                    _, writer = await asyncio.open_connection(url.hostname, url.port)
                writer.close()
            except (OSError, TimeoutError):
                return "gone"
        try:
            status, _ = await self.request("health", timeout=aiohttp.ClientTimeout(HEALTH_TIMEOUT_S))
            return "good" if status == 200 else "bad"
        except aiohttp.ClientConnectorError:
            return "gone"
        except (*REQUEST_ERRORS, BadAnswer):
            return "bad"

    async def learn_size(self) -> bool:
        """Read how many workers and cores it has. Returns False while it is not up, or refuses our token."""
        if await self.health() == "good":
            with suppress(*REQUEST_ERRORS, ValueError):
                status, answer = await self.request("get_world_size")
                if status == 401:
                    rate_limited.warning("%s returned 401: its %s differs from ours", self.url, TOKEN)
                self.num_workers = read_answer(answer, WorldSize).world_size

                # Without data parallelism, the answer counts the workers of one core.
                _, answer = await self.request("get_world_size?include_dp=false")
                self.num_cores = max(1, self.num_workers // read_answer(answer, WorldSize).world_size)
                return True
        return False
