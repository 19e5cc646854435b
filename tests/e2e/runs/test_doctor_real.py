"""`trireme doctor` with the real torch, vLLM, collectives and three real steps; and collectives that cannot work."""

import json

import pytest

from doctoring import build_case
from real_run import run_command
from trireme.tools.doctor.rehearsal import check_collectives
from trireme.tools.doctor.report import Finding

pytestmark = pytest.mark.slow


def test_a_machine_on_which_everything_works_is_told_so(tmp_path) -> None:
    words = ["@", "tests/e2e/synchronous.toml", "--output-dir", str(tmp_path), "--json"]
    answers = {answer["name"]: answer for answer in json.loads(run_command("trireme", "doctor", *words))["answers"]}
    assert [answer for answer in answers.values() if answer["verdict"] == "problem"] == []
    assert answers["torch"]["figures"]["computes"]
    assert answers["collectives"]["figures"]["broadcast_bytes_per_s"] > 0
    assert answers["run"]["verdict"] == "ok"
    assert answers["run"]["figures"]["versions_confirmed"] == 4  # the base model, and one after each step
    assert list(tmp_path.iterdir()) == []


def test_two_processes_that_cannot_reach_each_other_are_a_problem(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    found: list[Finding] = list(check_collectives(build_case(tmp_path)))
    assert [finding.verdict for finding in found] == ["problem"]
    assert "nosuch0" in found[0].found
    assert "GLOO_SOCKET_IFNAME" in found[0].fix
