"""From rewards to one number per token, and what becomes of a flawed rollout: against loops over single tokens."""

from __future__ import annotations

import math
import re
import textwrap
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from order_rules import order_rules
from trireme.algo.filters import FilterRules
from trireme.algo.length_penalty import LengthPenalty
from trireme.base.errors import ConfigError
from trireme.ledger.records import BatchRecord, Rollout, State
from trireme.ledger.rules import Rules, rules_of
from trireme.ledger.shares import share_of
from trireme.ledger.targets import (
    advantages_of,
    estimator_of,
    flaws_of,
    is_zero,
    outcome_of,
    scores_of,
    why_not_worth_it,
    with_advantages,
)
from trireme.messages import Kept, Tokens, build_tokens
from written_run import build_config, build_rich_config

NAN = math.nan


def sample_of(mask: list[int], *, logprob: float = -0.5, ids: list[int] | None = None) -> Tokens:
    return build_tokens(
        ids=ids or range(len(mask)),
        loss_mask=mask,
        logprobs=[logprob * one for one in mask],
        advantages=[0.0] * len(mask),
        versions=[one - 1 for one in mask],
    )


def rollout_of(reward: float, *masks: list[int], group: int = 0, place: int = 0, **more) -> Rollout:
    samples = [sample_of(mask) for mask in masks or ([0, 1, 1],)]
    return Rollout(group, place, 0, "a", 7, reward, samples, 1.0, **more)


def rules_with(**more) -> Rules:
    return order_rules({"a": 1.0}, **more)


def test_tokens_that_are_not_trained_on_get_nothing_and_the_others_their_rollouts_advantage() -> None:
    rollouts = [rollout_of(1.0, [0, 1, 1], [0, 0, 1]), rollout_of(0.0, [1, 0, 1], place=1)]
    (first, second), _ = advantages_of(rollouts, rules_with(), {})
    assert [part.tolist() for part in first] == [[0.0, 0.5, 0.5], [0.0, 0.0, 0.5]]
    assert [part.tolist() for part in second] == [[-0.5, 0.0, -0.5]]
    assert first[0].dtype == np.float32


def test_rewards_are_cut_before_lengths_are_punished() -> None:
    penalty = LengthPenalty(type="linear", max_length=4, buffer=1, weight=0.5)
    group = [rollout_of(5.0, [1, 1, 0]), rollout_of(-5.0, [1], place=1)]
    scored = scores_of(group, rules_with(reward_clip=(-1.0, 2.0), length_penalty=penalty))
    assert scored.rewards.tolist() == [2.0 - 0.5 * 2 / 4, -1.0 - 0.5 * 1 / 4]
    assert scored.lengths.tolist() == [2, 1]


def test_the_sum_of_everything_is_cut_last() -> None:
    teacher = [np.array([NAN, 3.5, -8.5], dtype=np.float32)]
    rollouts = [rollout_of(1.0, teacher=teacher), rollout_of(0.0, place=1)]
    (found, _), _ = advantages_of(rollouts, rules_with(teacher_weight=0.25, clip=1.25), {})
    # 0.5 + 0.25 * (3.5 + 0.5) = 1.5, cut; 0.5 + 0.25 * (-8.5 + 0.5) = -1.5, cut
    assert found[0].tolist() == [0.0, 1.25, -1.25]


def test_beside_a_teacher_rewards_weigh_as_much_as_is_asked_for() -> None:
    teacher = [np.array([NAN, 3.5, -8.5], dtype=np.float32)]
    rewarded = [rollout_of(1.0, teacher=teacher), rollout_of(0.0, place=1)]
    alike = [rollout_of(0.5, teacher=teacher), rollout_of(0.5, place=1)]
    (alone, _), _ = advantages_of(rewarded, rules_with(teacher_weight=0.25, reward_weight=0.0), {})
    (expected, _), _ = advantages_of(alike, rules_with(teacher_weight=0.25), {})
    np.testing.assert_array_equal(alone[0], expected[0])
    (half, _), _ = advantages_of(rewarded, rules_with(teacher_weight=0.25, reward_weight=0.5), {})
    np.testing.assert_allclose(half[0] - alone[0], [0.0, 0.25, 0.25])  # half of 1 - mean(1, 0)


def test_a_teacher_that_the_rules_do_not_name_has_no_say() -> None:
    rollouts = [rollout_of(1.0, teacher=[np.full(3, -9.0, dtype=np.float32)]), rollout_of(0.0, place=1)]
    (found, _), _ = advantages_of(rollouts, rules_with(), {})
    assert found[0].tolist() == [0.0, 0.5, 0.5]


def test_steps_of_a_later_sample_count_for_the_tokens_of_an_earlier_one() -> None:
    """One sample per turn: what the second turn earned is owed to the first one too."""
    steps = [np.array([NAN, NAN]), np.array([NAN, 1.0])]
    other = [np.array([0.0, NAN])]
    rollouts = [
        rollout_of(0.5, [0, 1], [0, 1], token_rewards=steps),
        rollout_of(0.5, [1, 1], place=1, token_rewards=other),
    ]
    (first, second), _ = advantages_of(rollouts, rules_with(), {})
    # steps 1 and 0: mean 0.5, deviation 0.5, so plus and minus 1
    assert first[0].tolist() == pytest.approx([0.0, 1.0], abs=1e-5)
    assert first[1].tolist() == pytest.approx([0.0, 1.0], abs=1e-5)
    assert second[0].tolist() == pytest.approx([-1.0, 0.0], abs=1e-5)


