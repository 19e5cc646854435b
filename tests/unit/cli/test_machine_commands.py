"""Ranks on several machines: each machine starts its own again, for there is no launcher above them all."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from support.processes.stage import until
from trireme.cli import machines
from trireme.cli.machines import keep_ranks
from trireme.config.files import read_run, write_run
from trireme.config.run import RunConfig


@pytest.mark.parametrize(
    ("codes", "trained", "restart", "num_started"),
    [
        ([1, 1, 0], None, True, 3),
        ([1, 1, 1, 1, 1, 1], 2, True, 5),  # two restarts, then a step, then two more
        ([1], None, False, 1),
        *(([code], None, True, 1) for code in (3, 130)),
    ],
)
def test_ended_ranks_start_again_within_limits_and_resume_unless_final(
    codes, trained, restart, num_started, tmp_path, monkeypatch
):
    supervisor = {"max_restarts": 2, "backoff_s": 0.001, "restart": restart}
    config = RunConfig.model_validate({"output_dir": str(tmp_path / "run"), "supervisor": supervisor})
    config.paths.metrics.parent.mkdir(parents=True)
    write_run(config, tmp_path / "trainer.json")
    resumed: list[bool] = []

    def run_ranks(run_file: Path) -> int:
        if len(resumed) == trained:
            config.paths.metrics.write_text(json.dumps({"step": 0, "process": "trainer", "time_s": 0.0}) + "\n")
        resumed.append(read_run(RunConfig, run_file).resume)
        return codes[len(resumed) - 1]

    monkeypatch.setattr(machines, "_run_ranks", run_ranks)
    assert keep_ranks(config, tmp_path / "trainer.json") == codes[num_started - 1]
    assert resumed == [False, *[True] * (num_started - 1)]


def test_keeper_passes_sigterm_on_to_its_ranks_before_it_ends(tmp_path, monkeypatch):
    """Or a successor would find its ports taken."""
    (tmp_path / "ranks.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.1), open('left', 'w').close(), sys.exit(1)))\n"
        "open('here', 'w').close()\n"
        "time.sleep(60)\n"
    )
    run_python = partial(subprocess.Popen, [sys.executable, "ranks.py"], cwd=tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda _command, **options: run_python(**options))

    def ask_to_end() -> None:
        until((tmp_path / "here").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Thread(target=ask_to_end).start()
    assert machines._run_ranks(Path("run.json")) == 128 + signal.SIGTERM
    assert signal.signal(signal.SIGTERM, before) == signal.SIG_IGN
    assert (tmp_path / "left").exists()
