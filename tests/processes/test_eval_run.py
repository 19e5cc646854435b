"""`trireme eval run`: one model on one environment, at any endpoint, with results that scripts can read."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from fake_chat import FakeChat, completion
from interrupts import heed_interrupts
from trireme.base.errors import ConfigError, PeerDied
from trireme.cli.eval import eval as eval_command
from trireme.cli.trireme import trireme

TOY = """
    def dataset(size=12):
        return [{"prompt": f"say {i}", "answer": "yes" if i % 2 else "no"} for i in range(size)]

    def reward(completion, answer):
        return {"reward": float(completion == answer), "length": len(completion)}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "MY_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "toy.py").write_text(textwrap.dedent(TOY))
    (tmp_path / "configs").mkdir()
    return tmp_path


def results(folder: str = "toy--grand-model") -> list[list[dict[str, Any]]]:
    files = sorted(Path("outputs/evals", folder).glob("*/results.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def test_the_analysis_of_the_guide_runs_on_what_is_saved(here, capsys):
    """Every second answer of `yes` is right: of six examples three always, three never."""
    with FakeChat().running() as chat:
        words = ["toy.py", "-m", "grand-model", "-b", chat.url, "-n", "6", "-r", "5", "-s"]
        assert trireme(["eval", "run", *words]) == 0
        assert {(body["model"], body["temperature"]) for body in chat.requests} == {("grand-model", 1.0)}
    [rollouts] = results()
    examples: dict[Any, list[float]] = {}
    for r in rollouts:
        examples.setdefault(r["example_id"], []).append(r["reward"])
    assert examples == {example: [float(example % 2)] * 5 for example in range(6)}
    said = capsys.readouterr().out
    assert "reward         avg - 0.500, std - 0.500" in said
    assert "r5             [0, 1, 0, 1, 0, 1]" in said
    assert "good: 50.0% success" in said
    [file] = Path("outputs/evals/toy--grand-model").glob("*/metadata.json")
    described = json.loads(file.read_text())
    expected = {"env_id": "toy.py", "model": "grand-model", "num_examples": 6, "rollouts_per_example": 5}
    assert expected.items() <= described.items()
    assert (described["avg_reward"], described["metrics"]["pass@4"]) == (0.5, 0.5)


def test_a_model_is_asked_as_the_endpoints_file_and_the_flags_say_and_without_s_nothing_is_saved(
    here, monkeypatch, capsys
):
    monkeypatch.setenv("MY_KEY", "secret-words")
    sampling = ["-S", '{"top_p": 0.5, "logit_bias": {"7": -1}}', "-t", "9", "-T", "0.25"]
    expected = {"model": "grand", "top_p": 0.5, "logit_bias": {"7": -1}, "max_tokens": 9, "temperature": 0.25}
    with FakeChat().running() as chat:
        endpoint = {"model": "grand", "url": chat.url, "key": "MY_KEY"}
        Path("configs/endpoints.py").write_text(f'ENDPOINTS = {{"big": {endpoint}}}')
        words = ["-m", "big", "-n", "-1", "-r", "1", "-v", "-a", '{"size": 3}']
        assert eval_command(["run", "toy.py", *words, *sampling]) == 0
        assert not list(here.glob("outputs/**/*.json*"))
        assert eval_command(["run", "toy.py", *words, *sampling, "-s"]) == 0
    assert len(chat.requests) == 6
    assert all(expected.items() <= asked.items() for asked in chat.requests)
    assert chat.keys == {"Bearer secret-words"}
    said = capsys.readouterr().out
    assert "[user] say 0\n[assistant] yes\nanswer: 'no'\nreward 0, metrics {'length': 3.0}, stopped by" in said
    assert "secret-words" not in "".join(file.read_text() for file in here.glob("outputs/**/*.json*"))


ONE_BY_ONE = ["toy.py", "-m", "grand-model", "-n", "8", "-r", "1", "-s", "-c", "1", "-b"]


def test_an_endpoint_that_goes_away_is_named_and_the_rest_is_asked_later(here, capsys):
    chat = FakeChat()
    words = ["run", *ONE_BY_ONE, chat.url]
    with chat.running():
        chat.answers = lambda number: (200, completion("yes")) if number < 3 else leave()

        def leave() -> tuple[int, Any]:
            chat.leave.set()
            return 503, {}

        with pytest.raises(PeerDied, match=f"{chat.url} is gone"):
            eval_command(words)
    assert "type the same command again" in capsys.readouterr().err
    again = FakeChat(port=chat.port)
    with again.running():
        assert eval_command(words) == 0
        assert len(again.requests) == 5
        [rollouts] = results()
        assert [line["example"] for line in rollouts] == list(range(8))
        assert eval_command(words) == 0  # that one is finished: a new one
    assert [len(each) for each in results()] == [8, 8]


def test_ctrl_c_keeps_what_was_answered(here):
    chat = FakeChat()
    with chat.running():
        command = [sys.executable, "-m", "trireme.cli.trireme", "eval", "run", *ONE_BY_ONE, chat.url]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts)
        chat.answers = lambda number: (200, completion("yes")) if number < 3 else interrupt()

        def interrupt() -> tuple[int, Any]:
            process.send_signal(2)
            return 503, {}

        try:
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "type the same command again" in said
    assert [len(file.read_text().splitlines()) for file in here.glob("outputs/**/results.jsonl.partial")] == [3]


def test_rollouts_that_fail_are_counted_and_only_they_are_tried_again(here, capsys):
    unlucky = """
    from pathlib import Path

    def reward(completion, answer):
        return 1 / (answer == "yes" or Path("mended").exists())
    """
    Path("toy.py").write_text(textwrap.dedent(TOY) + textwrap.dedent(unlucky))
    with FakeChat().running() as chat:
        words = ["run", "toy.py", "-m", "m", "-b", chat.url, "-n", "4", "-r", "1", "-o", "o", "-s", "--into", "mine"]
        assert eval_command(words) == 1
        assert "2 rollouts failed: score: ZeroDivisionError" in capsys.readouterr().out
        assert len(chat.requests) == 2 + 2 * 3
        Path("mended").touch()
        assert eval_command(words) == 0
        assert len(chat.requests) == 8 + 2
    rollouts = [json.loads(line) for line in Path("o/toy--m/mine/results.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in rollouts] == [1.0] * 4


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["tyo.py", "-b", "http://127.0.0.1:9/v1"], r"tyo\.py"),
     (["toy.py"], "no model is named"),
     (["toy.py", "-m", "grand"], r"there is no configs/endpoints\.py"),
     (["toy.py", "-m", "grand", "-b", "http://127.0.0.1:9/v1"], "nobody answers at"),
     (["toy.py", "-m", "grand", "-b", "localhost"], "is no address"),
     (["toy.py", "-b", "http://h/v1", "-k", "NO_SUCH_KEY"], "this variable is not set"),
     (["toy.py", "-b", "http://h/v1", "-S", '{"top_p": 7}'], "sampling-args: top_p = 7"),
     (["toy.py", "-b", "http://h/v1", "-S", '{"temperature": 1}', "-T", "0.5"], "expected one of the two"),
     (["toy.py", "-b", "http://h/v1", "-T", "0"], "would all be the same")],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(here, words, problem):
    with pytest.raises(ConfigError, match=problem):
        eval_command(["run", *words])
    assert not (here / "outputs").exists()


def test_a_verb_that_does_not_exist_is_answered_with_one_that_does():
    with pytest.raises(ConfigError, match=r"Did you mean `eval run`"):
        eval_command(["rnu", "wordle"])
    with pytest.raises(ConfigError, match=r"trireme eval run wordle -m MODEL"):
        eval_command(["wordle"])
