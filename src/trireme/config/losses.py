"""`[trainer.loss]`: a recipe by name, and a key for each of its choices. The formulas are in `trireme.algo.loss`.

A key that the user leaves out takes the recipe's value. A choice that the user makes (`surrogate`, `correction`) brings
the usual values of its own keys with it. `resolve_loss` fills in all keys that the loss reads; the others stay None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from trireme.config.section import Section

_MaskedRatio = Literal["importance", "ipo", "dppo_tv", "dppo_kl"]
_BoundedRatio = Literal["clip", "sequence_clip", "geometric_mean", "soft_gate", "clip_cov", "kl_cov"]
_FixedWeight = Literal["clipped_weight", "gamma_weight", "reinforce", "cross_entropy"]
Surrogate = Literal[_MaskedRatio, _BoundedRatio, _FixedWeight, "custom"]
Proximal = Literal["behaviour", "recomputed"]
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"]
Normalize = Literal["token", "sequence", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
NonNegative = Annotated[float, Field(ge=0)]


class Loss(Section):
    """`[trainer.loss]`: a recipe by name; every choice it is made of can be overridden by its own key."""

    model_config = ConfigDict(allow_inf_nan=True)  # a bound of `inf` bounds nothing

    type: Literal[
        "importance",
        "ipo",
        "dppo_tv",
        "dppo_kl",
        "grpo",
        "ppo",
        "dr_grpo",
        "dapo",
        "gspo",
        "luspo",
        "gmpo",
        "sapo",
        "vespo",
        "clip_cov",
        "kl_cov",
        "cispo",
        "reinforce",
        "tis",
        "icepop",
        "decoupled",
        "cross_entropy",
        "custom",
    ] = "dppo_tv"
    """The recipe; `docs/algorithms.md` has the formula of each, its source, and when to take it."""
    adv_tau: NonNegative = 1.0
    """Factor of all advantages."""
    surrogate: Surrogate | None = None
    """Use of ratio and advantage (`docs/algorithms.md` has each); the recipe's if not set."""
    proximal: Proximal | None = None
    """Denominator of the ratio: the policy that sampled, or the trainer's own weights at the start of the batch."""
    correction: Correction | None = None
    """Weight for staleness and mismatch, proximal over behaviour policy: per token or sequence, cut off or masked."""
    correction_low: NonNegative | None = None
    """Weights below this are masked; for the corrections that mask."""
    correction_high: PositiveFloat | None = None
    """Weights above this are cut down to it, or masked; `inf` leaves all as they are."""
    normalize: Normalize | None = None
    """Divide by the batch's tokens, by each sample's length and the number of samples, or by samples times
    `normalize_length`."""
    normalize_length: PositiveInt | None = None
    """The constant of `normalize = "constant"`; `orchestrator.sampling.max_tokens` or `seq_len` if not set."""
    ratio_low: NonNegative | None = None
    """Surrogate `importance`: tokens whose ratio is below this get no gradient; 0 masks none."""
    ratio_high: PositiveFloat | None = None
    """Surrogate `importance`: tokens whose ratio is above this get no gradient."""
    eps: NonNegative | None = None
    """Surrogate `ipo`: tokens whose probability differs from the behaviour policy's by more get no gradient."""
    mask_low: NonNegative | None = None
    """Surrogates `dppo_*`: a token with a negative advantage gets no gradient once its probability has fallen by more
    (`dppo_kl`: has fallen, and the KL divergence of taking it or not is above this)."""
    mask_high: NonNegative | None = None
    """The same for a token with a positive advantage whose probability has risen."""
    max_importance_ratio: Annotated[float, Field(ge=1)] | None = None
    """Surrogates `ipo` and `dppo_*`: larger ratios count as this; `inf` leaves all as they are."""
    kl_tau: NonNegative | None = None
    """Surrogate `importance`: weight of the KL divergence to the behaviour policy. Surrogates `ipo` and `dppo_*`:
    weight of the squared log ratio, also of masked tokens. 0 leaves it out."""
    score_centering: bool | None = None
    """Surrogates `importance`, `ipo` and `reinforce`: subtract the average gradient of the tokens that the engine could
    have sampled in a token's place."""
    score_centering_top_k: PositiveInt | None = None
    """Likeliest tokens at each place that are known for it; the engine reports their logprobs."""
    clip_low: NonNegative | None = None
    """Ratios are clipped at 1 - this; their logarithms at minus this if the surrogate is `geometric_mean`."""
    clip_high: NonNegative | None = None
    """Ratios are clipped at 1 + this; their logarithms at this if the surrogate is `geometric_mean`."""
    tau_pos: PositiveFloat | None = None
    """Surrogate `soft_gate`: steepness of the gate of tokens with a positive advantage."""
    tau_neg: PositiveFloat | None = None
    """The same for all other tokens; a larger one lets their gradient vanish sooner."""
    cov_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Surrogates `clip_cov` and `kl_cov`: share of the batch's tokens that are restrained, at least one token."""
    cov_low: float | None = None
    """Surrogate `clip_cov`: the tokens are drawn from those whose covariance of advantage and logprob is above this."""
    cov_high: float | None = None
    """Surrogate `clip_cov`: and below this."""
    cov_penalty: NonNegative | None = None
    """Surrogate `kl_cov`: weight of the absolute log ratio of these tokens."""
    k_pos: NonNegative | None = None
    """Surrogate `gamma_weight`: power of the sample's ratio, for tokens whose advantage is not negative."""
    k_neg: NonNegative | None = None
    """The same for tokens with a negative advantage."""
    lambda_pos: PositiveFloat | None = None
    """Surrogate `gamma_weight`: decay with the sample's ratio, for tokens whose advantage is not negative."""
    lambda_neg: PositiveFloat | None = None
    """The same for tokens with a negative advantage."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Surrogate `clip`: a token with a negative advantage counts at most this much; not bounded if not set."""
    beta: NonNegative = 0.0
    """Weight of the KL divergence to the reference model, which is loaded when this is above 0."""
    kl_estimator: KlEstimator | None = None
    """Estimator of that divergence: k1 and k2 pull by KL(policy || reference), k3 by KL(reference || policy)."""
    reference_update_every: PositiveInt | None = None
    """The policy becomes the reference every this many versions; it stays the base model if not set."""
    entropy_bonus: NonNegative = 0.0
    """Weight of the policy's mean entropy, which is subtracted from the loss."""
    path: str | None = None
    """`module:function` or `file.py:function` of the surrogate `custom`."""
    args: dict[str, Any] = {}
    """Keyword arguments of that function."""


