"""Each loss of the literature, value and gradient, against its formula written out in NumPy.

The formulas below are objectives, to be maximised, in float64, sample by sample and token by token. What a paper puts
under a stop-gradient is computed from `frozen`. Gradients are central differences of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from columns import columns_of
from trireme.algo.columns import Columns, LossTerms, Totals
from trireme.algo.loss import LOSSES, effective_share, kl_estimate, policy_loss
from trireme.config.losses import Recipe

LENGTHS = (1, 4, 2, 6, 3, 5)
C = 7  # of the normalisation by a constant
STEP = 1e-6

Objective = Callable[[np.ndarray, np.ndarray, "Batch"], float]
Gain = Callable[[np.ndarray, np.ndarray, "Batch", int], float]  # of token t


@dataclass(frozen=True)
class Batch:
    """Tokens of several samples, one after the other. All [T] float64 but `samples`."""

    pi: np.ndarray
    mu: np.ndarray
    prox: np.ndarray
    ref: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray  # the same for all tokens of a sample
    samples: np.ndarray

    @property
    def slices(self) -> list[list[int]]:
        return [np.flatnonzero(self.samples == number).tolist() for number in range(int(self.samples.max()) + 1)]

    def sample_of(self, t: int) -> list[int]:
        return self.slices[self.samples[t]]


def batch_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, drift: float = 0.35) -> Batch:
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    pi = -2.5 * rng.random(count) - 0.1
    prox = pi + 0.5 * drift * rng.normal(size=count)
    return Batch(
        pi=pi,
        mu=prox + drift * rng.normal(size=count),
        prox=prox,
        ref=pi + drift * rng.normal(size=count),
        entropies=rng.random(count),
        advantages=np.repeat(rng.normal(size=len(lengths)), lengths),
        samples=np.repeat(np.arange(len(lengths)), lengths),
    )


# the formulas


def over_tokens(gain: Gain) -> Objective:
    return lambda x, frozen, b: sum(gain(x, frozen, b, t) for t in range(len(x))) / len(x)


def over_samples(gain: Gain) -> Objective:
    return lambda x, frozen, b: float(np.mean([np.mean([gain(x, frozen, b, t) for t in s]) for s in b.slices]))


def over_a_constant(gain: Gain) -> Objective:
    return lambda x, frozen, b: sum(gain(x, frozen, b, t) for t in range(len(x))) / (len(b.slices) * C)


def clipped(r: float, a: float, low: float = 0.2, high: float = 0.2) -> float:
    return min(r * a, min(max(r, 1 - low), 1 + high) * a)


def ppo(high: float = 0.2) -> Gain:
    return lambda x, frozen, b, t: clipped(math.exp(x[t] - b.mu[t]), b.advantages[t], high=high)


def gspo(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
    sample = b.sample_of(t)
    likelihood_ratio = np.prod([math.exp(x[i] - b.mu[i]) for i in sample])
    return clipped(likelihood_ratio ** (1 / len(sample)), b.advantages[t], 3e-4, 4e-4)


def cispo(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
    return min(max(math.exp(frozen[t] - b.mu[t]), 0), 5) * b.advantages[t] * x[t]


def reinforce(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
    return b.advantages[t] * x[t]


def importance(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
    r = math.exp(x[t] - b.mu[t])
    return r * b.advantages[t] if 0.125 <= r <= 8 else 0.0


def cross_entropy(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
    return x[t] if b.advantages[t] > 0 else 0.0


def weighted(weight_of: Callable[[Batch, int], float]) -> Gain:
    """PPO against the proximal policy, each token weighted."""
    return lambda x, frozen, b, t: weight_of(b, t) * clipped(math.exp(x[t] - b.prox[t]), b.advantages[t])


def tis(cap: float) -> Gain:
    return weighted(lambda b, t: min(math.exp(b.prox[t] - b.mu[t]), cap))


def icepop_weight(b: Batch, t: int) -> float:
    k = math.exp(b.prox[t] - b.mu[t])
    return k if 0.5 <= k <= 5 else 0.0


OBJECTIVES: dict[str, Objective] = {
    "importance": over_tokens(importance),
    "grpo": over_samples(ppo()),
    "ppo": over_tokens(ppo()),
    "dr_grpo": over_a_constant(ppo()),
    "dapo": over_tokens(ppo(high=0.28)),
    "gspo": over_samples(gspo),
    "cispo": over_tokens(cispo),
    "reinforce": over_tokens(reinforce),
    "tis": over_tokens(tis(cap=2.0)),
    "icepop": over_samples(weighted(icepop_weight)),
    "decoupled": over_tokens(tis(cap=math.inf)),
    "cross_entropy": over_tokens(cross_entropy),
}


def sequence_weight(kind: str, low: float, high: float) -> Callable[[Batch, int], float]:
    """How likely a token's sample had been under the proximal policy, over the behaviour policy."""

    def weight_of(b: Batch, t: int) -> float:
        sample = b.sample_of(t)
        product = np.prod([math.exp(b.prox[i] - b.mu[i]) for i in sample])
        return {
            "sequence_truncate": min(product, high),
            "sequence_mask": product if low <= product <= high else 0.0,
            "geometric_mask": 1.0 if low <= product ** (1 / len(sample)) <= high else 0.0,
        }[kind]

    return weight_of


