"""`eval`: checkpoints of a run, loaded into a running engine, each answering with its own weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.engines.weighed_engine import LETTER, write_weights
from support.runs.evaluating import engine, letters, lines, means, run_eval
from trireme.base.errors import ConfigError
from trireme.cli.eval import eval as eval_command


def test_eval_answers_each_checkpoint_with_its_own_weights(here, capsys):
    with engine() as found:
        assert run_eval(found, "--dry-run") == 0
        assert 'weights_dir = "run/weights"' in capsys.readouterr().out
        assert (found.calls, Path("run/evals").exists()) == ([], False)
        assert run_eval(found) == 0
        assert means() == pytest.approx([0.1, 0.2, 0.3, 0.4])
        assert letters(found) == "abcd"
        assert (found.label, chr(int(found.loaded[LETTER][0, 0])), found.paused) == ("default", "a", False)
        assert {asked.sampling["temperature"] for asked in found.requests} == {0.0}  # one answer is greedy
    assert [(line["version"], line["example"], line["rollout"]) for line in lines(20)] == [(20, n, 0) for n in range(6)]
    described = json.loads(Path("run/evals/step_20/toy.json").read_text())
    assert (described["avg_reward"], described["finished"], described["split"]) == (pytest.approx(0.3), True, "eval")


def test_eval_rejects_an_unloadable_checkpoint_before_any_request(here):
    file = Path("run/weights/step_10/model.safetensors")
    with engine() as found:
        for change, words in (
            (lambda: file.write_bytes(file.read_bytes()[:-9]), r"step_10/model\.safetensors is damaged"),
            (lambda: write_weights(file.parent, "b", rows=5), r"letter\.weight has shape \[5, 3\], expected \[2, 3\]"),
            (lambda: save_file({LETTER: torch.zeros(2, 3)}, file), r"is no .* of the model .*norm.* is missing"),
        ):
            change()
            with pytest.raises(ConfigError, match=words):
                run_eval(found)
            assert (found.answered, "pause" in found.calls) == ([], False)
        assert run_eval(found, "--steps", "20") == 0  # the others are as they were


REFUSED = [
    ("--steps 10,50", "has no step 50 - it has 10, 20, 100"),
    ("--weights-dir run/wieghts", "run/wieghts is no folder"),
    ("--env.id run/../toy.py", "2 of them are called 'toy'"),
    ("--rollouts-per-example 2 --sampling.temperature 0", "would all be the same"),
    ("run say.py", "no model is named"),
    ('run say.py -b http://h/v1 -S {"top_p":7}', "sampling-args: `top_p = 7`"),
    ("rnu wordle", "Did you mean `eval run`"),
    ("wordle", "trireme eval run wordle -m MODEL"),
]


def test_eval_obeys_a_limit_of_tokens_below_that_of_the_engine(here):
    with engine() as found:
        words = ["--client.base-url", f"{found.url}/v1", "--model.name", "base", "--model.max-model-len", "64"]
        assert eval_command([*words, "--env.id", "toy.py"]) == 0
        assert {len(asked.ids) + asked.sampling["max_tokens"] for asked in found.requests} == {64}


def test_what_cannot_work_is_refused_before_anything_starts(here):
    with engine() as found:
        for line, problem in REFUSED:
            with pytest.raises(ConfigError, match=problem):
                run_eval(found, *line.split()) if line.startswith("-") else eval_command(line.split())
            assert (found.calls, Path("run/evals").exists(), Path("outputs").exists()) == ([], False, False)
        found.label = "eval-0a1b2c-loading"
        with pytest.raises(ConfigError, match="has a part of some weights"):
            eval_command(["--client.base-url", f"{found.url}/v1", "--model.name", "base", "--env.id", "toy.py"])
        own = Path("run/evals/step_10/toy.jsonl")
        own.parent.mkdir(parents=True)
        own.write_text(line := '{"example_id": 0, "reward": 1.0, "example": 0, "rollout": 0}\n')
        found.label = "default"
        with pytest.raises(ConfigError, match=r"of the run's own evaluations .*--output-dir"):
            run_eval(found, "--steps", 10, "--no-eval-base")
        assert (own.read_text(), found.answered) == (line, [])
