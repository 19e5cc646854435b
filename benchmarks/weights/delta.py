"""How many weights a step changes: what `weight_broadcast.delta` can save.

    uv run python -m benchmarks.weights.delta [--steps 12]

Takes real steps of reinforcement learning on the quickstart task and compares what would be served before and after
each: to the bit, in bf16 and in float32, by kind of tensor. `transfer.py --changed` measures how long they take.
"""

from __future__ import annotations

import os
from collections import defaultdict
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.learning.in_process import Sampler, Targets, Trial, configure, train_on
from benchmarks.measuring import command, print_table
from trireme.algo.patch import changed
from trireme.trainer.parallel.mesh import open_world
from trireme.trainer.publish.served_weights import served_tensors
from trireme.trainer.step import Stepper, base_state

RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
DTYPES = (torch.bfloat16, torch.float32)
KINDS = {"embed_tokens": "embeddings", "self_attn": "attention", "mlp": "MLP", "norm": "norms"}

Shares = dict[tuple[torch.dtype, str], list[float]]


def main(steps: int = 12) -> None:
    torch.set_num_threads(1)
    kinds = ["all", *KINDS.values()]
    found = {rate: changes(rate, steps) for rate in RATES}
    for dtype in DTYPES:
        print()
        rows = (
            [f"{rate:g}", *(f"{100 * median(shares[dtype, kind]):.2f} %" for kind in kinds)]
            for rate, shares in found.items()
        )
        print_table([f"served as {str(dtype).removeprefix('torch.')}, learning rate", *kinds], rows)


def changes(rate: float, steps: int) -> Shares:
    """Return the shares of values whose bits differ after a step, of each step."""
    config = configure(Trial("delta", ("--trainer.optim.lr", str(rate)), max_steps=steps))
    shares: Shares = defaultdict(list)
    torch.manual_seed(0)
    with open_world("cpu", threads=1, timeout_s=600) as world:
        state = base_state(config, world)
        stepper, sampler, targets = Stepper(config, state, world), Sampler(config, lag=0), Targets(config)
        before = _served(state.model)
        for step in range(steps):
            sampler.take_weights(state.version, served_tensors(state.model, torch.float32))
            rollouts = sampler.rollouts(step)
            targets.assign(rollouts)
            train_on(stepper, config, step, rollouts)
            after = _served(state.model)
            for dtype in DTYPES:
                for kind, share in _shares(before[dtype], after[dtype]).items():
                    shares[dtype, kind].append(share)
            before = after
    return shares


def _served(model: Any) -> dict[torch.dtype, dict[str, torch.Tensor]]:
    return {dtype: {name: tensor.clone() for name, tensor in served_tensors(model, dtype)} for dtype in DTYPES}


def _shares(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, float]:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, tensor in after.items():
        num_changed = int(changed(tensor, before[name]).count_nonzero())
        for kind in ("all", next(kind for word, kind in KINDS.items() if word in name)):
            counts[kind][0] += num_changed
            counts[kind][1] += tensor.numel()
    return {kind: num_changed / total for kind, (num_changed, total) in counts.items()}


if __name__ == "__main__":
    command(main)
