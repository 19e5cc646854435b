"""One run, disturbed at random: kills (-9) and freezes of random processes, at random moments, often before the run has
got over the one before. Then it must have ended well, with a clean audit and, in a synchronous run, with the weights of
an undisturbed one, to the bit.

    uv run python benchmarks/soak.py [--blows 50] [--seed 0] [--ahead 2] [--ranks 2] [--real] [more flags of `rl`]

The engine is scripted (tests/scripted_engine.py); `--real` takes vLLM, and minutes per dozen blows. Prints a table of
the blows and what came of each. Exit code 1 where something was lost.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from scripted_kills import REAL, SCRIPTED, VICTIMS, KilledRun, audit, find, first_other_version, open_run

FREEZES = 0.3  # share of all blows
AT_ONCE = 0.3  # share of blows that do not wait for the run to get over the one before
UNPROGRESSED = 3  # blows, before a newly trained step is waited for: more in a row may end a run, and should
STEPS_PER_BLOW = {False: 8, True: 2}  # by whether vLLM is real
FROZEN_AFTER_S = 3.0
RECOVERY_S = {False: 180.0, True: 600.0}
OUTLAST_S = 3600.0


@dataclass
class Blow:
    """What was done to whom, and when the run had got over it."""

    number: int
    at: float  # seconds after the run's start
    victim: str
    kind: str
    version: int  # newest then
    over: float | None = None  # seconds until a newer version was confirmed, whatever else was done meanwhile


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blows", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ahead", type=int, default=0, help="max_async_level; 0 is synchronous")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--real", action="store_true", help="vLLM instead of the scripted engine")
    parser.add_argument("--folder", type=Path, default=None)
    args, flags = parser.parse_known_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    steps = args.blows * STEPS_PER_BLOW[args.real] + 10
    flags = ["--max-steps", str(steps), "--max-async-level", str(args.ahead), *flags]
    command = REAL if args.real else SCRIPTED
    undisturbed = KilledRun(folder / "undisturbed", flags, command=command, name="undisturbed", ranks=args.ranks)
    if args.ahead == 0:
        with open_run(undisturbed):
            undisturbed.start()
            undisturbed.wait(OUTLAST_S)
    flags += ["--supervisor.frozen-after-s", str(FROZEN_AFTER_S)]
    run = KilledRun(folder / "disturbed", flags, command=command, name="disturbed", ranks=args.ranks)
    run.patience_s = RECOVERY_S[args.real]
    soak = Soak(run, args.blows, STEPS_PER_BLOW[args.real], random.Random(args.seed))
    with open_run(run):
        soak.go()
    Console(width=120).print(soak.table())
    lost = None if args.ahead else first_other_version(run.run, undisturbed.run)
    audited = audit(run.run)
    print(audited.stdout + audited.stderr)
    print(
        lost or "nothing was lost" + ("" if args.ahead else f": all {steps} versions are those of an undisturbed run")
    )
    return 1 if lost or audited.returncode else 0


class Soak:
    """Disturbs one run to its end."""

    def __init__(self, run: KilledRun, num_blows: int, steps_per_blow: int, rng: random.Random):
        self._run = run
        self._num_blows = num_blows
        self._steps_per_blow = steps_per_blow
        self._rng = rng
        self._began = time.monotonic()
        self._thawing: list[tuple[float, psutil.Process]] = []
        self.blows: list[Blow] = []

    def go(self) -> None:
        """Raises AssertionError where the run ends too early, or gets stuck."""
        self._run.start()
        self._began = time.monotonic()
        for number in range(1, self._num_blows + 1):
            self._await_turn(number)
            self._strike(number)
        self._until(lambda: all(blow.over is not None for blow in self.blows), "the run to get over everything")
        self._run.wait(OUTLAST_S)

    def _await_turn(self, number: int) -> None:
        """Usually some step of this blow's share of all steps; sometimes soon after the blow before."""
        is_at_once = self._rng.random() < AT_ONCE and number > 1
        open_blows = [blow for blow in self.blows if blow.over is None]
        step = (number - 1) * self._steps_per_blow + self._rng.randrange(self._steps_per_blow)
        if not is_at_once or len(open_blows) >= UNPROGRESSED:
            self._until(lambda: not self._open(), f"blow {number}: the run to get over the last one")
            self._until(lambda: self._run.version >= step, f"version {step}, for blow {number}")
        until = time.monotonic() + self._rng.uniform(0.0, 6.0 if is_at_once else 0.3)
        self._until(lambda: time.monotonic() >= until, "the moment to come")

    def _strike(self, number: int) -> None:
        victim = self._rng.choice(VICTIMS if self._run.ranks > 1 else [v for v in VICTIMS if v != "trainer rank 1"])
        kind = "freeze" if self._rng.random() < FREEZES else "kill"
        process = self._find(victim)
        self.blows.append(Blow(number, time.monotonic() - self._began, victim, kind, self._run.version))
        self._run.say(f"{number}: {kind} {victim} at version {self._run.version}")
        with suppress(psutil.NoSuchProcess):  # dead already, by a blow before
            if kind == "kill":
                self._run.kill(victim, process)
                return
            process.send_signal(signal.SIGSTOP)
        if victim == "launcher":  # nobody watches the watchman: it is woken again
            self._thawing.append((time.monotonic() + FROZEN_AFTER_S, process))

    def _find(self, victim: str) -> psutil.Process:
        """Waits where it is dead: its successor may need a frozen launcher to be woken first."""
        found: list[psutil.Process | None] = []

        def look() -> bool:
            found.append(find(victim, self._run.launcher, self._run.ranks))
            return found[-1] is not None

        self._until(look, f"a living {victim}")
        assert found[-1] is not None
        return found[-1]

    def _until(self, condition: object, what: str) -> None:
        assert callable(condition)

        def look() -> bool:
            self._note_progress()
            self._thaw()
            return bool(condition())

        self._run.until(look, what)

    def _open(self) -> list[Blow]:
        return [blow for blow in self.blows if blow.over is None]

    def _note_progress(self) -> None:
        version, now = self._run.version, time.monotonic() - self._began
        for blow in self._open():
            if version > blow.version:
                blow.over = now - blow.at

    def _thaw(self) -> None:
        due = [(at, process) for at, process in self._thawing if time.monotonic() >= at]
        for entry in due:
            self._thawing.remove(entry)
            with suppress(psutil.NoSuchProcess):  # killed meanwhile
                entry[1].send_signal(signal.SIGCONT)

    def table(self) -> Table:
        table = Table("blow", "at", "what", "whom", "version", "newer version after")
        for blow in self.blows:
            over = "never" if blow.over is None else f"{blow.over:.1f} s"
            table.add_row(str(blow.number), f"{blow.at:.0f} s", blow.kind, blow.victim, str(blow.version), over)
        return table


if __name__ == "__main__":
    sys.exit(main())
