"""How much trainer and engines wait for each other where both sides are equally fast.

    uv run python benchmarks/bubbles.py [--cv 0 0.5 1.5] [--quick] [--json FILE]   a balanced workload, by spread
    uv run python benchmarks/bubbles.py --real 8 24 64 [--answers 32] [--level 1]  real engine and trainer
    uv run python benchmarks/bubbles.py --runs outputs/reverse-text ...            runs that there are
    uv run python benchmarks/bubbles.py --cost                                     what the recording itself takes

The balanced workload is a real orchestrator with its journal, its environment worker and the real wire, between an
engine that takes a set time per token in a set number of places, and a trainer that takes a set time per step. Both
sleep, so figures do not depend on how busy the machine is, as long as the orchestrator gets a core. A batch of answers
of mean length fills all places for just as long as a step takes. `cv` is the spread of lengths (deviation over mean).
Shares are those of `spans.jsonl`, without the first steps.

With --real vLLM answers with a model of 20 million parameters, and FSDP2 trains it, each on a thread of its own; all
answers are equally long. The engine is the faster the more requests it takes at once: rows are of so many places.

Prints a table. With --check exit code 1 where either side of the row with cv 0 is idle for 5 % or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import random
import resource
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import real_rl
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fake_engine import Asked, FakeEngine, FakeTrainer, WeightWire, open_fake_engine
from tiny_tokenizer import END
from trireme.config.run import RunConfig
from trireme.monitor.spans import ORCHESTRATOR, TRAINER, Lane, Span, SpansFile, open_spans, read_spans
from trireme.monitor.timeline import (
    NOTICEABLE,
    OTHER,
    Shares,
    advice,
    engine_reasons,
    engine_shares,
    few_requests,
    idle,
    reasons,
    shares,
    steady,
)
from trireme.orchestrator.loop import drive, open_orchestrator
from whole_run import build_config

DEADLINE_S = 600.0
WARM_UP = 3  # steps that are not counted

SAY = """
    def dataset(size=400):
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(size)]

    def reward(completion, answer):
        return (len(completion) * 7 + ord(completion[0])) % 10 / 10
"""


@dataclass(frozen=True)
class Workload:
    """Two sides that take equally long for a batch."""

    cv: float
    batch: int = 64
    places: int = 32
    mean_tokens: int = 60
    step_s: float = 2.0
    num_steps: int = 16
    level: int = 1
    oversampling: float = 1.0
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
        self.busy_s = 0.0  # of all places together

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
        async with self._places:
            await self._take(length * self._work.token_s)
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
            worked_s = time.monotonic() - began
            left_s -= worked_s
            self.busy_s += worked_s


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


async def run(folder: Path, work: Workload) -> tuple[RunConfig, float]:
    """A whole run. Returns the share of the engine's places that were taken."""
    config = build_config(
        folder,
        SAY,
        max_steps=work.num_steps,
        max_async_level=work.level,
        seq_len=1024,
        orchestrator={
            "batch_size": work.batch,
            "rollouts_per_example": 8,
            "oversampling_factor": work.oversampling,
            "sampling": {"max_tokens": 900},
            "trainer_timeout_s": DEADLINE_S,
            "engine_timeout_s": DEADLINE_S,
        },
    )
    wire = WeightWire()
    knobs: dict[str, Any] = {"end": END, "port": config.inference.server.port, "work": work}
    async with open_fake_engine(wire, kind=PacedEngine, **knobs) as engine, open_orchestrator(config) as orchestrator:
        assert isinstance(engine, PacedEngine)
        with open_spans(config.paths.spans) as spans:
            trainer = PacedTrainer(config, wire, spans.lane(TRAINER, what="start"), work.step_s)
            thread = threading.Thread(target=trainer.train, daemon=True)
            thread.start()
            began = time.monotonic()
            await drive(orchestrator)
            await asyncio.to_thread(thread.join)
            return config, engine.busy_s / work.places / (time.monotonic() - began)


@dataclass(frozen=True)
class Found:
    """What a run did with its time."""

    name: str
    trainer: Shares
    engines: Shares
    trainer_held: list[tuple[str, float]]
    engines_held: list[tuple[str, float]]
    few_requests: float
    advice: str
    places_busy: float | None = None

    @property
    def is_balanced(self) -> bool:
        return max(idle(self.trainer), idle(self.engines)) < NOTICEABLE


OURS = """
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


def run_really(folder: Path, *, places: int, answer_tokens: int, level: int, steps: int) -> Path:
    """Returns the run's folder."""
    ours = OURS.format(places=places, level=level, longest=answer_tokens + 1)
    return real_rl.run(real_rl.SIZES[20], folder, answer_tokens=answer_tokens, steps=steps, ours=ours)[0]


