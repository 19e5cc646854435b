"""Which rollouts a batch is made of: whole runs of the orchestrator between a fake engine and a fake trainer."""

import asyncio
import itertools
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from support.engines.fake_engine import PATIENCE_S, Asked, answer_at_random
from support.runs.whole_run import WholeRun, build_config, entries, run
from support.runs.written_run import rewrite_batch
from trireme.base.errors import FINAL_EXIT_CODES
from trireme.base.waiting import Waits
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.records import BatchRecord, OpenGroup, Rollout
from trireme.monitor.metrics import read_metrics
from trireme.orchestrator.evaluation.results import read_eval_results, results_path
from trireme.orchestrator.scheduler import Scheduler
from trireme.tools.audit.audit import audit_run

REWARD = """
import os
import pathlib

calls = 0
died = pathlib.Path(__file__).with_name("died")

def dataset(size=40):
    return [{"prompt": f"say {i}", "answer": i} for i in range(size)]

def reward(completion, answer):
    global calls
    calls += 1
    usual = (len(completion) * 7 + ord(completion[0])) % 10 / 10
    """
EVEN_ONES_SAY_NOTHING = REWARD + "return usual if answer % 2 else 0.5"
EVEN_ONES_FAIL = REWARD + "return usual if answer % 2 else 1 / 0"
ALL_FAIL = REWARD + "return float(wings_of_the_bird)"
TOO_LONG = REWARD.replace('f"say {i}"', '"say " * 99') + "return usual"
DIES_ONCE = REWARD + "return usual if calls != 3 or died.exists() else died.touch() or os._exit(1)"


def versions_in(record: BatchRecord) -> np.ndarray:
    versions = np.concatenate([sample.versions for rollout in record.rollouts for sample in rollout.samples])
    return versions[versions >= 0]


def lags_of(outcome: WholeRun) -> list[int]:
    return [int((record.step - versions_in(record)).max()) for record in outcome.records]


def audited(outcome: WholeRun) -> WholeRun:
    """Check that a run went well and every rollout had one fate. Others write its configuration and metrics."""
    assert (outcome.error, outcome.trainer_error) == (None, [])
    write_run(outcome.config, outcome.config.paths.run_config)
    report = audit_run(outcome.config.paths.root)
    rooms = {one.area for one in report.in_order()} - {"metrics"}
    assert not rooms, report.text()
    return outcome


def whole_batches_of(outcome: WholeRun, *, reasons: tuple[str, ...]) -> list[BatchRecord]:
    """Rollouts were dropped for reasons that begin with these, each of which occurred."""
    records, config = audited(outcome).records, outcome.config
    assert [len(record.rollouts) for record in records] == [config.orchestrator.batch_size] * config.max_steps
    given = [dropped.reason for record in records for dropped in record.dropped]
    assert {next(begin for begin in reasons if reason.startswith(begin)) for reason in given} == set(reasons)
    return records


def test_synchronous_batch_is_sampled_by_a_single_version(tmp_path):
    live_at_request = []

    async def meanwhile(running):
        async def note(asked):
            live_at_request.append((asked.version, running.orchestrator.policy.version))

        running.engine.delay = note

    def sample_one_turn_of_the_second_batch_with_the_version_before(response):
        if response["request_id"] == "8":
            response["choices"][0]["weight_versions"][0]["version"] = "0"
        return response

    engine = {"mangle": sample_one_turn_of_the_second_batch_with_the_version_before, "probe_s": 0.05}
    outcome = run(build_config(tmp_path, max_async_level=0), engine=engine, meanwhile=meanwhile)
    records = whole_batches_of(outcome, reasons=("stale: a part of it is of version 0",))
    assert [len(record.dropped) for record in records] == [0, 4, 0]
    assert [set(versions_in(record)) for record in records] == [{0}, {1}, {2}]
    assert live_at_request == [(0, 0)] * 8 + [(1, 1)] * 12 + [(2, 2)] * 8


