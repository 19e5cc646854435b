"""One live rollout: answers its turns, bounds its time, and reports how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from trireme.base.errors import TriremeError
from trireme.journal.turns import RolloutLog
from trireme.orchestrator.session import wire
from trireme.orchestrator.session.wire import Ask, Done, GaveUp, Held, Reply, RunTask

AskPolicy = Callable[[Ask], Awaitable[Reply]]
TURNS_AT_ONCE = 256  # model turns that one rollout may wait for at the same time


class RolloutFailed(TriremeError):
    """A rollout has no reward. Other rollouts continue."""

    def __init__(self, stage: str, error: str, traceback: str = "", *, is_final: bool = False) -> None:
        super().__init__(stage, error, traceback)  # all of them, so that it can be pickled
        self.stage = stage  # "rollout", "score", "timeout" or "worker"
        self.error = error
        self.traceback = traceback
        self.is_final = is_final  # another attempt would fail in the same way
        self.is_overlong = False  # because the prompt leaves no room in the context

    def __str__(self) -> str:
        return f"{self.stage}: {self.error}"


@dataclass(eq=False)
class Session:
    """One live rollout: its task, who answers its model turns, its turns on disk, its deadline, and how it ended.

    Requests come from the worker's socket (`deliver`), or over HTTP from a program or a client (`gateway/endpoint.py`);
    each way in awaits `answer`. In a `SampledSession` our engines answer, and their tokens are kept. In any other one a
    script does.

    Produces: answers to the model turns that the worker asks for. Waits for: the worker's messages. Woken by:
    `deliver`, which the connection calls.

    A worker's death does not end it: it begins again in another worker.
    """

    task: RunTask
    ask: AskPolicy | None = None  # the script; None if `answer` is another one
    forget: Callable[[], None] = lambda: None  # lets the script begin again
    log: RolloutLog | None = None  # its turns on disk, and the requests of a program that may outlive this process
    timeout_s: float = 3600.0  # `rollout_timeout_s`, which the environment fills in
    play: Callable[[Ask], Coroutine[Any, Any, Reply]] | None = None
    """Answers the worker if a client plays: with the outcome, in place of a turn."""
    num_deaths: int = 0  # deaths of workers that ran it
    is_held: bool = False  # it is over, and only waits for the others of its group
    _failure: Exception | None = None  # raised by answering a program or a client, and ends the rollout in any worker
    _waiting: asyncio.Timeout | None = None  # its wait for a worker
    _end: Done | wire.Error | BaseException | None = None
    _ended: asyncio.Future[None] | None = None  # None: no worker has begun it yet
    _limit: asyncio.TimerHandle = field(init=False, repr=False)  # ends it at its timeout

    async def answer(self, request: Ask) -> Reply:
        """Answer a request for a model turn. What it raises ends the rollout."""
        assert self.ask is not None, f"nothing answers rollout {self.task.task}"
        return await self.ask(request)

    async def reserve(self, slot: ExitStack) -> None:
        """Wait until whatever answers it has room for it; `slot` gives that back when it closes."""

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Extend the timeout by a wait for other rollouts."""
        if self._ended is None:  # no worker has begun it, so that it has none
            yield
            return
        limit, left_s = self._limit, self._limit.when() - asyncio.get_running_loop().time()
        limit.cancel()
        try:
            yield
        finally:
            if self._end is None and self._limit is limit:
                self._limit = asyncio.get_running_loop().call_later(left_s, self._time_out)

    def restart(self) -> None:
        """Begin again: what it has asked so far is void."""
        self.forget()

    @asynccontextmanager
    async def unless_failed(self) -> AsyncIterator[None]:
        """Cut a wait for a worker short if answering its program or client fails. Raises: that failure."""
        try:
            async with asyncio.timeout(None if self._failure is None else 0) as self._waiting:
                yield
        except TimeoutError:
            raise self._failure or TimeoutError from None
        finally:
            self._waiting = None

    def begin(self, on_held: Callable[[], None]) -> None:
        """Begin in a worker. `on_held` is called when it is over and only waits for the others of its group."""
        self._on_held = on_held
        self._answering: set[asyncio.Task[Reply]] = set()  # named after their calls
        self._given_up: list[str] = []  # calls
        self._end, self._ended = None, asyncio.get_running_loop().create_future()
        if self._failure is not None:
            self.deliver(self._failure)

    async def follow(self, send: Callable[[wire.ToWorker], None]) -> Done:
        """Answer the worker with `send` until the rollout ends. Its end cancels the answers under way.

        Raises: RolloutFailed, WorkerDied, or what `answer` raised.
        """
        assert self._ended is not None, "followed before it was begun"
        self._send = send
        self._limit = asyncio.get_running_loop().call_later(self.timeout_s, self._time_out)
        try:
            await self._ended
            if isinstance(self._end, wire.Error):
                raise RolloutFailed(self._end.stage, self._end.error, self._end.traceback)
            if isinstance(self._end, BaseException):
                raise self._end
            assert self._end is not None, "ended without an end"
            return self._end
        finally:
            self.is_held = False  # its timeout is over and cannot be extended
            self._limit.cancel()
            await cancel_all(self._answering)

    def deliver(self, message: Ask | GaveUp | Held | Done | wire.Error | BaseException) -> None:
        """Take a message of the worker. Anything but an Ask, a GaveUp and a Held ends the rollout."""
        # the first end counts; what comes after a failure or a timeout is ignored
        if self._end is not None:
            return

        if isinstance(message, Held):
            # it only waits for its group now, so its slot is free for another rollout
            self.is_held = True
            self._on_held()
        elif isinstance(message, GaveUp):
            self._given_up.append(message.call)  # the turn may have been answered already
            for answering in self._answering:
                if answering.get_name() == message.call:
                    # cancelled only after it has begun, as each turn that was asked for must get its number
                    asyncio.get_running_loop().call_soon(answering.cancel)
        elif not isinstance(message, Ask):
            if isinstance(message, Done):
                # turns that the environment did not wait for are not trained on
                message.given_up = self._given_up
            self._end = message
            if self._ended is not None and not self._ended.done():  # a caller that was cancelled waits no longer
                self._ended.set_result(None)
        elif len(self._answering) >= TURNS_AT_ONCE:
            self.deliver(RolloutFailed("rollout", f"asked for more than {TURNS_AT_ONCE} model turns at once"))
        else:
            answering = asyncio.create_task((self.play or self.answer)(message), name=message.call)
            self._answering.add(answering)
            answering.add_done_callback(self._reply)

    def _reply(self, answering: asyncio.Task[Reply]) -> None:
        """Send an answer to the worker. What answering raised ends the rollout, and is raised by `follow`."""
        self._answering.discard(answering)
        if answering.cancelled():
            return
        if (error := answering.exception()) is not None:
            self.deliver(error)
        elif self._end is None:
            reply = answering.result()
            reply.call = answering.get_name()
            self._send(reply)

    def fail(self, error: Exception) -> None:
        """End the rollout with what answering its program or client raised, also if no worker runs it just now."""
        if self._waiting is not None and self._failure is None:
            self._waiting.reschedule(0)
        self._failure = self._failure or error
        self.deliver(error)

    def extend(self) -> None:
        """Extend the timeout of a held rollout: another of its group has begun, ended or failed."""
        if self.is_held and self._end is None:
            self._limit.cancel()
            self._limit = asyncio.get_running_loop().call_later(2 * self.timeout_s, self._time_out)

    def _time_out(self) -> None:
        words = f"not finished after {self.timeout_s:g} s (`rollout_timeout_s`)"
        if self.is_held:
            words = f"was over, and the others of its group of {self.task.group_size} were not"
            words += f" {2 * self.timeout_s:g} s after the last of them moved"
        self.deliver(RolloutFailed("timeout", words))


async def cancel_all(tasks: Iterable[asyncio.Future]) -> None:
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.gather(*pending, return_exceptions=True)
