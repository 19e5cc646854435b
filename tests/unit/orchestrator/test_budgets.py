"""What sessions of the gateway may make it keep and read."""

import asyncio

import pytest

from trireme.orchestrator.gateway import budgets
from trireme.orchestrator.gateway.budgets import Inflow, KeptResponses
from trireme.orchestrator.gateway.dialects.turn import Rejected


def test_kept_responses_hold_each_message_once():
    kept = KeptResponses()
    question, answer = {"role": "user", "content": "a" * 10_000}, {"role": "assistant", "content": "b"}
    for number in range(1, 4):
        kept.add(f"resp_{number}", [question, answer] * number)
    assert kept.find("resp_2") == [question, answer] * 2
    assert kept.num_bytes < 13_000
    kept.clear()
    assert kept.num_bytes == 0 == len(kept._messages)


def test_the_oldest_responses_make_room(monkeypatch):
    monkeypatch.setattr(budgets, "LARGEST_KEPT", 25_000)
    kept = KeptResponses()
    for number in range(1, 20):
        kept.add(f"resp_{number}", [{"role": "user", "content": str(number) * 10_000}][:1])
        assert kept.num_bytes <= 25_000
    with pytest.raises(Rejected, match="Send the whole conversation"):
        kept.find("resp_17")
    assert len(kept.find("resp_19")) == 1


def test_bodies_cost_time_beyond_a_burst(monkeypatch):
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(budgets.time, "monotonic", lambda: 1000.0)
    monkeypatch.setattr(budgets.asyncio, "sleep", sleep)
    inflow = Inflow("this session", most_bytes=1_000_000, rate=100_000)
    for num_bytes in (600_000, 400_000, 100_000, 1):
        inflow.take(num_bytes)
        inflow.settle(num_bytes)
        asyncio.run(inflow.wait_for_turn())
    assert waits == pytest.approx([0, 0, 1, 1 + budgets.SMALLEST_COST / 100_000])
