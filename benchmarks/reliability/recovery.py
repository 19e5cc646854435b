"""How long it takes to get over a death: of each process, in each phase of a step.

    uv run python -m benchmarks.reliability.recovery [--times 3] [--real] [more flags of `rl`]

A process is killed (-9) while some process of the run is held at a named point. Measured are the seconds from there to
the first word about it in any log, to the next newly trained step, and the optimizer steps that were done twice. The
median over `--times` kills; docs/reliability.md sums them up. The engine is scripted
(tests/support/engines/scripted_engine.py), and comes up in about 3 s; `--real` takes vLLM, whose start-up is then most
of what is measured.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

from benchmarks.measuring import command, print_table
from support.runs.scripted_kills import REAL, SCRIPTED, VICTIMS, KilledRun, open_run

PHASES = {
    "rollouts": "rollout.finished",
    "training": "trainer.stepped",
    "weights in flight": "engine.receiving",
    "evaluation": "evaluation.running",
    "checkpoint": "checkpoint.written",
}
WORDS_OF_DEATH = re.compile(r"died|is gone|was ended|dropped a request|restarted|broke|failed:")
REPEATED = re.compile(r"the run had come to version (\d+); it is repeated from version (\d+) on")
COLUMNS = ("killed", "while", "noticed after", "next new step after", "steps trained again")
STEPS = 10_000  # it is stopped when all has been measured
ROLLOUTS_OF_A_STEP = {False: 4, True: 32}


@dataclass(frozen=True)
class Recovery:
    """What one death has cost."""

    notice_s: float
    recover_s: float
    steps: int  # trained twice


class Measured(KilledRun):
    """A run that is watched closely while it is disturbed."""

    def measure(self, victim: str, point: str) -> Recovery:
        self.until(lambda: self.version >= 1, "the first step")
        self.faults.arm(point)
        self.until(lambda: self.faults.is_reached(point), f"{point}, where {victim} is to be killed")
        process = self.find(victim)
        before = self._log_sizes()
        began = time.monotonic()
        self.kill(victim, process)
        noticed = time.monotonic() - began if victim == "launcher" else None  # all have ended by now
        version = self.version
        self.faults.release(point)
        while self.version <= version:
            if noticed is None and WORDS_OF_DEATH.search(self._said_since(before)):
                noticed = time.monotonic() - began
            self.until(lambda: True, "the run goes on")
            assert time.monotonic() - began < self.patience_s, self.tell()
            time.sleep(0.01)
        recovered = time.monotonic() - began
        time.sleep(0.5)  # last words
        repeated = [int(newest) - int(first) for newest, first in REPEATED.findall(self._said_since(before))]
        found = Recovery(noticed if noticed is not None else recovered, recovered, sum(repeated))
        self.say(f"{victim} at {point}: {found}")
        return found

    def _logs(self) -> list[Path]:
        return [*self.run.paths.logs.glob("*.stdout"), *self.folder.glob("launcher-*.log")]

    def _log_sizes(self) -> dict[Path, int]:
        return {log: log.stat().st_size for log in self._logs()}

    def _said_since(self, before: dict[Path, int]) -> str:
        said = []
        for log in self._logs():
            with open(log, errors="replace") as file:
                file.seek(before.get(log, 0))
                said.append(file.read())
        return "\n".join(said)


def main(
    *flags: str,
    times: int = 3,
    real: Annotated[bool, "vLLM instead of the scripted engine"] = False,
    victims: tuple[str, ...] = VICTIMS,
    phases: Annotated[tuple[str, ...], tuple(PHASES)] = tuple(PHASES),
    folder: Path | None = None,
) -> None:
    folder = folder or Path(tempfile.mkdtemp(prefix="recovery-"))
    found = {victim: measure_all(victim, phases, times, folder, real, flags) for victim in victims}
    print_table(COLUMNS, (row_of(victim, *each) for victim, by_phase in found.items() for each in by_phase.items()))
    print(f"\n{explanation(times, real)}")


def measure_all(
    victim: str, phases: Sequence[str], times: int, folder: Path, real: bool, flags: Sequence[str]
) -> dict[str, list[Recovery]]:
    """Measure all phases of one victim, in one run."""
    ranks = 2 if victim.startswith("trainer") else 1
    run = Measured(folder / victim.replace(" ", "-"), [], command=REAL if real else SCRIPTED, name=victim, ranks=ranks)
    run.patience_s = 600.0
    run.flags = ["--max-steps", str(STEPS), "--max-async-level", "0", "--trainer.ckpt.keep-last", "2"]
    run.flags += ["--orchestrator.eval.interval", "3", "--trainer.ckpt.interval", "4", *flags]
    with open_run(run):
        run.start()
        return {phase: [run.measure(victim, PHASES[phase]) for _ in range(times)] for phase in phases}


def row_of(victim: str, phase: str, found: list[Recovery]) -> list[str]:
    notice_s, recover_s = median(one.notice_s for one in found), median(one.recover_s for one in found)
    return [victim, phase, f"{notice_s:.1f} s", f"{recover_s:.1f} s", f"{median(one.steps for one in found):g}"]


def explanation(times: int, real: bool) -> str:
    kills = f"Medians of {times}" if times > 1 else "One kill each"
    engine = "vLLM" if real else "a scripted engine, which comes up in about 3 s where vLLM takes half a minute"
    return (
        f"{kills}, by `uv run python -m benchmarks.reliability.recovery --times {times}` on {os.cpu_count()} CPU cores "
        f"without a GPU, with {engine}. A checkpoint every 4 steps, {ROLLOUTS_OF_A_STEP[real]} rollouts a step, two "
        "trainer ranks where a trainer dies and one elsewhere. The launcher is started again by hand, that is, at "
        "once; it is noticed when nothing of its run is alive any more. 0.0 s where the one who died had done its "
        "part: the version was confirmed without it."
    )


if __name__ == "__main__":
    command(main)
