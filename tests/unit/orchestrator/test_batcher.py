"""A batch has as many rollouts as it should, whatever happens to groups, and metrics as worked out by hand."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.config.run import RunConfig
from trireme.journal.records import Cursor, Dropped, OpenGroup, Outcome, Rollout, Scores, State
from trireme.messages import Tokens, build_tokens
from trireme.orchestrator.batch_metrics import batch_metrics, state_metrics
from trireme.orchestrator.batcher import Batcher, Filled
from trireme.orchestrator.scheduler import Group

SIZE, GROUPS = 3, 2
STEP, ALLOWED = 6, 2

REASONS = {
    "flat": "no signal: all rewards of the group are equal",
    "nearly flat": "little signal: the rewards of the group vary by 0.000556",
    "truncated": "truncated: rollout 1 of its group",
    "stale": f"stale: a part of it is of version {STEP - ALLOWED - 1}",
    "given up": "group given up: rollout 1 failed 3 times",
}
"""Why a group loses its place in a run that drops for all of them."""

FILTERS = {"online_difficulty_filtering": True, "use_difficulty_filtering": True, "difficulty_threshold": 0.01}


def config_of(**orchestrator: Any) -> RunConfig:
    given = {"batch_size": SIZE * GROUPS, "rollouts_per_example": SIZE, "max_off_policy_steps": ALLOWED}
    return RunConfig.model_validate({"device": "cpu", "orchestrator": given | {"env": [{"id": "a"}]} | orchestrator})


def sample(versions: list[int], *, advantage: float = 1.0) -> Tokens:
    mask, all_versions = np.array([0, 0] + [1] * len(versions)), [-1, -1, *versions]
    return build_tokens(ids=mask, loss_mask=mask, logprobs=0 * mask, advantages=advantage * mask, versions=all_versions)


def rollout(group: int, reward: float, versions: list[int], **fields) -> Rollout:
    given = {"env": "a", "place": 0, "attempt": 0, "example": group, "temperature": 1.0}
    return Rollout(group=group, reward=reward, samples=[sample(versions)], **given | fields)


REWARDS = {"flat": [0.5, 0.5, 0.5], "nearly flat": [0.5, 0.5, 0.55]}


def group_of(number: int, fate: str) -> Group:
    group = Group(task=OpenGroup(number, "a", number * 7 % 5), issued_at=STEP)
    if fate == "given up":
        group.drop("group given up: rollout 1 failed 3 times", SIZE)
        return group
    version = STEP - ALLOWED - 1 if fate == "stale" else STEP - number % (ALLOWED + 1)
    for place, reward in enumerate(REWARDS.get(fate, [0.0, 0.5, 1.0])):
        about = {"place": place, "example": group.task.example, "truncated": fate == "truncated" and place == 1}
        group.rollouts.append(rollout(number, reward, [version], **about))
    return group


@dataclass
class Queue:
    groups: list[Group]
    size: int
    num_accepted: int = 0
    refused: list[str] = field(default_factory=list)

    @property
    def is_filled(self) -> bool:
        return self.num_accepted >= self.size

    def accept(self, group: Group) -> None:
        self.num_accepted += len(group.rollouts)

    async def next_group(self) -> Group:
        return self.groups.pop(0)

    def not_accepted(self, reason: str) -> None:
        self.refused.append(reason)


def fill(config: RunConfig, groups: list[Group], state: State | None = None) -> tuple[Filled, Queue]:
    queue = Queue(list(groups), config.orchestrator.batch_size)
    return asyncio.run(Batcher(config, queue, state or State()).fill(STEP)), queue  # type: ignore[arg-type]


@given(fates=st.lists(st.sampled_from(["good", *REASONS]), max_size=12), seed=st.integers(0, 99))
def test_the_effective_batch_is_constant_under_any_mix_of_drops(fates: list[str], seed: int):
    fates = [*fates, *["good"] * GROUPS]
    numbers = np.random.default_rng(seed).permutation(len(fates)).tolist()  # the order in which they finish
    config = config_of(buffer=FILTERS, filters={"truncated": "drop"})
    filled, queue = fill(config, [group_of(number, fates[number]) for number in numbers])
    handed_out = numbers[: len(numbers) - len(queue.groups)]
    good = sorted(number for number in handed_out if fates[number] == "good")

    assert (len(good), queue.num_accepted) == (GROUPS, GROUPS * SIZE)
    assert [(r.group, r.place) for r in filled.rollouts] == [(n, p) for n in good for p in range(SIZE)]
    assert min(rollout.oldest_version for rollout in filled.rollouts) >= STEP - ALLOWED
    dropped = sorted((drop.group, drop.place, drop.reason) for drop in filled.dropped)
    refused = [number for number in handed_out if fates[number] != "good"]
    assert dropped == sorted((n, p, REASONS[fates[n]]) for n in refused for p in range(SIZE))
    assert queue.refused == [REASONS[fates[number]] for number in refused]
    ended = sorted(number for number in handed_out if fates[number] not in ("stale", "given up"))
    assert [outcome.group for outcome in filled.outcomes] == ended


SOURCES = [
    {"id": "a", "buffer": FILTERS, "advantage": {"type": "rae", "decay": 0.5}},
    {"id": "b", "rollouts_per_example": 2, "filters": {"zero_advantage": "mask"}},
]


def source_group(number: int, env: str, rewards: list[float]) -> Group:
    group = Group(task=OpenGroup(number, env, 0), issued_at=STEP)
    group.rollouts = [rollout(number, reward, [STEP], env=env, place=p) for p, reward in enumerate(rewards)]
    return group


def test_whole_groups_fill_a_batch_until_it_is_reached():
    """Six rollouts: 2, dropped by its source's own filter, 2, 3; the last group exceeds it by one."""
    groups = [source_group(3, "b", [0.5, 0.5]), source_group(0, "a", [0.5] * 3), source_group(1, "b", [0.0, 1.0])]
    groups += [source_group(2, "a", [1.0, 0.0, 1.0]), source_group(4, "b", [1.0, 0.0])]
    filled, queue = fill(config_of(env=SOURCES), groups)
    assert [(each.env, each.group) for each in filled.rollouts] == [("b", 1)] * 2 + [("a", 2)] * 3 + [("b", 3)] * 2
    assert (queue.num_accepted, len(queue.groups)) == (7, 1)
    assert {(drop.env, drop.reason) for drop in filled.dropped} == {("a", REASONS["flat"])}
    assert len(filled.dropped) == SIZE

    # b: against its group; a: against its running mean, 0, 0.5, 0.25
    found = [float(each.samples[0].advantages[-1]) for each in filled.rollouts]
    assert found == [-0.5, 0.5, 1.0, -0.5, 0.75, 0.0, 0.0]
    assert filled.baselines == {"a": 0.625}
    assert [each.masked for each in filled.rollouts] == [None] * 5 + ["zero_advantage"] * 2


