"""Whoever dies while the others live is started again, alone: the orchestrator, the trainer, an engine. And a run that
stops goes on as if it had not."""

import asyncio
import shutil
from collections import Counter, defaultdict
from typing import Any

import pytest

from support.engines.fake_engine import digests_of
from support.processes.stage import write_checkpoint
from support.runs.whole_run import WholeRun, build_config, entries, run
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, step_folder
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.config.trainer import Checkpoints, Tokenizer
from trireme.journal.journal import Journal
from trireme.journal.records import BatchRecord, State
from trireme.journal.versions import Versions
from trireme.launch.origin import begin
from trireme.messages import encode
from trireme.orchestrator.loop import orchestrate

STEPS = 6
QUICK = {"retry_s": 0.02, "health_interval_s": 0.02}


def config_of(folder, **sections: Any) -> RunConfig:
    return build_config(folder, max_steps=STEPS, resume=True, **sections)


def journal_of(config: RunConfig) -> list[bytes]:
    journal = Journal(config.paths.journal)
    assert journal.steps() == list(range(STEPS))
    return [encode(journal.read(step).rollouts) for step in journal.steps()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """A run that found, whenever it got tokens, whether their versions were on disk."""
    config = config_of(tmp_path_factory.mktemp("undisturbed"), max_async_level=0)
    seen, versions = {}, Versions(config.paths.journal)

    async def meanwhile(running):
        await running.until(lambda: running.orchestrator.policy, "a policy")
        generate = running.orchestrator.pool.generate

        async def watched(*asked, **how):
            turn = await generate(*asked, **how)
            seen.update({version: versions.has(version) for version in set(turn.versions) - seen.keys()})
            return turn

        running.orchestrator.pool.generate = watched
        return seen

    return run(config, meanwhile=meanwhile)


def test_a_run_goes_on_as_if_nothing_had_died(tmp_path, undisturbed):
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

    whole = run(config_of(tmp_path, max_async_level=0), pool=QUICK, meanwhile=play)
    assert (whole.error, whole.trainer_error, whole.trainer.version) == (None, [], STEPS)
    assert journal_of(whole.config) == journal_of(undisturbed.config)
    assert Versions(whole.config.paths.journal).known() == list(range(STEPS + 1))
    published = Counter(version for trainer in whole.trainers for version in trainer.published)
    asked = Counter(version for trainer in whole.trainers for version in trainer.asked_to_publish)
    assert published == Counter(range(STEPS + 1)) + asked
    shares = defaultdict(set)
    for batch in (batch for trainer in whole.trainers for batch in trainer.batches):
        shares[batch.step].add(encode(batch))
    assert [len(shares[step]) for step in range(STEPS)] == [1] * STEPS


def test_run_that_begins_from_another_has_its_rollouts_whoever_dies(tmp_path, undisturbed):
    other, at = undisturbed.config, 2
    shutil.copytree(other.paths.root, tmp_path / "other")
    paths = RunPaths(tmp_path / "other")
    write_checkpoint(paths, at)
    write_run(other, paths.run_config)
    taken = {"output_dir": str(tmp_path / "new"), "resume_from": str(step_folder(paths.checkpoints, at))}
    config = RunConfig.model_validate(other.model_dump(mode="json") | taken | {"resume": False})
    begin(config)
    shutil.rmtree(paths.root)

    async def meanwhile(running):
        await running.until(lambda: Journal(config.paths.journal).has(at + 1), "a second batch")
        await running.kill_orchestrator()
        running.start_orchestrator()

    found = run(config, trainer={"version": at}, meanwhile=meanwhile)
    assert found.error is None
    journal = Journal(config.paths.journal)
    assert journal.require_all() == list(range(at, STEPS))
    assert [encode(journal.read(step).rollouts) for step in range(at, STEPS)] == journal_of(other)[at:]
    assert Versions(config.paths.journal).known() == list(range(at, STEPS + 1))


def test_version_digests_are_on_disk_before_its_first_token(undisturbed):
    assert undisturbed.found == dict.fromkeys(range(STEPS), True)
    versions = Versions(undisturbed.config.paths.journal)
    assert [versions.read(version).digests for version in versions.known()] == list(map(digests_of, range(STEPS + 1)))


def test_run_without_its_last_checkpoint_waits_for_the_trainer(undisturbed):
    config = undisturbed.config
    before = [config.paths.metrics.read_bytes(), *entries(config)]

    async def is_waited_for(whole):
        await whole.until(lambda: whole.orchestrator.waits.now())
        await asyncio.sleep(0.2)

    again = run(config, trainer={"until": 0}, meanwhile=is_waited_for, stop_after_meanwhile=True)
    assert (again.error, again.engine.requests) == (None, [])
    assert [config.paths.metrics.read_bytes(), *entries(config)] == before


# in a run that was stopped


def test_rewinding_a_finished_run_sets_its_evaluations_aside(tmp_path):
    config = build_config(tmp_path, max_steps=1)
    Journal(config.paths.journal).append(BatchRecord(step=0, rollouts=[], dropped=[], state=State(next_batch=1)))
    paths = config.paths
    versions = Versions(paths.journal)
    versions.record(1, [], {}, 0.0)
    step_folder(paths.evals, 1).mkdir(parents=True)
    write_checkpoint(paths, 1)
    orchestrate(config)
    assert versions.known() == [1]
    # without a tokenizer it ends as soon as it has gone back
    update = {"ckpt": Checkpoints(resume_step=0), "tokenizer": Tokenizer(name=str(paths.root / "none"))}
    with pytest.raises(ConfigError, match="none"):
        orchestrate(config.model_copy(update={"trainer": config.trainer.model_copy(update=update)}))
    assert (entries(config), versions.known(), list(paths.evals.glob("step_*"))) == ([], [], [])
    assert list(paths.evals.glob("set_aside_*/step_1"))
