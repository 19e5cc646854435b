"""Checks of every token of a batch: its version, its lag, and its training target, recomputed from rewards and tokens.

R rollouts of a batch, S samples, T tokens of all of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trireme.algo.advantage import Baselines, Estimator
from trireme.algo.filters import ZERO_ADVANTAGE, flaw_with
from trireme.algo.rules import Rules
from trireme.base.errors import ConfigError
from trireme.journal.records import BatchRecord, Rollout
from trireme.journal.targets import advantages_of, by_group, estimator_of, flaws_of, is_zero, why_not_worth_it
from trireme.messages import COLUMNS, Tokens
from trireme.tools.audit.report import Findings

HIGHEST_LOGPROB = 1e-3
"""Above 0 only by rounding."""


@dataclass(frozen=True)
class Columns:
    """The tokens of a batch, concatenated."""

    lengths: np.ndarray  # [S]
    rollout_of: np.ndarray  # [S] index in the batch
    tokens: Tokens  # [T]

    def per_token(self, values_R: np.ndarray) -> np.ndarray:
        """Return [T] each rollout's value at each of its tokens."""
        return np.repeat(values_R[self.rollout_of], self.lengths)

    def per_rollout(self, values_T: np.ndarray, num_rollouts: int) -> np.ndarray:
        """Return [R] sums over the tokens of each rollout."""
        owners = np.repeat(self.rollout_of, self.lengths)
        return np.bincount(owners, weights=values_T, minlength=num_rollouts)


def read_columns(record: BatchRecord, findings: Findings) -> Columns | None:
    """Concatenate a batch's columns; None where there are none, or where they do not fit together."""
    samples = [(number, sample) for number, one in enumerate(record.rollouts) for sample in one.samples]
    for number, sample in samples:
        for name, (dtype, _) in COLUMNS.items():
            column = getattr(sample, name)
            if column.dtype == dtype and len(column) == sample.length:
                continue
            add_rollout(
                findings,
                record.step,
                record.rollouts[number],
                f" has {len(column)} values of {column.dtype} in `{name}`",
                expected=f"{sample.length} of each, as there are `ids`, of the types in `messages.COLUMNS`",
                meaning="Tokens, masks and logprobs do not belong together. This batch is not looked at further.",
            )
            return None
    if not samples:
        return None
    return Columns(
        lengths=np.array([sample.length for _, sample in samples]),
        rollout_of=np.array([number for number, _ in samples]),
        tokens=Tokens(**{name: np.concatenate([getattr(sample, name) for _, sample in samples]) for name in COLUMNS}),
    )


def add_rollout(findings: Findings, step: int, rollout: Rollout, found: str, *, expected: str, meaning: str) -> None:
    """Report a rollout of a batch."""
    where = f"batch {step}: group {rollout.group}, place {rollout.place}"
    findings.add("tokens", step, f"{where}{found}", expected=expected, meaning=meaning)


def add_token(
    record: BatchRecord, columns: Columns, findings: Findings, wrong: np.ndarray, column: str, expected: str
) -> None:
    """Report the first token with a wrong value in a column, and the number of such tokens.

    Args:
        wrong: [T] bool.
    """
    if not wrong.any():
        return
    first, ends = int(np.argmax(wrong)), np.cumsum(columns.lengths)
    sample = int(np.searchsorted(ends, first, side="right"))
    place = first - int(ends[sample] - columns.lengths[sample])
    value = getattr(columns.tokens, column)[first]
    more = f" (and {int(wrong.sum()) - 1} more such tokens)" if wrong.sum() > 1 else ""
    add_rollout(
        findings,
        record.step,
        record.rollouts[int(columns.rollout_of[sample])],
        f": token {place} has {value:.6g} in `{column}`{more}",
        expected=expected,
        meaning="The step was not trained on what was sampled, or by other weights than are known. Look at this "
        f"rollout in journal/batch_{record.step:06d}.msgpack.",
    )


