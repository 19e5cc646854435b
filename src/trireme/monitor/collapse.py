"""Signs of a collapsing run: a table of conditions, what each usually means, and what to try.

Each condition looks at the rows of `metrics.jsonl` alone, so that every reader sees the same: the orchestrator, which
logs the warning and shows it in `/status`, and the launcher's view. A warning is given when its sign appears, and again
only after the sign has been absent for `CALM` rows.

Thresholds are far from what healthy runs show, because frequent false alarms are not read. Most must be exceeded in
each of `STEADY` rows, and are relative to the start of the run if no number fits every model and task.

    row -> Watch.take -> [Warned(name="entropy_collapse", step=41, text="policy/entropy is ...")]
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

from trireme.base.log import get_logger

CALM = 5
"""Rows of the sign's own metrics without it, after which it would be news again."""
FAILURES = "/error_rate"  # ending of a metric that each environment has
LONGEST = 21  # values kept of a metric
START = 3  # first values, whose mean is the start of a metric
STEADY = 3
"""Rows in a row that most signs must hold for: one odd batch is no collapse."""

logger = get_logger("warnings")


class Sign(NamedTuple):
    """One detector and its warning text."""

    name: str
    watched: tuple[str, ...]  # metrics that it looks at; rows with none of them are skipped
    look: Look  # returns what is seen, with values; None if the sign is absent
    meaning: str
    advice: str


class Warned(NamedTuple):
    """One warning."""

    sign: Sign
    step: int
    seen: str  # with its values

    @property
    def name(self) -> str:
        return self.sign.name

    @property
    def text(self) -> str:
        return f"{self.seen}. {self.sign.meaning} {self.sign.advice}"


