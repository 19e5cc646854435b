"""Ranks on several machines: each machine starts its own again, for there is no launcher above them all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stage import DEADLINE_S, until
from trireme.cli import machines
from trireme.cli.machines import keep_ranks
from trireme.config.run import RunConfig
from trireme.config.written import read_run, write_run


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    supervisor = {"max_restarts": 2, "backoff_s": 0.001}
    config = RunConfig.model_validate({"output_dir": str(tmp_path / "run"), "supervisor": supervisor})
    write_run(config, tmp_path / "trainer.json")
    return config


class Ranks:
    """End with these codes, one after the other; `trains` of them take a step before."""

    def __init__(self, config: RunConfig, *codes: int, trains: frozenset[int] = frozenset()) -> None:
        self.codes = list(codes)
        self.resumed: list[bool] = []
        self._metrics = config.paths.metrics
        self._trains = trains

    def __call__(self, run_file: Path) -> int:
        self.resumed.append(read_run(RunConfig, run_file).resume)
        number = len(self.resumed) - 1
        if number in self._trains:
            self._metrics.parent.mkdir(parents=True, exist_ok=True)
            with open(self._metrics, "a") as file:
                file.write(json.dumps({"step": number, "process": "trainer", "time_s": 0.0}) + "\n")
        return self.codes.pop(0)


def kept(config: RunConfig, ranks: Ranks, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(machines, "_run_ranks", ranks)
    return keep_ranks(config, folder / "trainer.json")


def test_ranks_that_a_cut_cable_ended_start_again_and_resume(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(config, 1, 1, 0)
    assert kept(config, ranks, tmp_path, monkeypatch) == 0
    assert ranks.resumed == [False, True, True]


@pytest.mark.parametrize("code", [2, 3, 130, 143])
def test_what_would_happen_again_or_was_asked_for_is_final(
    code: int, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept(config, Ranks(config, code), tmp_path, monkeypatch) == code


def test_restarts_in_a_row_have_a_limit_and_a_trained_step_begins_a_new_row(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(config, 1, 1, 1, 1, 1, 1, trains=frozenset({2}))
    assert kept(config, ranks, tmp_path, monkeypatch) == 1
    assert len(ranks.resumed) == 5, "one and two restarts, then a step, then two more"


def test_nothing_is_started_again_where_nobody_wants_it(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = config.supervisor.model_copy(update={"restart": False})
    config = config.model_copy(update={"supervisor": supervisor})
    assert kept(config, Ranks(config, 1), tmp_path, monkeypatch) == 1


def test_whoever_is_asked_to_end_passes_it_on_and_waits_for_the_ranks(tmp_path: Path) -> None:
    """Or a successor would find its ports taken."""
    ranks = tmp_path / "ranks.py"
    ranks.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), open('left', 'w').close(), sys.exit(1)))\n"
        "open('here', 'w').close()\n"
        "time.sleep(60)\n"
    )
    keeper = (
        "import sys\n"
        "from pathlib import Path\n"
        "from trireme.cli import machines\n"
        "real = machines.subprocess.Popen\n"
        "machines.subprocess.Popen = lambda command, **options: real([sys.executable, 'ranks.py'], **options)\n"
        "sys.exit(machines._run_ranks(Path('run.json')))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", keeper], cwd=tmp_path)
    until((tmp_path / "here").exists)
    process.terminate()
    assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert (tmp_path / "left").exists()
