"""`eval run`: one model on one environment, anywhere."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from support.engines.fake_chat import FakeChat, completion
from support.processes.interrupts import heeding_interrupts
from support.runs.evaluating import SAY, engine
from trireme.base.errors import ConfigError
from trireme.cli.command import run_command
from trireme.cli.eval import eval as eval_command
from trireme.cli.trireme import trireme

UNKNOWN = [
    ({"top_pp": 1}, "top_pp .* Did you mean `top_p`"),
    ({"max_completion_tokens": 5}, "Did you mean `max_tokens`"),
    ({"enable_thinking": False}, "chat_template_kwargs = { enable_thinking = … }"),
    ({"chat_template_kwargs": {"enable": 1}}, "`enable` is no variable of the chat template"),
    ({"extra_body": {"reasoning_effort": "low"}}, "`reasoning_effort` is no variable of the chat template"),
    ({"top_p": 0.5, "extra_body": {"top_p": 0.9}}, "expected it once"),
]


@pytest.mark.parametrize(("arguments", "problem"), UNKNOWN)
def test_sampling_that_an_engine_of_ours_does_not_know_is_refused(here, arguments, problem):
    with engine() as found:
        words = ["run", "say.py", "-b", f"{found.url}/v1", "-m", "base", "-S", json.dumps(arguments)]
        with pytest.raises(ConfigError, match=problem):
            eval_command(words)
        assert not found.answered


def test_the_analysis_of_the_guide_runs_on_what_is_saved(here, capsys, monkeypatch):
    """Every second answer of `yes` is right: of six examples three always, three never."""
    monkeypatch.setenv("MY_KEY", "secret-words")
    words = ["say.py", "-m", "big", "-n", "-1", "-r", "5", "-a", '{"size": 6}']
    words += ["-S", '{"top_p": 0.5, "logit_bias": {"7": -1}, "temperature": 0.25}', "-t", "9", "-T", "0.5"]
    with FakeChat().running() as chat:
        endpoint = {"model": "grand", "url": chat.url, "key": "MY_KEY"}
        Path("configs/endpoints.py").write_text(f'ENDPOINTS = {{"big": {endpoint}}}')
        assert eval_command(["run", *words]) == 0
        assert not list(here.glob("outputs/**/*.json*"))
        assert trireme(["eval", "run", *words, "-s"]) == 0
    asked = {"model": "grand", "top_p": 0.5, "logit_bias": {"7": -1}, "max_tokens": 9, "temperature": 0.25}
    assert [asked.items() <= body.items() for body in chat.requests] == [True] * 60
    assert chat.keys == {"Bearer secret-words"}
    assert "secret-words" not in "".join(file.read_text() for file in here.glob("outputs/**/*.json*"))
    [file] = Path("outputs/evals/say--big").glob("*/results.jsonl")
    examples: dict[Any, list[float]] = {}
    for r in map(json.loads, file.read_text().splitlines()):
        examples.setdefault(r["example_id"], []).append(r["reward"])
    assert examples == {example: [float(example % 2)] * 5 for example in range(6)}
    assert "good: 50.0% success" in capsys.readouterr().out
    described = json.loads(file.with_name("metadata.json").read_text())
    expected = {"env_id": "say.py", "model": "big", "num_examples": 6, "rollouts_per_example": 5}
    assert expected.items() <= described.items()
    assert (described["avg_reward"], described["metrics"]["pass@4"]) == (0.5, 0.5)


def test_ctrl_c_keeps_what_was_answered(here, capsys, monkeypatch):
    def interrupt() -> tuple[int, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return 503, {}

    with FakeChat().running() as chat:
        chat.answers = lambda number: (200, completion("yes")) if number < 3 else interrupt()
        words = ["run", "say.py", "-m", "grand-model", "-n", "8", "-r", "1", "-s", "-c", "1", "-b", chat.url]
        monkeypatch.setattr(sys, "argv", ["eval", *words])
        with heeding_interrupts(), pytest.raises(SystemExit) as end:
            run_command("eval", eval_command)
    assert end.value.code == 130
    assert "type the same command again" in capsys.readouterr().err
    assert [len(file.read_text().splitlines()) for file in here.glob("outputs/**/results.jsonl.partial")] == [3]


def test_rollouts_that_fail_are_counted_and_only_they_are_tried_again(here, capsys):
    failing = '1 / (answer == "yes" or Path("mended").exists())'
    Path("say.py").write_text("from pathlib import Path\n" + SAY.replace("float(completion == answer)", failing))
    with FakeChat().running() as chat:
        words = ["run", "say.py", "-m", "m", "-b", chat.url, "-n", "4", "-r", "1", "-o", "o", "-s"]
        assert eval_command(words) == 1
        assert "2 rollouts failed: score: ZeroDivisionError" in capsys.readouterr().out
        assert len(chat.requests) == 2 + 2 * 3
        Path("mended").touch()
        assert eval_command(words) == 0
        assert len(chat.requests) == 8 + 2
        [description] = Path("o/say--m").glob("*/metadata.json")
        description.write_text(description.read_text().replace('"finished": true', '"finished": false'))
        assert eval_command(words) == 0  # where it was killed before it described its results
        assert json.loads(description.read_text())["finished"] is True
        assert len(chat.requests) == 8 + 2
    [file] = Path("o/say--m").glob("*/results.jsonl")
    rollouts = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["reward"] for line in rollouts] == [1.0] * 4
