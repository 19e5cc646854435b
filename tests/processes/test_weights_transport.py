"""Weights from the trainer's end to the engines', as the real code of both ends sends and takes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trireme.algo.digest import tensor_digest
from trireme.messages import TensorSpec
from trireme.transport.weights.buckets import (
    Flats,
    bucket_size,
    num_bytes,
    pack_bucket,
    spec_of,
    split_into_buckets,
    unpack_bucket,
)
from trireme.transport.weights.kinds import Receiver, Sender, open_receiver, open_sender
from weight_ends import BUCKET_BYTES, DEADLINE_S, SHORT_S, Ends, digests_of, outcome, random_model, receive, specs_of


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
    left_behind = hasty_ends.send(model, epoch="a/1", receivers=hasty_ends.receivers[:1], join=False)
    for end in left_behind:
        assert isinstance(end.exception(DEADLINE_S), RuntimeError)
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
    flat = pack_bucket(specs, model.values(), Flats(torch.device("cpu")))
    assert {name: tensor_digest(tensor) for name, tensor in unpack_bucket(specs, flat)} == digests_of(model)


def test_a_spec_tells_type_shape_and_bytes() -> None:
    spec = spec_of("norm", torch.empty(3, 5, dtype=torch.bfloat16))
    assert spec == TensorSpec(name="norm", dtype="bfloat16", shape=[3, 5])
    assert num_bytes(spec) == 30


def test_a_bucket_stays_as_it_is_while_the_next_one_is_filled():
    flats = Flats(torch.device("cpu"))
    first = flats.take(10).fill_(1)
    second = flats.take(20).fill_(2)
    assert (first == 1).all()
    third = flats.take(8).fill_(3)
    assert (second == 2).all()
    assert third.data_ptr() == first.data_ptr()  # no new memory where there is enough
    assert flats.take(40).numel() == 40
