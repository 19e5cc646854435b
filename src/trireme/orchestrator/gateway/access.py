"""One key's access to the gateway: limits of its requests, and turns that outlive the connection of their client.

No turn is sampled twice for one request. If a client goes away before it has its answer, the turn is sampled to its
end, and the client gets it when it asks again. Requests are the same if their conversations and tools are.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from trireme.journal.model_turn import Message, TurnRequest
from trireme.orchestrator.gateway.budgets import Inflow, KeptResponses
from trireme.orchestrator.gateway.dialects.turn import Rejected
from trireme.orchestrator.session.wire import Reply

LARGEST_BODY = 8 << 20  # bytes of a request
BODIES_OF_SESSION = 64 << 20  # bytes of bodies of a session that are being received

FREE, FREE_PER_TOKEN, PER_MESSAGE = 256 << 10, 64, 256
"""Bytes of a conversation that its prompt explains: in any case, for each token, and for each message."""

LARGEST_HIDDEN = 64 << 20
"""Bytes of a session's answered requests that their prompts do not explain, such as reasoning that the chat template
leaves out. The rollout keeps its conversations, so the model's context would not bound them."""

MOST_AT_ONCE = 64
"""Requests of one session that are answered at once, and its turns under way. Further ones are told to retry."""

DECIDES = ("chat_template_kwargs", "reasoning_effort")
"""Sampling arguments that may change a prompt, as chat templates read them."""


class Policy(Protocol):
    """Answers the requests of a session."""

    async def answer(self, request: TurnRequest, digest: str, is_retry: bool) -> Reply:
        """Answer a request with a turn.

        Args:
            digest: of the request, see `conversation_digest`.
            is_retry: whether the client may have sent it before without getting the answer.

        Raises: Rejected.
        """

    async def count(self, request: TurnRequest) -> int:
        """Return the number of tokens of a request's prompt. Raises: Rejected."""

    def transcript(self) -> list[Message]:
        """Return the messages of the longest conversation."""


@dataclass
class Access:
    """An API key's access to the policy of one session, within limits, until the session ends.

    A session that begins again gets another key, and so another access.
    """

    name: str  # the name of its rollout
    policy: Policy
    has_traces: bool = False  # its requests name the agent run that they belong to
    ended: str | None = None  # why no more requests are answered
    num_open: int = 0  # requests that are being answered
    is_used: bool = False  # a request for a turn has come
    bodies: Inflow = field(default_factory=lambda: Inflow("this session", BODIES_OF_SESSION, LARGEST_BODY))
    responses: KeptResponses = field(default_factory=KeptResponses)
    num_hidden: int = 0  # bytes, of `LARGEST_HIDDEN`
    num_transcripts: int = 0  # being sent
    _tasks: set[asyncio.Task[Reply]] = field(default_factory=set)  # turns under way
    _orphans: dict[str, list[asyncio.Future[Reply]]] = field(default_factory=dict)  # their clients left; by digest

    def admit(self) -> None:
        """Count a request as open, before its body takes memory. Raises: Rejected if too many are."""
        if self.num_open >= MOST_AT_ONCE:
            raise Rejected("busy", f"{MOST_AT_ONCE} requests of this session are being answered.", retry_after_s=2)
        self.num_open += 1

    def begin(self, request: TurnRequest, digest: str, *, is_retry: bool) -> asyncio.Future[Reply]:
        """Return the task that answers a request: the one that its client left behind, or a new one.

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
        task = asyncio.create_task(self.policy.answer(request, digest, is_retry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def settle(self, digest: str, task: asyncio.Future[Reply], *, is_delivered: bool) -> None:
        """Note whether the client has got its answer. If not, keep it for when the client asks again."""
        has_failed = task.done() and (task.cancelled() or task.exception() is not None)
        if not is_delivered and not has_failed and not self.ended:
            self._orphans.setdefault(digest, []).append(task)

    def keep(self, digest: str, reply: Reply) -> None:
        """Keep a turn for the next request with a digest, as its client may not have got it."""
        kept = asyncio.get_running_loop().create_future()
        kept.set_result(reply)
        self._orphans[digest] = [kept]

    def unread(self) -> list[Reply]:
        """Return the turns that no client has got. Those that were kept may have been got before."""
        left = [task for tasks in self._orphans.values() for task in tasks if isinstance(task, asyncio.Task)]
        return [task.result() for task in left if task.done() and not task.cancelled() and task.exception() is None]

    def check_size(self, num_bytes: int, most_bytes: int) -> None:
        """Refuse a conversation that is too large, also for what the session has sent before. Raises: Rejected."""
        if num_bytes > most_bytes:  # the conversation of `previous_response_id` counts too
            raise Rejected("overlong", f"The conversation has {num_bytes >> 20} MiB, at most {most_bytes >> 20}.")
        # small requests still pass, as they add next to nothing that their prompts do not explain
        if self.num_hidden > LARGEST_HIDDEN and num_bytes > FREE:
            raise Rejected(
                "overlong",
                f"This session has sent {self.num_hidden >> 20} MiB that its prompts do not show, at most "
                f"{LARGEST_HIDDEN >> 20}: reasoning, or tools, that the chat template leaves out. Send less.",
            )

    def count_hidden(self, request: TurnRequest, num_bytes: int, task: asyncio.Future[Reply]) -> None:
        """Count what the prompt of an answered request does not explain. Pictures are not counted, nor kept."""
        if task.cancelled() or task.exception() is not None:
            return
        # what is in the prompt is bounded by the model's context; only the rest can grow without end
        explained = FREE + FREE_PER_TOKEN * task.result().num_prompt
        if (hidden := num_bytes + PER_MESSAGE * len(request.messages) - explained) > 0:
            self.num_hidden += max(0, hidden - sum(map(_picture_bytes, request.messages)))

    def close(self, why: str) -> None:
        """Answer no more requests, and give up the turns that are under way."""
        self.ended = why
        for task in self._tasks:
            task.cancel()
        self.responses.clear()


def conversation_digest(request: TurnRequest) -> str:
    """Return a digest of what decides a request's prompt and how it is read: those with the same one are retries."""
    return hashlib.sha256(encode_conversation(request)).hexdigest()


def encode_conversation(request: TurnRequest) -> bytes:
    """Encode what decides a request's prompt and how it is read."""
    decides: list[Any] = [request.messages, request.tools, request.calls_tools, request.trace]
    decides += [request.sampling.get(name) for name in DECIDES]
    return msgspec.json.encode(decides, order="sorted")


def _picture_bytes(message: Message) -> int:
    """Return how many bytes of a message are pictures."""
    content = message["content"]
    if isinstance(content, str):
        return 0
    return sum(len(part["image_url"]["url"]) for part in content if part["type"] == "image_url")
