"""`eval`: checkpoints of a run, loaded into a running engine; `eval run`: one model on one environment, anywhere."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.engines.fake_chat import FakeChat, completion, served
from support.engines.weighed_engine import LETTER, WeighedEngine, open_weighed_engine, write_weights
from support.processes.interrupts import heeding_interrupts
from trireme.algo.digest import tensor_digest
from trireme.base.errors import ConfigError, PeerDied, WeightsMismatch
from trireme.cli.command import run_command
from trireme.cli.eval import eval as eval_command
from trireme.cli.trireme import trireme
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.journal.versions import Versions
from trireme.tools.evaluate.config import EvalConfig, inherit_from_run, with_environments
from trireme.tools.policies.engine import WeightsReplaced

TOY = """
def dataset():
    return [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]

def eval_dataset():
    return [{"prompt": "held out", "answer": str(i)} for i in range(6)]

def reward(completion):
    return "_abcd".index(completion) / 10
"""

SAY = """
def dataset(size=12):
    return [{"prompt": f"say {i}", "answer": "yes" if i % 2 else "no"} for i in range(size)]

def reward(completion, answer):
    return float(completion == answer)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "MY_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "say.py").write_text(SAY)
    (tmp_path / "configs").mkdir()
    write_weights(tmp_path / "base", "a")
    for step, letter in ((10, "b"), (20, "c"), (100, "d")):
        write_weights(tmp_path / "run" / "weights" / f"step_{step}", letter)
    return tmp_path


@contextmanager
def engine(base: str = "base", **knobs: Any) -> Iterator[WeighedEngine]:
    with served(lambda: open_weighed_engine(Path(base).resolve(), **knobs)) as found:
        yield found


def run_eval(engine: WeighedEngine, *words: str | int, env: tuple[str, ...] = ("--env.id", "toy.py")) -> int:
    where = ["--client.base-url", f"{engine.url}/v1", "--weights-dir", "run/weights"]
    return eval_command([*where, *env, *map(str, words)])


def lines(step: int, name: str = "toy") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("run/evals", f"step_{step}", f"{name}.jsonl").read_text().splitlines()]


def means() -> list[float]:
    found = [[line["reward"] for line in lines(step)] for step in (0, 10, 20, 100)]
    return [sum(rewards) / len(rewards) for rewards in found]


def letters(found: WeighedEngine) -> str:
    """What was answered, one letter for each six answers in a row."""
    answered = "".join(letter for _, letter in found.answered)
    assert answered == "".join(6 * letter for letter in answered[::6])
    return answered[::6]


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


