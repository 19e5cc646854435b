"""Plain environments, examples and a reward function in one file, and their rollouts in real worker processes."""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from toy_environments import (
    ECHO,
    asked_and_done,
    never,
    noting,
    open_toy,
    refuses,
    run_all,
    run_one,
    running,
    says,
    shared_toys,
    write,
)
from trireme.orchestrator.environments.open_rollout import OpenRollout, RolloutFailed
from trireme.orchestrator.environments.wire import Ask, Done, GaveUp, Reply, RunTask

pytestmark = pytest.mark.xdist_group("plain environments")  # one process, so that tests share workers


@pytest.fixture(scope="module")
def on(tmp_path_factory):
    with shared_toys(tmp_path_factory.mktemp("toys")) as on:
        yield on


OF_ANY_FORM = """
    def load_environment(bonus):
        async def reward(completion, answer, level):
            return {"reward": bonus + level, "length": len(completion)}
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        info = {"x": float("nan"), 3: {1, 2}}
        return {"dataset": [{"prompt": messages, "answer": 7, "level": 2},
                            {"prompt": "half a pair: \\ud83d", "answer": "é", "info": info, "level": 0}],
                "reward": reward, "eval_dataset": [{"prompt": "eval", "answer": None, "level": 0}]}
"""


def test_rewards_may_be_async_with_named_metrics_and_any_field_of_the_example(on):
    async def use(environment):
        assert (environment.num_train, environment.num_eval) == (2, 1)
        train = await run_one(environment, says("four"), task="g1-r3")
        return train, await run_one(environment, says("four"), split="eval")

    train, held_out = on(OF_ANY_FORM, use, args={"bonus": 0.5})
    assert (train.task, train.reward, train.metrics, train.answer) == ("g1-r3", 2.5, {"length": 4.0}, "7")
    assert (train.stop, train.truncated, len(train.prompt)) == ("stop", False, 2)
    assert (held_out.reward, held_out.answer) == (0.5, None)
    assert held_out.prompt == [{"role": "user", "content": "eval"}]
    assert held_out.completion == [{"role": "assistant", "content": "four"}]
    # text that JSON cannot hold arrives all the same
    done = on(OF_ANY_FORM, lambda e: run_one(e, says("\u2028 line \r\n separator"), 1), args={"bonus": 0.5})
    assert done.completion[0]["content"] == "\u2028 line \r\n separator"
    assert (done.answer, done.info["x"], done.reward) == ("é", "nan", 0.5)


SHOWING = """
    import pathlib

    folder = pathlib.Path(__file__).parent

    def dataset(urls):
        (folder / "in").mkdir(exist_ok=True)
        for name in ("in/a.png", "notes.txt", "../outside.png"):
            (folder / name).write_bytes(b"pixels")
        if not (folder / "in/link.png").is_symlink():
            (folder / "in/link.png").symlink_to("../../outside.png")
        text = {"type": "text", "text": "look"}
        pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return [{"prompt": [{"role": "user", "content": [text, p]}], "url": u} for p, u in zip(pictures, urls)]

    def respond(messages, example):
        return None if len(messages) > 2 else [{"role": "user", "content": [{"type": "text", "text": "sure?"}]}]

    def reward(messages, url):
        return float(messages[0]["content"][1]["image_url"]["url"] == url)
"""
PIXELS = "data:image/png;base64,cGl4ZWxz"
SHOWN = [PIXELS, "in/a.png", "in/../in/a.png", "file:in/a.png"]
ELSEWHERE = ["../outside.png", "in/link.png", "/etc/x.png", "file:///etc/x.png", "file://host/in/a.png", "notes.txt"]
ELSEWHERE += ["http://host/a.png", "data:text/html;base64,AAAA", "data:image/png,raw"]


def test_pictures_of_its_folder_are_shown_and_one_elsewhere_is_an_error_of_its_rollout(on):
    async def use(environment):
        rollouts = [asked_and_done(environment, place) for place in range(len(SHOWN + ELSEWHERE))]
        return await asyncio.gather(*rollouts, return_exceptions=True)

    outcomes = on(SHOWING, use, args={"urls": SHOWN + ELSEWHERE})
    for asked, done in outcomes[: len(SHOWN)]:
        assert asked[0]["content"][1] == {"type": "image_url", "image_url": {"url": PIXELS}}
        assert (asked[2]["content"], done.prompt) == ("sure?", asked[:1])
        assert done.reward == 1.0  # it sees what the environment wrote
    for url, failure in zip(ELSEWHERE, outcomes[len(SHOWN) :], strict=True):
        assert re.match(r"rollout: ValueError: .* expected data:image/...;base64", str(failure)), failure
        assert repr(url) in failure.error


