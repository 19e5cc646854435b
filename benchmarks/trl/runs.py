"""A cell is run, and what it took is watched from outside: the same way for both sides."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks import ROOT
from benchmarks.trl.cells import Cell
from support.runs.real_run import Run
from trireme.journal.journal import Journal
from trireme.monitor.spans import read_spans

HERE = Path(__file__).parent
TRL_VERSION = "1.16.0"
PINS = [f"trl=={TRL_VERSION}", "torch==2.13.0", "transformers==5.19.0", "datasets==5.2.0", "numpy==2.3.5"]
"""What theirs is run with; transformers and torch are those that ours has."""

OVERRIDES = [
    "torch==2.13.0",
    *(f"{name}; sys_platform == 'never'" for name in ("torchvision", "torchaudio", "torchcodec")),
]

LONGEST_S = 1800

CONFIG = """
name = "run"
output_dir = {folder}
max_steps = {max_steps}
seq_len = {seq_len}
seed = {seed}
device = "cpu"
{ours}

[model]
name = {model}

[trainer]
micro_batch_tokens = 4096
{our_trainer}

[trainer.optim]
lr = {lr}
betas = [0.9, 0.95]
weight_decay = 0.0

[trainer.loss]
type = "ppo"

[orchestrator]
batch_size = {batch_size}
rollouts_per_example = {group_size}

[orchestrator.advantage]
type = "group_mean_std"

[orchestrator.sampling]
max_tokens = {max_tokens}

[orchestrator.filters]
truncated = "mask"

[[orchestrator.env]]
id = {environment}
name = "task"
max_concurrent = 1024
args = {{ {task} }}
"""


def run(cell: Cell, folder: Path) -> dict[str, Any]:
    """Return a line per step, and the CPU seconds that all its processes had taken by then."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command, environment = (our_command if cell.side == "trireme" else their_command)(cell, folder)
    began_s = time.time()
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
        with measured(child.pid) as cpu:
            code = child.wait(LONGEST_S)
    if code:
        raise RuntimeError(f"{cell.key} ended with {code} - 0 was expected. Its last words are in {folder / 'log'}.")
    found = our_steps(folder / "run") if cell.side == "trireme" else their_steps(folder / "steps.jsonl")
    steps = [step | {"cpu_s": cpu_at(cpu, step["ended_s"])} for step in found["steps"]]
    first = found["first_s"]
    whole = {"began_s": began_s, "first_s": first, "first_cpu_s": cpu_at(cpu, first), "ended_s": time.time()}
    return whole | {"steps": steps, "prompts": found["prompts"]}


# ours


def our_command(cell: Cell, folder: Path) -> tuple[list[str], dict[str, str]]:
    values = {name: json.dumps(value) for name, value in asdict(cell).items() if not name.startswith("our")}
    task = ", ".join(f"{name} = {json.dumps(value)}" for name, value in cell.task.items())
    given = values | {
        "folder": json.dumps(str(folder)),
        "environment": json.dumps(str(HERE / "task.py")),
        "task": task,
        "ours": cell.ours,
        "our_trainer": cell.our_trainer,
        "lr": cell.lr,
    }
    config = folder / "rl.toml"
    config.write_text(CONFIG.format(**given))
    return [str(Path(sys.executable).parent / "rl"), "@", str(config)], dict(os.environ)


def our_steps(run_folder: Path) -> dict[str, Any]:
    run = Run(run_folder)
    batches = {row["step"]: row for row in run.rows("orchestrator")}
    ends = {row["step"]: row["time_s"] for row in run.rows("trainer")}
    size = batches[0]["rollouts/trained"]
    steps = [
        {
            "step": step + 1,
            "ended_s": ended,
            "reward": batches[step]["reward/mean"],
            "tokens": batches[step]["tokens/completion_mean"] * size,
        }
        for step, ended in sorted(ends.items())
    ]
    return {"steps": steps, "first_s": _first_request(run_folder), "prompts": our_prompts(run_folder, len(batches))}


def _first_request(run_folder: Path) -> float:
    """Return when the first rollout was asked for."""
    spans, _ = read_spans(run_folder / "spans.jsonl")
    return min(span.begin_s for span in spans if span.what == "generate" and span.lane.startswith("engine"))


def our_prompts(run_folder: Path, num_batches: int) -> list[list[int]]:
    """Return the different prompts that were trained on."""
    journal, found = Journal(run_folder / "journal"), set()
    for step in range(num_batches):
        for sample in (sample for rollout in journal.read(step).rollouts for sample in rollout.samples):
            found.add(tuple(sample.ids[sample.loss_mask == 0].tolist()))
    return sorted(map(list, found))


# theirs


def their_python(folder: Path) -> Path:
    """Return the Python of a virtual environment with TRL, made by uv if it is not there."""
    home = folder / f"trl-{TRL_VERSION}"
    python, overrides = home / "bin" / "python", folder / "overrides.txt"
    if not (home / "ready").exists():
        overrides.parent.mkdir(parents=True, exist_ok=True)
        overrides.write_text("\n".join(OVERRIDES))
        subprocess.run(["uv", "venv", "--clear", "--python", "3.11", str(home)], check=True)
        install = ["uv", "pip", "install", "--python", str(python), "--compile-bytecode", "--override", str(overrides)]
        subprocess.run([*install, *PINS], check=True)
        (home / "ready").touch()
    return python


def their_command(cell: Cell, folder: Path) -> tuple[list[str], dict[str, str]]:
    task = folder / "cell.json"
    given = {"folder": str(folder / "output"), "out": str(folder / "steps.jsonl")}
    task.write_text(json.dumps(asdict(cell) | given))
    python = their_python(folder.parents[1])
    threads = {"OMP_NUM_THREADS": str(cell.threads or os.cpu_count()), "TOKENIZERS_PARALLELISM": "false"}
    return [str(python), str(HERE / "theirs.py"), str(task)], os.environ | threads | {"HF_HUB_OFFLINE": "1"}


def their_steps(path: Path) -> dict[str, Any]:
    first, *steps = [json.loads(line) for line in path.read_text().splitlines()]
    return {"steps": steps, "first_s": first["began_s"], "prompts": first["prompts"]}


# CPU seconds


@contextmanager
def measured(pid: int, every_s: float = 0.25) -> Iterator[list[tuple[float, float]]]:
    """Yield [(unix time, CPU seconds until then)] of a process and all that came from it, while it runs."""
    found: list[tuple[float, float]] = []
    seen: dict[tuple[int, float], float] = {}
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(every_s):
            for number, seconds in _cpu_seconds(pid):
                seen[number] = max(seconds, seen.get(number, 0.0))
            found.append((time.time(), sum(seen.values())))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        is_over.set()
        watcher.join()


def _cpu_seconds(pid: int) -> Iterator[tuple[tuple[int, float], float]]:
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        try:
            times = process.cpu_times()
            yield (process.pid, process.create_time()), times.user + times.system
        except psutil.NoSuchProcess:
            continue


def cpu_at(found: list[tuple[float, float]], at_s: float) -> float:
    """Return the CPU seconds at a time, between two looks in proportion."""
    before = [pair for pair in found if pair[0] <= at_s]
    after = [pair for pair in found if pair[0] > at_s]
    if not before or not after:
        return (before or after)[-1 if before else 0][1]
    (t0, c0), (t1, c1) = before[-1], after[0]
    return c0 + (c1 - c0) * (at_s - t0) / (t1 - t0)
