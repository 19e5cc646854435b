"""Engines that join a running run and leave it: the orchestrator's answers to `inference --join`.

engine                          orchestrator
  GetTerms         ------>        makes a ticket
  <--------------   Terms
  Join(ticket)     ------>        compares its facts with the run's, and writes it down
  <--------------  Joined         waits for its server
  Beat, each second ----->        the first one spends the ticket
                                  quarantine, the newest version in a transfer of its own, live: as after a restart
  Leave            ------>        gives it no new requests; those under way are answered, or go to other engines
  <---------- NotYet, Ok          forgets it

A member whose server does not answer and that is silent for `SILENT_S` is forgotten too. If it comes back, as after a
cut cable, it is told to join again. Numbers of members are never given twice.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from urllib.parse import urlsplit

from trireme.base.disk import when_there_is_room
from trireme.base.errors import DeadlineExceeded
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.network import is_loopback
from trireme.base.token import is_same, token
from trireme.config.engine_facts import Facts, conflict_of, engine_facts, terms_of
from trireme.config.run import RunConfig
from trireme.journal.members import Member, Members, read_members, write_members
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
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.health import POLL_S, Admit, keep_engine
from trireme.orchestrator.engines.pool import InferencePool

log = get_logger("engines")

SILENT_S = 30.0  # a member that neither beats nor answers for so long has gone
MOST_TICKETS = 1024  # of engines that have their terms and have not registered yet
FAREWELL_S = 5.0  # the longest wait at the end for members to hear that the run is over


class JoinedEngines:
    """The members of a run.

    Produces: engines in the pool, and `members.json`. Waits for: requests of engines, and their silence. Wakes: the
    requests for tokens that wait for an engine.
    """

    def __init__(self, config: RunConfig, pool: InferencePool, admit: Admit) -> None:
        self._config, self._pool, self._admit = config, pool, admit
        self._facts: Facts | None = None  # of this run, once an engine is compared with them
        self._tickets: list[str] = []  # tickets of no member yet
        self._heard: dict[int, float] = {}  # last sign of life of each member
        self._unspent: set[int] = set()  # members that have not said yet that they know it
        self._dismissed: dict[int, str] = {}  # members that were sent away, and why
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._joining, self._saving = asyncio.Lock(), asyncio.Lock()
        self._is_over = False

        # Members of an orchestrator that died serve on. They count once they beat: another may have their ports by now.
        found = read_members(config.paths.journal)
        self._next_id = found.next_id
        self._members = {member.id: member for member in found.members}
        self._engines: dict[int, Engine] = {}
        self._heard |= dict.fromkeys(self._members, time.monotonic())
        pool.expel = self.expel

    async def run(self) -> None:
        """Follow the state of each member until cancelled. Raises: DeadlineExceeded if the run has no engine."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._require_engine())
            while True:
                await asyncio.sleep(POLL_S)
                for id, member in list(self._members.items()):
                    engine, silent_s = self._engines.get(id), time.monotonic() - self._heard.get(id, math.inf)
                    if silent_s > SILENT_S and (engine is None or engine.state == "starting"):
                        log.warning("engine %d at %s has been silent for %.0f s: forgotten", id, member.url, silent_s)
                        self._forget(id)
                        await self._save()

    def _add(self, member: Member) -> None:
        """Put a member's engine into the pool, and follow its state."""
        engine = self._engines[member.id] = self._pool.add(member)

        async def keep() -> None:
            try:
                await keep_engine(self._pool, engine, self._admit, self._config.inference.start_timeout_s)
            except DeadlineExceeded as error:
                self.expel(engine, str(error))

        self._keepers[member.id] = self._tasks.create_task(keep())

    async def _require_engine(self) -> None:
        """Wait for an engine, with a deadline, whenever the run has none that is to come back by itself."""
        pool, deadline_s = self._pool, self._config.orchestrator.join_timeout_s
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

    # requests of engines

    async def answer(self, request: Membership) -> Reply:
        match request:
            case GetTerms():
                return self._terms()
            case Join():
                async with self._joining:  # a request that is sent again waits for the answer to the first
                    return await self._join(request)
            case Beat():
                return self._beat(request)
            case Leave():
                return await self._leave(request)

    def _terms(self) -> Terms:
        self._tickets = [*self._tickets[1 - MOST_TICKETS :], secrets.token_hex(16)]
        return Terms(run=terms_of(self._config), ticket=self._tickets[-1])

    async def _join(self, request: Join) -> Reply:
        # The reply may have been lost: until the engine beats, the same request gets the same answer.
        for id in self._unspent:
            if is_same(self._members[id].ticket, request.ticket) and self._members[id].url == request.url:
                return Joined(member=id)
        if request.ticket not in self._tickets:
            reason = "its ticket was used before, or is not of this run - expected a new one. Join again."
            log.warning("a registration of %s was refused: %s", request.url, reason)
            return Again(reason=reason)
        self._tickets.remove(request.ticket)

        if problem := await self._problem(request):
            log.warning("the engine at %s was refused: %s", request.url, problem)
            return Refusal(error=problem)

        # A process that had this port before is gone. Its number stays its own.
        for id in [each.id for each in self._members.values() if each.url == request.url]:
            self._forget(id)
        member = Member(self._next_id, request.ticket, request.url, request.facts, time.time())
        self._next_id += 1
        self._members[member.id] = member
        self._unspent.add(member.id)
        await self._save()
        reach("member.recorded")

        self._heard[member.id] = time.monotonic()
        self._add(member)
        log.info("engine %d at %s has joined and loads its model", member.id, member.url)
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
        if self._facts is None:  # reads the model's files
            self._facts = await asyncio.to_thread(engine_facts, self._config)
        return conflict_of(self._facts, request.facts)

    def _beat(self, request: Beat) -> Reply:
        if self._is_over or request.member in self._dismissed:
            self._heard.pop(request.member, None)
            reason = "the run is over" if self._is_over else self._dismissed[request.member]
            return Dismissed(reason=reason, is_over=self._is_over)
        if (member := self._member_of(request)) is None:
            return Again(reason=f"engine {request.member} was forgotten: it was not heard for {SILENT_S:.0f} s")
        if member.id not in self._engines:
            self._add(member)
        self._unspent.discard(member.id)
        self._heard[member.id] = time.monotonic()
        return Ok()

    async def _leave(self, request: Leave) -> Reply:
        if (member := self._member_of(request)) is None:
            return Ok()
        if (engine := self._engines.get(member.id)) is not None:
            if not engine.is_leaving:
                log.info("engine %d at %s leaves, with %d requests", member.id, member.url, engine.in_flight)
            engine.is_leaving = True
            self._heard[member.id] = time.monotonic()
            if not request.at_once and (engine.in_flight or engine.receives is not None):
                await asyncio.sleep(POLL_S)
                return NotYet(note=f"{engine.in_flight} requests are under way")

        # Requests that are still under way go to other engines.
        self._forget(member.id)
        await self._save()
        log.info("engine %d at %s has left", member.id, member.url)
        return Ok()

    def _member_of(self, request: Beat | Leave) -> Member | None:
        member = self._members.get(request.member)
        return member if member is not None and is_same(member.ticket, request.ticket) else None

    # the end of a membership

    def expel(self, engine: Engine, reason: str) -> None:
        """Send a member away for good; the run goes on."""
        assert engine.member is not None
        if engine.member.id in self._engines:
            log.error("engine %d at %s is sent away: %s", engine.member.id, engine.url, reason)
            self._dismissed[engine.member.id] = reason
            self._forget(engine.member.id)
            self._tasks.create_task(self._save())

    def _forget(self, id: int) -> None:
        if (engine := self._engines.pop(id, None)) is not None:
            self._pool.remove(engine)
        self._unspent.discard(id)
        self._members.pop(id, None)
        self._heard.pop(id, None)
        if keeper := self._keepers.pop(id, None):
            keeper.cancel()

    async def dismiss(self) -> None:
        """Tell all members that the run is over."""
        self._is_over = True
        give_up_at = time.monotonic() + FAREWELL_S
        while self._heard and time.monotonic() < give_up_at:
            await asyncio.sleep(POLL_S)

    async def _save(self) -> None:
        async with self._saving:
            found = Members(self._next_id, list(self._members.values()))
            await asyncio.to_thread(
                when_there_is_room,
                lambda: write_members(self._config.paths.journal, found),
                what="the list of engines",
                folder=self._config.paths.journal,
                waits=self._pool.waits,
                deadline_s=self._config.disk_timeout_s,
            )