@pytest.mark.parametrize(("high", "is_dropped"), [(0.04, True), (0.03, False)])
def test_group_without_an_advantage_outside_the_range_is_replaced(high: float, is_dropped: bool):
    """Rewards of 0.5, 0.5 and 0.55 are advantages of -0.0167, -0.0167 and 0.0333."""
    groups = [group_of(0, "nearly flat"), group_of(1, "good"), group_of(2, "good")]
    filled, _ = fill(config := config_of(buffer={"advantage_range": [-0.02, high]}), groups)
    assert {rollout.group for rollout in filled.rollouts} == ({1, 2} if is_dropped else {0, 1})
    found = batch_metrics(STEP, filled.rollouts, filled.dropped, config=config)
    assert found.get("rollouts/dropped/little_advantage", 0) == SIZE * is_dropped
    assert found["groups/signal_frac"] == (2 / 3 if is_dropped else 1)


def test_flawed_rollouts_are_counted_or_masked_as_configured(caplog):
    filled, queue = fill(config_of(), list(map(group_of, range(4), ["given up", "stale", "flat", "truncated"])))
    assert (queue.groups, {rollout.group for rollout in filled.rollouts}) == ([], {2, 3})
    groups = [group_of(0, "flat"), group_of(1, "truncated")]
    filled, _ = fill(config_of(filters={"truncated": "mask", "zero_advantage": "mask"}), groups)
    # the truncated one has the group's mean as its reward: advantage 0, but it was truncated first
    flaws = [["zero_advantage"]] * 3 + [[], ["truncated", "zero_advantage"], []]
    assert [rollout.masked for rollout in filled.rollouts] == ["zero_advantage"] * 3 + [None, "truncated", None]
    counted, _ = fill(config_of(), [group_of(0, "flat"), group_of(1, "truncated")])
    assert [rollout.masked for rollout in counted.rollouts] == [None] * 6
    assert [rollout.flaws for rollout in counted.rollouts] == [rollout.flaws for rollout in filled.rollouts] == flaws
    assert "masked" not in caplog.text
    fill(config_of(filters={"zero_advantage": "mask"}), [group_of(0, "flat"), group_of(1, "flat")])
    assert "all 6 rollouts are masked (zero_advantage)" in caplog.text


def test_a_running_mean_goes_on_from_where_the_journal_left_it():
    config = config_of(advantage={"type": "ema", "decay": 0.5})
    filled, _ = fill(config, [group_of(0, "good"), group_of(1, "good")], State(baselines={"a": 0.25}))
    assert filled.baselines == {"a": 0.375}
    advantages = [float(rollout.samples[0].advantages[-1]) for rollout in filled.rollouts[:3]]
    assert advantages == [-0.25, 0.25, 0.75]


def under(prefix: str, **numbers: float) -> dict[str, float]:
    return {f"{prefix}/{name}": number for name, number in numbers.items()}


