"""Tries on GPUs what CPU tests cannot show, and times it, in one command and less than nine minutes.

    uv run python -m benchmarks.gpu.run [--device cpu] [--only NAME ...] [--json FILE]

Kernels come first, engines last. Each section runs in a process of its own with a deadline, so that one that hangs
costs no other. A section that lacks something, or for which no time is left, is skipped by name. A section fails if any
part of it fails, and the exit code is 1 if any section does. The table at the end is for an issue; the folder that is
printed holds all logs. `--device cpu` runs what a CPU can run, at toy sizes: it checks this program, and times nothing
of interest.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import torch

from benchmarks import ROOT
from benchmarks.gpu import engines, trainer, weights
from benchmarks.gpu.driver import Sections, exit_code, table
from benchmarks.gpu.section import FOLDER, Section
from benchmarks.measuring import command

BUDGET_S = 520.0
LARGE = ("checkpoints", "weights", "model")  # folders that are removed at the end

SECTIONS = (
    Section(trainer.device, cuda_s=4, cpu_s=1),
    Section(trainer.digest, cuda_s=5, cpu_s=1),
    Section(trainer.step_against_cpu, cuda_s=6, cpu_s=3),
    Section(trainer.attention, cuda_s=25, cpu_s=6),
    Section(trainer.experts, cuda_s=10, cpu_s=2),
    Section(trainer.recomputation, cuda_s=6, cpu_s=4),
    Section(trainer.compiled_blocks, cuda_s=25, cpu_s=40),
    Section(trainer.optimizers, cuda_s=20, cpu_s=2),
    Section(trainer.head_in_chunks, cuda_s=15, cpu_s=2),
    Section(trainer.tried_step, cuda_s=8, cpu_s=2),
    Section(trainer.mfu, cuda_s=60, cpu_s=3, deadline_s=140),
    Section(weights.delta, cuda_s=5, cpu_s=1),
    Section(weights.memory_handles, cuda_s=10, cpu_s=None),
    Section(weights.broadcast, cuda_s=8, cpu_s=4, gpus=2),
    Section(weights.killed_peer, cuda_s=20, cpu_s=6, gpus=2),
    Section(engines.engine, cuda_s=45, cpu_s=30, deadline_s=140, stays=True),
    Section(engines.generation, cuda_s=12, cpu_s=2, engine=True),
    Section(engines.training_run, cuda_s=50, cpu_s=30, deadline_s=140, engine=True),
    Section(engines.checkpoints, cuda_s=15, cpu_s=15, engine=True),
    Section(engines.synchronous, cuda_s=45, cpu_s=50, deadline_s=140),
    Section(engines.data_parallel_2, cuda_s=35, cpu_s=50, deadline_s=140, gpus=2),
    Section(engines.tensor_parallel_2, cuda_s=35, cpu_s=50, deadline_s=140, gpus=2),
    Section(engines.pictures, cuda_s=30, cpu_s=40, deadline_s=140),
    Section(engines.engine_in_8_bits, cuda_s=35, cpu_s=40, deadline_s=140),
    Section(engines.memory_pressure, cuda_s=60, cpu_s=None, deadline_s=140),
)
"""All sections, in their order. Seconds on a GPU are estimates. With two GPUs they exceed the budget, so that the last
section, which is about a single GPU, is skipped there."""

NAMES = tuple(section.name for section in SECTIONS)


def main(
    device: Literal["cuda", "cpu"] = "cuda",
    only: Annotated[tuple[str, ...], NAMES] = NAMES,
    json_: Annotated[Path | None, "write all results here as well"] = None,
) -> int:
    if device == "cpu":
        torch.set_num_threads(1)  # sizes are tiny, and threads would wait for one another
    folder = ROOT / "outputs" / "gpu-benchmark" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    os.environ[FOLDER] = str(folder)
    chosen = [section for section in SECTIONS if section.name in only]
    is_engine_needed = any(section.engine for section in chosen)
    sections = Sections(device, folder, BUDGET_S)
    try:
        for section in SECTIONS:
            if section in chosen or (section.stays and is_engine_needed):
                result = sections.run(section)
                print(f"{section.name}: {json.dumps(asdict(result))}", flush=True)
                if json_:
                    json_.write_text(json.dumps({n: asdict(r) for n, r in sections.results.items()}, indent=1))
    finally:
        sections.close()
        for path in [path for name in LARGE for path in folder.rglob(name)]:
            shutil.rmtree(path, ignore_errors=True)
    print(table(device, sections.results), f"logs: {folder}", sep="\n\n")
    return exit_code(sections.results)


if __name__ == "__main__":
    command(main)
