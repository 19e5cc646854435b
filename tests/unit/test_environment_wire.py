"""What comes from a worker is taken apart with suspicion: rewards of turns, groups, sizes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest

from trireme.orchestrator.environments import wire
from trireme.orchestrator.environments.wire import Error, Garbage, Held, RunTask

DONE = {"type": "done", "task": "r1.0", "reward": 1, "metrics": {}, "prompt": [], "completion": [], "example_id": 3}


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


@pytest.mark.parametrize("turn_rewards", [[], [[]], [[0.5], [], [1, 2, -3.5]], [[1e30], [-1e30]]])
def test_rewards_of_turns_come_as_they_were_sent(turn_rewards):
    assert wire.decode(line(DONE | {"turn_rewards": turn_rewards})).turn_rewards == turn_rewards


@pytest.mark.parametrize(
    "turn_rewards", [None, 0.5, [0.5], [None], [[None]], [["1"]], [[1e31]], [[0.5], [-1e31]], [[[0.5]]], {"0": [1]}]
)
def test_rewards_of_turns_that_break_the_form_cost_their_rollout_and_nothing_else(turn_rewards):
    error = wire.decode(line(DONE | {"turn_rewards": turn_rewards}))
    assert (type(error), error.task, error.stage) == (Error, "r1.0", "rollout")


def test_no_number_that_is_not_finite_gets_through():
    for number in ("NaN", "Infinity", "1e999"):
        data = line(DONE | {"turn_rewards": [["x"]]}).replace(b'"x"', number.encode())
        with contextlib.suppress(Garbage):
            assert isinstance(wire.decode(data), Error)


def test_messages_of_workers_with_and_without_the_newer_fields_are_understood():
    ready = wire.decode(line({"type": "ready", "num_train": 1, "num_eval": 0, "name": "x", "versions": {}}))
    assert (wire.decode(line(DONE)).turn_rewards, ready.group_rewards) == ([], False)
    assert wire.decode(b'{"type":"held","task":"r1.0"}') == Held(task="r1.0")
    sent = msgspec.json.decode(wire.encode(RunTask(task="17-3.0", index=4, group="17", group_size=16)))
    assert (sent["type"], sent["group"], sent["group_size"]) == ("run", "17", 16)