EVALUATING = """
    import asyncio, pathlib, sys

    noted = pathlib.Path(__file__).with_name("noted")

    def dataset(codes):
        return [{"prompt": f"say {i}", "answer": str(i), "code": code} for i, code in enumerate(codes)]

    async def respond(messages, example):
        return "on" if "turn_rewards" in example["code"] and len(messages) < 6 else None

    def reward(completion, answer, code):
        return eval(code)

    async def note_the_end():
        noted.write_text("scoring")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            noted.write_text("cancelled")
            raise
"""
FAILURES = {
    "{}['no such thing']": ("score", "KeyError: 'no such thing'"),
    "1 / 0": ("score", "ZeroDivisionError: division by zero"), "sys.exit(3)": ("score", "SystemExit: 3"),
    "(_ for _ in ()).throw(BaseException('panic'))": ("score", "BaseException: panic"),
    "(_ for _ in ()).throw(type('Bad', (Exception,), {'__str__': lambda _: 1 / 0}))": ("score", "Bad: (no message)"),
    "asyncio.sleep(60)": ("timeout", "not finished after 1 s (`rollout_timeout_s`)"),
    "float('nan')": ("score", "`reward` returned nan - expected a finite number"),
    "-float('inf')": ("score", "`reward` returned -inf - expected a finite number"),
    "None": ("score", "`reward` returned None, a NoneType - expected a finite number"),
    "'1.0'": ("score", "`reward` returned '1.0', a str"), "[1.0]": ("score", "`reward` returned [1.0], a list"),
    "{'reward': 1, 'm': None}": ("score", "`m` returned None"), "{'quality': 1.0}": ("score", "has no `reward`"),
    "dict(reward=1, turn_rewards=0.5)": ("score", "returned 0.5 as `turn_rewards` - expected a list"),
    "dict(reward=1, turn_rewards=['0.5'])": ("score", "`reward, turn_rewards` returned '0.5', a str"),
    "dict(reward=1, turn_rewards=[[float('inf')]])": ("score", "`reward, turn_rewards` returned inf"),
    "dict(reward=1, turn_rewards=[1e31])": ("rollout", "a reward of 1e+31"),
}  # fmt: skip
RIGHT, _, NOTING = range(len(FAILURES), len(FAILURES) + 3)
CODES = [*FAILURES, "completion == answer", "dict(reward=2, turn_rewards=[0.5, None, [0, 0, 1.5]])", "note_the_end()"]
EVALUATED = {"args": {"codes": CODES}, "rollout_timeout_s": 1}


def says_in_turn(*contents: str) -> Callable[[Ask], Awaitable[Reply]]:
    left = list(contents)

    async def ask(question: Ask) -> Reply:
        text = left.pop(0)
        if not text:
            return Reply(error="530 tokens, the model takes 512", error_kind="overlong_prompt")
        reason = "length" if text.endswith("...") else "stop"
        return Reply(content=text, finish_reason=reason, completion_ids=[5] * len(text), logprobs=[-1.0] * len(text))

    return ask


def test_a_reward_that_fails_costs_its_rollout_alone_and_is_never_a_zero(on):
    async def use(environment):
        rollouts = [run_one(environment, says_in_turn("a", "bb", "ccc"), i, task=f"r{i}") for i in range(NOTING)]
        outcomes, log = await asyncio.gather(*rollouts, return_exceptions=True), environment._workers[0].log_file
        return outcomes, log.read_text(), environment.counts, environment.num_restarts

    (*failures, wrong, turnwise), log, *numbers = on(EVALUATING, use, **EVALUATED)
    for failure, (stage, words) in zip(failures, FAILURES.values(), strict=True):
        assert (type(failure), failure.stage) == (RolloutFailed, stage), failure
        assert words in failure.error
    assert "return eval(code)" in failures[0].traceback
    assert wrong.reward == 0.0
    assert (turnwise.reward, turnwise.metrics) == (2.0, {})
    assert turnwise.turn_rewards == [[0.5], [], [0.0, 0.0, 1.5]]
    assert [f"of train example {index} failed (score):" in log for index in (0, 1, RIGHT)] == [True, True, False]
    assert numbers == [Counter(score_error=len(FAILURES) - 2, timeout=1, rollout_error=1), 0]


