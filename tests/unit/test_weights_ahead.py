"""Weights that a receiver takes in ahead, while it does something else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from threading import Event

import pytest
import torch

from trireme.transport.weights.ahead import Ahead
from weight_ends import DEADLINE_S, Ends, digests_of, outcome, random_model, specs_of


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Joined: a first transfer is done."""
    opened = Ends(1, timeout_s=DEADLINE_S)
    outcome(opened.send(random_model(), epoch="a/1", receivers=opened.receivers))
    yield opened
    opened.close()


def receive_ahead(ends: Ends, model: dict[str, torch.Tensor]) -> Ahead[tuple[str, torch.Tensor]]:
    (receiver,) = ends.receivers
    return Ahead((name, tensor.clone()) for name, tensor in receiver.tensors(specs_of(model), {}))


def test_transfers_received_ahead_and_others_may_follow_one_another(ends: Ends) -> None:
    for seed in range(1, 5):
        model = random_model(seed=seed)
        if seed % 2:
            ahead = receive_ahead(ends, model)
            ends.sender.join("a/1", 2)
            ends.sender.send(specs_of(model), iter(model.values()))  # would wait for a receiver that does not listen
            assert digests_of(dict(ahead.take(DEADLINE_S))) == digests_of(model)
        else:
            futures = ends.send(model, epoch="a/1", receivers=ends.receivers, join=False)
            assert outcome(futures)[1:] == [digests_of(model)]


def test_after_a_transfer_that_broke_the_receiver_raises_and_joins_again(ends: Ends) -> None:
    model = random_model(seed=1)
    ahead = receive_ahead(ends, model)
    ends.sender.join("a/1", 2)
    ends.sender.close()
    with pytest.raises(RuntimeError):
        ahead.take(DEADLINE_S)
    assert outcome(ends.send(model, epoch="a/2", receivers=ends.receivers)) == [None, digests_of(model)]


def test_a_transfer_that_does_not_come_is_waited_for_no_longer_than_allowed() -> None:
    never = Event()
    ahead = Ahead(number for number in count() if never.wait())
    with pytest.raises(TimeoutError, match="waited 0 s for the trainer to send what it had announced"):
        ahead.take(0.05)
