"""The trainer publishes its weights to an orchestrator with one engine, whole or as a delta.

The last tests are of transfers that only GPUs make, as far as a CPU can tell.
"""

import errno
import json
import math
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.engines.answering import DEADLINE_S, answering
from support.models.live_bytes import LiveBytes
from support.models.model_configs import MODELS
from support.models.tiny import open_state, save_tiny_model, weights_of
from trireme.algo.digest import tensor_digest
from trireme.algo.model.architecture import architecture_of
from trireme.base.disk import when_there_is_room
from trireme.base.errors import NotFinite, PeerDied, PeerRefused
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.config.inference import InferenceConfig, InferenceModel
from trireme.config.run import Ports, RunConfig, WeightBroadcast
from trireme.messages import (
    Again,
    GetNewest,
    Go,
    InitInfo,
    Live,
    Newest,
    PolicyReady,
    PolicySent,
    Refusal,
    Reply,
    Request,
)
from trireme.monitor.spans import Lane
from trireme.tools.plan.trainer_memory import Training, training_of
from trireme.trainer.publish import publisher as publish
from trireme.trainer.publish.publisher import Publisher
from trireme.trainer.publish.served_weights import served_tensors
from trireme.transport.control import ControlClient
from trireme.transport.weights import backends
from trireme.transport.weights.backends import IpcSender, open_receiver
from trireme.transport.weights.buckets import spec_of
from trireme.transport.weights.transfer import Receiver

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
        info = InitInfo(
            ready.kind, ready.host, ready.port, str(self._num_epochs), rank_offset=1, world_size=2,
            bucket_bytes=self._config.weight_broadcast.bucket_mib << 20, timeout_s=DEADLINE_S,
        )  # fmt: skip
        self._receiver = open_receiver(info, torch.device("cpu"))
        self._receiver.join(info.epoch, info.rank_offset, info.world_size)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


class Stand:
    def __init__(self, publisher: Publisher, model: PreTrainedModel, orchestrator: Orchestrator) -> None:
        self.publisher, self.model, self.orchestrator = publisher, model, orchestrator
        self.served_bytes = sum(tensor.nbytes for _, tensor in served_tensors(model, torch.bfloat16))
        self._version = -1

    def publish(self) -> dict[str, float]:
        self._version += 1
        self.publisher.publish(self._version)
        return self.publisher.take_metrics()

    def negate(self, count: int) -> None:
        with torch.no_grad():
            next(self.model.parameters()).to_local().view(-1)[:count].neg_()


@pytest.fixture
def open_stand(tmp_path, tiny_model, world):
    with ExitStack() as stack:

        def opened(
            kind: Any = "filesystem",
            *,
            model: PreTrainedModel | None = None,
            intercept: Callable[[Request], Reply | None] = lambda _: None,
            dtype: str = "auto",
            **broadcast: Any,
        ) -> Stand:
            broadcast = {"bucket_mib": 1, "timeout_s": DEADLINE_S} | broadcast
            config = RunConfig(
                output_dir=tmp_path, device="cpu", ports=Ports(weights=free_port()),
                weight_broadcast=WeightBroadcast(type=kind, **broadcast),
                inference=InferenceConfig(model=InferenceModel(dtype=dtype)),
            )  # fmt: skip
            orchestrator = Orchestrator(config, intercept)
            control = ControlClient(stack.enter_context(answering(orchestrator)), Waits("trainer"))
            stack.callback(control.close)
            stack.callback(orchestrator.close)
            model = model or open_state(tiny_model, world).model
            publisher = Publisher(config, model, world, control, Waits("trainer"), Lane("trainer"))
            stack.callback(publisher.close)
            return Stand(publisher, model, orchestrator)

        yield opened


