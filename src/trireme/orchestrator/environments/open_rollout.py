"""A rollout that runs in an environment worker: answers its turns, bounds its time, and tells how it ended."""

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
    """A rollout has no reward. Other rollouts go on."""

    def __init__(self, stage: str, error: str, traceback: str = "") -> None:
        super().__init__(stage, error, traceback)  # all of them, so that it can be pickled
        self.stage = stage  # "rollout", "score", "timeout" or "worker"
        self.error = error
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.stage}: {self.error}"


class OpenRollout:
    """The orchestrator's half of a rollout that runs in an environment worker.

    Produces: answers to the model turns that the worker asks for. Waits for: the worker's messages. Woken by:
    `deliver`, which the connection calls.
    """

    __slots__ = (
        *("_answering", "_ask", "_concurrent", "_inbox", "_limit", "_on_held", "_send", "_timeout_s", "_turn_tokens"),
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
        self._answering: asyncio.Timeout | None = None  # cancels the answer to a turn, if the rollout ends meanwhile
        self._concurrent: set[asyncio.Task[None]] = set()  # answers to further turns that were asked for meanwhile

    async def follow(self) -> Done:
        """Answer the worker until the rollout ends. Turns are answered in the caller's task.

        Raises: RolloutFailed, WorkerDied, or what `ask` raised.
        """
        try:
            async with self._limit:
                while True:
                    while not self._inbox:
                        self._waiter = asyncio.get_running_loop().create_future()
                        await self._waiter
                    message = self._inbox.popleft()
                    if isinstance(message, Done):
                        self._check_turn_rewards(message)
                        return message
                    if isinstance(message, wire.Error):
                        raise RolloutFailed(message.stage, message.error, message.traceback)
                    if isinstance(message, Exception):
                        raise message
                    if self._inbox:  # the rollout is over already
                        continue
                    try:
                        async with asyncio.timeout(None) as self._answering:
                            await self._answer(message)
                    except TimeoutError:
                        if self._answering is None or not self._answering.expired():
                            raise
                    finally:
                        self._answering = None
        except TimeoutError as error:
            if not self._limit.expired():
                raise
            raise self._too_slow() from error
        finally:
            await cancel_all(self._concurrent)

    async def _answer(self, question: Ask) -> None:
        reply = await self._ask(question)
        reply.call = question.call
        self._turn_tokens[question.call] = len(reply.completion_ids)
        self._send(reply)

    def deliver(self, message: Ask | Held | Done | wire.Error | Exception) -> None:
        """Take a message of the worker. Anything but an Ask ends the rollout, and cancels the answer under way."""
        if isinstance(message, Held):
            self.is_held = True
            self._on_held()
            return
        if isinstance(message, Ask):
            self._turn_tokens[message.call] = 0
            if self._answering is not None or self._inbox:
                self._answer_concurrently(message)
                return
        if self._answering is not None and not self._answering.expired():
            self._answering.reschedule(0)
        self._inbox.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _answer_concurrently(self, question: Ask) -> None:
        if len(self._concurrent) >= TURNS_AT_ONCE:
            self.deliver(RolloutFailed("rollout", f"asked for more than {TURNS_AT_ONCE} model turns at once"))
            return

        def ended(answering: asyncio.Task[None]) -> None:
            self._concurrent.discard(answering)
            if not answering.cancelled() and isinstance(error := answering.exception(), Exception):
                self.deliver(error)

        answering = asyncio.create_task(self._answer(question))
        self._concurrent.add(answering)
        answering.add_done_callback(ended)

    def extend(self) -> None:
        """Extend the timeout of a held rollout: another of its group has begun, ended or failed."""
        if self.is_held and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + 2 * self._timeout_s)

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
