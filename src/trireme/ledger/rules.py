"""What the configuration promises of a batch. Each entry of the journal has its own: a run may go on with others."""

from __future__ import annotations

import msgspec

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


def rules_of(config: RunConfig) -> Rules:
    orchestrator = config.orchestrator
    return Rules(
        seed=config.seed,
        shuffle=orchestrator.buffer.shuffle,
        weights={entry.name or entry.id: entry.weight for entry in orchestrator.env},
        batch_size=orchestrator.batch_size,
        group_size=orchestrator.rollouts_per_example,
        max_attempts=orchestrator.max_rollout_attempts,
        max_async_level=config.max_async_level,
        max_off_policy_steps=orchestrator.max_off_policy_steps,
        advantage=orchestrator.advantage.type,
        temperature=orchestrator.sampling.temperature,
    )
