"""An evaluation that was interrupted asks only for what it lacks, and its results are never mixed."""

import json
from pathlib import Path

import pytest

from support.engines.weighed_engine import write_weights
from support.runs.evaluating import TOY, engine, means, run_eval
from trireme.base.errors import ConfigError, PeerDied


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
