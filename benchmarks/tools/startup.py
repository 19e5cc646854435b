"""How long it takes from a command to what it is for.

    uv run python -m benchmarks.tools.startup [--times 3] [--commands-only] [more flags of `rl`]

Commands that start nothing (`--help`, `--dry-run`): wall and processor seconds, the best of `--times`. Then the
quickstart, until the engine has answered its first rollout, as the engine's own counters tell; it is stopped there.
Printed are when each phase was first seen in a log, and the processor seconds of each process up to then: on a busy
machine those are what can be compared. `python -X importtime` lists what a process imports.
Byte code: the first start compiles what it imports. Compile everything first for the figures of any later one:

    python -m compileall -q -j 0 .venv/lib
"""

from __future__ import annotations

import math
import os
import re
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

from benchmarks.measuring import command, command_s, print_table
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
PROCESSES = ("launcher", "inference", "trainer", "orchestrator")
DEADLINE_S = 300.0
POLL_S = 0.05
PROBES = 1  # requests that the engine answers before any rollout: the prompt that confirms its weights
FINISHED = re.compile(rb"^vllm:request_success_total\{.*\} ([\d.e+]+)$", re.MULTILINE)


def program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def main(*flags: str, times: int = 3, commands_only: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print_table(("command", "wall s", "processor s"), (command_row(words, times, folder) for words in COMMANDS))
    if commands_only:
        return
    starts = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder, started(Path(folder), list(flags)) as start:
            start.watch()
            starts.append((start.seen, start.processor_seconds()))
    phases = [*(phase for _, phase, _ in PHASES), "the first rollout"]
    seconds = ([name, *(f"{seen.get(name, math.nan):.1f}" for seen, _ in starts)] for name in phases)
    processes = [[name, *(f"{spent.get(name, 0):.1f}" for _, spent in starts)] for name in PROCESSES]
    processes.append(["all", *(f"{sum(spent.values()):.1f}" for _, spent in starts)])
    print()
    print_table(("phase", *(f"run {number + 1}, s" for number in range(times))), seconds)
    print()
    print_table(("process", *["processor s"] * times), processes)
    print(f"\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def command_row(words: tuple[str, ...], times: int, folder: str) -> list[str]:
    where = ["--output-dir", folder] if "--dry-run" in words else []
    found = [command_s(program(words[0]), *words[1:], *where) for _ in range(times)]
    return [" ".join(words), *(f"{min(column):.2f}" for column in zip(*found, strict=True))]


@dataclass
class Start:
    """A run that is watched while it comes up, until its first rollout."""

    process: subprocess.Popen
    root: Path
    began: float
    seen: dict[str, float] = field(default_factory=dict)  # phase -> seconds after the command

    def watch(self) -> None:
        """Watch until the engine has answered a request that is a rollout's."""
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
        """Return how many requests the engine has answered; -1 if it does not answer at all."""
        if "the engine answers" not in self.seen:
            return -1
        port = read_run(RunConfig, self.root / "configs" / "run.json").inference.server.port
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=bearer(read_key(self.root)))
        with suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
            return sum(float(count) for count in FINISHED.findall(answer.read()))
        return -1

    def processor_seconds(self) -> dict[str, float]:
        """Return those of each process of the run and what it started, with its children that have ended."""
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


if __name__ == "__main__":
    command(main)
