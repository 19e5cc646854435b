"""Engines join a run that began without one, are drained and killed, while the real trainer and orchestrator go on."""

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

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
