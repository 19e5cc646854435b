"""Rewards that compare the rollouts of a group, in plain environments: who waits for whom, and for how long."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from toy_environments import ECHO, run_group, says, with_environment, write
from trireme.base.errors import ConfigError
from trireme.orchestrator.environments import pool
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Done, Reply, RunTask
from trireme.orchestrator.environments.worker_process import RolloutFailed

SHORTEST = """
    import os

    def dataset():
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(20)]

    async def reward(completions, answer):
        lengths = [len(completion) for completion in completions]
        return [{"reward": length == min(lengths), "rank": sorted(lengths).index(length), "pid": os.getpid()}
                for length in lengths]
"""


def member(place: int, size: int, *, attempt: int = 0, group: str = "g") -> RunTask:
    return RunTask(task=f"{group}-{place}.{attempt}", index=3, attempt=attempt, group=group, group_size=size)


def test_a_group_is_scored_together_once_all_of_it_is_there(tmp_path):
    async def use(environment):
        assert environment.group_rewards
        return await run_group(environment, ["four", "x", "xx", "x"])

    outcomes = with_environment(tmp_path, write(tmp_path, SHORTEST), use)
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0, 0.0, 1.0]
    assert [outcome.metrics["rank"] for outcome in outcomes] == [3.0, 0.0, 2.0, 0.0]


def test_what_a_group_reward_is_given_does_not_depend_on_who_was_first(tmp_path):
    code = """
        def dataset(): return [{"prompt": "p"}]
        def reward(completions): return list(range(len(completions)))
    """

    async def use(environment):
        last = asyncio.Event()

        async def late(question: Ask) -> Reply:
            await last.wait()
            return Reply(content="late", finish_reason="stop")

        async def early(question: Ask) -> Reply:
            asyncio.get_running_loop().call_later(0.05, last.set)
            return Reply(content="early", finish_reason="stop")

        asks = [late, early, early]
        tasks = [RunTask(task=f"{place}", index=0, group="g", group_size=3) for place in range(3)]
        return await asyncio.gather(*(environment.run(t, ask) for t, ask in zip(tasks, asks, strict=True)))

    outcomes = with_environment(tmp_path, write(tmp_path, code), use)
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0, 2.0]


def test_a_group_stays_in_one_worker_while_others_take_the_other(tmp_path):
    async def use(environment):
        groups = [run_group(environment, ["x"] * 4, name=f"g{number}") for number in range(6)]
        return await asyncio.gather(*groups)

    groups = with_environment(tmp_path, write(tmp_path, SHORTEST), use, num_workers=2)
    pids = [{done.metrics["pid"] for done in group} for group in groups]
    assert [len(of_group) for of_group in pids] == [1] * 6
    assert len(set.union(*pids)) == 2


def test_a_member_that_fails_is_run_again_and_the_others_wait_for_it(tmp_path):
    async def use(environment):
        others = [asyncio.create_task(environment.run(member(place, 3), says("xx"))) for place in (0, 1)]

        async def refuse(question: Ask) -> Reply:
            return Reply(error="too long", error_kind="engine")

        with pytest.raises(RolloutFailed, match="too long"):
            await environment.run(member(2, 3), refuse)
        assert not any(other.done() for other in others)
        last = await environment.run(member(2, 3, attempt=1), says("x"))
        return [await other for other in others] + [last]

    outcomes = with_environment(tmp_path, write(tmp_path, SHORTEST), use)
    assert [outcome.reward for outcome in outcomes] == [0.0, 0.0, 1.0]


def test_a_cancelled_member_leaves_its_group(tmp_path):
    async def use(environment):
        first = asyncio.create_task(environment.run(member(0, 2), says("x")))
        while not held(environment):
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return await asyncio.gather(
            environment.run(member(0, 2, attempt=1), says("xxx")), environment.run(member(1, 2), says("xx"))
        )

    outcomes = with_environment(tmp_path, write(tmp_path, SHORTEST), use)
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0]


def held(environment: Environment) -> int:
    return sum(rollout.is_held for worker in environment._workers for rollout in worker._rollouts.values())


def test_a_group_whose_scoring_raises_fails_as_one_and_may_come_again(tmp_path):
    code = (
        ECHO
        + """
    import pathlib
    once = pathlib.Path(__file__).with_name("once")

    def reward(completions):
        if not once.exists():
            once.touch()
            raise KeyError("judge")
        return [1.0] * len(completions)
    """
    )

    async def use(environment):
        return await run_group(environment, ["x"] * 3), await run_group(environment, ["x"] * 3)

    first, second = with_environment(tmp_path, write(tmp_path, code), use)
    assert [(type(each), each.stage, each.error) for each in first] == [
        (RolloutFailed, "score", "KeyError: 'judge'")
    ] * 3
    assert [each.reward for each in second] == [1.0] * 3


@pytest.mark.parametrize("value", ["[1.0]", "1.0", "None", "[1.0, float('nan')]", "[1.0, '2']", "{'reward': 1}"])
def test_a_group_reward_that_is_no_list_of_as_many_numbers_is_an_error_for_all_of_the_group(tmp_path, value):
    code = f"def dataset(): return [{{'prompt': 'p'}}]\ndef reward(completions): return {value}\n"

    async def use(environment):
        return await run_group(environment, ["x", "y"])

    outcomes = with_environment(tmp_path, write(tmp_path, code), use)
    assert [(type(each), each.stage) for each in outcomes] == [(RolloutFailed, "score")] * 2
    assert all("Reward function `reward` returned" in each.error for each in outcomes)


def test_a_rollout_that_comes_after_its_group_was_scored_is_told_at_once(tmp_path):
    async def use(environment):
        await run_group(environment, ["x", "y"])
        with pytest.raises(RolloutFailed, match="'g' was scored without it - expected all 2 rollouts"):
            await environment.run(member(1, 2, attempt=1), says("x"))

    with_environment(tmp_path, write(tmp_path, SHORTEST), use)


def test_a_workers_death_costs_no_member_of_a_group(tmp_path):
    async def use(environment):
        first_round = asyncio.Event()
        asked: list[str] = []

        async def ask(question: Ask) -> Reply:
            asked.append(question.task)
            if len(asked) == 3:
                first_round.set()
                await asyncio.sleep(60)
            return Reply(content="x" * len(asked), finish_reason="stop")

        running = [asyncio.create_task(environment.run(member(place, 3), ask)) for place in range(3)]
        await first_round.wait()
        while held(environment) < 2:
            await asyncio.sleep(0.01)
        os.kill(environment._workers[0].pid, signal.SIGKILL)
        return await asyncio.gather(*running), len(asked)

    outcomes, num_asked = with_environment(tmp_path, write(tmp_path, SHORTEST), use, num_workers=2)
    assert num_asked == 6
    assert sorted(outcome.reward for outcome in outcomes) == [0.0, 0.0, 1.0]
    assert len({outcome.metrics["pid"] for outcome in outcomes}) == 1


DIES_WHEN_ONE_IS_TOLD = """
    import pathlib

    import trireme_wire

    dead, send = pathlib.Path(__file__).with_name("dead"), trireme_wire.Wire.send

    def send_and_die(wire, message):
        send(wire, message)
        if message["type"] == "done" and not dead.exists():
            dead.touch()
            wire.flush()
            os._exit(9)

    trireme_wire.Wire.send = send_and_die
