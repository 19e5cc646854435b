"""`trireme doctor` with the real torch, vLLM and three real steps."""

import json

import pytest

from real_run import run_command

pytestmark = pytest.mark.slow


def test_a_machine_on_which_everything_works_is_told_so(tmp_path) -> None:
    words = ["@", "tests/e2e/synchronous.toml", "--output-dir", str(tmp_path), "--json"]
    answers = {answer["name"]: answer for answer in json.loads(run_command("trireme", "doctor", *words))["answers"]}
    assert [answer for answer in answers.values() if answer["verdict"] == "problem"] == []
    assert answers["torch"]["figures"]["computes"]
    assert answers["run"]["verdict"] == "ok"
    assert answers["run"]["figures"]["versions_confirmed"] == 4  # the base model, and one after each step
    assert list(tmp_path.iterdir()) == []
