"""What the configuration promises of a batch. Each entry of the journal has its own: a run may go on with others.

What has a default here is not in journals that were written before there was a choice.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trireme.algo.curriculum import Stage
from trireme.algo.difficulty import Pools
from trireme.algo.filters import FilterRules
from trireme.algo.length_penalty import LengthPenalty
from trireme.config import orchestrator as settings
from trireme.config.run import RunConfig


class Rules(msgspec.Struct, frozen=True):
    """As far as an audit needs it."""

    seed: int
    shuffle: bool
    weights: dict[str, float]  # per environment
    batch_size: int  # rollouts
    group_size: int  # rollouts
    max_attempts: int
    max_async_level: int
    max_off_policy_steps: int
    advantage: str
    temperature: float
    # which example comes next
    pools: Pools | None = None
    curriculum: tuple[Stage, ...] = ()
    # which groups are worth a place
    needs_signal: bool = False  # rewards that are not all the same
    least_variance: float = 0.0  # of the rewards
    filters: FilterRules | None = None  # None where neither flaws nor outcomes were written down yet
    # what they are trained towards
    decay: float = 0.9  # of the running mean of `ema`
    advantage_path: str | None = None  # of `custom`
    advantage_args: dict[str, Any] = {}
    clip: float | None = None
    reward_clip: tuple[float, float] | None = None
    length_penalty: LengthPenalty | None = None
    teacher_weight: float | None = None  # None where there is no teacher
    reward_weight: float = 1.0  # of what comes from rewards, beside a teacher


def rules_of(config: RunConfig) -> Rules:
    orchestrator = config.orchestrator
    buffer, advantage, teacher = orchestrator.buffer, orchestrator.advantage, orchestrator.teacher
    return Rules(
        seed=config.seed,
        shuffle=buffer.shuffle,
        weights={entry.name or entry.id: entry.weight for entry in orchestrator.env},
        batch_size=orchestrator.batch_size,
        group_size=orchestrator.rollouts_per_example,
        max_attempts=orchestrator.max_rollout_attempts,
        max_async_level=config.max_async_level,
        max_off_policy_steps=orchestrator.max_off_policy_steps,
        advantage=advantage.type,
        temperature=orchestrator.sampling.temperature,
        pools=Pools(**buffer.pools.model_dump()) if buffer.pools else None,
        curriculum=tuple(Stage(**stage.model_dump()) for stage in orchestrator.curriculum),
        needs_signal=buffer.online_difficulty_filtering,
        least_variance=buffer.difficulty_threshold if buffer.use_difficulty_filtering else 0.0,
        filters=FilterRules(**orchestrator.filters.model_dump()),
        decay=advantage.decay,
        advantage_path=advantage.path,
        advantage_args=advantage.args,
        clip=advantage.clip,
        reward_clip=advantage.reward_clip,
        length_penalty=_length_penalty(orchestrator.length_penalty, config),
        teacher_weight=teacher.weight if teacher else None,
        reward_weight=teacher.reward_weight if teacher else 1.0,
    )


def _length_penalty(section: settings.LengthPenalty | None, config: RunConfig) -> LengthPenalty | None:
    if section is None:
        return None
    longest = section.max_length or config.orchestrator.sampling.max_tokens or config.seq_len
    return LengthPenalty(
        type=section.type,
        max_length=longest,
        buffer=section.buffer or max(1, longest // 5),
        weight=section.weight,
    )
