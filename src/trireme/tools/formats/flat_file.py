"""The keys of the flat files of `prime-rl` and of hosted training, which differ in how they name the model and GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from trireme.config.orchestrator import Sampling
from trireme.config.run import Wandb
from trireme.config.section import Section


class ElsewhereEnv(Section):
    """`[env]` or `[[env]]`: one environment."""

    id: str
    """Its name."""
    name: str | None = None
    """Name in metrics."""
    args: dict[str, Any] = {}
    """Keyword arguments of its `load_environment`."""
    weight: PositiveFloat = 1.0
    """Share of the examples, relative to the other environments'."""


class Saving(Section):
    """`[checkpointing]`: what is kept on disk."""

    save_every_n_steps: PositiveInt | None = None
    """Save every this many steps."""
    keep_n_checkpoints: PositiveInt | None = None
    """Keep this many of the newest; all where not given."""


class Common(Section):
    """What both formats have."""

    name: str | None = None
    """Name of the run; the first environment's where not given."""
    output_dir: str | None = None
    """Where runs are written."""
    seed: int | None = None
    """Seed of everything random."""
    max_steps: PositiveInt | None = None
    """Training steps."""
    batch_size: PositiveInt | None = None
    """Rollouts per step."""
    rollouts_per_example: PositiveInt | None = None
    """Rollouts per example: the group."""
    seq_len: PositiveInt | None = None
    """Longest sample, in tokens."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate."""
    use_lora: bool = False
    """Train low-rank adapters instead of the whole model."""
    lora_rank: PositiveInt | None = None
    """Rank of the adapters."""
    lora_alpha: PositiveFloat | None = None
    """Scale of the adapters: they are multiplied by alpha / rank."""
    use_difficulty_filtering: bool = False
    """Leave out groups whose rewards hardly differ."""
    difficulty_threshold: NonNegativeFloat | None = None
    """Least variance of the rewards within a group."""
    max_async_level: NonNegativeInt | None = None
    """Steps that generation may run ahead of training."""
    sampling: Sampling = Sampling()
    env: tuple[ElsewhereEnv, ...]
    checkpointing: Saving | None = None
    wandb: Wandb | None = None
    env_file: tuple[Path, ...] = ()
    """Files of environment variables for the run: API keys."""


class Flat(Common):
    """A flat file of `prime-rl`."""

    model_name: str
    """The model that the run starts from."""
    num_gpus: PositiveInt | None = None
    """GPUs for engines and trainer together; all where not given."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that share one engine."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages that an engine is cut into."""


class Hosted(Common):
    """A file of hosted training."""

    model: str
    """The model that the run starts from."""