RECIPES: dict[str, dict[str, Any]] = {
    "importance": {"surrogate": "importance"},
    "ipo": {"surrogate": "ipo"},
    "dppo_tv": {"surrogate": "dppo_tv"},
    "dppo_kl": {"surrogate": "dppo_kl"},
    "grpo": {"surrogate": "clip", "normalize": "sequence"},
    "ppo": {"surrogate": "clip"},
    "dr_grpo": {"surrogate": "clip", "normalize": "constant"},
    "dapo": {"surrogate": "clip", "clip_high": 0.28},
    "gspo": {"surrogate": "sequence_clip", "normalize": "sequence"},
    "luspo": {
        "surrogate": "sequence_clip",
        "clip_low": 2e-3,
        "clip_high": 2.5e-3,
        "normalize": "constant",
        "normalize_length": 1,
    },
    "gmpo": {"surrogate": "geometric_mean", "normalize": "sequence"},
    "sapo": {"surrogate": "soft_gate", "normalize": "sequence"},
    "vespo": {"surrogate": "gamma_weight"},
    "clip_cov": {"surrogate": "clip_cov"},
    "kl_cov": {"surrogate": "kl_cov"},
    "cispo": {"surrogate": "clipped_weight"},
    "reinforce": {"surrogate": "reinforce", "proximal": "recomputed"},
    "tis": {"surrogate": "clip", "proximal": "recomputed", "correction": "token_truncate"},
    "icepop": {"surrogate": "clip", "proximal": "recomputed", "correction": "token_mask", "normalize": "sequence"},
    "decoupled": {
        "surrogate": "clip",
        "proximal": "recomputed",
        "correction": "token_truncate",
        "correction_high": math.inf,
    },
    "cross_entropy": {"surrogate": "cross_entropy", "proximal": "recomputed"},
    "custom": {"surrogate": "custom"},
}
"""The recipes of the literature: what each sets. Sources and formulas: `trireme.algo.loss`."""

