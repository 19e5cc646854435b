"""Checks of what was trained on: every token of a batch, and every turn of an agent program.

Of a token, its version, its lag and its training target are recomputed from rewards and tokens. A turn on disk is
trained, left out or dropped for a reason, or still under way: it is on disk before its program sees it, so a batch can
hold no turn that is not there.

T tokens of all samples of a batch, one after the other.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from trireme.algo.advantage import Baselines
from trireme.algo.filters import ZERO_ADVANTAGE, flaw_with
from trireme.algo.rules import Rules
from trireme.base.errors import ConfigError
from trireme.journal.model_turn import Turn
from trireme.journal.records import BatchRecord, Dropped, Rollout, State
from trireme.journal.targets import (
    advantages_of,
    by_group,
    estimators_of,
    flaws_of,
    is_zero,
    num_sampled,
    why_not_worth_it,
)
from trireme.journal.turns import MISSING, compare_turns, read_turns, turns_file, turns_folder
from trireme.messages import COLUMNS, Tokens, concat_tokens
from trireme.tools.audit.report import Report
from trireme.tools.record_differences import some

HIGHEST_LOGPROB = 1e-3
"""Above 0 only by rounding."""
TURNS_FILE = re.compile(r"(\d+)-\d+\.\d+\.turns")
RUNNING_MEANS = ("ema", "rae")
LOOSER = ("never", "running", "always")
"""Values of `inference.keep_prefix_cache`: each allows what those before it allow."""
UNDER_WAY, DROPPED, TRAINED = "under way", "of dropped rollouts", "trained"


class TokenAudit:
    """Check the tokens of each batch, collect the versions that were used, and follow the running means of `ema`."""

    def __init__(self, begun: State, confirmed: set[int], report: Report, run_code: str | None = None) -> None:
        """Start with the first batch.

        Args:
            begun: what the run began with.
            confirmed: versions that engines confirmed.
            run_code: the one function ("module:name") that the audit may call for advantages, if the journal names it.
        """
        self._versions: set[int] = set()
        self._confirmed = confirmed
        self._report = report
        self._run_code = run_code
        self._baselines: Baselines = dict(begun.baselines)
        self._kept: dict[int, str] = {}  # `inference.keep_prefix_cache`, by batch

    def take(self, record: BatchRecord, rules: Rules, *, after_gap: bool) -> None:
        """Check a batch.

        Args:
            after_gap: the batch before could not be read, so the running means are unknown.
        """
        # running means depend on all batches before, so they are taken from the journal after a gap
        if after_gap:
            self._baselines = dict(record.state.baselines)
        tokens = self._read_tokens(record)
        if tokens is not None:
            self._check_tokens(record, tokens, rules)
            self._check_rollouts(record, rules)
        # targets of such a batch cannot be recomputed, nor the running means that follow from them
        if tokens is None or self._has_misfit(record, rules):
            self._baselines = dict(record.state.baselines)  # continue from the journal's own
            return
        # The author of a run folder could run any code on this machine, if it were called without being named here too.
        used = [rules.of(name) for name in {rollout.env for rollout in record.rollouts}]
        code = {each.advantage_path for each in rules.all if each.advantage == "custom"} - {self._run_code}
        if code:
            self._report.note(
                "advantages of a custom function are not compared: the journal names "
                f"{', '.join(sorted(map(str, code)))}, which is called only with `--run-code` and its name"
            )
        elif not after_gap or not any(each.advantage in RUNNING_MEANS for each in used):
            self._compare_advantages(record, tokens, rules)
        if rules.filters is not None:  # older journals do not record flaws
            self._compare_worth(record, rules)

    def _read_tokens(self, record: BatchRecord) -> Tokens | None:
        """Concatenate a batch's columns; None if there are none, or if they do not fit together."""
        samples = [(rollout, sample) for rollout in record.rollouts for sample in rollout.samples]
        for rollout, sample in samples:
            types = {name: dtype for name, (dtype, _) in COLUMNS.items()}
            if sample.ce_weights is not None:
                types["ce_weights"] = np.dtype("float32")
            if sample.oldest is not None:
                types["oldest"] = np.dtype("int32")
            for name, dtype in types.items():
                column = getattr(sample, name)
                if column.dtype != dtype or len(column) != sample.length:
                    self._add(
                        record,
                        rollout,
                        f" has {len(column)} values of {column.dtype} in `{name}`",
                        expected=f"{sample.length} of each, as there are `ids`, of the types in `messages.COLUMNS`",
                        advice="This batch is not looked at further.",
                    )
                    return None

        if not samples:
            return None
        names = (*COLUMNS, "ce_weights", "oldest")
        return concat_tokens([Tokens(**{name: getattr(sample, name) for name in names}) for _, sample in samples])

    def _check_tokens(self, record: BatchRecord, tokens: Tokens, rules: Rules) -> None:

        step, summary = record.step, self._report.summary
        sampled, versions = tokens.loss_mask == 1, tokens.versions
        trained = sampled & ~self._check_weights(record, rules)  # tokens that the policy loss trains
        # batch n makes version n + 1, so its tokens are of version n at most: the lag is n minus their version
        lags = step - versions
        allowed = rules.max_lag
        why = "max_async_level = 0" if rules.max_async_level == 0 else f"max_off_policy_steps = {allowed}"
        no_logprob = ~np.isfinite(tokens.logprobs) | (tokens.logprobs > HIGHEST_LOGPROB)
        used = {int(version) for version in np.unique(versions[trained]) if version >= 0}
        # for each rule: the tokens that break it, the column to report, and what was expected
        checks = [
            (tokens.loss_mask > 1, "loss_mask", "0 or 1"),
            (tokens.ids < 0, "ids", "0 or above"),
            (trained & (versions < 0), "versions", "a version of 0 or above where the token is trained on"),
            (~trained & (versions != -1), "versions", "-1 where the policy did not sample the token"),
            (~trained & (tokens.advantages != 0), "advantages", "0 where the token is not trained on"),
            (~sampled & (tokens.logprobs != 0), "logprobs", "0 where no model sampled the token"),
            (sampled & no_logprob, "logprobs", "the logarithm of a probability"),
            (trained & (lags < 0), "versions", f"at most {step}: a later version is trained from this very batch"),
            (trained & (lags > allowed), "versions", f"at least {step - allowed} ({why})"),
        ]
        checks += self._checks_of_caches(record, tokens, trained, rules)
        # an engine confirms a version before it samples under it
        for version in sorted(used - self._confirmed):
            file = f"journal/version_{version:06d}.msgpack"
            expected = f"a version that engines confirmed: {file} is missing or empty"
            checks.append((trained & (versions == version), "versions", expected))
        for wrong, column, expected in checks:
            self._add_token(record, wrong, column, expected)
        # the summary covers the tokens that are trained on, as the others have no version
        if trained.any():
            lowest, highest = int(lags[trained].min()), int(lags[trained].max())
            before = summary.lag or (lowest, highest)
            summary.lag = min(lowest, before[0]), max(highest, before[1])
        self._versions |= used
        summary.versions_used = len(self._versions)

    def _checks_of_caches(
        self, record: BatchRecord, tokens: Tokens, trained: np.ndarray, rules: Rules
    ) -> list[tuple[np.ndarray, str, str]]:
        """Return the rules for the oldest versions that tokens attended to, and which tokens break them."""
        self._kept[record.step] = rules.keep_prefix_cache
        if tokens.oldest is None or not trained.any():
            return []

        # A run that was resumed with another choice may hold turns from before: the loosest one since then counts.
        since = min(record.step, int(tokens.versions[trained].min()) - 1)
        steps = takewhile(lambda step: step >= since, reversed(self._kept))
        kept = max((self._kept[step] for step in steps), key=LOOSER.index)
        floors = [_oldest_allowed(each, kept) for rollout in record.rollouts for each in rollout.samples]
        allowed = record.step - rules.max_lag
        return [
            (~trained & (tokens.oldest != -1), "oldest", "-1 where the policy did not sample the token"),
            (trained & (tokens.oldest > tokens.versions), "oldest", "at most its version"),
            (trained & (tokens.oldest < np.concatenate(floors)), "oldest", f'no older: keep_prefix_cache = "{kept}"'),
            (trained & (tokens.oldest < allowed), "oldest", f"at least {allowed}, by max_off_policy_steps"),
        ]

    def _check_weights(self, record: BatchRecord, rules: Rules) -> np.ndarray:
        """Check the weights of tokens in the cross-entropy. Return [T] bool: the tokens that a teacher sampled."""
        wrong, taught = [], []
        for rollout in record.rollouts:
            own = rules.of(rollout.env)
            for sample in rollout.samples:
                sampled = sample.loss_mask == 1
                found = np.zeros(sample.length, np.float32) if sample.ce_weights is None else sample.ce_weights
                of_others = np.array([0.0, *own.echo.values()], np.float32)
                wrong.append(np.where(sampled, found != np.float32(own.ce_weight), ~np.isin(found, of_others)))
                taught.append(sampled & (own.ce_weight > 0))
            if rollout.model:
                self._report.note(f"{rollout.model} sampled rollouts of {rollout.env}: cross-entropy trains them")
            if bool(rollout.model) != (own.ce_weight > 0):
                found_model = f" was sampled by {rollout.model!r}" if rollout.model else " names no model"
                expected = "the name of the teacher that sampled it, or none where the policy did"
                self._add(record, rollout, found_model, expected=expected)
        self._add_token(record, np.concatenate(wrong), "ce_weights", "the weight in the rules of the batch")
        return np.concatenate(taught)

    def _check_rollouts(self, record: BatchRecord, rules: Rules) -> None:
        """Compare what is recorded of each rollout with its tokens: their number, and the flaws of the filters."""

        trained = (rollout for rollout in record.rollouts if rollout.masked is None)
        self._report.summary.trained_tokens += sum(num_sampled(rollout.samples) for rollout in trained)
        for rollout in record.rollouts:
            count = num_sampled(rollout.samples)
            if count == 0:
                self._add(record, rollout, " has no token that is trained on", expected="at least one")
                return
            longest = max(sample.length for sample in rollout.samples)
            due = {"num_sampled": count, "num_tokens": longest, "temperature": rules.of(rollout.env).temperature}
            recorded = {name: getattr(rollout, name) for name in due}  # each is None in older journals
            values: dict[str, tuple[Any, Any]] = {
                name: (value, due[name]) for name, value in recorded.items() if value is not None
            }
            if (filters := rules.of(rollout.env).filters) is not None:  # older journals do not record flaws
                is_flat = not rollout.model and is_zero([sample.advantages for sample in rollout.samples])
                values |= {
                    "flaws": (rollout.flaws, flaws_of(rollout, rules) + [ZERO_ADVANTAGE] * is_flat),
                    "masked": (rollout.masked, flaw_with("mask", rollout.flaws, filters)),
                    "dropped for": (None, flaw_with("drop", rollout.flaws, filters)),
                }

            of, by = f"group {rollout.group}, place {rollout.place}: ", "by its samples and the rules of the batch"
            if self._report.compare("tokens", record.step, values, of=of, by=by):
                return

    def _has_misfit(self, record: BatchRecord, rules: Rules) -> bool:
        """Report the first rollout whose targets cannot be worked out again, and return whether there is one."""
        for rollout in record.rollouts:
            if misfit := _misfit(rollout, rules):
                advice = "Its targets cannot be worked out again: this batch is not looked at further."
                self._add(record, rollout, f" {misfit[0]}", expected=misfit[1], advice=advice)
                return True
        return False

    def _compare_advantages(self, record: BatchRecord, tokens: Tokens, rules: Rules) -> None:
        """Compare in double precision, then rounded as in the journal."""

        try:
            custom = estimators_of(rules)
            per_rollout, due = advantages_of(record.rollouts, rules, self._baselines, custom=custom)
        except ConfigError as error:
            self._report.note(f"advantages are not compared: {error}")
            return
        expected = np.concatenate([part for per_sample in per_rollout for part in per_sample])
        # targets are recomputed in float64, and the journal holds float32
        wrong = tokens.by_policy_loss & ~np.isclose(tokens.advantages, expected, rtol=1e-5, atol=1e-6)
        if wrong.any():
            by = f"{expected[int(np.argmax(wrong))]:.6g}, by the rewards and the rules of the batch"
            self._add_token(record, wrong, "advantages", by)
        # the journal stores running means in double precision, so only the order of sums may differ
        self._baselines = due
        baselines = {"state.baselines": (record.state.baselines, due)}
        self._report.compare("tokens", record.step, baselines, by="by the rewards up to this batch", rtol=1e-9)

    def _compare_worth(self, record: BatchRecord, rules: Rules) -> None:
        for group in by_group(record.rollouts).values():
            if (reason := why_not_worth_it(group, rules)) is not None:
                self._add(
                    record,
                    group[0],
                    f" is trained, and there is {reason}",
                    expected="its group dropped, by `[orchestrator.buffer]`",
                )
                return

    def _add(self, record: BatchRecord, rollout: Rollout, found: str, *, expected: str, advice: str = "") -> None:
        where = f"batch {record.step}: group {rollout.group}, place {rollout.place}"
        self._report.add("tokens", record.step, f"{where}{found}", expected=expected, advice=advice)

    def _add_token(self, record: BatchRecord, wrong: np.ndarray, column: str, expected: str) -> None:
        """Report the first token with a wrong value in a column, and the number of such tokens.

        Args:
            wrong: [T] bool.
        """
        if not wrong.any():
            return
        place = int(np.argmax(wrong))

        more = f" (and {int(wrong.sum()) - 1} more such tokens)" if wrong.sum() > 1 else ""
        # `wrong` is over the samples of all rollouts in order, so the place is counted down sample by sample
        for rollout in record.rollouts:
            for sample in rollout.samples:
                if 0 <= place < sample.length:
                    values = getattr(sample, column)
                    value = f"{0 if values is None else values[place]:.6g}"
                    self._add(record, rollout, f": token {place} has {value} in `{column}`{more}", expected=expected)
                place -= sample.length


