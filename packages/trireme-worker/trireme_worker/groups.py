"""Score rollouts whose rewards compare a group: finished ones wait for the others, then all are scored together, once.

A rollout that fails or is cancelled leaves its group. The orchestrator runs it again under the same group's name, while
the others wait, for as long as the orchestrator lets them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from trireme_worker.rollout import RewardError

Score = Callable[[list[Any]], Awaitable[list[dict]]]

REMEMBERED = 4096  # scored groups that are remembered: a rollout that comes later has no others to be compared with


class Groups:
    """The groups of which some rollouts have been played, and not all."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._waiting: dict[str, list[_Member]] = {}
        self._scored: dict[str, None] = {}  # in order of time
        self._scoring: set[asyncio.Task] = set()

    async def score(self, played: Any, *, name: str, group: str, size: int) -> dict:
        """Waits for the rest of the group. Returns this rollout's fields of the `done` message.

        Args:
            name: of the rollout. The group is scored in the order of its names, whichever came first.

        Raises: RewardError, for every member alike.
        """
        # a member that was run again too late has no others to be compared with
        if group in self._scored:
            raise RewardError(
                f"Its group {group!r} was scored without it - expected all {size} rollouts of a group to be scored "
                "together - the group cannot be completed any more and will be replaced."
            )
        members = self._waiting.setdefault(group, [])
        members.append(member := _Member(name, played, asyncio.get_running_loop().create_future()))
        if len(members) == size:
            # in a task of its own: cancelling one member must not end the scoring, only cancelling all of them
            whole = sorted(self._waiting.pop(group), key=lambda member: member.name)
            scoring = asyncio.get_running_loop().create_task(self._score_all(group, whole))
            self._scoring.add(scoring)  # the event loop itself only keeps weak references
            scoring.add_done_callback(self._scoring.discard)
            for each in whole:
                each.result.add_done_callback(lambda _: all(m.result.done() for m in whole) and scoring.cancel())
        try:
            return await member.result
        finally:
            # a member that failed or was cancelled leaves its place to its next attempt
            if member in members:
                members.remove(member)
            if not members and self._waiting.get(group) is members:
                del self._waiting[group]

    async def _score_all(self, group: str, members: "list[_Member]") -> None:
        try:
            results = await self._score([member.played for member in members])
        except BaseException as error:  # if the scoring was cancelled, no member waits
            # an error per member: one that is raised in sixteen places would have the traceback of all of them
            for member in (each for each in members if not each.result.done()):
                failure = RewardError()
                failure.__cause__ = (error.__cause__ or error) if isinstance(error, RewardError) else error
                member.result.set_exception(failure)
            return
        for member, result in zip(members, results, strict=True):
            if not member.result.done():
                member.result.set_result(result)
                self._scored[group] = None
        if len(self._scored) > REMEMBERED:
            del self._scored[next(iter(self._scored))]


@dataclass(eq=False)
class _Member:
    name: str
    played: Any
    result: asyncio.Future[dict]
