"""Recipes of losses: every choice is written out, can be overridden, and is refused where it would change nothing."""

import math
from pathlib import Path

import pytest

from resolved_runs import prefixed, refusals, resolved
from trireme.config.files import read_run, to_toml, write_run
from trireme.config.losses import RECIPES, Loss, has_ratio, resolve_loss
from trireme.config.run import RunConfig


def test_the_default_is_written_out_and_keeps_out_what_it_does_not_use():
    found = resolved().trainer.loss
    chosen = ("importance", "behaviour", "none", "token")
    assert (found.surrogate, found.proximal, found.correction, found.normalize) == chosen
    assert (found.ratio_low, found.ratio_high, found.kl_tau) == (0.125, 8.0, 0.0)
    assert (found.clip_low, found.correction_high, found.kl_estimator, found.normalize_length) == (None,) * 4
    older = resolve_loss(Loss(ratio_low=0.2, ratio_high=math.inf, kl_tau=0.1), length=1)
    assert (older.surrogate, older.ratio_low, older.ratio_high, older.kl_tau) == ("importance", 0.2, math.inf, 0.1)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "custom"])
def test_a_recipe_that_was_written_out_is_the_same_recipe(name, tmp_path):
    flags = f"--trainer.loss.type {name} --trainer.loss.beta 0.1 --seq-len 77"
    config = resolved(flags)
    assert refusals(flags) == []
    assert resolve_loss(config.trainer.loss, length=1) == resolve_loss(Loss(type=name, beta=0.1), length=77)
    write_run(config, tmp_path / "run.json")
    assert f'type = "{name}"' in to_toml(config.trainer.loss.model_dump(exclude_none=True))
    assert read_run(RunConfig, tmp_path / "run.json").trainer.loss == config.trainer.loss


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--type dapo --clip-high 0.5 --normalize sequence", {"clip_high": 0.5, "clip_low": 0.2, "surrogate": "clip"}),
        ("--type dapo --surrogate clipped_weight", {"clip_low": 1.0, "clip_high": 4.0}),  # those of CISPO
        ("--type decoupled --correction token_mask", {"correction_low": 0.5, "correction_high": 5.0}),
        ("--type grpo --correction token_truncate", {"proximal": "recomputed", "normalize": "sequence"}),
        # the constant of Dr. GRPO is what may be sampled
        ("--type dr_grpo", {"normalize_length": 2048}),
        ("--type dr_grpo --normalize-length 9", {"normalize_length": 9}),
    ],
)
def test_any_choice_can_be_overridden_and_brings_the_usual_values_of_its_own_keys(flags, expected):
    found = resolved(prefixed("trainer.loss", flags)).trainer.loss
    assert {key: getattr(found, key) for key in expected} == expected
    sampled = resolved("--trainer.loss.type dr_grpo --orchestrator.sampling.max-tokens 100")
    assert sampled.trainer.loss.normalize_length == 100


def test_the_documentation_has_every_recipe_with_its_values_and_every_key():
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    recipes = page.partition("\n### Recipes\n")[2].partition("\n### ")[0]
    rows = {line.split("|")[1].strip(): line for line in recipes.splitlines() if line.startswith("| `")}
    recipes = {name: resolve_loss(Loss(type=name), length=1) for name in RECIPES}
    for name, recipe in recipes.items():
        row = rows[f"`{name}`"].replace("own", "recomputed").replace("| mu |", "| behaviour |")
        assert f"| {recipe.normalize} |" in row
        assert not has_ratio(recipe) or f"| {recipe.proximal} |" in row
    documented = {"clip_low": ("dapo", "gspo", "cispo"), "clip_high": ("dapo", "gspo", "cispo")}
    documented |= {"correction_high": ("tis", "icepop", "decoupled")}
    for key, names in documented.items():
        for name in names:
            value = f"{getattr(recipes[name], key):g}".replace("0.0003", "3e-4").replace("0.0004", "4e-4")
            assert f"`{key}` {value}" in rows[f"`{name}`"]
    assert [key for key in Loss.model_fields if f"`{key}" not in page and f"{key} =" not in page] == []