"""


def test_a_worker_that_dies_while_it_tells_a_group_its_rewards_costs_no_member_of_it(tmp_path):
    async def use(environment):
        return await run_group(environment, ["four", "x", "xx"])

    code = write(tmp_path, SHORTEST + DIES_WHEN_ONE_IS_TOLD)
    outcomes = with_environment(tmp_path, code, use, rollout_timeout_s=5)
    assert (tmp_path / "dead").exists()
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0, 0.0]
    assert len({outcome.metrics["pid"] for outcome in outcomes}) == 1


def test_a_group_that_kills_its_worker_is_dropped_as_one_and_those_beside_it_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "LONGEST_BACKOFF_S", 0.05)
    code = (
        SHORTEST
        + """
    innocent = reward

    async def reward(completions, answer):
        import asyncio
        if answer == "3":
            os._exit(7)
        await asyncio.sleep(0.2)
        return await innocent(completions, answer)
    """
    )

    async def use(environment):
        return await asyncio.gather(
            run_group(environment, ["x", "y"], index=3, name="bad"), run_group(environment, ["x", "y"], name="good")
        )

    bad, good = with_environment(tmp_path, write(tmp_path, code), use)
    assert [(type(each), each.stage) for each in bad] == [(RolloutFailed, "worker")] * 2
    assert [each.reward for each in good] == [1.0, 1.0]


def test_groups_that_begin_in_each_others_midst_all_come_to_their_end(tmp_path):
    """Places for one group and a half: if those that wait kept theirs, two half groups would wait for each other."""

    async def use(environment):
        tasks = [member(place, 4, group=f"g{number}") for place in range(4) for number in range(3)]
        return await asyncio.wait_for(asyncio.gather(*(environment.run(task, says("x")) for task in tasks)), 20)

    outcomes = with_environment(tmp_path, write(tmp_path, SHORTEST), use, max_concurrent=6)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 12


def test_a_group_that_cannot_run_at_once_is_a_configuration_error(tmp_path):
    async def use(environment):
        with pytest.raises(ConfigError, match=r"compare the 4 rollouts of a group, and its `max_concurrent` is 3"):
            await environment.run(member(0, 4), says("x"))

    with_environment(tmp_path, write(tmp_path, SHORTEST), use, max_concurrent=3)


def test_a_member_that_never_comes_ends_the_waiting_of_the_others(tmp_path):
    async def use(environment):
        with pytest.raises(RolloutFailed, match="timeout: was over, and the others of its group of 2 were not"):
            await environment.run(member(0, 2), says("x"))
        return await run_group(environment, ["x", "y"])

    outcomes = with_environment(tmp_path, write(tmp_path, SHORTEST), use, rollout_timeout_s=0.2)
    assert all(isinstance(outcome, Done) for outcome in outcomes)


def test_waiting_for_a_slow_member_does_not_use_up_the_time_of_the_others(tmp_path):
    """The slow one is as slow as it may be, twice over: it fails, and comes again."""

    async def use(environment):
        quick = asyncio.create_task(environment.run(member(0, 2), says("x")))

        async def never(question: Ask) -> Any:
            await asyncio.sleep(60)

        with pytest.raises(RolloutFailed, match=r"not finished after 0\.5 s"):
            await environment.run(member(1, 2), never)
        with pytest.raises(RolloutFailed, match=r"not finished after 0\.5 s"):
            await environment.run(member(1, 2, attempt=1), never)
        last = await environment.run(member(1, 2, attempt=2), says("xx"))
        return await quick, last

    quick, last = with_environment(tmp_path, write(tmp_path, SHORTEST), use, rollout_timeout_s=0.5)
    assert (quick.reward, last.reward) == (1.0, 0.0)


def test_without_a_group_a_rollout_is_its_own(tmp_path):
    async def use(environment):
        return await environment.run(RunTask(task="alone", index=0), says("x"))

    assert with_environment(tmp_path, write(tmp_path, SHORTEST), use).reward == 1.0
