"""Plain environments in real workers: a reward function for each rollout, or one that compares those of a group."""

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.runs.toy_environments import (
    ECHO,
    asked_and_done,
    in_turn,
    never,
    noting,
    refuses,
    run_group,
    run_one,
    says,
    shared_toys,
    talk,
    with_environment,
    write,
)
from support.runs.whole_run import build_config, run
from trireme.base.errors import ConfigError
from trireme.orchestrator.environments import pool
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.session.session import RolloutFailed, Session
from trireme.orchestrator.session.wire import Ask, Done, GaveUp, Held, Reply, RunTask

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


def test_reward_functions_may_be_async_with_named_metrics(on):
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


def test_picture_outside_the_environment_folder_fails_its_rollout(on):
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
    "{'quality': 1.0}": ("score", "has no `reward`"),
    "dict(reward=1, turn_rewards=0.5)": ("score", "returned 0.5 as `turn_rewards` - expected a list"),
    "dict(reward=1, turn_rewards=['0.5'])": ("score", "`reward, turn_rewards` returned '0.5', a str"),
    "dict(reward=1, turn_rewards=[[float('inf')]])": ("score", "`reward, turn_rewards` returned inf"),
    "dict(reward=1, turn_rewards=[1e31])": ("rollout", "a reward of 1e+31"),
}  # fmt: skip
RIGHT, _, NOTING = range(len(FAILURES), len(FAILURES) + 3)
CODES = [*FAILURES, "completion == answer", "dict(reward=2, turn_rewards=[0.5, None, [0, 0, 1.5]])", "note_the_end()"]
EVALUATED = {"args": {"codes": CODES}, "rollout_timeout_s": 1}


def says_in_turn(*contents: str) -> Callable[[Ask], Awaitable[Reply]]:
    def reply(text: str) -> Reply:
        reason, tokens = "length" if text.endswith("...") else "stop", len(text)
        return Reply(content=text, finish_reason=reason, completion_ids=[5] * tokens, logprobs=[-1.0] * tokens)

    full = Reply(error="530 tokens, the model takes 512", error_kind="overlong_prompt")
    return in_turn(*(reply(text) if text else full for text in contents))


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


def test_cancelling_the_caller_cancels_the_rollout_in_its_worker(on):
    async def use(environment):
        async def until(words: str) -> None:
            noted = environment._workers[0].log_file.parents[1] / "noted"
            while not noted.exists() or noted.read_text() != words:
                await asyncio.sleep(0.01)

        first = asyncio.create_task(run_one(environment, says("x"), NOTING))
        await until("scoring")
        first.cancel()
        again = await run_one(environment, says("x"), RIGHT)  # it gets neither the answer nor the end of the first
        await until("cancelled")
        return again.answer, first.cancelled()

    assert on(EVALUATING, use, **EVALUATED | {"rollout_timeout_s": 30}) == (str(RIGHT), True)


async def follow(rollout: Session, *messages: Any) -> Done:
    """Deliver messages of a worker to a rollout, each once the one before has had its effect."""
    rollout.begin(on_held=lambda: None)
    following = asyncio.create_task(rollout.follow(print))
    for message in messages:
        for _ in range(5):
            await asyncio.sleep(0)
        rollout.deliver(message)
    return await following


ASKED = Ask(task="r", call="1", messages=[], sampling={})


def test_turn_abandoned_after_its_answer_is_named_in_the_result():
    async def use():
        rollout = Session(RunTask(task="r", index=0), says("x"))
        return await follow(rollout, ASKED, GaveUp(task="r", call="1"), Done(task="r", reward=1.0))

    assert asyncio.run(use()).given_up == ["1"]


def test_answer_that_fails_between_two_workers_ends_the_rollout():
    rollout = Session(RunTask(task="r", index=0), says("x"))
    rollout.fail(TimeoutError("all engines are gone"))  # its program outlived the first worker, and asked
    with pytest.raises(TimeoutError, match="all engines are gone"):
        asyncio.run(follow(rollout))


def test_group_member_that_ends_never_disturbs_a_cancelling_one():
    async def use():
        async def ask(question: Ask) -> Reply:
            try:
                return await never(question)
            finally:
                extended.append(rollout.extend())  # by the end of the other one

        extended: list[None] = []
        rollout = Session(member(0, 2), ask)
        done = await follow(rollout, ASKED, Held(task=""), Done(task="", reward=1.0))
        return done.reward, extended

    assert asyncio.run(use()) == (1.0, [None])


def test_what_ask_raises_comes_out_of_run(on):
    async def ask(question: Ask) -> Reply:
        raise TimeoutError("all engines are gone")

    with pytest.raises(TimeoutError, match="all engines are gone"):
        on(ECHO, lambda environment: run_one(environment, ask))


