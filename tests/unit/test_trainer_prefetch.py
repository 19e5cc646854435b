"""A batch that is asked for before its turn, and how rows of all ranks are measured."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from answering import DEADLINE_S, answering
from tiny import random_samples
from trireme.algo.cost import Cost
from trireme.algo.packing import micro_batches_of_rank, rows_of
from trireme.base.errors import DeadlineExceeded, Refused
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.config.trainer import TrainerConfig
from trireme.messages import BatchReply, GetBatch, NotYet, Refusal, Reply, Request
from trireme.trainer.mesh import World
from trireme.trainer.prefetch import Prefetch
from trireme.trainer.rows import given_to_team, packing_metrics

CAPACITY = 48


@dataclass
class Rank:
    """Of a world that is not there."""

    rank: int = 1
    dp_size: int = 2
    cp_rank: int = 0
    dp_rank: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@dataclass
class Orchestrator:
    """Has the batches below `filled`, and says when it is asked."""

    filled: int = 0
    asked: list[GetBatch] = field(default_factory=list)
    was_asked: threading.Event = field(default_factory=threading.Event)

    def __call__(self, request: Request) -> Reply:
        assert isinstance(request, GetBatch)
        self.asked.append(request)
        self.was_asked.set()
        if request.step >= self.filled:
            return NotYet(note="3 of 8 groups missing")
        return BatchReply(step=request.step, micro_batches=[], loss_tokens=1, num_rollouts=1)


@contextmanager
def prefetching(
    handle: Any, *, rank: Rank | None = None, ahead: int = 1, timeout_s: float = DEADLINE_S
) -> Iterator[Prefetch]:
    config = RunConfig(max_async_level=ahead, max_steps=5, trainer=TrainerConfig(batch_timeout_s=timeout_s))
    with answering(handle) as address:
        world: Any = rank or Rank()
        prefetch = Prefetch(config, world, Waits("trainer.1"), address=address)
        try:
            yield prefetch
        finally:
            prefetch.close()


def test_the_next_batch_is_asked_for_before_its_turn() -> None:
    orchestrator = Orchestrator(filled=5)
    with prefetching(orchestrator) as prefetch:
        prefetch.begin_if_ahead(3)
        assert orchestrator.was_asked.wait(DEADLINE_S)
        batch = prefetch.take(3)
    assert batch is not None
    assert batch.step == 3
    assert [(request.step, request.rank, request.world) for request in orchestrator.asked] == [(3, 1, 2)]


def test_one_that_is_not_full_yet_is_waited_for_in_its_turn() -> None:
    orchestrator = Orchestrator(filled=3)
    with prefetching(orchestrator) as prefetch:
        prefetch.begin_if_ahead(3)
        assert orchestrator.was_asked.wait(DEADLINE_S)
        orchestrator.filled = 4
        batch = prefetch.take(3)
    assert batch is not None
    assert batch.step == 3


@pytest.mark.parametrize(
    ("rank", "ahead", "step"),
    [
        (Rank(rank=0, dp_rank=0), 1, 3),  # it may have to give an engine weights first
        (Rank(), 0, 3),  # the batch cannot begin before these weights are live
        (Rank(), 1, 5),  # there is none
        (Rank(rank=3, cp_rank=1), 1, 3),  # the first of its team asks
    ],
)
def test_nobody_asks_who_could_not_have_it_early(rank: Rank, ahead: int, step: int) -> None:
    orchestrator = Orchestrator(filled=9)
    with prefetching(orchestrator, rank=rank, ahead=ahead) as prefetch:
        prefetch.begin_if_ahead(step)
        assert prefetch.take(step) is None
    assert orchestrator.asked == []


def test_a_batch_that_was_not_asked_for_is_none() -> None:
    with prefetching(Orchestrator(filled=9)) as prefetch:
        assert prefetch.take(0) is None
        prefetch.begin_if_ahead(1)
        assert prefetch.take(1) is not None
        assert prefetch.take(1) is None


def test_a_refusal_is_raised_where_the_batch_is_wanted() -> None:
    with prefetching(lambda _: Refusal(error="another run's trainer")) as prefetch:
        prefetch.begin_if_ahead(1)
        with pytest.raises(Refused, match="another run's trainer"):
            prefetch.take(1)


def test_the_deadline_is_counted_from_when_it_is_wanted_and_names_the_peer() -> None:
    with prefetching(Orchestrator(filled=0), timeout_s=0.05) as prefetch:
        prefetch.begin_if_ahead(1)
        with pytest.raises(DeadlineExceeded, match=r"trainer.1 waits .* for batch 1 from orchestrator"):
            prefetch.take(1)


# rows


def test_a_rank_on_its_own_keeps_its_batch(world: World) -> None:
    batch = BatchReply(step=1, micro_batches=[], loss_tokens=1, num_rollouts=1)
    assert given_to_team(batch, world) is batch


def test_waste_and_imbalance_by_hand(world: World) -> None:
    samples = random_samples([40, 30, 18])
    rows = micro_batches_of_rank(samples, capacity=CAPACITY, rank=0, world=1)
    found = packing_metrics(rows, capacity=CAPACITY, cost=Cost(), world=world)
    assert found == {"perf/packing_waste": pytest.approx(1 - 88 / 96), "perf/rank_imbalance": pytest.approx(0.0)}


def test_imbalance_is_what_all_wait_for_the_slowest() -> None:
    """Two ranks, two rounds: 40 beside 30 tokens, 18 beside 10."""

    class Two(Rank):
        def sum(self, values: dict[str, float]) -> dict[str, float]:
            others = {"0/1": 30.0, "1/1": 10.0, "tokens": 40.0}
            return {name: value + others.get(name, 0.0) for name, value in values.items()}

    samples = random_samples([40, 18])
    rows = rows_of(samples, [[0], [1]])
    world: Any = Two(rank=0, dp_rank=0)
    found = packing_metrics(rows, capacity=CAPACITY, cost=Cost(), world=world)
    assert found["perf/rank_imbalance"] == pytest.approx((40 + 18) / (98 / 2) - 1)
    assert found["perf/packing_waste"] == pytest.approx(1 - 98 / (4 * CAPACITY))
