"""Rules of `[trainer.loss]`: a key that its recipe would not look at is refused, and so are bounds that mask all."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.base.devices import Devices
from trireme.base.functions import function_problem
from trireme.config.files import ProcessName, toml_value
from trireme.config.losses import CORRECTION_KEYS, SURROGATE_KEYS, Loss, Recipe, given_keys, recipe_of, used_keys
from trireme.config.run import RunConfig

TABLE = "trainer.loss"


def _no_key_is_ignored(config: RunConfig, _: Devices) -> Iterator[str]:
    loss = config.trainer.loss
    recipe = recipe_of(loss, length=1)
    used = used_keys(recipe)
    for key, value in given_keys(loss).items():
        if key not in used and (key, value) != ("correction", "none"):
            yield (
                f"`{TABLE}.{key} = {toml_value(value)}` with {_choices(loss, recipe)} - {_why_ignored(key, recipe)}. "
                f"{_way_out(key)}"
            )


def _choices(loss: Loss, recipe: Recipe) -> str:
    return f'type = "{loss.type}" (surrogate = "{recipe.surrogate}", correction = "{recipe.correction}")'


def _why_ignored(key: str, recipe: Recipe) -> str:
    if key in ("kl_estimator", "reference_update_every"):
        return "expected no such key without a reference model (beta = 0)"
    if key == "normalize_length":
        return f'expected no such key, as nothing is divided by it (normalize = "{recipe.normalize}")'
    if key == "proximal":
        return "expected no such key, as there is neither a ratio nor a correction"
    return f"expected only keys that it reads: {', '.join(sorted(used_keys(recipe)))}"


def _way_out(key: str) -> str:
    surrogates = [name for name, keys in SURROGATE_KEYS.items() if key in keys]
    corrections = [name for name, keys in CORRECTION_KEYS.items() if key in keys]
    settings = {
        "kl_estimator": "beta = 0.01",
        "reference_update_every": "beta = 0.01",
        "normalize_length": 'normalize = "constant"',
        "proximal": 'surrogate = "clip"',
    }
    setting = settings.get(key)
    if surrogates:
        setting = f'surrogate = "{surrogates[0]}"'
    if corrections:
        setting = f'correction = "{corrections[0]}"'
    return f"Remove it, or set `{TABLE}.{setting}`." if setting else "Remove it."


def _corrections_have_a_proximal_policy(config: RunConfig, _: Devices) -> Iterator[str]:
    recipe = recipe_of(config.trainer.loss, length=1)
    if recipe.correction != "none" and recipe.proximal == "behaviour" and recipe.surrogate != "custom":
        yield (
            f'`{TABLE}.proximal = "behaviour"` with correction = "{recipe.correction}" - expected a proximal policy of '
            'its own, as the correction is that over the behaviour policy. Set `proximal = "recomputed"`, or '
            f'`{TABLE}.correction = "none"`.'
        )


def _bounds_are_in_order(config: RunConfig, _: Devices) -> Iterator[str]:
    recipe = recipe_of(config.trainer.loss, length=1)
    used = used_keys(recipe)
    for low_key, high_key in (("ratio_low", "ratio_high"), ("correction_low", "correction_high")):
        low, high = getattr(recipe, low_key), getattr(recipe, high_key)
        if {low_key, high_key} <= used and low >= high:
            yield (
                f"`{TABLE}.{low_key} = {low:g}`, `{high_key} = {high:g}` - expected the first to be smaller; every "
                f"token would be masked. Lower `{low_key}` below 1 and raise `{high_key}` above 1."
            )


def _custom_has_a_path(config: RunConfig, _: Devices) -> Iterator[str]:
    recipe = recipe_of(config.trainer.loss, length=1)
    if recipe.surrogate == "custom" and not recipe.path:
        yield (
            f'`{TABLE}.type = "custom"` without a path - expected the function to call. '
            f'Write `{TABLE}.path = "my_file.py:my_loss"`; `docs/algorithms.md` shows one.'
        )


def _custom_function_is_there(config: RunConfig, _: Devices) -> Iterator[str]:
    path = config.trainer.loss.path
    if path and (problem := function_problem(path, key=f"{TABLE}.path")):
        yield problem


_COMMANDS: tuple[ProcessName | None, ...] = (None, "trainer")

RULES = (
    (_no_key_is_ignored, _COMMANDS),
    (_corrections_have_a_proximal_policy, _COMMANDS),
    (_bounds_are_in_order, _COMMANDS),
    (_custom_has_a_path, _COMMANDS),
)

LAUNCH_RULES = ((_custom_function_is_there, _COMMANDS),)
