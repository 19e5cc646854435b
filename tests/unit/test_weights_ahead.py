"""Weights that are taken in while their receiver does something else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from threading import Event

import pytest
import torch

from trireme.transport.weights.ahead import Ahead
from weight_ends import DEADLINE_S, Ends, digests_of, outcome, random_model, receive, specs_of


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Joined: a first transfer is done."""
    opened = Ends(1, timeout_s=DEADLINE_S)
    outcome(opened.send(random_model(), epoch="a/1", receivers=opened.receivers))
    yield opened
    opened.close()


def begun(ends: Ends, model: dict[str, torch.Tensor]) -> Ahead[tuple[str, torch.Tensor]]:
    (receiver,) = ends.receivers
    return Ahead((name, tensor.clone()) for name, tensor in receiver.tensors(specs_of(model), {}))


def test_all_of_it_is_there_when_the_sender_is_done_though_nobody_has_asked_for_it(ends: Ends) -> None:
    model = random_model(seed=1)
    ahead = begun(ends, model)
    ends.sender.join("a/1", 2)  # would wait for a receiver that does not listen
    ends.sender.send(specs_of(model), iter(model.values()))
    assert digests_of(dict(ahead.take(DEADLINE_S))) == digests_of(model)


def test_a_transfer_that_is_taken_in_ahead_and_one_that_is_not_may_follow_one_another(ends: Ends) -> None:
    (receiver,) = ends.receivers
    for seed in range(1, 5):
        model = random_model(seed=seed)
        ahead = begun(ends, model) if seed % 2 else None
        futures = ends.send(model, epoch="a/1", receivers=[] if ahead else [receiver], join=False)
        if ahead is None:
            assert outcome(futures)[1:] == [digests_of(model)]
        else:
            assert outcome(futures) == [None]
            assert digests_of(dict(ahead.take(DEADLINE_S))) == digests_of(model)


def test_a_sender_that_hangs_up_is_told_to_whoever_takes_what_came(ends: Ends) -> None:
    model = random_model(seed=1)
    ahead = begun(ends, model)
    ends.sender.join("a/1", 2)
    ends.sender.close()
    with pytest.raises(RuntimeError):
        ahead.take(DEADLINE_S)


def test_after_a_transfer_that_broke_the_receiver_joins_anew(ends: Ends) -> None:
    (receiver,) = ends.receivers
    model = random_model(seed=1)
    begun(ends, model)
    ends.sender.close()
    assert outcome(ends.send(model, epoch="a/2", receivers=[receiver])) == [None, digests_of(model)]


def test_what_does_not_come_is_not_waited_for_longer_than_allowed() -> None:
    never = Event()
    ahead = Ahead(number for number in count() if never.wait())
    with pytest.raises(TimeoutError, match="waited 0 s for the trainer to send what it had announced"):
        ahead.take(0.05)


def test_only_what_was_begun_ahead_is_taken_in_before_it_is_asked_for(ends: Ends) -> None:
    (receiver,) = ends.receivers
    model = random_model(seed=1)
    futures = ends.send(model, epoch="a/1", receivers=[], join=False)
    with pytest.raises(TimeoutError):
        futures[0].result(0.3)
    assert receive(receiver, model) == digests_of(model)
    assert outcome(futures) == [None]
