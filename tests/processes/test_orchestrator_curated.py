"""Whole orchestrators with pools, a curriculum, masks and advantages of each kind: audited, stopped, gone on with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fake_engine import Asked, answer_at_random
from trireme.config.run import RunConfig
from trireme.config.written import write_run
from trireme.ledger.shares import share_of
from trireme.monitor.audit.audit import audit_run
from whole_run import Outcome, build_config, run

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
    "filters": {"truncated": "mask", "zero_advantage": "mask"},
    "length_penalty": {"weight": 0.25},
    "advantage": {"type": "ema", "clip": 2.0, "reward_clip": [0.0, 0.9]},
    "oversampling_factor": 1.5,
}


def curated_config(folder: Path, level: int, *, steps: int = 6, **orchestrator: Any) -> RunConfig:
    """Two environments, the second one from batch 2 on, alone once it is worth 0.9: never."""
    config = build_config(folder, EASY_AND_HARD, max_async_level=level, max_steps=steps, orchestrator=orchestrator)
    second = folder / "second.py"
    second.write_text((folder / "toy.py").read_text())
    values = config.model_dump()
    first = values["orchestrator"]["env"][0]
    values["orchestrator"]["env"] = [first, first | {"id": str(second), "name": "later", "args": {"size": 5}}]
    values["orchestrator"]["curriculum"] = [
        {"weights": {"say": 1.0}},
        {"weights": {"say": 1.0, "later": 0.5}, "from_step": 2},
        {"weights": {"later": 1.0}, "from_reward": 0.95},
    ]
    return RunConfig.model_validate(values)


def sometimes_without_end(asked: Asked) -> list[int]:
    """One answer in four goes on until it is cut off."""
    return answer_at_random(asked) if asked.rng.randrange(4) else [30] * 40


RAMBLING = {"answer": sometimes_without_end}


def audited(outcome: Outcome) -> Outcome:
    """Nobody wrote the configuration or the lines of the trainer: both are done by others."""
    assert outcome.error is None
    write_run(outcome.config, outcome.config.paths.run_config)
    report = audit_run(outcome.config.paths.root)
    rooms = {one.room for one in report.findings.in_order()} - {"metrics"}
    assert not rooms, report.text(everything=True)
    return outcome


def entries(config: RunConfig) -> list[bytes]:
    return [path.read_bytes() for path in sorted(config.paths.journal.glob("batch_*.msgpack"))]


@pytest.mark.parametrize("level", [0, 2])
def test_a_run_that_goes_by_everything_at_once_and_stopped_in_the_midst_is_what_the_audit_works_out(tmp_path, level):
    """Groups that were open are taken up again; what comes after them is chosen by what was known."""

    async def until_in_the_third_batch(running):
        await running.until(lambda: running.orchestrator.scheduler.next_batch == 2, "two batches")
        begun = len(running.engine.requests)
        await running.until(lambda: len(running.engine.requests) > begun, "the third batch is under way")

    config = curated_config(tmp_path / "stopped", level, **EVERYTHING)
    slow = RAMBLING | {"token_s": 0.002}
    stopped = run(config, engine=slow, meanwhile=until_in_the_third_batch, stop_after_meanwhile=True).records
    assert 2 <= len(stopped) < 6
    records = audited(run(config.model_copy(update={"resume": True}), engine=RAMBLING, trainer={"version": 0})).records
    assert [len(record.rollouts) for record in records] == [8] * 6
    came = {(each.group, each.example) for record in records for each in (*record.rollouts, *record.dropped)}
    assert {(group.id, group.example) for group in stopped[-1].state.open_groups} <= came
    assert [record.state.stage for record in records] == [0, 1, 1, 1, 1, 1]
    assert {rollout.env for rollout in records[0].rollouts} == {"say"}
    assert "say" in records[-1].state.scores.keys() & records[-1].state.baselines.keys()
    assert any(rollout.masked for record in records for rollout in record.rollouts)
    for record in records:  # those that are masked are in the journal, and in no row
        trained = [rollout for rollout in record.rollouts if rollout.masked is None]
        reply = share_of(record, rank=0, world=1, capacity=256)
        tokens = sum(int(sample.loss_mask.sum()) for rollout in trained for sample in rollout.samples)
        assert sum(int(row.tokens.loss_mask.sum()) for row in reply.micro_batches) == tokens
        assert (reply.loss_tokens, reply.num_rollouts) == (max(1, tokens), 8)
    if config.synchronous:
        whole = curated_config(tmp_path / "whole", level, **EVERYTHING)
        assert run(whole, engine=RAMBLING).error is None
        assert entries(config) == entries(whole)


def test_examples_that_everyone_solves_come_no_more_once_that_is_known(tmp_path):
    pools = {"buffer": {"pools": {"easy_weight": 0.0, "hard_weight": 0.0}}}
    config = build_config(tmp_path, EASY_AND_HARD, max_async_level=0, max_steps=16, orchestrator=pools)
    examples = [outcome.example for record in audited(run(config)).records for outcome in record.outcomes]
    assert sorted(examples[:12]) == list(range(12))
    assert {example % 3 for example in examples[12:]} == {2}
    assert len(examples) == 32


@pytest.mark.parametrize("kind", ["max_rl", "group_batch", "custom"])
def test_advantages_of_each_kind_are_what_the_audit_works_out(tmp_path, kind):
    own = tmp_path / "mine.py"
    own.write_text("def best(groups, share):\n    return [g.rewards - share * g.rewards.max() for g in groups]\n")
    advantage = {"type": kind} | ({"path": f"{own}:best", "args": {"share": 0.5}} if kind == "custom" else {})
    outcome = audited(run(build_config(tmp_path, max_steps=2, orchestrator={"advantage": advantage})))
    assert outcome.records[0].rollouts[0].samples[0].advantages.any()


def test_a_run_goes_on_where_a_batch_is_masked_throughout(tmp_path, caplog):
    code = EASY_AND_HARD.replace("number % 3", "number % 1")  # solved by everyone
    config = build_config(tmp_path, code, max_steps=2, orchestrator={"filters": {"zero_advantage": "mask"}})
    outcome = audited(run(config))
    assert outcome.trainer_error == []
    assert "all 8 rollouts are masked (zero_advantage)" in caplog.text
    assert [reply.loss_tokens for reply in outcome.trainer.batches] == [1, 1]
    assert not any(row.tokens.loss_mask.any() for row in outcome.trainer.batches[0].micro_batches)


def test_a_group_with_a_truncated_rollout_is_dropped_where_the_run_says_so(tmp_path):
    config = build_config(tmp_path, max_steps=3, orchestrator={"filters": {"truncated": "drop"}})
    records = audited(run(config, engine=RAMBLING)).records
    assert [len(record.rollouts) for record in records] == [8] * 3
    assert any(drop.reason.startswith("truncated: rollout") for record in records for drop in record.dropped)
    assert not any(rollout.truncated for record in records for rollout in record.rollouts)


def test_the_examples_do_not_depend_on_how_fast_rollouts_come(tmp_path):
    """Group n is decided when it is taken: what is slow comes later, and is the same."""

    async def slow_now_and_then(asked):
        await asyncio.sleep(0.05 if asked.number % 5 == 0 else 0.0)

    examples = []
    for name, engine in [("plain", {}), ("slow", {"delay": slow_now_and_then})]:
        records = run(build_config(tmp_path / name, EASY_AND_HARD, max_steps=4), engine=engine).records
        examples.append({rollout.group: rollout.example for record in records for rollout in record.rollouts})
    both = examples[0].keys() & examples[1].keys()
    assert len(both) >= 6
    assert all(examples[0][group] == examples[1][group] for group in both)
