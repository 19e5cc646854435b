"""From rewards to one number per token, and what becomes of a flawed rollout: against loops over single tokens."""

from __future__ import annotations

import math
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
from written_run import build_rich_config

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


def test_rewards_are_cut_before_lengths_are_punished() -> None:
    penalty = LengthPenalty(type="linear", max_length=4, buffer=1, weight=0.5)
    group = [rollout_of(5.0, [1, 1, 0]), rollout_of(-5.0, [1], place=1)]
    scored = scores_of(group, rules_with(reward_clip=(-1.0, 2.0), length_penalty=penalty))
    assert scored.rewards.tolist() == [2.0 - 0.5 * 2 / 4, -1.0 - 0.5 * 1 / 4]
    assert scored.lengths.tolist() == [2, 1]


masks = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=5)


@st.composite
def batches(draw) -> list[Rollout]:
    """Groups with or without rewards of steps and a teacher."""
    rollouts = []
    for group in range(draw(st.integers(1, 3))):
        is_taught, num_rollouts = draw(st.booleans()), draw(st.integers(1, 3))
        for place in range(num_rollouts):
            shapes = draw(st.lists(masks, min_size=1, max_size=2))
            rollout = rollout_of(draw(st.sampled_from([-1.0, 0.0, 0.5, 2.0])), *shapes, group=group, place=place)
            has_steps = draw(st.booleans())
            for sample in rollout.samples:
                said = [-draw(st.sampled_from([0.25, 4.0])) if one else NAN for one in sample.loss_mask]
                steps = [draw(st.sampled_from([NAN, 0.0, 1.0])) for _ in range(sample.length)]
                rollout.teacher += [np.array(said, dtype=np.float32)] * is_taught
                rollout.token_rewards += [np.array(steps, dtype=np.float32)] * has_steps
            rollouts.append(rollout)
    return rollouts


@given(
    rollouts=batches(),
    clip=st.none() | st.just(0.75),
    reward_weight=st.sampled_from([0.0, 0.5, 1.0]),
    teacher_weight=st.sampled_from([None, 0.5]),
)
def test_each_token_gets_what_a_loop_over_tokens_gives_it(
    rollouts: list[Rollout], clip: float | None, reward_weight: float, teacher_weight: float | None
) -> None:
    rules = rules_with(teacher_weight=teacher_weight, reward_weight=reward_weight, clip=clip)
    found, _ = advantages_of(rollouts, rules, {})
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
            value *= reward_weight
            if rollout.teacher and teacher_weight:
                value += teacher_weight * (float(rollout.teacher[s][t]) - float(rollout.samples[s].logprobs[t]))
            value = value if clip is None else max(-clip, min(clip, value))
            expected = value if rollout.samples[s].loss_mask[t] else 0.0
            assert per_sample[s][t] == pytest.approx(expected, rel=1e-5, abs=1e-5)
            assert per_sample[s].dtype == np.float32


def test_new_advantages_keep_what_a_cut_sampler_could_choose_from() -> None:
    kept = Kept(np.array([0, 2], dtype=np.int32), np.array([1, 4], dtype=np.int32))
    sample = msgspec.structs.replace(sample_of([0, 1]), kept=kept)
    assert with_advantages(sample, np.array([0.0, 1.0], dtype=np.float32)).kept is kept
    assert is_zero([np.zeros(3), np.zeros(2)])
    assert is_zero([np.zeros(0), np.array([0.0, -1e-16])])  # a running mean of equal rewards is off by so little
    assert not is_zero([np.zeros(3), np.array([0.0, -1e-7])])


# which groups are worth it, and how they did


