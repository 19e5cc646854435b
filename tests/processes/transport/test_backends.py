"""Weights from the trainer's end to the engines', as the real code of both ends sends and takes them."""

import os
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from support.engines import weight_ends
from support.engines.weight_ends import (
    BUCKET_BYTES,
    DEADLINE_S,
    SHORT_S,
    Ends,
    digests_of,
    outcome,
    random_model,
    receive,
    specs_of,
)
from support.processes import forkserver
from trireme.algo.digest import tensor_digest
from trireme.messages import InitInfo
from trireme.transport.weights import buckets as packing
from trireme.transport.weights.backends import open_receiver, open_sender
from trireme.transport.weights.transfer import Receiver, Sender

MODELS = [random_model(seed) for seed in range(4)]
MODEL = MODELS[0]
PATIENCE_S = 3.0  # with a receiver that does not come


def test_tensors_arrive_bit_identical_at_every_receiver():
    with closing(Ends(2, timeout_s=DEADLINE_S)) as ends:
        num_keys = {}  # of the rendezvous store, which lives as long as the trainer
        for model, epoch, join in zip(MODELS, ("a/1", "a/1", "a/2", "a/3"), (True, False, True, True), strict=True):
            futures = ends.send(model, epoch=epoch, receivers=ends.receivers, join=join)
            assert outcome(futures) == [None, *[digests_of(model)] * 2]
            assert num_keys.setdefault(epoch, ends.sender._store.num_keys()) == ends.sender._store.num_keys()
        with pytest.raises(AssertionError, match="more tensors than specs"):
            ends.sender.send([], iter(MODEL.values()))


@pytest.mark.parametrize("has_joined", [False, True], ids=["it never joins", "it dies between two versions"])
def test_next_epoch_succeeds_after_a_receiver_went_missing(has_joined):
    with closing(Ends(2, timeout_s=PATIENCE_S)) as ends:
        if has_joined:
            outcome(ends.send(MODEL, epoch="a/1", receivers=ends.receivers))
            ends.receivers[1].close()
        for end in ends.send(MODEL, epoch="a/1", receivers=ends.receivers[:1], join=not has_joined):
            assert isinstance(end.exception(DEADLINE_S), RuntimeError)
        futures = ends.send(MODEL, epoch="a/2", receivers=ends.receivers)
        assert outcome(futures)[1:] == [digests_of(MODEL)] * 2


def test_receiver_wakes_when_a_transfer_is_given_up_before_all_are_there():
    with closing(Ends(2, timeout_s=DEADLINE_S)) as ends:
        sending, receiving = ends.send(MODEL, epoch="a/1", receivers=ends.receivers[:1], is_wanted=lambda: False)
        assert isinstance(sending.exception(SHORT_S), RuntimeError)
        ends.sender.close()
        assert isinstance(receiving.exception(SHORT_S), RuntimeError)


def test_receiver_killed_during_a_broadcast_wakes_the_waiting_ends(tmp_path):
    """gloo would wake neither of them before the timeout of a minute."""
    # 64 MiB is more than a connection holds. Two buckets travel at once: the third never begins.
    tensors = {"large": torch.ones(1 << 24), "second": torch.ones(BUCKET_BYTES), "third": torch.ones(BUCKET_BYTES)}
    argv = [sys.executable, weight_ends.__file__, msgspec.json.encode(specs_of(tensors)).decode()]
    with closing(Ends(2, timeout_s=DEADLINE_S)) as ends, open(tmp_path / "log", "w") as log:
        argv.append(msgspec.json.encode(ends.info).decode())
        with closing(forkserver.popen(argv, output=log.fileno(), env=os.environ, cwd=tmp_path)) as killed:
            sending, receiving = ends.send(
                tensors, epoch="a/1", receivers=ends.receivers[:1], is_wanted=lambda: killed.poll() is None
            )
            process = psutil.Process(killed.pid)
            while process.status() != psutil.STATUS_STOPPED:
                assert not sending.done()
                time.sleep(0.05)
            time.sleep(0.2)  # so that a part of it is under way
            killed.kill()
            assert isinstance(sending.exception(SHORT_S), RuntimeError)
            ends.sender.close()
            assert isinstance(receiving.exception(SHORT_S), RuntimeError)


def _through_files(folder: Path) -> tuple[Sender, Receiver]:
    options = {"host": "", "port": 0, "bucket_bytes": BUCKET_BYTES, "timeout_s": SHORT_S}
    sender = open_sender("filesystem", folder=folder / "broadcast", **options)
    info = InitInfo("filesystem", epoch="", rank_offset=1, world_size=2, **options)
    return sender, open_receiver(info, torch.device("cpu"))


def test_weights_sent_through_files_arrive_bit_identical(tmp_path):
    sender, receiver = _through_files(tmp_path)
    payloads = [sender.send(specs_of(model), iter(model.values())) for model in MODELS]
    folders = [Path(payload["folder"]) for payload in payloads]
    assert [folder.exists() for folder in folders] == [False, False, True, True]
    assert [receive(receiver, MODELS[n], payloads[n]) for n in (2, 3)] == [digests_of(MODELS[n]) for n in (2, 3)]
    assert len(list(folders[3].iterdir())) == len(packing.split_into_buckets(specs_of(MODEL), BUCKET_BYTES)) > 1
    restarted, receiver = _through_files(tmp_path)  # it does not write over what an engine may be reading
    assert restarted.send(specs_of(MODELS[3]), iter(MODELS[3].values())) != payloads[3]
    assert receive(receiver, MODELS[3], payloads[3]) == digests_of(MODELS[3])


def test_bucket_unpacks_bit_identical_while_the_next_one_is_filled():
    buffers = packing.BucketBuffers(torch.device("cpu"))
    specs = specs_of(MODEL)
    flat = packing.pack_bucket(specs, MODEL.values(), buffers)
    following = buffers.take(20).fill_(2)
    assert {name: tensor_digest(tensor) for name, tensor in packing.unpack_bucket(specs, flat)} == digests_of(MODEL)
    third = buffers.take(8).fill_(3)
    assert (following == 2).all()
    assert third.data_ptr() == flat.data_ptr()  # no new memory where there is enough
    assert buffers.take(40).numel() == 40
