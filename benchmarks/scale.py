"""Where one orchestrator saturates, with 64 engines and 256 trainer ranks, and what happens then: a simulation.

    uv run python benchmarks/scale.py [--engines 64] [--ranks 256] [--rollout-us 300] [--json FILE]

Measured here, with the real code and on this machine: what a token costs the orchestrator's process (reading an
engine's answer, checking it, making a sample and a journal entry of it), what a rank's share costs it (packing, its
bytes), and how large every message is. What a rollout costs besides its tokens is measured by `orchestrator.py`, and
given as `--rollout-us`.

Simulated with these: rollouts that go round between engines (so many at once in each, so many tokens a second) and the
orchestrator's one core, first come, first served; each full batch is closed, dealt, and handed to every rank. Trainer
and environments are as fast as they need to be, so that whatever is lost is lost to the orchestrator. Its network is
counted in bytes, not simulated.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

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


@dataclass
class Costs:
    """Of the orchestrator's process, and what is on its wires."""

    rollout_us: float  # without its tokens
    token_us: float
    share_ms: float  # of one rank, beside the dealing
    deal_us: float  # of a batch, for each rollout
    beat_us: float
    request_bytes_per_token: float
    answer_bytes_per_token: float
    worker_bytes_per_token: float
    journal_bytes_per_token: float
    share_bytes_per_token: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--slots", type=int, default=64, help="rollouts at once in an engine")
    parser.add_argument("--tokens-per-s", type=float, default=10_000, help="of an engine, all its rollouts together")
    parser.add_argument("--batch", type=int, default=2048, help="rollouts")
    parser.add_argument("--rollout-us", type=float, default=300, help="`orchestrator_us` of orchestrator.py")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    costs = measure(args)
    console = Console(width=120)
    console.print({name: round(value, 3) for name, value in asdict(costs).items()})
    rows = [simulate(args, costs, mean) for mean in (8192, 2048, 1024, 512, 256, 128, 64)]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:,.1f}" for value in row.values()))
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"costs": asdict(costs), "rows": rows}, indent=1))


# measured


def measure(args: argparse.Namespace) -> Costs:
    short, long = 64, 2048
    per_token = (cost_of_tokens(long) - cost_of_tokens(short)) / (long - short)
    record = record_of(args.batch, 512)
    whole = timed(lambda: shares_of(record).of(record.step, rank=0, world=args.ranks), times=3)
    shares = shares_of(record)
    share = encode(shares.of(record.step, rank=0, world=args.ranks))
    one = timed(lambda: encode(shares.of(record.step, rank=1, world=args.ranks)))
    beat = encode(Heartbeat(run_id="r" * 32, process="trainer.rank17", state="training", version=12, waits=["x" * 80]))
    tokens = (PROMPT + 512) * args.batch
    journal = sum(len(encode(rollout)) for rollout in record.rollouts)
    return Costs(
        rollout_us=args.rollout_us,
        token_us=per_token * 1e6,
        share_ms=one * 1e3,
        deal_us=(whole - one) / args.batch * 1e6,
        beat_us=timed(lambda: decode_request(beat)) * 1e6,
        request_bytes_per_token=len(json.dumps(list(range(100_000, 100_000 + PROMPT)))) / PROMPT,
        answer_bytes_per_token=(len(answer_of(long)) - len(answer_of(short))) / (long - short),
        worker_bytes_per_token=len(wire.encode(reply_of(long))) / (PROMPT + long),
        journal_bytes_per_token=journal / tokens,
        share_bytes_per_token=len(share) * args.ranks / tokens,
    )


def cost_of_tokens(count: int) -> float:
    """CPU seconds of all that is done once for each sampled token."""
    answer, prompt = answer_of(count), list(range(PROMPT))

    def work() -> None:
        turn = read_turn(choice_of(read_answer(answer, Response), max_tokens=count, vocab_size=VOCABULARY), newest=3)
        wire.encode(wire.Reply(content="w" * 4 * count, prompt_ids=prompt, completion_ids=turn.ids))
        encode(rollout_of(0, turn.ids, turn.logprobs, turn.versions))

    return timed(work)


def timed(work: Callable[[], object], times: int = 20) -> float:
    """The least CPU seconds of a few."""
    least = float("inf")
    for _ in range(times):
        began = time.thread_time()
        work()
        least = min(least, time.thread_time() - began)
    return least