@pytest.mark.parametrize(
    ("rewards", "steps", "fields", "words"),
    [
        ([0.5, 0.5], None, {}, None),
        ([0.5, 0.5], None, {"needs_signal": True}, "no signal: all rewards of the group are equal"),
        ([0.5, 0.75], None, {"needs_signal": True}, None),
        ([0.5, 0.5], [0.0, 1.0], {"needs_signal": True}, None),  # rewards of steps are a signal too
        ([0.0, 1.0], None, {"least_variance": 0.25}, None),
        ([0.0, 0.9], None, {"least_variance": 0.25}, "little signal: the rewards of the group vary by 0.203"),
    ],
)
def test_a_group_without_enough_signal_is_not_worth_it(rewards, steps, fields, words) -> None:
    group = [rollout_of(reward, place=place) for place, reward in enumerate(rewards)]
    for rollout, step in zip(group, steps or (), strict=False):
        rollout.token_rewards = [np.array([NAN, NAN, step], dtype=np.float32)]
    assert why_not_worth_it(group, rules_with(**fields)) == words
    outcome = outcome_of(group)
    assert (outcome.env, outcome.group, outcome.example) == ("a", 0, 7)
    assert outcome.mean == np.mean(rewards)


def test_flaws_are_read_off_each_turn_of_each_sample() -> None:
    filters = FilterRules(repetition_window=3, repetition_period=1, gibberish_window=2, gibberish_logprob=-2.0)
    rules = rules_with(filters=filters)
    rollout = rollout_of(0.0, truncated=True)
    rollout.samples = [sample_of([0, 1, 1, 0, 1, 1], ids=[5, 5, 5, 5, 5, 5])]
    assert flaws_of(rollout, rules) == ["truncated"]
    rollout.samples.append(sample_of([1, 1, 1, 1], ids=[5, 5, 5, 5], logprob=-3.0))
    assert flaws_of(rollout, rules) == ["truncated", "repetition", "gibberish"]


def test_a_custom_function_is_called_with_its_arguments_and_its_failure_is_explained(tmp_path: Path) -> None:
    assert estimator_of(rules_with()) is None
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent("""
            def advantage(groups, scale):
                return [scale * (g.rewards - g.rewards.max()) for g in groups]

            def fail(groups):
                return [wings for g in groups]
        """)
    )
    rules = rules_with(advantage="custom", advantage_path=f"{file}:advantage", advantage_args={"scale": 2.0})
    rollouts = [rollout_of(1.0), rollout_of(0.25, place=1)]
    (first, second), _ = advantages_of(rollouts, rules, {}, custom=estimator_of(rules))
    assert first[0].tolist() == [0.0, 0.0, 0.0]
    assert second[0].tolist() == [0.0, -1.5, -1.5]
    rules = rules_with(advantage="custom", advantage_path=f"{file}:fail")
    with pytest.raises(ConfigError, match="failed on 1 groups: NameError: name 'wings'"):
        advantages_of(rollouts, rules, {}, custom=estimator_of(rules))


# what a trainer is handed


def test_a_masked_rollout_is_in_its_groups_mean_and_reaches_no_trainer() -> None:
    rollouts = [rollout_of(1.0, place=0), rollout_of(0.0, place=1, masked="truncated")]
    (first, second), _ = advantages_of(rollouts, rules_with(), {})
    assert first[0].tolist() == [0.0, 0.5, 0.5]
    assert second[0].tolist() == [0.0, -0.5, -0.5]
    reply = share_of(BatchRecord(0, rollouts, [], State()), rank=0, world=1, capacity=16)
    assert (reply.loss_tokens, reply.loss_samples, reply.num_rollouts) == (2, 1, 2)
    assert sum(int(row.tokens.loss_mask.sum()) for row in reply.micro_batches) == 2


@pytest.mark.parametrize("world", [1, 2, 3])
def test_if_all_rollouts_are_masked_every_rank_has_a_row_without_loss(world: int) -> None:
    rollouts = [rollout_of(1.0, place=place, masked="truncated") for place in range(4)]
    record = BatchRecord(0, rollouts, [], State())
    for rank in range(world):
        reply = share_of(record, rank=rank, world=world, capacity=16)
        assert [row.tokens.loss_mask.tolist() for row in reply.micro_batches] == [[0]]
        assert reply.loss_tokens == reply.loss_samples == 1


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


def test_rules_of_older_runs_can_still_be_read() -> None:
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