@pytest.mark.parametrize("kind", ["engine", "overlong_prompt", "cancelled"])
def test_turn_refused_by_the_orchestrator_fails_its_rollout(on, kind):
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


GROUPS = """
    import asyncio, os, pathlib, random

    def dataset(codes):
        return [{"prompt": f"say {i}", "code": code, "drawn": random.random()} for i, code in enumerate(codes)]

    def reward(completions, code, drawn):
        return eval(code)

    def shortest(completions, drawn=0):
        lengths = [len(completion) for completion in completions]
        same = {"pid": os.getpid(), "drawn": drawn}
        return [same | {"reward": length == min(lengths), "rank": sorted(lengths).index(length)} for length in lengths]

    def raise_once(completions):
        once = pathlib.Path(__file__).with_name("once")
        if once.exists():
            return [1.0] * len(completions)
        once.touch()
        raise KeyError("judge")
"""
DIES_WHEN_ONE_IS_TOLD = """
    from trireme_worker import protocol

    dead, send = pathlib.Path(__file__).with_name("dead"), protocol.Wire.send

    def send_and_die(wire, message):
        send(wire, message)
        if message["type"] == "done" and not dead.exists():
            dead.touch()
            os._exit(9)

    protocol.Wire.send = send_and_die
"""
BAD = ["[1.0]", "1.0", "None", "[1.0, float('nan')]", "[1.0, '2']", "{'reward': 1}"]
SHORTEST, IN_ORDER, ONCE, SLOWLY, DEADLY = range(len(BAD), len(BAD) + 5)
CODES = [*BAD, "shortest(completions, drawn)", "list(range(len(completions)))", "raise_once(completions)"]
CODES += ["asyncio.sleep(0.2, shortest(completions))", "os._exit(7)"]


@pytest.fixture
def on_groups(on):
    """Two workers, and places for six rollouts, unless a test says otherwise."""
    usual = {"args": {"codes": CODES}, "num_workers": 2, "max_concurrent": 6}
    return lambda use, more="", **config: on(GROUPS + more, use, **usual | config)


def member(place: int, size: int, *, attempt: int = 0, group: str = "g", index: int = SHORTEST) -> RunTask:
    return RunTask(task=f"{group}-{place}.{attempt}", index=index, group=group, group_size=size)


def held(environment: Environment) -> int:
    return sum(rollout.is_held for worker in environment._workers for rollout in worker._rollouts.values())


async def until_held(environment: Environment, count: int) -> None:
    while held(environment) < count:
        await asyncio.sleep(0.01)


def test_group_rewards_follow_member_order_not_arrival_order(on_groups):
    async def use(environment):
        async def late(question: Ask) -> Reply:
            await until_held(environment, 2)
            return Reply(content="late", finish_reason="stop")

        assert environment.group_rewards
        asks = enumerate([late, says("x"), says("x")])
        sessions = [Session(member(place, 3, group="in order", index=IN_ORDER), ask) for place, ask in asks]
        alone = run_one(environment, says("x"), SHORTEST)  # without a group, a rollout is its own
        return await asyncio.gather(*map(environment.run, sessions), alone)

    assert [outcome.reward for outcome in on_groups(use)] == [0.0, 1.0, 2.0, 1.0]


def test_interleaved_groups_each_run_in_a_single_worker(on_groups):
    """Places for one group and a half: if those that wait kept theirs, two half groups would wait for each other."""

    async def use(environment):
        running = most = 0

        async def ask(question: Ask) -> Reply:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            return Reply(content="x", finish_reason="stop")

        tasks = [member(place, 4, group=f"g{number}") for place in range(4) for number in range(6)]
        outcomes = await asyncio.wait_for(asyncio.gather(*(environment.run(Session(task, ask)) for task in tasks)), 20)
        return outcomes, most

    with pytest.raises(ConfigError, match=r"compare the 7 rollouts of a group, and its `max_concurrent` is 6"):
        on_groups(lambda environment: environment.run(Session(member(0, 7), says("x"))))  # a whole group has to fit
    outcomes, most = on_groups(use)
    assert (most, [outcome.reward for outcome in outcomes]) == (6, [1.0] * 24)
    groups = Counter((done.task.partition("-")[0], done.metrics["pid"]) for done in outcomes)
    assert set(groups.values()) == {4}
    assert len({pid for _, pid in groups}) == 2
    assert len({done.metrics["drawn"] for done in outcomes}) == 1  # both have the same examples


