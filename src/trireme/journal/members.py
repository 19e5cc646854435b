"""`members.json`: the engines that joined a run, and the number that the next one gets. Writer and reader.

It is on disk before an engine hears that it is a member: a restarted orchestrator knows its members, and never gives a
number twice.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from trireme.base.errors import JournalCorrupt
from trireme.base.paths import atomic_write

FILE = "members.json"


class Member(msgspec.Struct, frozen=True):
    """An engine that joined.

    Example:
        Member(3, "9f3c…", "http://10.0.0.21:8000", {"vllm": "0.32.0"}, since=1700000000.0)
    """

    id: int
    ticket: str  # the secret of its registration
    url: str
    facts: dict[str, str]
    since: float  # unix time


class Members(msgspec.Struct, frozen=True):
    next_id: int = 1
    members: list[Member] = []


def write_members(folder: Path, members: Members) -> None:
    with atomic_write(folder / FILE) as file:
        file.write(msgspec.json.format(msgspec.json.encode(members)))


def read_members(folder: Path) -> Members:
    """Return the members of a run; none if no engine ever joined. Raises: JournalCorrupt."""
    file = folder / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Members)
    except FileNotFoundError:
        return Members()
    except (msgspec.DecodeError, ValueError) as error:
        raise JournalCorrupt(
            f"{file} cannot be read ({error}) - expected the engines that joined this run. Remove it: they join again."
        ) from error
