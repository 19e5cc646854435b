"""Attention of short samples on a CPU, forward and backward: torch's own kernel, and the formula written out.

uv run python benchmarks/attention.py [--tokens 4096] [--threads 1 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from trireme.trainer.model.cpu_attention import attend_on_cpu

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

HEADS = [(6, 64), (16, 128)]
LENGTHS = [16, 32, 64, 128, 192, 256, 384]
TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of all samples of a row")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    table = Table("dtype", "threads", "heads x size", *(f"{length} tokens" for length in LENGTHS))
    table.title = "seconds of torch's kernel / of the formula: above 1, the formula is quicker"
    for dtype in (torch.bfloat16, torch.float32):
        for threads in args.threads:
            torch.set_num_threads(threads)
            for heads, size in HEADS:
                ratios = [ratio((max(1, args.tokens // length), heads, length, size), dtype) for length in LENGTHS]
                name = str(dtype).removeprefix("torch.")
                table.add_row(name, str(threads), f"{heads} x {size}", *(f"{each:.2f}" for each in ratios))
    Console(width=120).print(table)


def ratio(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Medians of turns that alternate."""
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(shape, dtype=dtype)
    sides: list[Attention] = [_kernel, _formula]
    seconds: list[list[float]] = [[], []]
    for turn in range(TURNS + 1):
        for side, attention in enumerate(sides):
            began = time.perf_counter()
            attention(*inputs).backward(upstream)
            if turn:  # the first warms up
                seconds[side].append(time.perf_counter() - began)
    kernel, formula = map(statistics.median, seconds)
    return kernel / formula


def _kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def _formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return attend_on_cpu(query, key, value, scaling=query.shape[-1] ** -0.5).transpose(1, 2)


if __name__ == "__main__":
    main()
