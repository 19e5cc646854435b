"""Workers die and come back; rollouts are issued again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from toy_environments import ECHO, run_all, says, with_environment, write
from trireme.base.errors import PeerDied
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments import pool
from trireme.orchestrator.environments.pool import open_environment
from trireme.orchestrator.environments.wire import Ask, Done, Reply, RunTask
from trireme.orchestrator.environments.worker_process import RolloutFailed


def test_a_worker_killed_in_mid_rollout_costs_no_rollout(tmp_path):
    asked: list[str] = []

    async def use(environment):
        everyone_asked = asyncio.Event()

        async def ask(question: Ask) -> Reply:
            asked.append(question.task)
            if len(asked) == 10:
                everyone_asked.set()
            if len(asked) <= 10:
                await asyncio.sleep(30)  # the engine is slow; the worker's death must end this wait
            return Reply(content="x", finish_reason="stop")

        running = asyncio.create_task(run_all(environment, ask, 10))
        await everyone_asked.wait()
        start = time.monotonic()
        os.kill(environment._workers[0].pid, signal.SIGKILL)
        outcomes = await running
        return outcomes, time.monotonic() - start, environment.num_restarts

    outcomes, seconds, num_restarts = with_environment(tmp_path, write(tmp_path, ECHO), use)
    assert [outcome.task for outcome in outcomes] == [f"r{i}" for i in range(10)]
    assert sorted(asked) == sorted(2 * [f"r{i}" for i in range(10)])
    assert num_restarts == 1
    assert seconds < 10


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


def test_rollouts_without_a_worker_wait_by_one_name_and_with_a_deadline(tmp_path):
    waits = Waits("orchestrator", tmp_path / "logs")
    code = """
        import pathlib, time
        marker = pathlib.Path(__file__).with_name("loaded")
        if marker.exists():
            time.sleep(1)
        marker.touch()
    """

    async def main():
        settings = EnvironmentConfig(id=write(tmp_path, textwrap.dedent(code) + textwrap.dedent(ECHO)), name="slow")
        async with open_environment(settings, logs=tmp_path / "logs", load_timeout_s=60, waits=waits) as environment:
            os.kill(environment._workers[0].pid, signal.SIGKILL)
            while environment._workers[0].is_ready:
                await asyncio.sleep(0.01)
            running = asyncio.create_task(run_all(environment, says("x"), 5))
            await asyncio.sleep(0.2)
            return [(wait.what, wait.deadline_s, wait.log) for wait in waits.now()], await running

    named, outcomes = asyncio.run(main())
    assert named == [("a worker of environment 'slow'", 6 * 90.0, tmp_path / "logs/environment-slow-0.stdout")]
    assert all(isinstance(outcome, Done) for outcome in outcomes)
    assert waits.now() == []


def test_an_environment_whose_workers_never_come_back_says_so_at_the_deadline(tmp_path):
    async def use(environment):
        environment._longest_absence_s = 0.2
        os.kill(environment._workers[0].pid, signal.SIGKILL)
        while environment._workers[0].is_ready:
            await asyncio.sleep(0.01)
        return await run_all(environment, says("x"), 3)

    code = """
        import pathlib, time
        marker = pathlib.Path(__file__).with_name("loaded")
        if marker.exists():
            time.sleep(30)
        marker.touch()
    """
    outcomes = with_environment(tmp_path, write(tmp_path, textwrap.dedent(code) + textwrap.dedent(ECHO)), use)
    assert [type(outcome) for outcome in outcomes] == [PeerDied] * 3
    assert "orchestrator waits 0 s for a worker of environment" in str(outcomes[0])


def test_a_rollout_that_kills_its_worker_is_dropped_and_those_beside_it_are_not(tmp_path):
    code = (
        ECHO
        + """
    import os
    async def reward(completion, answer):
        import asyncio
        if answer == "3":
            os._exit(7)
        await asyncio.sleep(0.3)
        return 1.0
    """
    )

    async def use(environment):
        alone = await asyncio.gather(environment.run(RunTask(task="a", index=3), says("x")), return_exceptions=True)
        return alone + await run_all(environment, says("x"), 8)

    alone, *together = with_environment(tmp_path, write(tmp_path, code), use)
    assert isinstance(alone, RolloutFailed)
    assert alone.stage == "worker"
    assert "worker died twice" in alone.error
    assert "exited with code 7" in alone.error
    assert [i for i, outcome in enumerate(together) if isinstance(outcome, RolloutFailed)] == [3]
    assert all(outcome.reward == 1.0 for i, outcome in enumerate(together) if i != 3)


def test_an_environment_that_cannot_be_restarted_says_so_to_all_who_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "MAX_RESTARTS", 1)
    marker = tmp_path / "loaded"
    code = f"""
        import pathlib
        marker = pathlib.Path({str(marker)!r})
        if marker.exists():
            raise RuntimeError("no memory left")
        marker.touch()
    """

    async def use(environment):
        async def ask(question: Ask) -> Reply:
            os.kill(environment._workers[0].pid, signal.SIGKILL)
            return await asyncio.sleep(30)

        return await run_all(environment, ask, 3)

    outcomes = with_environment(tmp_path, write(tmp_path, textwrap.dedent(code) + textwrap.dedent(ECHO)), use)
    assert [type(outcome) for outcome in outcomes] == [PeerDied] * 3
    assert "All 1 workers" in str(outcomes[0])


def test_no_worker_and_no_child_of_it_outlives_an_orchestrator_that_is_killed(tmp_path):
    environment = write(
        tmp_path,
        ECHO
        + """
    import multiprocessing, os, pathlib, time
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    child.start()
    time.sleep(0.2)
    """
        + f"pathlib.Path({str(tmp_path / 'pids')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n",
    )
    orchestrator = write(
        tmp_path,
        f"""
        import asyncio
        from pathlib import Path
        from trireme.config.orchestrator import Environment
        from trireme.orchestrator.environments.pool import open_environment

        async def main():
            async with open_environment(Environment(id={environment!r}), logs=Path({str(tmp_path / "logs")!r})):
                print("open", flush=True)
                await asyncio.sleep(300)

        asyncio.run(main())
        """,
        "orchestrator.py",
    )
    with subprocess.Popen([sys.executable, orchestrator], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"open\n"
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        process.kill()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(map(is_alive, pids)):
        time.sleep(0.05)
    assert [pid for pid in pids if is_alive(pid)] == []


def test_programs_that_an_environment_started_end_with_their_killed_worker(tmp_path, monkeypatch):
    """Also one in a session of its own, which no signal to the worker's group reaches."""
    code = (
        ECHO
        + """
    import pathlib, subprocess, time
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    pathlib.Path(__file__).with_name("pid").write_text(str(child.pid))
    """
    )

    async def use(environment):
        environment._workers[0]._condemn("is in the way of this test")
        await run_all(environment, says("x"), 1)
        return int((tmp_path / "pid").read_text())

    async def first(environment):
        pid = int((tmp_path / "pid").read_text())
        return pid, await use(environment)

    old, new = with_environment(tmp_path, write(tmp_path, code), first)
    assert old != new
    assert [pid for pid in (old, new) if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
