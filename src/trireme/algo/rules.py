"""The rules that a batch is filled by, as far as the audit needs them. Each journal entry holds its own rules, because
a resumed run may have others.

Fields with a default are missing from journals that were written before there was such a choice.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trireme.config.inference import KeepPrefixCache
from trireme.config.orchestrator import DifficultyPools, Filters, LengthPenalty, Stage
from trireme.config.run import RunConfig

DECAYS = {"rae": 0.95}
"""Usual decay of a running mean; 0.9 for others."""


class Rules(msgspec.Struct, frozen=True):
    """The part of a run's configuration that decides what a batch holds. Tables are those of the configuration.

    Example:
        rules.group_size, rules.of("math").group_size  # 8, and 4 for a source with groups of its own
    """

    seed: int
    shuffle: bool
    weights: dict[str, float]  # per environment
    batch_size: int | None  # rollouts; None if tokens are counted
    group_size: int  # rollouts
    max_attempts: int
    max_async_level: int
    max_off_policy_steps: int
    advantage: str
    temperature: float
    # Keys that decide which example comes next.
    pools: DifficultyPools | None = None
    curriculum: tuple[Stage, ...] = ()
    # Keys that decide which groups are put into a batch.
    token_batch_size: int | None = None
    needs_signal: bool = False  # groups must have rewards that are not all the same
    least_variance: float = 0.0  # least variance of the rewards
    advantage_range: tuple[float, float] | None = None  # groups whose advantages are all within it are dropped
    filters: Filters | None = None  # None in journals that hold neither flaws nor outcomes
    # Keys of advantages.
    decay: float = 0.9  # decay of the running mean of `ema`
    advantage_path: str | None = None  # path of the function of `custom`
    advantage_args: dict[str, Any] = {}
    clip: float | None = None
    reward_clip: tuple[float, float] | None = None
    length_penalty: LengthPenalty | None = None
    teacher_weight: float | None = None  # None if there is no teacher
    reward_weight: float = 1.0  # weight of the advantage from rewards, next to a teacher's
    ce_weight: float = 0.0  # weight of what a teacher samples in the cross-entropy; 0 if the policy samples
    echo: dict[str, float] = {}  # weight of what each role says
    episode_agents: tuple[str, ...] = ()  # agents that `hierarchical_grpo` compares within a rollout
    keep_prefix_cache: KeepPrefixCache = "never"  # caches that outlive an update
    sources: dict[str, Rules] = {}  # per environment that has rules of its own

    def of(self, environment: str) -> Rules:
        """Return the rules for rollouts of an environment."""
        return self.sources.get(environment, self)

    @property
    def all(self) -> list[Rules]:
        """These rules, and those of sources that have their own."""
        return [self, *self.sources.values()]

    @property
    def estimator(self) -> tuple[str, float, str | None, str, tuple[str, ...]]:
        """The identity of what computes advantages: sources that share it are seen by it together."""
        return self.advantage, self.decay, self.advantage_path, repr(self.advantage_args), self.episode_agents

    @property
    def max_lag(self) -> int:
        """Versions that a trained token may be older than its batch's own version. A synchronous batch has one."""
        return 0 if self.max_async_level == 0 else self.max_off_policy_steps


def rules_of(config: RunConfig) -> Rules:
    """Return the rules of a run, with those of each source that differ from them."""
    whole = _rules_of(config)
    each = {entry.resolved_name: _rules_of(config.of(entry.resolved_name)) for entry in config.orchestrator.env}
    return msgspec.structs.replace(whole, sources={name: own for name, own in each.items() if own != whole})


def _rules_of(config: RunConfig) -> Rules:
    orchestrator = config.orchestrator
    buffer, advantage, teacher = orchestrator.buffer, orchestrator.advantage, orchestrator.teacher

    # Lengths that follow from other keys are filled in, as the audit has the rules alone.
    penalty = orchestrator.length_penalty
    if penalty is not None:
        longest = penalty.max_length or orchestrator.sampling.max_tokens or config.seq_len
        filled = {"max_length": longest, "buffer": penalty.buffer or max(1, longest // 5)}
        penalty = penalty.model_copy(update=filled)

    return Rules(
        seed=config.seed,
        shuffle=buffer.shuffle,
        weights={entry.resolved_name: entry.weight for entry in orchestrator.env},
        batch_size=orchestrator.batch_size,
        token_batch_size=orchestrator.token_batch_size,
        group_size=orchestrator.rollouts_per_example,
        max_attempts=orchestrator.max_rollout_attempts,
        max_async_level=config.max_async_level,
        max_off_policy_steps=orchestrator.max_off_policy_steps,
        advantage=advantage.type,
        temperature=orchestrator.sampling.temperature,
        pools=buffer.pools,
        curriculum=orchestrator.curriculum,
        needs_signal=buffer.online_difficulty_filtering,
        least_variance=buffer.difficulty_threshold if buffer.use_difficulty_filtering else 0.0,
        advantage_range=buffer.advantage_range,
        filters=orchestrator.filters,
        decay=DECAYS.get(advantage.type, 0.9) if advantage.decay is None else advantage.decay,
        advantage_path=advantage.path,
        advantage_args=advantage.args,
        clip=advantage.clip,
        reward_clip=advantage.reward_clip,
        length_penalty=penalty,
        teacher_weight=teacher.weight if teacher and not teacher.samples else None,
        reward_weight=teacher.reward_weight if teacher else 1.0,
        ce_weight=teacher.weight if teacher and teacher.samples else 0.0,
        echo=orchestrator.echo.roles if orchestrator.echo else {},
        episode_agents=advantage.episode_agents,
        keep_prefix_cache=config.inference.keep_prefix_cache,
    )
