"""One transfer of one version to the engines.

trainer                      orchestrator                         engines
  PolicyReady(n+1)  ------>    waits for a running evaluation
                               tells them to receive     ------>  (requests go on)
  <-------------------  Go
  sends tensors     ----------------------------------------->    take them in
  PolicySent        ------>    pauses (requests freeze)  ------>
                               tells them to load        ------>  load
                               compares digests          <------  digests
                               resumes, probes           <------  logprobs of a fixed prompt
                               writes down that it is so
  <-----------------  Live     version = n+1

Engines that have no room for all of it beside what they serve load what comes while it comes, and are paused before
anything is sent. An engine that dies on the way makes the trainer begin again (`Again`), with the engines that are
there then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from trireme.algo.adapter_names import is_of_adapter
from trireme.algo.compare import first_difference
from trireme.base.errors import PeerDied, WeightsMismatch
from trireme.base.faults import reach
from trireme.messages import PULLED_KINDS, Go, Live, PolicyReady, PolicySent, Probe, TensorSpec
from trireme.orchestrator.engines.pool import Engine
from trireme.orchestrator.weights.adapters import load_adapter, name_adapter
from trireme.orchestrator.weights.pause import pausing, receives_ahead

if TYPE_CHECKING:
    from trireme.orchestrator.weights.policy import Policy

Found = TypeVar("Found")

Peers = frozenset[tuple[str, int]]
"""Engines by address and life: who must be in a transfer's group."""


@dataclass
class UpdateSeconds:
    """What updates took; of what each engine does by itself, the mean of all."""

    in_all: float = 0.0  # from the trainer's announcement to the confirmation on disk
    paused: float = 0.0  # requests stood still
    loading: float = 0.0  # meanwhile, for the tensors, and for what vLLM makes of them


