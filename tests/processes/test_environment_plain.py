"""Plain environments: examples and a reward function in one file, in real worker processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from toy_environments import ECHO, says, with_environment, write
from trireme.base.errors import ConfigError
from trireme.orchestrator.environments.wire import Ask, Done, Reply, RunTask
from trireme.orchestrator.environments.worker_process import RolloutFailed


def test_a_rollout_comes_back_scored_under_its_own_name(tmp_path):
    async def use(environment):
        assert (environment.num_train, environment.num_eval) == (5, 0)
        return await environment.run(RunTask(task="g1-r3", index=4), says("4"))

    done = with_environment(tmp_path, write(tmp_path, ECHO), use, args={"size": 5})
    assert isinstance(done, Done)
    assert (done.task, done.reward, done.answer, done.stop, done.truncated) == ("g1-r3", 1.0, "4", "stop", False)
    assert done.prompt == [{"role": "user", "content": "say 4"}]
    assert done.completion == [{"role": "assistant", "content": "4"}]


def test_rewards_may_be_async_with_named_metrics_and_any_field_of_the_example(tmp_path):
    code = """
        def load_environment(bonus):
            async def reward(completion, answer, level):
                return {"reward": bonus + level, "length": len(completion)}
            messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
            return {"dataset": [{"prompt": messages, "answer": 7, "level": 2}], "reward": reward,
                    "eval_dataset": [{"prompt": "eval", "answer": None, "level": 0}]}
    """

    async def use(environment):
        train = await environment.run(RunTask(task="t", index=0), says("four"))
        held_out = await environment.run(RunTask(task="e", split="eval", index=0), says("four"))
        return train, held_out

    train, held_out = with_environment(tmp_path, write(tmp_path, code), use, args={"bonus": 0.5})
    assert (train.reward, train.metrics, train.answer, len(train.prompt)) == (2.5, {"length": 4.0}, "7", 2)
    assert (held_out.reward, held_out.answer, held_out.prompt[0]["content"]) == (0.5, None, "eval")


@pytest.mark.parametrize(
    "value", ["float('nan')", "-float('inf')", "None", "'1.0'", "[1.0]", "{'reward': 1, 'm': None}"]
)
def test_a_reward_that_is_no_finite_number_is_an_error_and_never_a_zero(tmp_path, value):
    code = f"def dataset(): return [{{'prompt': 'p'}}]\ndef reward(completion): return {value}\n"

    async def use(environment):
        with pytest.raises(RolloutFailed, match=r"Reward function `(reward|m)` returned .* expected a finite number"):
            await environment.run(RunTask(task="r", index=0), says("x"))

    with_environment(tmp_path, write(tmp_path, code), use)


def test_a_reward_function_that_no_example_can_feed_is_found_at_load(tmp_path):
    code = "def dataset(): return [{'prompt': 'p', 'answer': 'a'}]\ndef reward(completion, truth): return 0.0\n"
    with pytest.raises(ConfigError, match="`reward` asks for truth - expected parameters among answer, completion"):
        with_environment(tmp_path, write(tmp_path, code), lambda environment: None)


def test_text_that_json_cannot_hold_arrives_all_the_same(tmp_path):
    code = """
        def dataset():
            return [{"prompt": "half a pair: \\ud83d", "answer": "é", "info": {"x": float("nan"), 3: {1, 2}}}]
        def reward(completion, answer):
            return 1.0
    """

    async def use(environment):
        return await environment.run(RunTask(task="r", index=0), says("\u2028 line \r\n separator"))

    done = with_environment(tmp_path, write(tmp_path, code), use)
    assert done.completion[0]["content"] == "\u2028 line \r\n separator"
    assert (done.answer, done.info["x"], done.reward) == ("é", "nan", 1.0)


GUESSING = """
    def dataset():
        return [{"prompt": "guess a number", "answer": "7"}]

    def respond(completion, answer, example):
        example["guesses"] = example.get("guesses", 0) + 1
        if completion == answer:
            return None
        return "higher" if int(completion) < int(answer) else {"role": "user", "content": "lower"}

    def reward(completion, answer, messages, example):
        assert len(messages) >= 2 * example["guesses"]
        return {"reward": completion == answer, "guesses": example["guesses"]}
