"""Weight groups over NCCL, as far as a CPU can tell: a process group of Python takes the place of torch's."""

import os
import re
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from trireme.base.processes import free_port
from trireme.messages import InitInfo
from trireme.transport.weights import collective
from trireme.transport.weights.collective import CollectiveReceiver, CollectiveSender, WeightGroup

DEADLINE_S = 60.0
HOST = "127.0.0.1"


class Broadcast:
    def __init__(self, *, ends: bool = True, error: str = "") -> None:
        self.is_completed = lambda: ends
        self._error = error

    def wait(self) -> None:
        if self._error:
            raise RuntimeError(self._error)


class NcclGroup:
    """A `ProcessGroupNCCL` that records the environment in which it was made and each broadcast began."""

    def __init__(self) -> None:
        self.environments = [dict(os.environ)]
        self.may_connect, self.may_abort, self.is_aborted = threading.Event(), threading.Event(), threading.Event()
        self.may_connect.set()
        self.may_abort.set()

    def broadcast(self, *_: Any) -> Broadcast:
        self.environments.append(dict(os.environ))
        self.may_connect.wait(DEADLINE_S)
        return Broadcast()

    def abort(self) -> None:
        self.may_abort.wait(DEADLINE_S)
        self.is_aborted.set()


@pytest.fixture
def groups(monkeypatch):
    """The process groups that are made. Tensors on the GPU have no data."""
    made: list[NcclGroup] = []
    monkeypatch.setattr(collective, "_process_group", lambda *_: made.append(NcclGroup()) or made[-1])
    monkeypatch.setattr(collective, "CHECK_WANTED_S", 0.01)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode():
        yield made


def _open(*, timeout_s: float = DEADLINE_S, is_wanted: Callable[[], bool] = lambda: True) -> WeightGroup:
    store = torch.distributed.HashStore()
    options: dict[str, Any] = {"epoch": "a/1", "rank": 0, "world_size": 2}
    return WeightGroup("nccl", store, timeout_s=timeout_s, is_wanted=is_wanted, **options)


def test_engines_connect_under_the_trainers_nccl_settings(groups, monkeypatch):
    """Ranks with different settings hang. vLLM pins some in engines; the user may set any at either end."""
    source = Path(find_spec("vllm").submodule_search_locations[0]) / "model_executor/determinism/batch_invariant.py"
    pinned = re.findall(r'"(NCCL_\w+)": ', source.read_text())
    assert len(pinned) > 5
    monkeypatch.setenv("NCCL_PROTO", "LL128")
    port = free_port()
    with closing(CollectiveSender("nccl", HOST, port, bucket_bytes=1, timeout_s=DEADLINE_S)) as sender:
        sender.join("a/1", 1)
        for name in pinned:
            monkeypatch.setenv(name, "1")
        monkeypatch.setenv("NCCL_DEBUG", "WARN")
        before = dict(os.environ)
        info = InitInfo("nccl", HOST, port, "a/1", rank_offset=1, world_size=2, bucket_bytes=1, timeout_s=DEADLINE_S)
        with closing(CollectiveReceiver(info)) as receiver:
            receiver.join("a/1", 1, 2)
            assert os.environ == before
    trainer, engine = (group.environments[1] for group in groups)
    assert {name: engine.get(name) for name in pinned} == {name: trainer.get(name) for name in pinned}
    assert (engine["NCCL_PROTO"], engine["NCCL_DEBUG"]) == ("LL128", "WARN")


def test_torch_watches_no_weight_group_but_all_groups_of_others(groups, monkeypatch):
    """Its watchdog ends the process when a peer of a group dies. Without `BLOCKING_WAIT` there is one."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    _open().close()
    assert groups[0].environments[0]["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"


@pytest.mark.parametrize(
    ("broadcast", "is_wanted", "timeout_s", "error"),
    [
        (Broadcast(ends=False), True, 0.2, r"took no part in a broadcast within 0\.2 s"),
        (Broadcast(ends=False), False, DEADLINE_S, "abandoned"),
        (Broadcast(error="remote process exited"), True, DEADLINE_S, "remote process exited"),
    ],
    ids=["a peer is silent", "a peer is known to be dead", "NCCL notices"],
)
def test_a_broadcast_without_its_peers_is_an_error(groups, broadcast, is_wanted, timeout_s, error):
    group = _open(timeout_s=timeout_s)
    groups[0].broadcast = lambda *_: broadcast
    group.is_wanted = lambda: is_wanted
    with closing(group), pytest.raises(RuntimeError, match=error):
        group.broadcast(torch.zeros(1))
    assert groups[0].is_aborted.is_set()


@pytest.mark.parametrize(
    ("is_wanted", "timeout_s", "error"), [(True, 0.2, "did not connect the 2 ranks"), (False, DEADLINE_S, "abandoned")]
)
def test_a_peer_that_dies_while_nccl_connects_is_an_error(groups, monkeypatch, is_wanted, timeout_s, error):
    made = NcclGroup()
    made.may_connect.clear()
    monkeypatch.setattr(collective, "_process_group", lambda *_: made)
    with pytest.raises(RuntimeError, match=error):
        _open(timeout_s=timeout_s, is_wanted=lambda: is_wanted)
    assert not made.is_aborted.is_set()  # NCCL cannot abort what it is still making
    made.may_connect.set()
    assert made.is_aborted.wait(DEADLINE_S)


def test_a_group_closes_even_if_nccl_hangs_in_aborting_it(groups):
    group = _open(timeout_s=0.2)
    groups[0].may_abort.clear()
    group.close()
    assert not groups[0].is_aborted.is_set()
    groups[0].may_abort.set()


def test_a_gloo_broadcast_that_ends_just_after_a_timed_wait_counts(monkeypatch):
    class Work:
        is_completed = staticmethod(lambda: True)

        def wait(self, timeout: timedelta | None = None) -> None:
            if timeout is not None:
                raise RuntimeError("Operation timed out!")

    class GlooGroup:
        broadcast = staticmethod(lambda *_: Work())

    monkeypatch.setattr(collective, "_process_group", lambda *_: GlooGroup())
    group = WeightGroup("gloo", dist.HashStore(), epoch="1", rank=0, world_size=2, timeout_s=1.0)
    group.broadcast(torch.zeros(1))
