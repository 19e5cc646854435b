"""Throughput of a run whose engines come and go, against the share of the engines that are there.

    uv run python -m benchmarks.reliability.fleet [--real 2]

Five engines join, are killed, drained, cut off and joined again, one every few seconds (tests/support/runs/fleet.py).
Scripted ones answer a request in a known time, one after the other; what a real one does is measured before the first
event, while all five are live. Needs network namespaces. Prints rollouts per second and their share of what the live
engines could do. Exit code 1 if the audit finds anything.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.measuring import command, print_table
from support.processes.machines import open_machines
from support.runs.fleet import PREFILL_S, Fleet
from support.runs.scripted_kills import audit
from trireme.base.token import TOKEN


def main(real: int = 0, every: int = 3, calm: int = 20) -> int:
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        return measure(Path(folder), real, every, calm)


def measure(folder: Path, real: int, every: int, calm: int) -> int:
    """
    Args:
        real: engines of vLLM among the five.
        every: versions between two events.
        calm: version of the first event.
    """
    with open_machines(7, **{TOKEN: "the-machines-of-this-benchmark"}) as machines:
        fleet = Fleet(folder, machines, num_real=real, every=every, first=calm)
        with fleet.running():
            fleet.play()

    # A request of a scripted engine takes as long as its prompt is, and each rollout is one request.
    batches = fleet.run.batches()
    prompts = [
        sample.length - int(sample.loss_mask.sum())
        for each in batches[:4]
        for r in each.rollouts
        for sample in r.samples
    ]
    scripted = 1 / (PREFILL_S * mean(prompts))
    before, begins, ends = (at(fleet, version) for version in (5, calm, fleet.last))
    calm_rate, rate = finished(fleet, before, begins), finished(fleet, begins, ends)
    others = (calm_rate - (5 - real) * scripted) / real if real else scripted
    rates = {number: others if each.is_real else scripted for number, each in fleet.engines.items()}
    share = sum(rates[number] * seconds for number, seconds in live_s(fleet, begins, ends).items()) / (ends - begins)
    rows = [("all live", calm_rate, sum(rates.values())), ("come and go", rate, share)]
    print_table(
        ("engines", "rollouts/s", "live engines' share", "of it"),
        [(name, f"{found:.1f}", f"{own:.1f}", f"{found / own:.0%}") for name, found, own in rows],
    )
    return audit([str(fleet.run.root)])


def at(fleet: Fleet, batch: int) -> float:
    """Return when the orchestrator began to fill a batch."""
    return next(time for time, number, _ in fleet.looks() if number >= batch)


def finished(fleet: Fleet, begins: float, ends: float) -> float:
    """Return rollouts per second of the batches between two moments, at each of which a batch began."""
    numbers = [number for time, number, _ in fleet.looks() if begins <= time <= ends]
    batches = fleet.run.batches()[numbers[0] : numbers[-1]]
    return sum(len(each.rollouts) + len(each.dropped) for each in batches) / (ends - begins)


def live_s(fleet: Fleet, begins: float, ends: float) -> dict[int, float]:
    """Return for how long each engine was there: from the first look at which it is live until it is struck."""
    found = dict.fromkeys(fleet.engines, 0.0)
    is_live, comes, struck = dict.fromkeys(found, False), dict.fromkeys(found, True), list(fleet.events)
    before = begins
    for time, _, engines in fleet.looks():
        while struck and struck[0][0] <= time:
            _, number, what = struck.pop(0)
            is_live[number], comes[number] = False, what in ("start", "mend")
        for number, engine in fleet.engines.items():
            is_live[number] |= comes[number] and [engine.machine.address, "live"] in engines
            found[number] += is_live[number] * max(0.0, min(time, ends) - max(before, begins))
        before = time
    return found


if __name__ == "__main__":
    command(main)
