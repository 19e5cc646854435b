"""How much trainer and engines wait for each other when both sides are equally fast.

    uv run python -m benchmarks.orchestrator.bubbles [--cv 0 0.5 1.5] [--level 1]     a balanced workload, by spread
    uv run python -m benchmarks.orchestrator.bubbles --real 8 24 64 [--answers 32]    real engine and trainer
    uv run python -m benchmarks.orchestrator.bubbles --runs outputs/reverse-text ...  runs that there are
    uv run python -m benchmarks.orchestrator.bubbles --cost                           what the recording itself takes

The balanced workload is a real orchestrator with its journal, its environment worker and the real wire, between an
engine that takes a set time per token in a set number of places, and a trainer that takes a set time per step. Both
sleep, so figures do not depend on how busy the machine is, as long as the orchestrator gets a core. A batch of answers
of mean length fills all places for just as long as a step takes. `cv` is the spread of lengths (deviation over mean).
Shares are those of `spans.jsonl`, without the first steps.

With --real vLLM answers with a model of 20 million parameters, and FSDP2 trains it, each on a thread of its own; all
answers are equally long. The engine is the faster the more requests it takes at once: rows are of so many places.

Prints a table, and of each row the advice that `trireme status` gives.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from benchmarks.measuring import command, cpu_s, print_table
from benchmarks.runs import run_countdown
from support.engines.fake_engine import Asked, FakeEngine, FakeTrainer, WeightWire, build_app, serving
from support.models.tiny_tokenizer import END
from support.runs.whole_run import SAY, build_config
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.targets import num_sampled
from trireme.monitor.metrics import read_metrics
from trireme.monitor.spans import ENGINE, FEW, ORCHESTRATOR, TRAINER, Lane, SpansFile, open_spans, read_spans
from trireme.monitor.timeline import OTHER, advice_for, idle, reasons, shares, steady
from trireme.orchestrator.loop import drive, open_orchestrator

DEADLINE_S = 600.0
WARM_UP = 3  # steps that are not counted
COLUMNS = ["run", "trainer trains", "waits", "moves weights", "other", "engine generates", "few requests", "waits"]
COLUMNS += ["moves weights", "other", "places empty", "lag mean", "max", "stale", "length trained / begun"]
COLUMNS += ["engine waits for"]


@dataclass(frozen=True)
class Workload:
    """Two sides that take equally long for a batch."""

    cv: float
    batch: int = 64
    places: int = 32
    mean_tokens: int = 60
    step_s: float = 1.0
    num_steps: int = 48
    level: int = 1
    oversampling: float = 1.5
    trainer: float = 1.0
    seed: int = 0

    @property
    def token_s(self) -> float:
        """All places are full for a step's time when each has its part of a batch, one answer after the other."""
        return self.step_s * self.places / (self.batch * self.mean_tokens)


class PacedEngine(FakeEngine):
    """Says answers of drawn lengths at a set speed, so many at a time. Paused, it does not get on."""

    def __init__(self, wire: WeightWire, *, end: int, port: int, work: Workload) -> None:
        super().__init__(wire, end=end, port=port)
        self._work = work
        self._places = asyncio.Semaphore(work.places)
        self._rng = random.Random(work.seed)
        self._paused = asyncio.Event()
        self.lengths: list[int] = []  # of all answers, as they were begun
        self.served: list[tuple[float, float]] = []  # begin and end of each time that a place was taken, by the clock

    async def _pause(self, body: dict) -> None:
        await super()._pause(body)
        self._paused.set()

    async def _resume(self, body: dict) -> None:
        self._paused.clear()
        await super()._resume(body)

    def length(self) -> int:
        """Log-normal, with the mean and the spread that are asked for."""
        sigma = math.sqrt(math.log1p(self._work.cv**2))
        drawn = self._rng.lognormvariate(math.log(self._work.mean_tokens) - sigma**2 / 2, sigma)
        return max(1, min(round(drawn), 8 * self._work.mean_tokens))

    async def _sample(self, asked: Asked) -> dict[str, Any]:
        length = self.length()
        self.lengths.append(length)
        async with self._places:
            began = time.time()
            await self._take(length * self._work.token_s)
            self.served.append((began, time.time()))
        self.answer = lambda asked: [20 + (place + length) % 20 for place in range(length - 1)] + [self.end]
        return await super()._sample(asked)

    async def _take(self, seconds: float) -> None:
        left_s = seconds
        while left_s > 0:
            await self.running.wait()
            began = time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    await self._paused.wait()
            except TimeoutError:
                pass
            left_s -= time.monotonic() - began


