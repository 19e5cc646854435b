"""How many conversations to have under way: fixed numbers against the window that the orchestrator keeps.

    uv run python -m benchmarks.orchestrator.window [--work agents tools answers mixed] [--engines 2]
    uv run python -m benchmarks.orchestrator.window --real 60 --fixed 2 12 48

Simulates engines that schedule as vLLM does (chunked prefill, a prefix cache that evicts what was used longest ago,
preemption of the newest), in a loop whose clock jumps. There is always another conversation to begin. Numbers of turns,
lengths and pauses have heavy tails. With --real, vLLM computes, with 25 M parameters and 16,384 tokens of KV cache.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

from benchmarks.measuring import command, print_table
from trireme.base.waiting import Waits
from trireme.journal.model_turn import Turn
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.health import LOAD_POLL_S, poll_load
from trireme.orchestrator.engines.responses import Load
from trireme.orchestrator.engines.window import Window

STEP_S, DECODE_S, PREFILL_S = 0.02, 1e-4, 1e-4  # of an engine's step, of each token sampled in it, of a prompt's token
CHUNK, MOST_RUNNING = 2048, 256  # tokens of prompts in a step, requests at once
MOST_UNDER_WAY = 512  # conversations, with a window
COLUMNS = ["work", "conversations", "computed per token", "tokens per s", "ended", "preemptions", "KV used, %"]


class Work(NamedTuple):
    turns: float  # median
    prompt: int  # mean tokens: of the first prompt, that the model samples in a turn, that the environment adds
    sampled: int
    given: int
    pause_s: float
    spread: float = 0.9  # of the logarithm of the turns
    longest: int = 1 << 16


AGENTS = Work(turns=12, prompt=1500, sampled=300, given=400, pause_s=3)
TOOLS = AGENTS._replace(pause_s=30)
ANSWERS = Work(turns=1, prompt=400, sampled=4000, given=0, pause_s=0, spread=0)
WORKS = {"agents": [AGENTS], "tools": [TOOLS], "answers": [ANSWERS], "mixed": [AGENTS, TOOLS, ANSWERS]}
REAL = Work(turns=8, prompt=300, sampled=24, given=60, pause_s=0.5, spread=0.5, longest=2048)

Ask = Callable[[int, int, int], Awaitable[Turn]]
"""Answers a conversation's prompt of so many tokens with so many."""


@dataclass
class Tally:
    existing: int = 0  # tokens
    ended: int = 0  # conversations
    used: list[float] = field(default_factory=list)  # share of the KV caches


def main(
    work: tuple[str, ...] = tuple(WORKS),
    fixed: tuple[int, ...] = (4, 12, 16, 24, 48, 256),
    engines: int = 1,
    kv_tokens: Annotated[int, "of each engine"] = 300_000,
    hours: float = 16.0,
    seed: int = 0,
    real: Annotated[float, "seconds of vLLM, instead of the simulation"] = 0.0,
) -> None:
    rows = []
    for name in ["real"] if real else work:
        for number in (*fixed, None):
            if real:
                found = asyncio.run(measure(number, real))
            else:
                found = simulate(WORKS[name], number, num_engines=engines, kv_tokens=kv_tokens, hours=hours, seed=seed)
            rows.append([name, str(number or "window"), *found])
            print(rows[-1], flush=True)
    print_table(COLUMNS, rows)


async def play(
    ask: Ask, works: list[Work], number: int | None, window: Window, tally: Tally, seconds: float, seed: int = 0
) -> None:
    """Have conversations for a while: always so many, or, without a number, as many as the window lets."""
    numbers = iter(range(1 << 30))

    async def worker() -> None:
        for each in numbers:
            await converse(ask, works[each % len(works)], each, seed, tally, None if number else window)

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(worker() for _ in range(number or MOST_UNDER_WAY)))


async def converse(ask: Ask, work: Work, number: int, seed: int, tally: Tally, window: Window | None) -> None:
    rng = random.Random(f"{seed} {number}")

    def draw(mean: float, spread: float = 0.8) -> int:
        return max(1, round(rng.lognormvariate(0, spread) * mean))

    place = window.join() if window else None
    known, prompt = 0, draw(work.prompt, 0.4)
    for _ in range(min(200, draw(work.turns, work.spread))):
        sampled = min(draw(work.sampled), work.longest - prompt)
        if sampled <= 0:
            break
        if window and place:
            await window.wait_for_turn(place)
        turn = await ask(number, prompt, sampled)
        if window and place:
            window.learn(place, prompt, known, turn)
        tally.existing += prompt - known + sampled
        known = prompt + sampled
        await asyncio.sleep(rng.expovariate(1) * work.pause_s * (5 if rng.random() < 0.1 else 0.55))
        prompt = known + draw(work.given)
    tally.ended += 1
    if window and place:
        window.leave(place)


