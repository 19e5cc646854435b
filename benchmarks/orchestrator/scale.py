"""Where one orchestrator saturates, with 64 engines and 256 trainer ranks, and what happens then: a simulation.

    uv run python -m benchmarks.orchestrator.scale [--engines 64] [--ranks 256] [--rollout-us 300]

Measured here, with the real code and on this machine: what a token costs the orchestrator's process (reading an
engine's answer, checking it, making a sample and a journal entry of it), what a rank's share costs it (packing, its
bytes), and how large every message is. What a rollout costs besides its tokens is measured by `rollout_cost.py`, and
given as `--rollout-us`.

Simulated with these: rollouts that go round between engines (so many at once in each, so many tokens a second) and the
orchestrator's one core, first come, first served; each full batch is closed, dealt, and handed to every rank. Trainer
and environments are as fast as they need to be, so that whatever is lost is lost to the orchestrator. Its network is
counted in bytes, not simulated.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from benchmarks.measuring import command, cpu_s, print_table
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.rank_shares import Shares
from trireme.journal.records import BatchRecord, Rollout, State
from trireme.messages import Heartbeat, build_tokens, decode_request, encode
from trireme.orchestrator.engines.generation import read_turn
from trireme.orchestrator.engines.responses import Response, choice_of, read_answer
from trireme.orchestrator.session import wire

PROMPT = 200
VOCABULARY = 150_000
SPREAD = 1.0
"""Standard deviation of the logarithm of a length: most are short, a few are long."""

MEANS = (8192, 2048, 1024, 512, 256, 128, 64)
COLUMNS = ["tokens a rollout", "rollouts/s", "core %", "engines busy %", "wait for the core, p99 ms"]
COLUMNS += ["batch to last rank, ms", "MB/s in", "MB/s out", "MB/s to disk"]


@dataclass(frozen=True)
class Fleet:
    engines: int
    ranks: int
    slots: int
    tokens_per_s: float
    batch: int


@dataclass(frozen=True)
class Costs:
    """Processor time of the orchestrator's process, and the bytes on its wires."""

    rollout_us: float  # without its tokens
    token_us: float
    share_ms: float  # one rank's, beside the dealing
    deal_us: float  # for each rollout of a batch
    beat_us: float
    request_bytes_per_token: float
    answer_bytes_per_token: float
    journal_bytes_per_token: float
    share_bytes_per_token: float


def main(
    engines: int = 64,
    ranks: int = 256,
    slots: Annotated[int, "rollouts at once in an engine"] = 64,
    tokens_per_s: Annotated[float, "of an engine, all its rollouts together"] = 10_000,
    batch: Annotated[int, "rollouts"] = 2048,
    rollout_us: Annotated[float, "`orchestrator_us` of rollout_cost.py"] = 300,
) -> None:
    fleet = Fleet(engines, ranks, slots, tokens_per_s, batch)
    costs = measure(fleet, rollout_us)
    print_table(("cost", "measured"), ((name, f"{value:.3f}") for name, value in asdict(costs).items()))
    print()
    print_table(COLUMNS, ([f"{value:,.1f}" for value in simulate(fleet, costs, mean)] for mean in MEANS))


# measured


def measure(fleet: Fleet, rollout_us: float) -> Costs:
    short, long = 64, 2048
    record = record_of(fleet.batch, 512)
    dealt = shares_of(record)
    share = encode(dealt.of(record.step, rank=0, world=fleet.ranks))
    whole_s = least_cpu_s(lambda: shares_of(record).of(record.step, rank=0, world=fleet.ranks), times=3)
    share_s = least_cpu_s(lambda: encode(dealt.of(record.step, rank=1, world=fleet.ranks)))
    beat = encode(Heartbeat(run_id="r" * 32, process="trainer.rank17", state="training", version=12, waits=["x" * 80]))
    tokens = (PROMPT + 512) * fleet.batch
    return Costs(
        rollout_us=rollout_us,
        token_us=(cost_of_tokens(long) - cost_of_tokens(short)) / (long - short) * 1e6,
        share_ms=share_s * 1e3,
        deal_us=(whole_s - share_s) / fleet.batch * 1e6,
        beat_us=least_cpu_s(lambda: decode_request(beat)) * 1e6,
        request_bytes_per_token=len(json.dumps(list(range(100_000, 100_000 + PROMPT)))) / PROMPT,
        answer_bytes_per_token=(len(answer_of(long)) - len(answer_of(short))) / (long - short),
        journal_bytes_per_token=sum(len(encode(rollout)) for rollout in record.rollouts) / tokens,
        share_bytes_per_token=len(share) * fleet.ranks / tokens,
    )


def cost_of_tokens(count: int) -> float:
    """Return the CPU seconds of all that is done once for each sampled token."""
    answer, prompt = answer_of(count), list(range(PROMPT))

    def work() -> None:
        turn = read_turn(choice_of(read_answer(answer, Response), max_tokens=count, vocab_size=VOCABULARY), newest=3)
        wire.encode(wire.Reply(content="w" * 4 * count, prompt_ids=prompt, completion_ids=turn.ids))
        encode(rollout_of(0, turn.ids, turn.logprobs, turn.versions))

    return least_cpu_s(work)


def least_cpu_s(work: Callable[[], object], times: int = 20) -> float:
    return min(cpu_s(work) for _ in range(times))


