"""Engines join a run that began without one, are drained, killed and cut off, and the run goes on."""

import json
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.engines.scripted_engine import KNOBS
from support.processes.machines import open_machines, why_not
from support.runs.fleet import CUT_OFF, SCRIPTED, Fleet
from support.runs.real_run import Process, Run, started, wait_until
from trireme.base.processes import free_port
from trireme.base.token import TOKEN
from trireme.journal.versions import Versions
from trireme.monitor.status import EngineStatus, ask_status
from trireme.tools.audit.audit import command as audit

pytestmark = pytest.mark.slow

SECRET = {TOKEN: "the-engines-of-this-test-share-it"}
STEPS = 60
CONFIG = """
device = "cpu"
seq_len = 128
model.name = "models/reverse-text-tiny"
hosts.inference = []
trainer.threads = 1
trainer.ckpt.interval = 20
orchestrator.batch_size = 8
orchestrator.rollouts_per_example = 4
orchestrator.sampling.max_tokens = 32
orchestrator.env = [{id = "tests/e2e/say.py", name = "say"}]
"""


def test_run_of_real_engines_that_join_are_drained_and_killed_is_whole(tmp_path):
    file, run = tmp_path / "run.toml", Run(tmp_path / "run")
    file.write_text(CONFIG)
    batches, status = free_port(), free_port()
    ports = ["--ports.batches", str(batches), "--orchestrator.server.port", str(status)]
    processes: list[Process] = []

    def engines() -> list[EngineStatus]:
        found = ask_status(f"http://127.0.0.1:{status}", run.root, timeout_s=2)
        return list(found.engines) if found else []

    def until(condition, what: str) -> None:
        wait_until(lambda: processes[0].poll() is not None or condition(), what, processes)
        assert processes[0].poll() is None, processes[0].tail()

    with ExitStack() as stack:

        def start(name: str, *words: str | Path) -> Process:
            log = tmp_path / f"{len(processes)}.log"
            processes.append(stack.enter_context(started(name, *words, log=log, env=SECRET, forked=False)))
            return processes[-1]

        whole = start("rl", "@", file, "--output-dir", run.root, "--max-steps", str(STEPS), *ports)
        joining = "--join", f"127.0.0.1:{batches}"
        first, second = start("inference", *joining), start("inference", *joining)
        until(lambda: [each.state for each in engines()].count("live") == 2, "two engines to be live")

        # One is asked to end, the other is killed.
        first._popen.send_signal(signal.SIGTERM)
        assert first.wait() == 0, first.tail()
        assert first.left() == []
        assert [each.member for each in engines()] == [2 if "engine 1 leaves" in first.output else 1]
        second.kill()
        until(lambda: second.left() == [], "the server of a killed engine to end")

        # The run waits for the next, and ends it with itself.
        third = start("inference", *joining, "--server.port", str(free_port()))
        assert whole.wait() == 0, whole.tail()
        assert third.wait() == 0, third.tail()
        assert "engine 3 ends: the run is over" in third.output

    assert audit([str(run.root)]) == 0
    assert Versions(run.paths.journal).newest == STEPS


OLDER = """
from trireme.cli.command import run_command
from trireme.launch import joined_engine
facts = joined_engine.engine_facts
joined_engine.engine_facts = lambda config: facts(config) | {"vllm": "0.31.0"}
run_command("inference", joined_engine.join)
"""
COPY = """
from trireme.base.waiting import Waits
from trireme.cli.command import run_command
from trireme.launch import joined_engine
from trireme.messages import Join
from trireme.transport.control import ControlClient
def serve(spec, membership, signals, **_):
    membership.beat()
    thief = ControlClient("tcp://" + membership._address, Waits("thief"))
    print(thief.ask(Join(membership._ticket, *membership._own), what="a place", deadline_s=60.0))
    membership.leave(0.0)
    return 0
joined_engine.serve = serve
run_command("inference", joined_engine.join)
"""
STRANGERS = {
    "another token": (["inference"], {TOKEN: "the-token-of-another-run"}, 2, "rejects the connection"),
    "another model": (["inference", "--model.name", "models/wordle-tiny"], {}, 2, "the model's .* of the engine is"),
    "an older vLLM": ([sys.executable, "-c", OLDER], {}, 2, "the engine has vllm 0.31.0 - expected"),
    "a registration that is replayed": ([sys.executable, "-c", COPY], {}, 0, "Again.*its ticket was used before"),
    "a tensor that arrives changed": (
        [sys.executable, SCRIPTED],
        {KNOBS: json.dumps({"digest_error": "model.norm.weight"})},
        3,
        "sent engine .* away: .*model.norm.weight has digest another",
    ),
}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_run_loses_nothing_in_three_minutes_of_engines_that_come_or_die(tmp_path):
    """Five engines, two of them real. Meanwhile strangers are refused, each with a sentence."""
    with open_machines(7, **SECRET) as machines:
        fleet = Fleet(tmp_path, machines, num_real=2)
        strangers = dict[str, Process]()

        def send_stranger(number: int) -> None:
            if number % 4 == 1 and len(strangers) < len(STRANGERS):
                name = list(STRANGERS)[len(strangers)]
                words, env, _, _ = STRANGERS[name]
                log = tmp_path / f"stranger-{number}.log"
                strangers[name] = fleet.stranger.start(*words, *fleet.join, log=log, env=env)

        with fleet.running():
            fleet.play(meanwhile=send_stranger)
            for name, process in strangers.items():
                *_, code, words = STRANGERS[name]
                assert process.wait() == code, (name, process.tail())
                assert re.search(words, process.output), (name, process.tail())

    assert len(strangers) == len(STRANGERS)
    assert audit([str(fleet.run.root)]) == 0
    assert fleet.run.engines_of(fleet.steps) == fleet.addresses
    assert all("the run is over" in each.process.output for each in fleet.engines.values())
    assert "joining again" in fleet.engines[CUT_OFF].process.output
