"""Attention of short samples on a CPU, forward and backward: torch's own kernel, and the formula written out.

    uv run python -m benchmarks.trainer.attention [--tokens 4096] [--threads 1 2]

A cell is the seconds of torch's kernel by those of the formula, medians by turns: above 1 the formula is quicker.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measuring import by_turns, command, print_table
from trireme.trainer.model.packing.attention import attend_on_cpu

HEADS = [(6, 64), (16, 128)]
LENGTHS = [16, 32, 64, 128, 192, 256, 384]
ROUNDS = 5


def main(tokens: Annotated[int, "of all samples of a row"] = 4096, threads: tuple[int, ...] = (1, 2)) -> None:
    cases = [(dtype, count, *head) for dtype in ("bfloat16", "float32") for count in threads for head in HEADS]
    rows = ([*case[:2], f"{case[2]} x {case[3]}", *ratios(tokens, *case)] for case in cases)
    print_table(["dtype", "threads", "heads x size", *(f"{length} tokens" for length in LENGTHS)], rows)


def ratios(tokens: int, dtype: str, threads: int, heads: int, size: int) -> list[str]:
    torch.set_num_threads(threads)
    shapes = [(max(1, tokens // length), heads, length, size) for length in LENGTHS]
    return [f"{ratio(shape, getattr(torch, dtype)):.2f}" for shape in shapes]


def ratio(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, dtype=dtype)

    def kernel() -> None:
        scaled_dot_product_attention(query, key, value, is_causal=True).backward(upstream)

    def formula() -> None:
        attend_on_cpu(query, key, value, scaling=shape[-1] ** -0.5).transpose(1, 2).backward(upstream)

    seconds = by_turns({"kernel": kernel, "formula": formula}, ROUNDS)
    return median(seconds["kernel"]) / median(seconds["formula"])


if __name__ == "__main__":
    command(main)