@pytest.mark.parametrize(("kind", "dtype"), [("gloo", "float32"), ("filesystem", "bfloat16")])
def test_engines_receive_weights_in_their_dtype_and_logprobs_to_compare(open_stand, tiny_model, kind, dtype):
    stand, asked_before = open_stand(kind, dtype=dtype), set()
    embedding, asked = stand.model.model.embed_tokens, stand.orchestrator.asked
    hook = embedding.register_forward_hook(lambda *_: asked_before.add(len(asked)))
    stand.publisher.publish(3)
    hook.remove()
    ready, sent = asked
    assert (ready.version, sent.version) == (3, 3)
    served = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights_of(stand.model).items()}
    expected = {name: tensor_digest(tensor) for name, tensor in served.items()}
    assert stand.orchestrator.received == sent.digests == expected
    assert asked_before == {0}  # the announcement may pause engines, so the probe is computed before it
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tiny_model)(torch.tensor([sent.probe.ids])).logits[0]
    logprobs = plain[:-1].log_softmax(-1).gather(1, torch.tensor(sent.probe.ids)[1:, None])[:, 0]
    assert sent.probe.logprobs == pytest.approx(logprobs.tolist(), abs=1e-5)


def test_a_version_whose_probe_is_not_finite_never_reaches_an_engine(open_stand):
    stand = open_stand("gloo")
    with torch.no_grad():
        stand.model.model.norm.weight.fill_(math.nan)
    with pytest.raises(NotFinite, match="under version 1 are not finite: the step on batch 0 made them"):
        stand.publisher.publish(1)
    assert stand.orchestrator.asked == []


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(publish, "BACKOFF_S", 0.01)
    monkeypatch.setattr(publish, "LONGEST_BACKOFF_S", 0.01)


@pytest.mark.parametrize("died", [False, True])
def test_the_trainer_repeats_a_transfer_that_an_engine_does_not_join(open_stand, died):
    """After the timeout or, when the orchestrator knows that the engine died, long before."""

    def answer(request: Request) -> Reply | None:
        is_first = isinstance(request, PolicyReady) and request.attempt == 1
        stand.orchestrator.is_deaf = is_first
        is_repeated = is_first and bool(stand.orchestrator.attempts)
        return Again(reason="the engine died before it joined") if died and is_repeated else None

    stand = open_stand("gloo", intercept=answer, timeout_s=10 * DEADLINE_S if died else 1.0)
    stand.publisher.publish(3)
    asked = [(type(request).__name__, request.attempt) for request in stand.orchestrator.asked]
    assert list(dict.fromkeys(asked)) == [("PolicyReady", 1), ("PolicyReady", 2), ("PolicySent", 2)]


@pytest.mark.parametrize("failed", [PolicyReady, PolicySent])
def test_the_trainer_gives_up_after_20_failed_attempts(open_stand, failed):
    stand = open_stand(intercept=lambda asked: Again(reason="an engine died") if isinstance(asked, failed) else None)
    with pytest.raises(PeerDied, match="Version 3 was sent 20 times"):
        stand.publisher.publish(3)
    attempts = [request.attempt for request in stand.orchestrator.asked if isinstance(request, failed)]
    assert attempts == list(range(1, 21))


def no_room(error: type[Exception] = OSError) -> Exception:
    return error(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_delays_a_version_as_often_as_it_fills_up(open_stand, tmp_path, monkeypatch):
    """Errors are of what writes the files, and of safetensors in Rust."""
    found: list[list[str]] = []
    waits: list[str] = []

    def save_part(content: dict[str, Any], path: Path) -> None:
        path.write_bytes(b"torn")
        if len(found) < 4 * publish.ATTEMPTS:
            raise no_room(SafetensorError if len(found) % 4 else OSError)
        save_file(content, path)

    def reserve(*_: Any) -> None:
        found.append(sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "broadcast").rglob("*.*")))
        if len(found) % 2:
            raise no_room()
        waits.extend(map(str, stand.publisher._waits.now()))

    stand = open_stand()
    stand.publish()
    monkeypatch.setattr(publish, "ATTEMPTS", 4)
    monkeypatch.setattr(backends, "save_file", save_part)
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    monkeypatch.setattr(publish, "when_there_is_room", partial(when_there_is_room, poll_s=0.01))
    stand.publish()
    assert found == [["broadcast/0/00000.safetensors"]] * (4 * publish.ATTEMPTS)
    assert [wait.split(" for ")[1] for wait in waits] == ["room"] * (2 * publish.ATTEMPTS)
    assert sorted(path.name for path in (tmp_path / "broadcast").iterdir()) == ["0", "1"]


