"""Budgets of the gateway: what its sessions, which run code of a model, may make it hold and read."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import msgspec

from trireme.journal.model_turn import Message, TurnRequest
from trireme.orchestrator.gateway.dialects.turn import Rejected
from trireme.orchestrator.session.wire import Reply

LARGEST_KEPT = 64 << 20  # bytes of conversations that a session keeps for `previous_response_id`
LARGEST_KEPT_BY_ALL = 512 << 20
OVERHEAD = 256  # bytes of memory that a message or a conversation takes in addition to its content
SMALLEST_COST = 8 << 10  # bytes: a request costs as much as a body of this size

FREE, FREE_PER_TOKEN, PER_MESSAGE = 256 << 10, 64, 256
"""Bytes of a conversation that its prompt explains: in any case, for each token, and for each message."""

LARGEST_HIDDEN = 64 << 20
"""Bytes of a session's answered requests that their prompts do not explain, such as reasoning that the chat template
leaves out. The rollout keeps its conversations, so the model's context would not bound them."""


@dataclass
class Inflow:
    """Limits the bodies of requests: how many bytes are under way at once, and how many come per second.

    A request that finds too many under way is refused, and retries. One that comes too early is read later.
    """

    owner: str  # its name in errors
    most_bytes: int  # under way, and at once beyond `rate`
    rate: int  # bytes per second in the long run
    num_bytes: int = 0  # under way
    _paid_until: float = 0.0  # monotonic time; later than now while more came than `most_bytes` and `rate` allow

    async def wait_for_turn(self) -> None:
        await asyncio.sleep(max(0.0, self._paid_until - time.monotonic()))

    def take(self, num_bytes: int) -> None:
        """Count bytes that have come. Raises: Rejected if too many are under way."""
        if self.num_bytes + num_bytes > self.most_bytes:
            words = f"Requests of {self.owner} with {self.most_bytes >> 20} MiB are being received. Retry later."
            raise Rejected("busy", words, retry_after_s=2)
        self.num_bytes += num_bytes

    def settle(self, num_bytes: int) -> None:
        """Note that a body is no longer under way, and charge what it cost."""
        self.num_bytes -= num_bytes
        self.charge(num_bytes)

    def charge(self, num_bytes: int) -> None:
        # idle time is credited for `most_bytes` at most, so a burst of that size passes at once
        begin = max(self._paid_until, time.monotonic() - self.most_bytes / self.rate)
        self._paid_until = begin + max(num_bytes, SMALLEST_COST) / self.rate


@dataclass
class KeptResponses:
    """Conversations of a session that `previous_response_id` can continue, within a budget of bytes.

    They are kept as JSON, so that their size in memory is known, and each message once. The oldest make room.
    """

    num_bytes: int = 0
    _conversations: OrderedDict[str, tuple[bytes, ...]] = field(
        default_factory=OrderedDict
    )  # keyed by the response's id
    _messages: dict[bytes, bytes] = field(default_factory=dict)
    _uses: Counter[bytes] = field(default_factory=Counter)

    def find(self, response: str | None) -> list[Message]:
        """Return the conversation up to a response; an empty one for None. Raises: Rejected if it is not kept."""
        if response is None:
            return []
        if response not in self._conversations:
            most = f"it keeps the newest {LARGEST_KEPT >> 20} MiB. Send the whole conversation as `input`."
            raise Rejected("unknown", f"previous_response_id: this session has no response {response!r:.80}; {most}")
        return [msgspec.json.decode(message) for message in self._conversations[response]]

    def size(self, response: str | None) -> int:
        """Return the bytes of the conversation up to a response."""
        return sum(map(len, self._conversations.get(response or "", ())))

    def add(self, response: str, messages: list[Message]) -> None:
        encoded = map(msgspec.json.encode, messages)
        whole = tuple(self._messages.setdefault(message, message) for message in encoded)
        # conversations share their messages, so each message counts once and a conversation only for its references
        self.num_bytes += sum(len(message) + OVERHEAD for message in {*whole} if not self._uses[message])
        self._uses.update(whole)
        self.num_bytes += self._size_of(whole)
        self._conversations[response] = whole
        while self.num_bytes > LARGEST_KEPT:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        whole = self._conversations.popitem(last=False)[1]
        self.num_bytes -= self._size_of(whole)
        self._uses.subtract(whole)
        # a message leaves with the last conversation that has it
        for message in {*whole}:
            if not self._uses[message]:
                del self._uses[message], self._messages[message]
                self.num_bytes -= len(message) + OVERHEAD

    def clear(self) -> None:
        while self._conversations:
            self.drop_oldest()

    @staticmethod
    def _size_of(whole: tuple[bytes, ...]) -> int:
        return OVERHEAD + 8 * len(whole)


@dataclass
class HiddenBytes:
    """Counts what the prompts of a session's answered requests do not explain, up to `LARGEST_HIDDEN`."""

    num_bytes: int = 0

    def check(self, num_bytes: int, most_bytes: int) -> None:
        """Refuse a conversation that is too large, also for what the session has sent before. Raises: Rejected."""
        if num_bytes > most_bytes:  # the conversation of `previous_response_id` counts too
            raise Rejected("overlong", f"The conversation has {num_bytes >> 20} MiB, at most {most_bytes >> 20}.")
        # small requests still pass, as they add next to nothing that their prompts do not explain
        if self.num_bytes > LARGEST_HIDDEN and num_bytes > FREE:
            raise Rejected(
                "overlong",
                f"This session has sent {self.num_bytes >> 20} MiB that its prompts do not show, at most "
                f"{LARGEST_HIDDEN >> 20}: reasoning, or tools, that the chat template leaves out. Send less.",
            )

    def count(self, request: TurnRequest, num_bytes: int, task: asyncio.Future[Reply]) -> None:
        """Count what the prompt of an answered request does not explain. Pictures are not counted, nor kept."""
        if task.cancelled() or task.exception() is not None:
            return
        # what is in the prompt is bounded by the model's context; only the rest can grow without end
        explained = FREE + FREE_PER_TOKEN * task.result().num_prompt
        if (hidden := num_bytes + PER_MESSAGE * len(request.messages) - explained) > 0:
            self.num_bytes += max(0, hidden - sum(map(_picture_bytes, request.messages)))


def _picture_bytes(message: Message) -> int:
    """Return how many bytes of a message are pictures."""
    content = message["content"]
    if isinstance(content, str):
        return 0
    return sum(len(part["image_url"]["url"]) for part in content if part["type"] == "image_url")
