"""A whole orchestrator in this process, between a fake engine and a fake trainer, with a real environment worker."""

import asyncio
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.engines.fake_engine import FakeEngine, FakeTrainer, WeightWire, open_fake_engine
from support.models.tiny_tokenizer import END, write_tokenizer
from trireme.base.errors import TriremeError
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.records import BatchRecord
from trireme.orchestrator.loop import Orchestrator, drive, open_orchestrator

SAY = """
    def dataset(size=40):
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(size)]

    def reward(completion, answer):
        return (len(completion) * 7 + ord(completion[0])) % 10 / 10
"""
DEADLINE_S = 30.0


def build_config(folder: Path, code: str = SAY, **sections: Any) -> RunConfig:
    """A small run; `sections` are merged into it (`orchestrator={"batch_size": 4}`)."""
    environment = folder / "toy.py"
    environment.parent.mkdir(parents=True, exist_ok=True)
    environment.write_text(textwrap.dedent(code))
    values: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "device": "cpu",
        "max_steps": 3,
        "seq_len": 256,
        "model": {"name": str(write_tokenizer(folder / "model"))},
        "ports": {"batches": free_port()},
        "inference": {"server": {"port": free_port()}},
        "weight_broadcast": {"type": "gloo", "probe_tolerance": 1e-3},
        "orchestrator": {
            "batch_size": 8, "rollouts_per_example": 4, "sampling": {"max_tokens": 8},
            "env": [{"id": str(environment), "name": "say"}], "server": {"port": free_port()},
            "trainer_timeout_s": DEADLINE_S, "engine_timeout_s": DEADLINE_S,
        },
    }  # fmt: skip
    return RunConfig.model_validate(_merged(values, sections))


def _merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = {key for key in values if isinstance(values[key], dict) and isinstance(more.get(key), dict)}
    return values | more | {key: _merged(values[key], more[key]) for key in both}


def entries(config: RunConfig) -> list[bytes]:
    """Of the journal, in order."""
    return [path.read_bytes() for path in sorted(config.paths.journal.glob("batch_*.msgpack"))]


def block_until(condition: Callable[[], Any], what: str) -> None:
    """For the trainer's thread. Raises: DeadlineExceeded."""
    with Waits("test").waiting(what, peer="orchestrator", deadline_s=DEADLINE_S) as wait:
        while not condition():
            wait.check()
            time.sleep(0.01)


class Killed(Exception):
    """What becomes of a trainer's thread instead of SIGKILL."""


@dataclass
class WholeRun:
    config: RunConfig
    engine: FakeEngine
    pool: dict[str, Any]  # attributes of the orchestrator's pool of engines, set whenever it starts
    trainers: list[FakeTrainer] = field(default_factory=list)
    orchestrator: Orchestrator | None = None
    error: TriremeError | None = None  # that ended the orchestrator
    trainer_error: list[Exception] = field(default_factory=list)
    found: Any = None  # what `meanwhile` returned

    def __post_init__(self) -> None:
        self._test = asyncio.current_task()
        self._opened = asyncio.Event()
        self._looking: asyncio.Task[Any] | None = None

    @property
    def trainer(self) -> FakeTrainer:
        return self.trainers[-1]

    @property
    def records(self) -> list[BatchRecord]:
        journal = Journal(self.config.paths.journal)
        return [journal.read(step) for step in journal.steps()]

    # its processes

    def start_trainer(self, **knobs: Any) -> None:
        self.trainers.append(trainer := FakeTrainer(self.config, self.engine.wire, **knobs))
        loop = asyncio.get_running_loop()

        def train() -> None:
            try:
                trainer.train()
            except Killed:
                pass
            except Exception as error:
                self.trainer_error.append(error)
                if not isinstance(error, TriremeError):
                    with suppress(RuntimeError):  # the test is over already
                        loop.call_soon_threadsafe(self._test.cancel)

        self._training = threading.Thread(target=train, daemon=True)
        self._training.start()

    async def kill_trainer(self, *, at: int) -> None:
        def die(version: int) -> None:
            if version == at:
                raise Killed

        self.trainer.before_step = die
        await asyncio.to_thread(self._training.join, DEADLINE_S)

    def start_orchestrator(self) -> None:
        self._driving = asyncio.create_task(self._drive())
        self._driving.add_done_callback(self._stop_looking)

    async def _drive(self) -> None:
        async with open_orchestrator(self.config) as self.orchestrator:
            for name, value in self.pool.items():
                setattr(self.orchestrator.pool, name, value)
            self._opened.set()
            await drive(self.orchestrator)

    def _stop_looking(self, driving: asyncio.Task[None]) -> None:
        """Where the orchestrator fails, the test has nothing to look at any more."""
        if not driving.cancelled() and driving.exception() is not None and self._looking is not None:
            self._looking.cancel()

    async def kill_orchestrator(self) -> None:
        self._driving.cancel()
        await asyncio.wait([self._driving])

    def lose_engine(self) -> None:
        """Its successor is there at once, with the base model's weights and nothing under way."""
        self.engine.version, self.engine.weights = -1, {}
        self.engine.running.set()

    # what a test asks

    async def until(self, condition: Callable[[], Any], what: str = "it") -> None:
        async with asyncio.timeout(3 * DEADLINE_S):  # each wait of its processes has a deadline of its own
            while not condition():
                assert not self._driving.done(), f"the run ended before {what}"
                await asyncio.sleep(0.005)

    async def over(self) -> None:
        """Wait until the orchestrator has ended, in whatever way."""
        await asyncio.wait([self._driving])

    async def ask(self, questions: Callable[[FakeTrainer], Any]) -> Any:
        def put() -> Any:
            asker = FakeTrainer(self.config, self.engine.wire)
            asker.connect()
            with closing(asker.control):
                return questions(asker)

        return await asyncio.to_thread(put)

    async def go_on(self, meanwhile: Callable[["WholeRun"], Awaitable[Any]] | None, stop_after_meanwhile: bool) -> None:
        """To the end, or to the error that ends it."""
        try:
            if meanwhile is not None:
                self._looking = asyncio.create_task(self._look(meanwhile))
                await asyncio.wait([self._looking])
                if not self._looking.cancelled():
                    self.found = self._looking.result()
            if stop_after_meanwhile:
                self._driving.cancel()
            await asyncio.wait([self._driving])
            if not self._driving.cancelled():
                await self._driving
        except* TriremeError as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            assert isinstance(error, TriremeError)
            self.error = error

    async def _look(self, meanwhile: Callable[["WholeRun"], Awaitable[Any]]) -> Any:
        await self._opened.wait()
        return await meanwhile(self)


def run(
    config: RunConfig,
    *,
    engine: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    meanwhile: Callable[[WholeRun], Awaitable[Any]] | None = None,
    stop_after_meanwhile: bool = False,
) -> WholeRun:
    async def main() -> WholeRun:
        port = config.inference.server.port
        async with open_fake_engine(WeightWire(), port=port, end=END, **(engine or {})) as opened:
            whole = WholeRun(config, opened, pool or {})
            try:
                async with asyncio.timeout(3 * DEADLINE_S):  # each wait of its processes has a deadline of its own
                    whole.start_orchestrator()
                    whole.start_trainer(**(trainer or {}))
                    await whole.go_on(meanwhile, stop_after_meanwhile)
            except asyncio.CancelledError:
                raise whole.trainer_error[0] from None  # a mistake in the test's own trainer
            finally:
                for each in whole.trainers:
                    each.stop.set()
            return whole

    return asyncio.run(main())
