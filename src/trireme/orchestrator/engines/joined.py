"""Engines that join a running run and leave it: the orchestrator's answers to `inference --join`.

engine                          orchestrator
  GetTerms         ------>        makes a ticket
  <--------------   Terms
  Join(ticket)     ------>        compares its facts with the run's, and gives it a number that no other engine gets
  <--------------  Joined         waits for its server
  Beat, each second ----->        the first one spends the ticket
                                  quarantine, the newest version in a transfer of its own, live: as after a restart
  Leave            ------>        gives it no new requests; those under way are answered, or go to other engines
  <---------- NotYet, Ok          forgets it

A member whose server does not answer and that is silent for `SILENT_S` is forgotten too. If it comes back, as after a
cut cable, it is told to join again. So are all members after a restart of the orchestrator: their servers serve on, and
are live at once if they hold the newest version.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from urllib.parse import urlsplit

from trireme.base.disk import when_there_is_room
from trireme.base.errors import DeadlineExceeded
from trireme.base.log import get_logger
from trireme.base.network import is_loopback
from trireme.base.paths import atomic_write
from trireme.base.token import is_same, token
from trireme.config.engine_facts import conflict_of, engine_facts, terms_of
from trireme.config.run import RunConfig
from trireme.messages import (
    Again,
    Beat,
    Dismissed,
    GetTerms,
    Join,
    Joined,
    Leave,
    Membership,
    NotYet,
    Ok,
    Refusal,
    Reply,
    Terms,
)
from trireme.orchestrator.engines.engine import Engine, Member
from trireme.orchestrator.engines.health import POLL_S, Admit, keep_engine
from trireme.orchestrator.engines.pool import InferencePool

log = get_logger("engines")

SILENT_S = 30.0  # a member that neither beats nor answers for so long has gone
MOST_TICKETS = 1024  # most engines that have their terms and have not registered yet
FAREWELL_S = 5.0  # the longest wait at the end for members to hear that the run is over


class JoinedEngines:
    """The members of a run.

    Produces: engines in the pool. Waits for: requests of engines, and their silence. Wakes: the requests for tokens
    that wait for an engine.
    """

    def __init__(self, config: RunConfig, pool: InferencePool, admit: Admit) -> None:
        self._config, self._pool, self._admit = config, pool, admit
        self._engines: dict[int, Engine] = {}  # engines by the numbers of members
        self._tickets: list[str] = []  # tickets of no member yet
        self._dismissed: dict[int, str] = {}  # members that were sent away, and why
        self._joining = asyncio.Lock()
        self._is_over = False
        pool.expel = self.expel

    async def run(self) -> None:
        """Follow the state of each member until cancelled. Raises: DeadlineExceeded if the run has no engine."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._require_engine())
            while True:
                await asyncio.sleep(POLL_S)
                for id, engine in list(self._engines.items()):
                    if engine.state == "starting" and time.monotonic() - _member(engine).heard > SILENT_S:
                        log.warning("engine %d at %s has been silent for %.0f s: forgotten", id, engine.url, SILENT_S)
                        self._forget(engine)

    async def _require_engine(self) -> None:
        """Wait for an engine, with a deadline, whenever the run has none that is to come back by itself."""
        pool, deadline_s = self._pool, self._config.hosts.join_timeout_s
        while True:
            if not pool.reachable() and all(engine.member for engine in pool.engines):
                # The trainer waits as long, so this counts as work with a deadline of its own.
                waiting = pool.waits.waiting("an engine to join", peer="inference", deadline_s=deadline_s)
                with pool.waits.busy(), waiting as wait:
                    while not pool.reachable():
                        wait.note = pool.describe()
                        wait.check()
                        await asyncio.sleep(POLL_S)
            await asyncio.sleep(POLL_S)

    async def dismiss(self) -> None:
        """Tell all members that the run is over."""
        self._is_over = True
        give_up_at = time.monotonic() + FAREWELL_S
        while self._engines and time.monotonic() < give_up_at:
            await asyncio.sleep(POLL_S)

    def expel(self, engine: Engine, reason: str) -> None:
        """Send a member away for good; the run goes on."""
        id = _member(engine).id
        if id in self._engines:
            log.error("engine %d at %s is sent away: %s", id, engine.url, reason)
            self._dismissed[id] = reason
            self._forget(engine)

    def _forget(self, engine: Engine) -> None:
        del self._engines[_member(engine).id]
        self._pool.remove(engine)
        if keeper := _member(engine).keeper:
            keeper.cancel()

    # requests of engines

    async def answer(self, request: Membership) -> Reply:
        match request:
            case GetTerms():
                self._tickets = [*self._tickets[1 - MOST_TICKETS :], secrets.token_hex(16)]
                return Terms(run=terms_of(self._config), ticket=self._tickets[-1])
            case Join():
                async with self._joining:  # a request that is sent again waits for the answer to the first
                    return await self._join(request)
            case Beat():
                return self._beat(request)
            case Leave():
                return await self._leave(request)

    async def _join(self, request: Join) -> Reply:
        # The reply may have been lost: until the engine beats, the same request gets the same answer.
        for id, engine in self._engines.items():
            member = _member(engine)
            if not member.has_beaten and is_same(member.ticket, request.ticket) and engine.url == request.url:
                return Joined(member=id)
        if request.ticket not in self._tickets:
            reason = "its ticket was used before, or is not of this run - expected a new one. Join again."
            log.warning("a registration of %s was refused: %s", request.url, reason)
            return Again(reason=reason)
        self._tickets.remove(request.ticket)
        if problem := await self._problem(request):
            log.warning("the engine at %s was refused: %s", request.url, problem)
            return Refusal(error=problem)

        # A process that had this port before is gone.
        for engine in [each for each in self._engines.values() if each.url == request.url]:
            self._forget(engine)
        member = Member(await self._take_number(), request.ticket, request.facts)
        self._engines[member.id] = engine = self._pool.add(request.url, member)
        member.keeper = self._tasks.create_task(self._keep(engine))
        log.info("engine %d at %s has joined", member.id, engine.url)
        return Joined(member=member.id)

    async def _problem(self, request: Join) -> str | None:
        """Return why an engine may not join, or None."""
        if self._is_over:
            return "the run is over - expected one that still trains. Join another run."
        if self._config.weight_broadcast.type == "ipc":
            return (
                'this run sends weights within one GPU (weight_broadcast.type = "ipc") - expected a way to other '
                'engines. Start the run with `weight_broadcast.type = "nccl"`, on more than one GPU.'
            )
        if request.url in self._config.engine_urls:
            return f"{request.url} is named by `hosts.inference` - expected another address. Start it without `--join`."
        if token() is None and not is_loopback(urlsplit(request.url).hostname or ""):
            return f"this run has no token, and {request.url} is on another machine - expected one. See docs/hosts.md."
        facts = await asyncio.to_thread(engine_facts, self._config)  # reads the model's files
        return conflict_of(facts, request.facts)

    async def _take_number(self) -> int:
        """Return a number that is on disk as taken: no other engine of the run ever gets it."""
        file = self._config.paths.journal / "engines_joined"
        number = 1 + (int(file.read_text()) if file.exists() else 0)

        def write() -> None:
            with atomic_write(file) as out:
                out.write(b"%d\n" % number)

        await asyncio.to_thread(
            when_there_is_room,
            write,
            what="the number of an engine",
            folder=file.parent,
            waits=self._pool.waits,
            deadline_s=self._config.disk_timeout_s,
        )
        return number

    async def _keep(self, engine: Engine) -> None:
        try:
            await keep_engine(self._pool, engine, self._admit, self._config.inference.start_timeout_s)
        except DeadlineExceeded as error:
            self.expel(engine, str(error))

    def _beat(self, request: Beat) -> Reply:
        engine = self._engine_of(request)
        if self._is_over or request.member in self._dismissed:
            if engine is not None:
                self._forget(engine)
            reason = "the run is over" if self._is_over else self._dismissed[request.member]
            return Dismissed(reason=reason, is_over=self._is_over)
        if engine is None:
            return Again(reason=f"the orchestrator was restarted, or has not heard this engine for {SILENT_S:.0f} s")
        _member(engine).heard, _member(engine).has_beaten = time.monotonic(), True
        return Ok()

    async def _leave(self, request: Leave) -> Reply:
        if (engine := self._engine_of(request)) is None:
            return Ok()
        if not engine.is_leaving:
            log.info("engine %d at %s leaves, with %d requests", request.member, engine.url, engine.in_flight)
        engine.is_leaving = True
        self._pool.window.engines_changed()
        _member(engine).heard = time.monotonic()
        if not request.at_once and (engine.in_flight or engine.receives is not None):
            await asyncio.sleep(POLL_S)
            return NotYet(note=f"{engine.in_flight} requests are under way")
        self._forget(engine)  # requests that are still under way go to other engines
        log.info("engine %d at %s has left", request.member, engine.url)
        return Ok()

    def _engine_of(self, request: Beat | Leave) -> Engine | None:
        engine = self._engines.get(request.member)
        return engine if engine is not None and is_same(_member(engine).ticket, request.ticket) else None


def _member(engine: Engine) -> Member:
    assert engine.member is not None, f"{engine.url} is of `hosts.inference`"
    return engine.member
