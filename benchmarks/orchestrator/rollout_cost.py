"""What a rollout costs the orchestrator: CPU time of its process, from the example to the packed row.

    uv run python -m benchmarks.orchestrator.rollout_cost [--rollouts 40000] [--in-flight 4096] [--json FILE]
    uv run python -m benchmarks.orchestrator.rollout_cost --against FOLDER    another checkout, by turns with this one

Three kinds of processes, as in a run: the orchestrator (its real loop, with chat template, tokenizer, environment
protocol, HTTP to the engine, advantages, journal on disk, packing, ZeroMQ to the trainer), the environment's workers
(real ones), and an engine that answers at once with a trainer that only counts (`instant.py`). "One core" is the
orchestrator's: the figure is rollouts per CPU second of its process, all its threads together, so it does not depend
on what else the machine does; what the others took is shown beside it. The first tenth of the run is not counted.

Lag is how much later than asked for the event loop came back to a task that sleeps 2 ms again and again. A long stall
counts as all the sleeps that it kept waiting. On a machine that is shared the scheduler's part is in it; `own` is the
part of it during which our own process was on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import uvloop

from benchmarks import ROOT
from benchmarks.measuring import command, print_table, spread

TICK_S = 0.002
SAY = """
    def dataset(size=2000):
        return [{"prompt": f"say {number}", "answer": str(number)} for number in range(size)]

    def reward(completion, answer):
        return sum(place * ord(letter) for place, letter in enumerate(completion, start=1)) % 97 / 97
