"""Rewards that compare the rollouts of a group: who waits for whom, and for how long; and whole runs with them."""

import asyncio
from collections import Counter, defaultdict

import pytest

from toy_environments import never, refuses, run_group, run_one, says, shared_toys
from trireme.base.errors import ConfigError
from trireme.orchestrator.environments import pool
from trireme.orchestrator.environments.open_rollout import OpenRollout, RolloutFailed
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Done, Held, Reply, RunTask
from whole_run import build_config, run

pytestmark = pytest.mark.xdist_group("environment groups")  # one process, so that tests share workers
GROUPS = """
    import asyncio, os, pathlib

    def dataset(codes):
        return [{"prompt": f"say {i}", "code": code} for i, code in enumerate(codes)]

    def reward(completions, code):
        return eval(code)

    def shortest(completions):
        lengths = [len(completion) for completion in completions]
        return [{"reward": length == min(lengths), "rank": sorted(lengths).index(length), "pid": os.getpid()}
                for length in lengths]

    def raise_once(completions):
        once = pathlib.Path(__file__).with_name("once")
        if once.exists():
            return [1.0] * len(completions)
        once.touch()
        raise KeyError("judge")
"""
DIES_WHEN_ONE_IS_TOLD = """
    import trireme_wire

    dead, send = pathlib.Path(__file__).with_name("dead"), trireme_wire.Wire.send

    def send_and_die(wire, message):
        send(wire, message)
        if message["type"] == "done" and not dead.exists():
            dead.touch()
            os._exit(9)

    trireme_wire.Wire.send = send_and_die
"""
BAD = ["[1.0]", "1.0", "None", "[1.0, float('nan')]", "[1.0, '2']", "{'reward': 1}"]
SHORTEST, IN_ORDER, ONCE, SLOWLY, DEADLY = range(len(BAD), len(BAD) + 5)
CODES = [*BAD, "shortest(completions)", "list(range(len(completions)))", "raise_once(completions)"]
CODES += ["asyncio.sleep(0.2, shortest(completions))", "os._exit(7)"]


@pytest.fixture(scope="module")
def on(tmp_path_factory):
    """Two workers, and places for six rollouts, unless a test says otherwise."""
    with shared_toys(tmp_path_factory.mktemp("toys")) as on:
        usual = {"args": {"codes": CODES}, "num_workers": 2, "max_concurrent": 6}
        yield lambda use, more="", **config: on(GROUPS + more, use, **usual | config)


def member(place: int, size: int, *, attempt: int = 0, group: str = "g", index: int = SHORTEST) -> RunTask:
    return RunTask(task=f"{group}-{place}.{attempt}", index=index, group=group, group_size=size)


def held(environment: Environment) -> int:
    return sum(rollout.is_held for worker in environment._workers for rollout in worker._rollouts.values())


async def until_held(environment: Environment, count: int) -> None:
    while held(environment) < count:
        await asyncio.sleep(0.01)


def test_a_group_is_scored_together_in_the_order_of_its_names_whoever_was_first(on):
    async def use(environment):
        async def late(question: Ask) -> Reply:
            await until_held(environment, 2)
            return Reply(content="late", finish_reason="stop")

        assert environment.group_rewards
        asks = enumerate([late, says("x"), says("x")])
        rollouts = [environment.run(member(place, 3, group="in order", index=IN_ORDER), ask) for place, ask in asks]
        alone = run_one(environment, says("x"), SHORTEST)  # without a group, a rollout is its own
        return await asyncio.gather(*rollouts, alone)

    assert [outcome.reward for outcome in on(use)] == [0.0, 1.0, 2.0, 1.0]


def test_groups_that_begin_in_each_others_midst_each_end_in_one_of_the_workers(on):
    """Places for one group and a half: if those that wait kept theirs, two half groups would wait for each other."""

    async def use(environment):
        tasks = [member(place, 4, group=f"g{number}") for place in range(4) for number in range(6)]
        return await asyncio.wait_for(asyncio.gather(*(environment.run(task, says("x")) for task in tasks)), 20)

    with pytest.raises(ConfigError, match=r"compare the 7 rollouts of a group, and its `max_concurrent` is 6"):
        on(lambda environment: environment.run(member(0, 7), says("x")))  # a whole group has to fit
    outcomes = on(use)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 24
    groups = Counter((done.task.partition("-")[0], done.metrics["pid"]) for done in outcomes)
    assert set(groups.values()) == {4}
    assert len({pid for _, pid in groups}) == 2


