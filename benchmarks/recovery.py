"""How long it takes to get over a death: of each process, in each phase of a step.

    uv run python benchmarks/recovery.py [--times 3] [--real] [more flags of `rl`]

A process is killed (-9) while some process of the run is held at a named point. Measured are the seconds from there to
the first word about it in any log, to the next newly trained step, and the work that was done twice: optimizer steps,
and requests to engines. The median over `--times` kills; docs/reliability.md sums them up. The engine is scripted
(tests/scripted_engine.py), and comes up in about 3 s; `--real` takes vLLM, whose start-up is then most of what is
measured.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from scripted_kills import REAL, SCRIPTED, VICTIMS, KilledRun, open_run

REPOSITORY = Path(__file__).resolve().parents[1]

PHASES = {
    "rollouts": "rollout.finished",
    "training": "trainer.stepped",
    "weights in flight": "engine.receiving",
    "evaluation": "evaluation.running",
    "checkpoint": "checkpoint.written",
}
WORDS_OF_DEATH = re.compile(r"died|is gone|was ended|dropped a request|restarted|broke|failed:")
REPEATED = re.compile(r"the run had come to version (\d+); it is repeated from version (\d+) on")
STEPS = 10_000  # it is stopped when all has been measured
ROLLOUTS_OF_A_STEP = {False: 4, True: 32}


@dataclass(frozen=True)
class Recovery:
    """From one death."""

    notice_s: float
    recover_s: float
    steps: int  # trained twice
    requests: int | None  # for tokens, answered or begun twice; None where nobody counted


class Measured(KilledRun):
    """A run that is watched closely while it is disturbed."""

    def measure(self, victim: str, point: str) -> Recovery:
        self.until(lambda: self.version >= 1, "the first step")
        self.faults.arm(point)
        self.until(lambda: self.faults.is_reached(point), f"{point}, where {victim} is to be killed")
        process = self.find(victim)
        before, asked = self._log_sizes(), self._asked_twice()
        began = time.monotonic()
        self.kill(victim, process)
        noticed = time.monotonic() - began if victim == "launcher" else None  # by then all had ended
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
        twice = self._asked_twice()
        found = Recovery(
            noticed if noticed is not None else recovered,
            recovered,
            sum(repeated),
            None if twice is None or asked is None else twice - asked,
        )
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

    @property
    def asked_log(self) -> Path:
        return self.folder / "asked.log"

    def _asked_twice(self) -> int | None:
        if not self.asked_log.exists():
            return None
        lines = self.asked_log.read_text().splitlines()
        return len(lines) - len(Counter(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--real", action="store_true", help="vLLM instead of the scripted engine")
    parser.add_argument("--victims", nargs="+", default=VICTIMS)
    parser.add_argument("--phases", nargs="+", default=list(PHASES))
    parser.add_argument("--folder", type=Path, default=None)
    args, flags = parser.parse_known_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="recovery-"))
    lines = [
        "| killed | while | noticed after | next new step after | steps trained again | requests asked again |",
        "|---|---|---|---|---|---|",
    ]
    for victim in args.victims:
        for phase, found in measure_all(victim, args.phases, args.times, folder, args.real, flags).items():
            lines.append(_row(victim, phase, found))
    told = "\n".join([*lines, "", _how(args.times, args.real)])
    print(told)
    return 0


def measure_all(
    victim: str, phases: list[str], times: int, folder: Path, real: bool, flags: list[str]
) -> dict[str, list[Recovery]]:
    """All phases of one victim, in one run."""
    command = REAL if real else SCRIPTED
    ranks = 2 if victim.startswith("trainer") else 1
    run = Measured(folder / victim.replace(" ", "-"), [], command=command, name=victim, ranks=ranks)
    run.patience_s = 600.0
    run.flags = ["--max-steps", str(STEPS), "--max-async-level", "0", "--trainer.ckpt.keep-last", "2"]
    run.flags += ["--orchestrator.eval.interval", "3", "--trainer.ckpt.interval", "4", *flags]
    if not real:
        run.flags += ["--inference.args", f'{{"asked_log": "{run.asked_log}"}}']
    with open_run(run):
        run.start()
        return {phase: [run.measure(victim, PHASES[phase]) for _ in range(times)] for phase in phases}


def _row(victim: str, phase: str, found: list[Recovery]) -> str:
    requests = [one.requests for one in found if one.requests is not None]
    cells = [
        victim,
        phase,
        f"{statistics.median(one.notice_s for one in found):.1f} s",
        f"{statistics.median(one.recover_s for one in found):.1f} s",
        f"{statistics.median(one.steps for one in found):g}",
        f"{statistics.median(requests):g}" if requests else "-",
    ]
    return f"| {' | '.join(cells)} |"


def _how(times: int, real: bool) -> str:
    engine = "vLLM" if real else "a scripted engine, which comes up in about 3 s where vLLM takes half a minute"
    return (
        f"{f'Medians of {times}' if times > 1 else 'One kill each'}, by `uv run python benchmarks/recovery.py --times "
        f"{times}` on {os.cpu_count()} CPU cores without a GPU, with {engine}. A checkpoint every 4 steps, "
        f"{ROLLOUTS_OF_A_STEP[real]} rollouts a step, two trainer ranks where a trainer dies and one elsewhere. The "
        "launcher is started again by hand, that is, at once; it is noticed when nothing of its run is alive any more. "
        "0.0 s where the one who died had done its part: the version was confirmed without it."
    )


if __name__ == "__main__":
    sys.exit(main())
