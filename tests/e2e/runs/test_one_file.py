"""The algorithm in one file learns the quickstart's task, and its engine computes with the trainer's weights."""

import re
from statistics import fmean

import pytest

from support.runs.real_run import run_command


@pytest.mark.slow
def test_one_file_example_learns_its_task():
    output = run_command("python", "examples/rl_in_one_file.py", "--steps", "12", env={"OMP_NUM_THREADS": "2"})
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", output)]
    differences = [float(found) for found in re.findall(r"engine_mismatch (\S+)", output)]
    assert len(rewards) == len(differences) == 12, output
    assert fmean(rewards[-3:]) > rewards[0] + 0.2, rewards
    assert max(differences) < 1e-4, differences  # nats; both compute in float32
