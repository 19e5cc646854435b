"""Lengths of rollouts and the number of examples: given by flags, measured in an earlier run, or as large as the
configuration allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.config.files import find_run_file, read_run
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.monitor.metrics import latest_by_step, read_metrics

BATCHES = 5  # of a run that are read: its newest
SETTLED_STEPS = 2  # at its start that are slower than the others


@dataclass(frozen=True)
class Lengths:
    """Tokens of a rollout, on average."""

    prompt: float
    sampled: float
    longest: float  # sampled
    source: str  # in words
    samples: tuple[int, ...] = ()  # lengths of a batch's samples, where they were measured
    examples: int | None = None  # to train on, in all environments

    @property
    def total(self) -> float:
        return self.prompt + self.sampled


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one GPU (or of the CPU), as an earlier run had them."""

    trainer: float | None = None
    engine: float | None = None


def lengths_of(
    config: RunConfig,
    *,
    prompt: float | None = None,
    sampled: float | None = None,
    examples: int | None = None,
    run: Path | None = None,
) -> Lengths:
    """Return given lengths before those measured in a run, and these before the longest that are allowed."""
    if run:
        found = _measured(run)
    else:  # what is not sampled is prompt
        context = min(config.seq_len, config.inference.model.max_model_len or config.seq_len)
        most = min(config.orchestrator.sampling.max_tokens or context * 3 // 4, context)
        found = Lengths(context - most, most, most, "the longest that the configuration allows")
    found = replace(found, examples=examples or found.examples)
    if prompt is None and sampled is None:
        return found
    prompt = found.prompt if prompt is None else prompt
    sampled = found.sampled if sampled is None else sampled
    longest = max(sampled, config.orchestrator.sampling.max_tokens or sampled)
    return Lengths(prompt, sampled, longest, "as given", examples=found.examples)


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
        examples=sum(batches[-1].state.sizes.values()) or None,
    )


def rates_of(run: Path) -> Rates:
    """Return the rates that a run's metrics have, its first steps left out."""
    config = read_run(RunConfig, find_run_file(run, "trainer"))
    rows = latest_by_step(read_metrics(RunPaths(run).metrics)[0]).values()

    def mean(process: str, name: str) -> float | None:
        settled = [row for row in rows if row["process"] == process and row["step"] >= SETTLED_STEPS]
        found = [row[name] for row in settled if row.get(name) is not None]
        return sum(found) / len(found) if found else None

    trainer, sampled = mean("trainer", "perf/tokens_per_s"), mean("orchestrator", "tokens/completion_mean")
    # a batch takes as long as the trainer does where that is the slower one: then the engines wait
    generates = max(0.01, 1 - (mean("orchestrator", "perf/engine_idle_frac") or 0.0))
    fill_s = generates * (mean("orchestrator", "time/fill_batch") or 0.0)
    engine = sampled * config.orchestrator.batch_size / fill_s if sampled and fill_s else None
    return Rates(
        trainer=trainer / max(1, len(config.trainer_gpu_ids or ())) if trainer else None,
        engine=engine / max(1, len(config.inference_gpu_ids or ())) if engine else None,
    )
