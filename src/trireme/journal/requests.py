"""The requests of an agent program that runs: what it has asked for, and has perhaps been answered.

The program may outlive the orchestrator. The next one asks itself what is in this file, gets the turns that are on disk
(`turns.py`), and so knows the conversations that the program continues. The file is for one run of the program, and is
removed when its rollout is over. It need not survive the machine, as the program does not either.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trireme.journal.model_turn import TurnRequest
from trireme.journal.turns import framed, payloads_of, whole_length


class KeptRequest(TurnRequest, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request that was answered with a turn. In the file it lacks what it shares with the one before."""

    session: str  # id of one run of the program; a new run has another
    number: int  # its place among all requests of the session, from 1
    shared: int = 0  # messages at the beginning that the request before has too
    has_same_tools: bool = False  # the tools are those of the request before, and left out here

    def continues(self, other: KeptRequest) -> bool:
        """Return whether its conversation is a longer one with the same beginning."""
        num_messages = len(other.messages)
        return len(self.messages) > num_messages and self.messages[:num_messages] == other.messages


@dataclass
class RequestLog:
    """The file of one rollout's requests.

    Example:
        requests = RequestLog(folder / "17-3.0.requests")
        requests.write(KeptRequest(session="5f3a", number=1, messages=[...]))
        requests.read("5f3a")  # after a restart of the orchestrator
    """

    path: Path
    _last: KeptRequest | None = None

    def write(self, request: KeptRequest) -> None:
        """Add a request. The first one of another session begins the file again."""
        last, self._last = self._last, request
        is_first = last is None or last.session != request.session

        # Each request carries its whole conversation: store only what is new, or the file would grow with its square.
        if last is not None and not is_first:
            most = min(len(request.messages), len(last.messages))
            shared = next((n for n in range(most) if request.messages[n] != last.messages[n]), most)
            has_same_tools = request.tools == last.tools
            request = msgspec.structs.replace(
                request,
                shared=shared,
                messages=request.messages[shared:],
                has_same_tools=has_same_tools,
                tools=None if has_same_tools else request.tools,
            )

        # Truncate at a new session: requests of an earlier run of the program must not be replayed to this one.
        if is_first:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        how = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if is_first else os.O_APPEND)
        with open(os.open(self.path, how, 0o600), "wb") as file:
            file.write(framed(msgspec.json.encode(request)))  # JSON, as it came: msgpack has no integers above 64 bits

    def read(self, session: str) -> list[KeptRequest]:
        """Return the requests of a session, whole, and continue its file."""
        data = self.path.read_bytes() if self.path.exists() else b""
        found: list[KeptRequest] = []

        # Put back what each request shares with the one before.
        for payload in payloads_of(data):
            request = msgspec.json.decode(payload, type=KeptRequest)
            if found:
                before = found[-1]
                request.messages = [*before.messages[: request.shared], *request.messages]
                request.tools = before.tools if request.has_same_tools else request.tools
            found.append(request)

        if not found or found[0].session != session:
            return []

        # A crash may have cut the last request short: the next one must not follow half a record.
        os.truncate(self.path, whole_length(data))
        self._last = found[-1]
        return found

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
