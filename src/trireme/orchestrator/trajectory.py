"""The tokens of one rollout, turn by turn: what the engine was given and what it gave, never re-tokenised.

A turn continues the sample of the turn before when the new conversation, as the template renders it, begins with the
old one; then only the text in between (a tool's answer, say) is tokenised. Where the template rewrites earlier turns
(models that drop their thinking), or with `branching`, the turn begins a sample of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trireme.messages import Tokens, build_tokens
from trireme.orchestrator.chat import ChatTokenizer
from trireme.orchestrator.inference_pool import Generation


@dataclass
class _Branch:
    """One sample in the making."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)  # that led to the last turn
    content: str = ""  # of the last turn

    @property
    def length(self) -> int:
        return len(self.ids)

    def add_given(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def add_sampled(self, turn: Generation) -> None:
        self.ids += turn.ids
        self.mask += [1] * len(turn.ids)
        self.logprobs += turn.logprobs
        self.versions += turn.versions


@dataclass(frozen=True)
class Question:
    """A turn that the engine is asked for. It becomes part of a sample only when there is an answer."""

    ids: list[int]  # the whole prompt
    messages: list[dict[str, Any]]
    branch: _Branch | None  # that it continues
    begins: int  # where in `ids` that branch ends


class Trajectory:
    """All samples of one rollout."""

    def __init__(self, tokenizer: ChatTokenizer, *, branching: bool) -> None:
        self._tokenizer = tokenizer
        self._branching = branching
        self._branches: list[_Branch] = []

    def ask(self, messages: list[dict[str, Any]], tools: list[dict] | None) -> Question:
        """What to give to the engine for the next turn. Several questions may be open at once."""
        for branch in () if self._branching else reversed(self._branches):
            glue = self._continuation(branch, messages, tools)
            if glue is not None:
                return Question(branch.ids + glue, messages, branch, begins=branch.length)
        ids = self._tokenizer.encode(self._tokenizer.render(messages, tools=tools, generate=True))
        return Question(ids, messages, None, begins=0)

    def record(self, question: Question, turn: Generation, content: str) -> None:
        """What the engine gave. `content` is the text that the environment was shown."""
        branch, begins = question.branch, question.begins
        if branch is None or branch.length != begins:  # another answer has continued it meanwhile
            branch, begins = _Branch(), 0
            self._branches.append(branch)
        branch.add_given(question.ids[begins:])
        branch.add_sampled(turn)
        branch.messages, branch.content = question.messages, content

    def _continuation(
        self, branch: _Branch, messages: list[dict[str, Any]], tools: list[dict] | None
    ) -> list[int] | None:
        """Ids that follow on `branch`, or None where this conversation does not continue it."""
        past = len(branch.messages)
        if len(messages) <= past or messages[:past] != branch.messages or messages[past].get("role") != "assistant":
            return None
        before = self._tokenizer.render(branch.messages, tools=tools, generate=True)
        with_turn = self._tokenizer.render(messages[: past + 1], tools=tools, generate=False)
        now = self._tokenizer.render(messages, tools=tools, generate=True)
        raw = self._tokenizer.decode(self._last_turn(branch), keep_special=True)
        if not with_turn.startswith(before) or not now.startswith(with_turn):
            return None
        rest = with_turn[len(before) :]
        shown = next((text for text in (raw, branch.content) if rest.startswith(text)), None)
        if shown is None:
            return None
        return self._tokenizer.encode(rest[len(shown) :] + now[len(with_turn) :])

    @staticmethod
    def _last_turn(branch: _Branch) -> list[int]:
        start = len(branch.mask)
        while start > 0 and branch.mask[start - 1]:
            start -= 1
        return branch.ids[start:]

    def samples(self) -> list[Tokens]:
        """Samples in order of their turns; advantages are 0 until the group is known."""
        return [
            build_tokens(
                ids=branch.ids,
                loss_mask=branch.mask,
                logprobs=branch.logprobs,
                advantages=[0.0] * len(branch.ids),
                versions=branch.versions,
            )
            for branch in self._branches
            if any(branch.mask)
        ]
