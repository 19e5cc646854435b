"""A session over HTTP: one key, the answers to the requests that come with it, and their limits.

No turn is sampled twice for one request. If a client goes away before it has its answer, the turn is sampled to its
end, and the client gets it when it asks again. Requests are the same if their conversations and tools are.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec

from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.journal.model_turn import Message, TurnRequest
from trireme.journal.turns import KeptRequest
from trireme.orchestrator.gateway.budgets import HiddenBytes, Inflow, KeptResponses
from trireme.orchestrator.gateway.dialects.turn import Problem, Rejected
from trireme.orchestrator.session.session import Session
from trireme.orchestrator.session.wire import Ask, Reply

if TYPE_CHECKING:
    from trireme.orchestrator.gateway.server import Gateway

log = get_logger("environments")

LARGEST_BODY = 8 << 20  # bytes of a request
BODIES_OF_SESSION = 64 << 20  # bytes of bodies of a session that are being received

MOST_AT_ONCE = 64
"""Requests of one key that are answered at once, and its turns under way. Further ones are told to retry."""

DECIDES = ("chat_template_kwargs", "reasoning_effort")
"""Sampling arguments that may change a prompt, as chat templates read them."""

PROBLEMS: dict[str | None, Problem] = {"overlong_prompt": "overlong", "cancelled": "ended"}


@dataclass(eq=False)
class Endpoint:
    """Answers the requests of one session's program under one key, within limits, until it is closed.

    A session that begins again gets another endpoint, with another key: what an earlier program still sends or waits
    for does not reach the new one.

    Example:
        endpoint = Endpoint(gateway, session).open()  # the session's task holds the address and the key
        done = await run(session)
        gateway.close(endpoint.key, "its rollout is over")
    """

    gateway: Gateway
    session: Session
    has_traces: bool = False  # several agent runs may share the session and name themselves; `max_turns` is for each
    key: str = ""  # a new one, unless its program has one from an earlier orchestrator
    ended: str | None = None  # why no more requests are answered
    num_open: int = 0  # requests that are being answered
    is_used: bool = False  # a request for a turn has come
    is_resumed: bool = False  # its program outlived the orchestrator
    bodies: Inflow = field(default_factory=lambda: Inflow("this session", BODIES_OF_SESSION, LARGEST_BODY))
    responses: KeptResponses = field(default_factory=KeptResponses)
    hidden: HiddenBytes = field(default_factory=HiddenBytes)
    num_transcripts: int = 0  # being sent
    transcript: list[Message] = field(default_factory=list)  # messages of the longest conversation
    _num_turns: Counter[str] = field(default_factory=Counter)  # model turns, keyed by trace
    _num_asked: int = 0
    _replies: dict[str, Reply] = field(default_factory=dict)  # the newest to each request, by its digest
    _tasks: set[asyncio.Task[Reply]] = field(default_factory=set)  # turns under way
    _orphans: dict[str, list[asyncio.Future[Reply]]] = field(default_factory=dict)  # their clients left; by digest

    def __post_init__(self) -> None:
        self.task = self.session.task
        self.task.api_key = self.key = self.key or secrets.token_urlsafe(24)

    def open(self) -> Self:
        """Let requests with its key be answered."""
        self.task.gateway = self.gateway.url
        self.gateway.open(self)
        return self

    async def resume(self) -> bool:
        """Open it for a program that outlived the orchestrator: its turns are on disk.

        Returns: whether that is possible. If not, the program has to be started again.
        """
        if self.session.log is None:
            return False
        try:
            asked = await asyncio.to_thread(self.session.log.read_requests, self._program)
        except msgspec.DecodeError as error:  # written by another version of Trireme
            log.warning("An agent program is started again, as its requests cannot be read: %s", error)
            return False

        # asked again in their old order, the requests get their turns from disk and rebuild the conversation
        for each in sorted(asked, key=lambda request: request.number):
            # each keeps its number, which the ids of its turn's tool calls are made of
            digest, self._num_asked = conversation_digest(each), each.number - 1
            try:
                reply = await self.answer(each, digest, is_on_disk=True)
            except Rejected as refused:
                log.warning("An agent program is started again, as its turn %d is not found: %s", each.number, refused)
                return False
            if not any(other.continues(each) for other in asked):
                # no later request shows that the program has got this turn, so it is kept for a retry
                kept = asyncio.get_running_loop().create_future()
                kept.set_result(reply)
                self._orphans[digest] = [kept]

        # only now may the program's requests be answered, which have waited at the gateway
        self.open()
        self.is_resumed = True
        return True

    def restart(self) -> Endpoint:
        """Begin the session again, with another key: the program of the lost attempt may still be there."""
        self.gateway.close(self.key, "its rollout was begun again")
        self.session.restart()
        return Endpoint(self.gateway, self.session, self.has_traces).open()

    # requests of the program, in the order in which the gateway calls these

    def admit(self) -> None:
        """Count a request as open, before its body takes memory. Raises: Rejected if too many are."""
        if self.num_open >= MOST_AT_ONCE:
            raise Rejected("busy", f"{MOST_AT_ONCE} requests of this session are being answered.", retry_after_s=2)
        self.num_open += 1

    def begin(self, request: TurnRequest, digest: str, *, is_retry: bool) -> asyncio.Future[Reply]:
        """Return the task that answers a request: the one that its client left behind, or a new one.

        Args:
            digest: of the request, see `conversation_digest`.
            is_retry: whether the client may have sent it before without getting the answer.

        Raises: Rejected if the session has ended, or has too many turns under way.
        """
        if self.ended:  # the session may have been closed while the body came
            raise Rejected("ended", f"The session has ended: {self.ended}.")
        self.is_used = True
        if orphans := self._orphans.get(digest):
            return orphans.pop()
        # turns of clients that left are still sampled, so there may be more of them than open requests
        if len(self._tasks) >= MOST_AT_ONCE:
            raise Rejected("busy", f"{MOST_AT_ONCE} turns of this session are under way.", retry_after_s=2)

        # a task of its own: it is not cancelled when the client leaves
        task = asyncio.create_task(self.answer(request, digest, is_retry=is_retry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def answer(
        self, request: TurnRequest, digest: str, *, is_retry: bool = False, is_on_disk: bool = False
    ) -> Reply:
        """Answer a request of the program. Raises: Rejected."""
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
            reply = await self.session.answer(question)
        except Exception as error:
            # the run must not wait until the program, which only learns that there is no turn, has noticed it
            self.session.fail(error)
            raise Rejected("failed", "The run has ended.") from error
        if reply.error is not None:
            self._num_turns[request.trace] -= 1
            raise Rejected(PROBLEMS.get(reply.error_kind, "failed"), reply.error)

        # the transcript of the rollout; of two that are as long, the newer one
        if len(request.messages) >= len(self.transcript):
            self.transcript = [*request.messages, reply.to_message()]

        shown = self._replies[digest] = reply.without_tokens()
        shown.call = question.call

        # on disk before the program has the turn, so that a resumed session knows all that the program knows
        if (kept := self.session.log) is not None and kept.keeps_requests and not is_on_disk:
            sampling = {name: request.sampling[name] for name in DECIDES if name in request.sampling}
            rest = {name: getattr(request, name) for name in ("messages", "tools", "calls_tools", "trace")}
            kept.write_request(KeptRequest(session=self._program, number=int(shown.call), sampling=sampling, **rest))
            reach("request.written")
        return shown

    def settle(self, digest: str, task: asyncio.Future[Reply], *, is_delivered: bool) -> None:
        """Note whether the client has got its answer. If not, keep it for when the client asks again."""
        has_failed = task.done() and (task.cancelled() or task.exception() is not None)
        if not is_delivered and not has_failed and not self.ended:
            self._orphans.setdefault(digest, []).append(task)

    async def count(self, request: TurnRequest) -> int:
        """Return the number of tokens of a request's prompt. Raises: Rejected."""
        question = self._question(request)
        question.only_counts = True
        reply = await self.session.answer(question)
        if reply.error is not None:
            raise Rejected("invalid", reply.error)
        return len(reply.prompt_ids)

    def end(self, why: str) -> None:
        """Answer no more requests, and give up the turns that are under way."""
        self.ended = why
        for task in self._tasks:
            task.cancel()
        self.responses.clear()

    @property
    def num_turns(self) -> int:
        """Return how many model turns it has had."""
        return self._num_turns.total()

    @property
    def has_lost_program(self) -> bool:
        """Whether its program outlived the orchestrator and has asked for nothing since: it may have given up."""
        return self.is_resumed and not self.is_used

    def unread(self) -> list[str]:
        """Return the calls whose turns no client has got: it left before, so its conversation does not have them.

        Those that a resumed session kept may have been got before.
        """
        left = [task for tasks in self._orphans.values() for task in tasks if isinstance(task, asyncio.Task)]
        done = [task for task in left if task.done() and not task.cancelled() and task.exception() is None]
        return [task.result().call for task in done]

    @property
    def _program(self) -> str:
        """The name of one run of its program, in the file of requests."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:16]

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


def conversation_digest(request: TurnRequest) -> str:
    """Return a digest of what decides a request's prompt and how it is read: those with the same one are retries."""
    return hashlib.sha256(encode_conversation(request)).hexdigest()


def encode_conversation(request: TurnRequest) -> bytes:
    """Encode what decides a request's prompt and how it is read."""
    decides: list[Any] = [request.messages, request.tools, request.calls_tools, request.trace]
    decides += [request.sampling.get(name) for name in DECIDES]
    return msgspec.json.encode(decides, order="sorted")
