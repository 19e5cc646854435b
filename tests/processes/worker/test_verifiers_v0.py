"""verifiers v0 environments, unmodified, in a virtual environment of their own: turns, tools, groups, judges."""

import asyncio

import pytest

from support.engines.fake_chat import FakeChat, completion
from support.runs.toy_environments import (
    asked_and_done,
    fills_up,
    in_turn,
    never,
    noting,
    refuses,
    run_all,
    run_group,
    run_one,
    says,
    talk,
)
from trireme.journal.model_turn import ToolCall
from trireme.orchestrator.session.session import RolloutFailed, Session
from trireme.orchestrator.session.wire import Ask, Reply, RunTask

pytestmark = pytest.mark.xdist_group("packages")
MULTI_TURN, WITH_A_TIMEOUT, TOOLS, PARALLEL, STEPWISE = range(0, 100, 20)  # examples of `alone`
SHORTEST, RAISING, SHORT, NAN, STEPWISE_GROUP = range(0, 100, 20)  # examples of `groups`


@pytest.fixture(scope="module")
def toys(on):
    return lambda which, use, **args: on("trireme-toys", use, which=which, **args)


def test_verifiers_swallows_what_a_reward_raises_or_returns_and_we_do_not(toys):
    async def use(environment):
        return await run_all(environment, says("x"), 20), await run_one(environment, says(""), 3)

    outcomes, empty = toys("raising", use)
    failed = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, RolloutFailed)}
    assert list(failed) == [0, 10]
    assert (failed[0].stage, failed[0].error) == ("score", "ZeroDivisionError: division by zero")
    assert "judge" not in outcomes[13].metrics  # it returned None, and its weight is 0
    assert outcomes[3].reward == empty.reward == pytest.approx(1 / 3)  # an empty completion is scored


def test_verifiers_multi_turn_environment_runs_unmodified(toys):
    tokens = {"finish_reason": "stop", "completion_ids": [8, 9], "logprobs": [-0.5, -0.25]}
    replies = [Reply(content=f"turn {turn}", prompt_ids=[7] * (10 * turn), **tokens) for turn in (1, 2, 3)]
    ask, questions = noting(in_turn(*replies))
    done = toys("alone", lambda environment: run_one(environment, ask, MULTI_TURN + 2, sampling={"temperature": 0.7}))
    assert [len(question.messages) for question in questions] == [1, 3, 5]
    assert questions[2].messages == talk("q2", "turn 1", "again 1", "turn 2", "again 2")
    assert {question.sampling["temperature"] for question in questions} == {0.7}
    assert [message["role"] for message in done.completion] == ["assistant", "user"] * 3
    assert done.reward == 10 + 20 + 30 - 3 * 0.75
    assert (done.metrics["num_turns"], done.stop, done.truncated) == (3.0, "has_final_env_response", False)


def test_the_orchestrator_sees_what_an_environment_asks_for_and_decides(toys):
    ask, questions = noting(says("x"))
    toys("quiet", lambda environment: run_one(environment, ask, 0, sampling={"temperature": 0.7, "top_p": 0.5}))
    asked = {"temperature": 0.3, "top_p": 0.5, "chat_template_kwargs": {"enable_thinking": False}}
    assert [question.sampling for question in questions] == [asked]


def test_verifiers_rollout_cut_at_a_turn_or_context_limit_is_scored(toys):
    done = toys("alone", lambda environment: run_one(environment, says("x"), MULTI_TURN, max_turns=2))
    assert (done.metrics["num_turns"], done.stop, done.truncated) == (2.0, "max_turns_reached", False)
    done = toys("alone", lambda environment: run_one(environment, fills_up(says("x")), MULTI_TURN))
    assert (done.stop, done.truncated, done.reward, len(done.completion)) == ("prompt_too_long", True, 1.5, 1)


@pytest.mark.parametrize(
    ("kind", "words", "index"),
    [
        ("engine", "rollout: ModelError: no answer", MULTI_TURN),
        ("cancelled", "rollout: ", MULTI_TURN),
        ("cancelled", "rollout: ", WITH_A_TIMEOUT),
    ],
)
def test_a_turn_without_an_answer_fails_the_rollout_unscored(toys, kind, words, index):
    with pytest.raises(RolloutFailed, match=words):
        toys("alone", lambda environment: run_one(environment, refuses("no answer", kind), index))


