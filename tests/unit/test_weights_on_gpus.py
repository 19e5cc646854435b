"""Transfers that only GPUs make, as far as a CPU can tell: who is waited for, and what is held for how long."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from answering import answering
from tiny import open_state
from trireme.algo.memory import Training
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig, WeightBroadcast
from trireme.launch.sizes import read_sizes, training_of
from trireme.messages import Again, Go, Live, PolicyReady, Reply, Request
from trireme.trainer import publish
from trireme.trainer.mesh import World
from trireme.trainer.publish import Publisher
from trireme.transport.control import ControlClient
from trireme.transport.weights import collective, ipc
from trireme.transport.weights.collective import WeightGroup
from trireme.transport.weights.ipc import IpcSender


class Stream:
    """One that has done its work after so many looks."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_slow_broadcast_is_awaited_and_a_peer_that_is_gone_is_an_error_that_leaves_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the transfer begins again with the peers that are there: the process does not end."""
    group: Any = WeightGroup.__new__(WeightGroup)  # of NCCL, without a GPU
    aborted: list[bool] = []
    group._kind, group._timeout_s, group._is_aborted = "nccl", 0.2, False
    group._group = SimpleNamespace(abort=lambda: aborted.append(True))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Stream(looks=3))
    group._await(SimpleNamespace(wait=lambda: None), torch.zeros(1))
    assert aborted == []
    monkeypatch.setattr(torch.cuda, "Event", lambda: Stream(looks=float("inf")))
    with pytest.raises(RuntimeError, match=r"took no part in a broadcast for 0\.2 s"):
        group._await(SimpleNamespace(wait=lambda: None), torch.zeros(1))
    assert aborted == [True]
    group.close()
    assert "_group" not in vars(group)


def test_nccls_own_watchdog_which_ends_the_process_comes_after_us(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {}
    monkeypatch.setattr(collective, "_process_group", lambda kind, *_: limits.setdefault(kind, _[-1].total_seconds()))
    monkeypatch.setattr(collective, "Flats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.distributed, "PrefixStore", lambda name, store: store)
    for kind in ("gloo", "nccl"):
        WeightGroup(kind, None, epoch="1", rank=0, world_size=2, timeout_s=10)  # type: ignore[arg-type]
    assert limits == {"gloo": 10, "nccl": 30}


@pytest.fixture(scope="module")
def model(tiny_model: Path, world: World) -> PreTrainedModel:
    return open_state(tiny_model, world).model


@pytest.mark.parametrize("replies", [[Live(version=3)], [Again(reason="an engine died"), Live(version=3)]])
def test_memory_that_engines_read_is_let_go_as_soon_as_they_have_confirmed(
    tmp_path: Path, model: PreTrainedModel, world: World, monkeypatch: pytest.MonkeyPatch, replies: list[Reply]
) -> None:
    held: list[weakref.ref] = []
    alive: list[int] = []
    answers = iter(replies)

    def note(tensor: torch.Tensor) -> list[Any]:
        held.append(weakref.ref(tensor))
        return []

    def answer(request: Request) -> Reply:
        if isinstance(request, PolicyReady):
            return Go(version=3, epoch=str(request.attempt), world_size=2)
        alive.append(sum(tensor() is not None for tensor in held))
        return next(answers)

    monkeypatch.setattr(ipc, "_to_handle", note)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(publish, "open_sender", lambda *_, **__: IpcSender())
    config = RunConfig(output_dir=tmp_path, device="cpu", weight_broadcast=WeightBroadcast(type="ipc"))
    with answering(answer) as address:
        control = ControlClient(address, Waits("trainer"))
        publisher = Publisher(config, model, world, control)
        publisher.publish(3)
        control.close()
    num_tensors = len(held) // len(replies)
    assert alive == [num_tensors] * len(replies)  # while they are asked to confirm, one copy, never two
    assert not any(tensor() is not None for tensor in held)


def test_a_plan_counts_the_copy_that_engines_on_the_same_gpus_read(tmp_path: Path) -> None:
    def planned(kind: str) -> Training:
        config = RunConfig(output_dir=tmp_path, device="cuda", weight_broadcast=WeightBroadcast(type=kind))
        return training_of(config, read_sizes("Qwen/Qwen3-0.6B").architecture, rows=2)

    shared, apart = planned("ipc"), planned("nccl")
    copied = 2 * shared.model.num_parameters
    buckets = 2 * (64 << 20)
    transfers = [training.memory.moments["publish"]["transfers"] for training in (shared, apart)]
    assert transfers[0] - transfers[1] == copied - buckets