def test_cancelling_the_caller_cancels_the_rollout_in_the_worker(on):
    async def use(environment):
        async def until(words: str) -> None:
            noted = environment._workers[0].log_file.parents[1] / "noted"
            while not noted.exists() or noted.read_text() != words:
                await asyncio.sleep(0.01)

        running = asyncio.create_task(run_one(environment, says("x"), NOTING))
        await until("scoring")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until("cancelled")

    on(EVALUATING, use, **EVALUATED | {"rollout_timeout_s": 30})


def test_a_turn_that_is_given_up_after_its_answer_was_sent_is_named_in_the_result():
    async def use():
        sent: asyncio.Queue = asyncio.Queue()
        rollout = OpenRollout(RunTask(task="r", index=0), says("x"), 60, 0, on_held=lambda: None)
        following = asyncio.create_task(rollout.follow(sent.put_nowait))
        await asyncio.sleep(0)
        rollout.deliver(Ask(task="r", call="1", messages=[], sampling={}))
        await sent.get()
        for message in (GaveUp(task="r", call="1"), Done(task="r", reward=1.0)):
            rollout.deliver(message)
        return await following

    assert asyncio.run(use()).given_up == ["1"]


def test_a_name_used_again_never_gets_the_answer_of_its_cancelled_first_attempt(on):
    async def use(environment):
        first_asked = asyncio.Event()

        async def ask_first(question: Ask) -> Reply:
            first_asked.set()
            return await never(question)

        first = asyncio.create_task(run_one(environment, ask_first, 1))
        await first_asked.wait()
        first.cancel()
        return await run_one(environment, says("2"), 2)

    assert on(ECHO, use).answer == "2"


def test_what_ask_raises_comes_out_of_run(on):
    async def ask(question: Ask) -> Reply:
        raise TimeoutError("all engines are gone")

    with pytest.raises(TimeoutError, match="all engines are gone"):
        on(ECHO, lambda environment: run_one(environment, ask))


@pytest.mark.parametrize("kind", ["engine", "overlong_prompt", "cancelled"])
def test_a_turn_that_the_orchestrator_refuses_fails_the_rollout_with_its_words(on, kind):
    with pytest.raises(RolloutFailed, match=r"rollout: .*the words"):
        on(ECHO, lambda environment: run_one(environment, refuses("the words", kind)))


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


@pytest.mark.parametrize(
    ("turns", "reward", "stop", "truncated", "num_guesses"),
    [
        (["5", "9", "7"], 1.0, "ended_by_environment", False, 3),
        (["7"], 1.0, "ended_by_environment", False, 1),  # notes in an example are the rollout's own
        (["1", "2", "3", "4", "7"], 0.0, "max_turns_reached", False, 3),
        (["5", ""], 0.0, "prompt_too_long", True, 1),
        (["5", "6..."], 0.0, "length", True, 1),
    ],
)
def test_a_plain_environment_may_take_turns(on, turns, reward, stop, truncated, num_guesses):
    ask, questions = noting(says_in_turn(*turns))
    done = on(GUESSING, lambda environment: run_one(environment, ask, max_turns=4))
    assert (done.reward, done.stop, done.truncated, done.metrics) == (reward, stop, truncated, {"guesses": num_guesses})
    assert [len(question.messages) for question in questions] == list(range(1, 2 * len(questions), 2))
    if len(turns) == 3:
        assert [message["content"] for message in done.completion] == ["5", "higher", "9", "lower", "7"]


def test_workers_share_as_many_rollouts_as_allowed_and_have_the_same_examples(tmp_path):
    code = """
        import os, random
        def dataset(): return [{"prompt": "p", "answer": str(random.random())}] * 20
        def reward(completion): return {"reward": 1.0, "pid": os.getpid()}
    """

    async def use(environment):
        running = most = 0

        async def ask(question: Ask) -> Reply:
            nonlocal running, most
            running += 1
            most = max(most, running)
            assert {worker.num_running for worker in environment._workers} <= {0, 1, 2}
            await asyncio.sleep(0.02)
            running -= 1
            return Reply(content="x", finish_reason="stop")

        return await run_all(environment, ask, 20), most

    with running(open_toy(tmp_path, write(tmp_path, code), max_concurrent=4, num_workers=2)) as run:
        outcomes, most = run(use)
    assert (most, len({done.answer for done in outcomes}), len({done.metrics["pid"] for done in outcomes})) == (4, 1, 2)
