"""Environments, as the rest of the orchestrator sees them: run a rollout, get it scored. Workers may come and go.

Example:
    async with open_environment(config, logs=paths.logs) as environment:
        done = await environment.run(RunTask(task="0-17-3", index=17, sampling={...}), ask)

`ask` is called for each model turn and answers with a Reply. It runs in the caller's own task, so whatever it raises
comes out of `run`, and cancelling the caller cancels it.

What happens to a rollout:
- its environment or its reward function raises: `RolloutFailed`, for this rollout only
- it takes too long: cancelled, `RolloutFailed` with stage "timeout"
- its worker sends what is no message, or nothing for as long as a rollout may take, or holds more memory than it may:
  that worker is killed
- its worker dies: issued again to another or the restarted worker. All rollouts of a dead worker are suspects. One that
  is the only one to have seen a second death is dropped; where several have, each is tried once more with no other such
  rollout beside it, so that one bad rollout does not take the innocent with it.

Where rewards compare the rollouts of a group (`group_rewards`), all of a group run in one worker, which holds those
that are over until the last one is. Held ones take no place of `max_concurrent`; so groups that began in each other's
midst all come to their end. A group is then one suspect.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from trireme.base.errors import ConfigError, PeerDied
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.group_results import GroupResults
from trireme.orchestrator.environments.open_rollout import AskPolicy, RolloutFailed, cancel_all
from trireme.orchestrator.environments.places import Isolation, Place
from trireme.orchestrator.environments.venv import environment_python, find_environment
from trireme.orchestrator.environments.wire import Done, Load, Ready, RunTask
from trireme.orchestrator.environments.worker_process import LOAD_TIMEOUT_S, EnvironmentWorker, WorkerDied

log = get_logger("environments")

MAX_RESTARTS = 5  # of a worker, in a row, without one settled rollout between them
LONGEST_BACKOFF_S = 30.0
STARTS = 3  # of a worker that is killed while it loads
PING_EVERY_S = 5.0

COUNTED = {"timeout": "timeout", "rollout": "rollout_error", "score": "score_error", "worker": "worker_error"}
"""Names in `Environment.counts`, by the stage at which a rollout failed."""


@asynccontextmanager
async def open_environment(
    config: EnvironmentConfig,
    *,
    logs: Path,
    root: Path = Path("environments"),
    cache: Path | None = None,
    seed: int = 0,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    waits: Waits | None = None,
) -> AsyncIterator[Environment]:
    """Installs what the environment needs, starts its workers and waits until all have loaded it.

    Args:
        waits: where it says what its rollouts wait for.

    Raises: ConfigError where it cannot be found, installed or loaded.
    """
    name = re.sub(r"[^\w.-]+", "_", config.name or config.id)
    source = find_environment(config.id, root=root)
    install_log = logs / f"environment-{name}-install.stdout"
    python = await asyncio.to_thread(environment_python, source, cache=cache, log_file=install_log)
    counts: Counter[str] = Counter()
    workers = [
        EnvironmentWorker(
            name=f"{name}-{number}",
            python=python,
            load=Load(module=source.module, args=config.args, seed=seed),
            log_file=logs / f"environment-{name}-{number}.stdout",
            load_timeout_s=load_timeout_s,
            keep_python_path=source.folder is None,
            max_memory_gib=config.max_memory_gib,
            counts=counts,
        )
        for number in range(config.num_workers)
    ]
    waits = waits or Waits("orchestrator", logs)
    environment = Environment(config, workers, waits, load_timeout_s=load_timeout_s, counts=counts)
    try:
        await environment._start()
        yield environment
    finally:
        await environment._close()


class Environment:
    """One entry of `[[orchestrator.env]]`, loaded and ready to run rollouts."""

    def __init__(
        self,
        config: EnvironmentConfig,
        workers: list[EnvironmentWorker],
        waits: Waits,
        *,
        load_timeout_s: float,
        counts: Counter[str],
    ) -> None:
        self.config = config
        self.name = config.name or config.id
        self.num_train = 0
        self.num_eval = 0  # 0: it has no evaluation set, an eval run reads the training set
        self.versions: dict[str, str] = {}
        self.num_restarts = 0
        self.num_rollouts = 0  # that ended, with a reward or without
        self.counts = counts
        """What went wrong so far. Of rollouts: `timeout`, `rollout_error`, `score_error`, and `worker_error` for those
        whose worker died again and again. Of workers: `worker_death`, and in how many of these deaths it was killed
        because of its `memory` or of the `garbage` that it sent."""
        self.group_rewards = False  # rewards compare the rollouts of a group
        self._workers = workers
        self._waits = waits
        self._longest_absence_s = (MAX_RESTARTS + 1) * (load_timeout_s + LONGEST_BACKOFF_S)
        self._keepers: list[asyncio.Task[None]] = []
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._isolation = Isolation()  # of a suspect that has seen two deaths
        self._homes: dict[str, EnvironmentWorker] = {}  # of groups with rollouts under way, where rewards compare these
        self._group_members: Counter[str] = Counter()
        self._results = GroupResults()
        self._worker_came = asyncio.Event()
        self._asking_for_worker = asyncio.Lock()  # held by the one rollout that waits by name, for all of them
        self._given_up: str | None = None

    @property
    def _ping_every_s(self) -> float:
        return min(PING_EVERY_S, self.config.rollout_timeout_s / 4)

    @property
    def num_running(self) -> int:
        return sum(worker.num_running for worker in self._workers)

    async def run(self, task: RunTask, ask: AskPolicy, *, restart_deadline: Callable[[], None] = lambda: None) -> Done:
        """Runs and scores one rollout.

        Args:
            restart_deadline: called before it is issued again: what it has asked so far is void.

        Raises:
            RolloutFailed: for a reason of its own.
            PeerDied: all workers of the environment are dead and could not be restarted.
        """
        self.check_group_size(task.group_size)
        try:
            return await self._run_until_settled(task, ask, restart_deadline)
        except RolloutFailed as failure:
            self.counts[COUNTED[failure.stage]] += 1
            self.num_rollouts += 1
            raise

    def check_group_size(self, group_size: int) -> None:
        """Raises: ConfigError where its rewards compare a whole group, and that cannot run at once."""
        if self.group_rewards and group_size > self.config.max_concurrent:
            raise ConfigError(
                f"The rewards of environment {self.name!r} compare the {group_size} rollouts of a group, and its "
                f"`max_concurrent` is {self.config.max_concurrent} - expected a whole group to fit - raise "
                f"`max_concurrent` to {group_size} or more, or lower `rollouts_per_example`."
            )

    async def _run_until_settled(self, task: RunTask, ask: AskPolicy, restart_deadline: Callable[[], None]) -> Done:
        self._group_members[task.group] += 1
        try:
            for num_deaths in itertools.count():
                try:
                    done = await self._attempt(task, ask, num_deaths=num_deaths)
                    if self._is_compared(task):
                        limit_s = self.config.rollout_timeout_s
                        await self._results.until_all_are_told(task.group, task.group_size, timeout_s=limit_s)
                    self.num_rollouts += 1
                    return done
                except WorkerDied as death:
                    self._results.worker_died(task.group, death)
                    if num_deaths and death.is_only_suspect:
                        death.worker.num_settled += 1
                        raise _drop(num_deaths + 1, death) from death
                restart_deadline()
            raise AssertionError("unreachable")
        except RolloutFailed:
            self._results.release(task.group)
            raise
        finally:
            self._leave_group(task.group)

    def _leave_group(self, group: str) -> None:
        self._group_members[group] -= 1
        if not self._group_members[group]:
            del self._group_members[group]
            self._homes.pop(group, None)

    async def _attempt(self, task: RunTask, ask: AskPolicy, *, num_deaths: int) -> Done:
        if num_deaths < 2:
            return await self._run_once(task, ask, num_deaths=num_deaths)
        async with self._isolation.alone(self._suspect(task)):
            return await self._run_once(task, ask, num_deaths=num_deaths)

    async def _run_once(self, task: RunTask, ask: AskPolicy, *, num_deaths: int) -> Done:
        async with Place(self._places) as place:
            worker = await self._worker_for(task)
            return await worker.run(
                task,
                ask,
                timeout_s=self.config.rollout_timeout_s,
                num_deaths=num_deaths,
                on_held=place.give_back,
            )

    def _suspect(self, task: RunTask) -> str:
        return task.group if self._is_compared(task) else task.task

    def _is_compared(self, task: RunTask) -> bool:
        return self.group_rewards and bool(task.group)

    async def _worker_for(self, task: RunTask) -> EnvironmentWorker:
        """There is no `await` between this choice and the rollout's registration, so the worker is still alive then."""
        await self._until_one_is_ready()
        if not self._is_compared(task):
            return self._least_loaded()
        home = self._homes.get(task.group)
        if home is None or not home.is_ready:
            home = self._homes[task.group] = self._least_loaded()
        return home

    def _least_loaded(self) -> EnvironmentWorker:
        alive = [worker for worker in self._workers if worker.is_ready]
        return min(alive, key=lambda worker: (worker.silent_s > 3 * self._ping_every_s, worker.num_running))

    async def _until_one_is_ready(self) -> None:
        """Raises: PeerDied. Returns at once where one is: no other task runs then before the caller goes on."""
        while not any(worker.is_ready for worker in self._workers):
            if self._given_up:
                raise PeerDied(self._given_up)
            await self._until_a_worker_came()

    async def _until_a_worker_came(self) -> None:
        """Or none will. By then every worker has had the time for all its restarts."""
        async with self._asking_for_worker:
            if self._given_up or any(worker.is_ready for worker in self._workers):
                return
            self._worker_came.clear()
            what, peer = f"a worker of environment {self.name!r}", self._workers[0].log_file.stem
            with self._waits.waiting(what, peer=peer, deadline_s=self._longest_absence_s) as wait:
                try:
                    async with asyncio.timeout(wait.deadline_s):
                        await self._worker_came.wait()
                except TimeoutError:
                    self._given_up = f"{wait}, longer than the {wait.deadline_s:.0f} s allowed. Look at {wait.log}"

    async def _start(self) -> None:
        self._adopt(await _all_or_first_error([_started(worker) for worker in self._workers]))
        for worker in self._workers:
            watch = worker.watch(every_s=self._ping_every_s, limit_s=self.config.rollout_timeout_s)
            self._keepers += [asyncio.create_task(self._keep_alive(worker)), asyncio.create_task(watch)]

    async def _close(self) -> None:
        self._given_up = f"Environment {self.name!r} was closed with this rollout under way."
        await cancel_all(self._keepers)
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._worker_came.set()

    def _adopt(self, facts: list[Ready]) -> None:
        first = facts[0]
        if any((ready.num_train, ready.num_eval) != (first.num_train, first.num_eval) for ready in facts):
            sizes = ", ".join(f"{ready.num_train} + {ready.num_eval}" for ready in facts)
            raise ConfigError(
                f"The workers of environment {self.name!r} loaded data sets of different sizes (train + eval: {sizes}) "
                "- expected the same examples in each - make `load_environment` draw them with a fixed seed."
            )
        self.num_train, self.num_eval, self.versions = first.num_train, first.num_eval, first.versions
        self.group_rewards = first.group_rewards

    async def _keep_alive(self, worker: EnvironmentWorker) -> None:
        """Waits for the worker's death; restarts it, with a longer pause each time. Ends when it has died too often."""
        num_restarts_in_a_row = num_settled = 0
        while True:
            reason = await worker.wait_for_death()
            self.counts["worker_death"] += 1
            if worker.num_settled > num_settled:
                num_restarts_in_a_row, num_settled = 0, worker.num_settled
            if num_restarts_in_a_row >= MAX_RESTARTS:
                return self._give_up(worker, reason)
            log.warning("%s Restarting it (restart %d).", reason, self.num_restarts + 1)
            await asyncio.sleep(_backoff_s(num_restarts_in_a_row))
            num_restarts_in_a_row += 1
            self.num_restarts += 1
            try:
                await worker.start()
            except Exception as error:  # it loaded before, so this may pass: memory or disk was short
                log.warning("%s: %s", type(error).__name__, error)
            self._worker_came.set()

    def _give_up(self, worker: EnvironmentWorker, reason: str) -> None:
        worker.is_abandoned = True
        log.error("%s It was restarted %d times without finishing a rollout, and is left dead.", reason, MAX_RESTARTS)
        if all(each.is_abandoned for each in self._workers):
            self._given_up = (
                f"All {len(self._workers)} workers of environment {self.name!r} are dead; the last: {reason} Expected "
                f"one to finish a rollout within {MAX_RESTARTS} restarts - look at the end of its log for the cause."
            )
            self._worker_came.set()


def _drop(num_deaths: int, death: WorkerDied) -> RolloutFailed:
    often = "twice" if num_deaths == 2 else f"{num_deaths} times"
    return RolloutFailed("worker", f"worker died {often} with this rollout under way; the last time: {death}")


def _backoff_s(num_restarts: int) -> float:
    return min(LONGEST_BACKOFF_S, 0.5 * 2**num_restarts) if num_restarts else 0.0


async def _started(worker: EnvironmentWorker) -> Ready:
    """Somebody else's kill says nothing about the environment: it is loaded again, a few times."""
    for _ in range(STARTS - 1):
        try:
            return await worker.start()
        except PeerDied as error:
            log.warning("%s It is started again.", error)
    return await worker.start()


async def _all_or_first_error(starting: list[Awaitable[Ready]]) -> list[Ready]:
    """Like TaskGroup, but raises the first error itself: a ConfigError is for people, not a group of one."""
    tasks = [asyncio.ensure_future(each) for each in starting]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)