def answer_of(count: int) -> bytes:
    """Return what vLLM writes, as far as it grows with the tokens."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, count).tolist()
    logprobs = [{"token_id": token, "logprob": -0.5 - token / VOCABULARY, "top_logprobs": []} for token in ids]
    span = {"version": "3", "start": 0, "end": count}
    choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": logprobs}, "weight_versions": [span]}
    return json.dumps({"choices": [choice]}).encode()


def rollout_of(number: int, ids: list[int], logprobs: list[float], versions: list[int]) -> Rollout:
    tokens = build_tokens(
        ids=[0] * PROMPT + ids,
        loss_mask=[0] * PROMPT + [1] * len(ids),
        logprobs=[0.0] * PROMPT + logprobs,
        advantages=[0.0] * (PROMPT + len(ids)),
        versions=[-1] * PROMPT + versions,
    )
    said = [{"role": "assistant", "content": "w" * 4 * len(ids)}]
    figures: dict[str, Any] = {"group": number, "example": number, "env": "say", "reward": 0.5, "temperature": 1.0}
    return Rollout(**figures, samples=[tokens], completion=said)


def record_of(batch: int, mean: int) -> BatchRecord:
    counts = enumerate(lengths(np.random.default_rng(0), mean, batch))
    rollouts = [rollout_of(number, [5] * count, [-0.5] * count, [3] * count) for number, count in counts]
    return BatchRecord(3, rollouts, [], State())


class Kept(Journal):
    """A journal of one batch, in memory."""

    def __init__(self, record: BatchRecord) -> None:
        super().__init__(Path())
        self._last = record


def shares_of(record: BatchRecord) -> Shares:
    return Shares(Kept(record), RunConfig.model_validate({"seq_len": 16384}))


def lengths(rng: np.random.Generator, mean: int, count: int) -> list[int]:
    drawn = rng.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(drawn, 1, min(8 * mean, 16384 - PROMPT)).astype(int).tolist()


# simulated


class Simulation:
    """Rollouts of all engines, and one core that does its work in the order in which it comes."""

    def __init__(self, fleet: Fleet, costs: Costs, drawn: Iterator[int]) -> None:
        self.core_free_at = self.core_busy_s = self.generated_s = 0.0
        self.waited: list[float] = []
        self.handed: list[float] = []  # seconds from a full batch to the last rank's share of it
        self._fleet, self._costs, self._drawn = fleet, costs, drawn
        self._half_s = costs.rollout_us * 0.5e-6  # before the engine, and after it
        self._token_s = fleet.slots / fleet.tokens_per_s  # one rollout's, in a full engine
        self._ends: list[tuple[float, int]] = []
        for _ in range(fleet.engines * fleet.slots):
            self._begin(0.0)

    def _work(self, now: float, seconds: float) -> float:
        """Return when the core has done this."""
        begin = max(now, self.core_free_at)
        self.waited.append(begin - now)
        self.core_free_at = begin + seconds
        self.core_busy_s += seconds
        return self.core_free_at

    def _begin(self, now: float) -> None:
        count = next(self._drawn)
        self.generated_s += count * self._token_s
        heapq.heappush(self._ends, (self._work(now, self._half_s) + count * self._token_s, count))

    def run_batch(self) -> float:
        """Take a batch of rollouts in, begin as many, and hand it out to all ranks; return when it was full."""
        for _ in range(self._fleet.batch):
            now, count = heapq.heappop(self._ends)
            scored = self._work(now, self._half_s + count * self._costs.token_us * 1e-6)
            self._begin(scored)

        # dealt in one piece; then a share in each turn
        at = self._work(scored, self._fleet.batch * self._costs.deal_us * 1e-6)
        for _ in range(self._fleet.ranks):
            at = self._work(at, self._costs.share_ms * 1e-3)
        self.handed.append(at - scored)
        return scored


def simulate(fleet: Fleet, costs: Costs, mean: int) -> tuple[float, ...]:
    """Return a row about rollouts of `mean` tokens: three batches warm it up, and ten are counted."""
    drawn = iter(lengths(np.random.default_rng(1), mean, 16 * fleet.batch + 2 * fleet.engines * fleet.slots))
    it = Simulation(fleet, costs, drawn)
    began = [it.run_batch() for _ in range(3)][-1]
    busy_before, generated_before = it.core_busy_s, it.generated_s
    it.waited.clear()
    for _ in range(10):
        it.run_batch()

    seconds = it.core_free_at - began
    rate = 10 * fleet.batch / seconds
    beats = fleet.ranks * costs.beat_us * 1e-6  # a second's
    outward = PROMPT * costs.request_bytes_per_token + (PROMPT + mean) * costs.share_bytes_per_token
    return (
        mean,
        rate,
        100 * min(1.0, (it.core_busy_s - busy_before) / seconds + beats),
        min(100.0, 100 * (it.generated_s - generated_before) / seconds / (fleet.engines * fleet.slots)),
        float(np.percentile(it.waited, 99)) * 1e3,
        float(np.median(it.handed[3:])) * 1e3,
        rate * mean * costs.answer_bytes_per_token / 1e6,
        rate * outward / 1e6,
        rate * (PROMPT + mean) * costs.journal_bytes_per_token / 1e6,
    )


if __name__ == "__main__":
    command(main)