class Update:
    """One attempt at one version."""

    def __init__(self, policy: Policy, message: PolicyReady, before: Update | None) -> None:
        self.message = message
        self.note = "an evaluation is running"
        self.epoch = ""
        self._policy = policy
        self._pool = policy.pool
        self._before = before
        self._targets: list[Engine] = []
        self._lives: dict[str, int] = {}
        self._still_since: dict[str, float] = {}
        self._receiving: dict[str, asyncio.Task[bool]] = {}
        self._confirmed: asyncio.Task[Live] | None = None
        self._began = 0.0
        self.prepared: asyncio.Task[Go | Live] = asyncio.create_task(self._prepare())

    def is_for(self, message: PolicyReady) -> bool:
        own = self.message
        return (own.incarnation, own.version, own.attempt) == (message.incarnation, message.version, message.attempt)

    def is_later_than(self, message: PolicyReady) -> bool:
        """Whether `message` was overtaken on its way by what the same trainer asked later."""
        own = self.message
        return own.incarnation == message.incarnation and own.attempt > message.attempt

    def broken(self) -> BaseException | None:
        """What has gone wrong already while the trainer has yet to send."""
        failed = [task for task in self._receiving.values() if task.done() and task.exception() is not None]
        error = failed[0].exception() if failed else self._gone()
        return error if isinstance(error, PeerDied) else None

    def _gone(self) -> PeerDied | None:
        """What an engine has taken in is lost with it, whether or not another has come up in its place."""
        gone = [engine.url for engine in self._targets if not self._is_there(engine)]
        return PeerDied(f"{', '.join(gone)} died before all was loaded") if gone else None

    def _is_there(self, engine: Engine) -> bool:
        """Still the process that this transfer began with."""
        return engine.life == self._lives[engine.url] and engine.state != "starting"

    @property
    def is_confirming(self) -> bool:
        """All is sent, so no trainer is needed any more, and nothing has gone wrong since."""
        task = self._confirmed
        return task is not None and not (task.done() and (task.cancelled() or task.exception() is not None))

    def when_confirmed_or_not(self, call: Callable[[], None]) -> None:
        assert self._confirmed is not None, "all is sent"
        self._confirmed.add_done_callback(lambda _: call())

    async def abandon(self) -> None:
        """Engines that have begun to load stay paused and in quarantine: they may hold half an update."""
        tasks = [self.prepared, self._confirmed, *self._receiving.values()]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        self._before = None

    async def _prepare(self) -> Go | Live:
        """Has the engines wait for tensors."""
        if self.message.everywhere:
            while self._policy.is_held:
                await asyncio.sleep(0.05)
            self._policy.leave()
        self._began = time.perf_counter()
        await self._until_engines_are_up()
        self._targets = self._who_needs_it()
        if not self._targets:
            return Live(version=self.message.version)
        self._lives = {engine.url: engine.life for engine in self._targets}
        self.note = "engines get ready"
        self._join_or_go_on()
        rank, world_size = 1, 1 + sum(engine.num_workers for engine in self._targets)
        for engine in self._targets:
            self._receiving[engine.url] = asyncio.create_task(self._receive(engine, rank, world_size))
            rank += engine.num_workers
        reach("update.told")
        return Go(version=self.message.version, epoch=self.epoch, world_size=world_size)

    async def _until_engines_are_up(self) -> None:
        """At least one; at the start of a run all. `InferencePool.keep` has the deadline for each."""
        while not self._pool.reachable() or any(map(self._pool.is_missed, self._pool.engines)):
            if not self.message.everywhere:
                return
            self.note = f"engines come up: {self._pool.describe()}"
            await asyncio.sleep(0.1)

    def _who_needs_it(self) -> list[Engine]:
        engines = self._pool.reachable()
        return engines if self.message.everywhere else [engine for engine in engines if engine.state == "quarantined"]

    def _join_or_go_on(self) -> None:
        """The connections of the transfer before can be used again where it went well, between the very same peers."""
        before, self._before = self._before, None
        peers = frozenset((engine.url, engine.life) for engine in self._targets)
        self.peers: Peers = peers
        if before is not None and before.can_be_followed_by(self.message, peers):
            self.epoch, self._joins = before.epoch, False
        else:
            self.epoch, self._joins = self._policy.new_epoch(self.message.incarnation), True

    def can_be_followed_by(self, message: PolicyReady, peers: Peers) -> bool:
        went_well = self._confirmed is not None and self._confirmed.done() and not self._confirmed.cancelled()
        return (
            went_well
            and self._confirmed is not None
            and self._confirmed.exception() is None
            and message.incarnation == self.message.incarnation
            and peers == self.peers
        )

    async def _receive(self, engine: Engine, rank_offset: int, world_size: int) -> bool:
        """Whether it has loaded all of it, or only taken it in."""
        if self._joins:
            info = self._join_info(rank_offset, world_size)
            await self._pool.post(engine, "init_weight_transfer_engine", {"init_info": info})
        if self.message.kind in PULLED_KINDS or await receives_ahead(self._pool, engine, self._specs()):
            return False
        await self._fetch(engine, {})
        return True

    def _join_info(self, rank_offset: int, world_size: int) -> dict:
        config = self._policy.config
        return {
            "kind": self.message.kind,
            "host": self.message.host,
            "port": self.message.port,
            "epoch": self.epoch,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "bucket_bytes": config.bucket_mib << 20,
            "timeout_s": config.timeout_s,
        }

    async def _fetch(self, engine: Engine, payload: dict) -> None:
        """Requests freeze, and it loads."""
        self._pool.is_given(engine, self.message.version, is_paused=True)
        self._pool.quarantine(engine)
        info = {"specs": msgspec.to_builtins(self._specs()), "payload": payload}
        async with pausing(self._pool, engine, timeout_s=self._policy.config.timeout_s):
            self._still_since[engine.url] = time.perf_counter()
            await self._pool.post(engine, "start_weight_update")
            reach("update.paused")
            with self._loading():
                await self._pool.post(engine, "update_weights", {"update_info": info})

    @contextmanager
    def _loading(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._policy.spent.loading += (time.perf_counter() - began) / len(self._targets)

    def _specs(self) -> list[TensorSpec]:
        """What the trainer sends: adapters alone to engines that have confirmed the base model in this epoch."""
        adapters = [spec for spec in self.message.specs if is_of_adapter(spec.name)]
        return adapters if adapters and not self._joins else self.message.specs

    def confirm(self, message: PolicySent) -> asyncio.Task[Live]:
        if self._confirmed is None:
            self._confirmed = asyncio.create_task(self._confirm(message))
        return self._confirmed

    async def _confirm(self, message: PolicySent) -> Live:
        """Raises:
        WeightsMismatch: an engine holds, or computes with, anything else than was sent.
        PeerDied: an engine has gone.
        """
        self.note = "engines load"
        await self._each(self._load, message)
        reach("update.loaded")
        await self._each(self._compare_digests, message)
        if self.message.everywhere:  # whatever is sent from now on is answered by the new version
            await self._policy.offer(message.version, self._targets)
        differences = await self._each(self._resume, message)
        await self._write_down(message, max(differences))
        self._policy.spent.in_all += time.perf_counter() - self._began
        confirmed = [engine for engine in self._targets if self._is_there(engine)]  # another one has to be given it
        live = await self._policy.go_live(message.version, confirmed)
        reach("version.live")
        return live

    async def _each(self, do: Callable[[Engine, PolicySent], Awaitable[Found]], message: PolicySent) -> list[Found]:
        """With every engine, and to the end with each: nothing of this attempt goes on beside the next."""
        tasks = [self._unless_replaced(do, engine, message) for engine in self._targets]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerDied)):
            raise error
        return [result for result in results if not isinstance(result, BaseException)]

    async def _unless_replaced(
        self, do: Callable[[Engine, PolicySent], Awaitable[Found]], engine: Engine, message: PolicySent
    ) -> Found:
        """Raises PeerDied where the weights that are wrong are those of another process than was given them."""
        try:
            return await do(engine, message)
        except WeightsMismatch as mismatch:
            serves = (await self._pool.report(engine)).version
            if serves != str(message.version):
                raise PeerDied(f"{engine.url} was replaced meanwhile: it serves version {serves!r}") from mismatch
            raise

    async def _load(self, engine: Engine, message: PolicySent) -> None:
        if not await self._receiving[engine.url]:
            await self._fetch(engine, message.payload)
        with self._loading():
            await self._pool.post(engine, "finish_weight_update", {"weight_version": str(message.version)})
        await load_adapter(self._pool, engine)

    async def _resume(self, engine: Engine, message: PolicySent) -> float:
        """Returns how far apart trainer and engine are on the probe."""
        self.note = "engines are probed"
        await name_adapter(self._pool, engine)
        await self._pool.post(engine, "resume")
        self._policy.spent.paused += (time.perf_counter() - self._still_since[engine.url]) / len(self._targets)
        self._pool.is_given(engine, message.version)
        return await self._compare_logprobs(engine, message.version, message.probe)

    async def _write_down(self, message: PolicySent, difference: float) -> None:
        reach("version.before_record")
        urls = [engine.url for engine in self._targets]
        await self._policy.record(message.version, urls, message.digests, difference)
        reach("version.recorded")

    async def _compare_digests(self, engine: Engine, message: PolicySent) -> None:
        for worker, (digests, incomplete) in enumerate(await self._pool.worker_reports(engine)):
            who = f"{engine.url}, worker {worker}"
            if difference := first_difference(message.digests, digests):
                raise WeightsMismatch(
                    f"Version {message.version} did not arrive at {who} as it was sent: {difference}."
                )
            if incomplete:
                raise WeightsMismatch(
                    f"Version {message.version} was not loaded whole by {who}: {', '.join(incomplete)} "
                    "kept old weights. Expected every tensor of the model. Its log tells more: logs/inference.stdout"
                )

    async def _compare_logprobs(self, engine: Engine, version: int, probe: Probe) -> float:
        """Returns the largest difference."""
        theirs = await self._pool.prompt_logprobs(engine, probe.ids)
        worst = float(np.abs(np.subtract(probe.logprobs, theirs)).max())  # NaN where any is
        tolerance = self._policy.config.probe_tolerance or 1e-3
        if not worst <= tolerance:
            raise WeightsMismatch(
                f"{engine.url} does not compute with version {version}: on a fixed prompt its logprobs differ from the "
                f"trainer's by up to {worst:.3g}, allowed is {tolerance:g} (`weight_broadcast.probe_tolerance`). "
                "Every tensor arrived as sent, so the engine uses one of them differently."
            )
        return worst
