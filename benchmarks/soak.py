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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from scripted_kills import REAL, SCRIPTED, VICTIMS, KilledRun, audit, first_other_version, open_run

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
    run = Soak(folder / "disturbed", flags, command=command, name="disturbed", ranks=args.ranks)
    run.patience_s = RECOVERY_S[args.real]
    with open_run(run):
        run.disturb(args.blows, STEPS_PER_BLOW[args.real], random.Random(args.seed))
    Console(width=120).print(run.table())
    lost = None if args.ahead else first_other_version(run.run, undisturbed.run)
    audit_code = audit([str(run.run.root)])
    print(
        lost or "nothing was lost" + ("" if args.ahead else f": all {steps} versions are those of an undisturbed run")
    )
    return 1 if lost or audit_code else 0


class Soak(KilledRun):
    """A run that is disturbed to its end."""

    def disturb(self, num_blows: int, steps_per_blow: int, rng: random.Random) -> None:
        """Raises AssertionError where the run ends too early, or gets stuck."""
        self.blows: list[Blow] = []
        self.thawing: list[tuple[float, psutil.Process]] = []  # when to wake whom
        self.start()
        self.began = time.monotonic()
        for number in range(1, num_blows + 1):
            # Usually at some step of this blow's share of all steps; sometimes soon after the blow before.
            is_at_once = rng.random() < AT_ONCE and number > 1
            step = (number - 1) * steps_per_blow + rng.randrange(steps_per_blow)
            if not is_at_once or len(self.open_blows()) >= UNPROGRESSED:
                self.until(lambda: not self.open_blows(), f"blow {number}: the run to get over the last one")
                self.until_version(step)
            self.linger(rng.uniform(0.0, 6.0 if is_at_once else 0.3))
            self.strike(number, rng)
        self.until(lambda: not self.open_blows(), "the run to get over everything")
        self.wait(OUTLAST_S)

    def strike(self, number: int, rng: random.Random) -> None:
        victim = rng.choice(VICTIMS if self.ranks > 1 else [v for v in VICTIMS if v != "trainer rank 1"])
        kind = "freeze" if rng.random() < FREEZES else "kill"
        process = self.find(victim)  # where it is dead, its successor may need a frozen launcher to be woken first
        self.blows.append(Blow(number, time.monotonic() - self.began, victim, kind, self.version))
        self.say(f"{number}: {kind} {victim} at version {self.version}")
        with suppress(psutil.NoSuchProcess):  # dead already, by a blow before
            if kind == "kill":
                self.kill(victim, process)
                return
            process.send_signal(signal.SIGSTOP)
        if victim == "launcher":  # nobody watches the watchman: it is woken again
            self.thawing.append((time.monotonic() + FROZEN_AFTER_S, process))

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Note progress, and wake launchers that were frozen for long enough, while waiting."""

        def look() -> bool:
            version, now = self.version, time.monotonic()
            for blow in self.open_blows():
                if version > blow.version:
                    blow.over = now - self.began - blow.at
            for entry in [entry for entry in self.thawing if now >= entry[0]]:
                self.thawing.remove(entry)
                with suppress(psutil.NoSuchProcess):  # killed meanwhile
                    entry[1].send_signal(signal.SIGCONT)
            return bool(condition())

        super().until(look, what)

    def until_version(self, version: int) -> None:
        self.until(lambda: self.version >= version, f"version {version}")

    def linger(self, seconds: float) -> None:
        moment = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= moment, "the moment to come")

    def open_blows(self) -> list[Blow]:
        return [blow for blow in self.blows if blow.over is None]

    def table(self) -> Table:
        table = Table("blow", "at", "what", "whom", "version", "newer version after")
        for blow in self.blows:
            over = "never" if blow.over is None else f"{blow.over:.1f} s"
            table.add_row(str(blow.number), f"{blow.at:.0f} s", blow.kind, blow.victim, str(blow.version), over)
        return table


if __name__ == "__main__":
    sys.exit(main())
