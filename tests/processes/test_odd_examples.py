"""An environment whose examples break what reads them costs those rollouts: the run, and its evaluation, go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from trireme.orchestrator.evaluation.results import read_eval_results, results_path
from whole_run import build_config, run

CODE = """
    ODD = {odd}

    def dataset(split="train"):
        return [{{"prompt": f"say {{i}}" if i else ODD, "answer": ""}} for i in range(4)]

    def reward(completion, answer):
        return 1.0
"""
TEMPLATE = "{% for m in messages %}{{ m.role if m.content != 'say odd' else 1 + m.role }}: {{ m.content }}{% endfor %}"


@pytest.mark.parametrize("odd", ["dict(role=0, content='say 25')", "'say odd'"])
def test_an_example_that_no_template_can_render_costs_its_own_rollouts(odd: str, tmp_path: Path) -> None:
    config = build_config(tmp_path, CODE.format(odd=odd), orchestrator={"eval": {"num_examples": 4}})
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    outcome = run(config)
    assert outcome.error is None
    assert len(outcome.records) == 3
    assert {rollout.example for record in outcome.records for rollout in record.rollouts} == {1, 2, 3}
    assert {drop.example for record in outcome.records for drop in record.dropped} == {0}
    answers = read_eval_results(results_path(config.paths, 0, "say"))
    assert {answer.example for answer in answers if answer.error is not None} == {0}
    assert len(answers) == 4
