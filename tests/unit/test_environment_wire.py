"""What comes from a worker is taken apart with suspicion: rewards of turns, groups, sizes."""

from __future__ import annotations

import contextlib
import json
from typing import Any
from unittest import mock

import msgspec
import pytest

from trireme.orchestrator.environments import wire
from trireme.orchestrator.environments.wire import Done, Error, Garbage, Held, Ready, RunTask

DONE = {"type": "done", "task": "r1.0", "reward": 1, "metrics": {}, "prompt": [], "completion": [], "example_id": 3}


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


@pytest.mark.parametrize("turn_rewards", [[], [[]], [[0.5], [], [1, 2, -3.5]], [[1e30], [-1e30]]])
def test_rewards_of_turns_come_as_they_were_sent(turn_rewards):
    done = wire.decode(line(DONE | {"turn_rewards": turn_rewards}))
    assert isinstance(done, Done)
    assert done.turn_rewards == turn_rewards


@pytest.mark.parametrize(
    "turn_rewards", [None, 0.5, [0.5], [None], [[None]], [["1"]], [[1e31]], [[0.5], [-1e31]], [[[0.5]]], {"0": [1]}]
)
def test_rewards_of_turns_that_break_the_form_cost_their_rollout_and_nothing_else(turn_rewards):
    error = wire.decode(line(DONE | {"turn_rewards": turn_rewards}))
    assert isinstance(error, Error)
    assert (error.task, error.stage) == ("r1.0", "rollout")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_no_number_that_is_not_finite_gets_through(number):
    data = line(DONE | {"turn_rewards": [["x"]]}).replace(b'"x"', number.encode())
    with contextlib.suppress(Garbage):
        assert isinstance(wire.decode(data), Error)


def test_a_worker_without_the_new_fields_is_understood():
    done = wire.decode(line(DONE))
    ready = wire.decode(line({"type": "ready", "num_train": 1, "num_eval": 0, "name": "x", "versions": {}}))
    assert isinstance(done, Done)
    assert isinstance(ready, Ready)
    assert (done.turn_rewards, ready.group_rewards) == ([], False)


def test_a_held_rollout_is_named_and_a_task_carries_its_group():
    assert wire.decode(b'{"type":"held","task":"r1.0"}') == Held(task="r1.0")
    sent = msgspec.json.decode(wire.encode(RunTask(task="17-3.0", index=4, group="17", group_size=16)))
    assert (sent["type"], sent["group"], sent["group_size"]) == ("run", "17", 16)


ASK = {"type": "ask", "task": "r1.0", "call": "1", "messages": [], "sampling": {}}
USER = {"role": "user", "content": "hello"}


def nested(levels: int) -> list:
    return [nested(levels - 1)] if levels > 1 else []


@pytest.mark.parametrize(
    "odd",
    [
        ASK | {"messages": [USER | {"role": 0}]},
        ASK | {"messages": [USER | {"role": ""}]},
        ASK | {"messages": [USER | {"role": "x" * 65}]},
        ASK | {"messages": [USER | {"content": 5}]},
        ASK | {"messages": [USER | {"content": ["a"]}]},
        ASK | {"messages": [USER | {"content": {}}]},
        ASK | {"messages": [{"content": "no role"}]},
        ASK | {"messages": [USER | {"tool_calls": "add(1)"}]},
        ASK | {"messages": [USER | {"tool_calls": [5]}]},
        ASK | {"messages": [USER | {"tool_calls": [{"function": None}]}]},
        ASK | {"messages": [USER | {"tool_calls": [{"function": {"name": 5}}]}]},
        ASK | {"tools": [{"a": nested(32)}]},
        DONE | {"info": {"deep": nested(32)}},
        DONE | {"completion": [{"role": "user", "content": nested(31)}]},
        DONE | {"metrics": {'a" :data-x="alert()" b="': 1.0}},
        DONE | {"metrics": {"": 1.0}},
        DONE | {"metrics": {"x" * 201: 1.0}},
        DONE | {"metrics": {str(number): 1.0 for number in range(501)}},
    ],
)
def test_a_message_that_no_reader_expects_costs_its_rollout(odd):
    error = wire.decode(line(odd))
    assert isinstance(error, Error)
    assert error.task == "r1.0"


def test_what_readers_expect_gets_through():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER | {"tool_calls": None}]
    assert wire.decode(line(ASK | {"messages": messages})).messages == messages
    info, metrics = {"deep": nested(31)}, {"a/b@2:c+d-e f_g.h": 1.0} | {str(number): 1.0 for number in range(499)}
    done = wire.decode(line(DONE | {"info": info, "metrics": metrics}))
    assert (done.info, done.metrics) == (info, metrics)


def test_an_answer_too_deep_for_the_decoder_costs_its_rollout_and_not_its_worker():
    text = line(DONE).replace(b'"metrics": {}', b'"info": ' + b"[" * 100_000 + b"]" * 100_000)
    assert wire.decode(text) == Error(task="r1.0", stage="rollout", error=mock.ANY, traceback="")
