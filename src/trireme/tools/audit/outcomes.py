"""Outcomes of the groups that ended with a batch, which drive difficulty pools and the curriculum."""

from __future__ import annotations

from trireme.algo.difficulty import Outcome
from trireme.algo.filters import FLAWS
from trireme.algo.rules import Rules
from trireme.journal.records import BatchRecord, Dropped
from trireme.journal.targets import by_group, outcome_of
from trireme.tools.audit.findings import Findings, some

CAME_TO_THEIR_END = ("no signal", "little signal", *FLAWS)
"""Kinds of reasons for which a group was dropped whose rewards were all there, and counted."""


def check_outcomes(record: BatchRecord, rules: Rules, findings: Findings) -> None:
    """Check that each group that was trained, or ended without being worth it, has one outcome."""
    if rules.filters is None:  # written before outcomes were
        return
    trained = {number: outcome_of(group) for number, group in by_group(record.rollouts).items()}
    dropped = {number: gone for gone in record.dropped if came_to_its_end(gone) for number in [gone.group]}
    listed = [outcome.group for outcome in record.outcomes]
    due = sorted(trained.keys() | dropped.keys())
    if listed != due:
        findings.add(
            "outcomes",
            record.step,
            f"batch {record.step} says how groups {some(listed) or 'none'} did",
            expected=f"groups {some(due)}, each once: trained, or dropped when their rewards were in",
            meaning="The difficulty of examples, or the stage of the curriculum, was judged by other groups. Look at "
            "`outcomes` of this batch.",
        )
        return
    wrong = next((one for one in record.outcomes if not _agrees(one, trained, dropped)), None)
    if wrong is not None:
        findings.add(
            "outcomes",
            record.step,
            f"batch {record.step}: by its outcome, group {wrong.group} is {wrong.env} example {wrong.example}, with a "
            f"mean reward of {wrong.mean:.9g}",
            expected=_expected(wrong, trained, dropped),
            meaning="An example was judged by rewards that were not its own. Compare `outcomes` of this batch with the "
            "rollouts.",
        )


def came_to_its_end(gone: Dropped) -> bool:
    return gone.reason.partition(":")[0] in CAME_TO_THEIR_END


def _agrees(outcome: Outcome, trained: dict[int, Outcome], dropped: dict[int, Dropped]) -> bool:
    if outcome.group in trained:
        return outcome == trained[outcome.group]
    gone = dropped[outcome.group]  # its rewards are kept nowhere else
    return (outcome.env, outcome.example) == (gone.env, gone.example)


def _expected(outcome: Outcome, trained: dict[int, Outcome], dropped: dict[int, Dropped]) -> str:
    if (right := trained.get(outcome.group)) is not None:
        return f"{right.env} example {right.example}, with {right.mean:.9g}, by its rollouts"
    gone = dropped[outcome.group]
    return f"{gone.env} example {gone.example}, by those of it that were dropped"