def test_a_member_that_fails_or_is_cancelled_comes_again_and_the_others_wait_for_it(on):
    async def use(environment):
        first, second = (asyncio.create_task(environment.run(member(place, 3), says("xx"))) for place in (0, 1))
        with pytest.raises(RolloutFailed, match="too long"):
            await environment.run(member(2, 3), refuses("too long"))
        await until_held(environment, 2)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        first = asyncio.create_task(environment.run(member(0, 3, attempt=1), says("xxx")))
        await until_held(environment, 2)
        last = await environment.run(member(2, 3, attempt=1), says("x"))
        with pytest.raises(RolloutFailed, match="'g' was scored without it - expected all 3 rollouts"):
            await environment.run(member(1, 3, attempt=1), says("x"))
        return [await first, await second, last]

    outcomes = on(use)
    assert [outcome.reward for outcome in outcomes] == [0.0, 0.0, 1.0]
    assert [outcome.metrics["rank"] for outcome in outcomes] == [2.0, 1.0, 0.0]


def test_a_group_whose_scoring_fails_fails_as_one_and_may_come_again(on):
    async def use(environment):
        twice = [await run_group(environment, ["x"] * 3, index=ONCE, name="again") for _ in range(2)]
        return twice, [await run_group(environment, ["x", "y"], index=i) for i in range(len(BAD))]

    (first, second), of_bad_rewards = on(use)
    assert [(each.stage, each.error) for each in first] == [("score", "KeyError: 'judge'")] * 3
    assert [each.reward for each in second] == [1.0] * 3
    for outcomes in of_bad_rewards:
        assert [(type(each), each.stage) for each in outcomes] == [(RolloutFailed, "score")] * 2
        assert all("Reward function `reward` returned" in each.error for each in outcomes)


def test_a_group_that_kills_its_worker_is_dropped_as_one_and_those_beside_it_are_not(on, monkeypatch):
    monkeypatch.setattr(pool, "LONGEST_BACKOFF_S", 0.05)

    async def use(environment):
        bad = run_group(environment, ["x", "y"], index=DEADLY)
        return await asyncio.gather(bad, run_group(environment, ["x", "y"], index=SLOWLY))

    bad, good = on(use, num_workers=1)
    assert [(type(each), each.stage) for each in bad] == [(RolloutFailed, "worker")] * 2
    assert [each.reward for each in good] == [1.0, 1.0]


def test_a_worker_that_dies_while_it_tells_a_group_its_rewards_costs_no_member_of_it(on):
    async def use(environment):
        outcomes = await run_group(environment, ["four", "x", "xx"], index=SHORTEST)
        return outcomes, environment.num_restarts

    outcomes, num_restarts = on(use, DIES_WHEN_ONE_IS_TOLD, num_workers=1, rollout_timeout_s=5)
    assert (num_restarts, [outcome.reward for outcome in outcomes]) == (1, [0.0, 1.0, 0.0])
    assert len({outcome.metrics["pid"] for outcome in outcomes}) == 1


def test_a_slow_member_does_not_use_up_the_time_of_the_others_and_one_that_never_comes_ends_their_waiting(on):
    """The slow one is as slow as it may be, twice over: it fails, and comes again."""

    async def use(environment):
        quick = asyncio.create_task(environment.run(member(0, 2, group="slow"), says("x")))
        for attempt in (0, 1):
            with pytest.raises(RolloutFailed, match=r"not finished after 0\.5 s"):
                await environment.run(member(1, 2, attempt=attempt, group="slow"), never)
        slow = environment.run(member(1, 2, attempt=2, group="slow"), says("xx"))
        outcomes = await asyncio.gather(slow, quick)
        with pytest.raises(RolloutFailed, match="timeout: was over, and the others of its group of 2 were not"):
            await environment.run(member(0, 2), says("x"))
        return outcomes

    assert [outcome.reward for outcome in on(use, rollout_timeout_s=0.5)] == [0.0, 1.0]


def test_a_member_that_ends_while_another_one_cancels_its_turns_does_not_disturb_that():
    async def use():
        async def ask(question: Ask) -> Reply:
            try:
                return await never(question)
            finally:
                extended.append(rollout.extend())  # by the end of the other one

        extended: list[None] = []
        rollout = OpenRollout(member(0, 2), ask, 60, 0, on_held=lambda: None)
        following = asyncio.create_task(rollout.follow(print))
        for message in (Ask(task="", call="1", messages=[], sampling={}), Held(task=""), Done(task="", reward=1.0)):
            await asyncio.sleep(0)
            rollout.deliver(message)
        return (await following).reward, extended

    assert asyncio.run(use()) == (1.0, [None])


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
