"""What the orchestrator answers when the trainer asks. Every answer is the same however often it is asked for."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

from trireme.algo.packing import micro_batches_of_rank
from trireme.base.log import get_logger
from trireme.config.run import RunConfig
from trireme.ledger.journal import Journal
from trireme.messages import (
    BatchReply,
    Done,
    GetBatch,
    Heartbeat,
    NotYet,
    Ok,
    PolicyReady,
    PolicySent,
    Refusal,
    Reply,
    Request,
)
from trireme.orchestrator.batcher import samples_of
from trireme.orchestrator.policy import Policy
from trireme.orchestrator.scheduler import Scheduler
from trireme.transport.control import PATIENCE_S

log = get_logger("answers")


@dataclass
class Peers:
    """What other processes said of themselves, and when."""

    heartbeats: dict[str, tuple[float, Heartbeat]] = field(default_factory=dict)
    trainer_done: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, beat: Heartbeat) -> None:
        self.heartbeats[beat.process] = (time.monotonic(), beat)


class Answers:
    """Handles one request at a time; may be called concurrently."""

    def __init__(self, config: RunConfig, journal: Journal, policy: Policy, scheduler: Scheduler, peers: Peers) -> None:
        self._config = config
        self._journal = journal
        self._policy = policy
        self._scheduler = scheduler
        self._peers = peers
        self._batch_closed = asyncio.Event()

    async def __call__(self, request: Request) -> Reply:
        if request.run_id != self._config.run_id:
            return Refusal(
                error=f"This orchestrator runs {self._config.run_id}, the trainer asks for {request.run_id}. "
                "Expected the same output folder on both. Start them with the same configuration, or on other ports."
            )
        match request:
            case GetBatch():
                return await self._batch(request)
            case PolicyReady():
                return await self._policy.ready(request)
            case PolicySent():
                return await self._policy.sent(request)
            case Heartbeat():
                self._peers.note(request)
            case Done():
                self._peers.trainer_done.set()
        return Ok()

    def batch_closed(self) -> None:
        """Wakes whoever waits for a batch."""
        self._batch_closed.set()
        self._batch_closed = asyncio.Event()

    async def _batch(self, request: GetBatch) -> Reply:
        if not self._journal.has(request.step):
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._batch_closed.wait()
            if not self._journal.has(request.step):
                return NotYet(note=self._scheduler.describe())
        record = self._journal.read(request.step)
        samples = samples_of(record.rollouts)
        return BatchReply(
            step=request.step,
            micro_batches=micro_batches_of_rank(
                samples,
                capacity=self._config.trainer.micro_batch_tokens or self._config.seq_len,
                rank=request.rank,
                world=request.world,
            ),
            loss_tokens=sum(int(sample.tokens.loss_mask.sum()) for sample in samples),
            num_rollouts=len(record.rollouts),
        )