def test_group_waits_for_the_retry_of_a_failed_or_cancelled_member(on_groups):
    async def use(environment):
        sessions = [Session(member(place, 3), says("xx")) for place in (0, 1)]
        first, second = (asyncio.create_task(environment.run(session)) for session in sessions)
        with pytest.raises(RolloutFailed, match="too long"):
            await environment.run(Session(member(2, 3), refuses("too long")))
        await until_held(environment, 2)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        first = asyncio.create_task(environment.run(Session(member(0, 3, attempt=1), says("xxx"))))
        await until_held(environment, 2)
        last = await environment.run(Session(member(2, 3, attempt=1), says("x")))
        with pytest.raises(RolloutFailed, match="'g' was scored without it - expected all 3 rollouts"):
            await environment.run(Session(member(1, 3, attempt=1), says("x")))
        return [await first, await second, last]

    outcomes = on_groups(use)
    assert [outcome.reward for outcome in outcomes] == [0.0, 0.0, 1.0]
    assert [outcome.metrics["rank"] for outcome in outcomes] == [2.0, 1.0, 0.0]


def test_a_group_whose_scoring_fails_fails_as_one_and_may_come_again(on_groups):
    async def use(environment):
        twice = [await run_group(environment, ["x"] * 3, index=ONCE, name="again") for _ in range(2)]
        return twice, [await run_group(environment, ["x", "y"], index=i) for i in range(len(BAD))]

    (first, second), of_bad_rewards = on_groups(use)
    assert [(each.stage, each.error) for each in first] == [("score", "KeyError: 'judge'")] * 3
    assert [each.reward for each in second] == [1.0] * 3
    for outcomes in of_bad_rewards:
        assert [(type(each), each.stage) for each in outcomes] == [(RolloutFailed, "score")] * 2
        assert all("Reward function `reward` returned" in each.error for each in outcomes)


def test_group_that_kills_its_worker_is_dropped_alone(on_groups, monkeypatch):
    monkeypatch.setattr(pool, "LONGEST_BACKOFF_S", 0.05)

    async def use(environment):
        bad = run_group(environment, ["x", "y"], index=DEADLY)
        return await asyncio.gather(bad, run_group(environment, ["x", "y"], index=SLOWLY))

    bad, good = on_groups(use, num_workers=1)
    assert [(type(each), each.stage) for each in bad] == [(RolloutFailed, "worker")] * 2
    assert [each.reward for each in good] == [1.0, 1.0]


def test_worker_death_while_rewards_are_sent_costs_no_group_member(on_groups):
    async def use(environment):
        outcomes = await run_group(environment, ["four", "x", "xx"], index=SHORTEST)
        return outcomes, environment.num_restarts

    outcomes, num_restarts = on_groups(use, DIES_WHEN_ONE_IS_TOLD, num_workers=1, rollout_timeout_s=5)
    assert (num_restarts, [outcome.reward for outcome in outcomes]) == (1, [0.0, 1.0, 0.0])
    assert len({outcome.metrics["pid"] for outcome in outcomes}) == 1


def test_slow_group_member_does_not_use_up_the_time_of_the_others(on_groups):
    """The slow one is as slow as it may be, twice over: it fails, and comes again."""

    async def use(environment):
        quick = asyncio.create_task(environment.run(Session(member(0, 2, group="slow"), says("x"))))
        for attempt in (0, 1):
            with pytest.raises(RolloutFailed, match=r"not finished after 0\.5 s"):
                await environment.run(Session(member(1, 2, attempt=attempt, group="slow"), never))
        slow = environment.run(Session(member(1, 2, attempt=2, group="slow"), says("xx")))
        outcomes = await asyncio.gather(slow, quick)
        with pytest.raises(RolloutFailed, match="timeout: was over, and the others of its group of 2 were not"):
            await environment.run(Session(member(0, 2), says("x")))
        return outcomes

    assert [outcome.reward for outcome in on_groups(use, rollout_timeout_s=0.5)] == [0.0, 1.0]


FIRST_OF_ITS_GROUP = """
    def dataset():
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]

    def reward(completions):
        first = min(completions)
        return [{"reward": float(each == first), "size": len(completions)} for each in completions]
"""


def test_each_group_that_is_trained_on_was_compared_within_itself(tmp_path):
    outcome = run(build_config(tmp_path, FIRST_OF_ITS_GROUP, max_steps=2, max_async_level=1))
    assert outcome.error is None
    groups = defaultdict(list)
    for rollout in (rollout for record in outcome.records for rollout in record.rollouts):
        groups[rollout.group].append(rollout)
    assert [len(rollouts) for rollouts in groups.values()] == [4] * 2 * 2
    for rollouts in groups.values():
        said = [rollout.completion[0]["content"] for rollout in rollouts]
        assert [rollout.reward for rollout in rollouts] == [float(text == min(said)) for text in said]
        assert {rollout.metrics["size"] for rollout in rollouts} == {4.0}


def test_the_worker_hides_no_module_of_an_environment(tmp_path):
    write(tmp_path, "answer = 'mine'", "server.py")
    code = "from server import answer\ndataset = [{'prompt': answer}]\nreward = lambda: 1.0"
    done = with_environment(tmp_path, write(tmp_path, code), lambda on: run_one(on, says("hi")))
    assert done.prompt == talk("mine")