class TokenAudit:
    """Check each batch by itself, and collect the versions that were used."""

    def __init__(self, is_confirmed: Callable[[int], bool], findings: Findings) -> None:
        self.num_trained = 0
        self.lag: tuple[int, int] | None = None  # lowest and highest
        self.versions: set[int] = set()
        self._is_confirmed = is_confirmed
        self._findings = findings

    def take(self, record: BatchRecord, columns: Columns, rules: Rules) -> None:
        tokens, step = columns.tokens, record.step
        trained, versions = tokens.loss_mask == 1, tokens.versions
        lags = step - versions
        allowed = 0 if rules.max_async_level == 0 else rules.max_off_policy_steps
        why = "max_async_level = 0" if rules.max_async_level == 0 else f"max_off_policy_steps = {allowed}"
        no_logprob = ~np.isfinite(tokens.logprobs) | (tokens.logprobs > HIGHEST_LOGPROB)
        used = {int(version) for version in np.unique(versions[trained]) if version >= 0}
        checks = [
            (tokens.loss_mask > 1, "loss_mask", "0 or 1"),
            (tokens.ids < 0, "ids", "0 or above"),
            (trained & (versions < 0), "versions", "a version of 0 or above where the token is trained on"),
            (~trained & (versions != -1), "versions", "-1 where the engine did not sample the token"),
            (~trained & (tokens.advantages != 0), "advantages", "0 where the token is not trained on"),
            (~trained & (tokens.logprobs != 0), "logprobs", "0 where the engine did not sample the token"),
            (trained & no_logprob, "logprobs", "the logarithm of a probability"),
            (trained & (lags < 0), "versions", f"at most {step}: a later version is trained from this very batch"),
            (trained & (lags > allowed), "versions", f"at least {step - allowed} ({why})"),
        ]
        for version in sorted(used):
            if not self._is_confirmed(version):
                file = f"journal/version_{version:06d}.msgpack"
                expected = f"a version that engines confirmed: {file} is missing or empty"
                checks.append((trained & (versions == version), "versions", expected))
        for wrong, column, expected in checks:
            add_token(record, columns, self._findings, wrong, column, expected)
        if trained.any():
            lowest, highest = int(lags[trained].min()), int(lags[trained].max())
            before = self.lag or (lowest, highest)
            self.lag = min(lowest, before[0]), max(highest, before[1])
        self.versions |= used
        for rollout, count in zip(record.rollouts, columns.per_rollout(trained, len(record.rollouts)), strict=True):
            longest = max((sample.length for sample in rollout.samples), default=0)
            if count == 0:
                found, expected = "has no token that is trained on", "at least one sampled token"
            elif rollout.num_sampled not in (None, count):  # older journals lack it, and the next one
                found, expected = f"has {rollout.num_sampled} for `num_sampled`", f"{count}, as its loss masks say"
            elif rollout.num_tokens not in (None, longest):
                found, expected = f"has {rollout.num_tokens} for `num_tokens`", f"{longest}, its longest sample"
            elif rollout.temperature != rules.temperature:
                found, expected = f"was sampled at temperature {rollout.temperature}", f"{rules.temperature}"
            else:
                continue
            meaning = "The step was not trained on what the batch claims. Look at this rollout."
            add_rollout(self._findings, step, rollout, f" {found}", expected=expected, meaning=meaning)
            break
        masked_R = np.array([rollout.masked is not None for rollout in record.rollouts])
        self.num_trained += int((trained & ~columns.per_token(masked_R)).sum())


