"""Detectors for a collapsing run, with warnings: what is seen, what it usually means, what to try.

Each detector looks at the rows of `metrics.jsonl` alone, so that every reader sees the same: the orchestrator, which
logs the warning and shows it in `/status`, and the launcher's view. A warning is given when its sign appears, and again
only after the sign has been absent for `CALM` rows.

    row -> Watch.take -> [Warned(name="entropy_collapse", step=41, text="policy/entropy is ...")]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trireme.base.log import get_logger
from trireme.monitor import symptoms
from trireme.monitor.symptoms import History

CALM = 5
"""Rows of the sign's own metrics without it, after which it would be news again."""

logger = get_logger("warnings")

Look = Callable[[History], str | None]


class Warned(NamedTuple):
    """One warning."""

    name: str
    step: int
    text: str


class Sign(NamedTuple):
    """One detector and its warning text."""

    name: str
    watched: tuple[str, ...]  # metrics: a row without any of them says nothing about it
    look: Look  # what is seen, with values; None where it is not
    meaning: str
    advice: str

    def is_about(self, history: History) -> bool:
        return not history.names.isdisjoint(self.watched)


# what it means, and what to try: after the troubleshooting of the guides that people come from

CALM_DOWN = (
    "Go back to an earlier checkpoint (`trainer.ckpt.resume_step`) and lower `trainer.optim.lr`; more "
    "`orchestrator.rollouts_per_example` and a larger `orchestrator.batch_size` make steps less noisy"
)

