"""verifiers v0: rewards that compare the rollouts of a group, rewards of single turns, judges."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from toy_environments import run_group, with_package
from trireme.orchestrator.environments.wire import Ask, Reply, RunTask
from trireme.orchestrator.environments.worker_process import RolloutFailed

pytestmark = pytest.mark.e2e  # uv makes a virtual environment


@pytest.fixture
def toys(tmp_path_factory) -> Callable[..., Any]:
    """Runs `use` on one of the toy environments; the first call installs them, with uv."""
    folder = tmp_path_factory.getbasetemp() / "packages"
    return lambda which, use, **args: with_package(folder, "trireme-toys", use, which=which, **args)


def test_a_group_is_scored_by_its_group_rewards_and_its_own_together(toys):
    async def use(environment):
        assert environment.group_rewards
        return await run_group(environment, ["5 and much more", "5", "six", "7"], index=5)

    outcomes = toys("shortest", use)
    assert [outcome.reward for outcome in outcomes] == [0.5, 1.5, 0.0, 1.0]
    assert [outcome.metrics["rank"] for outcome in outcomes] == [3.0, 0.0, 2.0, 0.0]
    assert [outcome.turn_rewards for outcome in outcomes] == [[]] * 4  # verifiers gives each turn the rollout's own


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("short", "returned 1 values for a group of 3 rollouts"),
        ("nan", "returned nan - expected a finite number"),
        ("number", "returned 1.0, a float for a group of 3 rollouts"),
    ],
)
def test_a_group_reward_of_the_wrong_shape_fails_its_whole_group(toys, value, words):
    async def use(environment):
        return await run_group(environment, ["a", "b", "c"])

    outcomes = toys("bad_group", use, value=value)
    assert [type(outcome) for outcome in outcomes] == [RolloutFailed] * 3
    assert all(outcome.stage == "score" and f"`judge` {words}" in outcome.error for outcome in outcomes)


async def turn_by_turn(question: Ask) -> Reply:
    return Reply(content="x", finish_reason="stop", prompt_ids=[1], completion_ids=[2, 3], logprobs=[-1.0, -1.0])


def test_a_turns_own_reward_stands_where_that_turn_was_asked_for(toys):
    async def use(environment):
        return await environment.run(RunTask(task="r", index=0), turn_by_turn)

    done = toys("stepwise", use)
    assert done.turn_rewards == [[0.5], [], [1.0]]  # the second Ask was an aside, the last turn was given nothing
    assert done.reward == 1.5


def test_what_scoring_fills_into_turns_is_no_reward_of_theirs(toys):
    async def use(environment):
        return await asyncio.gather(
            *(environment.run(RunTask(task=f"r{i}", index=0, group="g", group_size=2), turn_by_turn) for i in range(2))
        )

    for done in toys("stepwise_group", use):
        assert done.turn_rewards == [[0.5], [], [1.0], [7.0]]  # given by the environment, and by the second rubric
        assert done.reward == 3.0


def test_in_a_group_of_environments_each_keeps_its_own_way_of_scoring(toys):
    async def use(environment):
        assert environment.num_train == 40
        compared = run_group(environment, ["long", "x"], index=3, name="a")
        alone = run_group(environment, ["long", "x"], index=23, name="b")
        return await compared + await alone

    outcomes = toys("mixed_group", use)
    assert [outcome.reward for outcome in outcomes] == pytest.approx([0.0, 1.0, 1 / 3, 1 / 3])
    assert [outcome.info["env_id"] for outcome in outcomes] == ["compared"] * 2 + ["alone"] * 2
    assert (
        set(outcomes[0].metrics) == set(outcomes[3].metrics) == {"num_turns", "one_in_ten", "rank", "right", "shortest"}
    )


@contextmanager
def open_judge(verdict: Callable[[str], str]) -> Iterator[str]:
    """An OpenAI endpoint that answers each question with `verdict` of it. Yields its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            message = {"role": "assistant", "content": verdict(body["messages"][-1]["content"])}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_judge_at_an_openai_endpoint_gives_the_reward(toys):
    asked = []

    def verdict(question: str) -> str:
        asked.append(question)
        return "yes" if "Response:\n```\ncorrect\n```" in question else "no"

    async def use(environment):
        return await run_group(environment, ["correct", "wrong"], index=4)

    with open_judge(verdict) as base_url:
        outcomes = toys("judged", use, base_url=base_url)
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0]
    assert len(asked) == 2
    assert all("Ground truth answer:\n```\n4\n```" in question for question in asked)
    assert all("Question:\n```\nq4\n```" in question for question in asked)


def test_a_judge_that_does_not_answer_costs_the_rollout_and_is_no_zero(toys):
    async def use(environment):
        return await run_group(environment, ["x"])

    with open_judge(str) as base_url:
        pass  # it is closed again
    (outcome,) = toys("judged", use, base_url=base_url)
    assert isinstance(outcome, RolloutFailed)
    assert (outcome.stage, "Judge model API error" in outcome.error) == ("score", True)