SURROGATE_KEYS: dict[Surrogate, dict[str, Any]] = {
    "importance": {"ratio_low": 0.125, "ratio_high": 8.0, "kl_tau": 0.0, "score_centering": False},
    "ipo": {"eps": 0.3, "max_importance_ratio": 1e4, "kl_tau": 0.0, "score_centering": False},
    "dppo_tv": {"mask_low": 0.2, "mask_high": 0.2, "max_importance_ratio": 20.0, "kl_tau": 0.0},
    "dppo_kl": {"mask_low": 0.05, "mask_high": 0.05, "max_importance_ratio": 20.0, "kl_tau": 0.0},
    "clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "sequence_clip": {"clip_low": 3e-4, "clip_high": 4e-4},
    "geometric_mean": {"clip_low": 0.4, "clip_high": 0.4},
    "soft_gate": {"tau_pos": 1.0, "tau_neg": 1.05},
    "clip_cov": {"clip_low": 0.2, "clip_high": 0.2, "cov_ratio": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    "kl_cov": {"cov_ratio": 2e-4, "cov_penalty": 1.0},
    "clipped_weight": {"clip_low": 1.0, "clip_high": 4.0},
    "gamma_weight": {"k_pos": 2.0, "k_neg": 3.0, "lambda_pos": 3.0, "lambda_neg": 2.0},
    "reinforce": {"score_centering": False},
    "cross_entropy": {},
    "custom": {"path": None, "args": {}},
}
"""The keys that each surrogate reads, with their usual values."""

CORRECTION_KEYS: dict[Correction, dict[str, Any]] = {
    "none": {},
    "token_truncate": {"correction_high": 2.0},
    "token_mask": {"correction_low": 0.5, "correction_high": 5.0},
    "sequence_truncate": {"correction_high": 2.0},
    "sequence_mask": {"correction_low": 0.5, "correction_high": 2.0},
    "geometric_mask": {"correction_low": 0.99, "correction_high": 1.01},
}
"""The keys that each correction reads, with their usual values."""


def resolve_loss(loss: Loss, *, length: int) -> Loss:
    """Return the loss with every key filled in that it reads. To resolve it again changes nothing.

    Args:
        length: the constant C of `normalize = "constant"` if the user gives none.
    """
    recipe, given = RECIPES[loss.type], given_keys(loss)
    defaults: dict[str, Any] = {"correction": "none", "proximal": "behaviour", "normalize": "token"}
    choices = defaults | recipe | given
    surrogate, correction = choices["surrogate"], choices["correction"]
    values = choices | {"normalize_length": length, "kl_estimator": "k3", "score_centering_top_k": 20}
    values |= SURROGATE_KEYS[surrogate] | CORRECTION_KEYS[correction]

    # The recipe's bounds hold for the recipe's own choices only: DAPO's clip_high is not that of another surrogate.
    values |= {
        key: value
        for key, value in recipe.items()
        if (key not in _ALL_SURROGATE_KEYS or surrogate == recipe["surrogate"])
        and (key not in _ALL_CORRECTION_KEYS or correction == recipe.get("correction"))
    }

    # A correction compares the proximal policy with the behaviour policy, so they must not be the same.
    if correction != "none":
        values["proximal"] = "recomputed"
    values |= given

    # Keys that nothing reads are not filled in, so that `run.json` shows only what has an effect.
    used = used_keys(loss.model_copy(update=values))
    return loss.model_copy(update={key: value for key, value in values.items() if key in used})


_ALL_SURROGATE_KEYS = {key for keys in SURROGATE_KEYS.values() for key in keys}
_ALL_CORRECTION_KEYS = {key for keys in CORRECTION_KEYS.values() for key in keys}


def given_keys(loss: Loss) -> dict[str, Any]:
    """Return the keys that differ from their defaults, without the recipe's name."""
    values = {name: (getattr(loss, name), info.get_default()) for name, info in Loss.model_fields.items()}
    return {name: value for name, (value, default) in values.items() if name != "type" and value != default}


def used_keys(loss: Loss) -> set[str]:
    """Return the keys that change what a loss computes, of one whose choices are filled in."""
    assert loss.surrogate is not None, f"not resolved: {loss}"
    used = {"adv_tau", "surrogate", "normalize", "beta", "entropy_bonus"}
    used |= SURROGATE_KEYS[loss.surrogate].keys()
    if loss.surrogate != "custom":
        used |= {"correction", *CORRECTION_KEYS[loss.correction or "none"]}
    if has_ratio(loss) or loss.correction not in (None, "none"):
        used.add("proximal")
    if centers_scores(loss):
        used.add("score_centering_top_k")
    if loss.normalize == "constant":
        used.add("normalize_length")
    if loss.beta:
        used |= {"kl_estimator", "reference_update_every"}
    return used


def centers_scores(loss: Loss) -> bool:
    """Return whether a resolved loss has the term. A resumed run may train by another loss on a batch filled for it."""
    return bool(loss.score_centering) and loss.surrogate in ("importance", "ipo", "reinforce")


def has_ratio(loss: Loss) -> bool:
    return loss.surrogate not in ("reinforce", "cross_entropy")


# Rules of the table. Each yields one message per problem.


def loss_problems(loss: Loss) -> Iterator[str]:
    """Yield keys that the recipe would ignore, and bounds that would mask every token."""
    recipe = resolve_loss(loss, length=1)
    used = used_keys(recipe)

    # Keys that nothing reads. `correction = "none"` is let through, as it asks for nothing.
    for key, value in given_keys(loss).items():
        if key not in used and (key, value) != ("correction", "none"):
            shown = f'"{value}"' if isinstance(value, str) else "true" if value is True else value
            yield (
                f'`trainer.loss.{key} = {shown}` with type = "{loss.type}" (surrogate = "{recipe.surrogate}", '
                f'correction = "{recipe.correction or "none"}") - expected only keys that it reads: '
                f"{', '.join(sorted(used))}. {_way_out(key)}"
            )

    # Contradictions between keys that are read.
    if recipe.correction != "none" and recipe.proximal == "behaviour" and recipe.surrogate != "custom":
        yield (
            f'`trainer.loss.proximal = "behaviour"` with correction = "{recipe.correction}" - expected a proximal '
            "policy of its own, as the correction is that over the behaviour policy. Set "
            '`proximal = "recomputed"`, or `trainer.loss.correction = "none"`.'
        )

    is_other = has_ratio(recipe) and recipe.proximal != "behaviour"
    if recipe.score_centering and (recipe.correction != "none" or is_other):
        yield (
            f'`trainer.loss.score_centering = true` with correction = "{recipe.correction}" and proximal = '
            f'"{recipe.proximal}" - expected no correction and a ratio over the policy that sampled, as the average is '
            "over what that policy could have sampled. Leave out `correction` and `proximal`, or `score_centering`."
        )

    for low_key, high_key in (
        ("ratio_low", "ratio_high"),
        ("correction_low", "correction_high"),
        ("cov_low", "cov_high"),
    ):
        low, high = getattr(recipe, low_key), getattr(recipe, high_key)
        if {low_key, high_key} <= used and low >= high:
            yield (
                f"`trainer.loss.{low_key} = {low:g}`, `{high_key} = {high:g}` - expected the first to be smaller; "
                f"every token would be masked. Lower `{low_key}` below 1 and raise `{high_key}` above 1."
            )

    if recipe.surrogate == "custom" and not recipe.path:
        yield '`trainer.loss.type = "custom"` without a path - expected one. Write `trainer.loss.path = "my.py:loss"`.'


def _way_out(key: str) -> str:
    settings = {
        "kl_estimator": "beta = 0.01",
        "reference_update_every": "beta = 0.01",
        "normalize_length": 'normalize = "constant"',
        "score_centering_top_k": 'surrogate = "importance"` and `trainer.loss.score_centering = true',
        "proximal": 'surrogate = "clip"',
    }
    # In reverse, so that the first kind that reads a key is the one that is suggested.
    settings |= {name: f'correction = "{kind}"' for kind, keys in reversed(CORRECTION_KEYS.items()) for name in keys}
    settings |= {name: f'surrogate = "{kind}"' for kind, keys in reversed(SURROGATE_KEYS.items()) for name in keys}
    return f"Remove it, or set `trainer.loss.{settings[key]}`." if key in settings else "Remove it."
