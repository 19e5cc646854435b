"""What a weight transfer costs beyond moving its bytes.

    uv run python benchmarks/transfer.py [--parameters 100e6 500e6] [--rounds 5]

By turns in one run, between two processes on this machine, the same bytes: gloo's own broadcast of buckets, and a
transfer as a run does it: float32 masters to bf16, digests on both sides, buckets packed and unpacked, everyone ready
before anything is sent. What an engine does with the tensors is not in it. With `--json`, for machines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from trireme.algo.digest import tensor_digest
from trireme.base.processes import free_port
from trireme.messages import TensorSpec
from trireme.transport.weights.backends import open_receiver, open_sender
from trireme.transport.weights.collective import WeightGroup, open_store

BUCKET_BYTES = 64 << 20
TIMEOUT_S = 300
HOST = "127.0.0.1"
DTYPE = torch.bfloat16


def specs_of(num_parameters: int) -> list[TensorSpec]:
    """Layers of 4 million and an embedding of an eighth of all."""
    shapes = {"embed": [num_parameters // 8 // 1024, 1024]}
    shapes |= {f"layers.{layer}": [4096, 1024] for layer in range(num_parameters * 7 // 8 // (4096 * 1024))}
    return [TensorSpec(name=name, dtype="bfloat16", shape=shape) for name, shape in shapes.items()]


def pieces(num_bytes: int) -> Iterator[torch.Tensor]:
    """As many bytes in buckets, whose memory is there already."""
    flat = torch.zeros(BUCKET_BYTES, dtype=torch.uint8)
    for start in range(0, num_bytes, BUCKET_BYTES):
        yield flat[: min(BUCKET_BYTES, num_bytes - start)]


def raw_group(port: int, rank: int) -> WeightGroup:
    store = open_store(HOST, port, is_sender=rank == 0, timeout_s=TIMEOUT_S)
    return WeightGroup("gloo", store, epoch="raw", rank=rank, world_size=2, timeout_s=TIMEOUT_S)


def broadcast(group: WeightGroup, num_bytes: int) -> None:
    for piece in pieces(num_bytes):
        group.broadcast(piece)


class Trainer:
    """The sending end."""

    def __init__(self, specs: list[TensorSpec], ports: dict[str, int]) -> None:
        self._specs = specs
        self._masters = {spec.name: torch.randn(spec.shape) for spec in specs}
        options: dict[str, Any] = {"host": HOST, "bucket_bytes": BUCKET_BYTES, "timeout_s": TIMEOUT_S}
        self._sender = open_sender("gloo", folder=Path("unused"), port=ports["ours"], delta=False, **options)
        self._raw = raw_group(ports["raw"], 0)
        self.num_bytes = sum(2 * master.numel() for master in self._masters.values())
        self.digests: dict[str, str] = {}

    def ours(self) -> None:
        self._sender.join("epoch", 2)
        self._sender.send(self._specs, self._served())

    def raw(self) -> None:
        broadcast(self._raw, self.num_bytes)

    def _served(self) -> Iterator[torch.Tensor]:
        for name, master in self._masters.items():
            served = master.to(DTYPE)
            self.digests[name] = tensor_digest(served)
            yield served


def serve(specs: list[TensorSpec], ports: dict[str, int], orders: Any, results: Any) -> None:
    """The receiving end, in a process of its own."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"host": HOST, "bucket_bytes": BUCKET_BYTES, "timeout_s": TIMEOUT_S}
    receiver = open_receiver("gloo", port=ports["ours"], device=torch.device("cpu"), **options)
    raw = raw_group(ports["raw"], 1)
    num_bytes = sum(2 * torch.Size(spec.shape).numel() for spec in specs)
    has_joined = False
    while (order := orders.get(timeout=TIMEOUT_S)) != "end":
        if order == "raw":
            broadcast(raw, num_bytes)
            results.put(None)
            continue
        if not has_joined:
            receiver.join("epoch", 1, 2)
            has_joined = True
        results.put({name: tensor_digest(tensor) for name, tensor in receiver.tensors(specs, {})})


def measure(num_parameters: int, rounds: int) -> dict[str, float]:
    """Medians in seconds, without a first round of each."""
    specs, ports = specs_of(num_parameters), {"raw": free_port(), "ours": free_port()}
    context = multiprocessing.get_context("spawn")
    orders, results = context.Queue(), context.Queue()
    engine = context.Process(target=serve, args=[specs, ports, orders, results], daemon=True)
    engine.start()
    trainer = Trainer(specs, ports)
    seconds: dict[str, list[float]] = {"raw": [], "ours": []}
    for number in range(rounds + 1):
        for way in ("raw", "ours"):
            orders.put(way)
            began = time.perf_counter()
            getattr(trainer, way)()
            answer = results.get(timeout=TIMEOUT_S)
            if number:
                seconds[way].append(time.perf_counter() - began)
            assert answer is None or answer == trainer.digests, "other bytes arrived than were sent"
    orders.put("end")
    engine.join(TIMEOUT_S)
    ratios = [ours / raw for ours, raw in zip(seconds["ours"], seconds["raw"], strict=True)]
    return {
        "parameters": num_parameters,
        "bytes": trainer.num_bytes,
        "raw_s": median(seconds["raw"]),
        "ours_s": median(seconds["ours"]),
        "ratio": median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, nargs="+", default=[100e6, 500e6])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(int(number), asked.rounds) for number in asked.parameters]
    if asked.json:
        print(json.dumps(found))
        return
    print("| parameters (bf16) | bytes | gloo's broadcast | transfer | ratio: median (range) |\n|---|---|---|---|---|")
    for row in found:
        print(
            f"| {row['parameters'] / 1e6:.0f} million | {row['bytes'] / 1e6:.0f} MB | {row['raw_s']:.2f} s | "
            f"{row['ours_s']:.2f} s | {row['ratio']:.2f} ({row['lowest']:.2f}-{row['highest']:.2f}) |"
        )


if __name__ == "__main__":
    main()
