"""verifiers v0 environments, unmodified, in a virtual environment of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toy_environments import run_all, says, with_package
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.pool import open_environment
from trireme.orchestrator.environments.wire import Ask, Reply, RunTask, ToolCall
from trireme.orchestrator.environments.worker_process import RolloutFailed

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e  # uv makes a virtual environment


@pytest.fixture
def toys(tmp_path_factory) -> Callable[..., Any]:
    """Runs `use` on one of the toy environments; the first call installs them, with uv."""
    folder = tmp_path_factory.getbasetemp() / "packages"
    return lambda which, use, **args: with_package(folder, "trireme-toys", use, which=which, **args)


def test_verifiers_swallows_what_a_reward_raises_and_we_do_not(toys):
    async def use(environment):
        return await run_all(environment, says("x"), 20)

    outcomes = toys("raising", use)
    assert [isinstance(outcome, RolloutFailed) for outcome in outcomes] == [i % 10 == 0 for i in range(20)]
    assert (outcomes[0].stage, outcomes[0].error) == ("score", "ZeroDivisionError: division by zero")
    assert outcomes[3].reward == pytest.approx(1 / 3)


@pytest.mark.parametrize("value", ["none", "nan", "text"])
def test_a_verifiers_reward_that_is_no_number_is_an_error_even_with_weight_zero(toys, value):
    async def use(environment):
        with pytest.raises(RolloutFailed, match=r"score: RewardError: Reward function `judge` returned"):
            await environment.run(RunTask(task="r", index=0), says("x"))

    toys("returning", use, value=value)


def test_a_multi_turn_environment_runs_unmodified_and_sees_tokens_and_logprobs(toys):
    questions: list[Ask] = []

    async def use(environment):
        async def ask(question: Ask) -> Reply:
            questions.append(question)
            turn = len(questions)
            return Reply(
                content=f"turn {turn}",
                finish_reason="stop",
                prompt_ids=[7] * (10 * turn),
                completion_ids=[8, 9],
                logprobs=[-0.5, -0.25],
            )

        return await environment.run(RunTask(task="r", index=2, sampling={"temperature": 0.7}), ask)

    done = toys("multi_turn", use)
    assert [len(question.messages) for question in questions] == [1, 3, 5]
    assert questions[2].messages == [
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "turn 1"},
        {"role": "user", "content": "again 1"},
        {"role": "assistant", "content": "turn 2"},
        {"role": "user", "content": "again 2"},
    ]
    assert {question.sampling["temperature"] for question in questions} == {0.7}
    assert [message["role"] for message in done.completion] == ["assistant", "user"] * 3
    assert done.reward == 10 + 20 + 30 - 3 * 0.75
    assert (done.metrics["num_turns"], done.stop, done.truncated) == (3.0, "has_final_env_response", False)


def test_the_runs_own_turn_limit_ends_and_scores_a_rollout(toys):
    async def use(environment):
        return await environment.run(RunTask(task="r", index=0, max_turns=2), says("x"))

    done = toys("multi_turn", use)
    assert (done.metrics["num_turns"], done.stop, done.truncated) == (2.0, "max_turns_reached", False)


def test_a_conversation_that_outgrows_the_context_is_truncated_and_scored(toys):
    async def use(environment):
        async def ask(question: Ask) -> Reply:
            if len(question.messages) > 1:
                return Reply(error="530 tokens, the model takes 512", error_kind="overlong_prompt")
            return Reply(content="x", finish_reason="stop", prompt_ids=[1], completion_ids=[2], logprobs=[-1.0])

        return await environment.run(RunTask(task="r", index=0), ask)

    done = toys("multi_turn", use)
    assert (done.stop, done.truncated, done.reward, len(done.completion)) == ("prompt_too_long", True, 0.0, 1)


def test_an_engine_error_in_verifiers_fails_the_rollout_unscored(toys):
    async def use(environment):
        async def ask(question: Ask) -> Reply:
            return Reply(error="the engine died", error_kind="engine")

        with pytest.raises(RolloutFailed, match="ModelError: the engine died") as raised:
            await environment.run(RunTask(task="r", index=0), ask)
        assert raised.value.stage == "rollout"

    toys("multi_turn", use)


@pytest.mark.parametrize("limit", [None, 30.0])
def test_a_cancelled_turn_ends_a_verifiers_rollout(toys, limit):
    async def use(environment):
        async def ask(question: Ask) -> Reply:
            return Reply(error="too old", error_kind="cancelled")

        with pytest.raises(RolloutFailed, match="rollout: "):
            await environment.run(RunTask(task="r", index=0), ask)

    toys("multi_turn", use, timeout_seconds=limit)


def test_an_empty_completion_is_scored(toys):
    async def use(environment):
        return await environment.run(RunTask(task="r", index=3), says(""))

    assert toys("raising", use).reward == pytest.approx(1 / 3)


def test_tool_calls_are_converted_both_ways(toys):
    questions: list[Ask] = []

    async def use(environment):
        async def ask(question: Ask) -> Reply:
            questions.append(question)
            if len(questions) == 1:
                call = ToolCall(id="c1", name="add", arguments='{"a": 1, "b": 2}')
                return Reply(tool_calls=[call], finish_reason="tool_calls")
            return Reply(content=question.messages[-1]["content"], finish_reason="stop")

        return await environment.run(RunTask(task="r", index=0), ask)

    done = toys("tools", use)
    assert questions[0].tools[0]["function"]["name"] == "add"
    assert set(questions[0].tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    assert questions[1].messages[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    assert (done.reward, done.metrics["add_calls"], done.stop) == (1.0, 1.0, "no_tools_called")


def test_a_group_of_environments_scores_each_example_with_its_own_rubric(toys):
    async def use(environment):
        assert environment.num_train == 4
        return await run_all(environment, says("x"), 4)

    outcomes = toys("group", use)
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0, 2.0, 2.0]
    assert [outcome.info["env_id"] for outcome in outcomes] == ["first", "first", "second", "second"]


def test_an_image_in_a_prompt_is_refused_in_words(toys):
    async def use(environment):
        with pytest.raises(RolloutFailed, match="a part of type 'image_url' - expected text only"):
            await environment.run(RunTask(task="r", index=0), says("x"))

    toys("picture", use)


def test_turns_that_an_environment_asks_for_at_once_are_answered_at_once(toys):
    running = most = 0

    async def use(environment):
        async def ask(question: Ask) -> Reply:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.1)
            running -= 1
            return Reply(content=question.messages[-1]["content"], finish_reason="stop")

        return await environment.run(RunTask(task="r", index=0), ask)

    assert toys("parallel", use).reward == 3.0
    assert most == 3


def test_an_environment_that_stops_waiting_for_a_turn_ends_the_turn(toys):
    async def use(environment):
        async def ask(question: Ask) -> Reply:
            return await asyncio.sleep(60)

        return await asyncio.wait_for(environment.run(RunTask(task="r", index=0), ask), 10)

    done = toys("hasty", use)
    assert (done.stop, done.reward) == ("timeout_reached", 0.25)


def test_the_reverse_text_package_rewards_the_reversed_text(tmp_path):
    async def use(environment):
        async def ask(question: Ask) -> Reply:
            text = question.messages[-1]["content"]
            return Reply(content=f"<reversed_text>{text[::-1]}</reversed_text>", finish_reason="stop")

        assert (environment.num_train, environment.num_eval) == (50, 10)
        right = await environment.run(RunTask(task="right", index=49), ask)
        wrong = await environment.run(RunTask(task="wrong", split="eval", index=9), says("<reversed_text>"))
        return right, wrong

    async def main():
        config = EnvironmentConfig(id="primeintellect/reverse-text", args={"num_train": 50, "num_eval": 10})
        root = REPOSITORY / "environments"
        async with open_environment(config, logs=tmp_path / "logs", root=root, cache=tmp_path / "cache") as environment:
            return await use(environment)

    right, wrong = asyncio.run(main())
    assert (right.reward, right.metrics["exact_match"], right.answer) == (1.0, 1.0, right.prompt[-1]["content"][::-1])
    assert wrong.reward == 0.0
