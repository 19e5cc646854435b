"""What a run will need, before anything starts: memory by part, batch arithmetic, seconds of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from trireme.algo.packing import pack
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.tools.plan.lengths import NO_RATES, Lengths, Rates
from trireme.tools.plan.machine import Machine
from trireme.tools.plan.memory import GIB, Parts, Training, changed
from trireme.tools.plan.pace import (
    EnginePace,
    Split,
    TrainerPace,
    Work,
    possible_splits,
    split_of,
)
from trireme.tools.plan.serving import Serving
from trireme.tools.plan.sizes import Sized, serving_of, sft_training_of, training_of

CUDA_BYTES = 1.2 * GIB  # of a trainer's rank, beside all tensors: CUDA, its libraries' workspaces, NCCL
GPU_SCATTERED = 0.06  # of what comes and goes: held by the allocator in pieces that nothing fits into
PROCESS_BYTES = 0.17 * GIB  # of a trainer's rank on CPU, beside what it needs to start at all: buffers of products
STARTED_BYTES = 0.6 * GIB  # Python, torch, transformers
CPU_SCATTERED = 0.1  # measured (docs/benchmarks.md): malloc does not give everything back
ENGINE_STARTED_BYTES = 2.5 * GIB  # vLLM's processes
ORCHESTRATOR_BYTES = 0.5 * GIB

COMES_AND_GOES = ("activations", "logits", "gathered", "update", "transfers")
PACKED_SHARE = 0.97  # of a row that samples fill


@dataclass(frozen=True)
class Batch:
    """What a step trains on."""

    rollouts: int
    groups: int | None
    length: float  # tokens of a rollout, or a sample
    row_tokens: int
    rows: int  # of a rank
    teams: int  # ranks, or teams that share a row, which have rows of their own
    iterations: int
    steps: int
    examples: int | None
    source: str

    @property
    def tokens(self) -> float:
        return self.rollouts * self.length

    @property
    def epochs(self) -> float | None:
        """Passes over the examples, of the whole run."""
        return self.steps * (self.groups or self.rollouts) / self.examples if self.examples else None


@dataclass(frozen=True)
class Estimate:
    """All of it. What `advice` changes is `training` and `serving`; the rest follows."""

    sized: Sized
    machine: Machine
    training: Training
    ranks: int
    batch: Batch
    serving: Serving | None = None  # none in supervised runs
    engine_gpus: int = 0
    trainer_gpus: int = 0
    longest_sample: int = 0  # tokens
    is_shared: bool = False  # trainer and engine live on the same devices
    synchronous: bool = False
    work: Work | None = None
    rates: Rates = NO_RATES
    mfu: float | None = None

    # memory

    @property
    def scattered(self) -> float:
        """Of a trainer's rank: what its allocator cannot use."""
        share = CPU_SCATTERED if self.machine.is_on_cpu else GPU_SCATTERED
        return scattered_bytes(self.training.memory.parts, share)

    @property
    def beside(self) -> float:
        """What a process needs beside tensors."""
        return PROCESS_BYTES + STARTED_BYTES if self.machine.is_on_cpu else CUDA_BYTES

    @property
    def trainer_bytes(self) -> float:
        """Of one rank's device."""
        return self.training.memory.peak + self.scattered + self.beside

    @property
    def trainer_room(self) -> float:
        """That a rank may take."""
        if self.machine.is_on_cpu:
            others = ORCHESTRATOR_BYTES + self.engine_bytes if self.serving else 0.0
            return (self.machine.memory - others) / self.ranks - self._staged
        return self.machine.memory - (self.engine_bytes if self.is_shared else 0.0)

    @property
    def _staged(self) -> float:
        return sum(self.training.memory.host.values())

    @property
    def engine_bytes(self) -> float:
        """Of one GPU, or of the machine on CPU."""
        if self.serving is None:
            return 0.0
        return self.serving.peak + (ENGINE_STARTED_BYTES if self.machine.is_on_cpu else 0.0)

    @property
    def host_bytes(self) -> float:
        """Of one node's own memory, on GPUs."""
        trainers = min(self.machine.gpus_per_node, self.trainer_gpus)
        engines = min(self.machine.gpus_per_node, self.engine_gpus)
        started = trainers * 4 * STARTED_BYTES + engines * 2 * ENGINE_STARTED_BYTES + ORCHESTRATOR_BYTES
        return started + trainers * self._staged

    @property
    def trainer_fits(self) -> bool:
        return self.trainer_bytes <= self.trainer_room

    @property
    def engine_fits(self) -> bool:
        return self.serving is None or (self.serving.fits and self.engine_bytes <= self.machine.memory)

    @property
    def host_fits(self) -> bool:
        return self.machine.is_on_cpu or self.host_bytes <= self.machine.host_memory

    @property
    def fits(self) -> bool:
        return self.trainer_fits and self.engine_fits and self.host_fits

    # time

    @cached_property
    def trainer_pace(self) -> TrainerPace:
        training = self.training
        recomputed = 0.0
        if training.ac_freq and training.ac_mode == "full":
            recomputed = math.ceil(len(training.model.layers) / training.ac_freq) / len(training.model.layers)
        trained = training.trained if training.frozen else None
        mfu = self.mfu or (0.5 if self.machine.is_on_cpu else None)
        reference = training.has_reference
        value_bytes = training.row.value_bytes
        return TrainerPace(
            training.model, self.machine.chip, value_bytes, trained, recomputed, reference, mfu, self.rates.trainer
        )

    @cached_property
    def split(self) -> Split | None:
        """As it is configured."""
        return self._split(self.engine_gpus, self.trainer_gpus) if self.work and self.serving else None

    @cached_property
    def splits(self) -> list[Split]:
        """All others that as many GPUs allow."""
        if self.work is None or self.serving is None or self.is_shared or self.machine.is_on_cpu:
            return []
        copies = self.ranks // self.training.shards
        multiple = math.lcm(self.training.row.cp, copies)
        pairs = possible_splits(self.engine_gpus + self.trainer_gpus, tp=self.serving.tp, trainer_multiple=multiple)
        return [self._split(*pair, fits=self._fits_on(pair[1] // copies)) for pair in pairs]

    def _fits_on(self, shards: int) -> bool:
        other = replace(self, training=changed(self.training, shards=shards))
        return other.trainer_bytes <= self.trainer_room and self.engine_fits

    def _split(self, engine_gpus: int, trainer_gpus: int, *, fits: bool | None = None) -> Split:
        assert self.work is not None
        assert self.serving is not None
        return split_of(
            max(1, engine_gpus),
            max(1, trainer_gpus),
            self.work,
            self.trainer_pace,
            EnginePace(self.serving, self.machine.chip, self.rates.engine),
            synchronous=self.synchronous,
            is_shared=self.is_shared,
            fits=self.fits if fits is None else fits,
        )

    @property
    def training_s(self) -> float:
        """Of a supervised step."""
        work = Work(self.batch.rollouts, self.batch.length, 0, 0, self.batch.row_tokens)
        return work.tokens / (self.trainer_pace.rate(work) * max(1, self.trainer_gpus))

    def problems(self) -> Iterator[str]:
        """In words, where it does not fit."""
        if not self.trainer_fits:
            yield (
                f"the trainer needs {_gib(self.trainer_bytes)} on each of its {self.ranks} "
                f"{'ranks' if self.machine.is_on_cpu else 'GPUs'}, {_gib(self.trainer_room)} are there"
            )
        if self.serving is not None and not self.engine_fits:
            yield (
                f"the engine has {_gib(max(0.0, self.serving.room))} for its KV cache, one request of "
                f"{self.serving.max_model_len:,} tokens takes {_gib(self.serving.kv_bytes(self.serving.max_model_len))}"
            )
        if not self.host_fits:
            yield f"a node needs {_gib(self.host_bytes)} of its own memory, {_gib(self.machine.host_memory)} are there"


def scattered_bytes(parts: Parts, share: float) -> float:
    return share * sum(parts.get(name, 0.0) for name in COMES_AND_GOES)


def _gib(number: float) -> str:
    return f"{number / GIB:,.1f} GiB"


def estimate_run(
    config: RunConfig,
    sized: Sized,
    machine: Machine,
    lengths: Lengths,
    *,
    rates: Rates = NO_RATES,
    mfu: float | None = None,
) -> Estimate:
    """Of a resolved configuration."""
    ranks = config.trainer.num_ranks or 1
    batch = _batch(config, lengths, ranks)
    training = training_of(config, sized.architecture, rows=batch.rows)
    training = changed(training, packed=batch.row_tokens >= 2 * lengths.total or len(lengths.samples) > batch.rows)
    return Estimate(
        sized,
        machine,
        training,
        ranks,
        batch,
        serving=serving_of(config, sized.architecture, machine),
        engine_gpus=len(config.inference_gpu_ids or ()),
        trainer_gpus=len(config.trainer_gpu_ids or ()),
        longest_sample=config.seq_len,
        is_shared=set(config.trainer_gpu_ids or ()) == set(config.inference_gpu_ids or ()),
        synchronous=config.synchronous,
        work=Work(
            config.orchestrator.batch_size,
            lengths.prompt,
            lengths.sampled,
            lengths.longest,
            batch.row_tokens,
            config.trainer.num_iterations,
            config.orchestrator.oversampling_factor,
        ),
        rates=rates,
        mfu=mfu,
    )


def _batch(config: RunConfig, lengths: Lengths, ranks: int) -> Batch:
    trainer, rollouts = config.trainer, config.orchestrator.batch_size
    row_tokens, teams = trainer.micro_batch_tokens or config.seq_len, max(1, ranks // trainer.model.cp)
    samples = list(lengths.samples) or [math.ceil(lengths.total)] * rollouts
    return Batch(
        rollouts,
        config.num_groups,
        lengths.total,
        row_tokens,
        rows_of_rank(samples, row_tokens, teams),
        teams,
        trainer.num_iterations,
        config.max_steps,
        lengths.examples,
        lengths.source,
    )


def rows_of_rank(samples: list[int], row_tokens: int, teams: int) -> int:
    """Samples are packed as the trainer packs them; longer ones than a row were cut."""
    rows = pack([min(length, row_tokens) for length in samples], row_tokens)
    return max(1, math.ceil(len(rows) / teams))


def estimate_sft(
    config: SftConfig, sized: Sized, machine: Machine, *, length: float | None, examples: int | None, mfu: float | None
) -> Estimate:
    """Of a resolved configuration.

    Args:
        length: tokens of a conversation; the longest that is allowed where not given.
    """
    ranks, row_tokens = config.num_ranks or 1, config.micro_batch_tokens or config.seq_len
    teams, mean = max(1, ranks // config.model.cp), length or float(config.seq_len)
    rows = rows_of_rank([math.ceil(mean)] * config.batch_size, row_tokens, teams)
    source = "as said" if length else "the longest that the configuration allows"
    batch = Batch(config.batch_size, None, mean, row_tokens, rows, teams, 1, config.max_steps, examples, source)
    training = changed(sft_training_of(config, sized.architecture, rows=rows), packed=row_tokens >= 2 * mean)
    gpus = 0 if machine.is_on_cpu else ranks
    return Estimate(sized, machine, training, ranks, batch, trainer_gpus=gpus, longest_sample=config.seq_len, mfu=mfu)
