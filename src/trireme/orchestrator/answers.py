"""What the orchestrator answers when the trainer asks. Every answer is the same however often it is asked for."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.shares import Shares
from trireme.messages import (
    Done,
    GetBatch,
    GetNewest,
    Heartbeat,
    NotYet,
    Ok,
    PolicyReady,
    PolicySent,
    Publish,
    Refusal,
    Reply,
    Request,
)
from trireme.orchestrator.scheduler import Scheduler
from trireme.orchestrator.weights.policy import Policy
from trireme.transport.control import PATIENCE_S
from trireme.transport.sanity import check_request

log = get_logger("answers")

FRESH_S = 10.0
"""What a process said of itself holds for so long."""


@dataclass
class Peers:
    """What other processes said of themselves, and when."""

    heartbeats: dict[str, tuple[float, Heartbeat]] = field(default_factory=dict)
    trainer_is_done: bool = False  # it has said so, and waits to be let go
    trainer_may_leave: asyncio.Event = field(default_factory=asyncio.Event)
    trainer_left: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, beat: Heartbeat) -> None:
        self.heartbeats[beat.process] = (time.monotonic(), beat)

    def is_any_busy(self) -> bool:
        return any(beat.busy and time.monotonic() - at < FRESH_S for at, beat in self.heartbeats.values())


class Answers:
    """Handles one request at a time; may be called concurrently."""

    def __init__(
        self,
        config: RunConfig,
        journal: Journal,
        policy: Policy,
        scheduler: Scheduler,
        peers: Peers,
        waits: Waits,
    ) -> None:
        self._config = config
        self._waits = waits
        self._journal = journal
        self._shares = Shares(journal, config)
        self._policy = policy
        self._scheduler = scheduler
        self._peers = peers
        self._batch_closed = asyncio.Event()

    async def __call__(self, request: Request) -> Reply:
        reply = await self._reply(request)
        if isinstance(reply, NotYet) and self._waits.is_busy:
            return msgspec.structs.replace(reply, busy=True)
        return reply

    async def _reply(self, request: Request) -> Reply:
        if request.run_id != self._config.run_id:
            return Refusal(
                error=f"This orchestrator runs {self._config.run_id}, the trainer asks for {request.run_id}. "
                "Expected the same output folder on both. Start them with the same configuration, or on other ports."
            )
        num_batches = self._scheduler.next_batch + 1  # one may be on disk of which the scheduler was not told yet
        if problem := check_request(request, max_steps=self._config.max_steps, num_batches=num_batches):
            return Refusal(error=problem)
        match request:
            case GetNewest():
                return await self._policy.trainer_started()
            case GetBatch():
                return await self._batch(request)
            case PolicyReady():
                return await self._policy.ready(request)
            case PolicySent():
                return await self._policy.sent(request)
            case Heartbeat():
                self._peers.note(request)
            case Done():
                return await self._done(request)
        return Ok()

    def batch_closed(self) -> None:
        """Wakes whoever waits for a batch."""
        self._batch_closed.set()
        self._batch_closed = asyncio.Event()

    async def _batch(self, request: GetBatch) -> Reply:
        """The first rank is told where weights are needed first; the others ask after it has its share."""
        if request.rank == 0 and (reason := self._policy.needs_weights(request.step)):
            return Publish(reason=reason)
        if request.rank == 0 and (note := self._policy.is_to_be_served_first(request.step)):
            await asyncio.sleep(PATIENCE_S / 2)
            return NotYet(note=note)
        if not self._journal.has(request.step):
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._batch_closed.wait()
            if not self._journal.has(request.step):
                return NotYet(note=self._scheduler.describe())
        reach("batch.answered")
        return await self._shares.by_turns(request.step, rank=request.rank, world=request.world)

    async def _done(self, request: Done) -> Reply:
        """The trainer stays until the last version is evaluated: an engine that comes up without it needs it."""
        self._peers.trainer_is_done = True
        if reason := self._policy.needs_weights(request.version):
            return Publish(reason=reason)
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._peers.trainer_may_leave.wait()
        if not self._peers.trainer_may_leave.is_set():
            return NotYet(note=f"version {request.version} is being evaluated")
        self._peers.trainer_left.set()
        return Ok()
