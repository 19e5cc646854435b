"""Training targets and masks, recomputed from rewards and tokens."""

from __future__ import annotations

import numpy as np

from trireme.algo.advantage import Baselines, Estimator
from trireme.algo.filters import ZERO_ADVANTAGE, flaw_with
from trireme.algo.rules import Rules
from trireme.base.errors import ConfigError
from trireme.journal.records import BatchRecord, Rollout
from trireme.journal.targets import advantages_of, by_group, estimator_of, flaws_of, is_zero, why_not_worth_it
from trireme.tools.audit.findings import Findings
from trireme.tools.audit.tokens import Columns, Refusal, name_of


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
        if self._misfit(record, rules):
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
        which = rules.advantage_path, repr(rules.advantage_args)
        if rules.advantage == "custom" and which not in self._custom:
            self._custom[which] = self._trusted(rules)
        return self._custom.get(which) if rules.advantage == "custom" else None

    def _trusted(self, rules: Rules) -> Estimator | None:
        """Return the function that the journal names, if the user has named it too. Otherwise the author of a run
        folder could run any code on this machine.
        """
        try:
            if rules.advantage_path == self._run_code:
                return estimator_of(rules)
            reason = f"the journal names {rules.advantage_path}, which is called only with `--run-code` and its name"
        except ConfigError as error:
            reason = str(error)
        self._findings.note(f"advantages of a custom function are not compared: {reason}")
        return None

    def _misfit(self, record: BatchRecord, rules: Rules) -> bool:
        """Whether something that is given per token does not belong to the tokens."""
        for rollout in record.rollouts:
            if (trouble := _misfit(rollout, rules)) is None:
                continue
            self._report(
                record.step,
                rollout,
                f"has {trouble[0]}",
                trouble[1],
                "What its tokens were trained towards cannot be worked out again. This batch is not looked at further.",
            )
            return True
        return False

    def _compare_advantages(
        self, record: BatchRecord, columns: Columns, rules: Rules, custom: Estimator | None
    ) -> None:
        """Compare in double precision, then rounded as in the journal."""
        try:
            per_rollout, after = advantages_of(record.rollouts, rules, self._baselines, custom=custom)
        except ConfigError as error:
            self._findings.note(f"advantages of batch {record.step} are not compared: {error}")
            return
        expected = np.concatenate([part for per_sample in per_rollout for part in per_sample])
        trained = columns.tokens.loss_mask == 1
        wrong = trained & ~np.isclose(columns.tokens.advantages, expected, rtol=1e-5, atol=1e-6)
        if wrong.any():
            first = expected[int(np.argmax(wrong))]
            Refusal(record, columns, self._findings)(wrong, "advantages", f"{first:.6g}, {_kind(rules)}")
        self._compare_baselines(record, after)
        self._baselines = after

    def _compare_baselines(self, record: BatchRecord, due: Baselines) -> None:
        found = record.state.baselines
        wrong = next((name for name in sorted(found.keys() | due.keys()) if not _are_close(found, due, name)), None)
        if wrong is None:
            return
        self._findings.add(
            "tokens",
            record.step,
            f"batch {record.step}: the journal's running mean reward of {wrong} is {found.get(wrong, 'unknown')}",
            expected=f"{due.get(wrong, 'none')}, by the rewards up to this batch",
            meaning="A run that goes on from here would compare rewards with another one. Look at `state.baselines` of "
            "this batch.",
        )

    def _compare_flaws(self, record: BatchRecord, rules: Rules) -> None:
        assert rules.filters is not None
        for rollout in record.rollouts:
            flaws = flaws_of(rollout, rules)
            if is_zero([sample.advantages for sample in rollout.samples]):
                flaws.append(ZERO_ADVANTAGE)
            masked = flaw_with("mask", rollout.flaws, rules.filters)
            if rollout.flaws != flaws:
                found, expected = f"has the flaws {_listed(rollout.flaws)}", f"{_listed(flaws)}, by its tokens"
            elif rollout.masked != masked:
                found = f"is masked for {rollout.masked or 'nothing'}"
                expected = f"{masked or 'nothing'}, by `[orchestrator.filters]` and its flaws ({_listed(flaws)})"
            elif flaw := flaw_with("drop", rollout.flaws, rules.filters):
                found, expected = f"is trained though it is flawed: {flaw}", "its group dropped"
            else:
                continue
            meaning = (
                "Something was trained on that should not have been, or left out that should. Look at this rollout."
            )
            self._report(record.step, rollout, found, expected, meaning)
            return

    def _compare_worth(self, record: BatchRecord, rules: Rules) -> None:
        for group in by_group(record.rollouts).values():
            if (reason := why_not_worth_it(group, rules)) is not None:
                self._report(
                    record.step,
                    group[0],
                    f"is trained, and there is {reason}",
                    "its group dropped, by `[orchestrator.buffer]`",
                    "A place in the batch was lost to it. Look at the rewards of this group.",
                )
                return

    def _report(self, step: int, rollout: Rollout, found: str, expected: str, meaning: str) -> None:
        self._findings.add(
            "tokens", step, f"batch {step}: {name_of(rollout)} {found}", expected=expected, meaning=meaning
        )


def _misfit(rollout: Rollout, rules: Rules) -> tuple[str, str] | None:
    """What was found, and what was expected."""
    columns = [
        ("token_rewards", rollout.token_rewards, False),
        ("teacher", rollout.teacher, rules.teacher_weight is not None),
    ]
    lengths = [sample.length for sample in rollout.samples]
    for name, parts, is_due in columns:
        if not parts and not is_due:
            continue
        if [len(part) for part in parts] != lengths:
            return f"`{name}` for {[len(part) for part in parts]} tokens", f"for {lengths}, as its samples have"
        if any(np.isinf(part).any() for part in parts):
            return f"what is not finite in `{name}`", "numbers, or NaN where there is none"
    silent = [
        sample.loss_mask.astype(bool) & np.isnan(part)
        for sample, part in zip(rollout.samples, rollout.teacher, strict=False)
    ]
    if any(part.any() for part in silent):
        return "a token that is trained on, of which `teacher` says nothing", "the teacher's logprob of each"
    return None


def _kind(rules: Rules) -> str:
    """Describe what the numbers follow from.

    Example:
        "the group_mean of the group's rewards"
    """
    of = "the batch's" if rules.advantage in ("ema", "batch", "group_batch", "custom") else "the group's"
    more = [
        word
        for word, given in (
            ("clipped", rules.reward_clip is not None),
            ("with the length penalty", rules.length_penalty is not None),
        )
        if given
    ]
    after = ", with the teacher's term" if rules.teacher_weight is not None else ""
    return f"the {rules.advantage} of {of} rewards {' and '.join(more)}".rstrip() + after


def _are_close(found: Baselines, due: Baselines, name: str) -> bool:
    return name in found and name in due and bool(np.isclose(found[name], due[name], rtol=1e-9, atol=1e-12))


def _listed(flaws: list[str]) -> str:
    return ", ".join(flaws) or "none"
