"""Weight updates: what the orchestrator answers to the trainer, and what it makes of each attempt at a version.

trainer                      orchestrator                         engines
  PolicyReady(n+1)  ------>    waits for a running evaluation
                               tells them to receive     ------>  (requests go on)
  <-------------------  Go
  sends tensors     ----------------------------------------->    take them in
  PolicySent        ------>    pauses (requests freeze)  ------>
                               tells them to load        ------>  load
                               compares digests          <------  digests
                               resumes, probes           <------  logprobs of a fixed prompt
                               writes the confirmation to disk
  <-----------------  Live     version = n+1

An engine without room for both versions loads tensors while they come, and is paused before anything is sent. An engine
that fails on the way makes the trainer begin again (`Again`), with the engines that are there then.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from trireme.algo.weight_checks import is_of_adapter
from trireme.base.errors import EngineRefused, PeerDied, TriremeError, WeightsMismatch
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.config.run import WeightBroadcast
from trireme.messages import (
    PULLED_KINDS,
    Again,
    Go,
    InitInfo,
    Live,
    Newest,
    NotYet,
    PolicyReady,
    PolicySent,
    Publish,
    Refusal,
    Reply,
    UpdateInfo,
)
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.responses import WeightReport
from trireme.orchestrator.weights.engine_update import (
    join,
    load,
    name_adapter,
    name_weights,
    pausing,
    receives_ahead,
    require_confirmed,
)
from trireme.orchestrator.weights.policy import Policy
from trireme.transport.control import is_done_soon
from trireme.transport.sanity import check_digests

log = get_logger("policy")

Found = TypeVar("Found")

NO_TIME = {"time/update_weights": 0.0, "time/engines_paused": 0.0, "time/engines_load": 0.0}
"""Seconds of an update. All of it: from the trainer's announcement to the confirmation on disk. Paused: requests were
frozen. Load: as a part of that, tensors arrived and vLLM processed them. The latter two are means over the engines."""

RECEIVERS = "weight_broadcast/receivers"
"""Workers of engines that confirmed the update."""

MOST_FAILURES = 3
"""Transfers in a row that may fail with an engine that has just joined, before it is sent away. One is enough that it
alone has held up for `LATE` of `weight_broadcast.timeout_s`, after which the trainer gives up."""

LATE = 0.5  # share of the timeout

LOSS_POLL_S = 0.1  # while engines load

EXACT, TIMES_NOISE = 1e-3, 4.0
"""Allowed mean difference on the probe where no largest one is configured: at least, and in multiples of its noise."""


class WeightUpdates:
    """Answers what the trainer asks about versions. At most one update is under way."""

    def __init__(self, policy: Policy, config: WeightBroadcast) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._policy = policy
        self._config = config
        self._update: Update | None = None
        self._spent = dict(NO_TIME)

    async def fail_on_wrong_weights(self) -> None:
        """Raises: WeightsMismatch or EngineRefused, once an engine serves other weights than the trainer's, or does not
        take the probe."""
        await self._failure

    async def ready(self, message: PolicyReady) -> Reply:
        """Answer `PolicyReady`. The same attempt gets the same answer; a new one replaces the attempt before."""
        # Abandoning an attempt takes time, in which another request may begin an update: look again afterwards.
        while self._update is None or not self._update.is_for(message):
            before = self._update
            if before is not None:
                latest = before.message
                is_overtaken = latest.incarnation == message.incarnation and latest.attempt > message.attempt
                if is_overtaken:
                    return Refusal(error=f"attempt {message.attempt} at version {message.version} has been superseded")
                if latest.incarnation == message.incarnation:
                    before.blame_unfinished()
                await before.abandon()
            if self._update is before:  # the same request may have begun the update meanwhile
                self._update = Update(self._policy, self._config, message, before, self._spent)

        update = self._update
        if (failure := update.failure_before_sent()) is not None:
            return _answer_failure(failure)
        return await self._answer(update, update.prepared)

    async def sent(self, message: PolicySent) -> Reply:
        """Answer `PolicySent`."""
        update = self._update
        if update is None or (update.message.version, update.message.attempt) != (message.version, message.attempt):
            return Again(reason=f"version {message.version} was announced to an orchestrator that is no more")

        if problem := check_digests(update.message, message):
            return Refusal(error=problem)
        return await self._answer(update, update.confirm(message))

    async def _answer(self, update: Update, task: asyncio.Task[Live] | asyncio.Task[Go | Live]) -> Reply:
        if not await is_done_soon(task):
            return NotYet(note=update.note)
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, (WeightsMismatch, EngineRefused)) and not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # mark it as retrieved: the trainer gets the same error in its `Refusal`
        return _answer_failure(error)

    async def trainer_started(self) -> Newest:
        """Answer `GetNewest`. A new trainer neither finishes nor repeats what the one before was sending."""
        update = self._update
        if update is not None and update.is_confirming:
            assert update.confirmed is not None, "all is sent"
            update.confirmed.add_done_callback(lambda _: self._forget_if_failed(update))
        elif update is not None:
            await update.abandon()
            self._forget_if_failed(update)
        return self._policy.newest

    def _forget_if_failed(self, update: Update) -> None:
        """Engines that come up after this are given the version that was confirmed last."""
        if self._update is update and not update.is_confirming:
            self._update, self._policy.is_moving = None, False

    def needed(self, version: int) -> Publish | None:
        """Return the request to publish `version` (again), which the trainer has; None if engines need nothing."""
        newest, update = self._policy.versions.newest, self._update
        is_confirming = update is not None and update.message.version == version and update.is_confirming

        # Engines need the version if it was never confirmed, or if some came up after it was. One that has just joined
        # is part of no update of all engines: the trainer waits for the end of such an update, and sends it its own.
        if version > newest and not is_confirming:
            return Publish(reason=f"version {version} was not confirmed")
        waiting = [engine for engine in self._policy.pool.reachable() if engine.state == "quarantined"]
        if self._policy.is_moving:
            waiting = [engine for engine in waiting if engine.is_newcomer] if is_confirming else []
        if version < newest or not waiting:
            return None
        return Publish(reason=f"{', '.join(engine.url for engine in waiting)} came up without weights")

    def take_seconds(self) -> dict[str, float]:
        """Return metrics of the updates since the last call."""
        metrics = dict(self._spent)
        self._spent.clear()
        self._spent.update(NO_TIME)
        return metrics


def _answer_failure(error: BaseException) -> Reply:
    """Have the trainer begin again, or stop it if another attempt would fail in the same way."""
    if isinstance(error, TriremeError) and not isinstance(error, PeerDied):
        return Refusal(error=str(error))
    if isinstance(error, PeerDied):
        return Again(reason=str(error))
    log.error("a weight update failed unexpectedly", exc_info=error)
    return Refusal(
        error=f"The orchestrator failed in a weight update: {error!r} - expected engines to load it. Look at the "
        "traceback in logs/orchestrator.stdout."
    )


@dataclass(eq=False)
class Update:
    """One attempt at one version."""

    policy: Policy
    config: WeightBroadcast
    message: PolicyReady
    before: Update | None  # the attempt before, whose connections are reused if it went well
    spent: dict[str, float]  # seconds of all updates since they were taken last, to which this attempt adds its own
    note: str = "an evaluation is running"
    epoch: str = ""
    confirmed: asyncio.Task[Live] | None = None
    _targets: list[Engine] = field(default_factory=list)
    _lives: dict[str, int] = field(default_factory=dict)  # lives of the engines in the transfer's group, by address
    _joins: bool = True  # a new group is formed; otherwise that of the attempt before is used again
    _keeps_caches: bool = False  # in the engines, of older versions
    _paused_since: dict[str, float] = field(default_factory=dict)
    _receiving: dict[str, asyncio.Task[list[WeightReport] | None]] = field(default_factory=dict)
    _reports: dict[str, list[WeightReport]] = field(default_factory=dict)  # reports after loading, by address
    _began: float = 0.0
    _asked_at: float = 0.0  # when its engines were told to receive
    _blamed: set[str] = field(default_factory=set)  # newcomers that failed in this attempt, which counts once

    def __post_init__(self) -> None:
        self.pool = self.policy.pool
        self.prepared: asyncio.Task[Go | Live] = asyncio.create_task(self._prepare())

    def is_for(self, message: PolicyReady) -> bool:
        own = self.message
        return (own.incarnation, own.version, own.attempt) == (message.incarnation, message.version, message.attempt)

    def failure_before_sent(self) -> BaseException | None:
        """Return what has failed while the trainer has yet to send. Any failure counts: sending would be in vain."""
        for task in self._receiving.values():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                return error
        return self._loss()

    def _loss(self) -> PeerDied | None:
        gone = [engine.url for engine in self._targets if not self._is_same_process(engine)]
        return PeerDied(f"{', '.join(gone)} died before all was loaded") if gone else None

    def _is_same_process(self, engine: Engine) -> bool:
        """Return whether the engine is still the process that this transfer began with.

        Another one lacks what was sent.
        """
        return engine.life == self._lives[engine.url] and engine.state != "starting"

    @property
    def is_confirming(self) -> bool:
        """Return whether all is sent, so that no trainer is needed any more, and nothing has failed since."""
        task = self.confirmed
        return task is not None and not (task.done() and (task.cancelled() or task.exception() is not None))

    async def abandon(self) -> None:
        """Stop. Engines that have begun to load stay paused and in quarantine: they may hold half an update."""
        tasks = [task for task in (self.prepared, self.confirmed, *self._receiving.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.before = None

    # until the trainer may send

    async def _prepare(self) -> Go | Live:
        """Have the engines wait for tensors. `Live` if no engine needs any."""
        everywhere = self.message.everywhere

        # Evaluations hold up an update of all engines. Engines that just came up serve none, so these do not wait.
        if everywhere:
            while self.policy.is_held:
                await asyncio.sleep(0.05)
            self.policy.is_moving = True

        self._began = time.perf_counter()
        # at least one engine, at the start of a run all of them; `engines/health.py` has the deadline for each
        while everywhere and (not self.pool.reachable() or any(map(self.pool.is_missed, self.pool.engines))):
            self.note = f"engines come up: {self.pool.describe()}"
            await asyncio.sleep(0.1)

        # An engine that comes up after this gets the version in a transfer of its own.
        # One that has just joined gets its first version by itself: no other engine waits in vain for it to connect.
        reachable = self.pool.reachable()
        settled = [engine for engine in reachable if not engine.is_newcomer] or _unsuspected(reachable)
        waiting = _unsuspected([engine for engine in reachable if engine.state == "quarantined"])
        self._targets = settled if everywhere else waiting
        if not self._targets:
            return Live(version=self.message.version)

        self.note = "engines get ready"
        self._lives = {engine.url: engine.life for engine in self._targets}
        self._asked_at = time.perf_counter()

        before, self.before = self.before, None
        # reuse the connections of the attempt before, if it went well between the very same processes
        self._joins = before is None or not before.can_be_followed_by(self)
        if before is None or self._joins:  # unique: no peer may take another orchestrator's epoch for ours
            self.epoch = f"{self.message.incarnation}/{uuid.uuid4().hex[:12]}"
        else:
            self.epoch = before.epoch

        # Caches are named by versions. Another trainer, or this one after a rewind, may give a version other weights.
        is_newer = before is not None and before.message.version < self.message.version
        self._keeps_caches = self.pool.keep_prefix_cache != "never" and not self._joins and is_newer

        adapters = [spec for spec in self.message.specs if is_of_adapter(spec.name)]
        # engines that confirmed the base model in this epoch are sent the adapters alone
        self._specs = adapters if adapters and not self._joins else self.message.specs

        # Ranks of the weight group: the trainer's sender is 0, and the workers of each engine follow.
        rank, world_size = 1, 1 + sum(engine.num_workers for engine in self._targets)
        for engine in self._targets:
            self._receiving[engine.url] = asyncio.create_task(self._receive(engine, rank, world_size))
            rank += engine.num_workers

        reach("update.told")
        return Go(version=self.message.version, epoch=self.epoch, world_size=world_size)

    def can_be_followed_by(self, other: Update) -> bool:
        went_well = self.confirmed is not None and self.confirmed.done() and self.is_confirming
        is_same_trainer = other.message.incarnation == self.message.incarnation
        # another engine may have joined at the address of one that left
        are_same = all(one is another for one, another in zip(self._targets, other._targets, strict=False))
        return went_well and is_same_trainer and are_same and other._lives == self._lives

    # an engine that has just joined must not end the run

    def blame_unfinished(self) -> None:
        """Blame newcomers that never got ready for an attempt that the trainer has given up."""
        for engine in self._targets:
            task = self._receiving.get(engine.url)
            if task is not None and not task.done():
                self._blame(engine, PeerDied(f"{engine.url} did not take in version {self.message.version}"))

    def _blame(self, engine: Engine, error: TriremeError) -> None:
        """Send a newcomer away that holds wrong weights, with which `MOST_FAILURES` transfers in a row failed, or that
        hung in one.

        Raises: PeerDied in place of wrong weights, so that the trainer begins again without the newcomer.
        """
        if not engine.is_newcomer:
            return
        engine.num_failures += engine.url not in self._blamed
        self._blamed.add(engine.url)
        is_wrong = not isinstance(error, PeerDied)
        is_late = time.perf_counter() > self._asked_at + LATE * self.config.timeout_s
        hangs = is_late and [engine] == self._targets and self._is_same_process(engine)
        if is_wrong or hangs or engine.num_failures >= MOST_FAILURES:
            self.pool.expel(engine, str(error))
        if is_wrong:
            raise PeerDied(str(error)) from error

    async def _receive(self, engine: Engine, rank_offset: int, world_size: int) -> list[WeightReport] | None:
        """Return the reports of an engine that has loaded all of it; None of one that only takes it in."""
        try:
            return await self._join_and_receive(engine, rank_offset, world_size)
        except PeerDied as error:
            self._blame(engine, error)
            raise

    async def _join_and_receive(self, engine: Engine, rank_offset: int, world_size: int) -> list[WeightReport] | None:
        info = InitInfo(
            kind=self.message.kind,
            host=self.message.host,
            port=self.message.port,
            epoch=self.epoch,
            rank_offset=rank_offset,
            world_size=world_size,
            bucket_bytes=self.config.bucket_mib << 20,
            timeout_s=self.config.timeout_s,
        )
        is_pulled = self.message.kind in PULLED_KINDS
        # cores that compute in step are paused before any of them waits for the sender
        if engine.num_cores > 1 and not is_pulled:
            return await self._fetch(engine, {}, join_first=info if self._joins else None)

        if self._joins:
            await join(engine, info)
        if is_pulled or await receives_ahead(engine, self._specs):
            return None
        return await self._fetch(engine, {})

    async def _fetch(self, engine: Engine, payload: dict, *, join_first: InitInfo | None = None) -> list[WeightReport]:
        """Pause the engine and have it load, after it has joined the transfer if it is given one."""
        # Before the pause, so that requests that arrive from here on go to other engines or wait.
        self.pool.is_given(engine, self.message.version, is_paused=True)
        self.pool.quarantine(engine)
        is_on_cpu = self.message.kind == "gloo"
        how = {"is_on_cpu": is_on_cpu, "keeps_caches": self._keeps_caches}
        async with pausing(engine, timeout_s=self.config.timeout_s, **how):
            self._paused_since[engine.url] = time.perf_counter()
            reach("update.paused")
            if join_first is not None:
                await join(engine, join_first)

            began = time.perf_counter()
            reports = await load(engine, UpdateInfo(self._specs, payload))
            self.spent["time/engines_load"] += (time.perf_counter() - began) / len(self._targets)
        return reports

    # once the trainer has sent

    def confirm(self, message: PolicySent) -> asyncio.Task[Live]:
        if self.confirmed is None:
            self.confirmed = asyncio.create_task(self._confirm(message))
        return self.confirmed

    async def _confirm(self, message: PolicySent) -> Live:
        """
        Raises:
            WeightsMismatch: an engine holds, or computes with, anything else than was sent.
            EngineRefused: an engine does not take the probe.
            PeerDied: an engine has gone.
        """
        self.note = "engines load"
        await self._unless_lost(self._each(self._load, message))
        reach("update.loaded")

        # Engines resume only after all of them hold exactly what was sent.
        name = f"Version {message.version}"
        for engine in self._targets:
            try:
                require_confirmed(engine, self._reports[engine.url], message.digests, name=name)
            except WeightsMismatch as mismatch:
                self._blame(engine, mismatch)
                raise
        differences = await self._each(self._resume, message)

        # Nothing may use the version before this: a restarted orchestrator knows only what is on disk.
        reach("version.before_record")
        await self.policy.record(message.version, self._targets, message.digests, max(differences))
        reach("version.recorded")
        self.spent["time/update_weights"] += time.perf_counter() - self._began

        # An engine that died since then has a successor without these weights, which stays in quarantine.
        confirmed = [engine for engine in self._targets if self._is_same_process(engine)]
        await self.policy.go_live(message.version, confirmed, keeps_caches=self._keeps_caches)
        receivers = sum(engine.num_workers for engine in confirmed)
        self.spent[RECEIVERS] = receivers

        told = message.version, receivers, len(confirmed)
        log.info("version %d is live, as %d workers of %d engines confirmed", *told)
        reach("version.live")
        return Live(version=message.version)

    async def _unless_lost(self, work: Coroutine[Any, Any, Found]) -> Found:
        """Await work of all engines. Raises PeerDied once one of them is gone: the others would wait for its part of a
        broadcast until the connection breaks."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([task], timeout=LOSS_POLL_S))[0]:
                if (loss := self._loss()) is not None:
                    raise loss
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _each(self, do: Callable[[Engine, PolicySent], Awaitable[Found]], message: PolicySent) -> list[Found]:
        """Do it with every engine, to the end with each: nothing of this attempt overlaps with the next."""

        async def unless_replaced(engine: Engine) -> Found:
            try:
                return await do(engine, message)
            except (WeightsMismatch, EngineRefused) as mismatch:
                # the wrong weights may be those of a new process that was sent nothing, under the same name
                if any(report.digests != message.digests for report in await engine.weight_reports()):
                    raise PeerDied(f"{engine.url} was replaced meanwhile: it has other weights") from mismatch
                self._blame(engine, mismatch)
                raise
            except PeerDied as error:
                self._blame(engine, error)
                raise

        return await _all(map(unless_replaced, self._targets))

    async def _load(self, engine: Engine, message: PolicySent) -> None:
        reports = await self._receiving[engine.url]
        self._reports[engine.url] = reports if reports is not None else await self._fetch(engine, message.payload)
        reach("update.unnamed")
        await name_weights(engine, str(message.version))

    async def _resume(self, engine: Engine, message: PolicySent) -> float:
        """Resume generation, then probe the engine. Returns the largest difference of a logprob."""
        self.note = "engines are probed"

        # Requests use the adapter's name as soon as they resume.
        if self.pool.adapter is not None:
            await name_adapter(engine, self.pool.adapter)

        await engine.post("resume")
        paused_s = time.perf_counter() - self._paused_since[engine.url]
        self.spent["time/engines_paused"] += paused_s / len(self._targets)
        self.pool.is_given(engine, message.version)
        return max(await _all(self._probe(engine, core, message) for core in range(engine.num_cores)))

    async def _probe(self, engine: Engine, core: int, message: PolicySent) -> float:
        """Compare the logprobs of a fixed prompt by one core with the trainer's. Returns the largest difference.

        Raises:
            WeightsMismatch: they differ by more than rounding does.
            PeerDied: they may differ by more than rounding does, whose size is known of an older version only.
        """
        theirs = await self.pool.prompt_logprobs(engine, message.probe.ids, core=core)
        differences = np.abs(np.subtract(message.probe.logprobs, theirs))
        worst = float(differences.max())  # NaN if any difference is

        # The user's limit holds for the largest difference. Otherwise the mean is judged by the noise of the trainer.
        if allowed := self.config.probe_tolerance:
            found, measure = worst, "by up to"
        else:
            found, measure = float(differences.mean()), "in the mean by"
            allowed = max(EXACT, TIMES_NOISE * message.probe.noise)
        if found <= allowed:
            return worst

        which = f", core {core + 1} of {engine.num_cores}," if engine.num_cores > 1 else ""
        differs = (
            f"on a fixed prompt its logprobs differ from the trainer's {measure} {found:.3g}, allowed is {allowed:.3g}"
        )

        # Noise that was measured for an older version may be too small for this one. A fresh one decides.
        if message.probe.noise_age and not self.config.probe_tolerance:
            raise PeerDied(
                f"{engine.url}{which}: {differs} by the noise of {message.probe.noise_age} versions ago. The trainer "
                "measures the noise of this version and sends it again."
            )
        raise WeightsMismatch(
            f"{engine.url}{which} does not compute with version {message.version}: {differs} "
            f"(`weight_broadcast.probe_tolerance` for the largest, else {TIMES_NOISE:g} times what rounding makes)."
            " Every tensor arrived as sent, so the engine uses one of them differently. See docs/models.md for the "
            "model, and set the tolerance only where the engine is known to be right."
        )


def _unsuspected(engines: list[Engine]) -> list[Engine]:
    """Return the engines with which no transfer failed; if there are none, one: alone, it shows whether it hangs."""
    return [engine for engine in engines if not engine.num_failures] or engines[:1]


async def _all(jobs: Iterable[Awaitable[Found]]) -> list[Found]:
    """Await all of them, to the end of each. Raises what one of them raised, a PeerDied only if none raised more."""
    results = await asyncio.gather(*jobs, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, PeerDied)):
        raise error
    return [result for result in results if not isinstance(result, BaseException)]
