"""Workers load, die, freeze, grow too large or send garbage, and come back; rollouts are issued again."""

import asyncio
import logging
import os
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.processes.limits import limited
from support.processes.stage import until
from support.runs.real_run import is_alive
from support.runs.toy_environments import ECHO, Use, never, run_all, run_one, says, with_environment, write
from trireme.base.errors import ConfigError, PeerDied
from trireme.base.processes import OPEN_FILES, most_open_files
from trireme.base.token import TOKEN
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments import pool
from trireme.orchestrator.environments.pool import open_environment
from trireme.orchestrator.session.session import RolloutFailed, Session
from trireme.orchestrator.session.wire import Done, RunTask

REFUSED = {
    "raises": (
        "def load_environment(level): raise KeyError('no such level')",
        r"toy\.py' could not be loaded: KeyError: 'no such level'(.|\n)*\(\*\*{'level': 9}\)(.|\n)*{logs}",
        {"args": {"level": 9}},
    ),
    "exits": (
        "import os, sys\nprint('licence expired', file=sys.stderr, flush=True)\nos._exit(3)",
        r"exited with code 3(.|\n)*licence expired",
        {},
    ),
    "hangs": (
        "import time\nprint('fetching the data', flush=True)\ntime.sleep(60)",
        r"not loaded after 3 s(.|\n)*fetching the data(.|\n)*environment-slow-0",
        {"name": "slow", "load_timeout_s": 3},
    ),
    "differs from worker to worker": (
        "import os\ndef dataset(): return [{'prompt': 'p'}] * os.getpid()\ndef reward(completion): return 0.0",
        "data sets of different sizes",
        {"num_workers": 2},
    ),
    "is too large": (
        "hoard = b'x' * (96 << 20)\ndef dataset(): return [{'prompt': 'p'}]\ndef reward(completion): return 0.0",
        r"GiB of memory, 0\.08 are allowed .* as soon as it is loaded",
        {"max_memory_gib": 0.08},
    ),
}


@pytest.mark.parametrize("way", REFUSED)
def test_unusable_environment_is_a_configuration_error_that_names_it(tmp_path, way):
    code, words, config = REFUSED[way]
    with pytest.raises(ConfigError, match=words.replace("{logs}", str(tmp_path / "logs"))):
        with_environment(tmp_path, write(tmp_path, code), never, **config)


