"""Whoever dies while the others live: the orchestrator, the trainer, an engine. Each is started again, alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from fake_engine import FakeEngine, FakeTrainer, WeightWire, digests_of, open_fake_engine
from tiny_tokenizer import END
from trireme.config.run import RunConfig
from trireme.ledger.journal import Journal
from trireme.ledger.versions import Versions
from trireme.messages import encode
from trireme.orchestrator.loop import Orchestrator, drive, open_orchestrator
from whole_run import DEADLINE_S, build_config, run

STEPS = 6


def config_of(folder, **sections: Any) -> RunConfig:
    return build_config(folder, max_steps=STEPS, resume=True, **sections)


@dataclass
class Stage:
    """Three actors, each of which can be taken away and brought back while the others go on."""

    config: RunConfig
    wire: WeightWire
    engine: FakeEngine
    trainers: list[FakeTrainer] = field(default_factory=list)
    orchestrator: Orchestrator | None = None
    _driving: asyncio.Task | None = None
    _training: threading.Thread | None = None

    def start_trainer(self, *, version: int = 0) -> FakeTrainer:
        trainer = FakeTrainer(self.config, self.wire, version=version)
        self.trainers.append(trainer)
        self._training = threading.Thread(target=self._train, args=(trainer,), daemon=True)
        self._training.start()
        return trainer

    def _train(self, trainer: FakeTrainer) -> None:
        with suppress(_Killed):
            trainer.train()

    async def kill_trainer(self, *, at: int) -> None:
        """When it is about to train batch `at`."""

        def die(version: int) -> None:
            if version == at:
                raise _Killed

        self.trainers[-1].before_step = die
        assert self._training is not None
        await asyncio.to_thread(self._training.join, DEADLINE_S)

    def start_orchestrator(self) -> None:
        self._driving = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        async with open_orchestrator(self.config) as self.orchestrator:
            self.orchestrator.pool.health_interval_s = self.orchestrator.pool.retry_s = 0.02
            await drive(self.orchestrator)

    async def kill_orchestrator(self) -> None:
        assert self._driving is not None
        self._driving.cancel()
        await asyncio.wait([self._driving])

    async def until_trained(self, version: int) -> None:
        await self.until(lambda: self.trainers[-1].version >= version)

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            assert self._driving is not None
            if self._driving.done():
                await self._driving
                raise AssertionError("the run ended before")
            await asyncio.sleep(0.005)

    async def until_done(self) -> None:
        assert self._driving is not None
        assert self._training is not None
        await self._driving
        await asyncio.to_thread(self._training.join, DEADLINE_S)
        assert self.trainers[-1].version == STEPS

    def lose_engine(self) -> None:
        """Its successor is there at once, with the base model's weights and nothing under way."""
        self.engine.version, self.engine.weights = -1, {}
        self.engine.running.set()


class _Killed(Exception):
    """What becomes of a thread instead of SIGKILL."""


@asynccontextmanager
async def open_stage(config: RunConfig, **knobs: Any) -> AsyncIterator[Stage]:
    wire = WeightWire()
    async with (
        asyncio.timeout(DEADLINE_S),
        open_fake_engine(wire, port=config.inference.server.port, end=END, **knobs) as engine,
    ):
        stage = Stage(config, wire, engine)
        stage.start_orchestrator()
        stage.start_trainer()
        yield stage
        await stage.until_done()


def journal_of(config: RunConfig) -> list[bytes]:
    journal = Journal(config.paths.journal)
    assert journal.steps() == list(range(STEPS))
    return [encode(journal.read(step).rollouts) for step in journal.steps()]


@pytest.fixture
def undisturbed(tmp_path) -> list[bytes]:
    config = config_of(tmp_path / "undisturbed", max_async_level=0)
    run(config)
    return journal_of(config)


@pytest.mark.parametrize("times", [1, 3])
def test_an_orchestrator_that_is_started_again_goes_on_with_the_live_engine_and_trainer(tmp_path, undisturbed, times):
    config = config_of(tmp_path, max_async_level=0)

    async def main() -> Stage:
        async with open_stage(config) as stage:
            for number in range(1, times + 1):
                await stage.until_trained(number)
                await stage.kill_orchestrator()
                stage.start_orchestrator()
            await stage.until(lambda: stage.orchestrator is not None and stage.orchestrator.policy.version >= times)
        return stage

    stage = asyncio.run(main())
    assert journal_of(config) == undisturbed
    assert stage.trainers[0].asked_to_publish == []  # the engine was adopted as it was
    assert stage.trainers[0].published == list(range(STEPS + 1))


