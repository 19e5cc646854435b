"""Which version of the policy is live, and how the next one becomes it: announced, sent, confirmed, and only then used.

trainer                      orchestrator                         engines
  PolicyReady(n+1)  ------>    waits for a running evaluation
                               pauses (requests freeze)  ------>
                               tells them to receive     ------>
  <-------------------  Go
  sends tensors     ----------------------------------------->   load
  PolicySent        ------>    compares digests          <------  digests
                               resumes, probes           <------  logprobs of a fixed prompt
  <-----------------  Live     version = n+1
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np

from trireme.algo.compare import first_difference
from trireme.base.errors import TriremeError, WeightsMismatch
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.run import WeightBroadcast
from trireme.messages import PULLED_KINDS, Go, Live, NotYet, PolicyReady, PolicySent, Probe, Refusal, Reply
from trireme.orchestrator.inference_pool import Engine, InferencePool
from trireme.transport.control import within_patience

log = get_logger("policy")


class Policy:
    """The live version. Others wait for it; the trainer moves it."""

    def __init__(self, pool: InferencePool, config: WeightBroadcast, waits: Waits) -> None:
        self.version = -1  # nothing confirmed yet
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.update_seconds = 0.0
        self._pool = pool
        self._config = config
        self._waits = waits
        self._changed = asyncio.Condition()
        self._holding = asyncio.Lock()  # held by an evaluation, or by an update from pause to confirmation
        self._update: _Update | None = None
        self._epoch = 0

    async def reached(self, version: int) -> None:
        """Until `version` (or a later one) is live."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        """Keeps the live version as it is; a new one waits."""
        async with self._holding:
            yield self.version

    async def ready(self, message: PolicyReady) -> Reply:
        """Answers `PolicyReady`: the same attempt gets the same answer, another begins anew."""
        while self._update is None or not self._update.is_for(message):
            if self._update is not None and self._update.is_later_than(message):
                return Refusal(error=f"attempt {message.attempt} at version {message.version} has been superseded")
            await self._begin(message)
        update = self._update
        if not await within_patience(update.prepared):
            return NotYet(note=update.note)
        return self._answer(update.prepared)

    async def _begin(self, message: PolicyReady) -> None:
        before, holds = self._update, False
        if before is not None:
            holds = await before.abandon()
            if self._update is not before:  # the same question, asked twice, has begun it
                return
        if before is None or before.must_join_anew(message):
            self._epoch += 1
        self._update = _Update(self, message, f"{message.incarnation}/{self._epoch}", holds=holds)

    async def sent(self, message: PolicySent) -> Reply:
        """Answers `PolicySent`."""
        update = self._update
        if update is None or (update.message.version, update.message.attempt) != (message.version, message.attempt):
            return Refusal(
                error=f"attempt {message.attempt} at version {message.version} was never announced to this orchestrator"
            )
        confirmed = update.confirm(message)
        if not await within_patience(confirmed):
            return NotYet(note=update.note)
        return self._answer(confirmed)

    def _answer(self, task: asyncio.Task) -> Reply:
        if error := task.exception():
            if isinstance(error, WeightsMismatch) and not self.failure.done():
                self.failure.set_exception(error)
            if not isinstance(error, TriremeError):
                raise error
            return Refusal(error=str(error))
        return task.result()

    async def _go_live(self, version: int) -> None:
        self._pool.go_live(version)
        async with self._changed:
            self.version = version
            self._changed.notify_all()


class _Update:
    """One attempt at one version."""

    def __init__(self, policy: Policy, message: PolicyReady, epoch: str, *, holds: bool) -> None:
        self.message = message
        self.note = "an evaluation is running"
        self._policy = policy
        self._pool = policy._pool
        self._epoch = epoch
        self._joins = epoch != getattr(policy._update, "_epoch", None)
        self._holds = holds
        self._receiving: dict[str, asyncio.Task] = {}
        self._confirmed: asyncio.Task[Live] | None = None
        self._began = 0.0
        self.prepared: asyncio.Task[Go] = asyncio.create_task(self._prepare())

    def is_for(self, message: PolicyReady) -> bool:
        own = self.message
        return (own.incarnation, own.version, own.attempt) == (message.incarnation, message.version, message.attempt)

    def is_later_than(self, message: PolicyReady) -> bool:
        """Whether `message` was overtaken on its way by what the same trainer asked later."""
        own = self.message
        return own.incarnation == message.incarnation and (own.version, own.attempt) > (
            message.version,
            message.attempt,
        )

    def must_join_anew(self, message: PolicyReady) -> bool:
        """Another trainer process, or an attempt that broke: the old connections are of no use."""
        broke = self._confirmed is None or not self._confirmed.done() or self._confirmed.exception() is not None
        return message.incarnation != self.message.incarnation or broke

    async def abandon(self) -> bool:
        """Returns whether its successor now holds the version: engines with half an update are not to be evaluated."""
        tasks = [self.prepared, self._confirmed, *self._receiving.values()]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        holds, self._holds = self._holds, False
        return holds

    def _let_go(self) -> None:
        if self._holds:
            self._holds = False
            self._policy._holding.release()

    async def _prepare(self) -> Go:
        """Pauses the engines and has them wait for tensors."""
        if not self._holds:
            await self._policy._holding.acquire()
            self._holds = True
        self._began = time.perf_counter()
        self.note = f"engines come up: {self._pool.describe()}"
        while not self._pool.reachable() or any(engine.state == "starting" for engine in self._pool.engines):
            await asyncio.sleep(0.1)
            self.note = f"engines come up: {self._pool.describe()}"
        self.note = "engines pause"
        self._pool.quarantine()
        await self._pool.pause()
        world_size = 1
        for engine in self._pool.reachable():
            self._receiving[engine.url] = asyncio.create_task(self._receive(engine, world_size, self._world_size()))
            world_size += engine.num_workers
        return Go(version=self.message.version, epoch=self._epoch, world_size=world_size)

    def _world_size(self) -> int:
        return 1 + sum(engine.num_workers for engine in self._pool.reachable())

    async def _receive(self, engine: Engine, rank_offset: int, world_size: int) -> None:
        if self._joins:
            info = self._join_info(rank_offset, world_size)
            await self._pool.post(engine, "init_weight_transfer_engine", {"init_info": info})
        await self._pool.post(engine, "start_weight_update")
        if self.message.kind not in PULLED_KINDS:
            await self._fetch(engine, {})

    def _join_info(self, rank_offset: int, world_size: int) -> dict:
        config = self._policy._config
        return {
            "kind": self.message.kind,
            "host": self.message.host,
            "port": self.message.port,
            "epoch": self._epoch,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "bucket_bytes": config.bucket_mib << 20,
            "timeout_s": config.timeout_s,
        }

    async def _fetch(self, engine: Engine, payload: dict) -> None:
        info = {"specs": msgspec.to_builtins(self.message.specs), "payload": payload}
        await self._pool.post(engine, "update_weights", {"update_info": info})

    def confirm(self, message: PolicySent) -> asyncio.Task[Live]:
        if self._confirmed is None:
            self._confirmed = asyncio.create_task(self._confirm(message))
        return self._confirmed

    async def _confirm(self, message: PolicySent) -> Live:
        """Raises WeightsMismatch where an engine holds, or computes with, anything else than was sent."""
        self.note = "engines load"
        for engine in self._pool.reachable():
            await self._receiving[engine.url]
            if self.message.kind in PULLED_KINDS:
                await self._fetch(engine, message.payload)
            await self._pool.post(engine, "finish_weight_update", {"weight_version": str(message.version)})
            await self._compare_digests(engine, message)
        self.note = "engines are probed"
        await self._pool.resume()
        for engine in self._pool.reachable():
            await self._compare_logprobs(engine, message.version, message.probe)
        self._policy.update_seconds += time.perf_counter() - self._began
        await self._policy._go_live(message.version)
        self._let_go()
        return Live(version=message.version)

    async def _compare_digests(self, engine: Engine, message: PolicySent) -> None:
        report = await self._pool.post(engine, "collective_rpc", {"method": "trireme_weight_report"})
        for worker, result in enumerate(report["results"]):
            who = f"{engine.url}, worker {worker}"
            if difference := first_difference(message.digests, result["digests"]):
                raise WeightsMismatch(
                    f"Version {message.version} did not arrive at {who} as it was sent: {difference}."
                )
            if result["incomplete"]:
                raise WeightsMismatch(
                    f"Version {message.version} was not loaded whole by {who}: {', '.join(result['incomplete'])} "
                    "kept old weights. Expected every tensor of the model. Its log tells more: logs/inference.stdout"
                )

    async def _compare_logprobs(self, engine: Engine, version: int, probe: Probe) -> None:
        theirs = await self._pool.prompt_logprobs(engine, probe.ids)
        worst = float(np.abs(np.subtract(probe.logprobs, theirs)).max())  # NaN where any is
        tolerance = self._policy._config.probe_tolerance or 1e-3
        if not worst <= tolerance:
            raise WeightsMismatch(
                f"{engine.url} does not compute with version {version}: on a fixed prompt its logprobs differ from the "
                f"trainer's by up to {worst:.3g}, allowed is {tolerance:g} (`weight_broadcast.probe_tolerance`). "
                "Every tensor arrived as sent, so the engine uses one of them differently."
            )
