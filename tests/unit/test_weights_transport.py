"""Weights from the trainer's end to the engines', as the real code of both ends sends and takes them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from trireme.algo.digest import tensor_digest
from trireme.base.processes import free_port
from trireme.messages import TensorSpec
from trireme.transport.weights.buckets import (
    bucket_size,
    num_bytes,
    pack_bucket,
    spec_of,
    split_into_buckets,
    unpack_bucket,
)
from trireme.transport.weights.kinds import Receiver, Sender, open_receiver, open_sender

BUCKET_BYTES = 4096
DEADLINE_S = 60
SHORT_S = 1.0

Tensors = dict[str, torch.Tensor]


def random_model(seed: int = 0) -> Tensors:
    """Tensors of several types; one larger than a bucket, one of an odd size, one number, one without numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(70, 33, generator=generator),
        "bias": torch.randn(13, generator=generator),
        "half": torch.randn(17, 3, generator=generator).bfloat16(),
        "scale": torch.randn((), generator=generator),
        "empty": torch.empty(0, 4),
        "norm": torch.randn(16, generator=generator).bfloat16(),
        "counts": torch.randint(0, 100, (5,), generator=generator),
    }


def specs_of(tensors: Tensors) -> list[TensorSpec]:
    return [spec_of(name, tensor) for name, tensor in tensors.items()]


def digests_of(tensors: Tensors) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def receive(receiver: Receiver, tensors: Tensors, payload: dict | None = None) -> dict[str, str]:
    return {name: tensor_digest(found) for name, found in receiver.tensors(specs_of(tensors), payload or {})}


class Ends:
    """A gloo sender and its receivers, each joining and working in a thread of its own."""

    def __init__(self, num_receivers: int, *, timeout_s: float) -> None:
        port = free_port()
        options = {"host": "127.0.0.1", "port": port, "bucket_bytes": BUCKET_BYTES, "timeout_s": timeout_s}
        self.sender: Sender = open_sender("gloo", folder=Path("unused"), **options)
        self.receivers = [open_receiver("gloo", device=torch.device("cpu"), **options) for _ in range(num_receivers)]
        self._pool = ThreadPoolExecutor(num_receivers + 1)

    def send(self, tensors: Tensors, *, epoch: str, receivers: list[Receiver], join: bool = True) -> list[Future]:
        """The sender's future first, then those of the receivers at work."""
        world_size = len(self.receivers) + 1

        def work_as_sender() -> None:
            self.sender.join(epoch, world_size)
            self.sender.send(specs_of(tensors), iter(tensors.values()))

        def work_as_receiver(receiver: Receiver) -> dict[str, str]:
            if join:
                receiver.join(epoch, 1 + self.receivers.index(receiver), world_size)
            return receive(receiver, tensors)

        return [
            self._pool.submit(work_as_sender),
            *(self._pool.submit(work_as_receiver, receiver) for receiver in receivers),
        ]

    def close(self) -> None:
        for end in [*self.receivers, self.sender]:
            end.close()
        self._pool.shutdown(wait=False)


@pytest.fixture
def ends() -> Iterator[Ends]:
    opened = Ends(2, timeout_s=DEADLINE_S)
    yield opened
    opened.close()


@pytest.fixture
def hasty_ends() -> Iterator[Ends]:
    opened = Ends(2, timeout_s=SHORT_S)
    yield opened
    opened.close()


def outcome(futures: list[Future]) -> list[dict[str, str] | None]:
    return [future.result(DEADLINE_S) for future in futures]


def test_every_tensor_arrives_at_every_receiver_to_the_bit(ends: Ends) -> None:
    model = random_model()
    assert outcome(ends.send(model, epoch="a/1", receivers=ends.receivers)) == [
        None,
        digests_of(model),
        digests_of(model),
    ]


def test_the_next_version_needs_no_new_connections(ends: Ends) -> None:
    outcome(ends.send(random_model(), epoch="a/1", receivers=ends.receivers))
    following = random_model(seed=1)
    futures = ends.send(following, epoch="a/1", receivers=ends.receivers, join=False)
    assert outcome(futures)[1:] == [digests_of(following)] * 2


def test_a_new_epoch_joins_anew(ends: Ends) -> None:
    for number in range(3):
        model = random_model(seed=number)
        futures = ends.send(model, epoch=f"a/{number}", receivers=ends.receivers)
        assert outcome(futures)[1:] == [digests_of(model)] * 2


