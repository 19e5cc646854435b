"""Tries on GPUs what CPU tests cannot show, and times it, in one command and less than nine minutes.

    uv run python benchmarks/gpu/run.py [--device cpu] [--only NAME ...] [--json FILE]

Kernels come first, engines last. Each section runs in a process of its own with a deadline, so that one that hangs
costs no other. A section that lacks something, or for which no time is left, is skipped by name. A section fails if any
part of it fails, and the exit code is 1 if any section does. The table at the end is for an issue; the folder that is
printed holds all logs. `--device cpu` runs what a CPU can run, at toy sizes: it checks this program, and times nothing
of interest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import engines, trainer, weights
from gpu.section import FOLDER, FORK, ROOT, Figures, Result, Section, read_parts, verdict_of

from trireme.base.devices import detect_devices
from trireme.base.processes import last_lines

BUDGET_S = 520.0
LARGE = ("checkpoints", "weights", "model")  # folders that are removed at the end
LEAVE_S = 25.0  # between SIGTERM and SIGKILL
POLL_S = 0.2

SECTIONS = (
    Section(trainer.device, cuda_s=8, cpu_s=6),
    Section(trainer.digest, cuda_s=8, cpu_s=6),
    Section(trainer.step_against_cpu, cuda_s=15, cpu_s=10),
    Section(trainer.attention, cuda_s=35, cpu_s=10),
    Section(trainer.experts, cuda_s=20, cpu_s=10),
    Section(trainer.recomputation, cuda_s=15, cpu_s=8),
    Section(trainer.compiled_blocks, cuda_s=40, cpu_s=50),
    Section(trainer.optimizers, cuda_s=30, cpu_s=8),
    Section(trainer.head_in_chunks, cuda_s=45, cpu_s=30),
    Section(trainer.tried_step, cuda_s=12, cpu_s=8),
    Section(trainer.mfu, cuda_s=75, cpu_s=10, deadline_s=150),
    Section(weights.delta, cuda_s=8, cpu_s=6),
    Section(weights.memory_handles, cuda_s=15, cpu_s=None),
    Section(weights.broadcast, cuda_s=25, cpu_s=10, gpus=2),
    Section(weights.killed_peer, cuda_s=30, cpu_s=15, gpus=2),
    Section(engines.engine, cuda_s=70, cpu_s=25, deadline_s=180, stays=True),
    Section(engines.generation, cuda_s=20, cpu_s=10, engine=True),
    Section(engines.training_run, cuda_s=90, cpu_s=30, deadline_s=180, engine=True),
    Section(engines.checkpoints, cuda_s=25, cpu_s=20, engine=True),
    Section(engines.synchronous, cuda_s=70, cpu_s=35, deadline_s=150),
    Section(engines.data_parallel_2, cuda_s=60, cpu_s=40, deadline_s=150, gpus=2),
    Section(engines.tensor_parallel_2, cuda_s=60, cpu_s=40, deadline_s=150, gpus=2),
    Section(engines.memory_pressure, cuda_s=80, cpu_s=None, deadline_s=150),
    Section(engines.pictures, cuda_s=50, cpu_s=35, deadline_s=150),
    Section(engines.engine_in_8_bits, cuda_s=60, cpu_s=35, deadline_s=150),
)
"""All sections, in the order in which they run."""


class Sections:
    """Runs sections in turn, in processes of their own, and keeps the engine that some of them share."""

    def __init__(self, device: str, folder: Path, budget_s: float) -> None:
        self.results: dict[str, Result] = {}
        self._device = device
        self._num_gpus = detect_devices().num_gpus
        self._folder = folder
        self._ends_at = time.monotonic() + budget_s
        self._engine: ForkProcess | None = None

    def run(self, section: Section) -> Result:
        began = time.monotonic()
        result = self._lacking(section) or self._started(section)
        result.seconds = round(time.monotonic() - began, 1)
        self.results[section.name] = result
        return result

    def _lacking(self, section: Section) -> Result | None:
        """Return why a section is skipped, or None."""
        if self._device == "cpu" and section.cpu_s is None:
            return Result("skipped", "needs a GPU")
        if self._device == "cuda" and self._num_gpus < section.gpus:
            return Result("skipped", f"needs {section.gpus} GPUs, and {self._num_gpus} are visible")
        left_s, usual_s = self._ends_at - time.monotonic(), section.usual_s(self._device)
        if left_s < usual_s:
            return Result("skipped", f"needs about {usual_s:.0f} s, and {max(0.0, left_s):.0f} s are left")
        if section.engine and not (self._engine and self._engine.is_alive()):
            return Result("skipped", "needs the section `engine`, which did not start or was ended")
        return None

    def _started(self, section: Section) -> Result:
        if not section.engine:
            self.close()  # its memory is for others now
        limit_s = min(section.deadline_s, self._ends_at - time.monotonic())
        log = self._folder / f"{section.name}.log"
        process = FORK.Process(target=run_section, args=(section, self._device, log))
        process.start()
        parts = self._await(process, log, limit_s, stays=section.stays)
        verdict, reason = verdict_of(parts)

        if process.exitcode is None and not (section.stays and parts):
            was_cut = limit_s < section.deadline_s
            reason = f"was cut off after {limit_s:.0f} s, " + ("when the time was spent" if was_cut else "its deadline")
            verdict = (
                "skipped" if was_cut and not any(each["verdict"] == "failed" for each in parts.values()) else "failed"
            )
        elif process.exitcode:
            verdict, reason = "failed", f"ended with exit code {process.exitcode}: {' '.join(last_lines(log, 5))}"
        if section.stays and verdict == "ok":
            self._engine = process
            return Result(verdict, reason, parts=parts)
        end(process)
        if verdict != "ok" and section.engine:
            self.close()  # it may be paused, or wait for a peer
        return Result(verdict, reason, parts=parts)

    def _await(self, process: ForkProcess, log: Path, limit_s: float, *, stays: bool) -> dict[str, Figures]:
        """Wait for the end of a section; of one that stays, for its first part. Return its parts so far."""
        ends_at = time.monotonic() + limit_s
        while time.monotonic() < ends_at:
            process.join(POLL_S)
            if process.exitcode is not None or (stays and read_parts(log)):
                break
        return read_parts(log)

    def close(self) -> None:
        """End the engine, if there is one."""
        if self._engine is not None:
            end(self._engine)
            self._engine = None


def run_section(section: Section, device: str, log: Path) -> None:
    """Run a section in this process, which was forked for it; its parts print their results into the log."""
    os.setsid()
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if device == "cpu":
        torch.set_num_threads(1)  # sizes are tiny, and threads would wait for one another
    section.function(device)


def end(process: ForkProcess) -> None:
    """End a section's process and all that are left of its group. What it started by `run_program` ends with it."""
    process.terminate()
    process.join(LEAVE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


def table(device: str, results: dict[str, Result]) -> str:
    """Return the results as Markdown, with the versions and the card of the section `device`."""
    about = results["device"].parts.get("versions", {}) if "device" in results else {}
    facts = {"device": device, "python": platform.python_version()} | about
    lines = ["", *(f"- {name}: {value}" for name, value in facts.items() if name != "verdict"), ""]
    lines += ["| section | verdict | seconds | figures |", "|---|---|---|---|"]
    for name, result in results.items():
        told = [f"**{result.reason}**"] if result.reason and result.verdict != "ok" else []
        for part, figures in result.parts.items() if name != "device" else ():
            told.append(f"{part}: {', '.join(_cells(figures))}")
        lines.append(f"| {name} | {result.verdict} | {result.seconds:.0f} | {'<br>'.join(told)} |".replace("\n", " "))
    return "\n".join(lines)


def _cells(figures: dict) -> list[str]:
    shown = {name: value for name, value in figures.items() if (name, value) != ("verdict", "ok")}
    return [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()]


def main() -> int:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", type=Path, help="write all results here as well")
    args = parser.parse_args()

    folder = ROOT / "outputs" / "gpu-benchmark" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    os.environ[FOLDER] = str(folder)
    chosen = [section for section in SECTIONS if section.name in args.only]
    is_engine_needed = any(section.engine for section in chosen)
    sections = Sections(args.device, folder, BUDGET_S)
    try:
        for section in SECTIONS:
            if section in chosen or (section.stays and is_engine_needed):
                result = sections.run(section)
                print(f"{section.name}: {json.dumps(asdict(result))}", flush=True)
                if args.json:
                    args.json.write_text(json.dumps({n: asdict(r) for n, r in sections.results.items()}, indent=1))
    finally:
        sections.close()
        for path in [path for name in LARGE for path in folder.rglob(name)]:
            shutil.rmtree(path, ignore_errors=True)
    print(table(args.device, sections.results), f"logs: {folder}", sep="\n\n")
    return int(any(result.verdict == "failed" for result in sections.results.values()))


if __name__ == "__main__":
    sys.exit(main())
