"""How full rows are, how long ranks wait for each other, what a rank's batch costs to hand out, and what rows
compute twice.

    uv run python -m benchmarks.trainer.packing

Lengths are drawn, costs are those of a model of 7 billion parameters. "Before" is first-fit decreasing, dealt to ranks
in order. An answer is timed from the journal's entry to the reply that the trainer has decoded.
"""

from __future__ import annotations

import itertools
import time

import numpy as np

from benchmarks.measuring import command, print_table
from trireme.algo.model.flops import Cost, cost_of
from trireme.algo.packing import deal, num_distinct, pack, share_prefixes
from trireme.journal.rank_shares import DealtBatch
from trireme.journal.records import BatchRecord, Rollout, State
from trireme.messages import build_tokens, decode_reply, encode

MODEL = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
MODEL |= {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064}
KINDS = ("long tail", "even", "two kinds")
CASES = ((512, 16384, 8), (256, 8192, 8), (1024, 32768, 8), (128, 4096, 2), (2048, 8192, 64), (20480, 8192, 8))
"""Samples, tokens of a row, ranks."""


def main() -> None:
    cases = itertools.product(("flash_attention_2", "sdpa"), KINDS, CASES)
    columns = ("lengths", "attention", "samples, row, ranks", "rows full", "waiting before", "now", "ms")
    print_table(columns, (balance(kind, attention, *case) for attention, kind, case in cases))
    print()
    answers = (answer(num_rollouts, ranks) for num_rollouts in (128, 512) for ranks in (1, 8))
    print_table(("tokens of the batch", "ranks", "MB to one rank", "ms"), answers)
    print()
    print_table(("conversations that a row holds", "tokens computed per token"), map(computed, (1, 2, 4, 8)))


def balance(kind: str, attention: str, count: int, capacity: int, ranks: int) -> list[str]:
    lengths, cost = lengths_of(kind, count, capacity), cost_of(MODEL, attention=attention)
    began = time.perf_counter()
    dealt = deal(lengths, capacity=capacity, ranks=ranks, cost=cost)
    ms = (time.perf_counter() - began) * 1e3

    # rows by first fit, dealt in turn; a rank that has one less gets an empty one
    rows = first_fit(lengths, capacity)
    rows += [[]] * (-len(rows) % ranks)
    before = [rows[rank::ranks] for rank in range(ranks)]

    shares = (
        sum(lengths) / (capacity * len(pack(lengths, capacity))),
        *(imbalance(each, lengths, cost) for each in (before, dealt)),
    )
    return [kind, attention, f"{count} in {capacity} on {ranks}", *(f"{share:.1%}" for share in shares), f"{ms:.0f}"]


def lengths_of(kind: str, count: int, capacity: int) -> list[int]:
    rng = np.random.default_rng(0)
    if kind == "long tail":  # most answers are short, a few as long as they may be
        drawn = rng.lognormal(np.log(capacity / 10), 0.8, count)
    elif kind == "even":
        drawn = rng.integers(capacity // 40, capacity // 2, count).astype(float)
    else:  # one of five is cut off, or nearly
        is_long = rng.random(count) < 0.2
        long, short = rng.integers(capacity * 3 // 4, capacity, count), rng.integers(64, capacity // 10, count)
        drawn = np.where(is_long, long, short).astype(float)
    return np.clip(drawn, 32, capacity).astype(int).tolist()


def first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= capacity)
        if (row := next(fits, None)) is None:
            rows.append([index])
        else:
            row.append(index)
    return rows


def imbalance(dealt: list[list[list[int]]], lengths: list[int], cost: Cost) -> float:
    """Return how much longer a step is than if no rank waited for another."""
    costs = np.array([[cost.of_row([lengths[i] for i in row]) for row in rows] for rows in dealt])
    return float(costs.max(axis=0).sum() / costs.sum() * len(dealt) - 1)


def answer(num_rollouts: int, ranks: int) -> list[str]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(8, 0.7, num_rollouts), 100, 16384).astype(int).tolist()
    record = BatchRecord(0, [_rollout(place, length, rng) for place, length in enumerate(lengths)], [], State())
    began = time.perf_counter()
    reply = encode(DealtBatch(record, world=ranks, capacity=16384).share(0))
    decode_reply(reply)
    ms = (time.perf_counter() - began) * 1e3
    return [f"{sum(lengths):,}", str(ranks), f"{len(reply) / 1e6:.1f}", f"{ms:.0f}"]


def computed(held: int) -> list[str]:
    """Conversations of 20 turns of 80 tokens, in groups of four with the same first 300 (`orchestrator.prefixes`)."""
    rng, samples = np.random.default_rng(0), list[np.ndarray]()
    for prompt in rng.integers(0, 9999, (4, 300)):
        samples += [np.concatenate([prompt, rng.integers(0, 9999, 1560)]) for _ in range(4)]

    lengths = [len(sample) for sample in samples]
    (rows,) = deal(lengths, capacity=held * lengths[0], ranks=1)
    shared = (share_prefixes(np.concatenate([samples[i] for i in row]), [lengths[i] for i in row]) for row in rows)
    return [str(held), f"{sum(len(row.kept) for row in shared) / num_distinct(samples):.2f}"]


def _rollout(place: int, length: int, rng: np.random.Generator) -> Rollout:
    mask = np.arange(length) >= length // 4
    tokens = build_tokens(
        ids=rng.integers(0, 150_000, length),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0),
        advantages=np.where(mask, 0.3, 0.0),
        versions=np.where(mask, 3, -1),
    )
    return Rollout(group=0, place=place, env="env", example=place, reward=0.5, samples=[tokens], temperature=1.0)


if __name__ == "__main__":
    command(main)
