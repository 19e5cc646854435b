"""Every way for an environment to misbehave: the run goes on, the counts say how often, the log says which example."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections import Counter

import pytest

from toy_environments import ECHO, run_all, says, with_environment, write
from trireme.base.errors import ConfigError
from trireme.orchestrator.environments import pool
from trireme.orchestrator.environments.family import resident_gib
from trireme.orchestrator.environments.wire import Done, RunTask
from trireme.orchestrator.environments.worker_process import RolloutFailed

WAYS = {
    "raises": 'raise KeyError("no such thing")',
    "hangs": "import asyncio; await asyncio.sleep(60)",
    "is no number": 'return float("nan")',
    "is text": 'return "1.0"',
    "is a list": "return [1.0]",
    "lacks the reward": 'return {"quality": 1.0}',
    "exits": "raise SystemExit(3)",
}
COUNTED_AS = {"hangs": "timeout"}


@pytest.mark.parametrize("way", WAYS)
def test_the_others_go_on_and_the_trouble_is_counted(tmp_path, way):
    code = (
        ECHO
        + f"""
    async def reward(completion, answer):
        if answer == "3":
            {WAYS[way]}
        return 1.0
    """
    )

    async def use(environment):
        outcomes = await run_all(environment, says("x"), 6)
        return outcomes, environment.counts, environment.num_rollouts, environment.num_restarts

    outcomes, counts, num_rollouts, num_restarts = with_environment(
        tmp_path, write(tmp_path, code), use, rollout_timeout_s=0.5
    )
    assert [isinstance(outcome, Done) for outcome in outcomes] == [True, True, True, False, True, True]
    assert counts == Counter({COUNTED_AS.get(way, "score_error"): 1})
    assert (num_rollouts, num_restarts) == (6, 0)


def test_a_turn_that_fails_is_counted_apart_from_a_score_that_does(tmp_path):
    code = ECHO + "\n    def respond(messages): raise RuntimeError('lost')\n"

    async def use(environment):
        return await run_all(environment, says("x"), 2), environment.counts

    outcomes, counts = with_environment(tmp_path, write(tmp_path, code), use)
    assert [outcome.stage for outcome in outcomes] == ["rollout", "rollout"]
    assert counts == Counter(rollout_error=2)


def blaming(caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("trireme"), "propagate", True)
    monkeypatch.setattr(pool, "LONGEST_BACKOFF_S", 0.05)
    caplog.set_level("WARNING")


def test_an_event_loop_that_is_blocked_costs_its_worker_and_is_named(tmp_path, caplog, monkeypatch):
    blaming(caplog, monkeypatch)
    code = (
        ECHO
        + """
    import pathlib, time
    once = pathlib.Path(__file__).with_name("once")

    def reward(completion, answer):
        if answer == "3" and not once.exists():
            once.touch()
            time.sleep(60)
        return 1.0
    """
    )

    async def use(environment):
        slow = environment.run(RunTask(task="slow", index=3), says("x"))
        (failure,) = await asyncio.gather(slow, return_exceptions=True)
        while not environment.num_restarts:
            await asyncio.sleep(0.02)
        return failure, await run_all(environment, says("x"), 5), environment.counts

    failure, outcomes, counts = with_environment(tmp_path, write(tmp_path, code), use, rollout_timeout_s=0.5)
    assert isinstance(failure, RolloutFailed | Done)  # it may have been issued again before its time was over
    assert [outcome.reward for outcome in outcomes] == [1.0] * 5
    assert counts["worker_death"] == 1
    assert "has not answered anything for" in caplog.text


LEAKING = """
    import pathlib
    hoard = []

    def dataset(at_once=0):
        hoard.append(b"x" * at_once)
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(20)]

    async def reward(completion, answer):
        if answer == "3":
            import asyncio
            hoard.append(b"x" * (96 << 20))
            await asyncio.sleep(60)
        return 1.0
"""


def test_a_worker_that_holds_too_much_memory_is_killed_and_its_rollouts_come_again(tmp_path, caplog, monkeypatch):
    blaming(caplog, monkeypatch)
    monkeypatch.setattr(pool, "PING_EVERY_S", 0.1)

    async def use(environment):
        leak = asyncio.create_task(environment.run(RunTask(task="leak", index=3), says("x")))
        (failure,) = await asyncio.gather(leak, return_exceptions=True)
        return failure, await run_all(environment, says("x"), 3), environment.counts

    failure, outcomes, counts = with_environment(tmp_path, write(tmp_path, LEAKING), use, max_memory_gib=0.08)
    assert (type(failure), failure.stage) == (RolloutFailed, "worker")
    assert "GiB of memory, 0.08 are allowed (`max_memory_gib`), and was killed" in failure.error
    assert [outcome.reward for outcome in outcomes] == [1.0] * 3
    assert counts == Counter(worker_death=2, memory=2, worker_error=1)
    assert "Under way in it: train 3." in caplog.text


def test_an_environment_that_is_too_large_once_loaded_is_a_configuration_error(tmp_path):
    code = write(tmp_path, LEAKING)
    with pytest.raises(ConfigError, match=r"GiB of memory, 0\.08 are allowed .* as soon as it is loaded"):
        with_environment(tmp_path, code, lambda environment: None, args={"at_once": 96 << 20}, max_memory_gib=0.08)


def test_memory_is_that_of_the_process_and_its_children_with_what_they_share_counted_once(tmp_path):
    code = """
        import os, time
        hoard = b"x" * (64 << 20)
        for _ in range(3):
            if os.fork() == 0:
                break
        os.write(1, f"{os.getpid()}\\n".encode())
        time.sleep(60)
    """

    async def main() -> float:
        process = await asyncio.create_subprocess_exec(
            sys.executable, write(tmp_path, code, "hoard.py"), stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        for _ in range(4):
            await process.stdout.readline()
        held = resident_gib(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        return held

    assert 64 / 1024 < asyncio.run(main()) < 2 * 64 / 1024
    assert resident_gib(2**30) == 0.0


def test_garbage_is_counted_as_the_cause_of_a_death(tmp_path, caplog, monkeypatch):
    blaming(caplog, monkeypatch)
    code = (
        ECHO
        + """
    import pathlib, os, sys
    once = pathlib.Path(__file__).with_name("once")

    async def reward(completion, answer):
        if answer == "3" and not once.exists():
            once.touch()
            os.write(int(sys.argv[1]), b"not a message\\n")
            import asyncio
            await asyncio.sleep(60)
        return 1.0
    """
    )

    async def use(environment):
        return await run_all(environment, says("x"), 5), environment.counts

    outcomes, counts = with_environment(tmp_path, write(tmp_path, code), use)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 5
    assert counts == Counter(worker_death=1, garbage=1)