# simulated


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing is left to do."""

    _clock = 0.0

    def time(self) -> float:
        return self._clock

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._clock = max(self._clock, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def simulate(
    works: list[Work], number: int | None, *, num_engines: int, kv_tokens: int, hours: float, seed: int
) -> list[str]:
    engines, tally = [SimulatedEngine(kv_tokens) for _ in range(num_engines)], Tally()
    home: dict[int, SimulatedEngine] = {}  # the engine of each conversation, as affinity keeps it

    async def ask(number: int, prompt: int, sampled: int) -> Turn:
        engine = home.setdefault(number, min(engines, key=lambda each: len(each.waiting) + len(each.running)))
        return await engine.ask(number, prompt, sampled)

    async def run() -> None:
        known = [each.known_as for each in engines]
        window = Window(lambda: known, Waits("benchmark"), max(each.longest for each in works), lambda: PREFILL_S)

        async def poll() -> None:
            while True:
                for each in engines:
                    window.observe(each.known_as, each.load())
                tally.used.append(sum(each.used for each in engines) / num_engines / kv_tokens)
                await asyncio.sleep(LOAD_POLL_S)

        tasks = [asyncio.create_task(each.run()) for each in engines] + [asyncio.create_task(poll())]
        await play(ask, works, number, window, tally, 3600 * hours, seed)
        for task in tasks:
            task.cancel()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(run())
    computed, preemptions = sum(each.computed for each in engines), sum(each.preemptions for each in engines)
    return row(tally, computed, preemptions, 3600 * hours)


def row(tally: Tally, computed: float, preemptions: float, seconds: float) -> list[str]:
    used = sum(tally.used) / max(1, len(tally.used))
    rates = [f"{computed / tally.existing:.2f}", f"{tally.existing / seconds:,.0f}", f"{tally.ended:,}"]
    return [*rates, f"{preemptions:,.0f}", f"{100 * used:.0f}"]


@dataclass(eq=False)
class Request:
    conversation: int
    context: int  # tokens up to now
    left: int  # tokens to sample
    number: int  # in the order in which they came
    computed: int = 0  # tokens in the cache
    num_cached: int = -1  # tokens that were there at first
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SimulatedEngine:
    def __init__(self, kv_tokens: int) -> None:
        self.kv_tokens = kv_tokens
        self.known_as = Engine("http://simulated", None, state="live")  # type: ignore[arg-type]
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()  # preempted ones first
        self.cached: OrderedDict[int, int] = OrderedDict()  # tokens of conversations without a request, oldest first
        self.num_cached = self.used = 0  # tokens of these, and of running requests
        self.computed = self.preemptions = self._num_asked = 0
        self._asked = asyncio.Event()

    def load(self) -> Load:
        return Load(self.kv_tokens, self.used / self.kv_tokens, len(self.waiting), self.preemptions)

    async def ask(self, number: int, prompt: int, sampled: int) -> Turn:
        self._num_asked += 1
        self.waiting.append(request := Request(number, prompt, sampled, self._num_asked))
        self._asked.set()
        await request.done
        return Turn([0] * sampled, [], [0], "stop", num_computed=prompt - request.num_cached + sampled)

    async def run(self) -> None:
        while True:
            if not self.running and not self.waiting:
                self._asked.clear()
                await self._asked.wait()
            await asyncio.sleep(self._step())

    def _step(self) -> float:
        """Compute one step, or several alike. Returns its seconds."""
        num_preempted = self.preemptions
        prefilling = [each for each in self.running if each.computed < each.context]
        decoding = len(self.running) - len(prefilling)

        # Sample a token for each, or several if no request comes or goes meanwhile.
        alike = 1 if prefilling or self.waiting else min(16, *(each.left for each in self.running))
        for each in [each for each in self.running if each.computed == each.context]:
            if each in self.running and self._compute(each, alike):
                each.context += alike
                each.left -= alike

        # Prompts share what is left of the step.
        chunk = CHUNK - decoding
        for each in prefilling:
            chunk -= self._read(each, chunk)
        while self.waiting and len(self.running) < MOST_RUNNING and chunk > 0 and self.preemptions == num_preempted:
            request = self.waiting[0]
            held = min(self.cached.get(request.conversation, 0), request.context - 1)
            if self.used + held + min(chunk, request.context - held) > self.kv_tokens:
                break
            self.waiting.popleft()
            self.num_cached -= self.cached.pop(request.conversation, 0)
            request.computed, self.used = held, self.used + held
            request.num_cached = held if request.num_cached < 0 else request.num_cached
            self.running.append(request)
            chunk -= self._read(request, chunk)

        for each in [each for each in self.running if not each.left]:
            self._stop(each)
            each.done.set_result(None)
        return alike * (STEP_S + decoding * DECODE_S) + (CHUNK - decoding - chunk) * PREFILL_S

    def _read(self, request: Request, most: int) -> int:
        tokens = min(most, request.context - request.computed)
        return tokens if tokens > 0 and request in self.running and self._compute(request, tokens) else 0

    def _compute(self, request: Request, tokens: int) -> bool:
        """Compute tokens; preempt the newest requests for room, then evict. Returns False if this one is preempted."""
        while self.used + tokens > self.kv_tokens:
            newest = max(self.running, key=lambda each: each.number)
            self._stop(newest)
            self.preemptions += 1
            self.waiting.appendleft(newest)
            if newest is request:
                return False
        while (over := self.used + self.num_cached + tokens - self.kv_tokens) > 0:
            oldest, held = next(iter(self.cached.items()))
            self.cached[oldest] = kept = max(0, held - over)
            self.num_cached -= held - kept
            if not kept:
                del self.cached[oldest]
        request.computed += tokens
        self.used += tokens
        self.computed += tokens
        return True

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.used -= request.computed
        self.num_cached += request.computed
        self.cached[request.conversation] = request.computed


# real


async def measure(number: int | None, seconds: float) -> list[str]:
    """Have conversations with vLLM. Return a row of the table."""
    from benchmarks.made_models import Spread, write_countdown
    from support.runs.real_run import open_engine
    from trireme.orchestrator.engines.pool import open_inference_pool

    known, rng, tally = dict[int, list[int]](), random.Random(0), Tally()
    with tempfile.TemporaryDirectory(prefix="window-") as folder:
        model = write_countdown(Path(folder) / "model", [Spread(0.0)], hidden=512, layers=8, heads=8)
        config = Path(folder) / "engine.toml"
        config.write_text(f'device = "cpu"\nseq_len = {REAL.longest}\nmodel.name = "{model}"\n')
        flags = ["--inference.cpu.threads", "1", "--inference.args.num-gpu-blocks-override", "512"]
        with open_engine(Path(folder) / "engine", *flags, config=config, forked=False) as server:
            limits = {"max_model_len": REAL.longest, "timeout_s": 600, "max_concurrent": 1024}
            opening = open_inference_pool([f"http://127.0.0.1:{server.port}"], waits=Waits("benchmark"), **limits)
            async with opening as pool:
                (engine,) = pool.engines
                await engine.post("update_weight_version", {"new_version": "0"})
                pool.go_live(engine, 0)

                async def ask(number: int, prompt: int, sampled: int) -> Turn:
                    ids = known.setdefault(number, [])
                    ids += rng.choices(range(20, 120), k=prompt - len(ids))
                    turn = await pool.generate(ids, {"max_tokens": sampled, "ignore_eos": True})
                    ids += turn.ids
                    return turn

                await poll_load(pool, engine)

                async def poll() -> None:
                    while True:
                        await poll_load(pool, engine)
                        tally.used.append(engine.load.kv_usage if engine.load else 0.0)
                        await asyncio.sleep(LOAD_POLL_S)

                polling = asyncio.create_task(poll())
                await play(ask, [REAL], number, pool.window, tally, seconds)
                polling.cancel()
                text = (await engine.request("metrics"))[1].decode()

    found = re.findall(r"^vllm:(\w+)_total\{([^}]*)\} (\S+)$", text, re.MULTILINE)
    counts = {name + "_local" * ("local_compute" in labels): float(value) for name, labels, value in found}
    computed = counts["generation_tokens"] + counts["prompt_tokens_by_source_local"]
    return row(tally, computed, counts["num_preemptions"], seconds)


if __name__ == "__main__":
    command(main)