masks = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=5)


@st.composite
def batches(draw) -> list[Rollout]:
    rollouts = []
    for group in range(draw(st.integers(1, 3))):
        for place in range(draw(st.integers(1, 3))):
            shapes = draw(st.lists(masks, min_size=1, max_size=2))
            rollout = rollout_of(draw(st.sampled_from([-1.0, 0.0, 0.5, 2.0])), *shapes, group=group, place=place)
            given_steps = draw(st.booleans())
            for sample in rollout.samples:
                steps = [draw(st.sampled_from([NAN, 0.0, 1.0])) for _ in range(sample.length)]
                said = [-draw(st.sampled_from([0.25, 4.0])) if one else NAN for one in sample.loss_mask]
                rollout.teacher.append(np.array(said, dtype=np.float32))
                if given_steps:
                    rollout.token_rewards.append(np.array(steps, dtype=np.float32))
            rollouts.append(rollout)
    return rollouts


@given(rollouts=batches(), clip=st.none() | st.just(0.75))
def test_each_token_gets_what_a_loop_over_tokens_gives_it(rollouts: list[Rollout], clip: float | None) -> None:
    found, _ = advantages_of(rollouts, rules_with(teacher_weight=0.5, clip=clip), {})
    for rollout, per_sample in zip(rollouts, found, strict=True):
        siblings = [other for other in rollouts if other.group == rollout.group]
        steps = [float(s) for other in siblings for part in other.token_rewards for s in part if not np.isnan(s)]
        mean = sum(steps) / len(steps) if steps else 0.0
        deviation = math.sqrt(sum((s - mean) ** 2 for s in steps) / len(steps)) if steps else 0.0
        outcome = rollout.reward - sum(other.reward for other in siblings) / len(siblings)
        flat = [(s, t) for s in range(len(rollout.samples)) for t in range(rollout.samples[s].length)]
        for place, (s, t) in enumerate(flat):
            value = outcome
            for later, at in flat[place:] if rollout.token_rewards else []:
                step = float(rollout.token_rewards[later][at])
                value += 0.0 if math.isnan(step) else (step - mean) / (deviation + 1e-6)
            if rollout.samples[s].loss_mask[t]:
                value += 0.5 * (float(rollout.teacher[s][t]) - float(rollout.samples[s].logprobs[t]))
                value = value if clip is None else max(-clip, min(clip, value))
            else:
                value = 0.0
            assert per_sample[s][t] == pytest.approx(value, rel=1e-5, abs=1e-5)


def test_what_a_cut_sampler_could_choose_from_stays_with_its_tokens() -> None:
    kept = Kept(np.array([0, 2], dtype=np.int32), np.array([1, 4], dtype=np.int32))
    sample = msgspec.structs.replace(sample_of([0, 1]), kept=kept)
    assert with_advantages(sample, np.array([0.0, 1.0], dtype=np.float32)).kept is kept


# which groups are worth it, and how they did


@pytest.mark.parametrize(
    ("rewards", "fields", "words"),
    [
        ([0.5, 0.5], {}, None),
        ([0.5, 0.5], {"needs_signal": True}, "no signal: all rewards of the group are equal"),
        ([0.5, 0.75], {"needs_signal": True}, None),
        ([0.0, 1.0], {"least_variance": 0.25}, None),
        ([0.0, 0.9], {"least_variance": 0.25}, r"little signal: the rewards of the group vary by 0\.203"),
    ],
)
def test_a_group_without_enough_signal_is_not_worth_it(rewards, fields, words) -> None:
    group = [rollout_of(reward, place=place) for place, reward in enumerate(rewards)]
    reason = why_not_worth_it(group, rules_with(**fields))
    assert (reason is None) == (words is None)
    if words:
        assert re.fullmatch(words, reason)


def test_rewards_of_steps_are_a_signal_too() -> None:
    steps = [[np.array([NAN, NAN, value], dtype=np.float32)] for value in (0.0, 1.0)]
    group = [rollout_of(0.5, place=n, token_rewards=each) for n, each in enumerate(steps)]
    assert why_not_worth_it(group, rules_with(needs_signal=True)) is None


def test_an_outcome_is_the_mean_of_the_environments_own_rewards() -> None:
    group = [rollout_of(1.0, place=0), rollout_of(0.5, place=1)]
    assert outcome_of(group) == msgspec.structs.replace(outcome_of(group), mean=0.75, group=0, env="a", example=7)


