"""How many weights a step changes, and what it saves to send only those.

    uv run python benchmarks/delta.py changes [--steps 12]
    uv run python benchmarks/delta.py transfer [--parameters 67e6] [--changed 0.01]

`changes` takes real steps of reinforcement learning on the quickstart task and compares what would be served before and
after each: to the bit, in bf16 and in float32, by kind of tensor. `transfer` sends a model of random weights to another
process over gloo, whole and as a delta by turns: bytes, and seconds with all that belongs to it (comparison, digests on
both sides, patching).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from in_process import Sampler, Targets, Trial, configure, train_on

from trireme.algo.digest import tensor_digest
from trireme.algo.patch import changed
from trireme.base.processes import free_port
from trireme.messages import TensorSpec
from trireme.trainer.parallel.mesh import World, open_world
from trireme.trainer.publish.delta import SentWeights, TransferSize
from trireme.trainer.publish.served_weights import served_tensors
from trireme.trainer.step import Stepper, base_state
from trireme.transport.weights.backends import Sender, open_receiver, open_sender
from trireme.transport.weights.buckets import spec_of

RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
DTYPES = (torch.bfloat16, torch.float32)
KINDS = {"embed_tokens": "embeddings", "self_attn": "attention", "mlp": "MLP", "norm": "norms"}
BUCKET_BYTES = 64 << 20
TIMEOUT_S = 120
ROUNDS = 5

Shares = dict[tuple[torch.dtype, str], list[float]]


# changes


def print_changes(steps: int) -> None:
    kinds = ["all", *KINDS.values()]
    found = {rate: changes(rate, steps) for rate in RATES}
    for dtype in DTYPES:
        print(f"\n| served as {str(dtype).removeprefix('torch.')}, learning rate | {' | '.join(kinds)} |")
        print("|---|" + "---|" * len(kinds))
        for rate, shares in found.items():
            cells = [f"{100 * median(shares[dtype, kind]):.2f} %" for kind in kinds]
            print(f"| {rate:g} | {' | '.join(cells)} |")


def changes(rate: float, steps: int) -> Shares:
    """Per step, the share of values whose bits are others after it."""
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


# transfer


def print_transfers(num_parameters: int, share: float) -> None:
    model = random_model(num_parameters)
    specs = [spec_of(name, tensor) for name, tensor in model.items()]
    ports = {delta: free_port() for delta in (False, True)}
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    engine = context.Process(target=_receive, args=[specs, ports, results], daemon=True)
    engine.start()
    with open_world("cpu", threads=1, timeout_s=600) as world:
        trainers = {delta: Trainer(world, specs, port, delta=delta) for delta, port in ports.items()}
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(ROUNDS + 1):
            for delta, trainer in trainers.items():
                began = time.perf_counter()
                trainer.publish(model)
                assert results.get(timeout=TIMEOUT_S) == trainer.digests
                if number:  # the first of both is whole
                    seconds[delta].append(time.perf_counter() - began)
            turn_over(model, share, seed=number)
    engine.join(TIMEOUT_S)
    total = sum(tensor.numel() for tensor in model.values())
    print(f"{total / 1e6:.0f} million parameters in bf16, {100 * share:g} % changed; medians of {ROUNDS}, by turns\n")
    print("| | bytes sent | s, all in all |\n|---|---|---|")
    for delta, trainer in trainers.items():
        name = "delta" if delta else "whole"
        print(f"| {name} | {trainer.sent_bytes / 1e6:.1f} MB | {median(seconds[delta]):.2f} |")


def random_model(num_parameters: int) -> dict[str, torch.Tensor]:
    """Layers of 4 million and an embedding of an eighth of all, as a trainer holds them: in float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (num_parameters // 8 // 1024, 1024)}
    shapes |= {f"layers.{layer}": (4096, 1024) for layer in range(num_parameters * 7 // 8 // (4096 * 1024))}
    return {name: torch.randn(shape, generator=generator) / 32 for name, shape in shapes.items()}


def turn_over(model: dict[str, torch.Tensor], share: float, seed: int) -> None:
    """The signs of that share of values."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.values():
        places = torch.randperm(tensor.numel(), generator=generator)[: int(share * tensor.numel())]
        tensor.view(-1)[places] *= -1


class Trainer:
    """What a publisher does between the engines' "go" and "sent"."""

    def __init__(self, world: World, specs: list[TensorSpec], port: int, *, delta: bool) -> None:
        options = {"host": "127.0.0.1", "port": port, "bucket_bytes": BUCKET_BYTES, "timeout_s": TIMEOUT_S}
        self._sender: Sender = open_sender("gloo", folder=Path("unused"), delta=delta, **options)
        self._sent_weights = SentWeights(world) if delta else None
        self._specs = [TensorSpec(name=spec.name, dtype="bfloat16", shape=spec.shape) for spec in specs]
        self._is_first = True
        self.digests: dict[str, str] = {}
        self.sent_bytes = 0.0

    def publish(self, model: dict[str, torch.Tensor]) -> None:
        self._sender.join("epoch", 2)
        size, tensors = TransferSize(), self._digested(model)
        if self._sent_weights is None:
            self._sender.send(self._specs, size.counted(tensor for _, tensor in tensors))
        else:
            self._sender.send(self._specs, size.counted(self._sent_weights.patches(tensors, whole=self._is_first)))
        self._is_first = False
        self.sent_bytes = size.metrics(1)["weights/sent_bytes"]

    def _digested(self, model: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model.items():
            served = tensor.bfloat16()
            self.digests[name] = tensor_digest(served)
            yield name, served


def _receive(specs: list[TensorSpec], ports: dict[bool, int], results: Any) -> None:
    torch.set_num_threads(1)
    served = [TensorSpec(name=spec.name, dtype="bfloat16", shape=spec.shape) for spec in specs]
    options = {"host": "127.0.0.1", "bucket_bytes": BUCKET_BYTES, "timeout_s": TIMEOUT_S}
    receivers = [open_receiver("gloo", port=port, device=torch.device("cpu"), **options) for port in ports.values()]
    for number in range(ROUNDS + 1):
        for receiver in receivers:
            if number == 0:
                receiver.join("epoch", 1, 2)
            results.put({name: tensor_digest(tensor) for name, tensor in receiver.tensors(served, {})})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["changes", "transfer"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--parameters", type=float, default=67e6)
    parser.add_argument("--changed", type=float, default=0.01)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "changes":
        print_changes(asked.steps)
    else:
        print_transfers(int(asked.parameters), asked.changed)


if __name__ == "__main__":
    main()
