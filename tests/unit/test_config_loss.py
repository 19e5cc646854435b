"""Recipes of losses: every choice is written out, can be overridden, and is refused where it would change nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from trireme.base.devices import Devices
from trireme.config.load import load_run_config
from trireme.config.losses import LOSSES, Loss, recipe_of
from trireme.config.resolve import resolve
from trireme.config.rules import launch_problems, problems
from trireme.config.run import RunConfig
from trireme.config.written import read_run, to_toml, write_run

CPU = Devices(cores=2)
ENV = ("--orchestrator.env", '[{"id": "x"}]')


def resolved(*argv: str) -> RunConfig:
    return resolve(load_run_config([*ENV, *argv], program="rl")[0], CPU)


def of_the_loss(argv: tuple[str, ...]) -> list[str]:
    return [f"--trainer.loss.{word.removeprefix('--')}" if word.startswith("--") else word for word in argv]


def loss(*argv: str) -> Loss:
    return resolved(*of_the_loss(argv)).trainer.loss


def refusals(*argv: str) -> list[str]:
    return problems(resolved(*of_the_loss(argv)), CPU)


def test_the_default_is_written_out_and_keeps_out_what_it_does_not_use() -> None:
    found = loss()
    assert (found.surrogate, found.proximal, found.correction, found.normalize) == (
        "importance",
        "behaviour",
        "none",
        "token",
    )
    assert (found.ratio_low, found.ratio_high, found.kl_tau) == (0.125, 8.0, 0.0)
    assert (found.clip_low, found.correction_high, found.kl_estimator, found.normalize_length) == (None,) * 4


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "custom"])
def test_a_recipe_that_was_written_out_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    config = resolved("--trainer.loss.type", name, "--trainer.loss.beta", "0.1", "--seq-len", "77")
    assert problems(config, CPU) == []
    assert resolve(config, CPU) == config
    assert recipe_of(config.trainer.loss, length=1) == recipe_of(Loss(type=name, beta=0.1), length=77)
    write_run(config, tmp_path / "run.json")
    assert read_run(RunConfig, tmp_path / "run.json").trainer.loss == config.trainer.loss


def test_any_choice_can_be_overridden() -> None:
    found = loss("--type", "dapo", "--clip-high", "0.5", "--normalize", "sequence")
    assert (found.surrogate, found.clip_low, found.clip_high, found.normalize) == ("clip", 0.2, 0.5, "sequence")


def test_a_choice_brings_the_usual_values_of_its_own_keys() -> None:
    found = loss("--type", "dapo", "--surrogate", "clipped_weight")
    assert (found.clip_low, found.clip_high) == (1.0, 4.0)  # those of CISPO, not those of DAPO
    found = loss("--type", "decoupled", "--correction", "token_mask")
    assert (found.correction_low, found.correction_high) == (0.5, 5.0)  # not without a bound


def test_a_correction_needs_no_second_word_for_its_proximal_policy() -> None:
    assert loss("--type", "grpo", "--correction", "token_truncate").proximal == "recomputed"


def test_the_constant_of_dr_grpo_is_what_may_be_sampled() -> None:
    assert loss("--type", "dr_grpo").normalize_length == 2048
    config = resolved("--trainer.loss.type", "dr_grpo", "--orchestrator.sampling.max-tokens", "100")
    assert config.trainer.loss.normalize_length == 100
    assert loss("--type", "dr_grpo", "--normalize-length", "9").normalize_length == 9


def test_the_older_keys_mean_what_they_meant() -> None:
    found = recipe_of(Loss(ratio_low=0.2, ratio_high=math.inf, kl_tau=0.1), length=1)
    assert (found.surrogate, found.ratio_low, found.ratio_high, found.kl_tau) == ("importance", 0.2, math.inf, 0.1)


@pytest.mark.parametrize(
    ("argv", "key", "advice"),
    [
        (["--clip-high", "0.3"], "clip_high", 'surrogate = "clip"'),
        (["--type", "ppo", "--kl-tau", "0.1"], "kl_tau", 'surrogate = "importance"'),
        (["--type", "ppo", "--ratio-low", "0.1"], "ratio_low", 'surrogate = "importance"'),
        (["--type", "gspo", "--dual-clip", "3"], "dual_clip", 'surrogate = "clip"'),
        (["--type", "ppo", "--correction-high", "3"], "correction_high", "correction = "),
        (["--type", "tis", "--correction-low", "0.3"], "correction_low", 'correction = "token_mask"'),
        (["--type", "ppo", "--normalize-length", "3"], "normalize_length", 'normalize = "constant"'),
        (["--kl-estimator", "k1"], "kl_estimator", "beta = 0.01"),
        (["--reference-update-every", "5"], "reference_update_every", "beta = 0.01"),
        (["--type", "reinforce", "--proximal", "behaviour"], "proximal", 'surrogate = "clip"'),
        (["--path", "a.py:b"], "path", 'surrogate = "custom"'),
        (["--type", "custom", "--path", "a.py:b", "--correction", "token_mask"], "correction", "Remove it"),
    ],
)
def test_a_key_that_would_change_nothing_is_refused(argv: list[str], key: str, advice: str) -> None:
    (message,) = [message for message in refusals(*argv) if f"trainer.loss.{key} = " in message]
    assert advice in message


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--type", "tis", "--proximal", "behaviour"], "expected a proximal policy of its own"),
        (["--ratio-low", "9"], "every token would be masked"),
        (["--type", "icepop", "--correction-high", "0.4"], "every token would be masked"),
        (["--type", "custom"], "without a path"),
    ],
)
def test_contradictions_are_refused(argv: list[str], what: str) -> None:
    assert [message for message in refusals(*argv) if what in message]


def test_a_custom_function_must_be_there_when_the_run_starts(tmp_path: Path) -> None:
    flags = ["--trainer.loss.type", "custom", "--trainer.loss.path", f"{tmp_path}/mine.py:loss"]
    assert problems(resolved(*flags), CPU) == []
    assert any("mine.py does not exist" in message for message in launch_problems(resolved(*flags), CPU))
    (tmp_path / "mine.py").write_text("def loss(columns): ...\n")
    assert not any("mine.py" in message for message in launch_problems(resolved(*flags), CPU))


def test_the_trainers_own_file_says_what_the_recipe_is() -> None:
    assert 'type = "decoupled"' in (text := to_toml(loss("--type", "decoupled").model_dump(exclude_none=True)))
    assert "correction_high = inf" in text


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("--beta", "--trainer.loss.beta"),
        ("--num-iterations", "--trainer.num-iterations"),
        ("--epsilon", "--trainer.loss.clip-low"),
        ("--trainer.epsilon-high", "--trainer.loss.clip-high"),
    ],
)
def test_names_from_elsewhere_are_pointed_to_ours(typed: str, ours: str) -> None:
    with pytest.raises(ValueError, match=ours):
        load_run_config([typed, "1"], program="rl")


def test_the_documentation_has_every_recipe_with_its_values_and_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    recipes = page.partition("\n### Recipes\n")[2].partition("\n### ")[0]
    rows = {line.split("|")[1].strip(): line for line in recipes.splitlines() if line.startswith("| `")}
    for name, recipe in LOSSES.items():
        row = rows[f"`{name}`"].replace("own", "recomputed").replace("| mu |", "| behaviour |")
        assert f"| {recipe.normalize} |" in row
        if recipe.has_ratio:
            assert f"| {recipe.proximal} |" in row
    for name in ("dapo", "gspo", "cispo"):
        assert f"`clip_low` {_short(LOSSES[name].clip_low)}" in rows[f"`{name}`"]
        assert f"`clip_high` {_short(LOSSES[name].clip_high)}" in rows[f"`{name}`"]
    for name in ("tis", "icepop", "decoupled"):
        assert f"`correction_high` {_short(LOSSES[name].correction_high)}" in rows[f"`{name}`"]
    assert [key for key in Loss.model_fields if f"`{key}" not in page and f"{key} =" not in page] == []


def _short(number: float) -> str:
    return f"{number:g}".replace("0.0003", "3e-4").replace("0.0004", "4e-4")