class PacedTrainer(FakeTrainer):
    """Takes a set time per step, and writes the lane that a trainer writes."""

    def __init__(self, config: RunConfig, wire: WeightWire, lane: Lane, step_s: float) -> None:
        super().__init__(config, wire)
        self._lane = lane
        self._step_s = step_s
        self.before_step = self._train_on
        lane.enter(None)

    def get_batch(self, step: int, **knobs: Any) -> Any:
        with self._lane.doing("wait", step=step, why="no batch yet"):
            return super().get_batch(step, **knobs)

    def _train_on(self, version: int) -> None:
        with self._lane.doing("train", step=version):
            time.sleep(self._step_s)

    def publish(self, **knobs: Any) -> None:
        with self._lane.doing("transfer", step=self.version):
            super().publish(**knobs)

    def ask(self, request: Any, *, what: str) -> Any:
        if what == "bye":
            self._lane.enter("idle")
        return self.control.ask(request, what=what, deadline_s=DEADLINE_S)


async def run_balanced(folder: Path, work: Workload) -> tuple[Path, PacedEngine]:
    """Return the folder of a whole run, and its engine."""
    config = build_config(
        folder,
        SAY.replace("size=40", "size=400"),
        max_steps=work.num_steps,
        max_async_level=work.level,
        seq_len=1024,
        orchestrator={
            "batch_size": work.batch,
            "rollouts_per_example": 8,
            "oversampling_factor": work.oversampling or 1.0,
            "max_off_policy_steps": 8 if work.oversampling else work.level + 1,  # which has no room for a reserve
            "sampling": {"max_tokens": 900},
            "trainer_timeout_s": DEADLINE_S,
            "engine_timeout_s": DEADLINE_S,
        },
    )
    wire = WeightWire()
    port = config.inference.server.port
    assert port is not None
    engine = PacedEngine(wire, end=END, port=port, work=work)
    async with serving(build_app(engine), engine.port), open_orchestrator(config) as orchestrator:
        with open_spans(config.paths.spans) as spans:
            trainer = PacedTrainer(config, wire, spans.lane(TRAINER, what="start"), work.step_s * work.trainer)
            thread = threading.Thread(target=trainer.train, daemon=True)
            thread.start()
            await drive(orchestrator)
            await asyncio.to_thread(thread.join)
            return config.paths.root, engine


SETTINGS = """
max_async_level = {level}
seq_len = 128
inference.max_num_seqs = {places}

[trainer]
threads = 1
micro_batch_tokens = 2048

[trainer.optim]
lr = 1e-6

[orchestrator]
batch_size = 32
rollouts_per_example = 8
sampling.max_tokens = {longest}
"""


def main(
    cv: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5),
    steps: int = 48,
    step_s: Annotated[float, "seconds that the trainer takes for a step"] = 1.0,
    level: Annotated[int, "max_async_level"] = 1,
    oversampling: Annotated[float, "oversampling_factor; 0 for no reserve"] = 1.5,
    trainer: Annotated[float, "how much slower than the engine the trainer is"] = 1.0,
    real: Annotated[tuple[int, ...], "places for requests of a real engine, row by row"] = (),
    answers: Annotated[int, "tokens of each answer of the real engine"] = 32,
    runs: Annotated[tuple[Path, ...], "folders of runs to look at instead"] = (),
    cost: bool = False,
) -> None:
    if cost:
        return print_cost()
    logging.disable(logging.WARNING)
    rows = [row_of(folder, folder.name) for folder in runs]
    for places in real:
        with tempfile.TemporaryDirectory(prefix="bubbles-") as name:
            settings = SETTINGS.format(places=places, level=level, longest=answers + 1)
            run = run_countdown(20, Path(name), answer_tokens=answers, steps=steps, settings=settings)
            rows.append(row_of(run.root, f"{places} places"))
    for each in () if runs or real else cv:
        work = Workload(each, num_steps=steps, step_s=step_s, level=level, oversampling=oversampling, trainer=trainer)
        with tempfile.TemporaryDirectory() as name:
            root, engine = asyncio.run(run_balanced(Path(name), work))
            rows.append(row_of(root, f"cv {each:g}", engine, work))
    print_table(COLUMNS, rows)