def test_a_trainer_that_starts_from_an_older_checkpoint_is_given_the_same_batches_and_publishes_nothing_twice(
    tmp_path, undisturbed
):
    config = config_of(tmp_path, max_async_level=0)

    async def main() -> Stage:
        async with open_stage(config) as stage:
            await stage.kill_trainer(at=4)
            stage.start_trainer(version=1)
        return stage

    stage = asyncio.run(main())
    first, second = stage.trainers
    assert first.published == [0, 1, 2, 3, 4]
    assert second.published == [5, 6]
    shares = [[encode(batch) for batch in trainer.batches] for trainer in (first, second)]
    assert shares[0][1:5] == shares[1][:4]
    assert journal_of(config) == undisturbed


@pytest.mark.parametrize("level", [0, 2])
def test_an_engine_that_comes_back_without_weights_is_given_them_before_it_is_asked(tmp_path, level):
    config = config_of(tmp_path, max_async_level=level)

    async def main() -> Stage:
        async with open_stage(config, token_s=0.002) as stage:
            for number in (1, 3):
                await stage.until_trained(number)
                stage.lose_engine()
                await stage.until(lambda: stage.engine.version >= 0)
        return stage

    asyncio.run(main())
    for step in range(STEPS):
        record = Journal(config.paths.journal).read(step)
        versions = {int(v) for r in record.rollouts for sample in r.samples for v in sample.versions if v >= 0}
        assert versions <= set(Versions(config.paths.journal).known())
        assert step - min(versions) <= (config.orchestrator.max_off_policy_steps if level else 0)


def test_everything_lost_but_the_disk_is_everything_kept(tmp_path, undisturbed):
    config = config_of(tmp_path, max_async_level=0)

    async def main() -> None:
        async with open_stage(config) as stage:
            await stage.kill_trainer(at=3)
            await stage.kill_orchestrator()
            stage.lose_engine()
            stage.start_orchestrator()
            stage.start_trainer(version=2)

    asyncio.run(main())
    assert journal_of(config) == undisturbed


def test_an_orchestrator_that_dies_in_the_middle_of_a_transfer_leaves_an_engine_that_can_be_used_again(
    tmp_path, undisturbed
):
    config = config_of(tmp_path, max_async_level=0)

    async def main() -> Stage:
        async with open_stage(config) as stage:
            await stage.until(lambda: stage.engine.calls.count("start_weight_update") == 3)
            await stage.kill_orchestrator()
            stage.start_orchestrator()
        return stage

    asyncio.run(main())
    assert journal_of(config) == undisturbed
    assert Versions(config.paths.journal).known() == list(range(STEPS + 1))


def test_every_version_is_on_disk_with_its_digests_before_a_token_under_it_may_be_used(tmp_path):
    config = config_of(tmp_path)
    seen = []

    async def meanwhile(running):
        await running.until(lambda: running.orchestrator.policy, "a policy")
        versions, pool = Versions(config.paths.journal), running.orchestrator.policy.pool
        generate = pool.generate

        async def watched(*asked, **how):
            turn = await generate(*asked, **how)
            seen.extend((version, versions.has(version)) for version in set(turn.versions))
            return turn

        pool.generate = watched

    run(config, meanwhile=meanwhile)
    assert {version for version, _ in seen} >= set(range(1, STEPS - 1))
    assert all(is_there for _, is_there in seen)
    versions = Versions(config.paths.journal)
    assert versions.known() == list(range(STEPS + 1))
    assert all(versions.read(version).digests == digests_of(version) for version in versions.known())


def test_a_run_that_lacks_only_its_last_checkpoint_waits_for_the_trainer_and_reports_nothing_twice(tmp_path):
    config = config_of(tmp_path)
    run(config)
    rows = config.paths.metrics.read_bytes()

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), open_fake_engine(port=config.inference.server.port, end=END):
            stage = Stage(config, WeightWire(), None)  # type: ignore[arg-type]
            stage.start_orchestrator()
            await asyncio.sleep(1.0)
            assert stage._driving is not None
            assert not stage._driving.done()  # no checkpoint of the last step: its trainer is needed yet
            await stage.kill_orchestrator()

    asyncio.run(main())
    assert config.paths.metrics.read_bytes() == rows  # nothing was reported twice
