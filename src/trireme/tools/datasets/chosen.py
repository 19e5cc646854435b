"""Which of a run's rollouts are written, read from the journal batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.journal.journal import Journal
from trireme.journal.records import Rollout


@dataclass(frozen=True)
class Chosen:
    """All conditions hold at once; without any, every rollout that was trained on."""

    steps: range | None = None
    env: str | None = None
    least_reward: float | None = None

    def __str__(self) -> str:
        """As it was asked for."""
        asked = {
            "--steps": self.steps and f"{self.steps.start}:{self.steps.stop}",
            "--env": self.env,
            "--min-reward": self.least_reward,
        }
        return " ".join(f"{flag} {value}" for flag, value in asked.items() if value is not None) or "all"

    def takes(self, rollout: Rollout) -> bool:
        return (self.env is None or rollout.env == self.env) and (
            self.least_reward is None or rollout.reward >= self.least_reward
        )


def steps_of(run: Path, chosen: Chosen) -> list[int]:
    """
    Raises:
        ConfigError: the folder is no run's, or has none of the steps.
        JournalCorrupt: one of them is not there, and later ones are.
    """
    journal = Journal(RunPaths(run).journal)
    there = journal.steps()
    if not there:
        raise ConfigError(
            f"{journal.path(0).parent} holds no batch - expected the folder of an `rl` run that has trained. "
            "Check the path; evaluations have their own files, which are JSON lines already."
        )
    steps = journal.require_all(chosen.steps, ways_out="Or write what comes before and after it, with `--steps`.")
    if not steps:
        raise ConfigError(f"The run has steps {there[0]} to {there[-1]}, none of them was asked for. Mend `--steps`.")
    return steps


def batches(run: Path, steps: Sequence[int], chosen: Chosen) -> Iterator[tuple[int, list[Rollout]]]:
    """Step and rollouts, one batch in memory at a time.

    Raises: JournalCorrupt where a batch is not what was written.
    """
    journal = Journal(RunPaths(run).journal)
    for step in steps:
        yield step, [rollout for rollout in journal.read(step).rollouts if chosen.takes(rollout)]