# ours, and the comparison


def ours(recipe: Recipe, b: Batch) -> tuple[LossTerms, torch.Tensor]:
    """The terms, and the gradient with respect to pi's logprobs."""
    columns = to_columns(b)
    terms = policy_loss(columns, Totals(tokens=len(b.pi), samples=len(b.slices)), recipe)
    terms.loss.backward()
    assert columns.logprobs.grad is not None
    return terms, columns.logprobs.grad


def to_columns(b: Batch) -> Columns:
    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, dtype=torch.float64)

    return columns_of(
        tensor(b.pi).requires_grad_(),
        behaviour=tensor(b.mu),
        proximal=tensor(b.prox),
        reference=tensor(b.ref),
        entropies=tensor(b.entropies).requires_grad_(),
        advantages=tensor(b.advantages),
        samples=b.samples.tolist(),
    )


def slope_of(objective: Objective, b: Batch) -> list[float]:
    slopes = []
    for t in range(len(b.pi)):
        there, back = b.pi.copy(), b.pi.copy()
        there[t] += STEP
        back[t] -= STEP
        slopes.append((objective(there, b.pi, b) - objective(back, b.pi, b)) / (2 * STEP))
    return slopes


def behaving(name: str, b: Batch) -> Batch:
    """Where the ratio is against the behaviour policy, that is the proximal policy too."""
    return replace(b, prox=b.mu) if LOSSES[name].proximal == "behaviour" else b


def recipe(name: str, **changed: object) -> Recipe:
    return replace(LOSSES[name], normalize_length=C, **changed)


def check(found: Recipe, objective: Objective, b: Batch) -> None:
    terms, gradient = ours(found, b)
    assert float(terms.value) == pytest.approx(-objective(b.pi, b.pi, b), rel=1e-9, abs=1e-12)
    assert gradient.tolist() == pytest.approx([-slope for slope in slope_of(objective, b)], rel=1e-5, abs=1e-9)


def test_every_recipe_has_its_formula_here() -> None:
    assert OBJECTIVES.keys() == LOSSES.keys() - {"custom"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_recipe_has_the_value_and_the_gradient_of_its_formula(name: str, seed: int) -> None:
    check(recipe(name), OBJECTIVES[name], behaving(name, batch_of(seed=seed, drift=0.8)))


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [("sequence_truncate", 0.0, 2.0), ("sequence_mask", 0.5, 2.0), ("geometric_mask", 0.8, 1.25)],
)
def test_a_correction_by_sequence_has_the_value_and_the_gradient_of_its_formula(
    kind: str, low: float, high: float
) -> None:
    b = batch_of(drift=0.5)
    found = recipe("tis", correction=kind, correction_low=low, correction_high=high)
    check(found, over_tokens(weighted(sequence_weight(kind, low, high))), b)
    terms, _ = ours(found, b)
    name = "capped_frac" if kind == "sequence_truncate" else "masked_frac"
    assert 0 < float(terms.sums[name]) < len(b.pi)


