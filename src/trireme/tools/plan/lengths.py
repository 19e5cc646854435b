"""Lengths of rollouts: given by flags, measured in an earlier run, or as large as the configuration allows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.config.files import find_run_file
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal

BATCHES = 5  # of a run that are read: its newest


@dataclass(frozen=True)
class Lengths:
    """Tokens of a rollout, on average."""

    prompt: float
    sampled: float
    longest: float  # sampled
    source: str  # in words
    samples: tuple[int, ...] = ()  # lengths of a batch's samples, where they were measured

    @property
    def total(self) -> float:
        return self.prompt + self.sampled


def lengths_of(
    config: RunConfig, *, prompt: float | None = None, sampled: float | None = None, run: Path | None = None
) -> Lengths:
    """Return given lengths before those measured in a run, and these before the longest that are allowed."""
    if run:
        found = _measured(run)
    else:  # what is not sampled is prompt
        context = min(config.seq_len, config.inference.model.max_model_len or config.seq_len)
        most = min(config.orchestrator.sampling.max_tokens or context * 3 // 4, context)
        found = Lengths(context - most, most, most, "the longest that the configuration allows")
    if prompt is None and sampled is None:
        return found
    prompt = found.prompt if prompt is None else prompt
    sampled = found.sampled if sampled is None else sampled
    return Lengths(prompt, sampled, max(sampled, config.orchestrator.sampling.max_tokens or sampled), "as given")


def _measured(run: Path) -> Lengths:
    """Read the newest batches of a run.

    Raises: ConfigError if the folder is not a run's, or has no batch yet.
    """
    find_run_file(run, "trainer")
    journal = Journal(RunPaths(run).journal)
    batches = [journal.read(step) for step in journal.steps()[-BATCHES:]]
    if not any(batch.rollouts for batch in batches):
        raise ConfigError(
            f"{run} has no batch in its journal yet - expected one at least. Give a run that has trained."
        )
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    sampled = [sum(int(tokens.loss_mask.sum()) for tokens in rollout.samples) for rollout in rollouts]
    total = [sum(tokens.length for tokens in rollout.samples) for rollout in rollouts]
    mean = sum(sampled) / len(sampled)
    return Lengths(
        prompt=sum(total) / len(total) - mean,
        sampled=mean,
        longest=float(max(sampled)),
        source=f"measured in the newest {len(batches)} batches of {run}",
        samples=tuple(tokens.length for rollout in batches[-1].rollouts for tokens in rollout.samples),
    )
