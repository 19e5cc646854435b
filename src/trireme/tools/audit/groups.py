"""What a batch may say of one group: all its places are trained, or all are dropped, whatever failed before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from trireme.algo.rules import Rules
from trireme.journal.records import Dropped, Rollout

Fate = Rollout | Dropped

TRAINED = "trained"

Attempts = Mapping[int, list[tuple[int, str]]]
"""By place: each attempt, in order, and what became of it; a reason where it was dropped."""


@dataclass
class Decided:
    """What one entry says of one group."""

    trained: list[Rollout] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)

    @property
    def fates(self) -> list[Fate]:
        return [*self.trained, *self.dropped]

    def is_plain(self, size: int) -> bool:
        """Trained at the first attempt, all of it: most groups."""
        return (
            not self.dropped
            and [rollout.place for rollout in self.trained] == list(range(size))
            and not any(rollout.attempt for rollout in self.trained)
        )

    def attempts(self, size: int) -> Attempts:
        by_place: dict[int, list[tuple[int, str]]] = defaultdict(list, {place: [] for place in range(size)})
        for rollout in self.trained:
            by_place[rollout.place].append((rollout.attempt, TRAINED))
        for dropped in self.dropped:
            by_place[dropped.place].append((dropped.attempt, dropped.reason))
        return {place: sorted(by_place[place]) for place in sorted(by_place)}


def find_trouble(group: int, said: Decided, rules: Rules) -> tuple[str, str] | None:
    """The first thing that cannot be, and what was expected."""
    if said.is_plain(rules.group_size):
        return None
    by_place = said.attempts(rules.group_size)
    for place, attempts in by_place.items():
        if trouble := _of_place(place, attempts, rules, is_trained=bool(said.trained)):
            return f"group {group}, place {place} {trouble[0]}", trouble[1]
    return None if said.trained else _of_reasons(group, by_place, rules)


def _of_place(place: int, attempts: list[tuple[int, str]], rules: Rules, *, is_trained: bool) -> tuple[str, str] | None:
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


def _of_reasons(group: int, by_place: Attempts, rules: Rules) -> tuple[str, str] | None:
    """A group is dropped for one reason. Where attempts failed before, they have their own, and so has the last of a
    place that was tried as often as it may be."""
    reasons = {attempts[-1][1] for attempts in by_place.values() if len(attempts) < rules.max_attempts}
    earlier = {reason for attempts in by_place.values() for _, reason in attempts[:-1]}
    if len(reasons) > 1:
        return f"group {group} was dropped for {len(reasons)} reasons: {'; '.join(sorted(reasons))}", "one"
    if reasons & earlier:
        return f"group {group} was dropped as a whole, and then one of it once more", "the last attempt of each place"
    return None
