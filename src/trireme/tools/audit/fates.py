"""The fates of rollouts: every one that was started is trained in one batch, dropped for a reason, or still open.

A group is decided as a whole, in one entry; failed attempts of its rollouts are in the same one.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from functools import partial

from trireme.algo.rules import Rules
from trireme.journal.records import BatchRecord, Dropped, OpenGroup, Rollout
from trireme.tools.audit.examples import OrderAudit
from trireme.tools.audit.report import Findings, some

OPEN, UNREADABLE = -1, -2  # instead of a batch

MOST_REASONS = 50

Fate = Rollout | Dropped

MOST_BEGUN = 1_000_000
"""Groups that can have been begun between two entries; more is a number gone wrong, and not worth walking through."""


class Fates:
    """Follow all groups from their start to their end. Takes eight bytes per group."""

    def __init__(self, order: OrderAudit, findings: Findings) -> None:
        self.counts: Counter[str] = Counter()  # rollouts: trained, dropped
        self.reasons: Counter[str] = Counter()
        self.num_open = 0
        self._order = order
        self._findings = findings
        self._batch_of = array("q")  # by group: which batch decided it
        self._open: dict[int, OpenGroup | None] = {}  # what the data order says that they are
        self._reported: set[int] = set()  # groups known to be lost
        self._counters = {"trained": 0, "dropped": 0}  # by the journal

    @property
    def num_begun(self) -> int:
        return len(self._batch_of)

    def take(self, record: BatchRecord, rules: Rules, *, after_gap: bool) -> None:
        """Check the next entry.

        Args:
            after_gap: the entries before it could not be read, so what they decided is unknown.
        """
        add = partial(self._findings.add, "fates", record.step)
        groups: dict[int, list[Fate]] = defaultdict(list)
        ended: list[Fate] = [*record.rollouts, *record.dropped]
        for fate in ended:
            groups[fate.group].append(fate)
        self._order.begin(record, rules, after_gap=after_gap)
        next_group = record.state.next_group
        if 0 <= next_group - self.num_begun <= MOST_BEGUN:
            for group in range(self.num_begun, next_group):
                self._open[group] = self._order.task(group, rules)
                self._batch_of.append(OPEN)
        else:
            add(
                f"batch {record.step}: the next group is {next_group}, {self.num_begun} were begun before",
                expected="groups numbered one by one",
                meaning="A run that resumes from here would use group numbers twice, or leave some out. Look at "
                "`state.next_group` of this batch.",
            )
        self._order.close(record, rules)
        for group, fates in sorted(groups.items()):
            self._decide(record.step, group, fates, rules)
        self._compare_open(record, after_gap=after_gap)
        num_trained = len({rollout.group for rollout in record.rollouts})
        if len(record.rollouts) != rules.batch_size or num_trained != rules.batch_size // rules.group_size:
            add(
                f"batch {record.step} has {len(record.rollouts)} rollouts of {num_trained} groups",
                expected=f"{rules.batch_size} rollouts, {rules.group_size} of each group",
                meaning="Rollouts were lost from the batch, or added to it.",
            )
        for dropped in record.dropped:
            kind = kind_of(dropped.reason)
            self.reasons[kind if kind in self.reasons or len(self.reasons) < MOST_REASONS else "others"] += 1
        for name, number in (("trained", len(record.rollouts)), ("dropped", len(record.dropped))):
            self.counts[name] += number
            before, found = self._counters[name], record.state.counters.get(name, 0)
            if found != before + number and not after_gap:
                add(
                    f"batch {record.step}: the journal counts {found} rollouts {name} so far",
                    expected=f"{before + number}: {before} up to the batch before and {number} in this one",
                    meaning=f"A batch was changed, or rollouts were lost. Look at `state.counters`, and those {name}.",
                )
            self._counters[name] = found

    def _decide(self, step: int, group: int, fates: list[Fate], rules: Rules) -> None:
        """Check a group that was trained or dropped in this batch."""
        add = partial(self._findings.add, "fates", step)
        if not 0 <= group < self.num_begun:
            add(
                f"batch {step} decides group {group}, which was never begun",
                expected=f"groups 0 to {self.num_begun - 1}",
                meaning="Rollouts came from nowhere. Look at `state.next_group` and the rollouts of this batch.",
            )
        elif group in self._open:
            task = self._open.pop(group)
            self._batch_of[group] = step
            for one in fates:
                if task is not None and (one.env, one.example) != (task.env, task.example):
                    name = f"group {group}, place {one.place}, attempt {one.attempt}"
                    self._add_wrong_task(step, f"{name} is {one.env} example {one.example}", task)
                    break
        elif self._batch_of[group] >= 0:
            how, twice = ("trained", "trained") if isinstance(fates[0], Rollout) else ("dropped", "counted")
            add(
                f"batch {step}: group {group} is {how} here, and batch {self._batch_of[group]} had decided it before",
                expected="one fate of each rollout, in one batch",
                meaning=f"A rollout was {twice} twice. Compare the group in both batches.",
            )
        self._reported.discard(group)
        if trouble := _find_trouble(group, fates, rules):
            add(
                f"batch {step}: {trouble[0]}",
                expected=trouble[1],
                meaning="A rollout was lost, counted twice, or torn from its group. Look at the rollouts and the "
                "dropped ones of this group in this batch.",
            )

    def _add_wrong_task(self, step: int, found: str, task: OpenGroup) -> None:
        self._findings.add(
            "order",
            step,
            f"batch {step}: {found}",
            expected=f"group {task.id} is {task.env} example {task.example}, by the data order",
            meaning="An example was skipped and another one came out of turn.",
        )

    def _compare_open(self, record: BatchRecord, *, after_gap: bool) -> None:
        """Check the groups that the batch lists as open."""
        step, listed = record.step, Counter(group.id for group in record.state.open_groups)
        add = partial(self._findings.add, "fates", step)
        for task in record.state.open_groups:
            if task.id not in self._open or listed[task.id] > 1:
                why = "it was never begun"
                if 0 <= task.id < self.num_begun:
                    batch = self._batch_of[task.id]
                    why = f"batch {batch} has decided it" if batch >= 0 else "it is listed twice"
                add(
                    f"batch {step} lists group {task.id} as open, and {why}",
                    expected="open groups that were begun, have no fate yet, and are listed once",
                    meaning="A run that resumes from here would train it twice. Look at `state.open_groups` of this "
                    "batch.",
                )
            elif (due := self._open[task.id]) is not None and due != task:
                self._add_wrong_task(step, f"open group {task.id} is {task.env} example {task.example}", due)
        missing = [group for group in self._open if group not in listed and group not in self._reported]
        if missing and after_gap:
            for group in missing:
                del self._open[group]
                self._batch_of[group] = UNREADABLE
        elif missing:
            self._reported |= set(missing)
            add(
                f"batch {step}: group{'s' * (len(missing) > 1)} {some(missing)} began and had no fate until now, and "
                "the batch does not list them as open",
                expected="each group that was begun is trained, dropped or open",
                meaning="Examples were lost: a resumed run would not roll them out again. Look at `state.open_groups` "
                "of this batch and of the one before.",
            )
        self.num_open = len(listed)


def kind_of(reason: str) -> str:
    """Reduce many reasons to few kinds.

    Example:
        kind_of("score: ValueError: no number in 'abc'")  # "score: ValueError"
        kind_of("stale: begun under version 3")           # "stale"
    """
    stage, _, rest = reason.partition(":")
    error = re.match(r"\s*([A-Za-z_][\w.]*)(?=:|$)", rest)
    return f"{stage}: {error[1]}" if error and len(stage) < 30 else stage[:30]


# consistency of one group in one entry

TRAINED = "trained"


def _find_trouble(group: int, fates: list[Fate], rules: Rules) -> tuple[str, str] | None:
    """Return the first inconsistency, and what was expected; None where there is none."""
    is_trained = isinstance(fates[0], Rollout)
    by_place: dict[int, list[tuple[int, str]]] = {place: [] for place in range(rules.group_size)}
    for fate in fates:
        by_place.setdefault(fate.place, []).append(
            (fate.attempt, TRAINED if isinstance(fate, Rollout) else fate.reason)
        )
    for place, attempts in sorted(by_place.items()):
        attempts.sort()
        if trouble := _find_trouble_of_place(place, attempts, rules, is_trained=is_trained):
            return f"group {group}, place {place} {trouble[0]}", trouble[1]
    if is_trained:
        return None
    # It was dropped for one reason. Failed attempts have their own, and so has the last attempt of a place without
    # attempts left.
    reasons = {attempts[-1][1] for attempts in by_place.values() if len(attempts) < rules.max_attempts}
    earlier = {reason for attempts in by_place.values() for _, reason in attempts[:-1]}
    if len(reasons) > 1:
        return f"group {group} was dropped for {len(reasons)} reasons: {'; '.join(sorted(reasons))}", "one"
    if reasons & earlier:
        return f"group {group} was dropped as a whole, and then one of it once more", "the last attempt of each place"
    return None


def _find_trouble_of_place(
    place: int, attempts: list[tuple[int, str]], rules: Rules, *, is_trained: bool
) -> tuple[str, str] | None:
    if not 0 <= place < rules.group_size:
        return "is beyond its group", f"places 0 to {rules.group_size - 1}"
    if not attempts:
        return "has no fate", "one fate of each place"
    if not all(fate for _, fate in attempts):
        return "was dropped without a reason", "a reason for each"
    words = ", ".join(f"attempt {number} {TRAINED if fate == TRAINED else 'dropped'}" for number, fate in attempts)
    if [number for number, _ in attempts] != list(range(len(attempts))):
        return f"has {words}", "each attempt once, counted from 0"
    if len(attempts) > rules.max_attempts:
        return f"has {words}", f"at most {rules.max_attempts} attempts"
    if any(fate == TRAINED for _, fate in attempts[:-1]):
        return f"has {words}", "nothing after the attempt that was trained"
    if is_trained and attempts[-1][1] != TRAINED:
        return f"has {words}, and others of its group were trained", "a group that is trained, or dropped, as a whole"
    return None
