"""One worker process of an environment, and our end of the rollouts that run in it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from trireme.base.errors import ConfigError, PeerDied, TriremeError
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.processes import last_lines
from trireme.orchestrator.environments import wire
from trireme.orchestrator.environments.connection import Connection
from trireme.orchestrator.environments.wire import (
    Ask,
    Cancel,
    Done,
    Failed,
    Garbage,
    Load,
    Ping,
    Pong,
    Ready,
    Reply,
    RunTask,
    Stop,
)

log = get_logger("environments")

AskPolicy = Callable[[Ask], Awaitable[Reply]]
WORKER = Path(__file__).parent / "worker"
LOAD_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
REAP_TIMEOUT_S = 30.0
TURNS_AT_ONCE = 256  # that one rollout may ask for


class RolloutFailed(TriremeError):
    """This rollout has no reward. Others are not touched."""

    def __init__(self, stage: str, error: str, traceback: str = "") -> None:
        super().__init__(stage, error, traceback)  # all of them, so that it can be pickled
        self.stage = stage  # "rollout", "score", "timeout" or "worker"
        self.error = error
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.stage}: {self.error}"


class WorkerDied(PeerDied):
    """The worker of this rollout ended. `is_only_suspect`: no other rollout has seen as many deaths as this one."""

    def __init__(self, reason: str, *, worker: EnvironmentWorker, is_only_suspect: bool) -> None:
        super().__init__(reason)
        self.worker = worker
        self.is_only_suspect = is_only_suspect


class EnvironmentWorker:
    """One worker process, from start to death, and again. Knows nothing of the other workers."""

    def __init__(
        self, *, name: str, python: Path, load: Load, log_file: Path, load_timeout_s: float, keep_python_path: bool
    ) -> None:
        self.name = name
        self.is_ready = False
        self.is_abandoned = False
        self.num_settled = 0  # rollouts that ended, or were found to be what killed it: what a restart must achieve
        self.silent_s = 0.0  # since it was last heard of, counted by `watch`
        self.log_file = log_file
        self._python = python
        self._load = load
        self._load_timeout_s = load_timeout_s
        self._keep_python_path = keep_python_path
        self._rollouts: dict[str, _Rollout] = {}
        self._num_issued = 0
        self._process: asyncio.subprocess.Process | None = None
        self._connection: Connection | None = None
        self._is_running = False
        self._blame = ""  # what it did that we had to kill it for

    @property
    def num_running(self) -> int:
        return len(self._rollouts)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> Ready:
        """Starts the process and waits until it has loaded the environment.

        Raises:
            ConfigError: with the last lines of what went wrong, and the log's path.
            PeerDied: somebody killed it.
        """
        self._blame = ""
        answer: asyncio.Future[Ready | Failed] = asyncio.get_running_loop().create_future()
        await self._spawn(answer)
        self._send(self._load)
        try:
            async with asyncio.timeout(self._load_timeout_s):
                loaded = await answer
        except TimeoutError as error:
            await self._end()
            raise self._load_error(f"was not loaded after {self._load_timeout_s:.0f} s") from error
        except PeerDied as error:
            await self._end(patience_s=1)
            if self._was_killed:
                raise PeerDied(f"Environment worker {self.name} {self._how_it_ended()} while it loaded.") from error
            raise self._load_error(f"ended its worker while it was loaded: it {self._how_it_ended()}") from error
        if isinstance(loaded, Failed):
            await self._end(patience_s=1)
            raise self._load_error(f"could not be loaded: {loaded.error}", loaded.traceback.splitlines())
        self.is_ready, self.silent_s = True, 0.0
        return loaded

    async def run(self, task: RunTask, ask: AskPolicy, *, timeout_s: float, num_deaths: int = 0) -> Done:
        """Raises: RolloutFailed; WorkerDied where the process ended first."""
        assert self.is_ready, f"run({task.task}) on worker {self.name}, which is not ready"
        on_wire = f"{task.task}.{self._num_issued}"  # a late message of a cancelled attempt must find no taker
        self._num_issued += 1
        rollout = self._rollouts[on_wire] = _Rollout(task, ask, self._send, num_deaths=num_deaths)
        self._send(msgspec.structs.replace(task, task=on_wire))
        asyncio.get_running_loop().call_soon(self._reach, "environment.asked")  # after what is sent has left
        is_over = False
        try:
            async with asyncio.timeout(timeout_s) as limit:
                outcome = await rollout.follow()
            is_over = True
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RolloutFailed("timeout", f"not finished after {timeout_s:g} s (`rollout_timeout_s`)") from error
        except WorkerDied:
            is_over = True
            raise
        finally:
            del self._rollouts[on_wire]
            if not is_over:
                self._send(Cancel(task=on_wire))
        return outcome

    async def watch(self, *, every_s: float, limit_s: float) -> None:
        """Kills it once it has answered nothing for `limit_s`, not even a Ping: frozen, or its event loop is blocked.

        Waits for the clock; runs until cancelled. Where we were stopped ourselves, the time counts for nothing.
        """
        while True:
            began = time.monotonic()
            if self.is_ready:
                self._send(Ping())
            await asyncio.sleep(every_s)
            self.silent_s += min(time.monotonic() - began, 2 * every_s)
            if self.is_ready and self.silent_s >= limit_s:
                self._condemn(f"has not answered anything for {self.silent_s:.0f} s (`rollout_timeout_s`)")

    def _condemn(self, blame: str) -> None:
        """`wait_for_death` does the rest."""
        self._blame = self._blame or blame
        self.is_ready = False
        if self._connection is not None:
            self._connection.close()

    async def wait_for_death(self) -> str:
        """Returns what is known about it, after all its rollouts have been told."""
        if not self._is_running or self._connection is None or self._process is None:
            return f"Environment worker {self.name} is not running."
        hung_up = asyncio.ensure_future(self._connection.closed.wait())
        exited = asyncio.ensure_future(self._process.wait())  # a forked child may hold the socket open
        try:
            await asyncio.wait((hung_up, exited), return_when=asyncio.FIRST_COMPLETED)
        finally:
            hung_up.cancel()
            exited.cancel()
        await self._end(patience_s=0 if self._blame else 1)
        reason = f"Environment worker {self.name} {self._how_it_ended()} (log: {self.log_file})."
        self._tell_rollouts(reason)
        return reason

    async def close(self) -> None:
        """Asks it to tear down, then ends it with all its children."""
        if self.is_ready:
            self._send(Stop())
            await self._end(patience_s=STOP_TIMEOUT_S)
        else:
            await self._end()
        self._tell_rollouts(f"Environment worker {self.name} was closed.")

    async def _spawn(self, answer: asyncio.Future[Ready | Failed]) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with theirs, open(self.log_file, "ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    str(self._python), str(WORKER), str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                    env=self._variables(), start_new_session=True,
                )  # fmt: skip
        except BaseException:
            ours.close()  # a worker that was started after all ends when it sees this
            raise
        self._is_running = True
        connection = Connection(self._receive, self._condemn, answer)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
        self._connection = connection

    def _variables(self) -> dict[str, str]:
        unwanted = {"VIRTUAL_ENV", "PYTHONHOME", "PYTHONSAFEPATH"} | (
            set() if self._keep_python_path else {"PYTHONPATH"}
        )
        inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
        ours = {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        return inherited | ours

    def _send(self, message: wire.ToWorker) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _receive(self, message: Ask | Done | wire.Error | Pong) -> None:
        """Raises: Garbage where it is about a rollout that this worker never had."""
        self.silent_s = 0.0
        if isinstance(message, Pong):
            return
        if isinstance(message, Done):
            self._reach("environment.scored")
        if rollout := self._rollouts.get(message.task):
            self.num_settled += not isinstance(message, Ask)
            message.task = rollout.task.task
            rollout.deliver(message)
        elif not self._has_had(message.task):
            raise Garbage(f"sent a message about a rollout that it never had, {message.task[:80]!r}")

    def _has_had(self, on_wire: str) -> bool:
        """Late messages of a cancelled rollout are nobody's fault."""
        serial = on_wire.rpartition(".")[2]
        return serial.isdecimal() and int(serial[:20]) < self._num_issued

    def _reach(self, point: str) -> None:
        if self._is_running:
            reach(point, pid=self.pid)

    def _tell_rollouts(self, reason: str) -> None:
        most = max((rollout.num_deaths for rollout in self._rollouts.values()), default=0)
        num_suspects = sum(rollout.num_deaths == most for rollout in self._rollouts.values())
        for rollout in list(self._rollouts.values()):
            is_only_suspect = num_suspects == 1 and rollout.num_deaths == most
            rollout.deliver(WorkerDied(reason, worker=self, is_only_suspect=is_only_suspect))

    async def _end(self, *, patience_s: float = 0.0) -> None:
        """Lets the process end by itself for a while, then kills what is left of it and its children, and reaps it."""
        self.is_ready = False
        if not self._is_running or self._process is None:
            return
        try:
            async with asyncio.timeout(patience_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            self._is_running = False  # once only: later, the number may belong to somebody else's process
            _kill_group(self._process.pid)
            if self._connection is not None:
                self._connection.close()
        try:
            async with asyncio.timeout(REAP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            log.error("Environment worker %s (pid %d) was killed and is still there.", self.name, self._process.pid)

    @property
    def _was_killed(self) -> bool:
        return self._process is not None and self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM)

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
            f"Environment {self._load.module!r} {what.rstrip('.')}. Last lines:\n"
            + "\n".join(f"  {line}" for line in lines)
            + f"\nExpected its `load_environment(**{self._load.args!r})` to return an environment - correct it, or "
            f"`args`; the whole log is {self.log_file}"
        )