def look_at(spans: list[Span], name: str, *, warm_up: int = WARM_UP) -> Found:
    begin_s, end_s = steady(spans)
    later = [span.begin_s for span in spans if span.lane == TRAINER and span.what == "train" and span.step >= warm_up]
    steps = [span for span in spans if span.lane == TRAINER and span.what == "train"]
    begin_s = max(begin_s, min(later, default=begin_s))
    ends = [span.begin_s for span in spans if span.lane == ORCHESTRATOR and span.what == "idle"]  # every batch is full
    end_s = min([end_s, max((span.end_s for span in steps), default=end_s), *ends])
    trainer, engines = shares(spans, TRAINER, begin_s, end_s), engine_shares(spans, begin_s, end_s)
    few = few_requests(spans, begin_s, end_s)
    return Found(
        name,
        trainer,
        engines,
        reasons(spans, TRAINER, begin_s, end_s),
        engine_reasons(spans, begin_s, end_s),
        few,
        advice(trainer, engines, few=few),
    )


def show(found: list[Found]) -> None:
    columns = ("run", "trainer trains", "waits", "moves weights", "other")
    table = Table(*columns, "engine generates", "few requests", "waits", "for", "moves weights", "other", "places busy")
    for one in found:
        of_trainer = [one.trainer.get(what, 0.0) for what in ("train", "wait", "transfer", OTHER)]
        held = next((why for why, _ in one.engines_held if why), "-")
        engine = one.engines
        table.add_row(
            one.name,
            *(f"{share:.1%}" for share in of_trainer),
            f"{engine.get('generate', 0.0):.1%}",
            f"{one.few_requests:.1%}",
            f"{idle(engine):.1%}",
            held,
            f"{engine.get('transfer', 0.0):.1%}",
            f"{engine[OTHER]:.1%}",
            "-" if one.places_busy is None else f"{one.places_busy:.1%}",
        )
    Console(width=170).print(table)
    for one in found:
        print(f"{one.name}: {one.advice}")


def cost() -> None:
    """CPU time of what an event loop does per turn of a lane, and of what the writer does per span."""
    with tempfile.TemporaryDirectory() as folder:
        file, count = SpansFile(Path(folder) / "spans.jsonl"), 200_000
        lane = file.lane("engine 127.0.0.1:8000")
        whats: tuple[Any, Any] = ("generate", "wait")
        began = _cpu_s()
        for number in range(count):
            lane.enter(whats[number % 2], step=1)
        turned = _cpu_s()
        file.flush()
        written = _cpu_s()
        lines = len((Path(folder) / "spans.jsonl").read_bytes().splitlines())
    print(f"{(turned - began) / count * 1e6:.2f} us of CPU per turn of a lane, in the thread that is watched")
    print(
        f"{(written - turned) / count * 1e6:.2f} us per turn in the thread that writes ({lines} lines of {count} turns)"
    )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cv", type=float, nargs="+", default=[0.0, 0.5, 1.0, 1.5])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--step-s", type=float, default=2.0, help="seconds that the trainer takes for a step")
    parser.add_argument("--level", type=int, default=1, help="max_async_level")
    parser.add_argument("--oversampling", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="the first spread alone, 12 steps")
    parser.add_argument(
        "--real", type=int, nargs="+", default=[], help="places for requests of a real engine, row by row"
    )
    parser.add_argument("--answers", type=int, default=32, help="tokens of each answer of the real engine")
    parser.add_argument("--runs", type=Path, nargs="*", help="folders of runs to look at instead")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.cost:
        cost()
        return 0
    logging.disable(logging.WARNING)
    found = [look_at(read_spans(run / "spans.jsonl")[0], run.name) for run in args.runs or []]
    for places in args.real:
        with tempfile.TemporaryDirectory(prefix="bubbles-") as folder:
            real = run_really(
                Path(folder), places=places, answer_tokens=args.answers, level=args.level, steps=args.steps
            )
            found.append(look_at(read_spans(real / "spans.jsonl")[0], f"{places} places"))
        show(found[-1:])
    for cv in [] if args.runs or args.real else args.cv[: 1 if args.quick else None]:
        work = Workload(
            cv=cv,
            num_steps=12 if args.quick else args.steps,
            step_s=args.step_s,
            level=args.level,
            oversampling=args.oversampling,
        )
        with tempfile.TemporaryDirectory() as folder:
            config, places_busy = asyncio.run(run(Path(folder), work))
            one = look_at(read_spans(config.paths.spans)[0], f"cv {cv:g}")
        found.append(Found(**{**vars(one), "places_busy": places_busy}))
    show(found)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in found], indent=2))
    return 1 if args.check and not found[0].is_balanced else 0


if __name__ == "__main__":
    sys.exit(main())