"""
TASK = {"end": 2, "letters": list(range(63, 89)), "most_tokens": 8}  # ids of the model's tokenizer

Row = dict[str, float]


def main(
    rollouts: int = 40_000,
    in_flight: Annotated[int, "rollouts under way at once, two batches of them"] = 4096,
    synchronous: Annotated[bool, "one batch at a time, in order, with seeds"] = False,
    against: Annotated[Path | None, "another checkout, measured by turns with this one"] = None,
    turns: Annotated[int, "measurements of each"] = 1,
    json_: Annotated[Path | None, "write all figures here as well"] = None,
    inside: Annotated[Path | None, "used by this program itself"] = None,
) -> None:
    if inside is not None:
        return measure_inside(inside)
    checkouts = {"this": ROOT} | ({"other": against.resolve()} if against else {})
    found: dict[str, list[Row]] = {name: [] for name in checkouts}
    for _ in range(turns):
        for name, checkout in checkouts.items():
            found[name].append(measure(checkout, rollouts, in_flight, synchronous))
    if json_:
        json_.write_text(json.dumps(found, indent=1))
    figures = found["this"][0]
    rows = ([what, *(spread([one[what] for one in each], ",.1f") for each in found.values())] for what in figures)
    print_table(("", *found), rows)


def measure(checkout: Path, rollouts: int, in_flight: int, synchronous: bool) -> Row:
    """Return the figures of one run in processes of its own, with the sources of `checkout`."""
    with tempfile.TemporaryDirectory(prefix="orchestrator-") as folder:
        return measure_in(Path(folder), checkout, rollouts, in_flight, synchronous)


def measure_in(folder: Path, checkout: Path, rollouts: int, in_flight: int, synchronous: bool) -> Row:
    """Return the same, and leave the run in `folder`/run."""
    modules = os.pathsep.join(str(checkout / part) for part in ("src", "packages/trireme-worker"))
    variables = os.environ | {"PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "wb") as log:
        config = build_config(folder, rollouts, in_flight, synchronous)
        told, inside, out = folder / "company.json", folder / "inside.json", folder / "out.json"
        told.write_text(json.dumps({"config": config} | TASK))
        company = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.orchestrator.instant", str(told)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=variables, cwd=ROOT,
        )  # fmt: skip
        assert company.stdout is not None
        assert company.stdin is not None
        try:
            company.stdout.readline()
            inside.write_text(json.dumps({"config": config, "company": company.pid, "out": str(out)}))
            command = [sys.executable, "-m", "benchmarks.orchestrator.rollout_cost", "--inside", str(inside)]
            subprocess.run(command, env=variables, cwd=ROOT, check=True, stdout=log, stderr=log)
            return summary(json.loads(out.read_text()))
        finally:
            company.stdin.close()
            company.wait(10)


def build_config(folder: Path, rollouts: int, in_flight: int, synchronous: bool) -> dict[str, Any]:
    from trireme.base.processes import free_port

    environment = folder / "say.py"
    environment.write_text(textwrap.dedent(SAY))
    batch_size = in_flight if synchronous else in_flight // 2
    return {
        "output_dir": str(folder / "run"),
        "device": "cpu",
        "max_steps": -(-rollouts // batch_size),
        "max_async_level": 0 if synchronous else 1,
        "seq_len": 1024,
        "model": {"name": str(ROOT / "models" / "reverse-text-tiny")},
        "ports": {"batches": free_port()},
        "inference": {"server": {"port": free_port()}},
        "weight_broadcast": {"type": "filesystem", "probe_tolerance": 1e-3},
        "orchestrator": {
            "batch_size": batch_size,
            "rollouts_per_example": 16,
            "max_concurrent": in_flight,
            "sampling": {"max_tokens": TASK["most_tokens"]},
            "env": [{"id": str(environment), "name": "say", "num_workers": 2, "max_concurrent": in_flight}],
            "server": {"port": free_port()},
        },
    }


# in the orchestrator's process, whose sources may be another checkout's: imported there alone


def measure_inside(told: Path) -> None:
    from trireme.base.log import start_logging
    from trireme.config.run import RunConfig

    given = json.loads(told.read_text())
    start_logging("orchestrator", "info")
    config = RunConfig.model_validate(given["config"])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(watched(config, psutil.Process(given["company"])))
    Path(given["out"]).write_text(json.dumps(found))


async def watched(config: Any, company: psutil.Process) -> dict[str, Any]:
    from trireme.orchestrator.loop import drive, open_orchestrator

    rows: list[Row] = []
    lags: list[tuple[float, float]] = []
    async with open_orchestrator(config) as orchestrator:
        watching = [asyncio.create_task(note_rows(orchestrator, config, company, rows))]
        watching.append(asyncio.create_task(note_lags(lags)))
        await drive(orchestrator)
        rows.append(row_of(orchestrator, config, company))
        for task in watching:
            task.cancel()
    return {"rows": rows, "lags": lags}


async def note_rows(orchestrator: Any, config: Any, company: psutil.Process, rows: list[Row]) -> None:
    """Add a row for each batch."""
    seen, most = -1, 0
    while True:
        most = max(most, sum(worker.num_running for worker in workers_of(orchestrator)))
        if orchestrator.scheduler.next_batch != seen:
            seen = orchestrator.scheduler.next_batch
            rows.append(row_of(orchestrator, config, company) | {"under_way": most})
            most = 0
        await asyncio.sleep(0.02)


def row_of(orchestrator: Any, config: Any, company: psutil.Process) -> Row:
    used = resource.getrusage(resource.RUSAGE_SELF)
    workers = sum(sum(psutil.Process(worker.pid).cpu_times()[:2]) for worker in workers_of(orchestrator))
    return {
        "at": time.perf_counter(),
        "rollouts": orchestrator.scheduler.next_batch * config.orchestrator.batch_size,
        "cpu_s": used.ru_utime + used.ru_stime,
        "system_s": used.ru_stime,
        "workers_s": workers,
        "company_s": sum(company.cpu_times()[:2]),
        "rss": psutil.Process().memory_info().rss,
    }


def workers_of(orchestrator: Any) -> list[Any]:
    return [worker for each in orchestrator.scheduler.environments.values() for worker in each._workers]


async def note_lags(lags: list[tuple[float, float]]) -> None:
    """Note how late the loop came back, and for how much of it our process was running at most."""
    while True:
        due, used = time.perf_counter() + TICK_S, time.process_time()
        await asyncio.sleep(TICK_S)
        late = max(0.0, time.perf_counter() - due)
        lags.append((late, min(late, time.process_time() - used)))


def summary(found: dict[str, Any]) -> Row:
    """Return the figures of a run, without its first tenth, and of its beginning and end for comparison."""
    rows = found["rows"]
    total = rows[-1]["rollouts"]
    first = next(row for row in rows if row["rollouts"] >= total / 10)
    last = rows[-2]  # the last batch is followed by a good-bye
    early, middle, end = (nearest(rows, total * share) for share in (0.1, 0.4, 0.7))

    def cost_us(what: str, begin: Row = first, end: Row = last) -> float:
        return (end[what] - begin[what]) / max(1, end["rollouts"] - begin["rollouts"]) * 1e6

    late, own = (unhurried(column) * 1e3 for column in np.array(found["lags"][len(found["lags"]) // 10 :]).T)
    return {
        "rollouts": last["rollouts"] - first["rollouts"],
        "rollouts_per_cpu_s": 1e6 / cost_us("cpu_s"),
        "rollouts_per_wall_s": 1e6 / cost_us("at"),
        "orchestrator_us": cost_us("cpu_s"),
        "of_it_system_us": cost_us("system_s"),
        "workers_us": cost_us("workers_s"),
        "company_us": cost_us("company_s"),
        "early_us": cost_us("cpu_s", early, middle),
        "late_us": cost_us("cpu_s", end, last),
        "rss_early_mib": early["rss"] / 2**20,
        "rss_late_mib": last["rss"] / 2**20,
        "rss_most_mib": max(row["rss"] for row in rows) / 2**20,
        "grown_mib": (max(row["rss"] for row in rows) - rows[0]["rss"]) / 2**20,
        "lag_p50_ms": float(np.percentile(late, 50)),
        "lag_p99_ms": float(np.percentile(late, 99)),
        "lag_max_ms": float(late.max()),
        "own_lag_p99_ms": float(np.percentile(own, 99)),
        "own_lag_max_ms": float(own.max()),
        "most_under_way": max(row.get("under_way", 0) for row in rows),
    }


def nearest(rows: list[Row], rollouts: float) -> Row:
    return min(rows[:-1], key=lambda row: abs(row["rollouts"] - rollouts))


def unhurried(late: np.ndarray) -> np.ndarray:
    """Count a stall of 10 ticks as the 10 samples that it swallowed, not as one beside those of the quiet."""
    return np.concatenate([late, *(np.arange(value - TICK_S, 0, -TICK_S) for value in late if value > TICK_S)])


if __name__ == "__main__":
    command(main)
