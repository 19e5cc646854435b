"""How long it takes from a command to what it is for.

    uv run python benchmarks/startup.py [--times 3] [--commands-only] [more flags of `rl`]

Commands that start nothing (`--help`, `--dry-run`): wall and processor seconds, the best of `--times`. Then the
quickstart, until the engine has answered its first rollout, as the engine's own counters tell; it is stopped there.
Printed are when each phase was first seen in a log, and the processor seconds of each process up to then: on a busy
machine those are what can be compared. `python -X importtime` lists what a process imports.
Byte code: the first start compiles what it imports. Compile everything first for the figures of any later one:

    python -m compileall -q -j 0 .venv/lib
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from trireme.base.token import bearer, read_key
from trireme.config.files import read_run
from trireme.config.run import RunConfig

CONFIG = "configs/reverse-text/rl.toml"
COMMANDS = (("trireme", "--help"), ("rl", "--help"), ("rl", "@", CONFIG, "--dry-run"))
PHASES = (
    ("orchestrator", "the environment is loaded", r"training examples"),
    ("trainer", "the trainer has its model", r"parameters on"),
    ("inference", "vLLM is imported", r"vllm serve"),
    ("inference", "the engine is forked", r"Initializing a V1 LLM engine"),
    ("inference", "the engine has its model", r"init engine"),
    ("inference", "the engine answers", r"Application startup complete"),
)
DEADLINE_S = 300.0
POLL_S = 0.05
PROBES = 1  # requests that the engine answers before any rollout: the prompt that confirms its weights
FINISHED = re.compile(rb"^vllm:request_success_total\{.*\} ([\d.e+]+)$", re.MULTILINE)


def program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


# commands that start nothing


def command_seconds(words: tuple[str, ...], folder: Path) -> tuple[float, float]:
    """Wall and processor seconds of one call."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    where = ["--output-dir", str(folder)] if "--dry-run" in words else []
    subprocess.run([program(words[0]), *words[1:], *where], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def tell_commands(console: Console, times: int, folder: Path) -> None:
    table = Table("command", "wall s", "processor s")
    for words in COMMANDS:
        found = [command_seconds(words, folder) for _ in range(times)]
        table.add_row(" ".join(words), *(f"{min(column):.2f}" for column in zip(*found, strict=True)))
    console.print(table)


# a run, until its first rollout


@dataclass
class Start:
    """A run that is watched while it comes up."""

    process: subprocess.Popen
    root: Path
    began: float
    seen: dict[str, float] = field(default_factory=dict)  # phase -> seconds after the command

    def watch(self) -> None:
        """Until the engine has answered a request that is a rollout's."""
        while self.finished() <= PROBES:
            assert self.process.poll() is None, f"the run ended: see {self.root / 'logs'}"
            assert time.perf_counter() - self.began < DEADLINE_S, f"no rollout in {DEADLINE_S:.0f} s"
            self.look()
            time.sleep(POLL_S)
        self.look()
        self.see("the first rollout")

    def look(self) -> None:
        for room, phase, pattern in PHASES:
            log = self.root / "logs" / f"{room}.stdout"
            if phase not in self.seen and log.exists() and re.search(pattern, log.read_text(errors="replace")):
                self.see(phase)

    def see(self, phase: str) -> None:
        self.seen[phase] = time.perf_counter() - self.began

    def finished(self) -> float:
        """Requests that the engine has answered; -1 where it does not answer at all."""
        if "the engine answers" not in self.seen:
            return -1
        port = read_run(RunConfig, self.root / "configs" / "run.json").inference.server.port
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=bearer(read_key(self.root)))
        with suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
            return sum(float(count) for count in FINISHED.findall(answer.read()))
        return -1

    def processor_seconds(self) -> dict[str, float]:
        """Of each process of the run and what it started, whose children that have ended are counted with it."""
        seconds: dict[str, float] = defaultdict(float)
        launcher = psutil.Process(self.process.pid)
        names = {launcher.pid: "launcher"}
        for process in [launcher, *launcher.children(recursive=True)]:  # parents first
            with suppress(psutil.Error):
                times = process.cpu_times()
                spent = times.user + times.system + times.children_user + times.children_system
                # The engine has written its title over its environment, so it counts as its parent.
                above = names.get(process.ppid(), "launcher")
                names[process.pid] = process.environ().get("TRIREME_PROCESS", above)
                seconds[names[process.pid]] += spent
        return dict(seconds)


@contextmanager
def started(folder: Path, flags: list[str]) -> Iterator[Start]:
    words = [program("rl"), "@", CONFIG, "--output-dir", str(folder), *flags]
    began = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield Start(process, folder / "reverse-text", began)
    finally:
        process.terminate()
        process.wait(60)


def tell_runs(console: Console, times: int, flags: list[str]) -> None:
    phases, processes = (
        Table("phase", *(f"run {n + 1}, s" for n in range(times))),
        Table("process", *["processor s"] * times),
    )
    starts = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder, started(Path(folder), flags) as start:
            start.watch()
            starts.append((start.seen, start.processor_seconds()))
    for phase in [*(phase for _, phase, _ in PHASES), "the first rollout"]:
        phases.add_row(phase, *(f"{seen.get(phase, float('nan')):.1f}" for seen, _ in starts))
    for name in ("launcher", "inference", "trainer", "orchestrator"):
        processes.add_row(name, *(f"{spent.get(name, 0):.1f}" for _, spent in starts))
    processes.add_row("all", *(f"{sum(spent.values()):.1f}" for _, spent in starts))
    console.print(phases, processes, f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--commands-only", action="store_true")
    args, flags = parser.parse_known_args()
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as folder:
        tell_commands(console, args.times, Path(folder))
    if not args.commands_only:
        tell_runs(console, args.times, flags)


if __name__ == "__main__":
    main()
