"""Faults in what a batch goes by where a run has it: pools, curriculum, filters, penalties, a teacher, running means.

Of the form of those in `planted_faults.py`; planted in a run of `write_whole_run(..., rich=True)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from planted_faults import Plant, change_batch
from trireme.ledger.records import BatchRecord, Rollout
from trireme.ledger.targets import with_advantages


def change_rules(**fields: Any) -> Plant:
    """As if the batch had been filled by others than it says."""
    return change_batch(3, lambda record: setattr(record, "rules", msgspec.structs.replace(record.rules, **fields)))


def change_first(condition: Callable[[Rollout], bool], change: Callable[[Rollout], Any]) -> Plant:
    """The first rollout of which it holds, in batch 3."""
    return change_batch(3, lambda record: change(next(filter(condition, record.rollouts))))


def without_its_mean(rollout: Rollout) -> None:
    """What a rollout would get whose reward was compared with nothing."""
    rollout.samples = [
        with_advantages(sample, (sample.loss_mask * rollout.reward).astype(np.float32)) for sample in rollout.samples
    ]


def change_array(name: str, value: float) -> Callable[[Rollout], None]:
    def change(rollout: Rollout) -> None:
        first = getattr(rollout, name)[0].copy()
        first[int(np.flatnonzero(~np.isnan(first))[0])] = value
        setattr(rollout, name, [first, *getattr(rollout, name)[1:]])

    return change


def change_score(record: BatchRecord) -> None:
    scores = record.state.scores["a"]
    means = scores.means.copy()
    means[0] += 0.25
    record.state.scores["a"] = msgspec.structs.replace(scores, means=means)


def forget_a_score(record: BatchRecord) -> None:
    scores = record.state.scores["a"]
    record.state.scores["a"] = msgspec.structs.replace(scores, examples=scores.examples[1:], means=scores.means[1:])


def change_outcome(**fields: Any) -> Callable[[BatchRecord], None]:
    """Of the first group that was trained on."""

    def change(record: BatchRecord) -> None:
        trained = {rollout.group for rollout in record.rollouts}
        place = next(n for n, outcome in enumerate(record.outcomes) if outcome.group in trained)
        record.outcomes[place] = msgspec.structs.replace(record.outcomes[place], **fields)

    return change


def take_another_example(record: BatchRecord) -> None:
    """One that was not due: the whole group, wherever it stands."""
    group = record.rollouts[0].group
    for rollout in record.rollouts:
        if rollout.group == group:
            rollout.example += 1 if rollout.example == 0 else -1


RICH_FAULTS: dict[str, tuple[Plant, int, str]] = {
    # what tokens were trained towards
    "an advantage was compared with nothing": (
        change_first(lambda rollout: True, without_its_mean),
        3,
        "in `advantages`",
    ),
    "the length was not punished": (change_rules(length_penalty=None), 3, "in `advantages`"),
    "the length was punished otherwise": (
        change_batch(
            3,
            lambda record: setattr(
                record,
                "rules",
                msgspec.structs.replace(
                    record.rules,
                    length_penalty=msgspec.structs.replace(record.rules.length_penalty, max_length=24),
                ),
            ),
        ),
        3,
        "in `advantages`",
    ),
    "advantages were not cut": (change_rules(clip=None), 3, "in `advantages`"),
    "rewards were not cut": (change_rules(reward_clip=(0.0, 0.5)), 3, "in `advantages`"),
    "the teacher counted more": (change_rules(teacher_weight=2.0), 3, "in `advantages`"),
    "a group mean instead of a running one": (change_rules(advantage="group_mean"), 3, "in `advantages`"),
    "the teacher said something else": (
        change_first(lambda rollout: True, change_array("teacher", -20.0)),
        3,
        "in `advantages`",
    ),
    "the teacher was not asked": (
        change_first(lambda rollout: True, lambda rollout: setattr(rollout, "teacher", [])),
        3,
        "`teacher` for .. tokens",
    ),
    "the teacher said nothing of a token": (
        change_first(lambda rollout: True, change_array("teacher", np.nan)),
        3,
        "of which `teacher` says nothing",
    ),
    "a step's reward is another": (
        change_first(lambda rollout: True, change_array("token_rewards", 40.0)),
        3,
        "in `advantages`",
    ),
    "a step's reward is of no token": (
        change_first(lambda rollout: True, lambda rollout: rollout.token_rewards.append(np.zeros(3, np.float32))),
        3,
        "`token_rewards` for",
    ),
    "a running mean is another": (
        change_batch(3, lambda record: record.state.baselines.update(a=0.125)),
        3,
        "running mean reward of a is 0.125",
    ),
    # what is wrong with a rollout
    "one is masked without a flaw": (
        change_first(lambda rollout: not rollout.flaws, lambda rollout: setattr(rollout, "masked", "truncated")),
        3,
        "is masked for truncated",
    ),
    "one that is flawed is not masked": (
        change_first(lambda rollout: rollout.masked is not None, lambda rollout: setattr(rollout, "masked", None)),
        3,
        "is masked for nothing",
    ),
    "a flaw is made up": (
        change_first(lambda rollout: not rollout.flaws, lambda rollout: rollout.flaws.append("repetition")),
        3,
        "has the flaws repetition",
    ),
    "a flaw is forgotten": (
        change_first(lambda rollout: bool(rollout.flaws), lambda rollout: rollout.flaws.clear()),
        3,
        "has the flaws none",
    ),
    "one is trained on whose group should be dropped": (
        change_batch(
            3,
            lambda record: setattr(
                record,
                "rules",
                msgspec.structs.replace(
                    record.rules, filters=msgspec.structs.replace(record.rules.filters, truncated="drop")
                ),
            ),
        ),
        3,
        "is masked for truncated|is trained though it is flawed: truncated",
    ),
    "a group says too little": (change_rules(least_variance=100.0), 3, "is trained, and there is little signal"),
    # which example came
    "an example is not the one that was due": (change_batch(3, take_another_example), 3, "group .* is . example"),
    "a score is another": (change_batch(3, change_score), 3, "the journal's score of a example"),
    "a score is forgotten": (change_batch(3, forget_a_score), 3, "the journal's score of a example .* is nothing"),
    "the stage is another": (
        change_batch(3, lambda record: setattr(record.state, "stage", 0)),
        3,
        "is in stage 0 of the curriculum",
    ),
    "the stage's reward is another": (
        change_batch(3, lambda record: setattr(record.state, "stage_reward", 0.75)),
        3,
        "at a mean reward of 0.75",
    ),
    # how groups did
    "an outcome is missing": (change_batch(3, lambda record: record.outcomes.pop()), 3, "says how groups|score of"),
    "an outcome is there twice": (
        change_batch(3, lambda record: record.outcomes.append(record.outcomes[0])),
        3,
        "says how groups|score of|is in stage",
    ),
    "an outcome is of other rewards": (
        change_batch(3, change_outcome(mean=7.0)),
        3,
        "score of|is in stage|with a mean reward of 7",
    ),
}
