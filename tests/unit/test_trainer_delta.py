"""A trainer that sends changes: few bytes where little changed, everything to whoever may hold something else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from answering import DEADLINE_S, answering
from tiny import open_state, save_tiny_model
from trireme.algo.digest import tensor_digest
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.config.inference import InferenceConfig, InferenceModel
from trireme.config.run import Ports, RunConfig, WeightBroadcast
from trireme.messages import Again, Go, Live, PolicyReady, PolicySent, Refusal, Reply, Request
from trireme.trainer.mesh import World
from trireme.trainer.publish import Publisher
from trireme.trainer.served import served_tensors
from trireme.transport.control import ControlClient
from trireme.transport.weights.kinds import Receiver, open_receiver

Kind = Literal["gloo", "filesystem"]
KINDS = ["gloo", "filesystem"]
MIB = 1 << 20


class OneEngine:
    """An orchestrator with an engine that stays, and its epochs as `orchestrator.update` counts them."""

    def __init__(self, config: RunConfig) -> None:
        self.received: dict[str, str] = {}
        self.attempts: list[PolicyReady] = []
        self.refuses_next = False  # the next attempt comes to nothing after all was sent
        self.is_replaced = False  # another engine has come in its place
        self._config = config
        self._num_epochs = 0
        self._went_well = False
        self._receiver: Receiver | None = None
        self._thread: threading.Thread | None = None

    def __call__(self, request: Request) -> Reply:
        match request:
            case PolicyReady():
                return self._begin(request)
            case PolicySent():
                return self._end(request)
        return Refusal(error=f"a publisher does not ask for {request}")

    def _begin(self, request: PolicyReady) -> Go:
        if not self.attempts or self.attempts[-1].attempt != request.attempt:  # asked again, it is the same attempt
            self.attempts.append(request)
            goes_on, self.is_replaced = self._went_well and not self.is_replaced, False
            if not goes_on:
                self._num_epochs += 1
            self._went_well = False
            if request.kind == "gloo":
                self._thread = threading.Thread(target=self._receive, args=[request, {}, not goes_on], daemon=True)
                self._thread.start()
            elif not goes_on:
                self._join(request)
        return Go(version=request.version, epoch=str(self._num_epochs), world_size=2)

    def _end(self, request: PolicySent) -> Reply:
        if self._thread is not None:
            self._thread.join(DEADLINE_S)
        else:
            self._receive(self.attempts[-1], request.payload, False)
        assert self.received == request.digests
        if self.refuses_next:
            self.refuses_next = False
            return Again(reason="the engine died")
        self._went_well = True
        return Live(version=request.version)

    def _receive(self, ready: PolicyReady, payload: dict[str, Any], joins: bool) -> None:
        if joins:
            self._join(ready)
        assert self._receiver is not None
        self.received = {n: tensor_digest(tensor) for n, tensor in self._receiver.tensors(ready.specs, payload)}

    def _join(self, ready: PolicyReady) -> None:
        self.close()
        self._receiver = open_receiver(
            ready.kind,
            host=ready.host,
            port=ready.port,
            bucket_bytes=self._config.weight_broadcast.bucket_mib << 20,
            timeout_s=DEADLINE_S,
            device=torch.device("cpu"),
        )
        self._receiver.join(str(self._num_epochs), 1, 2)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


class Stand:
    """A publisher, what it publishes, and who receives it."""

    def __init__(self, publisher: Publisher, model: PreTrainedModel, engine: OneEngine) -> None:
        self.publisher, self.model, self.engine = publisher, model, engine
        self._version = -1

    def publish(self) -> dict[str, float]:
        """The next version; what it took."""
        self._version += 1
        self.publisher.publish(self._version)
        return self.publisher.take_metrics()

    def turn_over(self, count: int) -> None:
        """The signs of that many values of the first tensor."""
        with torch.no_grad():
            weight = next(self.model.parameters())
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.view(-1)[:count].neg_()

    @property
    def served_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in served_tensors(self.model, torch.bfloat16))


@contextmanager
def open_stand(
    folder: Path, model: PreTrainedModel, world: World, kind: Kind, *, delta: bool = True
) -> Iterator[Stand]:
    config = RunConfig(
        output_dir=folder,
        device="cpu",
        ports=Ports(weights=free_port()),
        weight_broadcast=WeightBroadcast(type=kind, timeout_s=DEADLINE_S, delta=delta, bucket_mib=1),
        inference=InferenceConfig(model=InferenceModel(dtype="bfloat16")),
    )
    engine = OneEngine(config)
    with answering(engine) as address:
        control = ControlClient(address, Waits("trainer"))
        publisher = Publisher(config, model, world, control)
        try:
            yield Stand(publisher, model, engine)
        finally:
            publisher.close()
            engine.close()
            control.close()


@pytest.fixture
def model(tiny_model: Path, world: World) -> PreTrainedModel:
    return open_state(tiny_model, world).model


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_first_version_only_changes_are_sent(
    tmp_path: Path, model: PreTrainedModel, world: World, kind: Kind
) -> None:
    with open_stand(tmp_path, model, world, kind) as stand:
        first = stand.publish()
        stand.turn_over(100)
        second, third = stand.publish(), stand.publish()
    num_values = stand.served_bytes / 2
    assert first == {"weights/sent_bytes": stand.served_bytes, "weights/changed_frac": 1.0}
    assert second == {"weights/sent_bytes": 100 * (2 + 2), "weights/changed_frac": 100 / num_values}
    assert third == {"weights/sent_bytes": 0.0, "weights/changed_frac": 0.0}


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_came_meanwhile_is_given_everything(
    tmp_path: Path, model: PreTrainedModel, world: World, kind: Kind
) -> None:
    with open_stand(tmp_path, model, world, kind) as stand:
        stand.publish()
        stand.turn_over(100)
        stand.engine.is_replaced = True
        assert stand.publish()["weights/sent_bytes"] == stand.served_bytes
        stand.turn_over(7)
        assert stand.publish()["weights/sent_bytes"] == 7 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_transfer_that_came_to_nothing_everything_is_sent(
    tmp_path: Path, model: PreTrainedModel, world: World, kind: Kind
) -> None:
    """What it changed is in no engine for certain."""
    with open_stand(tmp_path, model, world, kind) as stand:
        stand.publish()
        stand.turn_over(100)
        stand.engine.refuses_next = True
        assert stand.publish()["weights/sent_bytes"] == stand.served_bytes
        assert [ready.version for ready in stand.engine.attempts] == [0, 1, 1]


def test_without_delta_everything_is_sent_every_time(tmp_path: Path, model: PreTrainedModel, world: World) -> None:
    with open_stand(tmp_path, model, world, "gloo", delta=False) as stand:
        for _ in range(2):
            assert stand.publish() == {"weights/sent_bytes": stand.served_bytes}


# memory


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made in this thread ever held together, each storage counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._holders: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            _storage(tensor).data_ptr() for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, given)
        return result

    def _note(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = _storage(tensor)
        place, size = storage.data_ptr(), storage.nbytes()
        if not size or (place in given and place not in self._holders):
            return  # a view of what was there before
        if place not in self._holders:
            self._holders[place] = 0
            self._now += size
            self.peak = max(self.peak, self._now)
        self._holders[place] += 1
        finalize(tensor, self._release, place, size)

    def _release(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        if not self._holders[place]:
            del self._holders[place]
            self._now -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory: pytest.TempPathFactory, world: World) -> PreTrainedModel:
    folder = save_tiny_model(tmp_path_factory.mktemp("larger") / "model", hidden=320, layers=6)
    return open_state(folder, world).model


@pytest.mark.parametrize("delta", [False, True])
def test_a_transfer_takes_the_memory_of_two_buckets_and_one_tensor(
    tmp_path: Path, larger_model: PreTrainedModel, world: World, delta: bool
) -> None:
    """And not of a second model, however large it is. A tensor is there as it is trained and as it is served."""
    largest = max(parameter.numel() for parameter in larger_model.parameters())
    with open_stand(tmp_path, larger_model, world, "gloo", delta=delta) as stand:
        stand.publish()  # what is kept from here on is the copy of `delta`, in host memory
        stand.turn_over(100)
        with LiveBytes() as live:
            stand.publish()
        with LiveBytes() as all_held:
            second_model = list(served_tensors(larger_model, torch.bfloat16))
        assert all_held.peak >= stand.served_bytes > 10 * MIB
        assert second_model
    assert live.peak < 2 * MIB + largest * (4 + 2) + MIB / 2
