"""A session over HTTP: the key of a rollout that agent programs play, and the answers to their requests."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Self

import msgspec

from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.journal.model_turn import Message, TurnRequest
from trireme.journal.requests import KeptRequest
from trireme.orchestrator.gateway.access import DECIDES, Access, conversation_digest
from trireme.orchestrator.gateway.dialects.turn import Problem, Rejected
from trireme.orchestrator.gateway.server import Gateway
from trireme.orchestrator.session.session import RolloutFailed, Session
from trireme.orchestrator.session.wire import Ask, Reply

log = get_logger("environments")

PROBLEMS: dict[str | None, Problem] = {"overlong_prompt": "overlong", "cancelled": "ended"}


@dataclass(eq=False)
class Endpoint:
    """Answers the requests of one session's program, from its first to its end.

    Example:
        with Endpoint(gateway, session) as endpoint:
            endpoint.open()
            done = await run(session)  # its task holds the address and the key
            done.given_up = endpoint.unread()
    """

    gateway: Gateway
    session: Session
    has_traces: bool = False  # several agent runs may share the session; `max_turns` is for each

    def __post_init__(self) -> None:
        self.task = self.session.task

    @property
    def has_lost_program(self) -> bool:
        """Whether its program outlived the orchestrator and has asked for nothing since: it may have given up."""
        return self._is_resumed and not self._access.is_used

    def open(self) -> None:
        """Begin, with a new key."""
        self._begin(secrets.token_urlsafe(24))
        self.gateway.open(self.task.api_key, self._access)

    def _begin(self, key: str) -> None:
        self._replies: dict[str, Reply] = {}  # the newest to each request, by its digest
        self._num_turns: Counter[str] = Counter()  # model turns, keyed by trace
        self._num_asked = 0
        self._longest: list[Message] = []  # conversation
        self.task.gateway, self.task.api_key = self.gateway.url, key
        self._is_resumed = False
        self._name = hashlib.sha256(key.encode()).hexdigest()[:16]  # in the file of requests
        self._access = Access(self.task.task, self, self.has_traces)

    async def resume(self, key: str) -> bool:
        """Continue the session of a program that outlived the orchestrator: its turns are on disk.

        Returns: whether that is possible. If not, the program has to be started again.
        """
        self._begin(key)
        if self.session.requests is None:
            return False
        try:
            asked = await asyncio.to_thread(self.session.requests.read, self._name)
        except msgspec.DecodeError as error:  # written by another version of Trireme
            log.warning("An agent program is started again, as its requests cannot be read: %s", error)
            return False

        # asked again in their old order, the requests get their turns from disk and rebuild the conversation
        for each in sorted(asked, key=lambda request: request.number):
            # each keeps its number, which the ids of its turn's tool calls are made of
            digest, self._num_asked = conversation_digest(each), each.number - 1
            try:
                reply = await self._ask(each, digest)
            except Rejected as refused:
                log.warning("An agent program is started again, as its turn %d is not found: %s", each.number, refused)
                return False
            if not any(other.continues(each) for other in asked):
                # no later request shows that the program has got this turn, so it is kept for a retry
                self._access.keep(digest, reply)

        # only now may the program's requests be answered, which have waited at the gateway
        self.gateway.open(key, self._access)
        self._is_resumed = True
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        why = f"its rollout failed: {error}" if isinstance(error, RolloutFailed) else "its rollout is over"
        self.gateway.close(self.task.api_key, why)
        if self.session.requests is not None:
            self.session.requests.remove()

    def restart(self) -> None:
        """Begin again, with another key: the program of the lost attempt may still be there."""
        self.gateway.close(self.task.api_key, "its rollout was begun again")
        self.session.forget()
        self.open()

    def unread(self) -> list[str]:
        """Return the calls whose turns no client has got: it left before, so its conversation does not have them."""
        return [reply.call for reply in self._access.unread()]

    async def answer(self, request: TurnRequest, digest: str, is_retry: bool) -> Reply:
        """Answer a request of the program. Raises: Rejected."""
        # an SDK that lost the answer gets the same turn, not another sample
        if is_retry and digest in self._replies:
            return self._replies[digest]

        # on disk before the program has the turn, so that a resumed session knows all that the program knows
        reply = await self._ask(request, digest)
        self._write(request, int(reply.call))
        return reply

    async def _ask(self, request: TurnRequest, digest: str) -> Reply:
        most = self.task.max_turns
        if most is not None and self._num_turns[request.trace] >= most:
            raise Rejected("ended", f"This rollout has had its {most} model turns (`max_turns`).")

        # counted before it is asked for, as a program may send several requests at once
        self._num_turns[request.trace] += 1
        self._num_asked += 1
        question = self._question(request)
        try:
            reply = await self.session.ask(question)
        except Exception as error:
            # the run must not wait until the program, which only learns that there is no turn, has noticed it
            self.session.fail(error)
            raise Rejected("failed", "The run has ended.") from error
        if reply.error is not None:
            self._num_turns[request.trace] -= 1
            raise Rejected(PROBLEMS.get(reply.error_kind, "failed"), reply.error)

        # the transcript of the rollout; of two that are as long, the newer one
        if len(request.messages) >= len(self._longest):
            self._longest = [*request.messages, reply.to_message()]

        shown = self._replies[digest] = reply.without_tokens()
        shown.call = question.call
        return shown

    def _write(self, request: TurnRequest, number: int) -> None:
        """Write a request that has a turn. If it cannot be written, the program cannot outlive this process."""
        if self.session.requests is None:
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
            self.session.requests.write(asked)
        except Exception as error:  # the disk failed, or a value cannot be encoded; the turn itself is on disk
            log.warning("%r; after a restart, the program of this rollout is started again.", error)
            self.session.requests.remove()
            self.session.requests = None
        reach("request.written")

    async def count(self, request: TurnRequest) -> int:
        """Return the number of tokens of a request's prompt. Raises: Rejected."""
        question = self._question(request)
        question.only_counts = True
        reply = await self.session.ask(question)
        if reply.error is not None:
            raise Rejected("invalid", reply.error)
        return len(reply.prompt_ids)

    def transcript(self) -> list[Message]:
        """Return the messages of the longest conversation."""
        return self._longest

    @property
    def num_turns(self) -> int:
        """Return how many model turns it has had."""
        return self._num_turns.total()

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
