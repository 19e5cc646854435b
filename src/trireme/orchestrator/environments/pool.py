"""One environment of a run: installs it, starts its workers, runs and scores rollouts in them, replaces dead workers.

Example:
    async with open_environment(config, logs=paths.logs) as environment:
        done = await environment.run(Session(RunTask(task="0-17-3", index=17, sampling={...}), ask))

The session is asked for each model turn and returns a Reply. What it raises comes out of `run`, and cancelling the
caller cancels it.

Failures of a rollout:
- Its environment or its reward function raises: `RolloutFailed`, for this rollout only.
- It takes too long: it is cancelled, with a `RolloutFailed` of stage "timeout".
- Its worker sends bytes that are no message, sends nothing for as long as a rollout may take, or holds more memory than
  it may: the worker is killed.
- Its worker dies: the rollout is issued again, to another worker or to the restarted one. All rollouts of a dead worker
  are suspects. One that is the only one to have seen a second death is dropped. If several have, each is retried
  while no other such rollout runs, so that one bad rollout does not take the others with it.

If rewards compare the rollouts of a group (`group_rewards`), one worker runs the whole group. It holds the rollouts
that are over until the last one is. Held rollouts take no slot of `max_concurrent`, so overlapping groups all end. A
group is then one suspect.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.base.errors import ConfigError, PeerDied
from trireme.base.log import get_logger
from trireme.base.processes import raise_open_files
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.metric_names import MetricNames
from trireme.orchestrator.environments.programs import AgentPrograms, listen
from trireme.orchestrator.environments.venv import environment_python, find_environment
from trireme.orchestrator.environments.worker_process import LOAD_TIMEOUT_S, EnvironmentWorker, WorkerDied
from trireme.orchestrator.session.session import RolloutFailed, Session, cancel_all
from trireme.orchestrator.session.wire import Done, Load, Ready

if TYPE_CHECKING:
    from trireme.orchestrator.gateway.server import Gateway
    from trireme.orchestrator.gateway.sessions import Offers

log = get_logger("environments")

MAX_RESTARTS = 5  # restarts of a worker in a row, without one settled rollout between them
LONGEST_BACKOFF_S = 30.0
STARTS = 3  # attempts to start a worker that is killed while it loads
PING_EVERY_S = 5.0
CONTAINERS_TIMEOUT_S = 120.0

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
    is_evaluation: bool = False,
    shows_pictures: bool = False,
) -> AsyncIterator[Environment]:
    """Install what the environment needs, start its workers, and wait until all have loaded it.

    Args:
        is_evaluation: whether it is used at the same time as one for training, which may have the same name.
        shows_pictures: whether requests of agent programs may be as large as pictures are.

    Raises: ConfigError if it cannot be found, installed or loaded.
    """
    raise_open_files()  # a rollout under way is a connection to an engine, and its programs have several to the gateway
    name = f"{'eval-' if is_evaluation else ''}{config.file_name}"
    source = find_environment(config.id, root=root)
    install_log = logs / f"environment-{name}-install.stdout"
    python = await asyncio.to_thread(environment_python, source, cache=cache, log_file=install_log)

    counts: Counter[str] = Counter()
    agent: dict[str, Any] | None = None
    programs: AgentPrograms | None = None
    if config.agent is not None:
        # the same names after a restart, so that programs, containers and files of an earlier attempt are found
        folders = logs.resolve() / "agents" / name
        agent = config.agent.model_dump(mode="json")
        agent |= {"folders": str(folders), "label": f"{folders}:{config.resolved_name}"}
        if not config.agent.external:
            log_file, address = logs / f"environment-{name}-programs.stdout", (config.agent.host, config.agent.port)
            programs = AgentPrograms(python, folders=folders, log_file=log_file, address=address)
            agent["programs"] = str(programs.path)

    workers = [
        EnvironmentWorker(
            name=f"{name}-{number}",
            python=python,
            load=Load(kind=source.kind, module=source.module, args=config.args, agent=agent, seed=seed),
            log_file=logs / f"environment-{name}-{number}.stdout",
            load_timeout_s=load_timeout_s,
            keep_python_path=source.folder is None,
            max_memory_gib=config.max_memory_gib,
            inherit=config.inherit,
            counts=counts,
        )
        for number in range(config.num_workers)
    ]

    waits = waits or Waits("orchestrator", logs)
    environment = Environment(config, counts, workers, waits, programs, load_timeout_s)

    # closed in the opposite order: clients and gateway, the workers, what these left in containers, the programs
    async with AsyncExitStack() as stack:
        if programs is not None:
            stack.push_async_callback(asyncio.to_thread, programs.close)
            await asyncio.to_thread(programs.open)
        # programs that outlived the orchestrator still use their containers
        if programs is None or not programs.found:
            await asyncio.to_thread(_remove_containers, agent)
        stack.push_async_callback(asyncio.to_thread, _remove_containers, agent)
        stack.push_async_callback(environment._close)
        await environment._start()

        # only now, as a loaded environment of verifiers v1 asks for a gateway without an agent in the configuration
        if environment.uses_gateway:
            from trireme.orchestrator.gateway.server import open_gateway  # it imports a web framework

            host, port = (config.agent.host, config.agent.port) if config.agent else ("127.0.0.1", 0)
            listener = programs.listener if programs is not None and programs.listener else listen(host, port)
            opening = open_gateway(listener, host, shows_pictures=shows_pictures)
            environment.gateway = await stack.enter_async_context(opening)
            # their requests wait until their sessions are resumed, instead of being refused as unknown
            for key in programs.found.values() if programs is not None else ():
                environment.gateway.expect(key)
            if config.agent is not None and config.agent.external:
                from trireme.orchestrator.gateway.sessions import Offers

                most = config.max_concurrent
                environment.offers = Offers(environment.gateway, environment.name, host, most, waits)
                stack.callback(environment.offers.close)
                log.info("%s: clients open sessions at %s/sessions", environment.name, environment.gateway.url)
        yield environment


def _remove_containers(agent: dict[str, Any] | None) -> None:
    """Remove the containers that an earlier attempt of this run, or a killed worker, has left behind."""
    if agent is None or agent["runtime"] not in ("docker", "podman"):
        return
    label = f"label=trireme.environment={agent['label']}"
    with suppress(FileNotFoundError, subprocess.TimeoutExpired):  # the worker reports an engine that is not there
        run = partial(subprocess.run, capture_output=True, text=True, timeout=CONTAINERS_TIMEOUT_S)
        found = run([agent["runtime"], "ps", "--all", "--quiet", "--filter", label]).stdout.split()
        if found:
            log.warning("Removing %d containers of an earlier attempt.", len(found))
            run([agent["runtime"], "rm", "--force", *found])


@dataclass(eq=False)
class Environment:
    """One entry of `[[orchestrator.env]]`, loaded and ready to run rollouts."""

    config: EnvironmentConfig
    counts: Counter[str]
    """Failures so far. Of rollouts: `timeout`, `rollout_error`, `score_error`, and `worker_error` for those whose
    worker died again and again. Of workers: `worker_death`, and in how many of these deaths it was killed because
    of its `memory` or of the `garbage` that it sent."""
    _workers: list[EnvironmentWorker]
    _waits: Waits
    _programs: AgentPrograms | None
    _load_timeout_s: float
    num_train: int = 0
    num_eval: int = 0  # 0: it has no evaluation set, and an eval run reads the training set
    versions: dict[str, str] = field(default_factory=dict)
    num_restarts: int = 0
    group_rewards: bool = False  # rewards compare the rollouts of a group
    has_solutions: bool = False  # its tasks bring solutions, see `RunTask.solve`
    gateway: Gateway | None = None  # server at which its agent programs find the policy
    offers: Offers | None = None  # routes by which clients of a user's own harness play its rollouts

    def __post_init__(self) -> None:
        self.name = self.config.resolved_name
        self.uses_gateway = self.config.agent is not None  # so do environments of verifiers v1
        self._longest_absence_s = (MAX_RESTARTS + 1) * (self._load_timeout_s + LONGEST_BACKOFF_S)
        self._ping_every_s = min(PING_EVERY_S, self.config.rollout_timeout_s / 4)
        self._keepers: list[asyncio.Task[None]] = []
        self._slots = asyncio.Semaphore(self.config.max_concurrent)
        self._exclusive = ExclusiveSection()  # for a suspect that has seen two deaths
        self._worker_came = asyncio.Event()
        self._waiting_for_worker = asyncio.Lock()  # held by the rollout that waits in `/status`, for all of them
        self._given_up: str | None = None
        self._metric_names = MetricNames(self.name)

    def check_group_size(self, group_size: int) -> None:
        """Raises: ConfigError if rewards compare a whole group, and `max_concurrent` is smaller than a group."""
        if self.group_rewards and group_size > self.config.max_concurrent:
            raise ConfigError(
                f"The rewards of environment {self.name!r} compare the {group_size} rollouts of a group, and its "
                f"`max_concurrent` is {self.config.max_concurrent} - expected a whole group to fit - raise "
                f"`max_concurrent` to {group_size} or more, or lower `rollouts_per_example`."
            )

    async def run(self, session: Session) -> Done:
        """Run and score one rollout.

        Raises:
            RolloutFailed: for a reason of its own.
            PeerDied: all workers of the environment are dead and could not be restarted.
        """
        session.timeout_s = self.config.rollout_timeout_s
        if self.gateway is None:
            return await self._run(session)

        # requests are written only for programs that may outlive this process, and are resumed then
        if session.log is not None:
            session.log.keeps_requests = self._programs is not None
        play = self._run_with_programs if self.offers is None else self._run_with_client
        why = "its rollout is over"
        try:
            done = await play(session, self.gateway)
            self.gateway.close(session.task.api_key, why)
            return done
        except BaseException as error:
            why = f"its rollout failed: {error}" if isinstance(error, RolloutFailed) else why
            self.gateway.close(session.task.api_key, why)
            if self._programs is not None:  # its worker ends them, too, unless that is dead
                await asyncio.shield(self._programs.end(session.task.task))
            raise

    async def _run_with_client(self, session: Session, gateway: Gateway) -> Done:
        """Run a rollout that a client of a user's own harness plays. The client outlives the environment's worker."""
        from trireme.orchestrator.gateway.sessions import OfferedEndpoint  # it imports a web framework

        async def keep_on() -> None:
            pass  # the client does not notice that the environment's worker has died

        assert self.offers is not None
        endpoint = OfferedEndpoint(gateway, session).open()
        try:
            async with self.offers.offer(endpoint):
                session.play = endpoint.play
                done = await self._run(session, keep_on)
        finally:
            session.play = None  # each holds the other, and garbage is collected rarely
        done.given_up = endpoint.unread()
        return done

    async def _run_with_programs(self, session: Session, gateway: Gateway) -> Done:
        """Run a rollout that agent programs play."""
        from trireme.orchestrator.gateway.endpoint import Endpoint  # it imports a web framework

        # the program of an earlier orchestrator may still be there
        name, programs, has_traces = session.task.task, self._programs, self.config.agent is None
        found = programs.found.pop(name, "") if programs is not None else ""
        endpoint = Endpoint(gateway, session, has_traces, found)
        if not found:
            endpoint.open()
        elif not await endpoint.resume():
            # its earlier turns cannot be read from disk, so the program cannot be answered any more
            assert programs is not None
            await programs.end(name)
            endpoint = endpoint.restart()

        async def begin_again() -> None:
            # its worker has died, and its program may have outlived that
            nonlocal endpoint
            if programs is None or name not in await programs.running():
                endpoint = endpoint.restart()

        try:
            done = await self._run(session, begin_again)
            is_lost = endpoint.has_lost_program
        except RolloutFailed:
            if not (is_lost := endpoint.has_lost_program):
                raise
        # a program that outlived the orchestrator, and asked for nothing since, may have given up
        if is_lost:
            log.info("%s: its program ended when the orchestrator died; it is started again", name)
            endpoint = endpoint.restart()
            done = await self._run(session, begin_again)
        done.given_up = endpoint.unread()
        return done

    def has_program(self, task: str) -> bool:
        """Return whether a program of this rollout has outlived the orchestrator before this one."""
        return self._programs is not None and task in self._programs.found

    async def _run(self, session: Session, begin_again: Callable[[], Awaitable[None]] | None = None) -> Done:
        """Run a rollout in a worker, and again in another one if that dies.

        Args:
            begin_again: awaited before it runs again; `session.restart` is called if not given.
        """
        task = session.task
        self.check_group_size(task.group_size)
        is_compared = self.group_rewards and bool(task.group)
        session.num_deaths = 0
        try:
            while True:
                try:
                    # after two deaths it runs while no other such suspect does, so that a third one shows which it is
                    suspect = task.group if is_compared else task.task
                    async with self._exclusive.enter(suspect) if session.num_deaths >= 2 else nullcontext():
                        # most rollouts wait for nothing here, and what watches over a wait costs more than they do
                        async with session.unless_failed() if self._slots.locked() else nullcontext():
                            await self._slots.acquire()
                        with ExitStack() as slot:  # closed early when it only waits for its group
                            slot.callback(self._slots.release)
                            await session.reserve(slot)
                            is_ready = any(worker.is_ready for worker in self._workers)
                            async with nullcontext() if is_ready else session.unless_failed():
                                await self._wait_for_worker()
                            # no `await` from here until the worker has registered the rollout: it is still alive then
                            worker = self._choose_worker(task.group if is_compared else "")
                            done = await worker.run(session, on_held=slot.close)
                    return self._metric_names.apply(done)
                except WorkerDied as death:
                    session.num_deaths += 1
                    if session.num_deaths >= 2 and death.is_only_suspect:
                        death.worker.num_settled += 1
                        words = f"worker died {session.num_deaths} times with this rollout under way; the last time: "
                        raise RolloutFailed("worker", f"{words}{death}") from death
                if begin_again is not None:
                    await begin_again()
                else:
                    session.restart()
        except RolloutFailed as failure:
            self.counts[COUNTED[failure.stage]] += 1
            raise

    def _choose_worker(self, group: str) -> EnvironmentWorker:
        """Return the worker of a group whose rewards are compared; else one that answers, with the fewest rollouts."""
        ready = [worker for worker in self._workers if worker.is_ready]
        # a group is scored in one worker; a worker that is silent may be about to be killed, so it comes last
        home = next((worker for worker in ready if group and worker.runs_group(group)), None)
        return home or min(ready, key=lambda each: (each.silent_s > 3 * self._ping_every_s, each.num_running))

    async def _wait_for_worker(self) -> None:
        """Wait until a worker is ready. If one is, return without letting another task run.

        Raises: PeerDied once every worker has had the time for all its restarts.
        """
        while not any(worker.is_ready for worker in self._workers):
            if self._given_up:
                raise PeerDied(self._given_up)
            async with self._waiting_for_worker:
                # another rollout held the lock meanwhile, and may have seen a worker come, or given up
                if self._given_up or any(worker.is_ready for worker in self._workers):
                    continue
                self._worker_came.clear()
                what, peer = f"a worker of environment {self.name!r}", self._workers[0].log_file.stem
                with self._waits.waiting(what, peer=peer, deadline_s=self._longest_absence_s) as wait:
                    try:
                        async with asyncio.timeout(wait.deadline_s):
                            await self._worker_came.wait()
                    except TimeoutError:
                        self._given_up = f"{wait}, longer than the {wait.deadline_s:.0f} s allowed. Look at {wait.log}"

    # workers

    async def _start(self) -> None:
        async def start(worker: EnvironmentWorker) -> Ready:
            for _ in range(STARTS - 1):
                try:
                    return await worker.start()
                except PeerDied as error:  # another process killed it: that says nothing about the environment
                    log.warning("%s Starting it again.", error)
            return await worker.start()

        starting = [asyncio.create_task(start(worker)) for worker in self._workers]
        try:
            loaded = await asyncio.gather(*starting)  # not a TaskGroup: a ConfigError is for people, not a group of one
        finally:
            await cancel_all(starting)

        # an example's index must mean the same in each worker; different sizes show that it does not
        first = loaded[0]
        if any((ready.num_train, ready.num_eval) != (first.num_train, first.num_eval) for ready in loaded):
            sizes = ", ".join(f"{ready.num_train} + {ready.num_eval}" for ready in loaded)
            raise ConfigError(
                f"The workers of environment {self.name!r} loaded data sets of different sizes (train + eval: {sizes}) "
                "- expected the same examples in each - make `load_environment` draw them with a fixed seed."
            )

        self.num_train, self.num_eval, self.versions = first.num_train, first.num_eval, first.versions
        self.group_rewards, self.has_solutions = first.group_rewards, first.has_solutions
        if first.warning:
            log.warning("%s", first.warning)
        self.uses_gateway |= first.uses_gateway

        # from now on, workers that die are restarted, and those that hang are killed
        for worker in self._workers:
            watch = worker.watch(every_s=self._ping_every_s, limit_s=self.config.rollout_timeout_s)
            self._keepers += [asyncio.create_task(self._keep_alive(worker)), asyncio.create_task(watch)]

    async def _close(self) -> None:
        self._given_up = f"Environment {self.name!r} was closed with this rollout under way."
        await cancel_all(self._keepers)
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._worker_came.set()

    async def _keep_alive(self, worker: EnvironmentWorker) -> None:
        """Restart the worker whenever it dies, with a longer pause each time. End when it has died too often."""
        num_restarts_in_a_row = num_settled = 0
        while True:
            reason = await worker.wait_for_death()
            self.counts["worker_death"] += 1

            # only rollouts that ended since show that a restart helped: a worker that dies at once is given up
            if worker.num_settled > num_settled:
                num_restarts_in_a_row, num_settled = 0, worker.num_settled
            if num_restarts_in_a_row >= MAX_RESTARTS:
                break
            log.warning("%s Restarting it (restart %d).", reason, self.num_restarts + 1)
            if num_restarts_in_a_row:
                await asyncio.sleep(min(LONGEST_BACKOFF_S, 0.5 * 2**num_restarts_in_a_row))
            num_restarts_in_a_row += 1
            self.num_restarts += 1
            try:
                # the process of agent programs may have died too, and then takes all workers with it
                if self._programs is not None:
                    await asyncio.to_thread(self._programs.start)
                await worker.start()
            except Exception as error:  # it loaded before, so this may pass: memory or disk was short
                log.warning("%s: %s", type(error).__name__, error)
            # rollouts that wait look again, and wait on if the restart has failed
            self._worker_came.set()

        worker.is_abandoned = True
        log.error("%s It was restarted %d times without finishing a rollout, and stays dead.", reason, MAX_RESTARTS)

        # the last worker's keeper ends the wait of all rollouts, with the reason
        if all(each.is_abandoned for each in self._workers):
            self._given_up = (
                f"All {len(self._workers)} workers of environment {self.name!r} are dead; the last: {reason} Expected "
                f"one to finish a rollout within {MAX_RESTARTS} restarts - look at the end of its log for the cause."
            )
            self._worker_came.set()


class ExclusiveSection:
    """A section for one name at a time. All tasks of that name may be inside together.

    Example:
        async with section.enter("group 17"):
            ...
    """

    def __init__(self) -> None:
        self._name = ""
        self._num_inside = 0
        self._emptied = asyncio.Event()

    @asynccontextmanager
    async def enter(self, name: str) -> AsyncIterator[None]:
        while self._num_inside and self._name != name:
            self._emptied.clear()
            await self._emptied.wait()
        self._name = name
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._emptied.set()
