"""The policy version that is live, and which engines serve it as it was confirmed.

The trainer moves it through `update`; the scheduler, the evaluator and requests wait for it. Nothing here knows how an
update travels.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from trireme.base.disk import when_there_is_room
from trireme.base.errors import PeerDied
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.journal.versions import Versions
from trireme.messages import Newest
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.pool import InferencePool
from trireme.orchestrator.weights.engine_update import name_adapter

log = get_logger("policy")


@dataclass(eq=False)
class Policy:
    """The live version.

    Produces: `version`. Waits for: evaluations that hold a version, and room on the disk. Wakes: the
    scheduler and the evaluator, on each new version.
    """

    pool: InferencePool
    waits: Waits
    versions: Versions
    disk_timeout_s: float = 60.0
    version: int = -1  # nothing is live yet
    is_moving: bool = False  # True from the pause of an update of all engines to its confirmation
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _due: set[int] = field(default_factory=set)  # versions that stay live until they are evaluated
    _num_holding: int = 0

    def __post_init__(self) -> None:
        self.pool.is_begun = self.versions.newest >= 0

    async def reached(self, version: int) -> None:
        """Wait until `version` or a later one is live."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)

    @property
    def newest(self) -> Newest:
        """The newest version that engines ever confirmed in this run, as it is on disk."""
        version = self.versions.newest
        return Newest(version=version, digests=self.versions.read(version).digests if version >= 0 else {})

    # evaluations

    def expect_evaluations(self, versions: Iterable[int]) -> None:
        """Keep each of these versions live, once it is, until an evaluation has held it."""
        self._due = set(versions)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        """Keep the live version while inside. A new one waits, as long as an engine still serves the old one."""
        # While an update is moving, engines serve different versions.
        async with self._changed:
            await self._changed.wait_for(lambda: not self.is_moving)
            self._num_holding += 1
        version = self.version
        try:
            yield version
        finally:
            self._num_holding -= 1
            # Versions up to the live one can no longer be evaluated, so nothing has to be kept for them.
            self._due -= set(range(self.version + 1))

    @property
    def is_held(self) -> bool:
        """Return whether an update has to wait. An evaluation cannot finish once no engine serves the live version."""
        return (self._num_holding > 0 or self.version in self._due) and bool(self.pool.live_engines())

    def must_be_evaluated_first(self, version: int) -> str | None:
        """Return why the trainer, which has `version`, must not make the next one yet; None if it may."""
        newest = self.versions.newest
        if version not in self._due or version < newest or (version == newest and self.pool.live_engines()):
            return None
        return f"version {version} is to be evaluated first; {self.pool.describe()}"

    # engines

    async def admit(self, engine: Engine) -> bool:
        """Let an engine that has come up go live, if it serves the newest version as it was confirmed.

        Returns: whether it is live. Otherwise the trainer has to send it weights.

        Raises: PeerDied if the engine has died since it came up.
        """
        newest = self.newest
        if newest.version < 0:
            return False

        # A name alone proves nothing: the engine may have kept old weights in some layers.
        version, reports = await engine.weight_version(), await engine.weight_reports()
        is_whole = all(report.digests == newest.digests and not report.incomplete for report in reports)
        if version == str(newest.version) and is_whole:
            if self.pool.adapter is not None:  # an orchestrator that died may have left it without the name, and paused
                await name_adapter(engine, self.pool.adapter)
            await engine.post("resume")
            # an update of the other engines may have begun or ended since: this one was not part of it
            if not self.is_moving and self.newest == newest:
                log.info("%s serves version %d, as it was confirmed", engine.url, newest.version)
                await self._enter(newest.version, [engine])
                return True
        log.info("%s serves version %s and needs version %d", engine.url, version, self.versions.newest)
        return False

    async def record(self, version: int, engines: list[Engine], digests: dict[str, str], difference: float) -> None:
        """Write the confirmation of `version` to disk. Nothing may use the version before that.

        Args:
            difference: largest difference between the trainer's and an engine's logprobs on the probe.
        """
        urls = [engine.url for engine in engines]
        is_abandoned = threading.Event()

        def write() -> None:
            if is_abandoned.is_set():
                raise PeerDied(f"The attempt at version {version} was abandoned before its confirmation was on disk.")
            self.versions.record(version, urls, digests, difference)

        writing = asyncio.create_task(
            asyncio.to_thread(
                when_there_is_room,
                write,
                what=f"the confirmation of version {version}",
                folder=self.versions.folder,
                waits=self.waits,
                deadline_s=self.disk_timeout_s,
            )
        )

        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:  # the thread would outlive this, and write after the next attempt
            is_abandoned.set()
            await asyncio.gather(writing, return_exceptions=True)
            raise

    async def go_live(self, version: int, engines: list[Engine], *, keeps_caches: bool = False) -> None:
        """Make a confirmed version live in the engines that confirmed it."""
        self.is_moving = False
        await self._enter(version, engines, keeps_caches=keeps_caches)

    async def _enter(self, version: int, engines: list[Engine], *, keeps_caches: bool = False) -> None:
        for engine in engines:
            self.pool.go_live(engine, version, keeps_caches=keeps_caches)
        async with self._changed:
            self.version = max(self.version, version)
            self._changed.notify_all()
