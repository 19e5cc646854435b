"""Answers to the requests of the trainer, and of engines that join.

Requests are idempotent: asked again, they get the same answer.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from trireme import messages
from trireme.base.faults import reach
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.rank_shares import Shares
from trireme.orchestrator.engines.joined import JoinedEngines
from trireme.orchestrator.scheduler import Scheduler
from trireme.orchestrator.weights.policy import Policy
from trireme.orchestrator.weights.update import WeightUpdates
from trireme.transport.control import PATIENCE_S
from trireme.transport.sanity import check_request

FRESH_S = 10.0  # a heartbeat counts for this long


@dataclass
class Peers:
    """The state of the other processes, from their heartbeats."""

    heartbeats: dict[str, tuple[float, messages.Heartbeat]] = field(default_factory=dict)
    trainer_may_leave: asyncio.Event = field(default_factory=asyncio.Event)
    has_trainer_left: bool = False

    def note(self, beat: messages.Heartbeat) -> None:
        self.heartbeats[beat.process] = (time.monotonic(), beat)

    def is_any_busy(self) -> bool:
        return any(beat.busy and time.monotonic() - at < FRESH_S for at, beat in self.heartbeats.values())


@dataclass
class TrainerRequests:
    """Handles one request per call; calls may overlap."""

    config: RunConfig
    journal: Journal
    policy: Policy
    updates: WeightUpdates
    scheduler: Scheduler
    peers: Peers
    waits: Waits
    joined: JoinedEngines

    def __post_init__(self) -> None:
        self._shares = Shares(self.journal, self.config)
        self._batch_closed = asyncio.Event()

    async def __call__(self, request: messages.Request) -> messages.Reply:
        reply: messages.Reply

        if isinstance(request, messages.Membership):
            return await self.joined.answer(request)

        # A trainer of another run may have found this port. It must not be given this run's batches.
        if request.run_id != self.config.run_id:
            return messages.Refusal(
                error=f"This orchestrator runs {self.config.run_id}, the trainer asks for {request.run_id}. "
                "Expected the same output folder on both. Start them with the same configuration, or on other ports."
            )

        num_batches = self.scheduler.next_batch + 1  # one may be on disk before the scheduler counts it
        if problem := check_request(request, max_steps=self.config.max_steps, num_batches=num_batches):
            return messages.Refusal(error=problem)

        match request:
            case messages.GetNewest():
                reply = await self.updates.trainer_started()
            case messages.GetBatch():
                reply = await self._batch(request)
            case messages.PolicyReady():
                reply = await self.updates.ready(request)
            case messages.PolicySent():
                reply = await self.updates.sent(request)
            case messages.Heartbeat():
                self.peers.note(request)
                reply = messages.Ok()
            case messages.Done():
                reply = await self._done(request)

        # Long work on this side, such as an evaluation, must not run into the trainer's deadline.
        if isinstance(reply, messages.NotYet) and self.waits.is_busy:
            return msgspec.structs.replace(reply, busy=True)
        return reply

    def batch_closed(self) -> None:
        """Wake the requests that wait for a batch."""
        self._batch_closed.set()
        self._batch_closed = asyncio.Event()

    async def _batch(self, request: messages.GetBatch) -> messages.Reply:
        """Answer with this rank's share. Rank 0 asks first; if engines need weights, it has to publish them."""
        # Rank 0 alone decides, before the other ranks ask: publishing needs all of them at the same time.
        if request.rank == 0 and (publish := self.updates.needed(request.step)):
            return publish
        if request.rank == 0 and (note := self.policy.must_be_evaluated_first(request.step)):
            await asyncio.sleep(PATIENCE_S / 2)
            return messages.NotYet(note=note)

        # Hold the request for a while instead of answering at once, because the trainer asks again after each `NotYet`.
        if not self.journal.has(request.step):
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._batch_closed.wait()
            if not self.journal.has(request.step):
                return messages.NotYet(note=self.scheduler.describe())
        reach("batch.answered")
        return await self._shares.in_thread(request.step, rank=request.rank, world=request.world)

    async def _done(self, request: messages.Done) -> messages.Reply:
        """Let the trainer exit once the last version is evaluated. Until then, an engine may need its weights."""
        if publish := self.updates.needed(request.version):
            return publish
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self.peers.trainer_may_leave.wait()
        if not self.peers.trainer_may_leave.is_set():
            return messages.NotYet(note=f"version {request.version} is being evaluated")
        self.peers.has_trainer_left = True
        return messages.Ok()