def test_eval_asks_only_for_answers_missing_after_an_engine_death(here, capsys):
    one_by_one = ("--max-concurrent", 1, "--num-examples", 5)
    with engine(gone_after=8) as found:  # 5 of the base model, 3 of step 10
        with pytest.raises(PeerDied, match=f"{found.url} is gone"):
            run_eval(found, *one_by_one)
        assert found.url in capsys.readouterr().err
        num_answered = len(found.answered)  # an open connection may be answered once more
    done = Path("run/evals/step_10/toy.jsonl")
    kept = done.with_name("toy.jsonl.partial").read_text().splitlines()
    assert 1 <= len(kept) <= num_answered - 5 < 5
    assert not done.exists()
    with engine() as found:
        assert run_eval(found, *one_by_one) == 0
        assert len(found.answered) == 20 - 5 - len(kept)
        assert means() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert not list(Path("run/evals").glob("**/*.partial"))
    whole = done.read_bytes()
    done.with_name("toy.jsonl.partial").write_bytes(whole[: len(whole) // 2])
    done.unlink()
    with engine() as found:
        assert run_eval(found, *one_by_one) == 0
        assert 0 < len(found.answered) < 5
        assert done.read_bytes() == whole
        num_answered = len(found.answered)
        assert run_eval(found, *one_by_one) == 0
        assert len(found.answered) == num_answered


def test_eval_continues_with_more_examples_but_refuses_fewer(here):
    with engine() as found:
        assert run_eval(found, "--steps", 10, "--num-examples", 2) == 0
        assert run_eval(found, "--steps", 10, "--num-examples", 5) == 0
        assert len(found.answered) == 10
        with pytest.raises(ConfigError, match="2 x 1 are asked for - expected at least as many"):
            run_eval(found, "--steps", 10, "--num-examples", 2)
        with pytest.raises(ConfigError, match="sampling_args"):
            run_eval(found, "--steps", 10, "--num-examples", 5, "--sampling.temperature", "0.7")
        write_weights(Path("run/weights/step_10"), "d")
        with pytest.raises(ConfigError, match="made with weights"):  # although no answer is missing
            run_eval(found, "--steps", 10, "--num-examples", 5)
        assert found.label == "default"  # given back all the same
    write_weights(here / "another", "e")
    with engine("another") as found, pytest.raises(ConfigError, match=r"made with model = .*base'"):
        run_eval(found, "--steps", 10, "--num-examples", 6)


OTHERS = {"serves version 40 of a training run": {"label": "40"}, "is paused": {"is_frozen": True}}
FAILS = {
    f"step_10 did not arrive .*{LETTER} has digest another": {"digest_error": LETTER},
    "step_10 was not loaded whole .*model.norm": {"incomplete": ("model.norm",)},
    "update broke": {"failing_route": "update"},
}


@pytest.mark.parametrize(("words", "knobs"), (OTHERS | FAILS).items())
def test_eval_asks_no_engine_that_is_in_use_or_has_the_wrong_weights(here, words, knobs):
    with engine(**knobs) as found:
        with pytest.raises(ConfigError if words in OTHERS else (WeightsMismatch, PeerDied), match=words):
            run_eval(found, "--no-eval-base")
        assert found.answered == []
        if words in OTHERS:  # it was asked what it holds, and told nothing
            assert set(found.calls) <= {"weight_report"}
            assert found.label == knobs.get("label", "default")
        else:
            assert found.label.endswith("-loading")


def test_eval_restores_the_base_model_after_a_garbled_checkpoint(here):
    with engine(garbles="b") as found:
        with pytest.raises(WeightsMismatch, match="step_10 did not arrive"):
            run_eval(found, "--no-eval-base")
        assert (found.letter, found.label, found.running.is_set()) == ("a", "default", True)


@pytest.mark.parametrize(
    ("label", "is_frozen", "offset", "words"),
    [("40", False, 3, ["--take-over"]), ("eval-0a1b2c-base", True, 0, []), ("eval-0a1b2c-loading", True, 3, [])],
)  # fmt: skip
def test_eval_takes_over_an_engine_that_is_free_again(here, label, is_frozen, offset, words):
    """Its run is over, or an evaluation left it paused, or in the middle of a transfer."""
    with engine(label=label, is_frozen=is_frozen) as found:
        found.loaded[LETTER] += offset
        assert run_eval(found, "--steps", 10, *words) == 0
        assert letters(found) == "ab"


@pytest.mark.parametrize(
    ("after", "label", "words", "kept"),
    [(8, "41", "answered with weights '41'", [6, 2]), (6, "0", "serves '0' now", [6, 0])],
)  # fmt: skip
def test_eval_ends_if_a_run_gives_the_engine_new_weights(here, after, label, words, kept):
    with engine(label_after=(after, label)) as found:
        with pytest.raises(WeightsReplaced, match=words):
            run_eval(found, "--max-concurrent", 1)
        assert (found.calls.count("update"), found.label) == (kept[1] > 0, label)
    partial = Path("run/evals/step_10/toy.jsonl.partial")
    assert [len(lines(0)), len(partial.read_text().splitlines()) if partial.exists() else 0] == kept


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


def test_eval_inherits_unset_options_from_the_run_of_the_checkpoints(here):
    env, evaluation = {"id": "toy.py", "name": "of-the-run"}, {"num_examples": 3, "sampling": {"temperature": 0.5}}
    evaluation["pass_threshold"] = 0.25
    orchestrator = {"env": [env], "sampling": {"max_tokens": 7}, "eval": evaluation}
    config = RunConfig.model_validate({"output_dir": "run", "device": "cpu", "orchestrator": orchestrator})
    write_run(config, config.paths.run_config)
    assert inherit_from_run(EvalConfig(num_examples=2), config).pass_threshold == 0.25
    for step, letter, offset in ((10, "b", 0), (20, "c", 1)):
        tensors = {LETTER: torch.full((2, 3), float(ord(letter))), "norm.weight": torch.arange(4.0) + offset}
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        Versions(config.paths.journal).record(step, ["http://x"], digests, 0.0)
    with engine() as found:
        assert run_eval(found, "--steps", 10, env=()) == 0
        assert run_eval(found, "--steps", 100, "--no-eval-base", "--sampling.max-tokens", 5, env=()) == 0
        sampled = [(asked.sampling["temperature"], asked.sampling["max_tokens"]) for asked in found.requests]
        assert sampled == [(0.5, 7)] * 6 + [(0.5, 5)] * 3
        with pytest.raises(ConfigError, match=r"step_20 is not what the run's engines confirmed .*norm\.weight"):
            run_eval(found, "--steps", 20, env=())
        assert found.label == "default"
        assert "".join(letter for _, letter in found.answered) == "aaabbbddd"
    assert len(lines(10, "of-the-run")) == 3


@pytest.mark.parametrize("of_the_run", [True, False])
def test_environment_is_sampled_as_its_own_table_says(here, of_the_run):
    """The rollouts, examples and sampling of its own, whether the run or the file of the evaluation has them."""
    hot = {"id": "toy.py", "name": "hot", "rollouts_per_example": 2, "num_examples": 3, "sampling": {"top_p": 0.5}}
    both = [hot | {"sampling": {"top_p": 0.5, "temperature": 1.0}}, {"id": "say.py", "num_examples": 4}]
    orchestrator = {"env": [{"id": "say.py"}], "sampling": {"max_tokens": 7}, "eval": {"num_examples": 4, "env": both}}
    if of_the_run:
        config = RunConfig.model_validate({"output_dir": "run", "device": "cpu", "orchestrator": orchestrator})
        write_run(config, config.paths.run_config)
    # Several rollouts of an example have temperature 1 if none is given.
    Path("eval.json").write_text(json.dumps({"num_examples": 4, "env": [hot, {"id": "say.py"}]}))
    with engine() as found:
        run_eval(found, "--steps", 10, "--no-eval-base", env=() if of_the_run else ("@", "eval.json"))
        asked = [(each.sampling["temperature"], each.sampling.get("top_p", 1.0)) for each in found.requests]
    assert sorted(asked) == [(0.0, 1.0)] * 4 + [(1.0, 0.5)] * 6
    assert [(len(lines(10, "hot")), len(lines(10, "say")))] == [(6, 4)]


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


def test_environments_may_be_given_as_tables():
    assert with_environments(["--env", "[{id='a'}]"]) == ["--env", "[{id='a'}]"]


def test_several_rollouts_and_environments_are_measured_each_for_itself(here):
    Path("other.py").write_text(TOY.replace("range(6)", "range(2)"))
    with engine() as found:
        words = ["--env.id", "other.py", "--rollouts-per-example", 4, "--pass-threshold", "0.25", "--pass-at", "[1, 4]"]
        assert run_eval(found, *words, "--steps", "10,20", "--output-dir", "elsewhere") == 0
        assert {asked.sampling["temperature"] for asked in found.requests} == {1.0}
    folder = Path("elsewhere")
    assert [(folder / f"step_10/{name}.jsonl").read_text().count("\n") for name in ("toy", "other")] == [24, 8]
    toy, other = (json.loads((folder / f"{name}.json").read_text()) for name in ("step_10/toy", "step_20/other"))
    assert (toy["metrics"]["pass@4"], other["metrics"]["pass@4"]) == (0, 1)
    assert other["metrics"]["avg@4"] == pytest.approx(0.3)


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
