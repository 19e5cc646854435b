"""The fates of rollouts: every one that was started is trained in one batch, dropped for a reason, or still open.

A group is decided as a whole, in one entry; failed attempts of its rollouts are in the same one.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from trireme.algo.rules import Rules
from trireme.journal.records import BatchRecord, Dropped, OpenGroup, Rollout
from trireme.tools.audit.examples import OrderAudit
from trireme.tools.audit.report import Findings, some

OPEN, UNREADABLE = -1, -2  # instead of a batch

MOST_REASONS = 50

MOST_BEGUN = 1_000_000
"""Groups that can have been begun between two entries; more is a number gone wrong, and not worth walking through."""


class Fates:
    """Follow all groups from their start to their end. Takes eight bytes per group."""

    def __init__(self, order: OrderAudit, findings: Findings) -> None:
        self.trained = 0  # rollouts
        self.dropped = 0
        self.reasons: Counter[str] = Counter()
        self.num_open = 0
        self._order = order
        self._findings = findings
        self._batch_of = array("q")  # by group: which batch decided it
        self._open: dict[int, OpenGroup | None] = {}  # what the data order says that they are
        self._reported: set[int] = set()  # groups known to be lost
        self._counters = {"trained": 0, "dropped": 0}

    @property
    def num_begun(self) -> int:
        return len(self._batch_of)

    def take(self, record: BatchRecord, rules: Rules, *, after_gap: bool) -> None:
        """Check the next entry.

        Args:
            after_gap: the entries before it could not be read, so what they decided is unknown.
        """
        groups: dict[int, Decided] = defaultdict(Decided)
        for rollout in record.rollouts:
            groups[rollout.group].trained.append(rollout)
        for dropped in record.dropped:
            groups[dropped.group].dropped.append(dropped)
        self._order.begin(record, rules, after_gap=after_gap)
        next_group = record.state.next_group
        if 0 <= next_group - self.num_begun <= MOST_BEGUN:
            for group in range(self.num_begun, next_group):
                self._open[group] = self._order.task(group, rules)
                self._batch_of.append(OPEN)
        else:
            self._findings.add(
                "fates",
                record.step,
                f"batch {record.step}: the next group is {next_group}, {self.num_begun} were begun before",
                expected="groups numbered one by one",
                meaning="A run that resumes from here would use group numbers twice, or leave some out. Look at "
                "`state.next_group` of this batch.",
            )
        self._order.close(record, rules)
        for group, decided in sorted(groups.items()):
            self._decide(record.step, group, decided, rules)
        self._compare_open(record, after_gap=after_gap)
        num_trained = sum(bool(decided.trained) for decided in groups.values())
        if len(record.rollouts) != rules.batch_size or num_trained != rules.batch_size // rules.group_size:
            self._findings.add(
                "fates",
                record.step,
                f"batch {record.step} has {len(record.rollouts)} rollouts of {num_trained} groups",
                expected=f"{rules.batch_size} rollouts, {rules.group_size} of each group",
                meaning="Rollouts were lost from the batch, or added to it.",
            )
        self._count(record, after_gap=after_gap)

    def _decide(self, step: int, group: int, decided: Decided, rules: Rules) -> None:
        """Check a group that was trained or dropped in this batch."""
        if not 0 <= group < self.num_begun:
            self._findings.add(
                "fates",
                step,
                f"batch {step} decides group {group}, which was never begun",
                expected=f"groups 0 to {self.num_begun - 1}",
                meaning="Rollouts came from nowhere. Look at `state.next_group` and the rollouts of this batch.",
            )
        elif group in self._open:
            task = self._open.pop(group)
            self._batch_of[group] = step
            fates: list[Rollout | Dropped] = [*decided.trained, *decided.dropped]
            for one in fates:
                if task is not None and (one.env, one.example) != (task.env, task.example):
                    name = f"group {group}, place {one.place}, attempt {one.attempt}"
                    self._add_wrong_task(step, f"{name} is {one.env} example {one.example}", task)
                    break
        elif self._batch_of[group] >= 0:
            how = "trained" if decided.trained else "dropped"
            self._findings.add(
                "fates",
                step,
                f"batch {step}: group {group} is {how} here, and batch {self._batch_of[group]} had decided it before",
                expected="one fate of each rollout, in one batch",
                meaning=f"A rollout was {how if decided.trained else 'counted'} twice. Compare the group in both "
                "batches.",
            )
        self._reported.discard(group)
        if trouble := _find_trouble(group, decided, rules):
            self._findings.add(
                "fates",
                step,
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
        for task in record.state.open_groups:
            if task.id not in self._open or listed[task.id] > 1:
                why = "it was never begun"
                if 0 <= task.id < self.num_begun:
                    batch = self._batch_of[task.id]
                    why = f"batch {batch} has decided it" if batch >= 0 else "it is listed twice"
                self._findings.add(
                    "fates",
                    step,
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
            self._findings.add(
                "fates",
                step,
                f"batch {step}: group{'s' * (len(missing) > 1)} {some(missing)} began and had no fate until now, and "
                "the batch does not list them as open",
                expected="each group that was begun is trained, dropped or open",
                meaning="Examples were lost: a resumed run would not roll them out again. Look at `state.open_groups` "
                "of this batch and of the one before.",
            )
        self.num_open = len(listed)

    def _count(self, record: BatchRecord, *, after_gap: bool) -> None:
        """Compare the journal's counters with the rollouts of each batch."""
        here = {"trained": len(record.rollouts), "dropped": len(record.dropped)}
        self.trained += here["trained"]
        self.dropped += here["dropped"]
        for dropped in record.dropped:
            kind = kind_of(dropped.reason)
            self.reasons[kind if kind in self.reasons or len(self.reasons) < MOST_REASONS else "others"] += 1
        for name, number in here.items():
            before, found = self._counters[name], record.state.counters.get(name, 0)
            if found != before + number and not after_gap:
                self._findings.add(
                    "fates",
                    record.step,
                    f"batch {record.step}: the journal counts {found} rollouts {name} so far",
                    expected=f"{before + number}: {before} up to the batch before and {number} in this one",
                    meaning=f"A batch was changed, or rollouts were lost. Look at `state.counters`, and those {name}.",
                )
            self._counters[name] = found


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

