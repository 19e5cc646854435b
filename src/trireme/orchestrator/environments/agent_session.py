"""A rollout that agent programs play: its session at the gateway, and the turns that answer its requests."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import msgspec

from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.journal.model_turn import Message, TurnRequest
from trireme.journal.requests import KeptRequest, RequestLog
from trireme.orchestrator.environments.open_rollout import AskPolicy, RolloutFailed
from trireme.orchestrator.environments.wire import Ask, Done, Played, Reply, RunTask, check_rewards
from trireme.orchestrator.gateway.dialects.turn import Problem, Rejected
from trireme.orchestrator.gateway.server import DECIDES, Gateway, Session, conversation_digest
from trireme.orchestrator.gateway.sessions import ClientRollout, Sessions

log = get_logger("environments")

PROBLEMS: dict[str | None, Problem] = {"overlong_prompt": "overlong", "cancelled": "ended"}


@dataclass(eq=False)
class AgentSession:
    """Answers the requests of one rollout's program, from its first to its end.

    Example:
        with AgentSession(gateway, task, ask) as session:
            session.open()
            done = await session.watch(run(task))  # `task` holds the address and the key
    """

    gateway: Gateway
    task: RunTask
    ask: AskPolicy
    has_traces: bool = False  # several agent runs may share the session; `max_turns` is for each
    requests: RequestLog | None = None  # file of its requests, for a program that outlives this process

    def __post_init__(self) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def has_lost_program(self) -> bool:
        """Whether its program outlived the orchestrator and has asked for nothing since: it may have given up."""
        return self._is_resumed and not self._session.is_used

    def open(self) -> None:
        """Begin, with a new key."""
        self._begin(secrets.token_urlsafe(24))
        self.gateway.open(self.task.api_key, self._session)

    def _begin(self, key: str) -> None:
        self._replies: dict[str, Reply] = {}  # the newest to each request, by its digest
        self._num_turns: Counter[str] = Counter()  # model turns, keyed by trace
        self._num_asked = 0
        self._longest: list[Message] = []  # conversation
        self.task.gateway, self.task.api_key = self.gateway.url, key
        self._is_resumed = False
        self._name = hashlib.sha256(key.encode()).hexdigest()[:16]  # in the file of requests
        self._session = Session(self.task.task, self._answer, self._count, lambda: self._longest, self.has_traces)

    async def resume(self, key: str) -> bool:
        """Continue the session of a program that outlived the orchestrator: its turns are on disk.

        Returns: whether that is possible. If not, the program has to be started again.
        """
        self._begin(key)
        if self.requests is None:
            return False
        try:
            asked = await asyncio.to_thread(self.requests.read, self._name)
        except msgspec.DecodeError as error:  # written by another version of Trireme
            log.warning("An agent program is started again, as its requests cannot be read: %s", error)
            return False

        # asked again in their old order, the requests get their turns from disk and rebuild the conversation
        for each in sorted(asked, key=lambda request: request.number):
            # each keeps its number, which the ids of its turn's tool calls are made of
            digest, self._num_asked = conversation_digest(each), each.number - 1
            try:
                reply = await self._answer(each, digest, False, is_known=True)
            except Rejected as refused:
                log.warning("An agent program is started again, as its turn %d is not found: %s", each.number, refused)
                return False
            if not any(other.continues(each) for other in asked):
                # no later request shows that the program has got this turn, so it is kept for a retry
                self._session.keep(digest, reply)

        # only now may the program's requests be answered, which have waited at the gateway
        self.gateway.open(key, self._session)
        self._is_resumed = True
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        why = f"its rollout failed: {error}" if isinstance(error, RolloutFailed) else "its rollout is over"
        self.gateway.close(self.task.api_key, why)
        self._failure.cancel()
        if self.requests is not None:
            self.requests.remove()

    def restart(self, forget: Callable[[], None]) -> None:
        """Begin again, with another key: the program of the lost attempt may still be there."""
        self.gateway.close(self.task.api_key, "its rollout was begun again")
        forget()
        self.open()

    async def watch(self, run: Coroutine[Any, Any, Done]) -> Done:
        """Await the rollout. Turns that no client has got are given up.

        Raises: what answering a request raised, if that ends the run; else what the rollout raises.
        """
        running = asyncio.create_task(run)
        try:
            # a failure that ends the run must not wait until the program has noticed it
            either: set[asyncio.Future[Any]] = {running, self._failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            done = await running
            # the client left before it got them, so the conversation does not contain them
            done.given_up = [reply.call for reply in self._session.unread()]
            return done
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})

    async def _answer(self, request: TurnRequest, digest: str, is_retry: bool, *, is_known: bool = False) -> Reply:
        # an SDK that lost the answer gets the same turn, not another sample
        if is_retry and digest in self._replies:
            return self._replies[digest]

        most = self.task.max_turns
        if most is not None and self._num_turns[request.trace] >= most:
            raise Rejected("ended", f"This rollout has had its {most} model turns (`max_turns`).")

        # counted before it is asked for, as a program may send several requests at once
        self._num_turns[request.trace] += 1
        self._num_asked += 1
        question = self._question(request)
        try:
            reply = await self.ask(question)
        except Exception as error:
            # `watch` raises it to the run; the program only learns that there is no turn
            if not self._failure.done():
                self._failure.set_exception(error)
            raise Rejected("failed", "The run has ended.") from error
        if reply.error is not None:
            self._num_turns[request.trace] -= 1
            raise Rejected(PROBLEMS.get(reply.error_kind, "failed"), reply.error)

        # on disk before the program has the turn, so that a resumed session knows all that the program knows
        if not is_known:
            self._write(request, int(question.call))
        # the transcript of the rollout; of two that are as long, the newer one
        if len(request.messages) >= len(self._longest):
            self._longest = [*request.messages, reply.to_message()]

        shown = self._replies[digest] = reply.without_tokens()
        shown.call = question.call
        return shown

    def _write(self, request: TurnRequest, number: int) -> None:
        """Write a request that has a turn. If it cannot be written, the program cannot outlive this process."""
        if self.requests is None:
            return
        asked = KeptRequest(
            session=self._name,
            number=number,
            messages=request.messages,
            tools=request.tools,
            sampling={name: request.sampling[name] for name in DECIDES if name in request.sampling},
            calls_tools=request.calls_tools,
            trace=request.trace,
        )
        try:
            self.requests.write(asked)
        except Exception as error:  # the disk failed, or a value cannot be encoded; the turn itself is on disk
            log.warning("%r; after a restart, the program of this rollout is started again.", error)
            self.requests.remove()
            self.requests = None
        reach("request.written")

    async def _count(self, request: TurnRequest) -> int:
        question = self._question(request)
        question.only_counts = True
        reply = await self.ask(question)
        if reply.error is not None:
            raise Rejected("invalid", reply.error)
        return len(reply.prompt_ids)

    def _question(self, request: TurnRequest) -> Ask:
        return Ask(
            task=self.task.task,
            call=str(self._num_asked),
            messages=request.messages,
            tools=request.tools,
            sampling=request.sampling,
            calls_tools=request.calls_tools,
            trace=request.trace,
        )


class ClientSession(AgentSession):
    """Offers a rollout to the clients of a user's own harness, and plays it with the one that takes it."""

    async def play(self, sessions: Sessions, run: Callable[[AskPolicy], Coroutine[Any, Any, Done]]) -> Done:
        """Run a rollout once a client has taken it. The client does not notice a death of the environment's worker.

        Raises: as `watch`; RolloutFailed if the client posts an error.
        """
        task = self.task
        example = task.split, task.index
        rollout = ClientRollout(task.task, task.api_key, example, self._num_turns.total, check_rewards)
        async with sessions.offer(rollout):
            return await self.watch(run(partial(self._wait_for_outcome, rollout)))

    async def _wait_for_outcome(self, rollout: ClientRollout, question: Ask) -> Reply:
        """Show the client its example, and return what it has made of that."""
        rollout.has_reward = question.has_reward
        if not rollout.task.done():  # the client may have it already, from a worker that has died
            rollout.task.set_result({"example": question.example, "prompt": question.messages})
        await asyncio.wait({rollout.outcome})
        outcome = rollout.outcome.result()
        if outcome.error is not None:
            raise RolloutFailed("rollout", f"the client gave it up: {outcome.error:.2000}")
        played = Played(messages=self._longest, reward=outcome.reward, metrics=outcome.metrics)
        return Reply(played=played)