def test_a_stale_group_never_reaches_a_batch(tmp_path):
    async def meanwhile(running):
        async def slow_first_group(asked):
            async with asyncio.timeout(PATIENCE_S):
                while asked.number < 4 and running.engine.version < 4:
                    await asyncio.sleep(0.01)

        running.engine.delay = slow_first_group

    config = build_config(tmp_path, max_steps=6, orchestrator={"max_off_policy_steps": 1})
    outcome = run(config, meanwhile=meanwhile)
    records = whole_batches_of(outcome, reasons=("stale: begun under version 0",))
    assert sum(len(record.dropped) for record in records) == 4
    assert max(lags_of(outcome)) <= 1


def of_own(record: BatchRecord) -> Rollout:
    return next(rollout for rollout in record.rollouts if rollout.env == "own")


SOURCE_FAULTS = {
    "number of rollouts": lambda record: record.rollouts.__delitem__(slice(-len(record.rollouts) // 2, None)),
    "temperature": lambda record: setattr(of_own(record), "temperature", 1.0),
    "advantages": lambda record: setattr(of_own(record), "reward", of_own(record).reward + 0.5),
    "place 3": lambda record: record.rollouts.append(msgspec.structs.replace(of_own(record), place=3)),
}
"""Changes of a batch that the run's rules allow, and those of a source do not; and a word of what is reported."""


@pytest.mark.parametrize("level", [0, 2])
def test_sources_fill_batches_with_groups_of_their_own_sizes(tmp_path, level):
    """As a journal, it is audited by the rules of each source."""
    toy = str(tmp_path / "toy.py")
    own = {"rollouts_per_example": 3, "sampling": {"temperature": 0.5, "max_tokens": 4}, "advantage": {"type": "rae"}}
    own |= {"filters": {"truncated": "mask"}, "buffer": {"pools": {}}, "length_penalty": {"type": "group_linear"}}
    env = [{"id": toy, "name": "say"}, {"id": toy, "name": "own", **own}]
    config = build_config(tmp_path, EVEN_ONES_FAIL, max_steps=6, max_async_level=level, orchestrator={"env": env})
    outcome = audited(run(config))
    for record in outcome.records:
        sizes = Counter((rollout.env, rollout.group) for rollout in record.rollouts)
        assert {size for (name, _), size in sizes.items() if name == "own"} <= {3}
        assert {size for (name, _), size in sizes.items() if name == "say"} <= {4}
        assert 8 <= len(record.rollouts) <= 8 + 3
        assert {rollout.temperature for rollout in record.rollouts if rollout.env == "own"} <= {0.5}
    assert {rollout.env for record in outcome.records for rollout in record.rollouts} == {"say", "own"}
    assert set(outcome.records[-1].state.scores) == set(outcome.records[-1].state.baselines) == {"own"}
    asked = {(each.sampling["temperature"], each.sampling["max_tokens"]) for each in outcome.engine.requests}
    assert asked == {(1.0, 8), (0.5, 4)}

    for words, plant in SOURCE_FAULTS.items():
        step = next(record.step for record in outcome.records if any(one.env == "own" for one in record.rollouts))
        whole = (path := Journal(config.paths.journal).path(step)).read_bytes()
        rewrite_batch(config, step, plant)
        assert words in audit_run(config.paths.root).text(), words
        path.write_bytes(whole)


def test_a_group_that_fails_is_dropped_and_replaced(tmp_path):
    """A reward that raises costs that rollout only; one that raises each time costs its group."""

    async def one_after_the_other(asked):
        await asyncio.sleep(0.03 * (asked.number % 4))

    config = build_config(tmp_path, EVEN_ONES_FAIL, orchestrator={"max_rollout_attempts": 2})
    outcome = run(config, engine={"delay": one_after_the_other})
    records = whole_batches_of(outcome, reasons=("score: ZeroDivisionError: ", "group given up: "))
    rollouts = [rollout for record in records for rollout in record.rollouts]
    assert {(int(rollout.answer) % 2, rollout.attempt) for rollout in rollouts} == {(1, 0)}
    told = sum(row.get("env/say/score_error", 0) for row in read_metrics(config.paths.metrics)[0])
    dropped = sum(drop.reason.startswith("score: ") for record in records for drop in record.dropped)
    assert dropped <= told <= outcome.orchestrator.scheduler.num_failures


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ALL_FAIL, ["All of the first ", "Traceback (most recent", "NameError: name 'wings_of_the_bird' is not"]),
        (EVEN_ONES_SAY_NOTHING, ["NameError: name 'wings' is not defined"]),
        (TOO_LONG, ["examples tried have prompts that leave no room", "Raise `seq_len` (now 256)"]),
    ],
    ids=["rewards", "advantages", "prompts"],
)
def test_run_ends_with_the_cause_if_no_batch_can_fill(tmp_path, code, words):
    own = tmp_path / "mine.py"
    own.write_text("def best(groups):\n    return [wings for g in groups]\n")
    advantage = {"advantage": {"type": "custom", "path": f"{own}:best"}}
    outcome = run(build_config(tmp_path, code, orchestrator=advantage))
    assert [word for word in words if word not in str(outcome.error)] == []
    assert outcome.error.exit_code in FINAL_EXIT_CODES  # a restart would fail in the same way
    assert outcome.records == []