def row_of(root: Path, name: str, paced: PacedEngine | None = None, work: Workload | None = None) -> list[str]:
    """Return the shares of a run's time, without its first steps and what comes after the last; print the advice."""
    spans, _ = read_spans(root / "spans.jsonl")
    begin_s, end_s = steady(spans)
    steps = [span for span in spans if span.lane == TRAINER and span.what == "train"]
    begin_s = max(begin_s, min((span.begin_s for span in steps if span.step >= WARM_UP), default=begin_s))
    ends = [span.begin_s for span in spans if span.lane == ORCHESTRATOR and span.what == "idle"]  # every batch is full
    end_s = min([end_s, max((span.end_s for span in steps), default=end_s), *ends])
    print(f"{name}: {advice_for(spans, begin_s, end_s)}", flush=True)

    trainer, engine = (shares(spans, lane, begin_s, end_s) for lane in (TRAINER, ENGINE))
    few = dict(reasons(spans, ENGINE, begin_s, end_s, whats=("generate",))).get(FEW, 0.0)
    why = next((why for why, _ in reasons(spans, ENGINE, begin_s, end_s) if why), "-")
    of_trainer = [trainer.get(what, 0.0) for what in ("train", "wait", "transfer", OTHER)]
    of_engine = [engine.get("generate", 0.0), few, idle(engine), engine.get("transfer", 0.0), engine[OTHER]]
    cells = [name, *(f"{share:.1%}" for share in of_trainer + of_engine)]
    if paced is None or work is None:
        return [*cells, "-", *ages(root), "-", why]

    # Over the whole run: every answer that was begun, and those that were trained on.
    taken_s = sum(max(0.0, min(end, end_s) - max(begin, begin_s)) for begin, end in paced.served)
    batches = list(map(Journal(root / "journal").read, range(work.num_steps)))
    trained = [num_sampled(rollout.samples) for batch in batches for rollout in batch.rollouts]
    ratio = f"{np.mean(trained):.1f} / {np.mean(paced.lengths):.1f} ({len(trained)} / {len(paced.lengths)})"
    return [*cells, f"{1 - taken_s / (end_s - begin_s) / work.places:.1%}", *ages(root), ratio, why]


def ages(root: Path) -> list[str]:
    """Return mean and largest lag, without the first steps, and how many rollouts were dropped as stale."""
    rows = [row for row in read_metrics(root / "metrics.jsonl")[0] if "lag/mean" in row]
    late = [row for row in rows if row["step"] >= WARM_UP]
    mean, most = np.mean([row["lag/mean"] for row in late]), max(row["lag/max"] for row in late)
    return [f"{mean:.2f}", f"{most:.0f}", f"{sum(row.get('rollouts/dropped/stale', 0) for row in rows):.0f}"]


def print_cost() -> None:
    """Print the CPU time of what an event loop does per turn of a lane, and of what the writer does per span."""
    with tempfile.TemporaryDirectory() as name:
        path, count = Path(name) / "spans.jsonl", 200_000
        file = SpansFile(path)
        lane = file.lane("engine 127.0.0.1:8000")
        whats: tuple[Any, Any] = ("generate", "wait")

        def turn() -> None:
            for number in range(count):
                lane.enter(whats[number % 2], step=1)

        watched_us, written_us = (cpu_s(work) / count * 1e6 for work in (turn, file.flush))
        lines = len(path.read_bytes().splitlines())
    print(f"{watched_us:.2f} us of CPU per turn of a lane, in the thread that is watched")
    print(f"{written_us:.2f} us per turn in the thread that writes ({lines} lines of {count} turns)")


if __name__ == "__main__":
    command(main)