"""


def says_in_turn(*contents: str) -> Callable[[Ask], Awaitable[Reply]]:
    """Each turn has as many tokens as letters."""
    left = list(contents)

    async def ask(question: Ask) -> Reply:
        text = left.pop(0)
        if not text:
            return Reply(error="530 tokens, the model takes 512", error_kind="overlong_prompt")
        reason = "length" if text.endswith("...") else "stop"
        return Reply(content=text, finish_reason=reason, completion_ids=[5] * len(text), logprobs=[-1.0] * len(text))

    return ask


@pytest.mark.parametrize(
    ("turns", "reward", "stop", "truncated"),
    [
        (["5", "9", "7"], 1.0, "ended_by_environment", False),
        (["1", "2", "3", "4", "7"], 0.0, "max_turns_reached", False),
        (["5", ""], 0.0, "prompt_too_long", True),
        (["5", "6..."], 0.0, "length", True),
    ],
)
def test_a_plain_environment_may_take_turns(tmp_path, turns, reward, stop, truncated):
    questions: list[Ask] = []
    answer = says_in_turn(*turns)

    async def ask(question: Ask) -> Reply:
        questions.append(question)
        return await answer(question)

    async def use(environment):
        return await environment.run(RunTask(task="r", index=0, max_turns=4), ask)

    done = with_environment(tmp_path, write(tmp_path, GUESSING), use)
    assert (done.reward, done.stop, done.truncated) == (reward, stop, truncated)
    assert [len(question.messages) for question in questions] == list(range(1, 2 * len(questions), 2))
    if reward:
        said = [message["content"] for message in done.completion]
        assert said == ["5", "higher", "9", "lower", "7"]
        assert done.metrics == {"guesses": 3.0}


def test_notes_in_an_example_are_the_rollouts_own(tmp_path):
    async def use(environment):
        first = await environment.run(RunTask(task="a", index=0), says_in_turn("5", "7"))
        return first, await environment.run(RunTask(task="b", index=0), says_in_turn("7"))

    first, second = with_environment(tmp_path, write(tmp_path, GUESSING), use)
    assert (first.metrics["guesses"], second.metrics["guesses"]) == (2.0, 1.0)


def test_a_respond_that_raises_costs_its_rollout(tmp_path):
    async def use(environment):
        with pytest.raises(RolloutFailed, match="rollout: ValueError: invalid literal") as raised:
            await environment.run(RunTask(task="r", index=0), says_in_turn("seven"))
        assert "int(completion)" in raised.value.traceback

    with_environment(tmp_path, write(tmp_path, GUESSING), use)


TURNWISE = """
    def dataset():
        return [{{"prompt": "count", "answer": "3"}}]

    async def respond(messages):
        return "on" if len(messages) < 6 else None

    def reward(completion):
        return {{"reward": 2, "turn_rewards": {turn_rewards}}}
"""


def test_turns_and_tokens_may_have_rewards_of_their_own(tmp_path):
    async def use(environment):
        return await environment.run(RunTask(task="r", index=0), says_in_turn("a", "bb", "ccc"))

    code = TURNWISE.format(turn_rewards="[0.5, None, [0, 0, 1.5]]")
    done = with_environment(tmp_path, write(tmp_path, code), use)
    assert (done.reward, done.turn_rewards, done.metrics) == (2.0, [[0.5], [], [0.0, 0.0, 1.5]], {})


@pytest.mark.parametrize(
    ("turn_rewards", "words"),
    [
        ("[1, 2, 3, 4]", "4 turns were given rewards, and the rollout had 3"),
        ("[1, [1, 2, 3]]", "Turn 1 was given 3 rewards and has 2 tokens"),
        ("0.5", "returned 0.5 as `turn_rewards` - expected a list"),
        ("['0.5']", "`reward, turn_rewards` returned '0.5', a str"),
        ("[[float('inf')]]", "`reward, turn_rewards` returned inf"),
        ("[1e31]", "a reward of 1e+31"),
    ],
)
def test_turn_rewards_of_the_wrong_shape_are_an_error_of_the_rollout(tmp_path, turn_rewards, words):
    async def use(environment):
        with pytest.raises(RolloutFailed) as raised:
            await environment.run(RunTask(task="r", index=0), says_in_turn("a", "bb", "ccc"))
        return str(raised.value)

    code = TURNWISE.format(turn_rewards=turn_rewards)
    assert words in with_environment(tmp_path, write(tmp_path, code), use)