def test_full_disk_counts_as_a_failed_publish_attempt(open_stand, monkeypatch):
    reserved: list[int] = []

    def fail(*_: Any) -> None:
        assert len(reserved) <= publish.ATTEMPTS
        raise no_room()

    stand = open_stand()
    monkeypatch.setattr(backends, "save_file", fail)
    monkeypatch.setattr(os, "posix_fallocate", lambda _file, _first, size: reserved.append(size))
    with pytest.raises(PeerDied, match="Version 0 was sent 20 times"):
        stand.publish()
    assert min(reserved) > stand.served_bytes + MIB


@pytest.mark.parametrize("place", ["join", "send", "engine"])
def test_what_is_no_fault_of_the_transfer_ends_the_run_at_once(open_stand, monkeypatch, place):
    """Too little memory of the trainer's own, and an engine that found other weights than were sent."""
    refusal = Refusal(error="model.norm.weight has another digest") if place == "engine" else None
    stand = open_stand(intercept=lambda request: refusal if isinstance(request, PolicySent) else None)
    if place != "engine":
        full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
        monkeypatch.setattr(stand.publisher._sender, place, full)
    with pytest.raises((torch.OutOfMemoryError, PeerRefused), match=r"out of memory|model.norm.weight"):
        stand.publisher.publish(3)
    assert len(stand.orchestrator.attempts) == 1


def test_versions_that_engines_confirmed_are_published_only_if_they_differ(open_stand):
    stand = open_stand(intercept=lambda request: newest if isinstance(request, GetNewest) else None)
    publisher, orchestrator = stand.publisher, stand.orchestrator
    same = {name: tensor_digest(tensor) for name, tensor in weights_of(stand.model).items()}
    newest = Newest(version=5, digests=same)
    assert publisher.find_newest() == 5
    for version in (3, 4, 5):
        publisher.send_if_new(version)
    assert orchestrator.attempts == []
    newest = Newest(version=5, digests=same | {"model.norm.weight": "another"})
    publisher.find_newest()
    for version in (4, 5, 6):
        publisher.send_if_new(version)
        publisher.confirm()
    assert [ready.version for ready in orchestrator.attempts] == [5, 6]


def test_noise_of_a_probe_is_measured_every_16_versions_or_on_failure(open_stand):
    failures = [Again(reason="the noise was that of version 0")]
    is_lost = lambda asked: isinstance(asked, PolicySent) and asked.version == 5 and failures  # noqa: E731
    stand = open_stand(dtype="bfloat16", intercept=lambda asked: failures.pop() if is_lost(asked) else None)
    for version in range(22):
        stand.publisher.publish(version)
    probes = [asked.probe for asked in stand.orchestrator.asked if isinstance(asked, PolicySent)]
    assert [probe.noise_age for probe in probes] == [*range(6), *range(16), 0]
    assert all(probe.noise > 0 for probe in probes)


@pytest.mark.parametrize("kind", KINDS)
def test_publish_sends_only_changes_except_to_a_new_engine(open_stand, kind):
    failures: list[Reply] = []
    fail = lambda request: failures.pop() if failures and isinstance(request, PolicySent) else None  # noqa: E731
    stand = open_stand(kind, dtype="bfloat16", delta=True, intercept=fail)
    assert stand.publish() == {"weights/sent_bytes": stand.served_bytes, "weights/changed_frac": 1.0}
    stand.negate(100)
    stand.orchestrator.is_replaced = True
    assert stand.publish()["weights/sent_bytes"] == stand.served_bytes
    stand.negate(7)
    changed = 7 / (stand.served_bytes / 2)  # of the values, each of 2 bytes, as its place
    assert stand.publish() == {"weights/sent_bytes": 7 * (2 + 2), "weights/changed_frac": changed}
    assert stand.publish() == {"weights/sent_bytes": 0.0, "weights/changed_frac": 0.0}
    stand.negate(7)
    failures.append(Again(reason="the engine died"))
    assert stand.publish()["weights/sent_bytes"] == stand.served_bytes
    assert [ready.version for ready in stand.orchestrator.attempts] == [0, 1, 2, 3, 4, 4]


