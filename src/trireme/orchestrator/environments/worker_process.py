"""One worker process of an environment: start, health checks, the rollouts that run in it, and its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

import trireme_worker
from trireme.base.errors import ConfigError, PeerDied
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.processes import last_lines
from trireme.base.token import TOKEN
from trireme.config.files import without_secrets
from trireme.orchestrator.session import wire
from trireme.orchestrator.session.session import Session
from trireme.orchestrator.session.wire import Connection, Done, Failed, Held, Load, Ready, RunTask

log = get_logger("environments")

WORKER = trireme_worker.__path__[0]
"""The program of a worker. The environment's interpreter runs it where it lies, and has no copy of it."""
LOAD_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 1.0  # time to exit for a worker that has hung up
REAP_TIMEOUT_S = 30.0
EXAMPLES_NAMED = 8  # in the log, of those that were under way when a worker died


class WorkerDied(PeerDied):
    """The worker of a rollout ended.

    `is_only_suspect`: no other rollout has seen as many deaths as this one. A group that is scored together is one
    suspect.
    """

    def __init__(self, reason: str, *, worker: EnvironmentWorker, is_only_suspect: bool) -> None:
        super().__init__(reason)
        self.worker = worker
        self.is_only_suspect = is_only_suspect


SYSTEM = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_.*|TZ|TMPDIR|XDG_.*|SSL_CERT_(FILE|DIR)|LD_LIBRARY_PATH|CUDA_.*|"
    "PYTHON.*|TRIREME_.*|(OMP|MKL)_NUM_THREADS|HF_HOME|HF_HUB_OFFLINE"
)
"""Variables that a worker gets in any case. None of them holds a secret; the run's token is taken out before."""


