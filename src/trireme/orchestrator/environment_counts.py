"""Count failures of environments and their workers from one batch to the next. Not kept across restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from trireme.orchestrator.environments.pool import Environment

FAILURES = ("timeout", "rollout_error", "score_error", "worker_error")
ENOUGH = 64
"""Rollouts that it takes to estimate an error rate."""


class EnvironmentCounts:
    """Differences of `Environment.counts`, which only grow.

    Example:
        counts.take()  # {"env/wordle/timeout": 3, "env/wordle/worker_death": 1}
        counts.take()  # {}
    """

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self._environments = environments
        self._taken: dict[str, Counter[str]] = {name: Counter() for name in environments}
        self._ended_before: dict[str, int] = dict.fromkeys(environments, 0)

    def take(self) -> dict[str, float]:
        """Return the counts since the last call, without those that are 0."""
        metrics: dict[str, float] = {}
        for name, environment in self._environments.items():
            counts = Counter(environment.counts)
            fresh = counts - self._taken[name]
            self._taken[name], self._ended_before[name] = counts, environment.num_rollouts
            metrics |= {f"env/{name}/{what}": count for what, count in fresh.items()}
        return metrics

    def lately(self) -> dict[str, float]:
        """Return error rates since `take`. They exist while no batch is full: where all rollouts fail, none ever is."""
        rates: dict[str, float] = {}
        for name, environment in self._environments.items():
            failures = sum(environment.counts[what] - self._taken[name][what] for what in FAILURES)
            ended = environment.num_rollouts - self._ended_before[name]
            if ended >= ENOUGH:
                rates[f"env/{name}/error_rate"] = failures / ended
        return rates | ({"rollouts/error_rate": max(rates.values())} if rates else {})
