"""Profiles of training, if the run asks for them: torch's trace of a few steps, and the memory after each step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trireme.base.log import get_logger
from trireme.base.paths import step_folder
from trireme.config.trainer import Training
from trireme.trainer.parallel.mesh import World

log = get_logger("profiler")

TRACED = 3
"""Steps in a trace. One is left out before them, in which memory is allocated and kernels are compiled."""
MEMORY_EVENTS = 100_000  # the newest of them are in a snapshot


class Profiler:
    """The profiles of one rank, which writes files of its own."""

    def __init__(self, config: Training, world: World) -> None:
        self._world = world
        self._memory, self._trace_folder = config.memory_profiler_path, config.trace_path
        self._trace: profile | None = None
        if self._memory and world.device.type != "cuda":
            log.warning("memory_profiler_path = %s has no effect here: torch records the memory of GPUs", self._memory)
            self._memory = None
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)

        if self._trace_folder:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if world.device.type == "cuda" else []
            steps = schedule(wait=0, warmup=1, active=TRACED, repeat=1)
            self._trace = profile(
                activities=activities, schedule=steps, on_trace_ready=self._write_trace, record_shapes=True
            )
            self._trace.start()

    def step_done(self, version: int) -> None:
        """Note that a step made this version."""
        if self._trace:
            self._trace.step()
        if self._memory:
            file = step_folder(self._memory, version) / f"rank_{self._world.rank}.pickle"
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(file))
            log.info("memory snapshot %s (https://pytorch.org/memory_viz shows it)", file)

    def close(self) -> None:
        """Write the trace of a run that ended before its last traced step."""
        if self._trace:
            self._trace.stop()
        if self._memory:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write_trace(self, trace: profile) -> None:
        assert self._trace_folder is not None
        self._trace_folder.mkdir(parents=True, exist_ok=True)
        file = self._trace_folder / f"trace_{self._world.rank}.json.gz"
        # The name ends as the trace's, or torch would not compress it.
        partial = file.with_name(f".{os.getpid()}.{file.name}")
        trace.export_chrome_trace(str(partial))
        partial.rename(file)
        log.info("trace %s (https://ui.perfetto.dev shows it)", file)


@contextmanager
def open_profiler(config: Training, world: World) -> Iterator[Profiler]:
    """Open the profiles of a rank, and close them after the last step, or when the process ends by an error."""
    profiler = Profiler(config, world)
    try:
        yield profiler
    finally:
        profiler.close()
