"""Whatever befalls groups, a batch has as many rollouts as it should, none of them stale, and nothing is forgotten.

A scheduler that hands out groups as they were drawn stands in for the real one: it finishes nothing, and loses nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.config.run import RunConfig
from trireme.ledger.records import OpenGroup, Rollout, State
from trireme.messages import build_tokens
from trireme.orchestrator.batcher import Batcher, Filled
from trireme.orchestrator.scheduler import Group

SIZE, GROUPS = 3, 2
STEP, ALLOWED = 6, 2

FATES = ("good", "flat", "nearly flat", "truncated", "stale", "given up")
"""What may befall a group; those after the first one cost it its place where the run says so."""

drops_all = {
    "buffer": {"online_difficulty_filtering": True, "use_difficulty_filtering": True, "difficulty_threshold": 0.01},
    "filters": {"truncated": "drop"},
}


def config_of(**orchestrator: Any) -> RunConfig:
    given = {"batch_size": SIZE * GROUPS, "rollouts_per_example": SIZE, "max_off_policy_steps": ALLOWED}
    return RunConfig.model_validate({"device": "cpu", "orchestrator": given | {"env": [{"id": "a"}]} | orchestrator})


REWARDS = {"flat": [0.5, 0.5, 0.5], "nearly flat": [0.5, 0.5, 0.55]}


def group_of(number: int, fate: str) -> Group:
    group = Group(task=OpenGroup(number, "a", number * 7 % 5), issued_at=STEP)
    if fate == "given up":
        group.drop("group given up: rollout 1 failed 3 times", SIZE)
        return group
    version = STEP - ALLOWED - 1 if fate == "stale" else STEP - number % (ALLOWED + 1)
    rewards = REWARDS.get(fate, [0.0, 0.5, 1.0])
    for place in range(SIZE):
        columns = {"ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0], "advantages": [0.0, 0.0]}
        sample, cut = build_tokens(**columns, versions=[-1, version]), fate == "truncated" and place == 1
        rollout = Rollout(number, place, 0, "a", group.task.example, rewards[place], [sample], 1.0, truncated=cut)
        group.rollouts.append(rollout)
    return group


@dataclass
class Queue:
    """Hands out groups in the order given."""

    groups: list[Group]
    num_accepted: int = 0
    refused: list[str] = field(default_factory=list)

    async def next_group(self) -> Group:
        return self.groups.pop(0)

    def accepted(self) -> None:
        self.num_accepted += 1

    def not_accepted(self, reason: str) -> None:
        self.refused.append(reason)


def fill(config: RunConfig, groups: list[Group], state: State | None = None) -> tuple[Filled, Queue]:
    queue = Queue(list(groups))
    return asyncio.run(Batcher(config, queue, state).fill(STEP)), queue  # type: ignore[arg-type]


@given(fates=st.lists(st.sampled_from(FATES), max_size=12), seed=st.integers(0, 99))
def test_the_effective_batch_is_constant_under_any_mix_of_drops(fates: list[str], seed: int) -> None:
    fates = [*fates, *["good"] * GROUPS]
    numbers = np.random.default_rng(seed).permutation(len(fates)).tolist()  # the order in which they finish
    filled, queue = fill(config_of(**drops_all), [group_of(number, fates[number]) for number in numbers])
    handed_out = numbers[: len(numbers) - len(queue.groups)]
    good = sorted(number for number in handed_out if fates[number] == "good")

    assert len(good) == GROUPS == queue.num_accepted
    assert [(r.group, r.place) for r in filled.rollouts] == [(n, p) for n in good for p in range(SIZE)]
    assert min(rollout.oldest_version for rollout in filled.rollouts) >= STEP - ALLOWED
    dropped = sorted((drop.group, drop.place) for drop in filled.dropped)
    assert dropped == sorted((n, p) for n in handed_out if fates[n] != "good" for p in range(SIZE))
    assert len(queue.refused) == len(handed_out) - GROUPS
    ended = sorted(number for number in handed_out if fates[number] not in ("stale", "given up"))
    assert [outcome.group for outcome in filled.outcomes] == ended


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("flat", "no signal: all rewards of the group are equal"),
        ("nearly flat", "little signal: the rewards of the group vary by 0.000556"),
        ("truncated", "truncated: rollout 1 of its group"),
        ("stale", f"stale: version {STEP - ALLOWED - 1} sampled a part of it"),
        ("given up", "group given up: rollout 1 failed 3 times"),
    ],
)
def test_a_group_is_dropped_for_the_reason_that_befell_it(fate: str, reason: str) -> None:
    filled, _ = fill(config_of(**drops_all), [group_of(0, fate), group_of(1, "good"), group_of(2, "good")])
    assert {drop.reason for drop in filled.dropped} == {reason}


def test_where_nothing_is_filtered_only_stale_and_failed_groups_go() -> None:
    filled, queue = fill(config_of(), list(map(group_of, range(4), ["given up", "stale", "flat", "truncated"])))
    assert not queue.groups
    assert {rollout.group for rollout in filled.rollouts} == {2, 3}


def test_flaws_are_counted_and_masked_as_configured(caplog) -> None:
    groups = [group_of(0, "flat"), group_of(1, "truncated")]
    filled, _ = fill(config_of(filters={"truncated": "mask", "zero_advantage": "mask"}), groups)
    # the truncated one has the group's mean as its reward: advantage 0, but it was truncated first
    flaws = [["zero_advantage"]] * 3 + [[], ["truncated", "zero_advantage"], []]
    assert [rollout.masked for rollout in filled.rollouts] == ["zero_advantage"] * 3 + [None, "truncated", None]
    counted, _ = fill(config_of(), [group_of(0, "flat"), group_of(1, "truncated")])
    assert [rollout.masked for rollout in counted.rollouts] == [None] * 6
    assert [rollout.flaws for rollout in counted.rollouts] == [rollout.flaws for rollout in filled.rollouts] == flaws
    assert "masked" not in caplog.text
    filled, _ = fill(config_of(filters={"zero_advantage": "mask"}), [group_of(0, "flat"), group_of(1, "flat")])
    assert len(filled.rollouts) == SIZE * GROUPS
    assert "all 6 rollouts are masked (zero_advantage)" in caplog.text


def test_a_running_mean_goes_on_from_where_the_journal_left_it() -> None:
    config = config_of(advantage={"type": "ema", "decay": 0.5})
    filled, _ = fill(config, [group_of(0, "good"), group_of(1, "good")], State(baselines={"a": 0.25}))
    assert filled.baselines == {"a": 0.375}
    advantages = [float(rollout.samples[0].advantages[1]) for rollout in filled.rollouts[:3]]
    assert advantages == [-0.25, 0.25, 0.75]
