"""Checks of every token of a batch: its version and its lag. For its training target see `targets.py`.

R rollouts of a batch, S samples, T tokens of all of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trireme.algo.rules import Rules
from trireme.journal.records import BatchRecord, Rollout
from trireme.messages import COLUMNS, Tokens
from trireme.tools.audit.findings import Findings

DTYPES = tuple((name, dtype) for name, (dtype, _) in COLUMNS.items())

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
        if trouble := _misfit(sample):
            findings.add(
                "tokens",
                record.step,
                f"batch {record.step}: {name_of(record.rollouts[number])} has {trouble}",
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


def _misfit(sample: Tokens) -> str | None:
    """Return the first column with a wrong length or type."""
    length = len(sample.ids)
    for name, dtype in DTYPES:
        column = getattr(sample, name)
        if column.dtype != dtype or len(column) != length:
            return f"{len(column)} values of {column.dtype} in `{name}`"
    return None


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
        trained = tokens.loss_mask == 1
        refuse = Refusal(record, columns, self._findings)
        refuse(tokens.loss_mask > 1, "loss_mask", "0 or 1")
        refuse(tokens.ids < 0, "ids", "0 or above")
        refuse(trained & (tokens.versions < 0), "versions", "a version of 0 or above where the token is trained on")
        refuse(~trained & (tokens.versions != -1), "versions", "-1 where nobody sampled the token")
        refuse(~trained & (tokens.advantages != 0), "advantages", "0 where the token is not trained on")
        refuse(~trained & (tokens.logprobs != 0), "logprobs", "0 where nobody sampled the token")
        impossible = ~np.isfinite(tokens.logprobs) | (tokens.logprobs > HIGHEST_LOGPROB)
        refuse(trained & impossible, "logprobs", "the logarithm of a probability")
        self._compare_lags(step, tokens.versions, trained, rules, refuse)
        self._compare_versions(tokens.versions, trained, refuse)
        self._compare_rollouts(record, columns, trained, rules)
        masked_R = np.array([rollout.masked is not None for rollout in record.rollouts])
        self.num_trained += int((trained & ~columns.per_token(masked_R)).sum())

    def _compare_lags(
        self, step: int, versions: np.ndarray, trained: np.ndarray, rules: Rules, refuse: Refusal
    ) -> None:
        allowed = 0 if rules.max_async_level == 0 else rules.max_off_policy_steps
        why = "max_async_level = 0" if rules.max_async_level == 0 else f"max_off_policy_steps = {allowed}"
        lags = step - versions
        refuse(trained & (lags < 0), "versions", f"at most {step}: a later version is trained from this very batch")
        refuse(trained & (lags > allowed), "versions", f"at least {step - allowed} ({why})")
        if trained.any():
            lowest, highest = int(lags[trained].min()), int(lags[trained].max())
            before = self.lag or (lowest, highest)
            self.lag = min(lowest, before[0]), max(highest, before[1])

    def _compare_versions(self, versions: np.ndarray, trained: np.ndarray, refuse: Refusal) -> None:
        used = {int(version) for version in np.unique(versions[trained]) if version >= 0}
        for version in sorted(used):
            if not self._is_confirmed(version):
                expected = (
                    f"a version that engines confirmed: journal/version_{version:06d}.msgpack is missing or empty"
                )
                refuse(trained & (versions == version), "versions", expected)
        self.versions |= used

    def _compare_rollouts(self, record: BatchRecord, columns: Columns, trained: np.ndarray, rules: Rules) -> None:
        counts = columns.per_rollout(trained, len(record.rollouts))
        for rollout, count in zip(record.rollouts, counts, strict=True):
            if count == 0:
                found, expected = "has no token that is trained on", "at least one sampled token"
            elif rollout.temperature != rules.temperature:
                found, expected = f"was sampled at temperature {rollout.temperature}", f"{rules.temperature}"
            else:
                continue
            self._findings.add(
                "tokens",
                record.step,
                f"batch {record.step}: {name_of(rollout)} {found}",
                expected=expected,
                meaning="The step was not trained on what the batch claims. Look at this rollout.",
            )
            return


@dataclass
class Refusal:
    """Report the first wrong token and their number."""

    record: BatchRecord
    columns: Columns
    findings: Findings

    def __call__(self, wrong: np.ndarray, column: str, expected: str) -> None:
        """Report tokens with a wrong value in a column.

        Args:
            wrong: [T] bool.
        """
        if not wrong.any():
            return
        first, step = int(np.argmax(wrong)), self.record.step
        ends = np.cumsum(self.columns.lengths)
        sample = int(np.searchsorted(ends, first, side="right"))
        rollout = self.record.rollouts[int(self.columns.rollout_of[sample])]
        place = first - int(ends[sample] - self.columns.lengths[sample])
        value = getattr(self.columns.tokens, column)[first]
        more = f" (and {int(wrong.sum()) - 1} more such tokens)" if wrong.sum() > 1 else ""
        self.findings.add(
            "tokens",
            step,
            f"batch {step}: {name_of(rollout)}: token {place} has {value:.6g} in `{column}`{more}",
            expected=expected,
            meaning=f"The step was not trained on what was sampled, or by other weights than are known. Look at this "
            f"rollout in journal/batch_{step:06d}.msgpack.",
        )


def name_of(rollout: Rollout) -> str:
    return f"group {rollout.group}, place {rollout.place}"
