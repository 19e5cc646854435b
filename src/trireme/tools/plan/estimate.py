"""Estimate what a run will need: memory by part, batch arithmetic, seconds of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trireme.algo.model.architecture import Architecture
from trireme.algo.model.chips import CUDA_BYTES, GIB
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.files import ProcessName
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.tools.plan.engine_memory import Parts, Serving, serving_of
from trireme.tools.plan.machine import Machine, describe_machine
from trireme.tools.plan.sizes import find_config, read_sizes
from trireme.tools.plan.step_time import (
    Batch,
    Lengths,
    Split,
    assumed_mfu,
    lengths_of,
    sampling_seconds,
    training_rate,
    update_seconds,
)
from trireme.tools.plan.trainer_memory import Training, training_of

GPU_SCATTERED = 0.06  # share of what comes and goes that the allocator holds in pieces too small to use
PROCESS_BYTES = 0.17 * GIB  # buffers of matrix products in a rank on CPU, besides `STARTED_BYTES`
STARTED_BYTES = 0.6 * GIB  # Python, torch, transformers
CPU_SCATTERED = 0.1  # measured (docs/benchmarks.md): malloc does not give everything back
CPU_MFU = 0.5
ENGINE_STARTED_BYTES = 2.5 * GIB  # vLLM's processes
ORCHESTRATOR_BYTES = 0.5 * GIB

COMES_AND_GOES = ("activations", "logits", "gathered", "update", "transfers")


@dataclass(frozen=True)
class Need:
    """Memory that is needed in one place, by part, and what is there, in bytes."""

    parts: Parts
    room: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.room

    def text(self, where: str = "") -> str:
        return f"{_gib(self.total)}{where}, {_gib(max(0.0, self.room))} are there"


@dataclass(frozen=True)
class Estimate:
    """The plan of a configuration on a machine. Advice changes the configuration; the rest follows."""

    config: RunConfig | SftConfig
    model_name: str
    machine: Machine
    training: Training
    ranks: int
    batch: Batch
    serving: Serving | None  # none in supervised runs
    engine_gpus: int
    trainer_gpus: int
    is_shared: bool  # trainer and engine live on the same devices
    synchronous: bool

    @cached_property
    def trainer(self) -> Need:
        """The memory that one rank needs of its device."""
        on_cpu, parts = self.machine.is_on_cpu, self.training.parts
        process = PROCESS_BYTES + STARTED_BYTES if on_cpu else CUDA_BYTES
        held = {"allocator": scattered_bytes(parts, CPU_SCATTERED if on_cpu else GPU_SCATTERED), "process": process}

        # On CPU ranks, engine, orchestrator and staged checkpoints share one memory.
        room = self.machine.chip.memory
        if self.engine and on_cpu:
            room -= self.engine.total + ORCHESTRATOR_BYTES
        elif self.engine and self.is_shared:
            room -= self.engine.total
        if on_cpu:
            room = room / self.ranks - sum(self.training.host.values())

        return Need(parts | held, room)

    @cached_property
    def engine(self) -> Need | None:
        """The memory that an engine needs of one GPU, or of the machine on CPU."""
        if self.serving is None:
            return None
        parts = self.serving.parts | {"KV cache": max(0.0, self.serving.room)}
        process = {"process": ENGINE_STARTED_BYTES} if self.serving.is_on_cpu else {}
        return Need(parts | process, self.machine.chip.memory)

    @cached_property
    def host(self) -> Need:
        """The memory that processes on GPUs need of one node itself."""
        trainers = min(self.machine.gpus_per_node, self.trainer_gpus // machines_of(self.config, "trainer"))
        engines = min(self.machine.gpus_per_node, self.engine_gpus // machines_of(self.config, "inference"))
        parts = {
            "trainer": trainers * (4 * STARTED_BYTES + sum(self.training.host.values())),
            "engine": engines * 2 * ENGINE_STARTED_BYTES,
            "orchestrator": ORCHESTRATOR_BYTES,
        }
        return Need(parts, self.machine.host_memory)

    def with_values(self, values: dict[str, Any]) -> Estimate:
        """Return the plan of the same work with other values at dotted keys of the configuration."""
        config = updated(self.config, values)
        return estimate_run(config, self.training.model, self.machine, self.batch.lengths)

    @property
    def engine_fits(self) -> bool:
        """Return whether it fits, with room for one request."""
        return self.serving is None or self.engine is None or (self.serving.fits and self.engine.fits)

    @property
    def fits(self) -> bool:
        return self.trainer.fits and self.engine_fits and self.host.fits

    def problems(self) -> Iterator[str]:
        """Yield the reasons why it does not fit."""
        if not self.trainer.fits:
            devices = "ranks" if self.machine.is_on_cpu else "GPUs"
            yield f"the trainer needs {self.trainer.text(f' on each of its {self.ranks} {devices}')}"
        if self.serving is not None and not self.serving.fits:
            yield (
                f"the engine has {_gib(max(0.0, self.serving.room))} for its KV cache, one request of "
                f"{self.serving.max_model_len:,} tokens takes {_gib(self.serving.kv_bytes(self.serving.max_model_len))}"
            )
        elif self.engine is not None and not self.engine.fits:
            yield f"the engine needs {self.engine.text()}"
        if not self.host.fits:
            yield f"a node needs {self.host.text(' of its own memory')}"

    # time

    @property
    def trainer_mfu(self) -> float:
        """Return the share of its peak that the trainer reaches."""
        return CPU_MFU if self.machine.is_on_cpu else assumed_mfu(self.training, self.batch)

    def training_seconds(self, gpus: int) -> float:
        rate = training_rate(self.training, self.machine.chip, self.batch, self.trainer_mfu)
        return self.batch.tokens / (rate * max(1, gpus))

    def split(self, engine_gpus: int, trainer_gpus: int) -> Split:
        """Return a step on so many GPUs: one after the other in a synchronous run, else both at once, and the slower
        one decides. On GPUs (or cores) that both share, each takes what the other leaves."""
        assert self.serving is not None
        engines = max(1, engine_gpus // self.serving.tp)
        sampling = sampling_seconds(self.serving, self.machine.chip, self.batch, engines=engines)
        training, update = self.training_seconds(trainer_gpus), update_seconds(self.serving)
        apart = self.synchronous or self.is_shared
        step = (training + sampling if apart else max(training, sampling)) + update
        return Split(engine_gpus, trainer_gpus, sampling, training, update, step)

    @cached_property
    def configured_split(self) -> Split | None:
        return self.split(self.engine_gpus, self.trainer_gpus) if self.serving else None

    @property
    def best_split(self) -> Split | None:
        """Return the shortest step with as many GPUs, in whole engines and whole teams of ranks, that fits."""
        if self.serving is None or self.is_shared or self.machine.is_on_cpu or not self.engine_fits:
            return None
        if isinstance(self.config, RunConfig) and not self.config.hosts.are_one_machine:
            return None  # no GPU of a machine of one side can go to the other

        # Ranks come in whole copies of the model, and in whole teams that share a row (`cp`).
        copies, total = self.ranks // self.training.shards, self.engine_gpus + self.trainer_gpus
        multiple, found = math.lcm(self.training.row.cp, copies), []
        for trainer_gpus in range(multiple, total, multiple):
            # With fewer ranks each holds more of the model, which must still fit.
            other = replace(self, training=replace(self.training, shards=trainer_gpus // copies))
            if (total - trainer_gpus) % self.serving.tp == 0 and other.trainer.total <= self.trainer.room:
                found.append(self.split(total - trainer_gpus, trainer_gpus))
        return min(found, key=lambda split: split.step_s, default=None)


def machines_of(config: RunConfig | SftConfig, side: ProcessName) -> int:
    """Return how many machines a side has, each with as many GPUs."""
    return len(config.hosts.by_process[side]) if isinstance(config, RunConfig) else 1


def scattered_bytes(parts: Parts, share: float) -> float:
    return share * sum(parts.get(name, 0.0) for name in COMES_AND_GOES)


def _gib(number: float) -> str:
    return f"{number / GIB:,.1f} GiB"


def estimate_run(config: RunConfig | SftConfig, model: Architecture, machine: Machine, lengths: Lengths) -> Estimate:
    """Plan a resolved configuration. A supervised run has no engines, and its conversations are all prompt."""
    run, trainer = (config, config.trainer) if isinstance(config, RunConfig) else (None, config)
    rollouts = config.orchestrator.num_rollouts(lengths.total) if isinstance(config, RunConfig) else config.batch_size

    # Whole samples are packed into rows, and rows are dealt out to teams of ranks that share them (`cp`).
    ranks, row_tokens = trainer.num_ranks or 1, trainer.micro_batch_tokens or config.seq_len
    teams = max(1, ranks // trainer.model.cp)
    length = min(math.ceil(lengths.total), row_tokens)  # samples longer than a row were cut
    rows = max(1, math.ceil(rollouts / (row_tokens // length) / teams))

    # A supervised run does not name its GPUs: each rank takes one. On CPU there are none. Of several machines in
    # `[hosts]` a run names the GPUs of one.
    engine_ids = (run.inference_gpu_ids or ()) if run else ()
    trainer_ids = (run.trainer_gpu_ids or ()) if run else tuple(range(0 if machine.is_on_cpu else ranks))

    return Estimate(
        config,
        trainer.model.name or str(config.model.name),
        machine,
        training_of(config, model, rows=rows, packed=row_tokens >= 2 * lengths.total),
        ranks,
        Batch(
            rollouts=rollouts,
            groups=run.num_groups if run else None,
            lengths=lengths,
            row_tokens=row_tokens,
            rows=rows,
            teams=teams,
            iterations=run.trainer.num_iterations if run else 1,
            oversampling=run.orchestrator.oversampling_factor if run else 1.0,
        ),
        serving=serving_of(run, model, machine) if run else None,
        engine_gpus=len(engine_ids) * machines_of(config, "inference"),
        trainer_gpus=len(trainer_ids) * machines_of(config, "trainer"),
        is_shared=set(trainer_ids) == set(engine_ids) and (run is None or run.hosts.are_one_machine),
        synchronous=bool(run and run.synchronous),
    )


def estimate_here(config: RunConfig, devices: Devices) -> Estimate | None:
    """Plan a resolved configuration for this machine. Return None if the model's config.json is not on its disk, or the
    memory of its GPUs is not known."""
    try:
        return plan_here(config, devices)
    except ConfigError:
        return None


def plan_here(config: RunConfig, devices: Devices, *, fetch: bool = False) -> Estimate:
    """Plan a resolved configuration for this machine.

    Args:
        fetch: whether to fetch the model's config.json from the hub if it is not on this disk.

    Raises: ConfigError if there is none, or the memory of the GPUs is not known.
    """
    machine = describe_machine(devices if config.device == "cuda" else Devices(cores=devices.cores))
    name = config.trainer.model.name or config.model.name
    model = read_sizes(name, find_config(name, fetch=fetch), vlm=config.trainer.model.vlm)
    return estimate_run(config, model, machine, lengths_of(config))
