"""The algorithm in one file learns the quickstart's task, and its engine computes with the trainer's weights."""

import os
import re
import subprocess
import sys
from statistics import fmean

import pytest

from real_run import DEADLINE_S, REPOSITORY


@pytest.mark.slow
def test_the_example_in_one_file_learns_and_engine_and_trainer_agree_after_every_update() -> None:
    command = [sys.executable, "examples/rl_in_one_file.py", "--steps", "12"]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", done.stdout)]
    differences = [float(found) for found in re.findall(r"engine_mismatch (\S+)", done.stdout)]
    assert len(rewards) == len(differences) == 12, done.stdout
    assert fmean(rewards[-3:]) > rewards[0] + 0.2, rewards
    assert max(differences) < 1e-4, differences  # nats; both compute in float32
