"""Whoever dies while the others live is started again, alone: the orchestrator, the trainer, an engine. And a run that
stops goes on as if it had not."""

import asyncio
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from fake_engine import digests_of
from stage import write_checkpoint
from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.base.paths import step_folder
from trireme.config.run import RunConfig
from trireme.config.trainer import Checkpoints, Tokenizer
from trireme.journal.journal import Journal
from trireme.journal.records import BatchRecord, State
from trireme.journal.versions import Versions
from trireme.messages import encode
from trireme.orchestrator.loop import orchestrate
from whole_run import WholeRun, build_config, entries, run

STEPS = 7
QUICK = {"retry_s": 0.02, "health_interval_s": 0.02}


def config_of(folder, **sections: Any) -> RunConfig:
    return build_config(folder, max_steps=STEPS, resume=True, **sections)


def journal_of(config: RunConfig) -> list[bytes]:
    journal = Journal(config.paths.journal)
    assert journal.steps() == list(range(STEPS))
    return [encode(journal.read(step).rollouts) for step in journal.steps()]


def test_a_run_goes_on_as_if_nothing_had_died(tmp_path):
    """Single deaths in each phase are those of the kill matrix, of real processes."""

    async def play(whole: WholeRun) -> None:
        await whole.kill_trainer(at=3)
        await whole.kill_orchestrator()
        whole.lose_engine()  # what is left is on disk
        whole.start_orchestrator()
        whole.start_trainer(version=2)  # an older checkpoint
        for number in (4, 5):
            await whole.until(lambda number=number: whole.trainer.version >= number)
            await whole.kill_orchestrator()
            whole.start_orchestrator()
        await whole.until(lambda: whole.orchestrator is not None and whole.orchestrator.policy.version >= 5)
        assert set(whole.trainer.asked_to_publish) <= {3}  # from then on the engine was adopted as it was

    undisturbed = config_of(tmp_path / "undisturbed", max_async_level=0)
    run(undisturbed)
    whole = run(config_of(tmp_path, max_async_level=0), pool=QUICK, meanwhile=play)
    assert (whole.error, whole.trainer_error, whole.trainer.version) == (None, [], STEPS)
    assert journal_of(whole.config) == journal_of(undisturbed)
    assert Versions(whole.config.paths.journal).known() == list(range(STEPS + 1))
    published = Counter(version for trainer in whole.trainers for version in trainer.published)
    asked = Counter(version for trainer in whole.trainers for version in trainer.asked_to_publish)
    assert published == Counter(range(STEPS + 1)) + asked
    shares = defaultdict(set)
    for batch in (batch for trainer in whole.trainers for batch in trainer.batches):
        shares[batch.step].add(encode(batch))
    assert [len(shares[step]) for step in range(STEPS)] == [1] * STEPS


def test_every_version_is_on_disk_with_its_digests_before_a_token_under_it_may_be_used(tmp_path):
    config = config_of(tmp_path)
    versions = Versions(config.paths.journal)
    seen = {}

    async def meanwhile(running):
        await running.until(lambda: running.orchestrator.policy, "a policy")
        generate = running.orchestrator.pool.generate

        async def watched(*asked, **how):
            turn = await generate(*asked, **how)
            seen.update({version: versions.has(version) for version in set(turn.versions) - seen.keys()})
            return turn

        running.orchestrator.pool.generate = watched

    run(config, meanwhile=meanwhile)
    assert len(seen) > 2
    assert all(seen.values())
    assert versions.known() == list(range(STEPS + 1))
    assert all(versions.read(version).digests == digests_of(version) for version in versions.known())


def test_a_run_that_lacks_only_its_last_checkpoint_waits_for_the_trainer_and_reports_nothing_twice(tmp_path):
    config = config_of(tmp_path)
    run(config)
    before = [config.paths.metrics.read_bytes(), *entries(config)]

    async def is_waited_for(whole):
        await whole.until(lambda: whole.orchestrator.waits.now())
        await asyncio.sleep(0.2)

    again = run(config, trainer={"until": 0}, meanwhile=is_waited_for, stop_after_meanwhile=True)
    assert (again.error, again.engine.requests) == (None, [])
    assert [config.paths.metrics.read_bytes(), *entries(config)] == before


# in a run that was stopped


def test_going_back_to_an_older_step_sets_the_later_batches_aside(tmp_path):
    config = build_config(tmp_path, max_async_level=0)
    assert run(config).error is None
    before = entries(config)
    ckpt = config.trainer.ckpt.model_copy(update={"resume_step": 1})
    trainer = config.trainer.model_copy(update={"ckpt": ckpt})
    assert run(config.model_copy(update={"seed": 1, "trainer": trainer}), trainer={"version": 1}).error is None
    after = entries(config)
    assert (after[0], after[1] == before[1]) == (before[0], False)
    aside = sorted(path.read_bytes() for path in config.paths.journal.glob("set_aside_*/batch_*.msgpack"))
    assert aside == sorted(before[1:])


@pytest.fixture
def one_batch(tmp_path: Path) -> RunConfig:
    config = build_config(tmp_path, max_steps=1)
    Journal(config.paths.journal).append(BatchRecord(step=0, rollouts=[], dropped=[], state=State(next_batch=1)))
    return config


def test_a_run_that_is_over_goes_back_with_its_evaluations_where_the_user_asks_for_it(one_batch):
    paths = one_batch.paths
    versions = Versions(paths.journal)
    versions.record(1, [], {}, 0.0)
    step_folder(paths.evals, 1).mkdir(parents=True)
    write_checkpoint(paths, 1)
    orchestrate(one_batch)
    assert versions.known() == [1]
    # without a tokenizer it ends as soon as it has gone back
    update = {"ckpt": Checkpoints(resume_step=0), "tokenizer": Tokenizer(name=str(paths.root / "none"))}
    with pytest.raises(ConfigError, match="none"):
        orchestrate(one_batch.model_copy(update={"trainer": one_batch.trainer.model_copy(update=update)}))
    assert (entries(one_batch), versions.known(), list(paths.evals.glob("step_*"))) == ([], [], [])
    assert list(paths.evals.glob("set_aside_*/step_1"))


def test_a_damaged_head_ends_the_run_before_it_begins(one_batch):
    path = one_batch.paths.journal / "batch_000000.msgpack"
    path.write_bytes(path.read_bytes()[:-1])
    outcome = run(one_batch.model_copy(update={"resume": True}))
    assert isinstance(outcome.error, JournalCorrupt)
    assert str(path) in str(outcome.error)
