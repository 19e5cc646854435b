"""Which version of the policy is live, who holds it as it is, who needs weights, and which attempt at the next counts.

The steps from one version to the next (announced, sent, confirmed, and only then used) are in `update`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from trireme.base.disk import when_there_is_room
from trireme.base.errors import PeerDied, TriremeError, WeightsMismatch
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.run import WeightBroadcast
from trireme.journal.versions import Versions
from trireme.messages import Again, Live, Newest, NotYet, PolicyReady, PolicySent, Refusal, Reply
from trireme.orchestrator.engines.pool import Engine, InferencePool
from trireme.orchestrator.weights.update import Update, UpdateSeconds
from trireme.transport.control import within_patience
from trireme.transport.sanity import check_digests

log = get_logger("policy")


class Policy:
    """The live version. Others wait for it; the trainer moves it."""

    def __init__(
        self,
        pool: InferencePool,
        config: WeightBroadcast,
        waits: Waits,
        versions: Versions,
        *,
        offers: bool = False,
        disk_timeout_s: float = 60.0,
    ) -> None:
        """
        Args:
            offers: rollouts may begin as soon as all engines stand still for a version, before they have confirmed it.
        """
        self.version = -1  # nothing is live yet
        self.offered = -1  # the version that a request will be answered by, if it is sent now
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.spent = UpdateSeconds()
        self.pool = pool
        self.config = config
        self.versions = versions
        pool.is_begun = versions.newest >= 0
        self._offers = offers
        self._waits = waits
        self._disk_timeout_s = disk_timeout_s
        self._changed = asyncio.Condition()
        self._due: set[int] = set()  # versions that are not to be left before they are evaluated
        self._num_holding = 0
        self._is_moving = False  # from the pause of an update of all engines to its confirmation
        self._update: Update | None = None
        self._epochs = uuid.uuid4().hex[:8]  # another orchestrator's epochs must not be taken for ours
        self._num_epochs = 0

    async def reached(self, version: int) -> None:
        """Until `version` (or a later one) is live."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)

    async def offered_after(self, version: int) -> None:
        """Until rollouts by a later one may begin."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.offered > version)

    # evaluations

    def expect_evaluations(self, versions: Iterable[int]) -> None:
        """A live version among these stays live until it has been held."""
        self._due = set(versions)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        """Keeps the live version as it is; a new one waits, for as long as there is an engine that serves the old."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_moving)
            self._num_holding += 1
        version = self.version
        try:
            yield version
        finally:
            self._num_holding -= 1
            self._due -= set(range(self.version + 1))

    @property
    def is_held(self) -> bool:
        """Where no engine serves the live version any more, nothing that holds it can be finished."""
        return (self._num_holding > 0 or self.version in self._due) and bool(self.pool.live_engines())

    # engines that come and go

    async def judge(self, engine: Engine) -> bool:
        """An engine that serves the newest version, as it was confirmed before, goes on; another is given weights.

        Raises: PeerDied where it has gone again.
        """
        newest = self.newest
        if newest.version < 0:
            return False
        report = await self.pool.report(engine)
        if self._is_moving or not report.is_version(newest.version, newest.digests):
            log.info("%s serves version %s and is to be given %d", engine.url, report.version, newest.version)
            return False
        await self.pool.post(engine, "resume")  # an orchestrator that died may have left it paused
        log.info("%s serves version %d, as it was confirmed", engine.url, newest.version)
        await self._enter(newest.version, [engine])
        return True

    async def trainer_started(self) -> Newest:
        """Whatever the trainer before it was sending will not be finished, nor tried again."""
        update = self._update
        if update is not None and update.is_confirming:
            update.when_confirmed_or_not(lambda: self._forget_if_broken(update))
        elif update is not None:
            await update.abandon()
            self._forget_if_broken(update)
        return self.newest

    def _forget_if_broken(self, update: Update) -> None:
        """Engines that come up meanwhile are given the version that was confirmed last."""
        if self._update is update and not update.is_confirming:
            self._update, self._is_moving = None, False

    @property
    def newest(self) -> Newest:
        """The newest version that was ever confirmed in this run, as it is on disk."""
        version = self.versions.newest
        return Newest(version=version, digests=self.versions.read(version).digests if version >= 0 else {})

    def needs_weights(self, version: int) -> str | None:
        """Why the trainer, which has `version`, should publish it again; None where it need not."""
        if version > self.versions.newest and not self._is_confirming(version):
            return f"version {version} was not confirmed"
        if version < self.versions.newest or self._is_moving:
            return None
        waiting = [engine.url for engine in self.pool.engines if engine.state == "quarantined"]
        return f"{', '.join(waiting)} came up without weights" if waiting else None

    def _is_confirming(self, version: int) -> bool:
        return self._update is not None and self._update.message.version == version and self._update.is_confirming

    def is_to_be_served_first(self, version: int) -> str | None:
        """Why the trainer, which has `version`, should not make the next one yet: this one could not be evaluated."""
        newest = self.versions.newest
        if version not in self._due or version < newest or (version == newest and self.pool.live_engines()):
            return None
        return f"version {version} is to be evaluated first; {self.pool.describe()}"

    # transfers

    async def ready(self, message: PolicyReady) -> Reply:
        """Answers `PolicyReady`: the same attempt gets the same answer, another begins anew."""
        while self._update is None or not self._update.is_for(message):
            if self._update is not None and self._update.is_later_than(message):
                return Refusal(error=f"attempt {message.attempt} at version {message.version} has been superseded")
            await self._begin(message)
        update = self._update
        if (broken := update.broken()) is not None:
            return Again(reason=str(broken))
        if not await within_patience(update.prepared):
            return NotYet(note=update.note)
        return self._answer(update.prepared)

    async def _begin(self, message: PolicyReady) -> None:
        before = self._update
        if before is not None:
            await before.abandon()
            if self._update is not before:  # the same question, asked twice, has begun it
                return
        self._update = Update(self, message, before)

    async def sent(self, message: PolicySent) -> Reply:
        """Answers `PolicySent`."""
        update = self._update
        if update is None or (update.message.version, update.message.attempt) != (message.version, message.attempt):
            return Again(reason=f"version {message.version} was announced to an orchestrator that is no more")
        if problem := check_digests(update.message, message):
            return Refusal(error=problem)
        confirmed = update.confirm(message)
        if not await within_patience(confirmed):
            return NotYet(note=update.note)
        return self._answer(confirmed)

    def take_seconds(self) -> dict[str, float]:
        """As metrics, of the updates since it was last asked."""
        spent, self.spent = self.spent, UpdateSeconds()
        return {
            "time/update_weights": spent.in_all,
            "time/engines_paused": spent.paused,
            "time/engines_load": spent.loading,
        }

    def _answer(self, task: asyncio.Task) -> Reply:
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, PeerDied):
            return Again(reason=str(error))
        if isinstance(error, WeightsMismatch) and not self.failure.done():
            self.failure.set_exception(error)
            self.failure.exception()  # the trainer is told as well, so nobody need look: no complaint if nobody does
        if not isinstance(error, TriremeError):
            raise error
        return Refusal(error=str(error))

    def new_epoch(self, incarnation: str) -> str:
        self._num_epochs += 1
        return f"{incarnation}/{self._epochs}/{self._num_epochs}"

    def leave(self) -> None:
        """Between here and `go_live` no version is live."""
        self._is_moving = True

    async def offer(self, version: int, engines: list[Engine]) -> None:
        """All that requests could be sent to have loaded `version`, and will go on with it. Not the first: a run that
        cannot serve its model is to end before it has asked for anything."""
        if not self._offers or self.version < 0 or version < self.version:
            return
        for engine in engines:
            self.pool.offer(engine)
        async with self._changed:
            self.offered = version
            self._changed.notify_all()

    async def record(self, version: int, engines: list[str], digests: dict[str, str], difference: float) -> None:
        """Before anybody may use it."""
        await asyncio.to_thread(
            when_there_is_room,
            lambda: self.versions.record(version, engines, digests, difference),
            what=f"the confirmation of version {version}",
            folder=self.versions.folder,
            waits=self._waits,
            deadline_s=self._disk_timeout_s,
        )

    async def go_live(self, version: int, engines: list[Engine]) -> Live:
        """They have confirmed it, and it is on disk that they have."""
        self._is_moving = False
        await self._enter(version, engines)
        return Live(version=version)

    async def _enter(self, version: int, engines: list[Engine]) -> None:
        for engine in engines:
            self.pool.go_live(engine, version)
        async with self._changed:
            self.version = max(self.version, version)
            self.offered = max(self.offered, self.version)
            self._changed.notify_all()
