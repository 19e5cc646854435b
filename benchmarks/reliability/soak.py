"""One run, disturbed at random: kills (-9) and freezes of random processes, at random moments, often before the run has
got over the one before. Then it must have ended well, with a clean audit and, in a synchronous run, with the weights of
an undisturbed one, to the bit.

    uv run python -m benchmarks.reliability.soak [--blows 50] [--ahead 2] [--ranks 2] [--real] [more flags of `rl`]

The engine is scripted (tests/support/engines/scripted_engine.py); `--real` takes vLLM, and minutes per dozen blows.
Prints a table of the blows and what came of each. Exit code 1 if something was lost.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil

from benchmarks.measuring import command, print_table
from support.runs.scripted_kills import REAL, SCRIPTED, VICTIMS, KilledRun, audit, first_other_version, open_run

FREEZES = 0.3  # share of all blows
AT_ONCE = 0.3  # share of blows that do not wait for the run to get over the one before
UNPROGRESSED = 3  # blows, before a newly trained step is waited for: more in a row may end a run, and should
STEPS_PER_BLOW = {False: 8, True: 2}  # keyed by whether vLLM is real
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


def main(
    *flags: str,
    blows: int = 50,
    seed: int = 0,
    ahead: Annotated[int, "max_async_level; 0 is synchronous"] = 0,
    ranks: int = 2,
    real: Annotated[bool, "vLLM instead of the scripted engine"] = False,
    folder: Path | None = None,
) -> int:
    folder = folder or Path(tempfile.mkdtemp(prefix="soak-"))
    steps, program = blows * STEPS_PER_BLOW[real] + 10, REAL if real else SCRIPTED
    words = ["--max-steps", str(steps), "--max-async-level", str(ahead), *flags]
    undisturbed = KilledRun(folder / "undisturbed", words, command=program, name="undisturbed", ranks=ranks)
    if ahead == 0:
        with open_run(undisturbed):
            undisturbed.start()
            undisturbed.wait(OUTLAST_S)
    words = [*words, "--supervisor.frozen-after-s", str(FROZEN_AFTER_S)]
    run = Soak(folder / "disturbed", words, command=program, name="disturbed", ranks=ranks)
    run.patience_s = RECOVERY_S[real]
    with open_run(run):
        run.disturb(blows, STEPS_PER_BLOW[real], random.Random(seed))
    print_table(("blow", "at", "what", "whom", "version", "newer version after"), map(row_of, run.blows))

    lost = None if ahead else first_other_version(run.run, undisturbed.run)
    audit_code = audit([str(run.run.root)])
    kept = "nothing was lost" + ("" if ahead else f": all {steps} versions are those of an undisturbed run")
    print(lost or kept)
    return 1 if lost or audit_code else 0


def row_of(blow: Blow) -> list[str]:
    over = "never" if blow.over is None else f"{blow.over:.1f} s"
    return [str(blow.number), f"{blow.at:.0f} s", blow.kind, blow.victim, str(blow.version), over]


class Soak(KilledRun):
    """A run that is disturbed to its end."""

    def disturb(self, num_blows: int, steps_per_blow: int, rng: random.Random) -> None:
        """Raises: AssertionError if the run ends too early, or gets stuck."""
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
        process = self.find(victim)  # if it is dead, its successor may need a frozen launcher to be woken first
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


if __name__ == "__main__":
    command(main)