def test_rollout_reissued_after_a_worker_death_is_trained_on_once(tmp_path):
    records = whole_batches_of(run(build_config(tmp_path, DIES_ONCE, max_steps=2)), reasons=())
    assert (tmp_path / "died").exists()
    assert {len(rollout.samples) for record in records for rollout in record.rollouts} == {1}


# without engines and environments


async def wait_forever(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()


def scheduler_of(config: RunConfig, rollout: Any = wait_forever) -> Scheduler:
    """A scheduler whose policy is at version 0, and whose rollouts never end, or end as `rollout` says."""
    numbers = itertools.count()
    buffer = SimpleNamespace(take=lambda: OpenGroup(next(numbers), "say", 0), reopened=[])
    policy = SimpleNamespace(version=0, reached=wait_forever)
    runner = SimpleNamespace(first_attempt=lambda *_: 0, run=rollout, teachers={})
    return Scheduler(config, {"say": None}, buffer, policy, runner, Waits("orchestrator"), next_batch=0)


@pytest.mark.parametrize(("level", "groups"), [(0, 2), (1, 4), (2, 6), (3, 6)])
def test_generation_runs_ahead_by_at_most_max_async_level_versions(tmp_path, level, groups):
    """A batch has two groups, and the run three batches."""

    async def main():
        scheduler = scheduler_of(config)
        running = asyncio.create_task(scheduler.run())
        await asyncio.sleep(0.05)
        running.cancel()
        return scheduler.num_under_way

    config = build_config(tmp_path, max_async_level=level, orchestrator={"oversampling_factor": 3.0})
    assert asyncio.run(main()) == groups


@pytest.mark.parametrize(
    ("max_steps", "max_off_policy_steps", "factor", "under_way", "left"),
    [
        (20, 8, 4.0, [4, 4, 4, 6, 8, 7], 6),  # the reserve: 0, 2, 4, 6, 8, 7.75
        (20, 8, 1.0, [4, 4, 4, 4, 2, 2], 0),  # at most 2
        (20, 3, 4.0, [4, 4, 4, 4, 2, 2], 0),  # at most 2: with more, tokens could become too old
        (5, 8, 4.0, [4, 4, 4, 4, 2, 0], 0),  # no more than the run needs
    ],
)
def test_reserve_of_groups_grows_while_the_trainer_waits(
    tmp_path, max_steps, max_off_policy_steps, factor, under_way, left
):
    """Two groups are a batch, at `max_async_level = 1`. The trainer waits for the first four batches."""

    async def main():
        may_end = asyncio.Semaphore(0)
        scheduler = scheduler_of(config, lambda *_, **__: ended(may_end))
        running, counts = asyncio.create_task(scheduler.run()), []
        for batch in range(6):
            scheduler.policy.version = min(batch if batch < 4 else batch - 1, max_steps - 1)
            scheduler._changed.set()
            await asyncio.sleep(0.02)
            counts.append(scheduler.num_under_way)
            for _ in range(2 if counts[-1] else 0):
                for _ in range(4):
                    may_end.release()
                scheduler.accept(await scheduler.next_group())
            scheduler.batch_closed()

        # What has finished for the batches ahead needs no reserve beside it.
        for _ in range(1000):
            may_end.release()
        await asyncio.sleep(0.02)
        running.cancel()
        return counts, len(scheduler.open_groups())

    async def ended(may_end):
        await may_end.acquire()
        return SimpleNamespace(samples=[])

    orchestrator = {"oversampling_factor": factor, "max_off_policy_steps": max_off_policy_steps}
    config = build_config(tmp_path, max_steps=max_steps, max_async_level=1, orchestrator=orchestrator)
    assert asyncio.run(main()) == (under_way, left)


@pytest.mark.parametrize("turns", range(4))
def test_cancelling_next_group_works_at_the_instant_a_group_arrives(tmp_path, turns):
    """So many turns of the event loop lie between the arrival and the cancellation."""

    async def main():
        scheduler = scheduler_of(config)
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


def test_model_turn_may_last_until_its_rollout_times_out(tmp_path):
    async def slow(asked):
        await asyncio.sleep({0: 1.2, 1: 60.0}.get(asked.number, 0.0))

    env = [{"id": str(tmp_path / "toy.py"), "name": "say", "rollout_timeout_s": 3.0}]
    config = build_config(tmp_path, max_steps=1, orchestrator={"engine_timeout_s": 0.6, "env": env})
    (record,) = whole_batches_of(run(config, engine={"delay": slow}), reasons=("timeout: not finished",))
    assert len(record.dropped) == 1


# with pools, a curriculum, masks and advantages of each kind: audited, stopped, resumed

EASY_AND_HARD = """
    def dataset(size=12):
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(size)]

    def reward(completion, answer):
        number = int(answer)
        if number % 3 == 0:
            return 1.0  # solved by everyone
        if number % 3 == 1:
            return 0.0  # by nobody
        return (len(completion) * 7 + ord(completion[0])) % 10 / 10
"""
EVERYTHING: dict[str, Any] = {
    "buffer": {"pools": {"easy_weight": 0.0, "memory": 0.25}, "online_difficulty_filtering": True},
    "filters": {"truncated": "mask", "zero_advantage": "mask"}, "length_penalty": {"weight": 0.25},
    "advantage": {"type": "ema", "clip": 2.0, "reward_clip": [0.0, 0.9]}, "oversampling_factor": 1.5,
}  # fmt: skip


def curated_config(folder: Path, level: int, **orchestrator: Any) -> RunConfig:
    """Two environments, the second one from batch 2 on, alone once it is worth 0.9: never."""
    config = build_config(folder, EASY_AND_HARD, max_async_level=level, max_steps=5, orchestrator=orchestrator)
    values = config.model_dump()
    (first,) = values["orchestrator"]["env"]
    second = shutil.copy(folder / "toy.py", folder / "second.py")
    values["orchestrator"]["env"] = [first, first | {"id": str(second), "name": "later", "args": {"size": 5}}]
    values["orchestrator"]["curriculum"] = [
        {"weights": {"say": 1.0}},
        {"weights": {"say": 1.0, "later": 0.5}, "from_step": 2},
        {"weights": {"later": 1.0}, "from_reward": 0.95},
    ]
    return RunConfig.model_validate(values)


def sometimes_without_end(asked: Asked) -> list[int]:
    return answer_at_random(asked) if asked.rng.randrange(4) else [30] * 40


RAMBLING = {"answer": sometimes_without_end}


@pytest.mark.parametrize("level", [0, 2])
def test_stopped_run_resumes_into_the_batches_that_the_audit_expects(tmp_path, level):
    """Groups that were open are taken up again; what comes after them is chosen by what was known."""

    async def until_in_the_third_batch(running):
        await running.until(lambda: running.orchestrator.scheduler.next_batch == 2, "two batches")
        begun = len(running.engine.requests)
        await running.until(lambda: len(running.engine.requests) > begun, "the third batch is under way")

    config = curated_config(tmp_path / "stopped", level, **EVERYTHING)
    slow = RAMBLING | {"token_s": 0.002}
    stopped = run(config, engine=slow, meanwhile=until_in_the_third_batch, stop_after_meanwhile=True).records
    assert 2 <= len(stopped) < 5
    records = audited(run(config.model_copy(update={"resume": True}), engine=RAMBLING, trainer={"version": 0})).records
    assert [len(record.rollouts) for record in records] == [8] * 5
    came = {(each.group, each.example) for record in records for each in (*record.rollouts, *record.dropped)}
    assert {(group.id, group.example) for group in stopped[-1].state.open_groups} <= came
    assert [record.state.stage for record in records] == [0, 1, 1, 1, 1]
    assert {rollout.env for rollout in records[0].rollouts} == {"say"}
    assert "say" in records[-1].state.scores.keys() & records[-1].state.baselines.keys()
    assert any(rollout.masked for record in records for rollout in record.rollouts)
    if config.synchronous:
        whole = curated_config(tmp_path / "whole", level, **EVERYTHING)
        assert run(whole, engine=RAMBLING).error is None
        assert entries(config) == entries(whole)


def tokens_of(record: BatchRecord) -> list[int]:
    """Return the tokens of each group of a batch."""
    counts = Counter[int]()
    for rollout in record.rollouts:
        counts[rollout.group] += sum(sample.length for sample in rollout.samples)
    return list(counts.values())


@pytest.mark.parametrize("level", [0, 2])
def test_groups_fill_a_batch_until_it_has_its_tokens(tmp_path, level):
    """Whatever is dropped on the way, and if the orchestrator is stopped within a batch: as its journal says."""

    async def until_in_the_third_batch(running):
        scheduler = running.orchestrator.scheduler
        await running.until(lambda: scheduler.next_batch == 2 and scheduler.num_tokens > 0, "a part of the third batch")

    size = {"batch_size": None, "token_batch_size": 400}
    config = curated_config(tmp_path / "stopped", level, **EVERYTHING, **size)
    slow = RAMBLING | {"token_s": 0.002}
    stopped = run(config, engine=slow, meanwhile=until_in_the_third_batch, stop_after_meanwhile=True).records
    records = audited(run(config.model_copy(update={"resume": True}), engine=RAMBLING, trainer={"version": 0})).records
    assert 2 <= len(stopped) < len(records) == 5
    assert min(sum(tokens_of(record)) for record in records) >= 400
    if config.synchronous:
        whole = curated_config(tmp_path / "whole", level, **EVERYTHING, **size)
        assert run(whole, engine=RAMBLING).error is None
        assert entries(config) == entries(whole)
        assert [record.state.open_groups for record in records] == [[]] * 5
    else:
        assert max(sum(tokens_of(record)) - max(tokens_of(record)) for record in records) < 400

    # the audit knows how many there must be
    rewrite_batch(config, 1, lambda record: setattr(record, "rollouts", record.rollouts[:4]))
    assert any("number of tokens" in one.found for one in audit_run(config.paths.root).in_order())


# examples that break what reads them cost those rollouts: the run, and its evaluation, go on

ODD = """
    ODD = [dict(role=0, content="say 25"), "say odd", "say no", "x" * 300]

    def dataset(split="train"):
        return [{"prompt": prompt, "answer": ""} for prompt in (*ODD, "say 4", "say 5")]

    def reward(completion, answer):
        return 1.0
"""
TEMPLATE = """{% for m in messages %}
{% if m.content == 'say no' %}{{ raise_exception('not so') }}{% endif %}
{{ m.role if m.content != 'say odd' else 1 + m.role }}: {{ m.content }}
{% endfor %}"""


def test_an_example_that_never_becomes_a_prompt_costs_its_own_rollouts(tmp_path):
    """One that can never fit is tried once for each rollout."""
    config = build_config(tmp_path, ODD, orchestrator={"eval": {"num_examples": 6}})
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    outcome = run(config)
    assert outcome.error is None
    assert len(outcome.records) == 3
    assert {rollout.example for record in outcome.records for rollout in record.rollouts} == {4, 5}
    dropped = [drop for record in outcome.records for drop in record.dropped]
    reasons = {drop.example: drop.reason for drop in dropped}
    assert reasons.keys() == {0, 1, 2, 3}
    assert "The chat template refuses this conversation: TemplateError: not so" in reasons[2]
    assert "the model takes 256" in reasons[3]
    assert {drop.attempt for drop in dropped if drop.example == 3} == {0}
    answers = read_eval_results(results_path(config.paths, 0, "say"))
    assert {answer.example for answer in answers if answer.error is not None} == {0, 1, 2, 3}
    assert len(answers) == 6
