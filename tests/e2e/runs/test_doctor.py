"""`trireme doctor` with the real torch, vLLM and three real steps."""

import json
import subprocess

import pytest

from support.runs.real_run import DEADLINE_S, REPOSITORY, command

pytestmark = pytest.mark.slow


def test_a_machine_on_which_everything_works_is_told_so(tmp_path):
    words = [command("trireme"), "doctor", "@", "tests/e2e/synchronous.toml", "--output-dir", tmp_path, "--json"]
    printed = subprocess.run(words, cwd=REPOSITORY, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True).stdout
    answers = {answer["name"]: answer for answer in json.loads(printed)["answers"]}
    assert [answer for answer in answers.values() if answer["verdict"] == "problem"] == []
    assert answers["torch"]["figures"]["computes"]
    assert answers["run"]["verdict"] == "ok"
    assert answers["run"]["figures"]["versions_confirmed"] == 4  # the base model, and one after each step
    assert list(tmp_path.iterdir()) == []