def _oldest_allowed(sample: Tokens, kept: str) -> np.ndarray:
    """Return [T] the oldest version that each token may have attended to: its own ("never"), that of the last token of
    the turn before ("running"), or the oldest that the first turn attended to ("always")."""
    versions, is_sampled = sample.versions, sample.versions >= 0
    begins = is_sampled & ~np.append(False, is_sampled[:-1])
    ends = is_sampled & ~np.append(is_sampled[1:], False)
    turns = np.cumsum(begins)  # counted from 1; a token before the first turn has 0
    if kept == "never":
        return versions
    if kept == "running":
        return np.concatenate([[-1, -1], versions[ends]])[turns]
    return np.where(turns > 1, sample.attended[np.argmax(begins)], -1)


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
    # each sample belongs to exactly one run of an agent program, if there are any
    owned = sorted(place for run in rollout.runs for place in run.samples)
    if rollout.runs and owned != list(range(len(lengths))):
        return f"has `runs` of the samples {owned[:20]}", f"each of its {len(lengths)} samples in one run"

    for sample, part in zip(rollout.samples, rollout.teacher, strict=False):
        # NaN means that the teacher gave no logprob, which only tokens outside of the loss may have
        if (sample.loss_mask.astype(bool) & np.isnan(part)).any():
            return "has a token that is trained on without a value in `teacher`", "the teacher's logprob of each"
    return None