def test_a_dual_clip_bounds_what_a_bad_token_costs() -> None:
    def gain(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
        found, a = ppo()(x, frozen, b, t), b.advantages[t]
        return max(found, 1.5 * a) if a < 0 else found

    b = behaving("ppo", batch_of(drift=1.0))
    check(recipe("ppo", dual_clip=1.5), over_tokens(gain), b)
    with_it, without = (ours(recipe("ppo", dual_clip=bound), b)[0].sums["clip_frac/high"] for bound in (1.5, None))
    assert float(with_it) > float(without)


# the reference model and the entropy


def kl_penalty(estimator: str, x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
    d = x[t] - b.ref[t]
    match estimator:
        case "k1":  # in the reward, importance weighted
            return min(math.exp(frozen[t] - b.mu[t]), 8) * (frozen[t] - b.ref[t]) * x[t]
        case "k2":
            return d * d / 2
    return math.exp(-d) - 1 + d


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_pull_to_the_reference_has_the_gradient_of_its_formula(estimator: str) -> None:
    b = behaving("ppo", batch_of())

    def gain(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
        return ppo()(x, frozen, b, t) - 0.3 * kl_penalty(estimator, x, frozen, b, t)

    terms, gradient = ours(recipe("ppo", beta=0.3, kl_estimator=estimator), b)
    assert gradient.tolist() == pytest.approx([-slope for slope in slope_of(over_tokens(gain), b)], rel=1e-5, abs=1e-9)
    difference = b.pi - b.ref
    values = {"k1": difference, "k2": difference**2 / 2, "k3": np.exp(-difference) - 1 + difference}
    assert float(terms.value) == pytest.approx(
        -OBJECTIVES["ppo"](b.pi, b.pi, b) + 0.3 * values[estimator].mean(), rel=1e-9
    )
    assert float(terms.sums["reference_kl"]) == pytest.approx(values["k3"].sum())


def test_the_default_loss_pulls_towards_the_behaviour_policy() -> None:
    def gain(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
        r = math.exp(frozen[t] - b.mu[t])
        return r * (b.advantages[t] - 0.3 * math.log(r)) * x[t] if 0.5 <= r <= 2 else 0.0

    b = behaving("importance", batch_of(drift=0.8))
    terms, gradient = ours(recipe("importance", kl_tau=0.3, ratio_low=0.5, ratio_high=2.0), b)
    assert gradient.tolist() == pytest.approx([-slope for slope in slope_of(over_tokens(gain), b)], rel=1e-5, abs=1e-9)
    assert 0 < float(terms.sums["masked_frac"]) < len(b.pi)


def test_the_sums_of_the_default_loss_by_hand() -> None:
    # ratios 1, 4 (outside), 0.5; both ends of the band are inside
    logprobs = torch.zeros(3, dtype=torch.float64)
    behaviour = -torch.tensor([1.0, 4.0, 0.5], dtype=torch.float64).log()
    columns = columns_of(logprobs, behaviour=behaviour, advantages=torch.tensor([2.0, 3.0, -1.0], dtype=torch.float64))
    low, high = 0.5, 1.0
    terms = policy_loss(columns, Totals(3, 1), Recipe("importance", kl_tau=0.0, ratio_low=low, ratio_high=high))
    expected = {
        "importance_ratio": 5.5,
        "masked_frac": 1.0,
        "capped_frac": 0.0,
        "clip_frac/low": 0.0,
        "clip_frac/high": 0.0,
        "policy/kl": (4 - 1 - math.log(4)) + (0.5 - 1 - math.log(0.5)),
        "weights": 5.5,
        "squared_weights": 1 + 16 + 0.25,
    }
    assert {name: float(value) for name, value in terms.sums.items()} == pytest.approx(expected)
    assert float(terms.value) == pytest.approx(-(2.0 - 0.5) / 3)
    assert effective_share(weights=8.0, squared_weights=16.0, tokens=4) == 1.0
    assert effective_share(weights=3.0, squared_weights=9.0, tokens=10) == pytest.approx(0.1)


def test_the_divergence_estimate_is_exact_where_float32_would_drown_and_never_negative() -> None:
    for difference in (1e-7, -1e-7, 3e-6, 0.5):
        d = Fraction(difference)
        series = sum(d**n / math.factorial(n) for n in range(2, 20))
        found = float(kl_estimate(torch.tensor([difference], dtype=torch.float64))[0])
        assert found == pytest.approx(float(series), rel=1e-8)
        assert found > 0
    size = torch.logspace(-40, 2, 20_000)
    assert float(kl_estimate(torch.cat([size, -size])).min()) >= 0


def test_the_entropy_bonus_pulls_each_entropy_up_alike() -> None:
    b = batch_of()
    columns = to_columns(b)
    totals = Totals(len(b.pi), len(LENGTHS))
    found = policy_loss(columns, totals, recipe("reinforce", entropy_bonus=0.4))
    found.loss.backward()
    assert columns.entropies.grad is not None
    assert columns.entropies.grad.tolist() == pytest.approx([-0.4 / len(b.pi)] * len(b.pi))
    plain = policy_loss(to_columns(b), totals, recipe("reinforce"))
    assert float(found.value - plain.value) == pytest.approx(-0.4 * b.entropies.mean())


# what holds for all


ALL = [name for name in LOSSES if name != "custom"]


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 8), max_size=3),
    name=st.sampled_from(ALL),
    normalize=st.sampled_from(["token", "sequence", "constant"]),
)
@settings(max_examples=40, deadline=None)
def test_loss_and_gradient_do_not_depend_on_how_samples_are_split_into_rows(
    lengths: list[int], cuts: list[int], name: str, normalize: str
) -> None:
    b = batch_of(tuple(lengths), drift=0.7)
    found = recipe(name, normalize=normalize, beta=0.1, entropy_bonus=0.05)
    whole_terms, whole = ours(found, b)
    borders = [0, *sorted(min(cut, len(lengths)) for cut in cuts), len(lengths)]
    totals = Totals(len(b.pi), len(lengths))
    value, sums, gradients = 0.0, dict.fromkeys(whole_terms.sums, 0.0), []
    for first, last in pairwise(borders):
        which = (b.samples >= first) & (b.samples < last)
        if not which.any():
            continue
        part = Batch(**{name: array[which] for name, array in vars(b).items()})
        columns = to_columns(replace(part, samples=part.samples - first))
        terms = policy_loss(columns, totals, found)
        terms.loss.backward()
        value += float(terms.value)
        sums = {name: total + float(terms.sums[name]) for name, total in sums.items()}
        gradients += columns.logprobs.grad.tolist()
    assert value == pytest.approx(float(whole_terms.value), rel=1e-9, abs=1e-12)
    assert gradients == pytest.approx(whole.tolist(), rel=1e-9, abs=1e-12)
    assert sums == pytest.approx({name: float(total) for name, total in whole_terms.sums.items()})


@pytest.mark.parametrize("name", ALL)
def test_tokens_that_do_not_count_change_nothing(name: str) -> None:
    b = batch_of()
    found = recipe(name, beta=0.1, entropy_bonus=0.1)
    inside = torch.tensor(b.samples < 4)
    columns = to_columns(b)
    wild = torch.where(inside, columns.behaviour, -math.inf)
    columns = replace(columns, behaviour=wild, proximal=torch.where(inside, columns.proximal, math.nan), mask=inside)
    totals = Totals(int(inside.sum()), 4)
    terms = policy_loss(columns, totals, found)
    terms.loss.backward()
    part = Batch(**{name: array[b.samples < 4] for name, array in vars(b).items()})
    alone = to_columns(part)
    expected = policy_loss(alone, totals, found)
    expected.loss.backward()
    assert float(terms.value) == pytest.approx(float(expected.value), rel=1e-12)
    assert columns.logprobs.grad.tolist() == pytest.approx([*alone.logprobs.grad.tolist(), *[0.0] * 8], rel=1e-12)
    assert {name: float(total) for name, total in terms.sums.items()} == pytest.approx(
        {name: float(total) for name, total in expected.sums.items()}
    )


@pytest.mark.parametrize("kl_tau", [0.0, 0.1])
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_token_that_the_policy_rules_out_is_pulled_nowhere(kl_tau: float, advantage: float) -> None:
    """With `ratio_low = 0` its ratio of 0 is within the band; r (A - kl_tau log r) is 0 in the limit."""
    pi = torch.tensor([-math.inf, -1.0], requires_grad=True)
    columns = columns_of(pi, behaviour=torch.tensor([-1.0, -2.0]), advantages=torch.full((2,), advantage))
    terms = policy_loss(columns, Totals(2, 1), recipe("importance", ratio_low=0.0, kl_tau=kl_tau))
    terms.loss.backward()
    assert pi.grad is not None
    assert pi.grad.tolist() == pytest.approx([0.0, -math.e * (advantage - kl_tau) / 2])
    assert math.isfinite(terms.value)


@pytest.mark.parametrize("name", [name for name in ALL if LOSSES[name].has_ratio])
@pytest.mark.parametrize("log_ratio", [-100.0, 100.0])
def test_a_ratio_out_of_all_bounds_gives_no_nan(name: str, log_ratio: float) -> None:
    """In float32, where the ratio overflows; a zero advantage is the worst case."""
    pi = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    mu = pi.detach() - log_ratio
    prox = pi.detach() if LOSSES[name].proximal == "recomputed" else mu
    columns = columns_of(pi, behaviour=mu, proximal=prox, advantages=torch.tensor([0.0, 0.0, 0.0]), samples=[0, 0, 1])
    terms = policy_loss(columns, Totals(3, 2), recipe(name))
    terms.loss.backward()
    assert pi.grad is not None
    assert pi.grad.tolist() == [0.0, 0.0, 0.0]
    assert float(terms.value) == 0.0
    assert math.isfinite(float(terms.sums["weights"]))
