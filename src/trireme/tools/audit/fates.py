"""The fate of each rollout and the example of each group, followed from group 0 on.

Every rollout that was started is trained in one batch, dropped for a reason, or still open.

A group is decided as a whole, in one entry; failed attempts of its rollouts are in the same one. Difficulty pools and
the curriculum depend on results. The journal tells their order: groups below `State.next_group` of a batch were taken
before that batch was closed, and `BatchRecord.outcomes` are the results that it closed with.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np

from trireme.algo.data.curriculum import Place
from trireme.algo.data.difficulty import Outcome, Scores
from trireme.algo.data.order import DataOrder
from trireme.algo.filters import FLAWS
from trireme.algo.rules import Rules
from trireme.journal.records import BatchRecord, Dropped, OpenGroup, Rollout, State
from trireme.journal.targets import by_group, num_tokens, outcome_of
from trireme.tools.audit.report import Report

TRAINED = "trained"
OPEN, UNKNOWN = -1, -2  # in place of a batch; UNKNOWN: not listed as open, or decided in an unreadable batch

Fate = Rollout | Dropped

MOST_BEGUN = 1_000_000
"""Groups that can have been begun between two entries; more is a number gone wrong, and not worth walking through."""
CAME_TO_THEIR_END = ("no signal", "little signal", "little advantage", *FLAWS)
"""Kinds of reasons for which a group was dropped whose rewards were all there, and counted."""


class Fates:
    """Follow all groups from their start to their end. Takes eight bytes per group."""

    def __init__(self, report: Report, begun: State) -> None:
        """
        Args:
            begun: what the run began with; groups of another run may be open.
        """
        self._order = OrderAudit(report, begun)
        self._report = report
        # the batch that decided each group, or OPEN or UNKNOWN
        self._batch_of = array("q", [UNKNOWN]) * begun.next_group
        self._open: dict[int, OpenGroup | None] = {}  # the example by the data order; None if unknown
        for group in begun.open_groups:
            self._open[group.id], self._batch_of[group.id] = group, OPEN
        # rollouts, by the journal
        self._counters = {name: begun.counters.get(name, 0) for name in ("trained", "dropped")}

    @property
    def num_begun(self) -> int:
        return len(self._batch_of)

    def take(self, record: BatchRecord, rules: Rules, *, after_gap: bool) -> None:
        """Check the next entry.

        Args:
            after_gap: the entries before it could not be read, so what they decided is unknown.
        """
        step, next_group = record.step, record.state.next_group
        groups: dict[int, list[Fate]] = defaultdict(list)
        ended: list[Fate] = [*record.rollouts, *record.dropped]
        for fate in ended:
            groups[fate.group].append(fate)
        # all new groups take their examples before the batch's outcomes change the data order
        self._order.begin(record, rules, after_gap=after_gap)
        if 0 <= next_group - self.num_begun <= MOST_BEGUN:
            for group in range(self.num_begun, next_group):
                self._open[group] = self._order.task(group, rules)
                self._batch_of.append(OPEN)
        else:
            self._report.add(
                "fates",
                step,
                f"batch {step}: the next group is {next_group}, {self.num_begun} were begun before",
                expected="groups numbered one by one",
            )
        self._order.close(record, rules)
        # all fates of a group are in one entry, so each group is judged as a whole
        for group, fates in sorted(groups.items()):
            self._decide(step, group, fates, rules)
        self._compare_open(record, after_gap=after_gap)
        self._count(record, rules, after_gap=after_gap)

    def _decide(self, step: int, group: int, fates: list[Fate], rules: Rules) -> None:
        """Check a group that was trained or dropped in this batch."""

        add = partial(self._report.add, "fates", step)
        if not 0 <= group < self.num_begun:
            add(
                f"batch {step} decides group {group}, which was never begun",
                expected=f"groups 0 to {self.num_begun - 1}",
            )
        # the group was followed until now; the data order says which example it must be
        elif group in self._open:
            task = self._open.pop(group)
            self._batch_of[group] = step
            for one in fates:
                if task is not None and (one.env, one.example) != (task.env, task.example):
                    self._report.add(
                        "order",
                        step,
                        f"batch {step}: group {group}, place {one.place}, attempt {one.attempt} is {one.env} example "
                        f"{one.example}",
                        expected=f"group {group} is {task.env} example {task.example}, by the data order",
                    )
                    break
        elif self._batch_of[group] >= 0:
            how = TRAINED if isinstance(fates[0], Rollout) else "dropped"
            add(
                f"batch {step}: group {group} is {how} here, and batch {self._batch_of[group]} had decided it before",
                expected="one fate of each rollout, in one batch",
                advice="Compare the group in both batches.",
            )

        if trouble := _find_trouble(group, fates, rules.of(fates[0].env)):
            add(f"batch {step}: {trouble[0]}", expected=trouble[1])

    def _compare_open(self, record: BatchRecord, *, after_gap: bool) -> None:
        """Check the groups that the batch lists as open. Those that it does not list are not followed any further."""
        # a group that vanished, or that an unreadable batch hid, is followed again from here
        listed = {group.id: group for group in record.state.open_groups}
        for group, task in listed.items():
            if 0 <= group < self.num_begun and self._batch_of[group] == UNKNOWN:
                self._batch_of[group], self._open[group] = OPEN, task
        # an unreadable batch may have decided groups that this one does not list, so these are not missed
        followed = {group: task for group, task in self._open.items() if group in listed}
        tasks = followed if after_gap else self._open  # groups that must be listed

        due = {group: task or listed.get(group) or "any" for group, task in tasks.items()}
        groups = {f"open group {group}": (listed.get(group), due.get(group)) for group in {**listed, **due}}
        self._report.compare(
            "fates",
            record.step,
            {**groups, "number of open groups": (len(record.state.open_groups), len(tasks))},
            by="as of the groups that the data order has begun, and no batch has decided",
            advice="Look at `state.open_groups` of this batch and of the one before.",
        )
        # others are reported once, and not again by each later batch
        for group in self._open.keys() - followed.keys():
            self._batch_of[group] = UNKNOWN
        self._open = followed

    def _count(self, record: BatchRecord, rules: Rules, *, after_gap: bool) -> None:
        """Add the batch to the summary, and check its numbers of rollouts and groups and the run's counters."""
        num_trained, num_dropped, summary = len(record.rollouts), len(record.dropped), self._report.summary
        summary.trained, summary.dropped = summary.trained + num_trained, summary.dropped + num_dropped
        summary.groups, summary.open_groups = self.num_begun, len({group.id for group in record.state.open_groups})
        for kind in (kind_of(dropped.reason) for dropped in record.dropped):
            summary.dropped_for[kind] = summary.dropped_for.get(kind, 0) + 1
        # counters continue from what the journal says, so that a wrong one is reported once
        before, counters = self._counters, {name: record.state.counters.get(name, 0) for name in self._counters}
        due = {"trained": before["trained"] + num_trained, "dropped": before["dropped"] + num_dropped}
        groups = list(by_group(record.rollouts).values())
        sizes = [rules.of(members[0].env).group_size for members in groups]
        values: dict[str, tuple[Any, Any]] = {}
        mean_tokens = 0.0
        if rules.batch_size is not None:
            is_full = _is_full(sizes, rules.batch_size)
            values |= {
                "number of rollouts": (num_trained, sum(sizes) if is_full else rules.batch_size),
                "number of groups": (len(sizes), len(sizes) if is_full else rules.batch_size // rules.group_size),
            }
        elif rules.token_batch_size is not None:
            tokens = [num_tokens(members) for members in groups]
            is_full = _is_full(tokens, rules.token_batch_size, may_exceed=rules.max_async_level == 0)
            values |= {
                "number of rollouts": (num_trained, sum(sizes)),
                "number of tokens": (sum(tokens), sum(tokens) if is_full else rules.token_batch_size),
            }
            mean_tokens = sum(tokens) / max(1, num_trained)
        values |= {
            "state.tokens_per_rollout": (record.state.tokens_per_rollout, mean_tokens),
            "state.counters": (counters, counters if after_gap else due),
        }
        by = f"by {_sizes_in_words(rules)}, and what the batch before had counted"
        self._report.compare("fates", record.step, values, by=by)
        self._counters = counters


def _is_full(added: list[int], size: int, *, may_exceed: bool = False) -> bool:
    """Return whether whole groups fill a batch until its size is reached: without the largest, it would not be.

    Args:
        added: what each group adds to it.
        may_exceed: the batch takes all groups that were begun with it.
    """
    return size <= sum(added) and (may_exceed or sum(added) - max(added) < size)


def _sizes_in_words(rules: Rules) -> str:
    """Example: "8 rollouts of each group (math: 4)"."""
    others = [f"{name}: {own.group_size}" for name, own in rules.sources.items() if own.group_size != rules.group_size]
    return f"{rules.group_size} rollouts of each group" + (f" ({', '.join(others)})" if others else "")


def kind_of(reason: str) -> str:
    """Reduce many reasons to few kinds.

    Example:
        kind_of("score: ValueError: no number in 'abc'")  # "score: ValueError"
        kind_of("stale: begun under version 3")           # "stale"
    """
    stage, _, rest = reason.partition(":")
    error = re.match(r"\s*([A-Za-z_][\w.]*)(?=:|$)", rest)
    return f"{stage}: {error[1]}" if error and len(stage) < 30 else stage[:30]


def _find_trouble(group: int, fates: list[Fate], rules: Rules) -> tuple[str, str] | None:
    """Return the first inconsistency of a group in one entry, and what was expected; None if there is none."""
    is_trained = isinstance(fates[0], Rollout)
    by_place: dict[int, list[tuple[int, str]]] = {place: [] for place in range(rules.group_size)}
    # a place without any fate must be seen too: all places are filled in before
    for fate in fates:
        reason = TRAINED if isinstance(fate, Rollout) else fate.reason
        by_place.setdefault(fate.place, []).append((fate.attempt, reason))
    # attempts are numbered without gaps, all but the last are dropped, and the last shares the group's fate
    for place, attempts in sorted(by_place.items()):
        attempts.sort()
        numbers, reasons = [number for number, _ in attempts], [reason for _, reason in attempts]
        if (
            not 0 <= place < rules.group_size
            or not 1 <= len(attempts) <= rules.max_attempts
            or numbers != list(range(len(attempts)))
            or not all(reasons)
            or [reason == TRAINED for reason in reasons] != [False] * (len(attempts) - 1) + [is_trained]
        ):
            words = {TRAINED: TRAINED, "": "dropped without a reason"}
            ends = ", ".join(f"attempt {number} {words.get(reason, 'dropped')}" for number, reason in attempts)
            return f"group {group}, place {place} has {ends or 'no fate'}", (
                f"of each of places 0 to {rules.group_size - 1} at most {rules.max_attempts} attempts, counted from 0: "
                f"all dropped for a reason but the last, which is {TRAINED if is_trained else 'dropped'} with its group"
            )

    if is_trained:
        return None
    # It was dropped for one reason. Failed attempts have their own, and so has the last attempt of a place without
    # attempts left.
    last = {attempts[-1][1] for attempts in by_place.values() if len(attempts) < rules.max_attempts}
    earlier = {reason for attempts in by_place.values() for _, reason in attempts[:-1]}
    if len(last) > 1:
        return f"group {group} was dropped for {len(last)} reasons: {'; '.join(sorted(last))}", "one"
    if last & earlier:
        return f"group {group} was dropped as a whole, and then one of it once more", "the last attempt of each place"
    return None


class OrderAudit:
    """Walk the groups in the order of their numbers. Needs the sizes of the data sets from the journal."""

    def __init__(self, report: Report, begun: State) -> None:
        self._report = report
        self._begun = begun
        self._sizes: dict[str, int] | None = None  # None before the first entry; empty if they are unusable
        self._order = DataOrder({})
        self._is_lost = False  # a batch is missing, and what was learnt with it decides what came next

    def begin(self, record: BatchRecord, rules: Rules, *, after_gap: bool) -> None:
        """Take the sizes of the data sets from the first entry. They may never change."""

        step, sizes = record.step, record.state.sizes
        if self._sizes is None:
            self._sizes = sizes
            if sizes.keys() != rules.weights.keys() or not all(size > 0 for size in sizes.values()):
                self._sizes = {}
                self._report.add(
                    "order",
                    step,
                    f"batch {step}: the journal gives the sizes of the training sets as {sizes or 'nothing'}",
                    expected=f"one size above 0 for each of {', '.join(sorted(rules.weights))}",
                    advice="Which examples should have come cannot be worked out; that part is left out.",
                )
            self._order = DataOrder(self._sizes)
            begun = self._begun
            self._order.resume_from(begun.cursors, begun.scores, Place(begun.stage, begun.stage_reward))

        elif self._sizes:
            self._report.compare(
                "order",
                step,
                {"state.sizes": (sizes, self._sizes)},
                by="as in the batches before",
                advice="The data set changed, so places in it mean other examples. Look at the environments' `args`.",
            )
        # a missing batch hides results, on which pools and the curriculum depend
        has_pools = any(each.pools is not None for each in rules.all)
        self._is_lost = after_gap and (has_pools or len(rules.curriculum) > 0)

    def task(self, group: int, rules: Rules) -> OpenGroup | None:
        """Return the example that a group must have. Call it once for each group, in order."""
        if not self._sizes or self._is_lost:
            return None
        name, example = self._order.take(group, rules)
        return OpenGroup(id=group, env=name, example=example)

    def close(self, record: BatchRecord, rules: Rules) -> None:
        """Compare the position in the data, the difficulty scores and the stage after the batch."""
        state, sizes = record.state, self._order.sizes

        if not self._sizes:
            return
        if self._is_lost:  # continue from the journal's own state, with nothing left to compare
            known = {name: scores for name, scores in state.scores.items() if _fit(scores, sizes.get(name, 0))}
            self._order.resume_from(state.cursors, known, Place(state.stage, state.stage_reward))
            return
        # a damaged outcome must not end the audit: it is reported by `check_outcomes`
        outcomes = [
            one for one in record.outcomes if 0 <= one.example < sizes.get(one.env, 0) and math.isfinite(one.mean)
        ]
        self._order.close_batch(outcomes, rules, next_step=record.step + 1)
        self._report.compare(
            "order",
            record.step,
            {
                "state.cursors": (state.cursors, self._order.cursors),
                "state.scores": (state.scores, self._order.scores),
                "state.stage": (state.stage, self._order.place.stage),
                "state.stage_reward": (state.stage_reward, self._order.place.reward),
            },
            by=f"by the data order after {state.next_group} groups, and the outcomes of those that ended",
        )


def _fit(scores: Scores, size: int) -> bool:
    """Return whether scores are of examples of a data set of this size, one for each."""
    examples = scores.examples
    return len(examples) == len(scores.means) and bool(np.all((examples >= 0) & (examples < size)))


def check_outcomes(record: BatchRecord, rules: Rules, report: Report) -> None:
    """Check that each group that was trained, or dropped with all its rewards there, has one outcome.

    Outcomes drive difficulty pools and the curriculum.
    """
    if rules.filters is None:  # written before outcomes were
        return

    groups = by_group(record.rollouts)
    dropped = {one.group: one for one in record.dropped if one.reason.partition(":")[0] in CAME_TO_THEIR_END}
    means = {outcome.group: outcome.mean for outcome in record.outcomes}
    due = {group: outcome_of(rollouts) for group, rollouts in groups.items()}
    for group, one in dropped.items():  # its rewards are kept nowhere else
        due.setdefault(group, Outcome(group, one.env, one.example, means.get(group, math.nan)))
    # outcomes are written in the order of groups
    report.compare(
        "outcomes",
        record.step,
        {"outcomes": (record.outcomes, [due[group] for group in sorted(due)])},
        by="by the groups that were trained, or dropped when their rewards were in, in order",
    )