def test_tool_calls_are_converted_both_ways(toys):
    call = ToolCall(id="c1", name="add", arguments='{"a": 1, "b": 2}')
    calling = Reply(tool_calls=[call], finish_reason="tool_calls")
    ask, questions = noting(in_turn(calling, Reply(content="3", finish_reason="stop")))
    done = toys("alone", lambda environment: run_one(environment, ask, TOOLS))
    function = questions[0].tools[0]["function"]
    assert (function["name"], set(function["parameters"]["properties"])) == ("add", {"a", "b"})
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    assert questions[1].messages[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    assert (done.reward, done.metrics["add_calls"], done.stop) == (1.0, 1.0, "no_tools_called")


def test_turns_that_an_environment_asks_for_at_once_are_answered_at_once(toys):
    """None of the first three gets an answer before all of them have been asked for."""
    num_asked, all_asked = 0, asyncio.Event()

    async def ask(question: Ask) -> Reply:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 3:
            all_asked.set()
        await all_asked.wait()
        return Reply(content=question.messages[-1]["content"], finish_reason="stop")

    assert toys("alone", lambda environment: run_one(environment, ask, PARALLEL)).reward == 3.0


def test_verifiers_turn_reward_belongs_to_the_requested_turn(toys):
    async def use(environment):
        tasks = [RunTask(task=f"r{i}", index=STEPWISE_GROUP, group="g", group_size=2) for i in range(2)]
        return await asyncio.gather(*(environment.run(Session(task, says("x"))) for task in tasks))

    alone = toys("alone", lambda environment: run_one(environment, says("x"), STEPWISE))
    assert (alone.reward, alone.turn_rewards) == (1.5, [[0.5], [], [1.0]])  # an aside, and nothing for the last turn
    for done in toys("groups", use):  # the last one is given by the second rubric
        assert (done.reward, done.turn_rewards) == (3.0, [[0.5], [], [1.0], [7.0]])


def test_verifiers_group_is_scored_by_its_own_environment(toys):
    async def use(environment):
        assert (environment.group_rewards, environment.num_train) == (True, 100)
        compared = await run_group(environment, ["5 and much more", "5", "six", "7"], index=SHORTEST + 5)
        alone = await run_group(environment, ["long", "x"], index=RAISING + 3)
        return compared, alone, *[await run_group(environment, ["a", "b", "c"], index=i) for i in (SHORT, NAN)]

    compared, alone, short, nan = toys("groups", use)
    assert [outcome.reward for outcome in (*compared, *alone)] == pytest.approx([0.5, 1.5, 0.0, 1.0, 1 / 3, 1 / 3])
    assert [outcome.metrics["rank"] for outcome in compared] == [3.0, 0.0, 2.0, 0.0]
    assert [outcome.turn_rewards for outcome in compared] == [[]] * 4  # verifiers gives each turn the rollout's own
    assert [outcome.info["env_id"] for outcome in (*compared, *alone)] == ["compared"] * 4 + ["alone"] * 2
    names = {"num_turns", "one_in_ten", "judge", "rank", "right", "shortest", "first", "second"}
    assert set(compared[0].metrics) == set(alone[1].metrics) == names
    for outcomes, words in ((short, "1 values for a group of 3 rollouts"), (nan, "nan - expected a finite number")):
        assert [(type(outcome), outcome.stage) for outcome in outcomes] == [(RolloutFailed, "score")] * 3
        assert all(f"`judge` returned {words}" in outcome.error for outcome in outcomes)


def test_a_picture_of_a_data_set_is_shown(toys):
    url = "data:image/png;base64,cGl4ZWxz"
    asked, done = toys("pictures", asked_and_done, url=url)
    picture, text = {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}
    assert asked == done.prompt == [{"role": "user", "content": [picture, text]}]
    assert done.reward == 1.0


def test_verifiers_timeout_cancels_the_open_turn_before_scoring(toys, tmp_path):
    async def ask(question: Ask) -> Reply:
        try:
            return await never(question)
        finally:
            (tmp_path / "cancelled").touch()

    done = toys("hasty", lambda environment: run_one(environment, ask), cancelled=str(tmp_path / "cancelled"))
    assert (done.stop, done.reward) == ("timeout_reached", 0.25)


def test_a_judge_at_an_openai_endpoint_gives_the_reward(toys):
    judge, asked = FakeChat(), []

    def verdict(number: int) -> tuple[int, dict]:
        asked.append(judge.requests[number]["messages"][-1]["content"])
        return 200, completion("yes" if "Response:\n```\ncorrect\n```" in asked[-1] else "no")

    judge.answers = verdict
    with judge.running():
        outcomes = toys("judged", lambda e: run_group(e, ["correct", "wrong"], index=4), base_url=judge.url)
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0]
    assert [all(f"\n```\n{text}\n```" in question for text in ("q4", "4")) for question in asked] == [True] * 2
    (outcome,) = toys("judged", lambda environment: run_group(environment, ["x"]), base_url=judge.url)
    assert (type(outcome), outcome.stage) == (RolloutFailed, "score")
    assert "Judge model API error" in outcome.error