Attempts = Mapping[int, list[tuple[int, str]]]
"""By place: each attempt, in order, and what became of it; a reason where it was dropped."""


@dataclass
class Decided:
    """The rollouts of one group in one entry."""

    trained: list[Rollout] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)


def _find_trouble(group: int, decided: Decided, rules: Rules) -> tuple[str, str] | None:
    """Return the first inconsistency, and what was expected; None where there is none."""
    by_place: dict[int, list[tuple[int, str]]] = {place: [] for place in range(rules.group_size)}
    for rollout in decided.trained:
        by_place.setdefault(rollout.place, []).append((rollout.attempt, TRAINED))
    for dropped in decided.dropped:
        by_place.setdefault(dropped.place, []).append((dropped.attempt, dropped.reason))
    for place, attempts in sorted(by_place.items()):
        attempts.sort()
        if trouble := _find_trouble_of_place(place, attempts, rules, is_trained=bool(decided.trained)):
            return f"group {group}, place {place} {trouble[0]}", trouble[1]
    return None if decided.trained else _find_trouble_of_reasons(group, by_place, rules)


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


def _find_trouble_of_reasons(group: int, by_place: Attempts, rules: Rules) -> tuple[str, str] | None:
    """Check that a group was dropped for one reason. Failed attempts have their own reasons, and so has the last
    attempt of a place without attempts left.
    """
    reasons = {attempts[-1][1] for attempts in by_place.values() if len(attempts) < rules.max_attempts}
    earlier = {reason for attempts in by_place.values() for _, reason in attempts[:-1]}
    if len(reasons) > 1:
        return f"group {group} was dropped for {len(reasons)} reasons: {'; '.join(sorted(reasons))}", "one"
    if reasons & earlier:
        return f"group {group} was dropped as a whole, and then one of it once more", "the last attempt of each place"
    return None
