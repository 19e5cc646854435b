"""What `rl` writes before it starts anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trireme.cli.rl import write_configs
from trireme.config.run import RunConfig


def seed_in(path: Path) -> int:
    return json.loads(path.read_text())["seed"]


def test_a_run_that_is_gone_on_with_other_settings_keeps_those_that_it_had_before(tmp_path: Path) -> None:
    for seed in (1, 1, 2, 3):
        write_configs(RunConfig(output_dir=tmp_path, seed=seed), tmp_path)
    assert seed_in(tmp_path / "run.json") == 3
    earlier = sorted(tmp_path.glob("run.earlier-*.json"))
    assert [path.name for path in earlier] == ["run.earlier-1.json", "run.earlier-2.json"]
    assert [seed_in(path) for path in earlier] == [1, 2]


def test_who_stops_reading_what_a_command_prints_gets_no_traceback(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "trireme.cli.trireme", "env", "list"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_settings_that_a_run_is_gone_on_with_and_did_not_have_are_told(tmp_path: Path, capsys) -> None:
    def write(**values: Any) -> str:
        write_configs(RunConfig.model_validate({"output_dir": str(tmp_path)} | values), tmp_path)
        return capsys.readouterr().out

    assert write(seed=1) == ""
    assert write(seed=1) == ""
    told = write(seed=2, trainer={"optim": {"lr": 0.5}}, ports={"batches": 4000})
    assert told.startswith(f"other settings than before (those are in {tmp_path}/run.earlier-1.json):")
    assert "seed: 1 -> 2" in told
    assert "trainer.optim.lr: " in told
    assert "-> 0.5" in told
    assert "ports" not in told  # where it runs is no matter
