"""Which rollouts a batch is made of: whole runs of the orchestrator between a fake engine and a fake trainer."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from fake_engine import PATIENCE_S
from tiny_tokenizer import LLAMA_3, write_tokenizer
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.ledger.records import BatchRecord
from trireme.ledger.versions import Versions
from trireme.orchestrator.policy import Policy
from trireme.orchestrator.scheduler import Scheduler
from whole_run import block_until, build_config, run

ONE_IN_TEN_FAILS = """
    calls = 0

    def dataset():
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]

    def reward(completion, answer):
        global calls
        calls += 1
        if calls % 10 == 0:
            raise ZeroDivisionError(f"call {calls}")
        return (len(completion) * 7 + ord(completion[0])) % 10 / 10
"""
EVEN_ONES_SAY_NOTHING = """
    def dataset():
        return [{"prompt": f"say {i}", "answer": i} for i in range(40)]

    def reward(completion, answer):
        return 0.5 if answer % 2 == 0 else (len(completion) * 7 + ord(completion[0])) % 10 / 10
"""
ALL_FAIL = """
    def dataset():
        return [{"prompt": f"say {i}", "answer": i} for i in range(40)]

    def reward(completion, answer):
        return float(wings_of_the_bird)
"""
SYSTEM_MESSAGE_LAST = """
    def dataset():
        return [{"prompt": [{"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}]}] * 8

    def reward(completion):
        return 1.0
"""


def versions_in(record: BatchRecord) -> np.ndarray:
    versions = np.concatenate([sample.versions for rollout in record.rollouts for sample in rollout.samples])
    return versions[versions >= 0]


def assert_every_rollout_has_one_fate(records: list[BatchRecord], config: RunConfig) -> None:
    """Trained once, dropped once for a reason, or in a group that is still open."""
    fates: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    for record in records:
        for rollout in record.rollouts:
            fates[rollout.group, rollout.place].append((rollout.attempt, "trained"))
        for dropped in record.dropped:
            assert dropped.reason
            fates[dropped.group, dropped.place].append((dropped.attempt, "dropped"))
    last = records[-1].state
    for attempts in fates.values():
        attempts.sort()
    open_groups = [group.id for group in last.open_groups]
    assert len(open_groups) == len(set(open_groups))
    decided = {group for group, _ in fates}
    assert decided | set(open_groups) == set(range(last.next_group))
    assert not decided & set(open_groups)
    for group in decided:
        ends = [fates[group, place][-1][1] for place in range(config.orchestrator.rollouts_per_example)]
        assert len(set(ends)) == 1, f"group {group} was torn: {ends}"
    for rollout, attempts in fates.items():
        assert [number for number, _ in attempts] == list(range(len(attempts))), f"{rollout}: {attempts}"
        assert len(attempts) <= config.orchestrator.max_rollout_attempts, f"{rollout}: {attempts}"
        assert all(fate == "dropped" for _, fate in attempts[:-1]), f"{rollout}: {attempts}"
    assert sum(fate == "trained" for attempts in fates.values() for _, fate in attempts) == last.counters["trained"]
    assert sum(fate == "dropped" for attempts in fates.values() for _, fate in attempts) == last.counters["dropped"]


def test_in_a_synchronous_run_batch_n_is_sampled_by_version_n_once_that_is_live(tmp_path):
    live_at_request = []

    async def meanwhile(running):
        async def note(asked):
            live_at_request.append((asked.version, running.orchestrator.policy.version))

        running.engine.delay = note

    outcome = run(build_config(tmp_path, max_async_level=0, max_steps=4), engine={"probe_s": 0.05}, meanwhile=meanwhile)
    assert outcome.error is None
    for record in outcome.records:
        assert set(versions_in(record)) == {record.step}
    assert live_at_request == [(n, n) for n in range(4) for _ in range(8)]


@pytest.mark.parametrize("level", [1, 2])
def test_generation_runs_ahead_by_as_many_versions_as_allowed_and_no_further(tmp_path, level):
    def wait_for_all_that_version_0_may_generate(version):
        if version == 0:
            block_until((config.paths.journal / f"batch_{level:06d}.msgpack").exists, "batches")

    config = build_config(tmp_path, max_async_level=level, max_steps=5, orchestrator={"max_off_policy_steps": level})
    outcome = run(config, trainer={"before_step": wait_for_all_that_version_0_may_generate})
    assert outcome.error is None
    lags = [record.step - versions_in(record) for record in outcome.records]
    assert [int(lag.max()) for lag in lags[: level + 1]] == list(range(level + 1))
    assert max(int(lag.max()) for lag in lags) == level
    assert min(int(lag.min()) for lag in lags) >= 0


@pytest.mark.parametrize(("level", "factor", "groups"), [(0, 3.0, 2), (1, 1.0, 4), (1, 1.5, 6), (2, 1.0, 6)])
def test_so_many_groups_are_under_way_at_once(tmp_path, level, factor, groups):
    release = asyncio.Event()

    async def hold(asked):
        await release.wait()

    async def meanwhile(running):
        await running.until(lambda: len(running.engine.requests) >= groups * 4, "as many requests as promised")
        await asyncio.sleep(0.05)
        under_way = running.orchestrator.scheduler.num_under_way, len(running.engine.requests)
        release.set()
        return under_way

    config = build_config(tmp_path, max_async_level=level, orchestrator={"oversampling_factor": factor})
    outcome = run(config, engine={"delay": hold}, meanwhile=meanwhile, stop_after_meanwhile=True)
    assert outcome.found == (groups, groups * 4)


def test_a_stale_group_never_reaches_a_batch(tmp_path):
    async def slow_first_group(asked):
        async with asyncio.timeout(PATIENCE_S):
            while asked.number < 4 and engine.version < 4:
                await asyncio.sleep(0.01)

    async def meanwhile(running):
        nonlocal engine
        engine = running.engine
        engine.delay = slow_first_group

    engine = None
    config = build_config(tmp_path, max_steps=6, orchestrator={"max_off_policy_steps": 1})
    outcome = run(config, meanwhile=meanwhile)
    assert outcome.error is None
    records = outcome.records
    assert [len(record.rollouts) for record in records] == [8] * 6
    assert max(int((record.step - versions_in(record)).max()) for record in records) <= 1
    stale = [dropped for record in records for dropped in record.dropped if dropped.reason.startswith("stale")]
    assert len(stale) % 4 == 0
    assert stale
    assert_every_rollout_has_one_fate(records, config)


def test_a_group_that_finished_but_waited_too_long_is_dropped_for_the_version_that_sampled_it(tmp_path):
    """Oversampled groups wait for a place; with no lag allowed, those of version 0 come too late for batch 1."""

    def wait_until_all_have_come(version):
        if version == 0:
            block_until(lambda: len(engines[0].requests) >= 24, "requests")

    engines = []

    async def meanwhile(running):
        engines.append(running.engine)

    config = build_config(
        tmp_path,
        max_async_level=1,
        max_steps=3,
        orchestrator={"oversampling_factor": 1.5, "max_off_policy_steps": 1},
    )
    outcome = run(config, trainer={"before_step": wait_until_all_have_come}, meanwhile=meanwhile)
    assert outcome.error is None
    records = outcome.records
    assert max(int((record.step - versions_in(record)).max()) for record in records) <= 1
    reasons = {dropped.reason for record in records for dropped in record.dropped}
    assert reasons == {"stale: version 0 sampled a part of it"}
    assert_every_rollout_has_one_fate(records, config)


def test_groups_without_signal_are_dropped_with_that_reason_and_replaced(tmp_path):
    config = build_config(
        tmp_path, EVEN_ONES_SAY_NOTHING, orchestrator={"buffer": {"online_difficulty_filtering": True}}
    )
    outcome = run(config)
    assert outcome.error is None
    records = outcome.records
    assert [len(record.rollouts) for record in records] == [8, 8, 8]
    for record in records:
        rewards = defaultdict(set)
        for rollout in record.rollouts:
            rewards[rollout.group].add(rollout.reward)
        assert all(len(values) > 1 for values in rewards.values())
    reasons = Counter(dropped.reason for record in records for dropped in record.dropped)
    assert reasons["no signal: all rewards of the group are equal"] >= 4
    assert_every_rollout_has_one_fate(records, config)


def test_that_nothing_ever_has_signal_is_said_again_and_again(tmp_path, caplog):
    """It may change (another example, another version), so it does not end the run; but nobody must wonder."""
    config = build_config(
        tmp_path,
        """
        def dataset():
            return [{"prompt": f"say {i}", "answer": ""} for i in range(40)]

        def reward(completion, answer):
            return 0.5
        """,
        orchestrator={"buffer": {"online_difficulty_filtering": True}},
    )

    async def meanwhile(running):
        await running.until(lambda: "groups were dropped before it is full" in caplog.text, "a warning")
        said = lambda: [str(wait) for wait in running.orchestrator.waits.now() if "rollouts" in wait.what]  # noqa: E731
        await running.until(lambda: "dropped meanwhile: no signal: " in " ".join(said()), "a wait that tells it")
        return True

    assert run(config, meanwhile=meanwhile, stop_after_meanwhile=True).found


def test_a_reward_that_raises_on_one_rollout_in_ten_costs_only_those_rollouts(tmp_path):
    config = build_config(tmp_path, ONE_IN_TEN_FAILS, max_steps=5)
    outcome = run(config)
    assert outcome.error is None
    records = outcome.records
    assert [len(record.rollouts) for record in records] == [8] * 5
    reasons = [dropped.reason for record in records for dropped in record.dropped]
    assert reasons
    assert all(reason.startswith("score: ZeroDivisionError: call ") for reason in reasons)
    assert any(rollout.attempt == 1 for record in records for rollout in record.rollouts)
    assert_every_rollout_has_one_fate(records, config)


def test_a_rollout_that_fails_each_time_costs_its_group_and_the_batch_is_refilled(tmp_path):
    code = EVEN_ONES_SAY_NOTHING.replace("return 0.5 if", "return 1 / 0 if")
    config = build_config(tmp_path, code, orchestrator={"max_rollout_attempts": 2})
    outcome = run(config)
    assert outcome.error is None
    records = outcome.records
    assert [len(record.rollouts) for record in records] == [8, 8, 8]
    assert all(
        rollout.answer is not None and int(rollout.answer) % 2 for record in records for rollout in record.rollouts
    )
    reasons = {dropped.reason.partition(":")[0] for record in records for dropped in record.dropped}
    assert reasons <= {"score", "group given up"}
    assert "score" in reasons
    assert_every_rollout_has_one_fate(records, config)


def test_when_all_rollouts_fail_the_run_ends_with_the_environments_own_words(tmp_path):
    outcome = run(build_config(tmp_path, ALL_FAIL))
    assert "NameError: name 'wings_of_the_bird' is not defined" in str(outcome.error)
    assert "Traceback (most recent call last)" in str(outcome.error)
    assert "return float(wings_of_the_bird)" in str(outcome.error)
    assert outcome.records == []


def test_a_conversation_that_the_chat_template_refuses_ends_the_run_with_the_templates_words(tmp_path):
    model = write_tokenizer(tmp_path / "llama", LLAMA_3)
    outcome = run(build_config(tmp_path, SYSTEM_MESSAGE_LAST, model={"name": str(model)}))
    words = "The chat template refuses this conversation: Only one system message, and it comes first"
    assert words in str(outcome.error)


def test_an_answer_that_we_cannot_make_sense_of_ends_the_run_instead_of_hanging_it(tmp_path):
    def without_its_last_logprob(response):
        response["choices"][0]["logprobs"]["content"].pop()
        return response

    outcome = run(build_config(tmp_path), engine={"mangle": without_its_last_logprob})
    assert "tokens but" in str(outcome.error)
    assert "All of the first" in str(outcome.error)


@pytest.mark.parametrize("level", [0, 2])
def test_over_a_stormy_run_every_rollout_has_one_fate(tmp_path, level):
    async def slow_now_and_then(asked):
        await asyncio.sleep(0.1 if asked.number % 17 == 0 else 0.0)

    def refuse_now_and_then(asked):
        return 400 if asked.number % 19 == 0 else None

    config = build_config(
        tmp_path,
        ONE_IN_TEN_FAILS.replace("/ 10", "// 4"),
        max_async_level=level,
        max_steps=8,
        orchestrator={
            "buffer": {"online_difficulty_filtering": True},
            "max_off_policy_steps": level,
            "max_rollout_attempts": 2,
            "oversampling_factor": 2.0,
        },
    )
    outcome = run(config, engine={"delay": slow_now_and_then, "refuse": refuse_now_and_then})
    assert outcome.error is None
    assert not outcome.trainer_error
    records = outcome.records
    assert [len(record.rollouts) for record in records] == [8] * 8
    assert any("refused with 400" in dropped.reason for record in records for dropped in record.dropped)
    assert_every_rollout_has_one_fate(records, config)


@pytest.mark.parametrize("turns", range(4))
def test_a_run_that_must_end_ends_also_when_a_group_arrives_at_that_instant(tmp_path, turns):
    """So many turns of the event loop lie between the arrival and the cancellation."""

    async def main():
        policy = Policy(
            SimpleNamespace(), config.weight_broadcast, Waits("orchestrator"), Versions(config.paths.journal)
        )
        scheduler = Scheduler(config, {}, None, policy, None, Waits("orchestrator"), next_batch=0)
        waiting = asyncio.create_task(scheduler.next_group())
        await asyncio.sleep(0.01)
        scheduler._arrived.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        done, _ = await asyncio.wait([waiting], timeout=1)
        waiting.cancel()
        return done

    config = build_config(tmp_path)
    assert asyncio.run(main())


def test_advantages_are_the_rewards_minus_their_groups_mean_on_sampled_tokens_only(tmp_path):
    record = run(build_config(tmp_path, max_steps=1)).records[0]
    groups = defaultdict(list)
    for rollout in record.rollouts:
        groups[rollout.group].append(rollout)
    assert len(groups) == 2
    for rollouts in groups.values():
        mean = sum(rollout.reward for rollout in rollouts) / 4
        for rollout in rollouts:
            (sample,) = rollout.samples
            expected = np.where(sample.loss_mask == 1, rollout.reward - mean, 0.0)
            np.testing.assert_allclose(sample.advantages, expected, atol=1e-6)


def test_every_sample_of_a_batch_reaches_exactly_one_rank(tmp_path):
    async def meanwhile(running):
        await running.until(lambda: running.orchestrator.scheduler.next_batch > 0, "a batch")
        return await running.ask(lambda asker: [asker.get_batch(0, rank=rank, world=3) for rank in range(3)])

    config = build_config(tmp_path, max_steps=2, seq_len=64)
    outcome = run(config, trainer={"until": 1}, meanwhile=meanwhile, stop_after_meanwhile=True)
    (one, two, three) = outcome.found
    assert len({len(reply.micro_batches) for reply in outcome.found}) == 1
    sent = Counter()
    for row in [*one.micro_batches, *two.micro_batches, *three.micro_batches]:
        starts = np.cumsum([0, *row.lengths])
        sent.update(row.tokens.ids[start:end].tobytes() for start, end in pairwise(starts))
    expected = Counter(sample.ids.tobytes() for rollout in outcome.records[0].rollouts for sample in rollout.samples)
    del sent[np.zeros(1, dtype="int32").tobytes()]  # empty rows keep ranks in step
    assert sent == expected
    mask = sum(int(s.loss_mask.sum()) for rollout in outcome.records[0].rollouts for s in rollout.samples)
    assert [reply.loss_tokens for reply in outcome.found] == [mask] * 3


def test_a_model_turn_may_take_as_long_as_its_rollout_may_and_one_that_takes_longer_ends_that_alone(tmp_path):
    """Engines are to answer everything else sooner."""
    began = []

    async def slow(asked):
        began.append(asked)
        if len(began) in (1, 2):
            await asyncio.sleep(2.0 if len(began) == 1 else 60.0)

    env = [{"id": str(tmp_path / "toy.py"), "name": "say", "rollout_timeout_s": 4.0}]
    config = build_config(tmp_path, max_steps=1, orchestrator={"engine_timeout_s": 1.0, "env": env})
    outcome = run(config, engine={"delay": slow})
    assert outcome.error is None
    (record,) = outcome.records
    assert len(record.rollouts) == 8
    assert ["timeout" in drop.reason for drop in record.dropped] == [True]