def test_a_transfer_needs_the_memory_of_two_buckets_and_one_tensor(open_stand, tmp_path, world):
    """A tensor exists as it is trained and as it is served. There is no second copy of the model."""
    model = open_state(save_tiny_model(tmp_path / "model", hidden=320, layers=4), world).model
    # the last one: what the probe computes, and small things
    allowed = 2 * MIB + max(parameter.numel() for parameter in model.parameters()) * (4 + 2) + MIB
    for delta in (False, True):
        stand = open_stand("gloo", model=model, dtype="bfloat16", delta=delta)
        assert allowed < stand.served_bytes
        stand.publish()  # what is kept from here on is the copy of `delta`, in host memory
        stand.negate(100)
        with LiveBytes() as live:
            metrics = stand.publish()
        assert live.peak < allowed
        assert metrics["weights/sent_bytes"] == (100 * (2 + 2) if delta else stand.served_bytes)
    with LiveBytes() as all_held:
        second_model = list(served_tensors(model, torch.bfloat16))
    assert all_held.peak >= stand.served_bytes
    assert second_model


@pytest.fixture
def no_gpu(monkeypatch):
    for name in ("synchronize", "ipc_collect", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="here"))


@pytest.mark.usefixtures("no_gpu")
def test_memory_that_engines_read_is_let_go_as_soon_as_they_have_confirmed(open_stand, monkeypatch):
    replies = iter([Again(reason="an engine died"), Live(version=3)])
    held: list[weakref.ref] = []
    alive: list[int] = []

    def answer(request: Request) -> Reply:
        if isinstance(request, PolicyReady):
            return Go(version=3, epoch=str(request.attempt), world_size=2)
        alive.append(sum(tensor() is not None for tensor in held))
        return next(replies)

    monkeypatch.setattr(backends, "reduce_tensor", lambda tensor: (held.append(weakref.ref(tensor)), HANDLE))
    monkeypatch.setattr(publish, "open_sender", lambda *_, **__: IpcSender())
    open_stand("ipc", intercept=answer).publisher.publish(3)
    assert alive == [len(held) // 2] * 2  # while they are asked to confirm, one copy, never two
    assert not any(tensor() is not None for tensor in held)


HANDLE = (torch.Tensor, torch.Size([2, 3]), (3, 1), 0, torch.storage.TypedStorage, torch.bfloat16, 3, bytes(range(64)))
HANDLE += (12, 512, False, b"/torch_1_2_3", 7, b"event" * 16, True)
"""What torch 2.13's `reduce_tensor` makes of a tensor on GPU 3."""


def test_a_memory_handle_arrives_as_torch_made_it_but_for_the_gpus_number():
    arrived = backends.from_handle(json.loads(json.dumps(backends.to_handle(HANDLE))), device=0)
    assert arrived == (*HANDLE[:6], 0, *HANDLE[7:])
    meant = signature(rebuild_cuda_tensor).bind(*arrived).arguments
    places = ("tensor_cls", "storage_cls", "dtype", "storage_device", "storage_handle")
    assert [meant[name] for name in places] == [*HANDLE[:1], *HANDLE[4:6], 0, HANDLE[7]]


@pytest.mark.usefixtures("no_gpu")
def test_an_engine_refuses_memory_handles_of_another_gpu():
    payload = {"gpu": "there", "handles": {"a": backends.to_handle(HANDLE)}}
    arriving = backends.IpcReceiver(torch.device("cuda", 0)).tensors([spec_of("a", torch.bfloat16, [2, 3])], payload)
    with pytest.raises(RuntimeError, match="on GPU there, and this engine worker is on GPU here - expected both"):
        next(arriving)


def test_a_plan_counts_the_copy_that_engines_on_the_same_gpus_read(tmp_path):
    def planned(kind: str) -> Training:
        config = RunConfig(output_dir=tmp_path, device="cuda", weight_broadcast=WeightBroadcast(type=kind))
        return training_of(config, architecture_of(MODELS["Qwen/Qwen3-0.6B"]), rows=2)

    shared, apart = planned("ipc"), planned("nccl")
    transfers = [training.moments["publish"]["transfers"] for training in (shared, apart)]
    assert transfers[0] - transfers[1] == 2 * shared.model.num_parameters - 2 * (64 << 20)  # without two buckets