SIGNS = (
    Sign(
        "reward_std_zero",
        ("reward/std",),
        symptoms.same_rewards,
        "Where all rewards are the same there is no advantage, and nothing is learned: the task is solved, or far too "
        "hard, or the reward function does not tell answers apart, or all answers have become the same.",
        "Read a few rollouts of the batch. Solved: take harder examples. Never solved: take easier ones or a longer "
        "warm-up (`trireme env check NAME` tells the baseline). Otherwise raise `orchestrator.sampling.temperature`.",
    ),
    Sign(
        "few_groups_with_signal",
        ("groups/signal_frac",),
        symptoms.few_groups_with_signal,
        "Most examples are too easy or too hard for this model: their groups teach nothing, and the steps are noisy.",
        "Set `orchestrator.buffer.online_difficulty_filtering` (refills the batch), or difficulty pools "
        "(`[orchestrator.buffer.pools]`); more `orchestrator.rollouts_per_example`, or finer rewards than 0 and 1.",
    ),
    Sign(
        "nothing_trained",
        ("loss", "grad_norm", "policy/entropy"),
        symptoms.nothing_trained,
        "All-zero training metrics, or no entropy: usually all rollouts fail or get the same reward, or filters mask "
        "all of them.",
        "Look for errors of environments in logs/orchestrator.stdout, at `rollouts/error_rate`, `groups/signal_frac` "
        "and `filters/masked_frac`; run `trireme env check NAME`.",
    ),
    Sign(
        "rollouts_failing",
        ("rollouts/error_rate",),
        symptoms.rollouts_fail,
        "The environment or its reward function raises, or is too slow, or the engines refuse its requests. The batch "
        "is filled with what is left, which is slow and may be one-sided.",
        "logs/orchestrator.stdout names the examples and errors. Mend the environment (`trireme env check NAME`); for "
        "timeouts raise `rollout_timeout_s` of its `[[orchestrator.env]]`, or lower its `max_concurrent`.",
    ),
    Sign(
        "entropy_collapse",
        ("policy/entropy",),
        symptoms.entropy_gone,
        "The policy has become nearly deterministic: answers of a group are alike, so it can no longer explore.",
        "Go back to an earlier checkpoint (`trainer.ckpt.resume_step`), lower `trainer.optim.lr`, raise "
        "`trainer.loss.entropy_bonus`, `trainer.loss.beta` or `orchestrator.sampling.temperature`.",
    ),
    Sign(
        "entropy_explosion",
        ("policy/entropy",),
        symptoms.entropy_explodes,
        "The policy drifts towards noise: answers become incoherent, and the reward usually follows.",
        f"{CALM_DOWN}. Look whether `trainer.loss.entropy_bonus` is too large, and at `mismatch_kl`.",
    ),
    Sign(
        "grad_norm_spike",
        ("grad_norm",),
        symptoms.grad_spike,
        "One batch pulls much harder than the ones before: an outlier of reward, length or importance ratio. It was "
        "scaled down to `trainer.optim.max_norm`; spikes that come again and again precede divergence.",
        "Lower `trainer.optim.lr` or `trainer.optim.max_norm`; clip (`orchestrator.advantage.clip`, "
        "`orchestrator.advantage.reward_clip`); look at the batch's rewards, `importance_ratio` and `truncated_frac`.",
    ),
    Sign(
        "reward_drop",
        ("reward/mean",),
        symptoms.reward_drops,
        "A sudden fall of the reward: a step went too far, the data changed (a curriculum stage, another "
        "environment), or the reward function fails.",
        f"See whether `rollouts/error_rate`, `truncated_frac` or `curriculum/stage` moved. {CALM_DOWN}.",
    ),
    Sign(
        "reward_decline",
        ("reward/mean",),
        symptoms.reward_declines,
        "What was learned is being unlearned: more than half of the gain is lost.",
        f"{CALM_DOWN}. `trainer.loss.beta` above 0, or a smaller `max_async_level`, holds the policy back.",
    ),
    Sign(
        "not_finite",
        ("loss", "grad_norm", "skipped_update"),
        symptoms.not_finite,
        "The step was thrown away and the weights stayed as they were. Once is an accident of numbers; every step is "
        "a run that no longer learns.",
        'Set `trainer.model.optimization_dtype = "float32"`, lower `trainer.optim.lr`, clip rewards '
        "(`orchestrator.advantage.reward_clip`), and look at `importance_ratio`.",
    ),
    Sign(
        "mismatch",
        ("mismatch_kl",),
        symptoms.mismatch,
        "Trainer and engine give the same tokens other probabilities under the same weights, so the gradient is "
        "off-policy even where the data is fresh.",
        "Use one precision on both sides (`inference.model.dtype`, `trainer.model.optimization_dtype`); choose a loss "
        'that corrects for it (`trainer.loss.type = "tis"` or `"icepop"`); avoid sampling that cuts the distribution '
        "(`top_p`, `top_k`).",
    ),
    Sign(
        "importance_ratio",
        ("importance_ratio",),
        symptoms.ratio_off,
        "The policy that is trained is far from the one that sampled: the data is too old, steps are too large, or "
        "trainer and engine disagree (`mismatch_kl`).",
        "Lower `trainer.optim.lr`, `max_async_level` or `orchestrator.max_off_policy_steps`; or choose a loss for "
        'stale data (`trainer.loss.type = "decoupled"`).',
    ),
    Sign(
        "policy_kl",
        ("policy/kl",),
        symptoms.policy_kl,
        "The policy moves far within the age of a batch, which is outside what importance weights can mend.",
        "Lower `trainer.optim.lr` or `max_async_level`, or raise `trainer.loss.beta`.",
    ),
    Sign(
        "low_ess",
        ("ess",),
        symptoms.few_effective_samples,
        "A few tokens with large importance weights decide the step, so it is as noisy as a much smaller batch's.",
        "Lower `max_async_level` or `trainer.optim.lr`, or choose a loss that clips or masks the ratio.",
    ),
    Sign(
        "tokens_masked",
        ("masked_frac",),
        symptoms.tokens_masked,
        "The loss leaves out many tokens, because their importance ratio is outside its band.",
        "As for `importance_ratio`: fresher data or smaller steps; or widen the band (`trainer.loss.ratio_low` and "
        "`trainer.loss.ratio_high`; `trainer.loss.correction_low` and `trainer.loss.correction_high` of a correction "
        "that masks).",
    ),
    Sign(
        "stale",
        ("lag/beyond_frac",),
        symptoms.stale,
        "Rollouts take longer than the steps that overtake them, so most data is older than generation runs ahead.",
        "Lower `orchestrator.oversampling_factor`, give inference more GPUs, shorten rollouts "
        '(`orchestrator.sampling.max_tokens`), or choose a loss for stale data (`trainer.loss.type = "decoupled"`).',
    ),
    Sign(
        "all_truncated",
        ("truncated_frac",),
        symptoms.truncated,
        "Nearly every answer runs out of tokens before its end, so the reward says little about what was asked.",
        "Raise `orchestrator.sampling.max_tokens` (and `seq_len`), or shorten answers with "
        '`[orchestrator.length_penalty]`; `orchestrator.filters.truncated = "mask"` leaves them out of the gradient.',
    ),
    Sign(
        "degenerate_outputs",
        ("filters/repetition_frac", "filters/gibberish_frac"),
        symptoms.degenerate,
        "Answers repeat themselves without end or derail: the policy is collapsing, or the reward pays for it.",
        "Read some of them. Go back to an earlier checkpoint (`trainer.ckpt.resume_step`), lower `trainer.optim.lr`, "
        'set `orchestrator.filters.repetition = "drop"` (or `gibberish`), and mend the reward function.',
    ),
    Sign(
        "answers_vanish",
        ("tokens/completion_mean",),
        symptoms.answers_vanish,
        "Answers have become next to nothing: ending at once is the safest way to avoid a penalty, or gets the reward.",
        "Look whether a short answer is paid (reward function, `[orchestrator.length_penalty]`); go back to an "
        "earlier checkpoint (`trainer.ckpt.resume_step`); `orchestrator.sampling.min_tokens` forbids it for a while.",
    ),
)