def test_flaws_are_read_off_each_turn_of_each_sample() -> None:
    filters = FilterRules(repetition_window=3, repetition_period=1, gibberish_window=2, gibberish_logprob=-2.0)
    rules = rules_with(filters=filters)
    rollout = rollout_of(0.0, truncated=True)
    rollout.samples = [sample_of([0, 1, 1, 0, 1, 1], ids=[5, 5, 5, 5, 5, 5])]
    assert flaws_of(rollout, rules) == ["truncated"]
    rollout.samples.append(sample_of([1, 1, 1, 1], ids=[5, 5, 5, 5], logprob=-3.0))
    assert flaws_of(rollout, rules) == ["truncated", "repetition", "gibberish"]


def test_only_a_rollout_none_of_whose_tokens_is_pushed_has_zero_advantage() -> None:
    assert is_zero([np.zeros(3), np.zeros(2)])
    assert not is_zero([np.zeros(3), np.array([0.0, 1e-7])])


# a function of the user's


def custom_rules(folder: Path, code: str, **args) -> Rules:
    file = folder / "mine.py"
    file.write_text(textwrap.dedent(code))
    return rules_with(advantage="custom", advantage_path=f"{file}:advantage", advantage_args=args)


def test_a_function_of_the_users_is_called_with_its_arguments(tmp_path) -> None:
    rules = custom_rules(
        tmp_path,
        "def advantage(groups, scale):\n    return [scale * (g.rewards - g.rewards.max()) for g in groups]",
        scale=2.0,
    )
    rollouts = [rollout_of(1.0), rollout_of(0.25, place=1)]
    (first, second), _ = advantages_of(rollouts, rules, {}, custom=estimator_of(rules))
    assert first[0].tolist() == [0.0, 0.0, 0.0]
    assert second[0].tolist() == [0.0, -1.5, -1.5]


def test_a_function_of_the_users_that_fails_says_how_and_what_was_expected(tmp_path) -> None:
    rules = custom_rules(tmp_path, "def advantage(groups):\n    return [wings for g in groups]")
    with pytest.raises(
        ConfigError, match=r"failed on 1 groups: NameError: name 'wings'.* - expected a list of one array"
    ):
        advantages_of([rollout_of(1.0)], rules, {}, custom=estimator_of(rules))


def test_there_is_no_function_to_load_unless_one_is_asked_for() -> None:
    assert estimator_of(rules_with()) is None


# what a trainer is handed


def test_a_masked_rollout_is_in_its_groups_mean_and_reaches_no_trainer() -> None:
    rollouts = [rollout_of(1.0, place=0), rollout_of(0.0, place=1, masked="truncated")]
    (first, second), _ = advantages_of(rollouts, rules_with(), {})
    assert first[0].tolist() == [0.0, 0.5, 0.5]
    assert second[0].tolist() == [0.0, -0.5, -0.5]
    reply = share_of(record_of(rollouts), rank=0, world=1, capacity=16)
    assert (reply.loss_tokens, reply.loss_samples, reply.num_rollouts) == (2, 1, 2)
    assert sum(int(row.tokens.loss_mask.sum()) for row in reply.micro_batches) == 2


@pytest.mark.parametrize("world", [1, 2, 3])
def test_where_all_are_masked_every_rank_has_a_row_without_loss_and_nothing_is_divided_by_zero(world: int) -> None:
    record = record_of([rollout_of(1.0, place=place, masked="truncated") for place in range(4)])
    for rank in range(world):
        reply = share_of(record, rank=rank, world=world, capacity=16)
        assert [row.tokens.loss_mask.tolist() for row in reply.micro_batches] == [[0]]
        assert reply.loss_tokens == reply.loss_samples == 1


def record_of(rollouts: list[Rollout]) -> BatchRecord:
    return BatchRecord(0, rollouts, [], State())


# the rules of a batch


def test_rules_are_those_of_the_configuration_with_all_numbers_filled_in(tmp_path) -> None:
    rules = rules_of(build_rich_config(tmp_path))
    assert rules.advantage == "ema"
    assert rules.length_penalty == LengthPenalty(type="linear", max_length=12, buffer=2, weight=0.5)
    assert rules.pools is not None
    assert (rules.pools.easy_weight, rules.pools.hard_weight) == (0.0, 0.5)
    assert [stage.from_step for stage in rules.curriculum] == [None, 2, None]
    assert rules.filters is not None
    assert rules.filters.truncated == "mask"
    assert (rules.clip, rules.reward_clip, rules.teacher_weight) == (1.25, (0.0, 2.25), 0.25)


def test_rules_come_back_from_bytes_as_they_were(tmp_path) -> None:
    for rules in (rules_of(build_rich_config(tmp_path)), rules_of(build_config(tmp_path))):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(rules), type=Rules) == rules


def test_rules_of_before_there_was_a_choice_can_still_be_read() -> None:
    old = {
        "seed": 1,
        "shuffle": True,
        "weights": {"a": 1.0},
        "batch_size": 4,
        "group_size": 2,
        "max_attempts": 3,
        "max_async_level": 1,
        "max_off_policy_steps": 8,
        "advantage": "group_mean",
        "temperature": 1.0,
    }
    rules = msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=Rules)
    assert rules.filters is None
    assert rules.pools is None
    (found,), _ = advantages_of([rollout_of(1.0)], rules, {})
    assert found[0].tolist() == [0.0, 0.0, 0.0]
