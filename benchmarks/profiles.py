"""Where each process of a steady run spends its processor time.

    uv run --group bench python benchmarks/profiles.py [@ configs/reverse-text/rl.toml] [--seconds 30] [--after 10]

Starts the run, waits for its step `--after`, samples every process of it with py-spy for `--seconds`, ends the run, and
prints per process: processor seconds per step and the functions with the largest shares, by themselves (self) and with
what they call (all). Of processes that compute with torch all threads are sampled but those that wait, of the others
whichever runs Python. `--out` keeps the collapsed stacks, for a flame graph.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from trireme.monitor.metrics import read_metrics

RATE = 100  # samples a second
START_S = 300.0
NAMES = {
    "trireme.cli.trainer": "trainer",
    "trireme.cli.orchestrator": "orchestrator",
    "trireme.cli.inference": "engine: API server",
    "EngineCor": "engine: core",
    "Worker": "engine: worker",
    "trireme_server": "environment worker",
    "environments": "environment worker",
}
COMPUTING = ("trainer", "engine: core", "engine: worker")
WAITING = (
    "wait (threading",
    "_worker (concurrent",
    ".poll (",
    ".select (",
    "get (queue",
    "_do_waitpid",
    "_wait_for_hang_up",
)


def main() -> None:
    asked, run = _parse()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("rl")), *run, "--output-dir", folder]
        launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            metrics = _wait_for(Path(folder), asked.after)
            print_profiles(launcher.pid, metrics, asked.seconds, asked.out or Path(folder) / "stacks", asked.most)
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait(120)


def _wait_for(folder: Path, step: int) -> Path:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        for metrics in folder.glob("**/metrics.jsonl"):
            if steps_done(metrics) >= step:
                return metrics
        time.sleep(0.5)
    raise SystemExit(f"the run did not come to step {step} within {START_S:.0f} s")


def steps_done(metrics: Path) -> int:
    return sum(row["process"] == "trainer" for row in read_metrics(metrics)[0])


def print_profiles(root: int, metrics: Path, seconds: float, out: Path, most: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    processes = {process.pid: name for process in _family(root) if (name := name_of(process))}
    before, step = {pid: _cpu_s(pid) for pid in processes}, steps_done(metrics)
    recorders = [_record(pid, name, out / f"{pid}.txt", seconds) for pid, name in processes.items()]
    for recorder in recorders:
        recorder.wait()
    steps = max(1, steps_done(metrics) - step)
    print(f"{steps} steps in {seconds:.0f} s")
    for pid, name in processes.items():
        print(f"\n{name}: {(_cpu_s(pid) - before[pid]) / steps:.3f} processor seconds per step")
        _print_shares((out / f"{pid}.txt").read_text(), most)


def _family(root: int) -> list[psutil.Process]:
    return psutil.Process(root).children(recursive=True)


def name_of(process: psutil.Process) -> str | None:
    """None for those that only watch."""
    try:
        words = " ".join([*process.cmdline(), process.name()])
    except psutil.Error:
        return None
    return next((name for word, name in NAMES.items() if word in words), None)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _record(pid: int, name: str, out: Path, seconds: float) -> subprocess.Popen:
    spy = str(Path(sys.executable).with_name("py-spy"))
    options = ["--duration", str(int(seconds)), "--rate", str(RATE), "--format", "raw", "--output", str(out)]
    if name not in COMPUTING:
        options.append("--gil")
    command = [spy, "record", "--pid", str(pid), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _print_shares(stacks: str, most: int) -> None:
    by_itself, in_all, total = shares(stacks)
    for title, counts in (("self", by_itself), ("all", in_all)):
        for frame, count in counts.most_common(most):
            print(f"  {title:4} {100 * count / max(1, total):5.1f} %  {frame}")


def shares(stacks: str) -> tuple[Counter[str], Counter[str], int]:
    """Samples by function, by itself and with what it calls, and all there are."""
    by_itself: Counter[str] = Counter()
    in_all: Counter[str] = Counter()
    total = 0
    for line in stacks.splitlines():
        stack, _, number = line.rpartition(" ")
        frames = [re.sub(r":\d+\)$", ")", frame) for frame in stack.split(";")]  # functions, not lines
        if not stack or any(word in frames[-1] for word in WAITING):
            continue
        total += int(number)
        by_itself[frames[-1]] += int(number)
        for frame in set(frames):
            in_all[frame] += int(number)
    return by_itself, in_all, total


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--after", type=int, default=10, help="step from which on the run counts as steady")
    parser.add_argument("--most", type=int, default=5, help="functions of each kind")
    parser.add_argument("--out", type=Path, help="a folder for the collapsed stacks")
    asked, run = parser.parse_known_args()
    return asked, run or ["@", "configs/reverse-text/rl.toml"]


if __name__ == "__main__":
    main()