class _Rollout:
    """The orchestrator's half of one rollout: takes the worker's messages one by one, in the task of whoever waits.

    Produces: the model turns that are asked for. Waits for: the worker. Woken by: `deliver`, called by the connection.
    """

    __slots__ = ("_ask", "_asking", "_extra", "_inbox", "_send", "_waiter", "num_deaths", "task")

    def __init__(
        self, task: RunTask, ask: AskPolicy, send: Callable[[wire.ToWorker], None], *, num_deaths: int
    ) -> None:
        self.task = task
        self.num_deaths = num_deaths
        self._ask = ask
        self._send = send
        self._inbox: deque[Ask | Done | wire.Error | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._asking: asyncio.Timeout | None = None
        self._extra: set[asyncio.Task[None]] = set()

    async def follow(self) -> Done:
        """Raises: RolloutFailed, WorkerDied, or what `ask` raised."""
        try:
            while True:
                message = await self._next()
                if isinstance(message, Ask):
                    if not self._inbox:  # else it is over already
                        await self._answer_unless_over(message)
                elif isinstance(message, Done):
                    return message
                elif isinstance(message, wire.Error):
                    raise RolloutFailed(message.stage, message.error, message.traceback)
                else:
                    raise message
        finally:
            await cancel_all(self._extra)

    def deliver(self, message: Ask | Done | wire.Error | Exception) -> None:
        """A second Ask beside an unanswered one gets a task of its own; anything else makes the answer needless."""
        if isinstance(message, Ask) and (self._asking is not None or self._inbox):
            self._answer_beside(message)
            return
        if self._asking is not None and not self._asking.expired():
            self._asking.reschedule(0)
        self._inbox.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _next(self) -> Ask | Done | wire.Error | Exception:
        while not self._inbox:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._inbox.popleft()

    async def _answer_unless_over(self, question: Ask) -> None:
        """`asyncio.timeout(None)` is a cancel scope: the rollout may end (its worker dies) while we ask the engine."""
        try:
            async with asyncio.timeout(None) as scope:
                self._asking = scope
                await self._answer(question)
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._asking = None

    async def _answer(self, question: Ask) -> None:
        reply = await self._ask(question)
        reply.call = question.call
        self._send(reply)

    def _answer_beside(self, question: Ask) -> None:
        if len(self._extra) >= TURNS_AT_ONCE:
            self.deliver(RolloutFailed("rollout", f"asked for more than {TURNS_AT_ONCE} model turns at once"))
            return
        answering = asyncio.create_task(self._answer(question))
        self._extra.add(answering)
        answering.add_done_callback(self._answered_beside)

    def _answered_beside(self, answering: asyncio.Task[None]) -> None:
        self._extra.discard(answering)
        if not answering.cancelled() and isinstance(error := answering.exception(), Exception):
            self.deliver(error)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


async def cancel_all(tasks: set[asyncio.Task] | list[asyncio.Task] | list[asyncio.Future]) -> None:
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.gather(*pending, return_exceptions=True)
