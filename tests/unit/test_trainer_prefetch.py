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

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        others = {"0/1": 30.0, "1/1": 10.0, "tokens": 40.0}  # of the other rank
        return {name: value + others.get(name, 0.0) for name, value in values.items()}


@dataclass
class Orchestrator:
    """Has the batches below `filled`, and says when it is asked."""

    filled: int = 9
    asked: list[tuple[int, int, int]] = field(default_factory=list)
    was_asked: threading.Event = field(default_factory=threading.Event)

    def __call__(self, request: Request) -> Reply:
        assert isinstance(request, GetBatch)
        self.asked.append((request.step, request.rank, request.world))
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


@pytest.mark.parametrize("filled", [3, 9])
def test_the_next_batch_is_asked_for_before_its_turn_and_waited_for_in_its_turn(filled: int) -> None:
    orchestrator = Orchestrator(filled)
    with prefetching(orchestrator) as prefetch:
        assert prefetch.take(3) is None  # it was not asked for
        prefetch.begin_if_ahead(3)
        assert orchestrator.was_asked.wait(DEADLINE_S)
        orchestrator.filled = 9
        batch = prefetch.take(3)
        assert prefetch.take(3) is None
    assert batch is not None
    assert batch.step == 3
    assert set(orchestrator.asked) == {(3, 1, 2)}


@pytest.mark.parametrize(
    ("rank", "ahead", "step"),
    [
        (Rank(rank=0, dp_rank=0), 1, 3),  # it may have to give an engine weights first
        (Rank(), 0, 3),  # the batch cannot begin before these weights are live
        (Rank(), 1, 5),  # there is none
        (Rank(rank=3, cp_rank=1), 1, 3),  # the first of its team asks
    ],
)
def test_a_rank_that_could_not_have_a_batch_early_does_not_ask_for_it(rank: Rank, ahead: int, step: int) -> None:
    orchestrator = Orchestrator()
    with prefetching(orchestrator, rank=rank, ahead=ahead) as prefetch:
        prefetch.begin_if_ahead(step)
        assert prefetch.take(step) is None
    assert orchestrator.asked == []


@pytest.mark.parametrize(
    ("handle", "timeout_s", "error", "words"),
    [
        (lambda _: Refusal(error="another run's trainer"), DEADLINE_S, Refused, "another run's trainer"),
        (Orchestrator(filled=0), 0.05, DeadlineExceeded, r"trainer.1 waits .* for batch 1 from orchestrator"),
    ],
)
def test_a_refusal_and_a_deadline_are_raised_where_the_batch_is_wanted(
    handle: Any, timeout_s: float, error: type[Exception], words: str
) -> None:
    with prefetching(handle, timeout_s=timeout_s) as prefetch:
        prefetch.begin_if_ahead(1)
        with pytest.raises(error, match=words):
            prefetch.take(1)


def test_waste_and_imbalance_by_hand(world: World) -> None:
    batch = BatchReply(step=1, micro_batches=[], loss_tokens=1, num_rollouts=1)
    assert given_to_team(batch, world) is batch  # a rank on its own
    rows = micro_batches_of_rank(random_samples([40, 30, 18]), capacity=CAPACITY, rank=0, world=1)
    found = packing_metrics(rows, capacity=CAPACITY, cost=Cost(), world=world)
    assert found == {"perf/packing_waste": pytest.approx(1 - 88 / 96), "perf/rank_imbalance": pytest.approx(0.0)}
    rows = rows_of(random_samples([40, 18]), [[0], [1]])  # two ranks, two rounds: 40 beside 30 tokens, 18 beside 10
    two: Any = Rank(rank=0, dp_rank=0)
    assert packing_metrics(rows, capacity=CAPACITY, cost=Cost(), world=two) == {
        "perf/rank_imbalance": pytest.approx((40 + 18) / (98 / 2) - 1),  # what all wait for the slowest
        "perf/packing_waste": pytest.approx(1 - 98 / (4 * CAPACITY)),
    }