class TurnAudit:
    """Compares the turns of each rollout with its samples, batch by batch."""

    def __init__(self, journal: Path, report: Report) -> None:
        self._counts: Counter[str] = Counter()  # turns, by what became of them
        self._report = report
        aside = sorted(journal.glob("set_aside_*"), reverse=True)  # a rewind moves the turns of all rollouts
        self._journals = [folder for folder in (journal, *aside) if turns_folder(folder).is_dir()]
        self._left = {file.name for file in turns_folder(journal).glob("*.turns")}  # without a fate so far
        self._has_gap = False

    def take(self, record: BatchRecord, *, after_gap: bool) -> None:
        """Check the rollouts whose fates a batch decides."""
        self._has_gap |= after_gap
        for rollout in record.rollouts:
            turns = self._read(record.step, rollout)
            if turns is not None:
                self._compare(record.step, rollout, turns)
            elif rollout.branches and self._journals:
                self._add(
                    record.step,
                    rollout,
                    "was played by an agent program, and its file of turns is missing",
                    expected=f"{turns_file(Path(), _name(rollout), rollout.attempt)} in the journal",
                )
            elif rollout.branches:
                self._report.note("journal/turns is not there, so turns of agent programs are not compared")
        # dropped rollouts are in no sample, so their turns are only counted
        for dropped in record.dropped:
            self._counts[DROPPED] += len(self._read(record.step, dropped) or ())

    def close(self, state: State) -> None:
        """Check the files that no batch has decided on.

        Args:
            state: after the newest batch.
        """

        is_open = {group.id for group in state.open_groups}
        unknown = []
        for name in sorted(self._left):
            found = TURNS_FILE.fullmatch(name)
            # the orchestrator is still working on open groups, and on groups begun after the newest batch
            if found and (int(found[1]) in is_open or int(found[1]) >= state.next_group):
                self._counts[UNDER_WAY] += len(read_turns(turns_folder(self._journals[0]) / name))
            else:
                unknown.append(name)

        self._report.summary.turns = dict(self._counts)
        if unknown and not self._has_gap:  # an unreadable batch may know them
            self._report.add(
                "turns",
                state.next_batch,
                f"{some(unknown)} in journal/turns: turns of an unknown rollout",
                expected="turns of rollouts that a batch has trained or dropped, or of groups that are open",
                advice="The rollout was lost, or the file is of another run.",
            )

    def _read(self, step: int, one: Rollout | Dropped) -> list[Turn] | None:
        """Return the turns of an attempt; None if there is no file of them."""
        for journal in self._journals:
            file = turns_file(journal, _name(one), one.attempt)
            if file.exists():
                # files that a rewind moved aside are not expected to have a fate
                if journal is self._journals[0]:
                    self._left.discard(file.name)
                try:
                    return read_turns(file)
                except (ValueError, TypeError, OSError) as error:
                    self._add(step, one, f"has unreadable turns: {error}", expected=f"{file} as it was written")
                    return []
        return None

    def _compare(self, step: int, rollout: Rollout, turns: list[Turn]) -> None:
        compared, unused = compare_turns(rollout.samples, turns)

        self._counts[TRAINED] += sum(not turn.difference for turn in compared)
        left_out = Counter(prompt for prompts in rollout.left_out.values() for prompt in prompts)
        for why, prompts in rollout.left_out.items():
            self._counts[why] += len(prompts)
        # only the first difference: one damaged turn changes the prompts of all that follow
        for turn in compared:
            if turn.difference:
                where = f"has a turn (sample {turn.sample}, token {turn.begin})"
                is_missing = turn.difference == MISSING
                found = "that is missing on disk" if is_missing else f"whose {turn.difference} differ on disk"
                self._add(step, rollout, f"{where} {found}", expected="each turn in a batch as it was answered")
                return
        # every other turn on disk must be listed as left out, and every turn left out must be on disk
        on_disk = Counter(turn.prompt for turn in unused)
        if extra := on_disk - left_out:
            found = f"was answered {extra.total()} turns that are in no sample and were not left out"
            self._add(step, rollout, found, expected="each turn in a sample, or left out for a reason")
        elif extra := left_out - on_disk:
            found = f"left out {extra.total()} turns that are missing on disk"
            self._add(step, rollout, found, expected="each turn that was answered on disk")

    def _add(self, step: int, one: Rollout | Dropped, found: str, *, expected: str) -> None:
        self._report.add(
            "turns",
            step,
            f"batch {step}: group {one.group}, place {one.place} {found}",
            expected=expected,
            advice=f"Compare the batch with {turns_file(Path('journal'), _name(one), one.attempt)}. A file "
            "that was changed or cut off ends at its last whole turn.",
        )


def _name(one: Rollout | Dropped) -> str:
    return f"{one.group}-{one.place}"
