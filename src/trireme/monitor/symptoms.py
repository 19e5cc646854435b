"""The detectors of a collapse: each returns what it sees, with values, or None.

Thresholds are far from what healthy runs show, because frequent false alarms are not read. Most must be exceeded in
each of `STEADY` rows, and are relative to the start of the run where no number fits every model and task.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

LONGEST = 48  # values kept of a metric
START = 3  # values that say where it began


class History:
    """Values by name, in the order in which they came. What was not finite is NaN."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # of the newest row
        self._values: dict[str, deque[float]] = {}
        self._starts: dict[str, list[float]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}
        self.names = set(numbers)
        for name, number in numbers.items():
            value = math.nan if number is None else float(number)
            self._values.setdefault(name, deque(maxlen=LONGEST)).append(value)
            start = self._starts.setdefault(name, [])
            if len(start) < START and math.isfinite(value):
                start.append(value)

    def last(self, name: str, count: int = 1) -> list[float]:
        """The newest values, oldest first; empty where there are not yet so many."""
        values = self._values.get(name, ())
        return list(values)[-count:] if len(values) >= count else []

    def before(self, name: str, *, skip: int, count: int) -> list[float]:
        """Up to `count` finite values older than the newest `skip`."""
        older = list(self._values.get(name, ()))[:-skip]
        return [value for value in older if math.isfinite(value)][-count:]

    def start(self, name: str) -> float | None:
        """Mean of the first values; None before they are all in."""
        start = self._starts.get(name, [])
        return sum(start) / len(start) if len(start) == START else None


STEADY = 3
"""Rows in a row that most signs must hold for: one odd batch is no collapse."""

LOOK_BACK = 45
"""Batches that a slow decline is looked for in."""


def same_rewards(history: History) -> str | None:
    stds, start = history.last("reward/std", STEADY), history.start("reward/std")
    if not stds or max(stds) > max(1e-6, 0.02 * (start or 0.0)):
        return None
    return f"reward/std is {stds[-1]:.2g} over {STEADY} batches, whose rewards are all {_value(history, 'reward/mean')}"


def few_groups_with_signal(history: History) -> str | None:
    shares = history.last("groups/signal_frac", STEADY)
    if not shares or not max(shares) < 0.15:
        return None
    return (
        f"groups/signal_frac is {fmean(shares):.2f}: in the other groups of the last {STEADY} batches all rewards agree"
    )


def nothing_trained(history: History) -> str | None:
    losses, norms = history.last("loss", 2), history.last("grad_norm", 2)
    if norms and all(norm == 0 for norm in norms) and all(loss == 0 for loss in losses):
        return "loss and grad_norm are 0 for two steps: no token had an advantage"
    entropy = history.last("policy/entropy")
    if "policy/entropy" in history.names and entropy and math.isnan(entropy[0]):
        return "policy/entropy is NaN: the batch had no valid tokens"
    return None


def rollouts_fail(history: History) -> str | None:
    rates = {name: rate for name in history.names if name.endswith("/error_rate") for rate in history.last(name)}
    name, rate = max(rates.items(), key=lambda item: item[1], default=("", 0.0))
    return f"{name} is {rate:.2f}: so many of the attempts that ended fail" if rate >= 0.5 else None


def entropy_gone(history: History) -> str | None:
    values, start = history.last("policy/entropy", STEADY), history.start("policy/entropy")
    if not values or start is None or not max(values) < max(1e-3, 0.1 * start):
        return None
    return f"policy/entropy is {fmean(values):.3g}; it began at {start:.3g}"


def entropy_explodes(history: History) -> str | None:
    values, start = history.last("policy/entropy", STEADY), history.start("policy/entropy")
    if not values or start is None or not min(values) > max(3 * start, start + 0.5):
        return None
    return f"policy/entropy is {fmean(values):.3g}; it began at {start:.3g}"


def grad_spike(history: History) -> str | None:
    last, before = history.last("grad_norm"), history.before("grad_norm", skip=1, count=20)
    if not last or len(before) < 8 or median(before) <= 0 or not last[0] > 10 * median(before):
        return None
    return f"grad_norm is {last[0]:.3g}; the median of the {len(before)} steps before is {median(before):.3g}"


