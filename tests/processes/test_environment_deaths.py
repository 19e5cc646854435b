"""Workers die, freeze, grow too large or send garbage, and come back; rollouts are issued again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from toy_environments import ECHO, never, run_all, run_one, says, with_environment, write
from trireme.base.errors import PeerDied
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments import pool
from trireme.orchestrator.environments.family import resident_gib
from trireme.orchestrator.environments.pool import open_environment
from trireme.orchestrator.environments.wire import Ask, Done, Reply
from trireme.orchestrator.environments.worker_process import RolloutFailed

ONCE = """
    import asyncio, os, pathlib, sys, time
    once = pathlib.Path(__file__).with_name("once")
"""
SECOND_LOAD = """
    if once.exists():
        {}
    once.touch()
"""


def toy(folder: Path, code: str) -> str:
    return write(folder, ECHO + ONCE + code)


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trireme"), "propagate", True)
    monkeypatch.setattr(pool, "LONGEST_BACKOFF_S", 0.05)
    caplog.set_level("WARNING")
    return caplog


def test_a_worker_killed_in_mid_rollout_costs_no_rollout(tmp_path):
    asked: list[str] = []

    async def use(environment):
        everyone_asked = asyncio.Event()

        async def ask(question: Ask) -> Reply:
            asked.append(question.task)
            if len(asked) == 10:
                everyone_asked.set()
            if len(asked) <= 10:
                await never(question)  # the engine is slow; the worker's death must end this wait
            return Reply(content="x", finish_reason="stop")

        running = asyncio.create_task(run_all(environment, ask, 10))
        await everyone_asked.wait()
        os.kill(environment._workers[0].pid, signal.SIGKILL)
        return await asyncio.wait_for(running, 30), environment.num_restarts

    outcomes, num_restarts = with_environment(tmp_path, write(tmp_path, ECHO), use)
    assert [outcome.task for outcome in outcomes] == [f"r{i}" for i in range(10)]
    assert sorted(asked) == sorted(2 * [f"r{i}" for i in range(10)])
    assert num_restarts == 1


@pytest.mark.parametrize("point", ["environment.asked", "environment.scored"])
def test_a_worker_that_dies_at_a_point_of_the_protocol_costs_no_rollout(tmp_path, monkeypatch, point):
    monkeypatch.setenv("TRIREME_FAULTS", f"folder={tmp_path}")

    async def use(environment):
        first = environment._workers[0].pid
        (tmp_path / point).write_text("kill")
        outcomes = await run_all(environment, says("x"), 8)
        while not environment.num_restarts:  # its last rollout may have been in before it died
            await asyncio.sleep(0.01)
        return outcomes, first, environment.num_restarts

    outcomes, first, num_restarts = with_environment(tmp_path, write(tmp_path, ECHO), use)
    assert (tmp_path / f"{point}.reached").read_text() == str(first)
    assert [outcome.task for outcome in outcomes] == [f"r{i}" for i in range(8)]
    assert num_restarts == 1


async def kill(environment) -> None:
    os.kill(environment._workers[0].pid, signal.SIGKILL)
    while environment._workers[0].is_ready:
        await asyncio.sleep(0.01)


def test_rollouts_without_a_worker_wait_by_one_name_and_with_a_deadline(tmp_path):
    """The second load ends once the wait was seen."""
    waits = Waits("orchestrator", tmp_path / "logs")
    code = SECOND_LOAD.format("while not once.with_name('seen').exists(): time.sleep(0.01)")

    async def main():
        settings = EnvironmentConfig(id=toy(tmp_path, code), name="slow")
        async with open_environment(settings, logs=tmp_path / "logs", load_timeout_s=60, waits=waits) as environment:
            await kill(environment)
            running = asyncio.create_task(run_all(environment, says("x"), 5))
            while not (waiting := waits.now()):
                await asyncio.sleep(0.01)
            (tmp_path / "seen").touch()
            return [(wait.what, wait.deadline_s, wait.log) for wait in waiting], await running

    named, outcomes = asyncio.run(main())
    assert named == [("a worker of environment 'slow'", 6 * 90.0, tmp_path / "logs/environment-slow-0.stdout")]
    assert [type(outcome) for outcome in outcomes] == [Done] * 5
    assert waits.now() == []


def test_an_environment_whose_workers_never_come_back_says_so_at_the_deadline(tmp_path):
    async def use(environment):
        environment._longest_absence_s = 0.2
        await kill(environment)
        return await run_all(environment, says("x"), 3)

    outcomes = with_environment(tmp_path, toy(tmp_path, SECOND_LOAD.format("time.sleep(30)")), use)
    assert [type(outcome) for outcome in outcomes] == [PeerDied] * 3
    assert "orchestrator waits 0 s for a worker of environment" in str(outcomes[0])


def test_a_rollout_that_kills_its_worker_is_dropped_and_those_beside_it_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "LONGEST_BACKOFF_S", 0.05)
    code = """
    async def reward(completion, answer):
        if answer == "3":
            os._exit(7)
        await asyncio.sleep(0.3)
        return 1.0
    """

    async def use(environment):
        alone = await asyncio.gather(run_one(environment, says("x"), 3), return_exceptions=True)
        return alone + await run_all(environment, says("x"), 8)

    alone, *together = with_environment(tmp_path, toy(tmp_path, code), use)
    assert (type(alone), alone.stage) == (RolloutFailed, "worker")
    assert "worker died twice" in alone.error
    assert "exited with code 7" in alone.error
    assert [i for i, outcome in enumerate(together) if isinstance(outcome, RolloutFailed)] == [3]
    assert all(outcome.reward == 1.0 for i, outcome in enumerate(together) if i != 3)


def test_an_environment_that_cannot_be_restarted_says_so_to_all_who_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "MAX_RESTARTS", 1)

    async def use(environment):
        async def ask(question: Ask) -> Reply:
            os.kill(environment._workers[0].pid, signal.SIGKILL)
            return await never(question)

        return await run_all(environment, ask, 3)

    code = SECOND_LOAD.format("raise RuntimeError('no memory left')")
    outcomes = with_environment(tmp_path, toy(tmp_path, code), use)
    assert [type(outcome) for outcome in outcomes] == [PeerDied] * 3
    assert "All 1 workers" in str(outcomes[0])


def test_an_event_loop_that_is_blocked_costs_its_worker_and_is_named(tmp_path, warnings):
    code = """
    def reward(completion, answer):
        if answer == "3" and not once.exists():
            once.touch()
            time.sleep(60)
        return 1.0
    """

    async def use(environment):
        (failure,) = await asyncio.gather(run_one(environment, says("x"), 3), return_exceptions=True)
        while not environment.num_restarts:
            await asyncio.sleep(0.01)
        return failure, await run_all(environment, says("x"), 5), environment.counts

    failure, outcomes, counts = with_environment(tmp_path, toy(tmp_path, code), use, rollout_timeout_s=0.5)
    assert isinstance(failure, RolloutFailed | Done)  # it may have been issued again before its time was over
    assert [outcome.reward for outcome in outcomes] == [1.0] * 5
    assert counts["worker_death"] == 1
    assert "has not answered anything for" in warnings.text


def test_a_worker_that_holds_too_much_memory_is_killed_and_its_rollouts_come_again(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(pool, "PING_EVERY_S", 0.1)
    code = """
    hoard = []

    async def reward(completion, answer):
        if answer == "3":
            hoard.append(b"x" * (96 << 20))
            await asyncio.sleep(60)
        return 1.0
    """

    async def use(environment):
        (failure,) = await asyncio.gather(run_one(environment, says("x"), 3), return_exceptions=True)
        return failure, await run_all(environment, says("x"), 3), environment.counts

    failure, outcomes, counts = with_environment(tmp_path, toy(tmp_path, code), use, max_memory_gib=0.08)
    assert (type(failure), failure.stage) == (RolloutFailed, "worker")
    assert "GiB of memory, 0.08 are allowed (`max_memory_gib`), and was killed" in failure.error
    assert [outcome.reward for outcome in outcomes] == [1.0] * 3
    assert counts == Counter(worker_death=2, memory=2, worker_error=1)
    assert "Under way in it: train 3." in warnings.text


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
    command = [sys.executable, write(tmp_path, code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        for _ in range(4):
            process.stdout.readline()
        held = resident_gib(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
    assert 64 / 1024 < held < 2 * 64 / 1024
    assert resident_gib(2**30) == 0.0


def test_garbage_is_counted_as_the_cause_of_a_death(tmp_path, warnings):
    code = """
    async def reward(completion, answer):
        if answer == "3" and not once.exists():
            once.touch()
            os.write(int(sys.argv[1]), b"not a message\\n")
            await asyncio.sleep(60)
        return 1.0
    """

    async def use(environment):
        return await run_all(environment, says("x"), 5), environment.counts

    outcomes, counts = with_environment(tmp_path, toy(tmp_path, code), use)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 5
    assert counts == Counter(worker_death=1, garbage=1)


def test_no_worker_and_no_child_of_it_outlives_an_orchestrator_that_is_killed(tmp_path):
    code = """
    import multiprocessing
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    child.start()
    once.write_text(f"{os.getpid()} {child.pid}")
    """
    orchestrator = f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from toy_environments import Path, open_toy

        async def main():
            async with open_toy(Path({str(tmp_path)!r}), {toy(tmp_path, code)!r}):
                print("open", flush=True)
                await asyncio.sleep(300)

        asyncio.run(main())
    """
    command = [sys.executable, write(tmp_path, orchestrator, "orchestrator.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"open\n"
        pids = [int(pid) for pid in (tmp_path / "once").read_text().split()]
        process.kill()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(map(is_alive, pids)):
        time.sleep(0.01)
    assert [pid for pid in pids if is_alive(pid)] == []


def test_programs_that_an_environment_started_end_with_their_killed_worker(tmp_path):
    """Also one in a session of its own, which no signal to the worker's group reaches."""
    code = """
    import subprocess
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    once.write_text(str(child.pid))
    """

    async def use(environment):
        old = int((tmp_path / "once").read_text())
        environment._workers[0]._condemn("is in the way of this test")
        await run_all(environment, says("x"), 1)
        return old, int((tmp_path / "once").read_text())

    old, new = with_environment(tmp_path, toy(tmp_path, code), use)
    assert old != new
    assert [pid for pid in (old, new) if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