@dataclass(eq=False)
class EnvironmentWorker:
    """One worker process, from start to death, and the same after each restart."""

    name: str
    python: Path
    load: Load
    log_file: Path
    load_timeout_s: float
    keep_python_path: bool
    max_memory_gib: float | None
    inherit: tuple[str, ...] | None  # variables that it gets in addition to `SYSTEM`; all if None
    counts: Counter[str]  # the environment's failures; kills of this worker are added by their reason

    def __post_init__(self) -> None:
        self.is_ready = False
        self.is_abandoned = False
        self.num_settled = 0  # rollouts that ended, or were found to have killed it: what a restart must achieve
        self.silent_s = 0.0  # since its last message, counted by `watch`
        self._scores_groups = False
        self._rollouts: dict[str, Session] = {}
        self._scored: dict[str, list[tuple[Session, Done]]] = {}
        """Results of groups that are scored together, until each member has its own. If the worker dies before that,
        another one cannot score the rest without those that are here, so the whole group runs again."""
        self._num_issued = 0
        self._process: asyncio.subprocess.Process | None = None
        self._connection: Connection | None = None
        self._is_running = False
        self._blame = ""  # why we killed it

    @property
    def num_running(self) -> int:
        return len(self._rollouts)

    def runs_group(self, group: str) -> bool:
        return any(rollout.task.group == group for rollout in self._rollouts.values())

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> Ready:
        """Start the process and wait until it has loaded the environment.

        Raises:
            ConfigError: with the last lines of its log, and the log's path.
            PeerDied: another process killed it.
        """
        self._blame = ""
        answer: asyncio.Future[Ready | Failed] = asyncio.get_running_loop().create_future()
        await self._spawn(answer)
        self._send(self.load)

        try:
            async with asyncio.timeout(self.load_timeout_s):
                loaded = await answer
        except TimeoutError as error:
            await self._end()
            raise self._load_error(f"was not loaded after {self.load_timeout_s:.0f} s") from error
        except PeerDied as error:
            await self._end(timeout_s=EXIT_TIMEOUT_S)
            # a signal from outside, the kernel's when memory runs out for example, says nothing about the environment
            if self._process is not None and self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM):
                raise PeerDied(f"Environment worker {self.name} {self._how_it_ended()} while it loaded.") from error
            raise self._load_error(f"ended its worker while it was loaded: it {self._how_it_ended()}") from error

        if isinstance(loaded, Failed):
            await self._end(timeout_s=EXIT_TIMEOUT_S)
            raise self._load_error(f"could not be loaded: {loaded.error}", loaded.traceback.splitlines())
        if excess := await self._excess_memory():  # it would be killed before its first rollout
            await self._end()
            raise self._load_error(f"{excess} as soon as it is loaded")

        self.is_ready, self.silent_s = True, 0.0
        self._scores_groups = loaded.group_rewards
        return loaded

    async def run(self, rollout: Session, *, on_held: Callable[[], None]) -> Done:
        """Run and score one rollout.

        Args:
            on_held: see `Session.begin`.

        Raises: RolloutFailed; WorkerDied if the process ended first.
        """
        task = rollout.task
        assert self.is_ready, f"run({task.task}) on worker {self.name}, which is not ready"
        on_wire = f"{task.task}.{self._num_issued}"  # late messages of a cancelled attempt are ignored
        self._num_issued += 1
        rollout.begin(on_held)
        self._rollouts[on_wire] = rollout
        self._send(msgspec.structs.replace(task, task=on_wire))
        self._extend_group_timeouts(task)
        asyncio.get_running_loop().call_soon(self._reach, "environment.asked")  # after the message was sent
        try:
            return await rollout.follow(self._send)
        except BaseException:
            self._send(wire.Cancel(task=on_wire))  # ignored if the rollout is over, or the worker has died
            raise
        finally:
            del self._rollouts[on_wire]
            # its failure or cancellation must not hold up the scores of the others
            self._deliver_scores(task.group)
            self._extend_group_timeouts(task)

    def _extend_group_timeouts(self, task: RunTask) -> None:
        for rollout in self._rollouts.values() if self._scores_groups else ():
            if rollout.task.group == task.group:
                rollout.extend()

    async def watch(self, *, every_s: float, limit_s: float) -> None:
        """Kill it once it holds too much memory, or has answered nothing for `limit_s`, not even a Ping.

        The latter is frozen, or its event loop is blocked. Time during which this process was stopped does not count.
        Runs until cancelled.
        """
        while True:
            began = time.monotonic()
            if self.is_ready:
                self._send(wire.Ping())
            await asyncio.sleep(every_s)
            # a long pause of this process itself counts as no more than two looks
            self.silent_s += min(time.monotonic() - began, 2 * every_s)
            if self.is_ready and self.silent_s >= limit_s:
                self._mark_unhealthy(f"has not answered anything for {self.silent_s:.0f} s (`rollout_timeout_s`)")
            if self.is_ready and (excess := await self._excess_memory()):
                self._mark_unhealthy(excess, count="memory")

    async def _excess_memory(self) -> str:
        """Return in words how far it is above its limit; an empty text if it is not, or has none."""
        if self.max_memory_gib is None or (pid := self.pid) is None:
            return ""
        held = await asyncio.to_thread(resident_gib, pid)
        # the process may have been restarted while the memory of the old one was summed up
        if held <= self.max_memory_gib or pid != self.pid:
            return ""
        return f"holds {held:.2f} GiB of memory, {self.max_memory_gib:g} are allowed (`max_memory_gib`)"

    def _mark_unhealthy(self, blame: str, *, count: str | None = None) -> None:
        """Take no more rollouts and hang up. `wait_for_death` kills it then."""
        if count and not self._blame:
            self.counts[count] += 1
        self._blame = self._blame or blame
        self.is_ready = False
        if self._connection is not None:
            self._connection.close()

    async def wait_for_death(self) -> str:
        """Wait until it dies, fail its rollouts with `WorkerDied`, and return the reason."""
        if not self._is_running or self._connection is None or self._process is None:
            return f"Environment worker {self.name} is not running."
        hung_up = asyncio.ensure_future(self._connection.closed.wait())
        exited = asyncio.ensure_future(self._process.wait())  # a forked child may hold the socket open
        try:
            await asyncio.wait((hung_up, exited), return_when=asyncio.FIRST_COMPLETED)
        finally:
            hung_up.cancel()
            exited.cancel()
        await self._end(timeout_s=0 if self._blame else EXIT_TIMEOUT_S)
        reason = f"Environment worker {self.name} {self._how_it_ended()} (log: {self.log_file})."
        if tasks := sorted({(each.task.split, each.task.index) for each in self._rollouts.values()}):
            named = ", ".join(f"{split} {index}" for split, index in tasks[:EXAMPLES_NAMED])
            reason += f" Under way in it: {named}{', ...' if len(tasks) > EXAMPLES_NAMED else ''}."
        self._fail_rollouts(reason)
        return reason

    async def close(self) -> None:
        """Ask it to tear down, then end it with all its children."""
        if was_ready := self.is_ready:
            self._send(wire.Stop())
        await self._end(timeout_s=STOP_TIMEOUT_S if was_ready else 0.0)
        self._fail_rollouts(f"Environment worker {self.name} was closed.")

    async def _spawn(self, answer: asyncio.Future[Ready | Failed]) -> None:
        # the environment's interpreter has packages of its own, and its code must not see the run's token
        unwanted = {"VIRTUAL_ENV", "PYTHONHOME", "PYTHONSAFEPATH", TOKEN}
        unwanted |= set() if self.keep_python_path else {"PYTHONPATH"}
        variables = {name: value for name, value in os.environ.items() if name not in unwanted}
        if self.inherit is not None:
            variables = {name: variables[name] for name in variables if name in self.inherit or SYSTEM.fullmatch(name)}
        # a fixed hash seed gives sets the same order in each worker, so that examples are the same
        variables |= {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

        # a socket pair instead of stdin and stdout, which environments print to
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with theirs, open(self.log_file, "ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    str(self.python), WORKER, "server", str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                    env=variables, start_new_session=True,
                )  # fmt: skip
        except BaseException:
            ours.close()  # a worker that was started after all exits when it sees this
            raise

        self._is_running = True
        connection = Connection(self._receive, lambda what: self._mark_unhealthy(what, count="garbage"), answer)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
        self._connection = connection

    def _send(self, message: wire.ToWorker) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _receive(self, message: wire.AboutRollout | wire.Pong) -> None:
        """Pass a message on to its rollout. Raises: Garbage if it is about one that this worker never had."""
        self.silent_s = 0.0
        if isinstance(message, wire.Pong):
            return

        if isinstance(message, Done):
            self._reach("environment.scored")

        if rollout := self._rollouts.get(message.task):
            # any end counts as work done, a failure too: the worker lives
            self.num_settled += not isinstance(message, wire.Ask | wire.GaveUp | Held)
            message.task, group = rollout.task.task, rollout.task.group
            # scores of a group are delivered together: should the worker die in between, the whole group runs again
            if isinstance(message, Done) and self._scores_groups and group:
                scored = self._scored.setdefault(group, [])
                scored.append((rollout, message))
                if len(scored) == rollout.task.group_size:
                    self._deliver_scores(group)
                return
            rollout.deliver(message)
            if isinstance(message, Held):
                self._extend_group_timeouts(rollout.task)
            return

        # late messages of a rollout that was cancelled are expected; a number that was never issued is not
        serial = message.task.rpartition(".")[2]
        if not (serial.isdecimal() and int(serial[:20]) < self._num_issued):
            raise wire.Garbage(f"sent a message about a rollout that it never had, {message.task[:80]!r}")

    def _deliver_scores(self, group: str) -> None:
        for rollout, done in self._scored.pop(group, []):
            rollout.deliver(done)

    def _reach(self, point: str) -> None:
        if self._is_running:
            reach(point, pid=self.pid)

    def _fail_rollouts(self, reason: str) -> None:
        self._scored.clear()
        most = max((rollout.num_deaths for rollout in self._rollouts.values()), default=0)
        suspects = {  # a group that is scored together is one
            (self._scores_groups and each.task.group) or on_wire
            for on_wire, each in self._rollouts.items()
            if each.num_deaths == most
        }
        for rollout in list(self._rollouts.values()):
            is_only_suspect = len(suspects) == 1 and rollout.num_deaths == most
            rollout.deliver(WorkerDied(reason, worker=self, is_only_suspect=is_only_suspect))

    async def _end(self, *, timeout_s: float = 0.0) -> None:
        """Give the process time to exit, then kill what is left of it and of its children, and reap it."""
        self.is_ready = False
        if not self._is_running or self._process is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            self._is_running = False  # once only: later, the pid may belong to another process
            kill_family(self._process.pid)
            if self._connection is not None:
                self._connection.close()
        try:
            async with asyncio.timeout(REAP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            log.error("Environment worker %s (pid %d) was killed and is still there.", self.name, self._process.pid)

    def _how_it_ended(self) -> str:
        if self._blame:
            return f"{self._blame}, and was killed"
        code = self._process.returncode if self._process else None
        if code is None or code >= 0:
            return f"exited with code {code}"
        hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def _load_error(self, what: str, last_words: list[str] | None = None) -> ConfigError:
        lines = last_lines(self.log_file, 12) if last_words is None else last_words[-12:]
        return ConfigError(
            f"Environment {self.load.module!r} {what.rstrip('.')}. Last lines:\n"
            + "\n".join(f"  {line}" for line in lines)
            + f"\nExpected its `load_environment(**{without_secrets(self.load.args)!r})` to return an environment - "
            f"correct it, or `args`; the whole log is {self.log_file}"
        )


def resident_gib(pid: int) -> float:
    """Return the memory of a process and all its descendants; 0 if it has ended.

    Pages that several of them share are counted once (PSS), so that forking costs nothing.
    """
    total = 0
    for process in _with_descendants(pid):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / (1 << 30)


def kill_family(leader: int) -> None:
    """Kill a process group, and descendants of its leader that made a group of their own."""
    # listed before the leader dies, as its orphans could not be found by their parents afterwards
    others = _with_descendants(leader)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    for process in others:
        with suppress(psutil.Error):
            process.kill()


def _with_descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []
