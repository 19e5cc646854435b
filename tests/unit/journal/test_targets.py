"""From rewards to one number per token, what becomes of a flawed rollout, and what ranks are handed of a batch."""

import json
import math
from itertools import product
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.models.tiny import num_loss_samples, num_loss_tokens, random_samples
from support.runs.order_rules import order_rules
from support.runs.written_run import build_rich_config
from trireme.algo.model.flops import LINEAR, cost_of
from trireme.algo.packing import Sample, num_learned
from trireme.algo.rules import Rules, rules_of
from trireme.config.orchestrator import Filters, LengthPenalty
from trireme.config.run import RunConfig
from trireme.journal import targets
from trireme.journal.journal import Journal
from trireme.journal.rank_shares import DealtBatch, Shares, cost_of_model, row_capacity, row_cost
from trireme.journal.records import AgentRun, BatchRecord, Rollout, State
from trireme.journal.targets import advantages_of, estimators_of
from trireme.messages import Kept, Tokens, build_tokens, encode
from trireme.trainer.model.forward import places_of

NAN = math.nan


def sample_of(mask: list[int], *, logprob: float = -0.5, ids: list[int] | None = None) -> Tokens:
    logprobs, versions = [logprob * one for one in mask], [one - 1 for one in mask]
    ids = ids or list(range(len(mask)))
    return build_tokens(ids=ids, loss_mask=mask, logprobs=logprobs, advantages=[0.0] * len(mask), versions=versions)


def rollout_of(reward: float, *masks: list[int], group: int = 0, place: int = 0, **more) -> Rollout:
    samples = [sample_of(mask) for mask in masks or ([0, 1, 1],)]
    about = {"group": group, "place": place, "env": "a", "example": 7, "temperature": 1.0} | more
    return Rollout(**about, reward=reward, samples=samples)


def advantages(rollouts: list[Rollout], **rules: Any) -> list[list[list[float]]]:
    """Of each rollout, for each of its samples, those of its tokens."""
    rules = order_rules(**rules)
    found, _ = advantages_of(rollouts, rules, {}, custom=estimators_of(rules))
    return [[part.tolist() for part in parts] for parts in found]


def test_rewards_are_cut_before_lengths_are_punished():
    penalty = LengthPenalty(type="linear", max_length=4, buffer=1, weight=0.5)
    group = [rollout_of(5.0, [1, 1, 0]), rollout_of(-5.0, [1], place=1)]
    (scored,) = targets.scores_of(group, order_rules(reward_clip=(-1.0, 2.0), length_penalty=penalty))
    assert scored.rewards.tolist() == [2.0 - 0.5 * 2 / 4, -1.0 - 0.5 * 1 / 4]
    assert scored.lengths.tolist() == [2, 1]


def test_agent_run_is_compared_with_runs_of_the_same_agent():
    def episode(place: int, *rewards: float) -> Rollout:
        agents = [("proposer", [1]), ("solver", [0, 2]), ("solver", [3])]
        runs = [AgentRun(agent=a, reward=r, samples=s) for (a, s), r in zip(agents, rewards, strict=True)]
        return rollout_of(sum(rewards) / 3, [1], [0, 1], [1], [1], place=place, runs=runs)

    rules = order_rules(needs_signal=True, advantage="ema", decay=0.5)
    group = [episode(0, 1, 1, 0), episode(1, 5, 0, 0)]
    (first, second), baselines = advantages_of(group, rules, {"a/solver": 1.0})
    assert [part.tolist() for part in first] == [[0.0], [0.0, -2.0], [0.0], [-1.0]]
    assert [part.tolist() for part in second] == [[-1.0], [0.0, 2.0], [-1.0], [-1.0]]
    assert baselines == {"a/proposer": 3.0, "a/solver": 0.625}
    first, second = advantages(group)
    assert [part[-1] for part in first + second] == [0.75, -2.0, 0.75, -0.25, -0.25, 2.0, -0.25, -0.25]
    within = {"advantage": "hierarchical_grpo", "episode_agents": ("solver",)}
    first, second = advantages([episode(0, 1, 1, 0), episode(1, 5, 0, 0)], **within)
    assert [part[-1] for part in first + second] == [0.5, -2.0, 0.5, -0.5, 0.0, 2.0, 0.0, 0.0]
    assert targets.why_not_worth_it([episode(0, 1, 1, 0), episode(1, 2, 0, 0)], rules) is None
    assert targets.why_not_worth_it([episode(0, 1, 0, 0), episode(1, 1, 0, 0)], rules) is not None  # but across agents


def test_sources_of_one_estimator_are_estimated_together():
    """`batch` has one mean for `a` and `b`, whose other rules differ; `c` has a mean of its own."""
    whole = order_rules(advantage="batch")
    of_c = msgspec.structs.replace(whole, advantage="group_mean")
    rules = msgspec.structs.replace(whole, sources={"b": msgspec.structs.replace(whole, group_size=2), "c": of_c})
    batch = [
        rollout_of(reward, group=n // 2, env="abc"[n // 2]) for n, reward in enumerate([0.0, 1.0, 4.0, 3.0, 9.0, 5.0])
    ]
    found, _ = advantages_of(batch, rules, {})
    scale = np.std([0, 1, 4, 3]) + 1e-6
    expected = [-2 / scale, -1 / scale, 2 / scale, 1 / scale, 2.0, -2.0]
    assert [float(parts[0][-1]) for parts in found] == pytest.approx(expected)


def test_group_linear_counts_the_samples_of_a_rollout():
    group = [rollout_of(1.0, [0, 1, 1, 0, 1]), rollout_of(1.0, [0, 0, 1], [0, 0, 0, 1], place=1)]
    shares = {  # sampled tokens 3 and 2, others 2 and 5, turns 2 and 2
        "num_output_tokens_weight": [1.0, 2 / 3], "num_input_tokens_weight": [0.4, 1.0], "num_turns_weight": [1.0, 1.0]
    }  # fmt: skip
    for key, share in shares.items():
        penalty = LengthPenalty(type="group_linear", max_length=9, buffer=1, **dict.fromkeys(shares, 0.0) | {key: 0.5})
        (scored,) = targets.scores_of(group, order_rules(length_penalty=penalty))
        assert scored.rewards == pytest.approx([1.0 - 0.5 * each for each in share])


masks = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=5)


@st.composite
def batches(draw) -> list[Rollout]:
    rollouts = []
    for group in range(draw(st.integers(1, 3))):
        is_taught = draw(st.booleans())
        for place in range(draw(st.integers(1, 3))):
            reward, shapes = draw(st.sampled_from([-1.0, 0.0, 0.5, 2.0])), draw(st.lists(masks, min_size=1, max_size=2))
            rollout = rollout_of(reward, *shapes, group=group, place=place)
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
def test_each_token_gets_what_a_loop_over_tokens_gives_it(rollouts, clip, reward_weight, teacher_weight):
    rules = order_rules(teacher_weight=teacher_weight, reward_weight=reward_weight, clip=clip)
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


def test_new_advantages_keep_what_a_cut_sampler_could_choose_from():
    kept = Kept(np.array([0, 2], dtype=np.int32), np.array([1, 4], dtype=np.int32))
    sample = msgspec.structs.replace(sample_of([0, 1]), kept=kept)
    assert targets.with_advantages(sample, np.array([0.0, 1.0], dtype=np.float32)).kept is kept
    assert targets.is_zero([np.zeros(0), np.array([0.0, -1e-16])])  # a running mean of equal rewards is off by that
    assert not targets.is_zero([np.zeros(3), np.array([0.0, -1e-7])])


def test_a_group_without_enough_signal_is_not_worth_it():
    for steps, is_worth_it in (([NAN, NAN], False), ([1.0, 1.0], False), ([0.0, 1.0], True)):
        columns = [[np.array([NAN, NAN, step], dtype=np.float32)] for step in steps]
        group = [rollout_of(0.3, token_rewards=columns[0]), rollout_of(0.1 + 0.2, token_rewards=columns[1], place=1)]
        assert (targets.why_not_worth_it(group, order_rules(needs_signal=True)) is None) is is_worth_it
    group = [rollout_of(0.0), rollout_of(1.0, place=1)]
    assert targets.why_not_worth_it(group, order_rules(least_variance=0.25)) is None
    assert targets.outcome_of(group).mean == 0.5


def test_flaws_are_read_off_each_turn_of_each_sample():
    filters = Filters(repetition_window=3, repetition_period=1, gibberish_window=2, gibberish_logprob=-2.0)
    rollout = rollout_of(0.0, truncated=True)
    rollout.samples = [sample_of([0, 1, 1, 0, 1, 1], ids=[5] * 6)]
    assert targets.flaws_of(rollout, order_rules(filters=filters)) == ["truncated"]
    rollout.samples.append(sample_of([1, 1, 1, 1], ids=[5] * 4, logprob=-3.0))
    assert targets.flaws_of(rollout, order_rules(filters=filters)) == ["truncated", "repetition", "gibberish"]


def test_custom_advantage_function_receives_its_arguments(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def advantage(groups, scale): return [scale * (g.rewards - g.rewards.max()) for g in groups]\n")
    rules = {"advantage": "custom", "advantage_path": f"{file}:advantage", "advantage_args": {"scale": 2.0}}
    rollouts = [rollout_of(1.0), rollout_of(0.25, place=1)]
    assert advantages(rollouts, **rules) == [[[0.0, 0.0, 0.0]], [[0.0, -1.5, -1.5]]]


def record_of(rollouts: list[Rollout]) -> BatchRecord:
    return BatchRecord(0, rollouts, [], State(next_batch=1))


def test_a_masked_rollout_is_in_its_groups_mean_and_reaches_no_trainer():
    rollouts = [rollout_of(1.0, place=0), rollout_of(0.0, place=1, masked="truncated")]
    assert advantages(rollouts) == [[[0.0, 0.5, 0.5]], [[0.0, -0.5, -0.5]]]
    reply = DealtBatch(record_of(rollouts), world=1, capacity=16).share(0)
    assert (reply.loss_tokens, reply.loss_samples, reply.num_rollouts) == (2, 1, 2)
    assert [int(row.tokens.loss_mask.sum()) for row in reply.micro_batches] == [2]
    # if all are masked, every rank has a row without loss
    record = record_of([rollout_of(1.0, place=place, masked="truncated") for place in range(4)])
    for world, rank in ((1, 0), (3, 2)):
        reply = DealtBatch(record, world=world, capacity=16).share(rank)
        assert [row.tokens.loss_mask.tolist() for row in reply.micro_batches] == [[0]]
        assert reply.loss_tokens == reply.loss_samples == 1


def test_journal_rules_hold_every_number_of_the_configuration(tmp_path):
    rules = rules_of(build_rich_config(tmp_path))
    assert rules.length_penalty == LengthPenalty(type="linear", max_length=12, buffer=2, weight=0.5)
    assert (rules.pools.easy_weight, rules.pools.hard_weight) == (0.0, 0.5)
    assert [stage.from_step for stage in rules.curriculum] == [None, 2, None]
    found = (rules.advantage, rules.filters.truncated, rules.clip, rules.reward_clip, rules.teacher_weight)
    assert found == ("ema", "mask", 1.25, (0.0, 2.25), 0.25)
    old = {"seed": 1, "batch_size": 4, "group_size": 2, "max_attempts": 3, "temperature": 1.0, "shuffle": True}
    old |= {"max_async_level": 1, "max_off_policy_steps": 8, "weights": {"a": 1.0}, "advantage": "group_mean"}
    rules = msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=Rules)
    (found,), _ = advantages_of([rollout_of(1.0)], rules, {})
    assert found[0].tolist() == [0.0, 0.0, 0.0]


LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]
SIZES = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 4, "vocab_size": 8}
SHAPE = {"model_type": "llama"} | SIZES


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return str(tmp_path)


def test_all_ranks_get_their_share_of_one_reading(tmp_path, model):
    journal, batches = Journal(tmp_path / "journal"), []
    for step in range(2):
        samples = random_samples(LENGTHS, seed=step)
        about = {"group": step, "env": "env", "example": 0, "reward": 0.0}
        rollouts = [Rollout(**about, samples=[each.tokens], temperature=each.temperature) for each in samples]
        batches.append(BatchRecord(step, rollouts, [], State(next_batch=step + 1)))
        journal.append(batches[-1])
    config = RunConfig.model_validate({"seq_len": 48, "model": {"name": model}})
    shares = Shares(journal, config)
    with patch.object(journal, "read", wraps=journal.read) as reading:
        for step, rank in product(range(2), range(3)):
            alone = DealtBatch(batches[step], world=3, capacity=48, cost=row_cost(config)).share(rank)
            assert encode(shares.of(step, rank=rank, world=3)) == encode(alone)
    assert reading.call_count == 2
    found = shares.of(1, rank=0, world=1)
    assert (found.loss_tokens, found.loss_samples) == (num_loss_tokens(samples), num_loss_samples(samples))
    assert sorted(length for row in found.micro_batches for length in row.lengths) == sorted(LENGTHS)


def test_sampled_first_token_without_a_prompt_is_not_trained_on():
    """Nothing stands before it that it could be predicted from: an empty prompt."""
    rollout = rollout_of(0.0, [1, 1, 1], [0, 1], [1])
    found = DealtBatch(record_of([rollout]), world=1, capacity=16).share(0)
    places, _ = places_of(found.micro_batches[0])
    assert (found.loss_tokens, found.loss_samples) == (len(places), 2) == (3, 2)
    assert num_learned([Sample(tokens, 1.0) for tokens in rollout.samples]) == [2, 1, 0]
    weighted = msgspec.structs.replace(rollout.samples[0], ce_weights=np.float32([1, 0, 1]))
    found = DealtBatch(
        record_of([rollout_of(0.0), msgspec.structs.replace(rollout, samples=[weighted])]), world=1, capacity=16
    )
    assert (found.share(0).loss_tokens, found.share(0).ce_tokens) == (3, 1)


def test_row_cost_follows_the_sizes_of_the_trained_model(tmp_path, model):
    def config(name: str = "other", **trainer: Any) -> RunConfig:
        return RunConfig.model_validate({"seq_len": 64, "model": {"name": name}, "trainer": trainer})

    flash = cost_of(SHAPE, attention="flash_attention_2")
    assert row_cost(config(model, model={"attn": "flash_attention_2"})) == flash != LINEAR
    assert row_cost(config(model={"name": model})) == cost_of(SHAPE, attention="sdpa")
    for name in (None, str(tmp_path / "nothing"), "nobody/has-downloaded-it"):
        assert cost_of_model(name, attention="sdpa") == LINEAR
    assert row_capacity(config(model={"cp": 4})) == 64  # shared by the ranks that share the row
    assert row_capacity(config(micro_batch_tokens=128)) == 128