def reward_drops(history: History) -> str | None:
    recent, before = history.last("reward/mean", STEADY), history.before("reward/mean", skip=STEADY, count=10)
    if not recent or len(before) < 10:
        return None
    fall = fmean(before) - max(recent)
    if not fall > max(4 * _spread(before), 0.2 * abs(fmean(before)), 1e-6):
        return None
    return f"reward/mean fell to {fmean(recent):.3g}; the 10 batches before had {fmean(before):.3g}"


def reward_declines(history: History) -> str | None:
    """Detect a slow decline: half of the reward's gain is lost again."""
    start, values = history.start("reward/mean"), history.last("reward/mean", LOOK_BACK)
    if start is None or not values:
        return None
    best = max(fmean(values[at : at + 10]) for at in range(0, LOOK_BACK - 10, 5))
    now, spread = fmean(values[-10:]), _spread(values[-10:])
    if best - start <= 3 * spread or best - now <= max(0.5 * (best - start), 2 * spread):
        return None
    return f"reward/mean is {now:.3g} over 10 batches; it began at {start:.3g} and had been at {best:.3g}"


def not_finite(history: History) -> str | None:
    for name in ("loss", "grad_norm"):
        last = history.last(name)
        if name in history.names and last and math.isnan(last[0]):
            return f"{name} is not finite"
    skipped = history.last("skipped_update")
    return "skipped_update is 1: the gradient was not finite" if skipped and skipped[0] > 0 else None


def mismatch(history: History) -> str | None:
    values = history.last("mismatch_kl", STEADY)
    if not values or not min(values) > 0.01:
        return None
    return f"mismatch_kl is {fmean(values):.3g} over {STEADY} steps; at most 0.01 was expected"


def ratio_off(history: History) -> str | None:
    values = history.last("importance_ratio", STEADY)
    if not values or not (max(values) < 0.8 or min(values) > 1.25):
        return None
    return f"importance_ratio is {fmean(values):.3g} over {STEADY} steps; 0.8 to 1.25 was expected"


def policy_kl(history: History) -> str | None:
    values = history.last("policy/kl", STEADY)
    if not values or not min(values) > 0.2:
        return None
    return f"policy/kl is {fmean(values):.3g} over {STEADY} steps; at most 0.2 was expected"


def few_effective_samples(history: History) -> str | None:
    values = history.last("ess", STEADY)
    if not values or not max(values) < 0.3:
        return None
    return f"ess is {fmean(values):.2f} over {STEADY} steps: the importance weights of few tokens outweigh the others"


def tokens_masked(history: History) -> str | None:
    values = history.last("masked_frac", STEADY)
    if not values or not min(values) > 0.3:
        return None
    return f"masked_frac is {fmean(values):.2f} over {STEADY} steps: so many tokens give no gradient"


def stale(history: History) -> str | None:
    values = history.last("lag/beyond_frac", STEADY)
    if not values or not min(values) > 0.5:
        return None
    return (
        f"lag/beyond_frac is {fmean(values):.2f} over {STEADY} batches: so many tokens are older than max_async_level"
    )


def truncated(history: History) -> str | None:
    values = history.last("truncated_frac", STEADY)
    if not values or not min(values) >= 0.8:
        return None
    return f"truncated_frac is {fmean(values):.2f} over {STEADY} batches"


def degenerate(history: History) -> str | None:
    for flaw in ("repetition", "gibberish"):
        values = history.last(f"filters/{flaw}_frac", STEADY)
        if values and min(values) >= 0.2:
            return f"filters/{flaw}_frac is {fmean(values):.2f} over {STEADY} batches"
    return None


def answers_vanish(history: History) -> str | None:
    values, start = history.last("tokens/completion_mean", STEADY), history.start("tokens/completion_mean")
    if not values or start is None or not max(values) < 0.1 * start:
        return None
    return f"tokens/completion_mean is {fmean(values):.1f}; it began at {start:.1f}"


def _value(history: History, name: str) -> str:
    last = history.last(name)
    return f"{last[0]:.3g}" if last else "the same"


def _spread(values: list[float]) -> float:
    """Return the standard deviation. `statistics.stdev` uses fractions and is a hundred times slower."""
    mean = fmean(values)
    return math.sqrt(fmean((value - mean) ** 2 for value in values))
