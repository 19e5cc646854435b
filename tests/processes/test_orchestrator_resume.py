"""A run that stops goes on as if it had not."""

from __future__ import annotations

import asyncio

import pytest

from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.ledger.journal import Journal
from trireme.ledger.records import BatchRecord, State
from trireme.messages import encode
from whole_run import build_config, run


def entries(config) -> list[bytes]:
    return [path.read_bytes() for path in sorted(config.paths.journal.glob("batch_*.msgpack"))]


async def _two_batches_are_trained(running):
    await running.until(lambda: running.trainer.published == [0, 1, 2], "version 2")


def test_a_synchronous_run_that_was_stopped_and_resumed_writes_the_journal_that_it_would_have_written(tmp_path):
    whole = build_config(tmp_path / "whole", max_async_level=0, max_steps=4)
    assert run(whole).error is None
    stopped = build_config(tmp_path / "stopped", max_async_level=0, max_steps=4)

    async def hang_in_the_third_batch(asked):
        if asked.number >= 2 * 8 + 3:
            await asyncio.Event().wait()

    async def until_then(running):
        await running.until(lambda: len(running.engine.requests) == 3 * 8, "the third batch is under way")

    run(stopped, engine={"delay": hang_in_the_third_batch}, meanwhile=until_then, stop_after_meanwhile=True)
    assert len(entries(stopped)) == 2
    again = run(stopped.model_copy(update={"resume": True}), trainer={"version": 2})
    assert again.error is None
    assert not again.trainer_error
    assert [reply.step for reply in again.trainer.batches] == [2, 3]
    assert entries(stopped) == entries(whole)


def test_an_older_batch_is_answered_from_disk_as_it_was_the_first_time(tmp_path):
    """A trainer that comes back from an older checkpoint gets the batches that it had, and trains them again."""
    config = build_config(tmp_path, max_steps=4)
    first = run(config, trainer={"until": 2}, meanwhile=_two_batches_are_trained, stop_after_meanwhile=True)
    again = run(config.model_copy(update={"resume": True}), trainer={"version": 0})
    assert again.error is None
    assert [reply.step for reply in again.trainer.batches] == [0, 1, 2, 3]
    assert len(first.trainer.batches) == 2
    for reply in first.trainer.batches:
        assert encode(again.trainer.batches[reply.step]) == encode(reply)


def test_groups_that_were_open_are_rolled_out_first_after_a_restart(tmp_path):
    """Batch 1 was being generated when it stopped: its examples are not lost."""
    config = build_config(tmp_path, max_steps=4)
    prompts: dict[tuple, int] = {}

    async def hang_after_two_groups(asked):
        if prompts.setdefault(tuple(asked.ids), len(prompts)) >= 2:
            await asyncio.Event().wait()

    async def meanwhile(running):
        await running.until(lambda: running.orchestrator.scheduler.next_batch == 1, "a batch")

    stopped = run(config, engine={"delay": hang_after_two_groups}, meanwhile=meanwhile, stop_after_meanwhile=True)
    open_groups = stopped.records[-1].state.open_groups
    assert len(open_groups) == 2
    again = run(config.model_copy(update={"resume": True}), trainer={"version": 0})
    assert again.error is None
    trained = {(rollout.group, rollout.example) for rollout in again.records[1].rollouts}
    assert trained == {(group.id, group.example) for group in open_groups}


def test_going_back_to_an_older_step_sets_the_later_batches_aside(tmp_path):
    config = build_config(tmp_path, max_async_level=0, max_steps=3)
    assert run(config).error is None
    before = entries(config)
    back = config.model_copy(
        update={
            "seed": 1,
            "trainer": config.trainer.model_copy(
                update={"ckpt": config.trainer.ckpt.model_copy(update={"resume_step": 1})}
            ),
        }
    )
    assert run(back, trainer={"version": 1}).error is None
    after = entries(config)
    assert after[0] == before[0]
    assert after[1] != before[1]
    aside = sorted(path.read_bytes() for path in config.paths.journal.glob("set_aside_*/batch_*.msgpack"))
    assert aside == sorted(before[1:])


@pytest.fixture
def config_with_one_batch(tmp_path):
    config = build_config(tmp_path, max_steps=1)
    record = BatchRecord(step=0, rollouts=[], dropped=[], state=State(next_batch=1))
    Journal(config.paths.journal).append(record)
    return config


def test_a_journal_of_an_earlier_run_is_not_continued_unasked(config_with_one_batch):
    before = entries(config_with_one_batch)
    outcome = run(config_with_one_batch)
    assert isinstance(outcome.error, ConfigError)
    assert "holds 1 batches of an earlier run" in str(outcome.error)
    assert "--resume" in str(outcome.error)
    assert "output_dir" in str(outcome.error)
    assert entries(config_with_one_batch) == before


def test_a_damaged_head_ends_the_run_before_it_begins(config_with_one_batch):
    path = config_with_one_batch.paths.journal / "batch_000000.msgpack"
    path.write_bytes(path.read_bytes()[:-1])
    outcome = run(config_with_one_batch.model_copy(update={"resume": True}))
    assert isinstance(outcome.error, JournalCorrupt)
    assert str(path) in str(outcome.error)


def test_a_run_that_is_complete_only_waits_for_its_trainer(config_with_one_batch):
    before = entries(config_with_one_batch)
    again = run(config_with_one_batch.model_copy(update={"resume": True}), trainer={"version": 1})
    assert again.error is None
    assert again.engine.version == 1
    assert again.engine.requests == []
    assert entries(config_with_one_batch) == before


def test_what_the_eval_command_left_in_a_run_that_evaluates_nothing_is_not_taken_for_its_own(tmp_path):
    config = build_config(tmp_path, max_steps=2)

    async def one_batch(running):
        await running.until(lambda: running.orchestrator.policy.version >= 1, "version 1")

    assert run(config, trainer={"until": 1}, meanwhile=one_batch, stop_after_meanwhile=True).error is None
    (config.paths.evals / "step_1").mkdir(parents=True)
    (config.paths.evals / "step_1" / "say.jsonl").write_text('{"example_id": 0, "reward": 1.0}\n')
    again = run(config.model_copy(update={"resume": True}), trainer={"version": 1})
    assert again.error is None
