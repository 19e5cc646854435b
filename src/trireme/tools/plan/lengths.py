"""How long rollouts are, and how many examples there are: said by flags, read off an earlier run, or taken as large as
the configuration allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.config.files import find_run_file, read_run
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.records import BatchRecord
from trireme.monitor.metrics import Row, latest_by_step, read_metrics

BATCHES = 5  # of a run that are looked at: its newest
SETTLED_STEPS = 2  # at its start that are slower than the others


@dataclass(frozen=True)
class Lengths:
    """Of a rollout, in tokens."""

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
    peak_memory_gib: float | None = None  # of the trainer's first rank


NO_RATES = Rates()


def lengths_of(
    config: RunConfig, *, prompt: float | None, sampled: float | None, examples: int | None, run: Path | None
) -> Lengths:
    """What is said goes before what was measured, and that before what is allowed."""
    found = _measured(run) if run else _allowed(config)
    if prompt is None and sampled is None:
        return _with_examples(found, examples)
    prompt = found.prompt if prompt is None else prompt
    sampled = found.sampled if sampled is None else sampled
    longest = config.orchestrator.sampling.max_tokens or sampled
    said = Lengths(prompt, sampled, max(sampled, longest), "as said", examples=found.examples)
    return _with_examples(said, examples)


def _with_examples(lengths: Lengths, examples: int | None) -> Lengths:
    fields = {**lengths.__dict__, "examples": examples or lengths.examples}
    return Lengths(**fields)


def _allowed(config: RunConfig) -> Lengths:
    """Every rollout as long as can be, and what is not sampled of it, prompt."""
    context = min(config.seq_len, config.inference.model.max_model_len or config.seq_len)
    sampled = min(config.orchestrator.sampling.max_tokens or context * 3 // 4, context)
    return Lengths(context - sampled, sampled, sampled, "the longest that the configuration allows")


def _measured(run: Path) -> Lengths:
    """
    Raises: ConfigError where the folder is not a run's, or has no batch yet.
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
        samples=_samples_of(batches[-1]),
        examples=sum(batches[-1].state.sizes.values()) or None,
    )


def _samples_of(batch: BatchRecord) -> tuple[int, ...]:
    return tuple(tokens.length for rollout in batch.rollouts for tokens in rollout.samples)


def rates_of(run: Path) -> Rates:
    """As its metrics have them, the first steps left out."""
    config = read_run(RunConfig, find_run_file(run, "trainer"))
    rows = latest_by_step(read_metrics(RunPaths(run).metrics)[0]).values()
    trainer = [row for row in rows if row["process"] == "trainer"]
    orchestrator = [row for row in rows if row["process"] == "orchestrator"]
    sampled = _mean(orchestrator, "tokens/completion_mean") or 0.0
    seconds, rollouts = _mean(orchestrator, "time/fill_batch"), config.orchestrator.batch_size
    return Rates(
        trainer=_per_device(_mean(trainer, "perf/tokens_per_s"), len(config.trainer_gpu_ids or ())),
        engine=_per_device(sampled * rollouts / seconds if seconds else None, len(config.inference_gpu_ids or ())),
        peak_memory_gib=max(
            (row["perf/peak_memory_gib"] for row in trainer if "perf/peak_memory_gib" in row), default=None
        ),
    )


def _per_device(rate: float | None, gpus: int) -> float | None:
    return rate / max(1, gpus) if rate else None


def _mean(rows: Iterable[Row], name: str) -> float | None:
    found = [row[name] for row in rows if row["step"] >= SETTLED_STEPS and row.get(name) is not None]
    return sum(found) / len(found) if found else None
