"""A whole orchestrator in this process, between a fake engine and a fake trainer, with a real environment worker."""

from __future__ import annotations

import asyncio
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, FakeTrainer, WeightWire, open_fake_engine
from tiny_tokenizer import END, write_tokenizer
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
            "batch_size": 8,
            "rollouts_per_example": 4,
            "sampling": {"max_tokens": 8},
            "env": [{"id": str(environment), "name": "say"}],
            "server": {"port": free_port()},
            "trainer_timeout_s": DEADLINE_S,
            "engine_timeout_s": DEADLINE_S,
        },
    }
    return RunConfig.model_validate(_merged(values, sections))


def _merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = {key for key in values if isinstance(values[key], dict) and isinstance(more.get(key), dict)}
    return values | more | {key: _merged(values[key], more[key]) for key in both}


def block_until(condition: Callable[[], Any], what: str) -> None:
    """For the trainer's thread. Raises: DeadlineExceeded."""
    with Waits("test").waiting(what, peer="orchestrator", deadline_s=DEADLINE_S) as wait:
        while not condition():
            wait.check()
            time.sleep(0.01)


@dataclass
class Running:
    """What a test may look at, and turn, while the run goes on."""

    orchestrator: Orchestrator
    engine: FakeEngine
    trainer: FakeTrainer

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)
        assert condition(), what

    async def ask(self, questions: Callable[[FakeTrainer], Any]) -> Any:
        """Puts questions over a connection of its own."""

        def put() -> Any:
            asker = FakeTrainer(self.orchestrator.config, self.engine.wire)
            asker.connect()
            with closing(asker.control):
                return questions(asker)

        return await asyncio.to_thread(put)


@dataclass
class Outcome:
    """What is left of a run."""

    config: RunConfig
    engine: FakeEngine
    trainer: FakeTrainer
    error: TriremeError | None = None  # that ended the orchestrator
    trainer_error: list[Exception] = field(default_factory=list)
    found: Any = None  # what `meanwhile` returned

    @property
    def records(self) -> list[BatchRecord]:
        journal = Journal(self.config.paths.journal)
        return [journal.read(step) for step in journal.steps()]


def run(
    config: RunConfig,
    *,
    engine: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    meanwhile: Callable[[Running], Awaitable[Any]] | None = None,
    stop_after_meanwhile: bool = False,
) -> Outcome:
    """Runs to the end, or to the error that ends it. `engine` and `trainer` are knobs of theirs."""

    async def main() -> Outcome:
        wire = WeightWire()
        port = config.inference.server.port
        async with open_fake_engine(wire, port=port, end=END, **(engine or {})) as opened:
            outcome = Outcome(config, opened, FakeTrainer(config, wire, **(trainer or {})))
            try:
                await _run(outcome, meanwhile, stop_after_meanwhile)
            except asyncio.CancelledError:
                raise outcome.trainer_error[0] from None  # a mistake in the test's own trainer
            return outcome

    return asyncio.run(main())


async def _run(
    outcome: Outcome, meanwhile: Callable[[Running], Awaitable[Any]] | None, stop_after_meanwhile: bool
) -> None:
    loop, here = asyncio.get_running_loop(), asyncio.current_task()
    assert here is not None

    def train() -> None:
        try:
            outcome.trainer.train()
        except Exception as error:
            outcome.trainer_error.append(error)
            if not isinstance(error, TriremeError):
                with suppress(RuntimeError):  # the test is over already
                    loop.call_soon_threadsafe(here.cancel)

    threading.Thread(target=train, daemon=True).start()
    try:
        async with asyncio.timeout(DEADLINE_S), open_orchestrator(outcome.config) as orchestrator:
            driving = asyncio.create_task(drive(orchestrator))
            if meanwhile is not None:
                looking = asyncio.create_task(meanwhile(Running(orchestrator, outcome.engine, outcome.trainer)))
                await asyncio.wait([driving, looking], return_when=asyncio.FIRST_COMPLETED)
                if driving.done() and driving.exception() is not None:
                    looking.cancel()
                else:
                    outcome.found = await looking
            if stop_after_meanwhile:
                driving.cancel()
            await asyncio.wait([driving])
            if not driving.cancelled():
                await driving
    except* TriremeError as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, TriremeError)
        outcome.error = error
    finally:
        outcome.trainer.stop.set()