def test_a_receiver_that_never_joins_makes_the_sender_fail_and_the_next_epoch_heals(hasty_ends: Ends) -> None:
    model = random_model()
    sender, receiver = hasty_ends.send(model, epoch="a/1", receivers=hasty_ends.receivers[:1])
    assert isinstance(sender.exception(DEADLINE_S), RuntimeError)
    assert isinstance(receiver.exception(DEADLINE_S), RuntimeError)
    futures = hasty_ends.send(model, epoch="a/2", receivers=hasty_ends.receivers)
    assert outcome(futures)[1:] == [digests_of(model)] * 2


def test_a_receiver_that_dies_between_versions_makes_the_sender_fail_and_the_next_epoch_heals(hasty_ends: Ends) -> None:
    model = random_model()
    outcome(hasty_ends.send(model, epoch="a/1", receivers=hasty_ends.receivers))
    hasty_ends.receivers[1].close()
    sender, _ = hasty_ends.send(model, epoch="a/1", receivers=hasty_ends.receivers[:1], join=False)
    assert isinstance(sender.exception(DEADLINE_S), RuntimeError)
    futures = hasty_ends.send(model, epoch="a/2", receivers=hasty_ends.receivers)
    assert outcome(futures)[1:] == [digests_of(model)] * 2


def test_more_tensors_than_were_announced_are_our_mistake(ends: Ends) -> None:
    model = random_model()
    futures = ends.send(model, epoch="a/1", receivers=ends.receivers)
    outcome(futures)
    with pytest.raises(AssertionError, match="more tensors than specs"):
        ends.sender.send([], iter(model.values()))


def test_files_bring_every_tensor_to_the_bit(tmp_path: Path) -> None:
    sender, receiver = _through_files(tmp_path)
    model = random_model()
    payload = sender.send(specs_of(model), iter(model.values()))
    assert receive(receiver, model, payload) == digests_of(model)
    assert len(list(Path(payload["folder"]).iterdir())) == len(split_into_buckets(specs_of(model), BUCKET_BYTES)) > 1


def test_of_the_files_the_last_two_versions_stay(tmp_path: Path) -> None:
    sender, receiver = _through_files(tmp_path)
    models = [random_model(seed) for seed in range(4)]
    payloads = [sender.send(specs_of(model), iter(model.values())) for model in models]
    assert [Path(payload["folder"]).exists() for payload in payloads] == [False, False, True, True]
    assert receive(receiver, models[2], payloads[2]) == digests_of(models[2])


def test_a_restarted_sender_does_not_write_over_what_an_engine_may_be_reading(tmp_path: Path) -> None:
    model = random_model()
    first = _through_files(tmp_path)[0].send(specs_of(model), iter(model.values()))
    restarted, receiver = _through_files(tmp_path)
    assert restarted.send(specs_of(model), iter(model.values())) != first
    assert receive(receiver, model, first) == digests_of(model)


def _through_files(folder: Path) -> tuple[Sender, Receiver]:
    options = {"host": "", "port": 0, "bucket_bytes": BUCKET_BYTES, "timeout_s": SHORT_S}
    sender = open_sender("filesystem", folder=folder / "broadcast", **options)
    return sender, open_receiver("filesystem", device=torch.device("cpu"), **options)


def test_buckets_by_hand() -> None:
    sizes = {"a": 10, "b": 16, "c": 17, "d": 100, "e": 1}  # bytes; aligned to 16: 16, 16, 32, 112, 16
    specs = [TensorSpec(name=name, dtype="uint8", shape=[size]) for name, size in sizes.items()]
    buckets = split_into_buckets(specs, 64)
    assert [[spec.name for spec in bucket] for bucket in buckets] == [["a", "b", "c"], ["d"], ["e"]]
    assert [bucket_size(bucket) for bucket in buckets] == [64, 112, 16]


def test_a_bucket_unpacks_to_what_was_packed() -> None:
    model = random_model()
    specs = specs_of(model)
    flat = pack_bucket(specs, model.values(), torch.device("cpu"))
    assert {name: tensor_digest(tensor) for name, tensor in unpack_bucket(specs, flat)} == digests_of(model)


def test_a_spec_tells_type_shape_and_bytes() -> None:
    spec = spec_of("norm", torch.empty(3, 5, dtype=torch.bfloat16))
    assert spec == TensorSpec(name="norm", dtype="bfloat16", shape=[3, 5])
    assert num_bytes(spec) == 30