def test_a_worker_gets_the_variables_that_its_environment_may_inherit(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", TOKEN):
        monkeypatch.setenv(name, "secret")
    code = """
    import os

    def reward():
        names = ("PATH", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "TRIREME_TOKEN")
        return sum(2**place for place, name in enumerate(names) if name in os.environ)
    """
    for inherit, expected in ((None, 7), ((), 1), (("WANDB_API_KEY", TOKEN), 3)):
        toy = write(tmp_path, ECHO + code)
        assert with_environment(tmp_path, toy, lambda e: run_one(e, says("1")), inherit=inherit).reward == expected


def test_worker_output_goes_to_its_log_not_to_the_wire(tmp_path, monkeypatch):
    code = """
    import os, resource
    print('{"type":"done"}', flush=True)
    os.system("echo from a child")

    def reward():
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    """
    with limited(resource.RLIMIT_NOFILE, 256):
        done = with_environment(tmp_path, write(tmp_path, ECHO + code), lambda e: run_one(e, says("1")), name="toy")
        assert 256 < done.reward == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most_open_files()
    assert "from a child" in (tmp_path / "logs/environment-toy-0.stdout").read_text()
    for most, expected in ((20_000, 20_000), (1 << 20, OPEN_FILES), (resource.RLIM_INFINITY, OPEN_FILES)):
        monkeypatch.setattr("resource.getrlimit", lambda _, most=most: (256, most))
        assert most_open_files() == expected


PREPARE = """
    import asyncio, os, pathlib, subprocess, sys, time
    once = pathlib.Path(__file__).with_name("once")
"""
TOY = ECHO + PREPARE
SECOND_LOAD = """
    if once.exists():
        {}
    once.touch()
"""


def with_toy(folder: Path, code: str, use: Use, **config: Any) -> Any:
    return with_environment(folder, write(folder, TOY + code), use, **config)


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trireme"), "propagate", True)
    monkeypatch.setattr(pool, "LONGEST_BACKOFF_S", 0.05)
    monkeypatch.setattr(pool, "PING_EVERY_S", 0.1)
    caplog.set_level("WARNING")
    return caplog


def test_a_worker_that_dies_after_it_has_scored_costs_no_rollout(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIREME_FAULTS", f"folder={tmp_path}")

    async def use(environment):
        first = environment._workers[0].pid
        (tmp_path / "environment.scored").write_text("kill")
        outcomes = await run_all(environment, says("x"), 8)
        while not environment.num_restarts:  # its last rollout may have been in before it died
            await asyncio.sleep(0.01)
        assert (tmp_path / "environment.scored.reached").read_text() == str(first)
        return outcomes

    assert [outcome.task for outcome in with_toy(tmp_path, "", use)] == [f"r{i}" for i in range(8)]


async def kill(environment) -> None:
    os.kill(environment._workers[0].pid, signal.SIGKILL)
    while environment._workers[0].is_ready:
        await asyncio.sleep(0.01)


def test_rollouts_without_a_worker_wait_by_one_name_and_with_a_deadline(tmp_path):
    """The second load ends once the wait was seen."""
    waits = Waits("orchestrator", tmp_path / "logs")
    code = SECOND_LOAD.format("while not once.with_name('seen').exists(): time.sleep(0.01)")

    async def main():
        settings = EnvironmentConfig(id=write(tmp_path, TOY + code), name="slow")
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


def test_a_rollout_whose_answer_failed_waits_for_no_worker(tmp_path):
    """The worker never comes back; a second rollout waits for the only slot."""
    waits = Waits("orchestrator", tmp_path / "logs")

    async def main():
        settings = EnvironmentConfig(id=write(tmp_path, TOY + SECOND_LOAD.format("time.sleep(60)")), max_concurrent=1)
        async with open_environment(settings, logs=tmp_path / "logs", load_timeout_s=60, waits=waits) as environment:
            await kill(environment)
            sessions = [Session(RunTask(task=f"r{i}", index=i), says("x")) for i in range(2)]
            running = [asyncio.create_task(environment.run(session)) for session in sessions]
            while not waits.now():
                await asyncio.sleep(0.01)
            for session in reversed(sessions):
                session.fail(RolloutFailed("rollout", f"{session.task.task} broke"))
            return await asyncio.gather(*running, return_exceptions=True), environment.counts

    outcomes, counts = asyncio.run(asyncio.wait_for(main(), 30))
    assert [str(outcome) for outcome in outcomes] == ["rollout: r0 broke", "rollout: r1 broke"]
    assert counts["rollout_error"] == 2


@pytest.mark.parametrize(
    ("second_load", "words"),
    [
        ("time.sleep(30)", "orchestrator waits 0 s for a worker of environment"),
        ("raise RuntimeError('no memory left')", "All 1 workers"),
    ],
)
def test_an_environment_whose_workers_never_come_back_says_so_to_all(tmp_path, monkeypatch, second_load, words):
    monkeypatch.setattr(pool, "MAX_RESTARTS", 1)

    async def use(environment):
        environment._longest_absence_s = 0.2 if "sleep" in second_load else 60
        await kill(environment)
        return await run_all(environment, says("x"), 3)

    outcomes = with_toy(tmp_path, SECOND_LOAD.format(second_load), use)
    assert [type(outcome) for outcome in outcomes] == [PeerDied] * 3
    assert words in str(outcomes[0])


KILLS = """
    hoard = []

    async def reward(completion, answer):
        if answer == "3" and not (SPARE and once.exists()):
            once.touch()
            {}
            await asyncio.sleep(60)
        await asyncio.sleep(0.1)
        return 1.0
"""
HOARDS = ("hoard.append(b'x' * (96 << 20))", {"max_memory_gib": 0.08})


@pytest.mark.parametrize(
    ("line", "config", "indices", "blame", "counts"),
    [
        ("os._exit(7)", {}, [3, *range(3), 4], "died 3 times.* exited with code 7", {"worker_death": 3}),
        (*HOARDS, [3], r"died 2 times.* GiB of memory, 0\.08 are allowed .*, and was killed",
         {"worker_death": 2, "memory": 2}),
    ],
)  # fmt: skip
def test_a_rollout_that_kills_its_worker_is_dropped_and_named(tmp_path, warnings, line, config, indices, blame, counts):
    async def use(environment):
        rollouts = [run_one(environment, says("x"), index, task=f"r{index}") for index in indices]
        return await asyncio.gather(*rollouts, return_exceptions=True), Counter(environment.counts)

    (failure, *others), found = with_toy(tmp_path, KILLS.format(line).replace("SPARE", "False"), use, **config)
    assert (type(failure), failure.stage) == (RolloutFailed, "worker")
    assert re.search(blame, failure.error)
    assert [outcome.reward for outcome in others] == [1.0] * (len(indices) - 1)  # those that ran with it
    assert found == Counter(worker_error=1, **counts)
    named = ", ".join(f"train {index}" for index in sorted(indices))
    assert f"Under way in it: {named}." in warnings.text


@pytest.mark.parametrize(
    ("line", "blame", "num_garbage"),
    [
        ("time.sleep(60)", "has not answered anything for", 0),
        ("os.write(int(sys.argv[1]), b'not a message\\n')", "not a message", 1),
    ],
)
def test_a_worker_that_is_blocked_or_sends_garbage_is_killed_and_named(tmp_path, warnings, line, blame, num_garbage):
    async def use(environment):
        (first,) = await asyncio.gather(run_one(environment, says("x"), 3), return_exceptions=True)
        while not environment.num_restarts:
            await asyncio.sleep(0.01)
        return first, await run_all(environment, says("x"), 5), environment.counts

    code = KILLS.format(line).replace("SPARE", "True")
    first, outcomes, counts = with_toy(tmp_path, code, use, rollout_timeout_s=3)
    assert isinstance(first, RolloutFailed | Done)  # it may have been issued again before its time was over
    assert [outcome.reward for outcome in outcomes] == [1.0] * 5
    assert (counts["worker_death"], counts["garbage"]) == (1, num_garbage)
    assert blame in warnings.text


STARTS_PROGRAMS = """
    import multiprocessing
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,), daemon=True)
    forked.start()
    apart = subprocess.Popen(["sleep", "300"], start_new_session=True)  # which no signal to the group reaches
    once.write_text(f"{os.getpid()} {forked.pid} {apart.pid}")
"""


def test_no_worker_outlives_a_killed_orchestrator(tmp_path):
    orchestrator = f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        from support.runs.toy_environments import Path, open_toy

        async def main():
            async with open_toy(Path({str(tmp_path)!r}), {write(tmp_path, TOY + STARTS_PROGRAMS)!r}):
                print("open", flush=True)
                await asyncio.sleep(300)

        asyncio.run(main())
    """
    command = [sys.executable, write(tmp_path, orchestrator, "orchestrator.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"open\n"
        pids = (tmp_path / "once").read_text().split()
        process.kill()
    until(lambda: not any(map(is_alive, pids)), deadline_s=5)


def test_programs_that_an_environment_started_end_with_their_killed_worker(tmp_path):
    async def use(environment):
        old = (tmp_path / "once").read_text().split()
        environment._workers[0]._mark_unhealthy("is in the way of this test")
        await run_all(environment, says("x"), 1)
        return old + (tmp_path / "once").read_text().split()

    pids = with_toy(tmp_path, STARTS_PROGRAMS, use)
    assert len(set(pids)) == 6
    assert [pid for pid in pids if is_alive(pid)] == []
