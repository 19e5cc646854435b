"""What a weight transfer costs beyond moving its bytes.

    uv run python -m benchmarks.weights.transfer [--parameters 100e6 500e6] [--rounds 5]
    uv run python -m benchmarks.weights.transfer --parameters 67e6 --changed 0.01     also a delta of as many values

By turns in one run, between two processes on this machine: gloo's own broadcast of buckets of the same bytes; a
transfer as a run does it (float32 masters to bf16, digests on both sides, buckets packed and unpacked, everyone ready
before anything is sent); and, with `--changed`, a transfer of the changed values alone (comparison and patching
included). What an engine does with the tensors is not in it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.measuring import command, print_table, spread, wall_s
from trireme.algo.digest import tensor_digest
from trireme.base.processes import free_port
from trireme.messages import InitInfo, TensorSpec
from trireme.trainer.parallel.mesh import World, open_world
from trireme.trainer.publish.served_weights import SentWeights, TransferSize
from trireme.transport.weights.backends import open_receiver, open_sender
from trireme.transport.weights.collective import WeightGroup, open_store

TIMEOUT_S = 300
HOST = "127.0.0.1"
OPTIONS: dict[str, Any] = {"host": HOST, "bucket_bytes": 64 << 20, "timeout_s": TIMEOUT_S}


def specs_of(num_parameters: int) -> list[TensorSpec]:
    """Return the specs of layers of 4 million parameters, and of an embedding of an eighth of all."""
    shapes = {"embed": [num_parameters // 8 // 1024, 1024]}
    shapes |= {f"layers.{layer}": [4096, 1024] for layer in range(num_parameters * 7 // 8 // (4096 * 1024))}
    return [TensorSpec(name=name, dtype="bfloat16", shape=shape) for name, shape in shapes.items()]


class Raw:
    """One end of gloo's own broadcast of the same number of bytes, from buckets whose memory is there already."""

    def __init__(self, specs: list[TensorSpec], port: int, rank: int) -> None:
        store = open_store(HOST, port, is_sender=rank == 0, timeout_s=TIMEOUT_S)
        self._group = WeightGroup("gloo", store, epoch="raw", rank=rank, world_size=2, timeout_s=TIMEOUT_S)
        self.num_bytes = sum(2 * torch.Size(spec.shape).numel() for spec in specs)

    def broadcast(self) -> None:
        flat = torch.zeros(OPTIONS["bucket_bytes"], dtype=torch.uint8)
        for start in range(0, self.num_bytes, len(flat)):
            self._group.broadcast(flat[: min(len(flat), self.num_bytes - start)])


class Trainer:
    """What a publisher does between the engines' "go" and "sent": whole tensors, or with `world` a delta of them."""

    def __init__(self, masters: dict[str, torch.Tensor], specs: list[TensorSpec], port: int, world: World | None):
        self._sender = open_sender("gloo", folder=Path("unused"), port=port, delta=world is not None, **OPTIONS)
        self._sent_weights = SentWeights(world) if world else None
        self._masters, self._specs = masters, specs
        self.digests: dict[str, str] = {}
        self.num_bytes = 0.0

    def publish(self) -> None:
        self._sender.join("epoch", 2)
        size = TransferSize()
        if self._sent_weights is None:
            parts: Iterator[Any] = (tensor for _, tensor in self._served())
        else:
            parts = self._sent_weights.patches(self._served(), whole=not self.num_bytes)
        self._sender.send(self._specs, size.counted(parts))
        self.num_bytes = size.metrics(1)["weights/sent_bytes"]

    def _served(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, master in self._masters.items():
            served = master.bfloat16()
            self.digests[name] = tensor_digest(served)
            yield name, served


def serve(specs: list[TensorSpec], ports: dict[str, int], rounds: int, results: Any) -> None:
    """Run the receiving end, in a process of its own: each way in each round."""
    torch.set_num_threads(1)
    cpu, raw = torch.device("cpu"), Raw(specs, ports["raw"], 1)
    ours = [port for way, port in ports.items() if way != "raw"]
    infos = [InitInfo("gloo", port=port, epoch="epoch", rank_offset=1, world_size=2, **OPTIONS) for port in ours]
    receivers = [open_receiver(info, cpu) for info in infos]
    for number in range(rounds + 1):
        raw.broadcast()
        results.put(None)
        for receiver in receivers:
            if number == 0:
                receiver.join("epoch", 1, 2)
            results.put({name: tensor_digest(tensor) for name, tensor in receiver.tensors(specs, {})})


def main(
    parameters: tuple[float, ...] = (100e6, 500e6),
    rounds: int = 5,
    changed: Annotated[float | None, "share of values that change from round to round"] = None,
) -> None:
    torch.set_num_threads(1)
    columns = ("parameters (bf16)", "bytes", "gloo's broadcast", "transfer", "ratio", "delta, bytes", "delta")
    print_table(columns, (row_of(int(number), rounds, changed) for number in parameters))


def row_of(num_parameters: int, rounds: int, changed: float | None) -> list[str]:
    found = measure(num_parameters, rounds, changed)
    delta = [f"{found['delta_bytes'] / 1e6:.1f} MB", f"{found['delta_s']:.2f} s"] if changed else ["-", "-"]
    size = [f"{num_parameters / 1e6:.0f} million", f"{found['whole_bytes'] / 1e6:.0f} MB"]
    return [*size, f"{found['raw_s']:.2f} s", f"{found['whole_s']:.2f} s", spread(found["ratios"]), *delta]


def measure(num_parameters: int, rounds: int, changed: float | None = None) -> dict[str, Any]:
    """Return medians in seconds, bytes and ratios by round; a round changes a share `changed` of all values."""
    specs = specs_of(num_parameters)
    ways = ["raw", "whole", *(["delta"] if changed else [])]
    ports = {way: free_port() for way in ways}
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    engine = context.Process(target=serve, args=[specs, ports, rounds, results], daemon=True)
    engine.start()
    masters = {spec.name: torch.randn(spec.shape) for spec in specs}
    with open_world("cpu", threads=1, timeout_s=600) as world:
        raw = Raw(specs, ports["raw"], 0)
        worlds = {way: world if way == "delta" else None for way in ways[1:]}
        trainers = {way: Trainer(masters, specs, ports[way], worlds[way]) for way in worlds}

        def send(way: str) -> None:
            if way == "raw":
                raw.broadcast()
            else:
                trainers[way].publish()
            received = results.get(timeout=TIMEOUT_S)
            assert received is None or received == trainers[way].digests, "other bytes arrived than were sent"

        rows = []
        for _ in range(rounds + 1):
            rows.append({way: wall_s(partial(send, way)) for way in ways})
            for master in masters.values() if changed else ():
                master.view(-1)[torch.randperm(master.numel())[: int(changed * master.numel())]] *= -1
        seconds = {way: [row[way] for row in rows[1:]] for way in ways}  # the first round opens the connections
    engine.join(TIMEOUT_S)
    ratios = [whole / raw for whole, raw in zip(seconds["whole"], seconds["raw"], strict=True)]
    num_bytes = {f"{way}_bytes": trainer.num_bytes for way, trainer in trainers.items()}
    return {f"{way}_s": median(each) for way, each in seconds.items()} | num_bytes | {"ratios": ratios}


if __name__ == "__main__":
    command(main)
