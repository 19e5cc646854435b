"""An engine that an evaluation takes is its own, has the right weights, and is given back as it was."""

from pathlib import Path

import pytest

from support.engines.weighed_engine import LETTER
from support.runs.evaluating import engine, letters, lines, run_eval
from trireme.base.errors import ConfigError, PeerDied, WeightsMismatch
from trireme.tools.policies.engine import WeightsReplaced

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
