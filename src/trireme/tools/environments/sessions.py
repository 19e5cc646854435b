"""Sessions of an agent program in a check: the size of its turns, its branches, and whether its tokens are exact.

The watch stands between the environment and the policy. It keeps what the policy answered, and compares that with the
samples that a rollout would be trained on. Where the policy answers in text, characters are counted.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, cast

from trireme.journal.records import Branch
from trireme.journal.turns import TurnRecord, compare_turns, prompt_digest
from trireme.orchestrator.engines.pool import Generation
from trireme.orchestrator.environments.open_rollout import AskPolicy
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Done, Reply, RunTask
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.driver import RolloutOutcome
from trireme.orchestrator.rollout.trajectory import Trajectory
from trireme.orchestrator.rollout.turns import ModelMessage

SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class Spread:
    """One figure over all turns or rollouts."""

    median: float
    largest: float

    def __str__(self) -> str:
        middle, largest = (f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in (self.median, self.largest))
        return f"{middle} (largest {largest})"


@dataclass(frozen=True)
class SessionReport:
    """What a check found about the sessions of an agent program."""

    rollouts: int
    turns: int
    unit: str  # of lengths: tokens or characters
    prompt: Spread  # of a turn
    sampled: Spread  # of a turn
    system: Spread  # characters of a turn's system messages
    tools: Spread  # characters of a turn's tools, as JSON
    most_tools: int  # of a turn
    branches: dict[str, int]  # conversations, by why each began
    without_tools: int  # conversations
    continuing: int  # turns that continue a conversation and were compared
    drift: int  # of these, those that do not reproduce the tokens that were sampled
    model_s: Spread  # of a rollout: while it waited for at least one turn
    outside_s: Spread  # of a rollout: the rest of the time that the program ran

    def lines(self) -> Iterator[tuple[str, str]]:
        yield "sessions", f"{self.rollouts} rollouts, {self.turns} turns"
        yield "prompt", f"{self.prompt} {self.unit} of a turn"
        yield "sampled", f"{self.sampled} {self.unit} of a turn"
        yield "system", f"{self.system} characters"
        yield "tools", f"{self.tools} characters, up to {self.most_tools} tools"
        yield "branches", ", ".join(f"{why} ({number})" for why, number in self.branches.items())
        yield "side", f"{self.without_tools} conversations without tools"
        if self.unit == "tokens":
            yield "drift", f"{self.drift} of {self.continuing} turns that continue a conversation"
        yield "time", f"in the model {self.model_s} s, outside it {self.outside_s} s of a rollout"


@dataclass
class _Turn:
    question: Ask
    reply: Reply
    began: float
    ended: float


@dataclass
class _Session:
    """A rollout as the policy saw it."""

    began: float = field(default_factory=time.monotonic)
    turns: list[_Turn] = field(default_factory=list)
    text: Trajectory = field(default_factory=lambda: Trajectory(cast(ChatTokenizer, _Characters()), "tolerant"))
    seconds: float = 0.0  # that the program ran

    @property
    def model_s(self) -> float:
        """The time in which at least one turn was waited for."""
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

    async def run(self, task: RunTask, ask: AskPolicy, *, on_retry: Callable[[], None] = lambda: None) -> Done:
        """Run a rollout, see `Environment.run`."""
        session = self._sessions[task.task] = _Session()

        def restart() -> None:
            nonlocal session
            session = self._sessions[task.task] = _Session()
            on_retry()

        async def answer(question: Ask) -> Reply:
            if question.only_counts:
                return await ask(question)
            asked = session.text.ask(question.messages, question.tools, question.trace)
            began = time.monotonic()
            reply = await ask(question)
            if reply.error is None:
                session.turns.append(_Turn(question, reply, began, time.monotonic()))
                message = ModelMessage(reply.content or "", reply.reasoning, tuple(reply.tool_calls or ()))
                ids = _Characters().encode(str(message.to_message()))
                session.text.record(asked, Generation(ids, [0.0] * len(ids), [0] * len(ids), "stop"), message)
            return reply

        done = await self._environment.run(task, answer, on_retry=restart)
        session.seconds = float(done.info.get("seconds", time.monotonic() - session.began))
        return done

    def report(self, outcomes: Sequence[RolloutOutcome]) -> SessionReport | None:
        """Report on the rollouts that were scored; None where none had a turn."""
        branches: list[Branch] = []
        sessions, turns, lengths = [], [], []
        continuing = drift = 0
        for outcome in outcomes:
            session = self._sessions.get(f"{outcome.spec.name}.{outcome.spec.attempt}")
            if outcome.rollout is None or session is None or not session.turns:
                continue
            sessions.append(session)
            turns += session.turns
            branches += outcome.rollout.branches or session.text.branches()
            lengths += [_length(turn) for turn in session.turns]
            records = [_record(turn.reply) for turn in session.turns]
            compared, _ = compare_turns(outcome.rollout.samples, records, ("ids", "logprobs"))
            for before, turn in pairwise(compared):
                if not turn.is_first:
                    continuing += 1
                    drift += bool(before.difference or turn.difference)
        if not turns:
            return None
        system = [[each for each in turn.question.messages if each.get("role") in SYSTEM] for turn in turns]
        return SessionReport(
            rollouts=len(sessions),
            turns=len(turns),
            unit="tokens" if turns[0].reply.prompt_ids else "characters",
            prompt=_spread([prompt for prompt, _ in lengths]),
            sampled=_spread([sampled for _, sampled in lengths]),
            system=_spread([sum(len(str(each.get("content") or "")) for each in messages) for messages in system]),
            tools=_spread([len(json.dumps(turn.question.tools)) if turn.question.tools else 0 for turn in turns]),
            most_tools=max(len(turn.question.tools or ()) for turn in turns),
            branches=dict(Counter(branch.why for branch in branches).most_common()),
            without_tools=sum(not branch.num_tools for branch in branches),
            continuing=continuing,
            drift=drift,
            model_s=_spread([session.model_s for session in sessions]),
            outside_s=_spread([max(0.0, session.seconds - session.model_s) for session in sessions]),
        )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), max(values))


def _length(turn: _Turn) -> tuple[int, int]:
    """Return the length of a turn's prompt and of its answer."""
    reply = turn.reply
    if reply.prompt_ids:
        return len(reply.prompt_ids), len(reply.completion_ids)
    calls = [call.name + call.arguments for call in reply.tool_calls or ()]
    sampled = len(f"{reply.reasoning or ''}{reply.content or ''}{''.join(calls)}")
    return len(json.dumps([turn.question.messages, turn.question.tools])), sampled


def _record(reply: Reply) -> TurnRecord:
    return TurnRecord(
        prompt=prompt_digest(reply.prompt_ids),
        ids=reply.completion_ids,
        logprobs=reply.logprobs,
        versions=[],
        finish_reason="",
        message={},
    )


class _Characters:
    """Stands for a tokenizer where the policy answers in text: conversations are followed, their tokens are not."""

    def render(self, messages: list[dict[str, Any]], *, tools: list[dict] | None, generate: bool) -> str:
        return "".join(map(str, messages)) + ">" * generate

    def prompt_ids(self, messages: list[dict[str, Any]], *, tools: list[dict] | None) -> list[int]:
        return self.encode(self.render(messages, tools=tools, generate=True))

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: list[int], *, keep_special: bool = False) -> str:
        return "".join(map(chr, ids))

    def is_special(self, token: int) -> bool:
        return False
