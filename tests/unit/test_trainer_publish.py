"""The trainer publishes its weights to an orchestrator with one engine, whole or as a delta."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import finalize

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, PreTrainedModel

from answering import DEADLINE_S, answering
from tiny import open_state, save_tiny_model, weights_of
from trireme.algo.digest import tensor_digest
from trireme.algo.probe import probe_ids
from trireme.base.errors import PeerDied, Refused
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.config.inference import InferenceConfig, InferenceModel
from trireme.config.run import Ports, RunConfig, WeightBroadcast
from trireme.messages import Again, GetNewest, Go, Live, Newest, PolicyReady, PolicySent, Refusal, Reply, Request
from trireme.trainer import publish
from trireme.trainer.mesh import World
from trireme.trainer.publish import PROBE_TOKENS, Publisher
from trireme.trainer.served import served_tensors
from trireme.transport.control import ControlClient
from trireme.transport.weights.kinds import Receiver, open_receiver

KINDS = ["gloo", "filesystem"]
MIB = 1 << 20


class Orchestrator:
    """Lets the trainer send at once to one engine, in epochs as `orchestrator.update` counts them."""

    def __init__(self, config: RunConfig, intercept: Callable[[Request], Reply | None] = lambda _: None) -> None:
        self.asked: list[Request] = []
        self.attempts: list[PolicyReady] = []
        self.received: dict[str, str] = {}
        self.is_deaf = False  # the engine does not join
        self.is_replaced = False  # another engine has come in its place
        self._config = config
        self._intercept = intercept  # answers some requests in place of this orchestrator
        self._num_epochs = 0
        self._went_well = False
        self._receiver: Receiver | None = None
        self._thread: threading.Thread | None = None

    def __call__(self, request: Request) -> Reply:
        self.asked.append(request)
        if (reply := self._intercept(request)) is not None:
            return reply
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
            self._num_epochs += not goes_on
            self._went_well = False
            if request.kind == "gloo" and not self.is_deaf:
                self._thread = threading.Thread(target=self._receive, args=[request, {}, not goes_on], daemon=True)
                self._thread.start()
            elif request.kind != "gloo" and not goes_on:
                self._join(request)
        return Go(version=request.version, epoch=str(self._num_epochs), world_size=2)

    def _end(self, request: PolicySent) -> Reply:
        if self._thread is not None:
            self._thread.join(DEADLINE_S)
        elif not self._went_well:
            self._receive(self.attempts[-1], request.payload, False)
        assert self.received == request.digests
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
    """A publisher, the model that it publishes, and the orchestrator that it asks."""

    def __init__(self, publisher: Publisher, model: PreTrainedModel, orchestrator: Orchestrator) -> None:
        self.publisher, self.model, self.orchestrator = publisher, model, orchestrator
        self._version = -1

    def publish(self) -> dict[str, float]:
        """Publish the next version and return its metrics."""
        self._version += 1
        self.publisher.publish(self._version)
        return self.publisher.take_metrics()

    def negate(self, count: int) -> None:
        """Change the signs of that many values of the first tensor."""
        with torch.no_grad():
            next(self.model.parameters()).to_local().view(-1)[:count].neg_()

    @property
    def served_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in served_tensors(self.model, torch.bfloat16))


@contextmanager
def open_stand(
    folder: Path,
    model: PreTrainedModel,
    world: World,
    kind: str = "filesystem",
    *,
    intercept: Callable[[Request], Reply | None] = lambda _: None,
    dtype: str = "auto",
    delta: bool = False,
    timeout_s: float = DEADLINE_S,
    max_async_level: int = 1,
) -> Iterator[Stand]:
    broadcast = WeightBroadcast(type=kind, timeout_s=timeout_s, delta=delta, bucket_mib=1)  # type: ignore[arg-type]
    config = RunConfig(
        output_dir=folder,
        device="cpu",
        max_async_level=max_async_level,
        ports=Ports(weights=free_port()),
        weight_broadcast=broadcast,
        inference=InferenceConfig(model=InferenceModel(dtype=dtype)),
    )
    orchestrator = Orchestrator(config, intercept)
    with answering(orchestrator) as address:
        control = ControlClient(address, Waits("trainer"))
        publisher = Publisher(config, model, world, control)
        try:
            yield Stand(publisher, model, orchestrator)
        finally:
            publisher.close()
            orchestrator.close()
            control.close()


@pytest.fixture
def model(tiny_model: Path, world: World) -> PreTrainedModel:
    return open_state(tiny_model, world).model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_receive_the_trainers_weights_in_their_dtype(
    tmp_path: Path, model: PreTrainedModel, world: World, kind: str, dtype: str
) -> None:
    with open_stand(tmp_path, model, world, kind, dtype=dtype) as stand:
        stand.publisher.publish(3)
    ready, sent = stand.orchestrator.asked
    assert (ready.version, sent.version) == (3, 3)
    served = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights_of(model).items()}
    expected = {name: tensor_digest(tensor) for name, tensor in served.items()}
    assert stand.orchestrator.received == sent.digests == expected


def test_the_probe_has_the_logprobs_of_the_weights_and_is_computed_before_the_announcement(
    tmp_path: Path, model: PreTrainedModel, world: World, tiny_model: Path
) -> None:
    num_asked_before: list[int] = []
    with open_stand(tmp_path, model, world, "gloo") as stand:
        hook = model.get_input_embeddings().register_forward_hook(
            lambda *_: num_asked_before.append(len(stand.orchestrator.asked))
        )
        stand.publisher.publish(0)
        hook.remove()
    assert set(num_asked_before) == {0}
    probe = stand.orchestrator.asked[-1].probe
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        logprobs = torch.log_softmax(plain(torch.tensor([probe.ids])).logits[0], -1)
    expected = [float(logprobs[t, token]) for t, token in enumerate(probe.ids[1:])]
    assert probe.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("vocabulary", [3, 128, 151_936])
def test_the_probe_is_fixed_and_spread_over_the_vocabulary(vocabulary: int) -> None:
    ids = probe_ids(vocabulary, PROBE_TOKENS)
    assert ids == probe_ids(vocabulary, PROBE_TOKENS)
    assert all(0 <= token < vocabulary for token in ids)
    assert len(set(ids)) == min(vocabulary, len(ids))


# attempts that fail


@pytest.fixture
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "PAUSE_S", 0.01)


@pytest.mark.parametrize("died", [False, True])
@pytest.mark.usefixtures("_short_pauses")
def test_the_trainer_repeats_a_transfer_that_an_engine_does_not_join(
    tmp_path: Path, model: PreTrainedModel, world: World, died: bool
) -> None:
    """After the timeout or, when the orchestrator knows that the engine died, long before."""

    def answer(request: Request) -> Reply | None:
        is_first = isinstance(request, PolicyReady) and request.attempt == 1
        stand.orchestrator.is_deaf = is_first
        is_repeated = is_first and bool(stand.orchestrator.attempts)
        return Again(reason="the engine died before it joined") if died and is_repeated else None

    timeout_s = 10 * DEADLINE_S if died else 1.0
    with open_stand(tmp_path, model, world, "gloo", intercept=answer, timeout_s=timeout_s) as stand:
        stand.publisher.publish(3)
    asked = [(type(request).__name__, request.attempt) for request in stand.orchestrator.asked]
    assert list(dict.fromkeys(asked)) == [("PolicyReady", 1), ("PolicyReady", 2), ("PolicySent", 2)]


@pytest.mark.parametrize("at", [PolicyReady, PolicySent])
@pytest.mark.usefixtures("_short_pauses")
def test_the_trainer_repeats_an_attempt_that_the_orchestrator_gave_up(
    tmp_path: Path, model: PreTrainedModel, world: World, at: type
) -> None:
    def answer(request: Request) -> Reply | None:
        return Again(reason="an engine died") if isinstance(request, at) and request.attempt < 3 else None

    with open_stand(tmp_path, model, world, intercept=answer) as stand:
        stand.publisher.publish(3)
    assert stand.orchestrator.asked[-1].attempt == 3


@pytest.mark.usefixtures("_short_pauses")
def test_the_trainer_gives_up_after_20_failed_attempts(
    tmp_path: Path, model: PreTrainedModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "LONGEST_PAUSE_S", 0.01)
    with open_stand(tmp_path, model, world, intercept=lambda _: Again(reason="an engine died")) as stand:
        with pytest.raises(PeerDied, match="Version 3 was sent 20 times"):
            stand.publisher.publish(3)
    assert [request.attempt for request in stand.orchestrator.asked] == list(range(1, 21))


def test_weights_that_an_engine_refused_are_not_sent_again(
    tmp_path: Path, model: PreTrainedModel, world: World
) -> None:
    def answer(request: Request) -> Reply | None:
        return Refusal(error="model.norm.weight has another digest") if isinstance(request, PolicySent) else None

    with open_stand(tmp_path, model, world, intercept=answer) as stand:
        with pytest.raises(Refused, match=r"model.norm.weight"):
            stand.publisher.publish(3)
    assert [type(request) for request in stand.orchestrator.asked] == [PolicyReady, PolicySent]


# versions


def test_versions_that_engines_confirmed_are_published_only_if_they_differ(
    tmp_path: Path, model: PreTrainedModel, world: World
) -> None:
    same = {name: tensor_digest(tensor) for name, tensor in weights_of(model).items()}
    newest = Newest(version=5, digests=same)

    def answer(request: Request) -> Reply | None:
        return newest if isinstance(request, GetNewest) else None

    with open_stand(tmp_path, model, world, intercept=answer) as stand:
        publisher, orchestrator = stand.publisher, stand.orchestrator
        assert publisher.look_back() == 5
        for version in (3, 4, 5):
            publisher.send_if_new(version)
        assert orchestrator.attempts == []
        newest = Newest(version=5, digests=same | {"model.norm.weight": "another"})
        publisher.look_back()
        for version in (4, 5, 6):
            publisher.send_if_new(version)
            publisher.confirm()
    assert [ready.version for ready in orchestrator.attempts] == [5, 6]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_engines_confirm_while_the_trainer_computes_unless_on_a_cpu_the_next_batch_waits_for_them(
    tmp_path: Path, model: PreTrainedModel, world: World, level: int
) -> None:
    with open_stand(tmp_path, model, world, max_async_level=level) as stand:
        stand.publisher.send(3)
        assert stand.publisher.is_confirming == (level > 1)
        stand.publisher.confirm()
        assert not stand.publisher.is_confirming
    first, *sent = stand.orchestrator.asked
    assert isinstance(first, PolicyReady)
    assert len(sent) == (2 if level > 1 else 1)
    assert sent[0] == sent[-1]  # the same question, so it has the same answer


# deltas


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_first_version_only_changes_are_sent(
    tmp_path: Path, model: PreTrainedModel, world: World, kind: str
) -> None:
    with open_stand(tmp_path, model, world, kind, dtype="bfloat16", delta=True) as stand:
        first = stand.publish()
        stand.negate(100)
        second, third = stand.publish(), stand.publish()
    num_values = stand.served_bytes / 2
    assert first == {"weights/sent_bytes": stand.served_bytes, "weights/changed_frac": 1.0}
    assert second == {"weights/sent_bytes": 100 * (2 + 2), "weights/changed_frac": 100 / num_values}
    assert third == {"weights/sent_bytes": 0.0, "weights/changed_frac": 0.0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("_short_pauses")
def test_everything_is_sent_to_a_new_engine_and_after_a_failed_transfer(
    tmp_path: Path, model: PreTrainedModel, world: World, kind: str
) -> None:
    fails = False

    def answer(request: Request) -> Reply | None:
        nonlocal fails
        if not (fails and isinstance(request, PolicySent)):
            return None
        fails = False
        return Again(reason="the engine died")

    with open_stand(tmp_path, model, world, kind, dtype="bfloat16", delta=True, intercept=answer) as stand:
        stand.publish()
        stand.negate(100)
        stand.orchestrator.is_replaced = True
        assert stand.publish()["weights/sent_bytes"] == stand.served_bytes
        stand.negate(7)
        assert stand.publish()["weights/sent_bytes"] == 7 * 4
        stand.negate(7)
        fails = True
        assert stand.publish()["weights/sent_bytes"] == stand.served_bytes
        assert [ready.version for ready in stand.orchestrator.attempts] == [0, 1, 2, 3, 3]


def test_without_delta_everything_is_sent_every_time(tmp_path: Path, model: PreTrainedModel, world: World) -> None:
    with open_stand(tmp_path, model, world, "gloo", dtype="bfloat16") as stand:
        for _ in range(2):
            assert stand.publish() == {"weights/sent_bytes": stand.served_bytes}


# memory


class LiveBytes(TorchDispatchMode):
    """Measure the peak of the bytes of all tensors that this thread makes, each storage counted once."""

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
def test_a_transfer_needs_the_memory_of_two_buckets_and_one_tensor(
    tmp_path: Path, larger_model: PreTrainedModel, world: World, delta: bool
) -> None:
    """A tensor exists as it is trained and as it is served. There is no second copy of the model."""
    largest = max(parameter.numel() for parameter in larger_model.parameters())
    with open_stand(tmp_path, larger_model, world, "gloo", dtype="bfloat16", delta=delta) as stand:
        stand.publish()  # what is kept from here on is the copy of `delta`, in host memory
        stand.negate(100)
        with LiveBytes() as live:
            stand.publish()
        with LiveBytes() as all_held:
            second_model = list(served_tensors(larger_model, torch.bfloat16))
        assert all_held.peak >= stand.served_bytes > 10 * MIB
        assert second_model
    assert live.peak < 2 * MIB + largest * (4 + 2) + MIB / 2
