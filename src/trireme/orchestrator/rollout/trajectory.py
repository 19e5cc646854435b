"""The tokens of one rollout, turn by turn: what the engine was given and what it sampled, never tokenised again.

The sample that a turn's tokens belong to:
- `interleaved`: a turn whose conversation continues an earlier one goes into that one's sample; only the text in
  between (a tool's answer, for example) is tokenised. Chat templates that rewrite earlier turns are refused.
- `branching`: each turn is a sample of its own, with the conversation before it as its prompt.
- With either, a conversation that continues no earlier one begins a sample: the first one, one that the environment
  changed or asked in parallel to another, one with other tools.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from trireme.messages import Kept, Tokens, build_tokens
from trireme.orchestrator.engines.expert_routes import to_routed
from trireme.orchestrator.engines.pool import Generation
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.continuation import Rewritten, text_after
from trireme.orchestrator.rollout.turns import ModelMessage

Strategy = Literal["interleaved", "interleaved_or_new", "branching"]
"""`interleaved_or_new` begins a sample where the template rewrites earlier turns: for evaluations."""


@dataclass
class _Sample:
    """One sample in the making."""

    tools: list[dict] | None
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)  # of each token what it was chosen from; empty: everything
    routes: list[np.ndarray] = field(default_factory=list)  # of its beginning, turn by turn: [N, layers, experts]
    messages: list[dict[str, Any]] = field(default_factory=list)  # up to the last turn
    reply: ModelMessage = field(default_factory=lambda: ModelMessage(""))  # the last turn
    last_turn: int = 0  # where it begins

    @property
    def length(self) -> int:
        return len(self.ids)

    def add_given(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.kept += [[] for _ in ids]

    def add_sampled(self, turn: Generation) -> None:
        self.last_turn = self.length
        self.ids += turn.ids
        self.mask += [1] * len(turn.ids)
        self.logprobs += turn.logprobs
        self.versions += turn.versions
        self.kept += turn.kept or [[] for _ in turn.ids]

    def is_continued_by(self, messages: list[dict[str, Any]], tools: list[dict] | None) -> bool:
        past = len(self.messages)
        begins_alike = len(messages) > past and messages[:past] == self.messages and (tools or None) == self.tools
        return begins_alike and self.reply.is_in(messages[past])

    def to_tokens(self) -> Tokens:
        """Build the columns. Advantages are 0 until the group is known."""
        kept = None
        if any(self.kept):
            counts = np.array([len(ids) for ids in self.kept], dtype=np.int32)
            kept = Kept(counts, np.array([token for ids in self.kept for token in ids], dtype=np.int32))
        return build_tokens(
            ids=self.ids,
            loss_mask=self.mask,
            logprobs=self.logprobs,
            advantages=[0.0] * self.length,
            versions=self.versions,
            kept=kept,
            routed=to_routed(self.routes, self.length),
        )


@dataclass(frozen=True)
class Question:
    """A turn that the engine is asked for. It becomes part of a sample only when there is an answer."""

    number: int  # of all turns that were asked for, from 0
    ids: list[int]  # the whole prompt
    messages: list[dict[str, Any]]
    tools: list[dict] | None
    sample: _Sample | None  # that it continues
    begins: int  # where in `ids` that sample ends
    routes: tuple[np.ndarray, ...] = ()  # of the beginning of `ids`: reported by the engine in earlier turns

    @property
    def routes_from(self) -> int:
        """The first token of `ids` whose routes are not known yet."""
        return sum(len(chunk) for chunk in self.routes)


@dataclass(frozen=True)
class _Place:
    """The tokens of a turn."""

    sample: _Sample
    begin: int
    end: int


class Trajectory:
    """All samples of one rollout."""

    def __init__(self, tokenizer: ChatTokenizer, strategy: Strategy) -> None:
        self._tokenizer = tokenizer
        self._strategy = strategy
        self._samples: list[_Sample] = []
        self._places: dict[int, _Place] = {}
        self._num_asked = 0

    @property
    def num_turns(self) -> int:
        """Turns of the model."""
        return len(self._places)

    def ask(self, messages: list[dict[str, Any]], tools: list[dict] | None) -> Question:
        """Build the prompt of the next turn. Several turns may be asked for at once.

        Raises:
            Rewritten: `interleaved`, and the chat template does not continue what it rendered before.
        """
        number, self._num_asked = self._num_asked, self._num_asked + 1
        candidates = [] if self._strategy == "branching" else reversed(self._samples)
        sample = next((each for each in candidates if each.is_continued_by(messages, tools)), None)
        if sample is not None:
            try:
                text = text_after(
                    self._tokenizer,
                    messages,
                    num_past=len(sample.messages),
                    reply=sample.reply,
                    sampled=sample.ids[sample.last_turn :],
                    tools=tools or None,
                )
                ids = sample.ids + self._tokenizer.encode(text)
                return Question(number, ids, messages, tools, sample, sample.length, tuple(sample.routes))
            except Rewritten:
                if self._strategy == "interleaved":
                    raise
        if number == 0:
            ids = self._tokenizer.prompt_ids(messages, tools=tools)
        else:
            ids = self._tokenizer.encode(self._tokenizer.render(messages, tools=tools, generate=True))
        return Question(number, ids, messages, tools, None, begins=0)

    def record(self, question: Question, turn: Generation, reply: ModelMessage) -> None:
        """Add a turn: the tokens that the engine sampled, and the message that the environment is shown."""
        sample, begins = question.sample, question.begins
        if sample is None or sample.length != begins:  # another answer has continued it meanwhile
            sample, begins = _Sample(question.tools or None), 0
            self._samples.append(sample)
        sample.add_given(question.ids[begins:])
        sample.add_sampled(turn)
        if turn.routes is not None:
            sample.routes = [*question.routes, turn.routes]
        sample.messages, sample.reply = question.messages, reply
        self._places[question.number] = _Place(sample, sample.last_turn, sample.length)

    def samples(self) -> list[Tokens]:
        """Return the samples that the model took part in, in the order of their first turns."""
        return [sample.to_tokens() for sample in self._trained()]

    def _trained(self) -> list[_Sample]:
        return [sample for sample in self._samples if any(sample.mask)]

    def token_rewards(self, turn_rewards: list[list[float]]) -> list[np.ndarray]:
        """Return [T] float32 per sample: rewards at the tokens that they are for, NaN elsewhere. Empty without any.

        Args:
            turn_rewards: of each turn that was asked for, see `wire.Done`.

        Raises:
            ValueError: a turn has another number of tokens.
        """
        if not any(turn_rewards):
            return []
        columns = {id(sample): np.full(sample.length, np.nan, dtype=np.float32) for sample in self._samples}
        for number, rewards in enumerate(turn_rewards):
            if rewards:
                self._credit(number, rewards, columns)
        return [columns[id(sample)] for sample in self._trained()]

    def _credit(self, number: int, rewards: list[float], columns: dict[int, np.ndarray]) -> None:
        place = self._places.get(number)
        num_tokens = place.end - place.begin if place else 0
        if place is None or num_tokens == 0 or len(rewards) not in (1, num_tokens):
            raise ValueError(
                f"turn {number + 1} was given {len(rewards)} rewards and has {num_tokens} tokens - "
                "expected one reward for the whole turn, or one per token"
            )
        column = columns[id(place.sample)]
        column[place.end - len(rewards) : place.end] = rewards
