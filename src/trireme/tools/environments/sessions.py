"""Sessions of an agent program in a check: the size of its turns, its branches, and whether its tokens are exact.

The watch wraps the environment. It keeps what the policy answered, and compares that with the
samples that a rollout would be trained on. If the policy answers in text, characters are counted, and conversations
are not told apart.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec

from trireme.journal.message_text import content_text
from trireme.journal.model_turn import Turn
from trireme.journal.records import Branch
from trireme.journal.turns import compare_turns, prompt_digest
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.driver import RolloutOutcome
from trireme.orchestrator.session.session import Session
from trireme.orchestrator.session.wire import Ask, Done, Reply
from trireme.tools.policies.prompts import SYSTEM


@dataclass(frozen=True)
class Spread:
    """One figure over all turns or rollouts."""

    median: float
    largest: float

    def __str__(self) -> str:
        middle, largest = (
            f"{each:,.0f}" if each >= 100 else f"{round(each, 3):.3g}" for each in (self.median, self.largest)
        )
        return f"{middle} (largest {largest})"


@dataclass(frozen=True)
class SessionReport:
    """The findings of a check about the sessions of an agent program."""

    rollouts: int
    turns: int
    unit: str  # unit of lengths: tokens or characters
    prompt: Spread  # length of a turn's prompt
    sampled: Spread  # length of a turn's answer
    system: Spread  # characters of a turn's system messages
    tools: Spread  # characters of a turn's tools, as JSON
    most_tools: int  # number of tools of a turn
    branches: dict[str, int]  # conversations, by why each began; none if the policy answers in text
    without_tools: int  # conversations
    continuing: int  # turns that continue a conversation and were compared
    drift: int  # continuing turns that do not reproduce the tokens that were sampled
    model_s: Spread  # seconds of a rollout in which it waited for at least one turn
    outside_s: Spread  # seconds of the rest of the time that the program ran

    def lines(self) -> Iterator[tuple[str, str]]:
        yield "sessions", f"{self.rollouts} rollouts, {self.turns} turns"
        yield "prompt", f"{self.prompt} {self.unit} of a turn"
        yield "sampled", f"{self.sampled} {self.unit} of a turn"
        yield "system", f"{self.system} characters"
        yield "tools", f"{self.tools} characters, up to {self.most_tools} tools"
        if self.unit == "tokens":
            yield "branches", ", ".join(f"{why} ({number})" for why, number in self.branches.items())
            yield "side", f"{self.without_tools} conversations without tools"
            yield "drift", f"{self.drift} of {self.continuing} turns that continue a conversation"
        yield "time", f"in the model {self.model_s} s, outside it {self.outside_s} s of a rollout"


@dataclass
class _Turn:
    """A turn without its messages, which would take megabytes of each rollout."""

    system: int  # characters
    tools: int  # characters
    num_tools: int
    prompt: int
    sampled: int
    answered: Turn | None  # None if the policy answers in text
    began: float
    ended: float


@dataclass
class _Session:
    """A rollout as the policy saw it."""

    began: float = field(default_factory=time.monotonic)
    turns: list[_Turn] = field(default_factory=list)
    seconds: float = 0.0  # seconds that the program ran

    @property
    def model_s(self) -> float:
        """The time in which at least one turn was waited for."""
        # turns of parallel agents overlap, and the time is counted once
        total, until = 0.0, 0.0
        for turn in sorted(self.turns, key=lambda turn: turn.began):
            total += max(0.0, turn.ended - max(turn.began, until))
            until = max(until, turn.ended)
        return total


class SessionWatch:
    """An environment whose rollouts are watched. Everything else is as in the environment that it is given."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._sessions: dict[str, _Session] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def run(self, played: Session) -> Done:
        """Run a rollout, see `Environment.run`."""
        task = played.task
        session = self._sessions[task.task] = _Session()

        # a rollout that is tried again starts from nothing, and so does its session
        def restart() -> None:
            nonlocal session
            session = self._sessions[task.task] = _Session()
            played.restart()

        async def answer(question: Ask) -> Reply:
            if question.only_counts:
                return await played.answer(question)
            began = time.monotonic()
            reply = await played.answer(question)
            if reply.error is None:
                session.turns.append(_turn(question, reply, began))
            return reply

        done = await self._environment.run(Session(task, answer, restart, played.log))
        session.seconds = float(done.info.get("seconds", time.monotonic() - session.began))
        return done

    def report(self, outcomes: Sequence[RolloutOutcome]) -> SessionReport | None:
        """Report on the rollouts that were scored; None if none had a turn."""
        branches: list[Branch] = []
        sessions, turns = [], []
        continuing = drift = 0
        for outcome in outcomes:
            session = self._sessions.get(f"{outcome.spec.name}.{outcome.spec.attempt}")
            if outcome.rollout is None or session is None or not session.turns:
                continue

            sessions.append(session)
            turns += session.turns
            branches += outcome.rollout.branches
            records = [turn.answered for turn in session.turns if turn.answered is not None]
            # replies do not say which pictures their prompts had
            samples = [msgspec.structs.replace(sample, pictures=[]) for sample in outcome.rollout.samples]
            compared, _ = compare_turns(samples, records, ("ids", "logprobs"))
            # two turns in a row: the second continues the first exactly if both are found as they were answered
            for before, turn in pairwise(compared):
                if not turn.is_first:
                    continuing += 1
                    drift += bool(before.difference or turn.difference)
        if not turns:
            return None

        return SessionReport(
            rollouts=len(sessions),
            turns=len(turns),
            unit="tokens" if turns[0].answered else "characters",
            prompt=_spread([turn.prompt for turn in turns]),
            sampled=_spread([turn.sampled for turn in turns]),
            system=_spread([turn.system for turn in turns]),
            tools=_spread([turn.tools for turn in turns]),
            most_tools=max(turn.num_tools for turn in turns),
            branches=dict(Counter(branch.why for branch in branches).most_common()),
            without_tools=sum(not branch.num_tools for branch in branches),
            continuing=continuing,
            drift=drift,
            model_s=_spread([session.model_s for session in sessions]),
            outside_s=_spread([max(0.0, session.seconds - session.model_s) for session in sessions]),
        )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), max(values))


def _turn(question: Ask, reply: Reply, began: float) -> _Turn:
    # characters, unless the engine says which token ids it read and sampled
    calls = [call.name + call.arguments for call in reply.tool_calls or ()]
    prompt, sampled = len(json.dumps([question.messages, question.tools])), "".join(calls)
    lengths, answered = (prompt, len(f"{reply.reasoning or ''}{reply.content or ''}{sampled}")), None

    if reply.prompt_ids:
        lengths = len(reply.prompt_ids), len(reply.completion_ids)
        answered = Turn(
            prompt=prompt_digest(reply.prompt_ids),
            ids=reply.completion_ids,
            logprobs=reply.logprobs,
            versions=[],
            finish_reason="",
            message={},
        )

    system = [content_text(each.get("content")) for each in question.messages if each.get("role") in SYSTEM]
    tools = question.tools or []
    return _Turn(
        len("".join(system)),
        len(json.dumps(tools)) if tools else 0,
        len(tools),
        *lengths,
        answered,
        began,
        time.monotonic(),
    )