class History:
    """Values by name, in the order in which they came. What was not finite is NaN."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # names in the newest row
        self._values: dict[str, deque[float]] = {}
        self._starts: dict[str, list[float]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}
        self.names = set(numbers)
        for name, number in numbers.items():
            # Huge values would overflow in sums and deviations, so they count as not finite.
            value = math.nan if number is None or abs(number) > 1e300 else float(number)
            self._values.setdefault(name, deque(maxlen=LONGEST)).append(value)

            start = self._starts.setdefault(name, [])
            if len(start) < START and math.isfinite(value):
                start.append(value)

    def last(self, name: str, count: int = 1) -> list[float]:
        """Return the newest values, oldest first; empty if there are not yet so many."""
        values = self._values.get(name, ())
        return list(values)[-count:] if len(values) >= count else []

    def before(self, name: str, *, skip: int, count: int) -> list[float]:
        """Up to `count` finite values older than the newest `skip`."""
        older = list(self._values.get(name, ()))[:-skip]
        return [value for value in older if math.isfinite(value)][-count:]

    def start(self, name: str) -> float | None:
        """Return the mean of the first values; None before they are all in."""
        start = self._starts.get(name, [])
        return sum(start) / len(start) if len(start) == START else None


# conditions: each returns what is seen, with values, or None

Look = Callable[[History], str | None]
Limit = float | Callable[[float], float]
"""A number, or a function of where the metric began."""
BEGAN_AT = "{mean:.3g}; it began at {start:.3g}"


def stays(metric: str, sentence: str, *, below: Limit = -math.inf, above: Limit = math.inf) -> Look:
    """Return the condition that the newest `STEADY` values are all below a limit, or all above one. NaN is neither.

    Args:
        sentence: a format with `{mean}` of these values, and `{start}`, the mean of the first ones.
    """

    def look(history: History) -> str | None:
        values, start = history.last(metric, STEADY), history.start(metric)
        if not values or (start is None and (callable(below) or callable(above))):
            return None
        low, high = (limit(start or 0.0) if callable(limit) else limit for limit in (below, above))

        if not (all(value < low for value in values) or all(value > high for value in values)):
            return None
        return f"{metric} is {sentence.format(mean=fmean(values), start=start)}"

    return look


def nothing_trained(history: History) -> str | None:
    losses, norms = history.last("loss", 2), history.last("grad_norm", 2)
    if norms and all(norm == 0 for norm in norms) and all(loss == 0 for loss in losses):
        return "loss and grad_norm are 0 for two steps: no token had an advantage"
    entropy = history.last("policy/entropy")
    if "policy/entropy" in history.names and entropy and math.isnan(entropy[0]):
        return "policy/entropy is NaN: the batch had no valid tokens"
    return None


def rollouts_fail(history: History) -> str | None:
    rates = {name: rate for name in history.names if name.endswith(FAILURES) for rate in history.last(name)}
    name, rate = max(rates.items(), key=lambda item: item[1], default=("", 0.0))
    return f"{name} is {rate:.2f}: so many of the attempts that ended fail" if rate >= 0.5 else None


def grad_spike(history: History) -> str | None:
    last, before = history.last("grad_norm"), history.before("grad_norm", skip=1, count=20)
    if not last or len(before) < 8 or median(before) <= 0 or not last[0] > 10 * median(before):
        return None
    return f"grad_norm is {last[0]:.3g}; the median of the {len(before)} steps before is {median(before):.3g}"


def reward_drops(history: History) -> str | None:
    recent, before = history.last("reward/mean", STEADY), history.before("reward/mean", skip=STEADY, count=10)
    if not recent or len(before) < 10:
        return None

    # Compare with the best recent batch, so that a noisy one among them does not look like a fall.
    fall = fmean(before) - max(recent)
    if not (fall > max(0.2 * abs(fmean(before)), 1e-6) and fall > 4 * pstdev(before)):  # the slow `pstdev` comes last
        return None
    return f"reward/mean fell to {fmean(recent):.3g}; the 10 batches before had {fmean(before):.3g}"


def not_finite(history: History) -> str | None:
    for name in ("loss", "grad_norm"):
        last = history.last(name)
        if name in history.names and last and math.isnan(last[0]):
            return f"{name} is not finite"
    skipped = history.last("skipped_update")
    return "skipped_update is 1: the gradient was not finite" if skipped and skipped[0] > 0 else None


def degenerate(history: History) -> str | None:
    for flaw in ("repetition", "gibberish"):
        values = history.last(f"filters/{flaw}_frac", STEADY)
        if values and min(values) >= 0.2:
            return f"filters/{flaw}_frac is {fmean(values):.2f} over {STEADY} batches"
    return None


# what it means, and what to try: after the troubleshooting of the guides that people come from

CALM_DOWN = (
    "Go back to an earlier checkpoint (`trainer.ckpt.resume_step`) and lower `trainer.optim.lr`; more "
    "`orchestrator.rollouts_per_example` and a larger `orchestrator.batch_size` make steps less noisy"
)

SIGNS = (
    Sign(
        "reward_std_zero",
        ("reward/std",),
        stays("reward/std", "{mean:.2g} over 3 batches", below=lambda start: max(1e-6, 0.02 * start)),
        "Where all rewards are the same there is no advantage, and nothing is learned: the task is solved, or far too "
        "hard, or the reward function does not tell answers apart, or all answers have become the same.",
        "Read a few rollouts of the batch. Solved: take harder examples. Never solved: take easier ones or a longer "
        "warm-up (`trireme env check NAME` tells the baseline). Otherwise raise `orchestrator.sampling.temperature`.",
    ),
    Sign(
        "few_groups_with_signal",
        ("groups/signal_frac",),
        stays(
            "groups/signal_frac", "{mean:.2f}: in the other groups of the last 3 batches all rewards agree", below=0.15
        ),
        "Most examples are too easy or too hard for this model: their groups teach nothing, and the steps are noisy.",
        "Set `orchestrator.buffer.online_difficulty_filtering` (refills the batch), or difficulty pools "
        "(`[orchestrator.buffer.pools]`); more `orchestrator.rollouts_per_example`, or finer rewards than 0 and 1.",
    ),
    Sign(
        "nothing_trained",
        ("loss", "grad_norm", "policy/entropy"),
        nothing_trained,
        "All-zero training metrics, or no entropy: usually all rollouts fail or get the same reward, or filters mask "
        "all of them.",
        "Look for errors of environments in logs/orchestrator.stdout, at `rollouts/error_rate`, `groups/signal_frac` "
        "and `filters/masked_frac`; run `trireme env check NAME`.",
    ),
    Sign(
        "rollouts_failing",
        ("rollouts/error_rate",),
        rollouts_fail,
        "The environment or its reward function raises, or is too slow, or the engines refuse its requests. The batch "
        "is filled with what is left, which is slow and may be one-sided.",
        "logs/orchestrator.stdout names the examples and errors. Mend the environment (`trireme env check NAME`); for "
        "timeouts raise `rollout_timeout_s` of its `[[orchestrator.env]]`, or lower its `max_concurrent`.",
    ),
    Sign(
        "entropy_collapse",
        ("policy/entropy",),
        stays("policy/entropy", BEGAN_AT, below=lambda start: max(1e-3, 0.1 * start)),
        "The policy has become nearly deterministic: answers of a group are alike, so it can no longer explore.",
        "Go back to an earlier checkpoint (`trainer.ckpt.resume_step`), lower `trainer.optim.lr`, raise "
        "`trainer.loss.entropy_bonus`, `trainer.loss.beta` or `orchestrator.sampling.temperature`.",
    ),
    Sign(
        "entropy_explosion",
        ("policy/entropy",),
        stays("policy/entropy", BEGAN_AT, above=lambda start: max(3 * start, start + 0.5)),
        "The policy drifts towards noise: answers become incoherent, and the reward usually follows.",
        f"{CALM_DOWN}. Look whether `trainer.loss.entropy_bonus` is too large, and at `mismatch_kl`.",
    ),
    Sign(
        "grad_norm_spike",
        ("grad_norm",),
        grad_spike,
        "One batch pulls much harder than the ones before: an outlier of reward, length or importance ratio. It was "
        "scaled down to `trainer.optim.max_norm`; spikes that come again and again precede divergence.",
        "Lower `trainer.optim.lr` or `trainer.optim.max_norm`; clip (`orchestrator.advantage.clip`, "
        "`orchestrator.advantage.reward_clip`); look at the batch's rewards, `importance_ratio` and `truncated_frac`.",
    ),
    Sign(
        "reward_drop",
        ("reward/mean",),
        reward_drops,
        "A sudden fall of the reward: a step went too far, the data changed (a curriculum stage, another "
        "environment), or the reward function fails.",
        f"See whether `rollouts/error_rate`, `truncated_frac` or `curriculum/stage` moved. {CALM_DOWN}.",
    ),
    Sign(
        "not_finite",
        ("loss", "grad_norm", "skipped_update"),
        not_finite,
        "The step was thrown away and the weights stayed as they were. Once is an accident of numbers; every step is "
        "a run that no longer learns.",
        'Set `trainer.model.optimization_dtype = "float32"`, lower `trainer.optim.lr`, clip rewards '
        "(`orchestrator.advantage.reward_clip`), and look at `importance_ratio`.",
    ),
    Sign(
        "mismatch",
        ("mismatch_kl",),
        stays("mismatch_kl", "{mean:.3g} over 3 steps; at most 0.01 was expected", above=0.01),
        "Trainer and engine give the same tokens other probabilities under the same weights, so the gradient is "
        "off-policy even where the data is fresh.",
        "Use one precision on both sides (`inference.model.dtype`, `trainer.model.optimization_dtype`); choose a loss "
        'that corrects for it (`trainer.loss.type = "tis"` or `"icepop"`); avoid sampling that cuts the distribution '
        "(`top_p`, `top_k`).",
    ),
    Sign(
        "importance_ratio",
        ("importance_ratio",),
        stays("importance_ratio", "{mean:.3g} over 3 steps; 0.8 to 1.25 was expected", below=0.8, above=1.25),
        "The policy that is trained is far from the one that sampled: the data is too old, steps are too large, or "
        "trainer and engine disagree (`mismatch_kl`).",
        "Lower `trainer.optim.lr`, `max_async_level` or `orchestrator.max_off_policy_steps`; or choose a loss for "
        'stale data (`trainer.loss.type = "decoupled"`).',
    ),
    Sign(
        "policy_kl",
        ("policy/kl",),
        stays("policy/kl", "{mean:.3g} over 3 steps; at most 0.2 was expected", above=0.2),
        "The policy moves far within the age of a batch, which is outside what importance weights can mend.",
        "Lower `trainer.optim.lr` or `max_async_level`, or raise `trainer.loss.beta`.",
    ),
    Sign(
        "all_truncated",
        ("truncated_frac",),
        stays("truncated_frac", "{mean:.2f} over 3 batches", above=math.nextafter(0.8, 0.0)),
        "Nearly every answer runs out of tokens before its end, so the reward says little about what was asked.",
        "Raise `orchestrator.sampling.max_tokens` (and `seq_len`), or shorten answers with "
        '`[orchestrator.length_penalty]`; `orchestrator.filters.truncated = "mask"` leaves them out of the gradient.',
    ),
    Sign(
        "degenerate_outputs",
        ("filters/repetition_frac", "filters/gibberish_frac"),
        degenerate,
        "Answers repeat themselves without end or derail: the policy is collapsing, or the reward pays for it.",
        "Read some of them. Go back to an earlier checkpoint (`trainer.ckpt.resume_step`), lower `trainer.optim.lr`, "
        'set `orchestrator.filters.repetition = "drop"` (or `gibberish`), and mend the reward function.',
    ),
)


class Watch:
    """Run all detectors on rows as they come, each as `read_metrics` returns it. A detector that raises ends alone."""

    def __init__(self, signs: Sequence[Sign] = SIGNS) -> None:
        self.warnings: list[Warned] = []
        self._signs = list(signs)
        self._watched = {name for sign in signs for name in sign.watched}
        self._histories: dict[str, History] = {}  # process -> its history: two processes may use one name
        self._calm: dict[str, int] = {}  # name of a sign that was seen -> rows since

    @property
    def lasting(self) -> dict[str, Warned]:
        """Return recent warnings by name. May be called from another thread."""
        newest = {warned.name: warned for warned in list(self.warnings)}
        return {name: newest[name] for name in list(self._calm) if name in newest}

    def take(self, row: Mapping[str, Any]) -> list[Warned]:
        """Return the warnings that this row triggers first."""
        history = self._histories.setdefault(str(row.get("process")), History())
        history.add({name: row[name] for name in row if name in self._watched or name.endswith(FAILURES)})

        # A sign without any of its metrics in this row is neither seen nor absent: the row is not about it.
        fresh = []
        for sign in [sign for sign in self._signs if not history.names.isdisjoint(sign.watched)]:
            try:
                seen = sign.look(history)
            except Exception:
                logger.warning(
                    "the sign %s could not be looked for; it is left out from now on", sign.name, exc_info=True
                )
                self._signs.remove(sign)
                continue

            # Warn when a sign appears. It can warn again once it was absent for `CALM` rows.
            if seen is not None:
                if sign.name not in self._calm:
                    fresh.append(Warned(sign, row["step"], seen))
                self._calm[sign.name] = 0
            elif sign.name in self._calm:
                self._calm[sign.name] += 1
                if self._calm[sign.name] >= CALM:
                    del self._calm[sign.name]

        self.warnings += fresh
        return fresh
