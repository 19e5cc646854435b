"""How a run ends, with its exit code and what is said about it."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from trireme.base.errors import FINAL_EXIT_CODES
from trireme.launch.children import Child
from trireme.monitor.in_words import short_time
from trireme.monitor.logs import last_words


@dataclass(frozen=True)
class Done:
    """The orchestrator has left with exit code 0: nothing is left to do."""

    exit_code: int = 0


@dataclass(frozen=True)
class Interrupted:
    """Somebody asked us to stop."""

    signal_number: int

    @property
    def exit_code(self) -> int:
        return 128 + self.signal_number

    def lines(self) -> list[str]:
        return [f"stopped by {signal.Signals(self.signal_number).name}"]


@dataclass(frozen=True)
class Died:
    """A process ended that should not have, for good; the first of `dead` is the one to look at."""

    dead: tuple[Child, ...]
    why_final: str = ""  # why it is not started again, in a sentence

    @property
    def exit_code(self) -> int:
        first = self.dead[0].exit
        return first.code if first is not None and first.code in FINAL_EXIT_CODES else 1

    def lines(self) -> list[str]:
        first, *others = self.dead
        final = f" {self.why_final}" if self.why_final else ""
        lines = [f"{_obituary(first)}{final} All other processes were stopped. Its last words:"]
        lines += [f"    {line}" for line in last_words(first.spec.log, first.log_start) or ["(it said nothing)"]]
        lines.append(f"All of them: {first.spec.log}")
        return lines + [f"{_obituary(child)} Its log: {child.spec.log}" for child in others]


Ending = Done | Interrupted | Died


def _obituary(child: Child) -> str:
    assert child.exit is not None
    after = short_time(child.exit.at - child.started_at)
    verb = "ended too early" if child.exit.code == 0 else "died"
    return f"{child.name} {verb} at {clock_time(child.exit.at)}, {after} after its start: {child.exit}."


def clock_time(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def by_suspicion(child: Child) -> tuple[bool, bool, float]:
    """Sorts several that died between two looks: a killed one first, then one with a final exit code, then the one
    that fell silent first; the others only noticed."""
    assert child.exit is not None
    spoke_at = child.spec.log.stat().st_mtime if child.spec.log.exists() else 0.0
    return child.exit.code >= 0, child.exit.code not in FINAL_EXIT_CODES, spoke_at