def answer_of(count: int) -> bytes:
    """What vLLM writes, as far as it grows with the tokens."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, count).tolist()
    logprobs = [{"token_id": token, "logprob": -0.5 - token / VOCABULARY, "top_logprobs": []} for token in ids]
    span = {"version": "3", "start": 0, "end": count}
    choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": logprobs}, "weight_versions": [span]}
    return json.dumps({"choices": [choice]}).encode()


def reply_of(count: int) -> wire.Reply:
    ids = list(range(100_000, 100_000 + count))
    return wire.Reply(content="w" * 4 * count, prompt_ids=ids[:PROMPT], completion_ids=ids, logprobs=[-0.5] * count)


def rollout_of(number: int, ids: list[int], logprobs: list[float], versions: list[int]) -> Rollout:
    tokens = build_tokens(
        ids=[0] * PROMPT + ids,
        loss_mask=[0] * PROMPT + [1] * len(ids),
        logprobs=[0.0] * PROMPT + logprobs,
        advantages=[0.0] * (PROMPT + len(ids)),
        versions=[-1] * PROMPT + versions,
    )
    said = [{"role": "assistant", "content": "w" * 4 * len(ids)}]
    return Rollout(
        group=number, env="say", example=number, reward=0.5, samples=[tokens], temperature=1.0, completion=said
    )


def record_of(batch: int, mean: int) -> BatchRecord:
    rollouts = [
        rollout_of(number, [5] * count, [-0.5] * count, [3] * count)
        for number, count in enumerate(lengths(np.random.default_rng(0), mean, batch))
    ]
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


class Core:
    """One core: work is done in the order in which it comes."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.busy_s = 0.0
        self.waited: list[float] = []

    def work(self, now: float, seconds: float) -> float:
        """When it is done."""
        begin = max(now, self.free_at)
        self.waited.append(begin - now)
        self.free_at = begin + seconds
        self.busy_s += seconds
        return self.free_at


def simulate(args: argparse.Namespace, costs: Costs, mean: int) -> dict[str, float]:
    """Rollouts of `mean` tokens until three batches' worth has warmed it up and ten have been counted."""
    rng, core = np.random.default_rng(1), Core()
    drawn = iter(lengths(rng, mean, 16 * args.batch + args.engines * args.slots * 2))
    token_s = args.slots / args.tokens_per_s  # of one rollout, in a full engine
    half_s = costs.rollout_us * 0.5e-6  # before the engine, and after it
    ends: list[tuple[float, int]] = []
    generated = 0.0

    def begin(now: float) -> None:
        nonlocal generated
        count = next(drawn)
        asked = core.work(now, half_s)
        generated += count * token_s
        heapq.heappush(ends, (asked + count * token_s, count))

    for _ in range(args.engines * args.slots):
        begin(0.0)
    done, tokens, handed = 0, 0, []
    warm_up, last = 3 * args.batch, 13 * args.batch
    began, busy_before, tokens_before, generated_before = 0.0, 0.0, 0, 0.0
    while done < last:
        now, count = heapq.heappop(ends)
        scored = core.work(now, half_s + count * costs.token_us * 1e-6)
        done, tokens = done + 1, tokens + count
        begin(scored)
        if done % args.batch == 0:
            handed.append(hand_out(args, costs, core, scored) - scored)
        if done == warm_up:
            began, busy_before, tokens_before, generated_before = scored, core.busy_s, tokens, generated
            core.waited.clear()
    seconds = core.free_at - began
    beats = args.ranks * costs.beat_us * 1e-6  # a second's
    rate = (last - warm_up) / seconds
    inward = rate * mean * costs.answer_bytes_per_token
    outward = rate * (PROMPT * costs.request_bytes_per_token + (PROMPT + mean) * costs.share_bytes_per_token)
    return {
        "tokens a rollout": mean,
        "rollouts/s": rate,
        "core %": 100 * min(1.0, (core.busy_s - busy_before) / seconds + beats),
        "engines busy %": min(100.0, 100 * (generated - generated_before) / seconds / (args.engines * args.slots)),
        "1000 tokens/s": (tokens - tokens_before) / seconds / 1000,
        "wait for the core, p99 ms": float(np.percentile(core.waited, 99)) * 1e3,
        "batch to last rank, ms": float(np.median(handed[3:])) * 1e3,
        "MB/s in": inward / 1e6,
        "MB/s out": outward / 1e6,
        "MB/s to disk": rate * (PROMPT + mean) * costs.journal_bytes_per_token / 1e6,
    }


def hand_out(args: argparse.Namespace, costs: Costs, core: Core, now: float) -> float:
    """Dealt in one piece; then a share in each turn."""
    at = core.work(now, args.batch * costs.deal_us * 1e-6)
    for _ in range(args.ranks):
        at = core.work(at, costs.share_ms * 1e-3)
    return at


if __name__ == "__main__":
    main()
