"""One rollout that runs in an environment worker, as our end of the wire sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from trireme.base.errors import TriremeError
from trireme.orchestrator.environments import wire
from trireme.orchestrator.environments.wire import Ask, Done, Held, Reply, RunTask

AskPolicy = Callable[[Ask], Awaitable[Reply]]
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


class OpenRollout:
    """The orchestrator's half of one rollout: takes the worker's messages one by one, in the task of whoever waits.

    Produces: the model turns that are asked for. Waits for: the worker. Woken by: `deliver`, called by the connection.
    """

    __slots__ = (
        *("_ask", "_asking", "_extra", "_inbox", "_limit", "_on_held", "_send", "_timeout_s", "_turn_tokens"),
        *("_waiter", "is_held", "num_deaths", "task"),
    )

    def __init__(
        self,
        task: RunTask,
        ask: AskPolicy,
        send: Callable[[wire.ToWorker], None],
        *,
        timeout_s: float,
        num_deaths: int,
        on_held: Callable[[], None],
    ) -> None:
        self.task = task
        self.num_deaths = num_deaths
        self.is_held = False
        self._ask = ask
        self._send = send
        self._on_held = on_held
        self._timeout_s = timeout_s
        self._limit = asyncio.timeout(timeout_s)
        self._turn_tokens: dict[str, int] = {}  # completion tokens of each Ask, by its call, in their order
        self._inbox: deque[Ask | Done | wire.Error | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._asking: asyncio.Timeout | None = None
        self._extra: set[asyncio.Task[None]] = set()

    async def follow(self) -> Done:
        """Raises: RolloutFailed, WorkerDied, or what `ask` raised."""
        try:
            async with self._limit:
                return await self._follow()
        except TimeoutError as error:
            if not self._limit.expired():
                raise
            raise self._too_slow() from error

    def hold(self) -> None:
        """It is over, and waits for the others of its group: they may be as slow as they are allowed to be."""
        self.is_held = True
        self._on_held()

    def extend(self) -> None:
        """Something happened in the group that it waits for: another rollout began, ended, or failed."""
        if self.is_held and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + 2 * self._timeout_s)

    async def _follow(self) -> Done:
        try:
            while True:
                message = await self._next()
                if isinstance(message, Ask):
                    if not self._inbox:  # else it is over already
                        await self._answer_unless_over(message)
                elif isinstance(message, Done):
                    self._check_turn_rewards(message)
                    return message
                elif isinstance(message, wire.Error):
                    raise RolloutFailed(message.stage, message.error, message.traceback)
                else:
                    raise message
        finally:
            await cancel_all(self._extra)

    def deliver(self, message: Ask | Held | Done | wire.Error | Exception) -> None:
        """A second Ask beside an unanswered one gets a task of its own; anything else makes the answer needless."""
        if isinstance(message, Held):
            self.hold()
            return
        if isinstance(message, Ask):
            self._turn_tokens[message.call] = 0
            if self._asking is not None or self._inbox:
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
        self._turn_tokens[question.call] = len(reply.completion_ids)
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

    def _check_turn_rewards(self, done: Done) -> None:
        num_tokens = list(self._turn_tokens.values())
        if len(done.turn_rewards) > len(num_tokens):
            raise RolloutFailed(
                "score",
                f"{len(done.turn_rewards)} turns were given rewards, and the rollout had {len(num_tokens)} - expected "
                "one entry per model turn at most - look at what the environment gives as `turn_rewards`.",
            )
        for turn, (rewards, tokens) in enumerate(zip(done.turn_rewards, num_tokens, strict=False)):
            if len(rewards) > 1 and len(rewards) != tokens:
                raise RolloutFailed(
                    "score",
                    f"Turn {turn} was given {len(rewards)} rewards and has {tokens} tokens - expected none, one for "
                    "the whole turn, or one per completion token - look at the environment's `turn_rewards`.",
                )

    def _too_slow(self) -> RolloutFailed:
        if self.is_held:
            what = f"was over, and the others of its group of {self.task.group_size} were not"
            return RolloutFailed("timeout", f"{what} {2 * self._timeout_s:g} s after the last of them moved")
        return RolloutFailed("timeout", f"not finished after {self._timeout_s:g} s (`rollout_timeout_s`)")


async def cancel_all(tasks: set[asyncio.Task] | list[asyncio.Task] | list[asyncio.Future]) -> None:
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.gather(*pending, return_exceptions=True)