CUT = {"truncated": True, "flaws": ["truncated"], "masked": "truncated"}
ROLLOUTS = [
    rollout(1, 1.0, [5, 5], num_turns=1, num_computed=6, metrics={"format": 1.0}),
    rollout(1, 0.0, [5, 4], num_turns=3, num_computed=4, metrics={"format": 0.0}, **CUT),
    rollout(2, 1.0, [3], env="b", num_computed=6),  # the other one's engine does not count
    rollout(2, 1.0, [3, 3, 2], env="b", flaws=["zero_advantage"], metrics={"format": 0.25}),
]
DROPPED = [
    *[Dropped(3, place=0, attempt=0, env="a", example=3, reason=REASONS["flat"])] * 2,
    Dropped(4, place=0, attempt=0, env="a", example=4, reason="score: ValueError: no number"),
    Dropped(5, place=0, attempt=0, env="c", example=5, reason="timeout: not finished after 600 s"),
]


def test_the_metrics_of_a_batch_by_hand():
    found = batch_metrics(5, ROLLOUTS, DROPPED, config=RunConfig.model_validate({"max_async_level": 1}))
    lags = [0, 0, 0, 1, 2, 2, 2, 3]
    of_a = {"solve_none": 0, "solve_all": 0, "tokens_mean": 2.0, "truncated_frac": 0.5, "turns_mean": 2.0}
    of_b = {"solve_none": 0, "solve_all": 1, "tokens_mean": 2.0, "truncated_frac": 0}  # its turns were not counted
    # rollouts of two prompt tokens and one id for what is sampled: two of four tokens are one, and one of three
    of_a, of_b = of_a | {"tokens_computed_frac": 10 / 4}, of_b | {"tokens_computed_frac": 6 / 3}
    of_a |= {"rollouts": 2, "lag_mean": 0.25, "masked_frac": 0.5}
    of_b |= {"rollouts": 2, "lag_mean": 2.25, "masked_frac": 0.0}
    assert found == pytest.approx(
        under("reward", mean=0.75, std=np.sqrt(3) / 4, min=0.0, max=1.0, group_std=0.25)  # of groups: 0.5 and 0
        | under("lag", mean=np.mean(lags), max=3, beyond_frac=4 / 8)  # beyond the step that generation runs ahead
        | under("tokens", completion_mean=2.0, completion_max=3, total=4 * 2 + 8)
        | {"truncated_frac": 0.25, "turns/mean": 2.0, "perf/tokens_computed_frac": 16 / 7}
        | {"groups/signal_frac": 1 / 3}  # of groups 1, 2 and 3
        | under("rollouts", trained=3, with_signal=3, dropped=4, error_rate=2 / 8, rewritten=0)
        | under("rollouts/dropped", no_signal=2, score=1, timeout=1)
        | under("filters", truncated_frac=0.25, repetition_frac=0, gibberish_frac=0, zero_advantage_frac=0.25)
        | {"filters/masked_frac": 0.25}
        | under("reward/a", mean=0.5, std=0.5)
        | under("env/a", group_std=0.5, error_rate=1 / 5, format=0.5, **of_a)
        | under("reward/b", mean=1.0, std=0.0)
        | under("env/b", group_std=0.0, error_rate=0, format=0.25, **of_b)
        | {"env/c/error_rate": 1}  # though no rollout of it is in the batch
    )


def test_solve_rates_count_dropped_groups_too():
    """Those of the batch count by their rewards: the mean of -1 and 1 is 0, and of 0.5 and 1.5 it is 1."""
    rollouts = [*ROLLOUTS, rollout(8, -1.0, [3]), rollout(8, 1.0, [3]), rollout(9, 0.5, [3]), rollout(9, 1.5, [3])]
    means = {1: 0.5, 3: 0.0, 6: 0.0, 7: 1.0, 8: 0.0, 9: 1.0}
    outcomes = [Outcome(group, "a", group, mean) for group, mean in means.items()]
    found = batch_metrics(5, rollouts, DROPPED, config=RunConfig(), outcomes=outcomes)
    # b has no outcomes: the batch's groups count
    assert [found[f"env/{name}"] for name in ("a/solve_none", "a/solve_all", "b/solve_all")] == [2 / 6, 1 / 6, 1]
    still = rollout(1, 0.5, [5], metrics={"tokens_mean": 99.0})  # an environment's own number wins
    still.samples = [sample([5], advantage=1e-17)]
    found = batch_metrics(5, [still, rollout(1, 0.5, [5])], [], config=RunConfig())
    assert (found["rollouts/trained"], found["rollouts/with_signal"], found["groups/signal_frac"]) == (2, 1, 0)
    assert found["env/a/tokens_mean"] == 99.0


def test_epochs_difficulty_and_curriculum_by_hand():
    scores = Scores(np.arange(5, dtype=np.int32), np.array([0.0, 0.05, 0.5, 0.9, 1.0]))
    state = State(cursors={"a": Cursor(epoch=2, position=5)}, scores={"a": scores}, stage=1, stage_reward=0.5)
    plain = {"data/a/epoch": 2}
    assert state_metrics(state, config=RunConfig()) == plain
    found = state_metrics(state, config=config_of(buffer={"pools": {}}, curriculum=[{"weights": {"a": 1.0}}]))
    assert found == plain | under("curriculum", stage=1, reward=0.5) | under("data/a", easy=2, normal=1, hard=2)
