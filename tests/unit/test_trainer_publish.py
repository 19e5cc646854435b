"""The trainer's side of new weights, against an orchestrator and engines that do what they are told here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from answering import DEADLINE_S, answering
from tiny import open_state, weights_of
from trireme.algo.digest import tensor_digest
from trireme.algo.probe import probe_ids
from trireme.base.errors import Refused
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.config.inference import InferenceConfig, InferenceModel
from trireme.config.run import Ports, RunConfig, WeightBroadcast
from trireme.messages import Again, GetNewest, Go, Live, Newest, PolicyReady, PolicySent, Refusal, Reply, Request
from trireme.trainer.mesh import World
from trireme.trainer.publish import PROBE_TOKENS, Publisher
from trireme.transport.control import ControlClient
from trireme.transport.weights.kinds import open_receiver


@pytest.fixture(scope="module")
def model(tiny_model: Path, world: World) -> PreTrainedModel:
    return open_state(tiny_model, world).model


def build_config(folder: Path, kind: str, *, dtype: str = "auto", timeout_s: float = DEADLINE_S) -> RunConfig:
    return RunConfig(
        output_dir=folder,
        device="cpu",
        ports=Ports(weights=free_port()),
        weight_broadcast=WeightBroadcast(type=kind, timeout_s=timeout_s),
        inference=InferenceConfig(model=InferenceModel(dtype=dtype)),
    )


@contextmanager
def open_publisher(
    config: RunConfig, model: PreTrainedModel, world: World, handle: Callable[[Request], Reply]
) -> Iterator[Publisher]:
    with answering(handle) as address:
        control = ControlClient(address, Waits("trainer"))
        publisher = Publisher(config, model, world, control)
        try:
            yield publisher
        finally:
            publisher.close()
            control.close()


class FakeOrchestrator:
    """Lets the trainer send at once, and takes the tensors as one engine would."""

    def __init__(self, config: RunConfig, *, deaf_attempts: int = 0) -> None:
        self.asked: list[Request] = []
        self.received: dict[str, str] = {}
        self._config = config
        self._deaf_attempts = deaf_attempts
        self._receiving: threading.Thread | None = None

    def __call__(self, request: Request) -> Reply:
        self.asked.append(request)
        match request:
            case PolicyReady():
                if request.kind == "gloo" and request.attempt > self._deaf_attempts:
                    self._receiving = threading.Thread(target=self._receive, args=[request, {}], daemon=True)
                    self._receiving.start()
                return Go(version=request.version, epoch=str(request.attempt), world_size=2)
            case PolicySent():
                if self._receiving is not None:
                    self._receiving.join(DEADLINE_S)
                else:
                    self._receive(self._announced(), request.payload)
                return Live(version=request.version)
        return Refusal(error=f"a publisher does not ask for {request}")

    def _announced(self) -> PolicyReady:
        return next(request for request in reversed(self.asked) if isinstance(request, PolicyReady))

    def _receive(self, ready: PolicyReady, payload: dict[str, Any]) -> None:
        receiver = open_receiver(
            ready.kind,
            host=ready.host,
            port=ready.port,
            bucket_bytes=self._config.weight_broadcast.bucket_mib << 20,
            timeout_s=DEADLINE_S,
            device=torch.device("cpu"),
        )
        receiver.join(str(ready.attempt), 1, 2)
        self.received = {name: tensor_digest(tensor) for name, tensor in receiver.tensors(ready.specs, payload)}
        receiver.close()


@pytest.mark.parametrize("kind", ["gloo", "filesystem"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_receive_the_trainers_weights_as_they_are_served(
    tmp_path: Path, model: PreTrainedModel, world: World, kind: str, dtype: str
) -> None:
    config = build_config(tmp_path, kind, dtype=dtype)
    orchestrator = FakeOrchestrator(config)
    with open_publisher(config, model, world, orchestrator) as publisher:
        publisher.publish(3)
    ready, sent = orchestrator.asked
    assert (ready.version, sent.version) == (3, 3)
    served = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights_of(model).items()}
    assert orchestrator.received == sent.digests == {name: tensor_digest(tensor) for name, tensor in served.items()}


def test_the_probe_is_what_the_weights_say(
    tmp_path: Path, model: PreTrainedModel, world: World, tiny_model: Path
) -> None:
    config = build_config(tmp_path, "filesystem")
    orchestrator = FakeOrchestrator(config)
    with open_publisher(config, model, world, orchestrator) as publisher:
        publisher.publish(0)
    probe = orchestrator.asked[-1].probe
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        logprobs = torch.log_softmax(plain(torch.tensor([probe.ids])).logits[0], -1)
    expected = [float(logprobs[t, token]) for t, token in enumerate(probe.ids[1:])]
    assert probe.logprobs == pytest.approx(expected, abs=1e-5)


def test_from_the_announcement_on_engines_wait_for_no_forward_pass(
    tmp_path: Path, model: PreTrainedModel, world: World
) -> None:
    config = build_config(tmp_path, "gloo")
    orchestrator = FakeOrchestrator(config)
    questions_before: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda *_: questions_before.append(len(orchestrator.asked))
    )
    with open_publisher(config, model, world, orchestrator) as publisher:
        publisher.publish(3)
    hook.remove()
    assert questions_before == [0]
    assert len(orchestrator.asked) == 2


def test_a_transfer_that_breaks_is_begun_anew(tmp_path: Path, model: PreTrainedModel, world: World) -> None:
    config = build_config(tmp_path, "gloo", timeout_s=1.0)
    orchestrator = FakeOrchestrator(config, deaf_attempts=1)
    with open_publisher(config, model, world, orchestrator) as publisher:
        publisher.publish(3)
    asked = [(type(request).__name__, request.attempt) for request in orchestrator.asked]
    assert list(dict.fromkeys(asked)) == [("PolicyReady", 1), ("PolicyReady", 2), ("PolicySent", 2)]
    assert orchestrator.received == orchestrator.asked[-1].digests


def test_an_engine_that_will_never_come_is_not_waited_for_until_the_timeout(
    tmp_path: Path, model: PreTrainedModel, world: World
) -> None:
    """The orchestrator knows that it died; a transfer that waits for it asks."""
    config = build_config(tmp_path, "gloo", timeout_s=10 * DEADLINE_S)
    orchestrator = FakeOrchestrator(config, deaf_attempts=1)

    def answer(request: Request) -> Reply:
        if isinstance(request, PolicyReady) and request.attempt == 1 and request in orchestrator.asked:
            return Again(reason="the engine died before it joined")
        return orchestrator(request)

    with open_publisher(config, model, world, answer) as publisher:
        publisher.publish(3)
    assert orchestrator.asked[-1].attempt == 2


@pytest.mark.parametrize("at", [PolicyReady, PolicySent])
def test_an_attempt_that_came_to_nothing_is_followed_by_another(
    tmp_path: Path, model: PreTrainedModel, world: World, at: type
) -> None:
    """The orchestrator died and is another one, or an engine died."""
    config = build_config(tmp_path, "filesystem")
    orchestrator = FakeOrchestrator(config)

    def answer(request: Request) -> Reply:
        if isinstance(request, at) and request.attempt < 3:
            return Again(reason="an engine died")
        return orchestrator(request)

    with open_publisher(config, model, world, answer) as publisher:
        publisher.publish(3)
    assert orchestrator.asked[-1].attempt == 3
    assert orchestrator.received == orchestrator.asked[-1].digests


def test_nothing_is_published_up_to_the_newest_version_if_that_is_made_again_as_it_was(
    tmp_path: Path, model: PreTrainedModel, world: World
) -> None:
    config = build_config(tmp_path, "filesystem")
    same = {name: tensor_digest(tensor) for name, tensor in weights_of(model).items()}
    orchestrator = FakeOrchestrator(config)
    newest = Newest(version=5, digests=same)

    def answer(request: Request) -> Reply:
        return newest if isinstance(request, GetNewest) else orchestrator(request)

    with open_publisher(config, model, world, answer) as publisher:
        assert publisher.look_back() == 5
        for version in (3, 4, 5):
            publisher.send_if_new(version)
        assert orchestrator.asked == []
        newest = Newest(version=5, digests=same | {"model.norm.weight": "another"})
        publisher.look_back()
        publisher.send_if_new(5)
        publisher.confirm()
        assert {request.version for request in orchestrator.asked} == {5}
        publisher.send_if_new(6)
        publisher.confirm()
        assert orchestrator.asked[-1].version == 6


def test_engines_are_asked_to_confirm_while_the_trainer_goes_on(
    tmp_path: Path, model: PreTrainedModel, world: World
) -> None:
    config = build_config(tmp_path, "filesystem").model_copy(update={"max_async_level": 2})
    orchestrator = FakeOrchestrator(config)
    confirmed = threading.Event()

    def answer(request: Request) -> Reply:
        reply = orchestrator(request)
        if isinstance(reply, Live):
            confirmed.set()
        return reply

    with open_publisher(config, model, world, answer) as publisher:
        publisher.send(3)
        assert publisher.is_confirming
        assert confirmed.wait(DEADLINE_S)
        publisher.confirm()
        assert not publisher.is_confirming
    first, *sent = orchestrator.asked
    assert isinstance(first, PolicyReady)
    assert sent[0] == sent[-1]  # the same question, so it has the same answer


@pytest.mark.parametrize("level", [0, 1, 2])
def test_on_a_cpu_engines_that_the_next_batch_waits_for_are_not_disturbed(
    tmp_path: Path, model: PreTrainedModel, world: World, level: int
) -> None:
    config = build_config(tmp_path, "filesystem").model_copy(update={"max_async_level": level})
    with open_publisher(config, model, world, FakeOrchestrator(config)) as publisher:
        publisher.send(3)
        assert publisher.is_confirming == (level > 1)


def test_weights_that_were_refused_are_not_sent_again(tmp_path: Path, model: PreTrainedModel, world: World) -> None:
    config = build_config(tmp_path, "filesystem")
    asked: list[Request] = []

    def refuse(request: Request) -> Reply:
        asked.append(request)
        if isinstance(request, PolicyReady):
            return Go(version=request.version, epoch="1", world_size=1)
        return Refusal(error="model.norm.weight has another digest")

    with open_publisher(config, model, world, refuse) as publisher:
        with pytest.raises(Refused, match=r"model.norm.weight"):
            publisher.publish(3)
    assert [type(request) for request in asked] == [PolicyReady, PolicySent]


@pytest.mark.parametrize("vocabulary", [3, 128, 151_936])
def test_the_probe_is_fixed_and_spread_over_the_vocabulary(vocabulary: int) -> None:
    ids = probe_ids(vocabulary, PROBE_TOKENS)
    assert ids == probe_ids(vocabulary, PROBE_TOKENS)
    assert all(0 <= token < vocabulary for token in ids)
    assert len(set(ids)) == min(vocabulary, len(ids))
