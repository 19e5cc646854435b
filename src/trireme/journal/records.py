"""Records of a run's work, in memory and in the journal.

A rollout is one pass through an environment; a group is the rollouts of one example; a batch is what one optimizer step
is trained on. Every rollout that was started ends with exactly one fate: trained in a batch, or dropped for a reason.
"""

from __future__ import annotations

from typing import Any, Self

import msgspec
import numpy as np

from trireme.algo.data.difficulty import Outcome, Scores
from trireme.algo.data.order import Cursor
from trireme.algo.rules import Rules
from trireme.messages import Tokens


class AgentRun(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One run of an agent that the policy plays, in an environment whose agents have rewards of their own.

    Example:
        AgentRun(agent="solver", reward=1.0, samples=[0, 2])
    """

    agent: str  # its role in the environment
    reward: float  # finite
    trace: str = ""  # key of its requests; only on the wire
    samples: list[int] = []  # indices into the rollout's samples; the environment does not know them


class EnvironmentResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The result of a scored rollout, from its environment. A field here is in `wire.Done` and in `Rollout`."""

    reward: float  # finite; the mean of the runs' rewards, if there are runs
    runs: list[AgentRun] = []  # runs of agents with rewards of their own; each is compared with those of the same agent
    metrics: dict[str, float] = {}  # finite
    prompt: list[dict[str, Any]] = []
    completion: list[dict[str, Any]] = []  # the model's messages, and the environment's between them
    answer: str | None = None
    example_id: int | str = -1  # the environment's own id; -1 if it has none
    stop: str | None = None  # name of the environment's condition that ended it
    truncated: bool = False  # the model ran out of tokens, or the conversation out of context
    info: dict[str, Any] = {}  # in the journal only if an agent program played: it may be large
    columns: dict[str, Any] = {}  # those of `RunTask.columns` that exist
    state_keys: list[str] = []  # the fields that exist, if one of `RunTask.columns` does not


class Branch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A conversation of an agent program: its first one, or one that a request began which continues no earlier one.

    Example:
        Branch(why="turn dropped", parent=0, place=2, num_turns=3, num_tools=1, sample=1, messages=[...])
    """

    why: str  # see `Trajectory._begin_branch`
    parent: int = -1  # the branch that it leaves; -1: it has nothing in common with an earlier one
    place: int = 0  # messages in common with the parent
    num_turns: int = 0  # turns of this branch alone
    num_tools: int = 0
    sample: int = -1  # index into the rollout's samples; -1: not trained on
    messages: list[dict[str, Any]] = []  # messages from `place` on; empty: see the rollout's prompt and completion


class Rollout(EnvironmentResult, kw_only=True, omit_defaults=True):
    """One scored rollout, from the environment's answer to the journal. A new per-rollout field is one line here.

    Example:
        Rollout(group=12, place=3, env="reverse-text", example=417, reward=0.75, samples=[Tokens(...)], temperature=1.0)
    """

    env: str
    example: int  # index in the split
    temperature: float
    samples: list[Tokens] = []  # empty if the model was not an engine of ours
    group: int = -1  # -1 outside of training
    place: int = 0  # within the group
    attempt: int = 0
    num_turns: int = 0  # model turns; 0 in journals that did not count them
    rewritten: int = 0  # turns that begin a sample because the chat template rewrote earlier ones
    num_sampled: int | None = None  # tokens of the model; None if nothing counts them
    num_tokens: int | None = None  # tokens of the longest sample, or of the whole conversation
    num_computed: int | None = None  # tokens that engines computed for its turns; None if one did not say
    flaws: list[str] = []  # flaws that the filters found: truncated, repetition, gibberish, zero_advantage
    masked: str | None = None  # the flaw for which none of its tokens is trained on; its reward counts in its group
    token_rewards: list[np.ndarray] = []  # per sample [T] float32, NaN for tokens without one; empty: none at all
    branches: list[Branch] = []  # conversations of the agent program that played it
    left_out: dict[str, list[str]] = {}  # turns on disk that are in no sample: why, and digests of their prompts
    model: str = ""  # the model that sampled it, if that was not the policy
    teacher: list[np.ndarray] = []  # per sample [T] float32, the teacher's logprobs, NaN for masked tokens

    @classmethod
    def of(cls, result: EnvironmentResult, **measured: Any) -> Self:
        """Add to an environment's result what was measured here, which wins."""
        return cls(**{name: getattr(result, name) for name in EnvironmentResult.__struct_fields__} | measured)

    @property
    def versions(self) -> set[int]:
        """Policy versions that sampled any of its tokens."""
        return {int(v) for sample in self.samples for v in np.unique(sample.versions[sample.versions >= 0])}

    @property
    def oldest_version(self) -> int | None:
        """The oldest of these, or that one of these tokens attended to; None if the policy sampled nothing."""
        known = (each.attended[each.versions >= 0] for each in self.samples)
        return min((int(versions.min()) for versions in known if len(versions)), default=None)


class Dropped(msgspec.Struct):
    """A rollout that is not trained on.

    Example:
        Dropped(group=12, place=3, attempt=0, env="reverse-text", example=417, reason="score: ValueError: no number")
    """

    group: int
    place: int
    attempt: int
    env: str
    example: int
    reason: str


class OpenGroup(msgspec.Struct, frozen=True):
    """A group that was started and is in no batch yet. An orchestrator that restarts issues it again."""

    id: int
    env: str
    example: int


class State(msgspec.Struct):
    """Everything that the orchestrator needs to continue after a batch."""

    next_batch: int = 0
    next_group: int = 0
    sizes: dict[str, int] = {}  # training examples per environment
    cursors: dict[str, Cursor] = {}
    open_groups: list[OpenGroup] = []
    counters: dict[str, int] = {}
    scores: dict[str, Scores] = {}  # per environment, if difficulty pools are in use
    baselines: dict[str, float] = {}  # per environment (and agent): the running mean reward of the `ema` advantage
    stage: int = 0  # stage of the curriculum, from 0
    stage_reward: float | None = None  # mean reward of that stage so far, smoothed
    tokens_per_rollout: float = 0.0  # mean of the batch, if its size is in tokens: it says how many fill the next one


class BatchRecord(msgspec.Struct):
    """One entry of the journal: a batch, the fates decided since the previous one, and the state to continue from."""

    step: int
    rollouts: list[Rollout]
    dropped: list[Dropped]
    state: State
    metrics: dict[str, float] = {}
    rules: Rules | None = None  # rules by which it was filled
    outcomes: list[Outcome] = []  # outcomes of groups that ended since the batch before, in the order of their ids