class Watch:
    """Run all detectors on rows as they come. Never raises."""

    def __init__(self, signs: Sequence[Sign] = SIGNS) -> None:
        self.warnings: list[Warned] = []
        self._signs = list(signs)
        self._histories: dict[str, History] = {}  # by process: a name may be used by both
        self._calm: dict[str, int] = {}  # name of a sign that was seen -> rows since

    @property
    def lasting(self) -> dict[str, Warned]:
        """Return recent warnings by name. May be called from another thread."""
        newest = {warned.name: warned for warned in list(self.warnings)}
        return {name: newest[name] for name in list(self._calm) if name in newest}

    def take(self, row: Mapping[str, Any]) -> list[Warned]:
        """Return the warnings that this row triggers first."""
        try:
            return self._take(row)
        except Exception:  # whatever stands in that row
            logger.warning("a row of metrics could not be looked at: %.200r", row, exc_info=True)
            return []

    def _take(self, row: Mapping[str, Any]) -> list[Warned]:
        history = self._histories.setdefault(str(row.get("process")), History())
        history.add({name: value for name, value in row.items() if name not in ("step", "process", "time_s")})
        about = [sign for sign in self._signs if sign.is_about(history)]
        fresh = [warned for sign in about if (warned := self._look(sign, history, row)) is not None]
        self.warnings += fresh
        return fresh

    def _look(self, sign: Sign, history: History, row: Mapping[str, Any]) -> Warned | None:
        try:
            seen = sign.look(history)
        except Exception:
            logger.warning("the sign %s could not be looked for; it is left out from now on", sign.name, exc_info=True)
            self._signs.remove(sign)
            return None
        if seen is None:
            if sign.name in self._calm:
                self._calm[sign.name] += 1
                if self._calm[sign.name] >= CALM:
                    del self._calm[sign.name]
            return None
        is_news = sign.name not in self._calm
        self._calm[sign.name] = 0
        text = f"{seen}. {sign.meaning} {sign.advice}"
        return Warned(sign.name, int(row["step"]), text) if is_news else None