class TargetAudit:
    """Recompute targets batch by batch; follow the running means of `ema` from batch to batch."""

    def __init__(self, findings: Findings, run_code: str | None = None) -> None:
        """Start with the first batch.

        Args:
            run_code: the one function ("module:name") that may be called for advantages where the journal names it.
        """
        self._findings = findings
        self._run_code = run_code
        self._baselines: Baselines = {}
        self._custom: dict[tuple[str | None, str], Estimator | None] = {}  # None: cannot be called here

    def take(self, record: BatchRecord, columns: Columns, rules: Rules, *, after_gap: bool) -> None:
        """Check a batch.

        Args:
            after_gap: the batch before could not be read, so the running means are unknown.
        """
        if after_gap:
            self.skip(record)
        for rollout in record.rollouts:
            if trouble := _misfit(rollout, rules):
                meaning = (
                    "What its tokens were trained towards cannot be worked out again. This batch is not looked at "
                    "further."
                )
                found, expected = trouble
                add_rollout(self._findings, record.step, rollout, f" {found}", expected=expected, meaning=meaning)
                self.skip(record)
                return
        custom = self._estimator(rules)
        cannot = (rules.advantage == "ema" and after_gap) or (rules.advantage == "custom" and custom is None)
        if not cannot:
            self._compare_advantages(record, columns, rules, custom)
        if rules.filters is not None:  # else: written before flaws were
            self._compare_flaws(record, rules)
            self._compare_worth(record, rules)

    def skip(self, record: BatchRecord) -> None:
        """Skip a batch that cannot be checked, and continue from the journal's own state."""
        self._baselines = dict(record.state.baselines)

    def _estimator(self, rules: Rules) -> Estimator | None:
        """Return the function that the journal names, if the user has named it too. Otherwise the author of a run
        folder could run any code on this machine.
        """
        if rules.advantage != "custom":
            return None
        which = rules.advantage_path, repr(rules.advantage_args)
        if which not in self._custom:
            self._custom[which] = None
            path, note = rules.advantage_path, "advantages of a custom function are not compared"
            if path != self._run_code:
                self._findings.note(
                    f"{note}: the journal names {path}, which is called only with `--run-code` and its name"
                )
            else:
                try:
                    self._custom[which] = estimator_of(rules)
                except ConfigError as error:
                    self._findings.note(f"{note}: {error}")
        return self._custom[which]

    def _compare_advantages(
        self, record: BatchRecord, columns: Columns, rules: Rules, custom: Estimator | None
    ) -> None:
        """Compare in double precision, then rounded as in the journal."""
        try:
            per_rollout, due = advantages_of(record.rollouts, rules, self._baselines, custom=custom)
        except ConfigError as error:
            self._findings.note(f"advantages of batch {record.step} are not compared: {error}")
            return
        expected = np.concatenate([part for per_sample in per_rollout for part in per_sample])
        trained = columns.tokens.loss_mask == 1
        wrong = trained & ~np.isclose(columns.tokens.advantages, expected, rtol=1e-5, atol=1e-6)
        if wrong.any():
            by = f"{expected[int(np.argmax(wrong))]:.6g}, {_kind(rules)}"
            add_token(record, columns, self._findings, wrong, "advantages", by)
        self._baselines, found = due, record.state.baselines
        for name in sorted(found.keys() | due.keys()):
            if name in found and name in due and np.isclose(found[name], due[name], rtol=1e-9, atol=1e-12):
                continue
            self._findings.add(
                "tokens",
                record.step,
                f"batch {record.step}: the journal's running mean reward of {name} is {found.get(name, 'unknown')}",
                expected=f"{due.get(name, 'none')}, by the rewards up to this batch",
                meaning="A run that resumes from here would compare rewards with another one. Look at "
                "`state.baselines` of this batch.",
            )
            return

    def _compare_flaws(self, record: BatchRecord, rules: Rules) -> None:
        assert rules.filters is not None
        for rollout in record.rollouts:
            flaws = flaws_of(rollout, rules)
            if is_zero([sample.advantages for sample in rollout.samples]):
                flaws.append(ZERO_ADVANTAGE)
            shown = ", ".join(flaws) or "none"
            masked = flaw_with("mask", rollout.flaws, rules.filters)
            if rollout.flaws != flaws:
                found = f"has the flaws {', '.join(rollout.flaws) or 'none'}"
                expected = f"{shown}, by its tokens"
            elif rollout.masked != masked:
                found = f"is masked for {rollout.masked or 'nothing'}"
                expected = f"{masked or 'nothing'}, by `[orchestrator.filters]` and its flaws ({shown})"
            elif flaw := flaw_with("drop", rollout.flaws, rules.filters):
                found, expected = f"is trained though it is flawed: {flaw}", "its group dropped"
            else:
                continue
            meaning = "The step was trained on a rollout that should be left out, or the reverse. Look at this rollout."
            add_rollout(self._findings, record.step, rollout, f" {found}", expected=expected, meaning=meaning)
            return

    def _compare_worth(self, record: BatchRecord, rules: Rules) -> None:
        for group in by_group(record.rollouts).values():
            if (reason := why_not_worth_it(group, rules)) is not None:
                add_rollout(
                    self._findings,
                    record.step,
                    group[0],
                    f" is trained, and there is {reason}",
                    expected="its group dropped, by `[orchestrator.buffer]`",
                    meaning="A place in the batch was lost to it. Look at the rewards of this group.",
                )
                return


def _misfit(rollout: Rollout, rules: Rules) -> tuple[str, str] | None:
    """Return what is given per token and does not belong to the tokens, and what was expected."""
    columns = [
        ("token_rewards", rollout.token_rewards, False),
        ("teacher", rollout.teacher, rules.teacher_weight is not None),
    ]
    lengths = [sample.length for sample in rollout.samples]
    for name, parts, is_due in columns:
        if not parts and not is_due:
            continue
        if [len(part) for part in parts] != lengths:
            return f"has `{name}` for {[len(part) for part in parts]} tokens", f"for {lengths}, as its samples have"
        if any(np.isinf(part).any() for part in parts):
            return f"has infinite values in `{name}`", "numbers, or NaN where there is none"
    owned = sorted(place for run in rollout.runs for place in run.samples)
    if rollout.runs and owned != list(range(len(lengths))):
        return f"has `runs` of the samples {owned[:20]}", f"each of its {len(lengths)} samples in one run"
    for sample, part in zip(rollout.samples, rollout.teacher, strict=False):
        if (sample.loss_mask.astype(bool) & np.isnan(part)).any():
            return "has a token that is trained on without a value in `teacher`", "the teacher's logprob of each"
    return None


def _kind(rules: Rules) -> str:
    """Describe what the numbers follow from.

    Example:
        "the group_mean of the group's rewards"
    """
    of = "the batch's" if rules.advantage in ("ema", "batch", "group_batch", "custom") else "the group's"
    clipped = "clipped" if rules.reward_clip is not None else ""
    penalised = "with the length penalty" if rules.length_penalty is not None else ""
    more = " and ".join(filter(None, (clipped, penalised)))
    after = ", with the teacher's term" if rules.teacher_weight is not None else ""
    return f"the {rules.advantage} of {of} rewards {more}".rstrip() + after
