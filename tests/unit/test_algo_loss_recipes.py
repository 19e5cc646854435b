"""Each loss of the literature, value and gradient, against its formula written out in NumPy; and where they coincide.

The formulas below are objectives, to be maximised, in float64, sample by sample and token by token. What a paper puts
under a stop-gradient is computed from `frozen`. Gradients are central differences of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from columns import columns_of
from trireme.algo.columns import Columns, LossTerms, Totals
from trireme.algo.loss import LOSSES, policy_loss
from trireme.config.losses import Recipe

LENGTHS = (1, 4, 2, 6, 3, 5)
C = 7  # of the normalisation by a constant
STEP = 1e-6

Objective = Callable[[np.ndarray, np.ndarray, "Batch"], float]


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


def clipped(r: float, a: float, low: float, high: float) -> float:
    return min(r * a, min(max(r, 1 - low), 1 + high) * a)


def ppo(x: np.ndarray, frozen: np.ndarray, b: Batch, low: float = 0.2, high: float = 0.2) -> float:
    return sum(clipped(math.exp(x[t] - b.mu[t]), b.advantages[t], low, high) for t in range(len(x))) / len(x)


def grpo(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
    per_sample = [
        sum(clipped(math.exp(x[t] - b.mu[t]), b.advantages[t], 0.2, 0.2) for t in sample) / len(sample)
        for sample in b.slices
    ]
    return sum(per_sample) / len(per_sample)


def dr_grpo(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
    total = sum(clipped(math.exp(x[t] - b.mu[t]), b.advantages[t], 0.2, 0.2) for t in range(len(x)))
    return total / (len(b.slices) * C)


def dapo(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
    return ppo(x, frozen, b, 0.2, 0.28)


def gspo(x: np.ndarray, frozen: np.ndarray, b: Batch, low: float = 3e-4, high: float = 4e-4) -> float:
    gains = []
    for sample in b.slices:
        likelihood_ratio = np.prod([math.exp(x[t] - b.mu[t]) for t in sample])
        gains.append(clipped(likelihood_ratio ** (1 / len(sample)), b.advantages[sample[0]], low, high))
    return sum(gains) / len(gains)


def cispo(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
    return sum(min(max(math.exp(frozen[t] - b.mu[t]), 0), 5) * b.advantages[t] * x[t] for t in range(len(x))) / len(x)


def reinforce(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
    return sum(b.advantages[t] * x[t] for t in range(len(x))) / len(x)


def importance(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
    ratios = [math.exp(x[t] - b.mu[t]) for t in range(len(x))]
    return sum(r * b.advantages[t] for t, r in enumerate(ratios) if 0.125 <= r <= 8) / len(x)


def tis(x: np.ndarray, frozen: np.ndarray, b: Batch, cap: float = 2.0) -> float:
    return sum(
        min(math.exp(b.prox[t] - b.mu[t]), cap) * clipped(math.exp(x[t] - b.prox[t]), b.advantages[t], 0.2, 0.2)
        for t in range(len(x))
    ) / len(x)


def icepop(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
    total = 0.0
    for sample in b.slices:
        for t in sample:
            k = math.exp(b.prox[t] - b.mu[t])
            calibrated = k if 0.5 <= k <= 5 else 0.0
            total += calibrated * clipped(math.exp(x[t] - b.prox[t]), b.advantages[t], 0.2, 0.2) / len(sample)
    return total / len(b.slices)


def decoupled(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
    return tis(x, frozen, b, cap=math.inf)


def cross_entropy(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
    return sum(x[t] for t in range(len(x)) if b.advantages[t] > 0) / len(x)


OBJECTIVES: dict[str, Objective] = {
    "importance": importance,
    "grpo": grpo,
    "ppo": ppo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "tis": tis,
    "icepop": icepop,
    "decoupled": decoupled,
    "cross_entropy": cross_entropy,
}


def sequence_weighted(kind: str, low: float, high: float) -> Objective:
    """PPO against the proximal policy, each sample weighted by how likely that had been over the behaviour policy."""

    def objective(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
        total = 0.0
        for sample in b.slices:
            product = np.prod([math.exp(b.prox[t] - b.mu[t]) for t in sample])
            mean = product ** (1 / len(sample))
            weight = {
                "sequence_truncate": min(product, high),
                "sequence_mask": product if low <= product <= high else 0.0,
                "geometric_mask": 1.0 if low <= mean <= high else 0.0,
            }[kind]
            total += weight * sum(clipped(math.exp(x[t] - b.prox[t]), b.advantages[t], 0.2, 0.2) for t in sample)
        return total / len(x)

    return objective


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
    check(found, sequence_weighted(kind, low, high), b)
    terms, _ = ours(found, b)
    name = "capped_frac" if kind == "sequence_truncate" else "masked_frac"
    assert 0 < float(terms.sums[name]) < len(b.pi)


def test_the_batches_of_these_tests_are_clipped_and_masked_in_part() -> None:
    for name in ("ppo", "gspo"):
        several = [ours(recipe(name), behaving(name, batch_of(seed=seed, drift=0.8)))[0].sums for seed in range(3)]
        low, high = (sum(float(sums[f"clip_frac/{side}"]) for sums in several) for side in ("low", "high"))
        assert min(low, high) > 0
        assert low + high < 3 * sum(LENGTHS)
    for name, what in (("icepop", "masked_frac"), ("tis", "capped_frac")):
        terms, _ = ours(recipe(name), batch_of(drift=0.8))
        assert 0 < float(terms.sums[what]) < sum(LENGTHS)


def test_a_dual_clip_bounds_what_a_bad_token_costs() -> None:
    def objective(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
        total = 0.0
        for t in range(len(x)):
            gain, a = clipped(math.exp(x[t] - b.mu[t]), b.advantages[t], 0.2, 0.2), b.advantages[t]
            total += max(gain, 1.5 * a) if a < 0 else gain
        return total / len(x)

    b = behaving("ppo", batch_of(drift=1.0))
    check(recipe("ppo", dual_clip=1.5), objective, b)
    with_it, without = (ours(recipe("ppo", dual_clip=bound), b)[0].sums["clip_frac/high"] for bound in (1.5, None))
    assert float(with_it) > float(without)


# the reference model and the entropy


def kl_penalty(estimator: str, x: np.ndarray, frozen: np.ndarray, b: Batch) -> list[float]:
    penalties = []
    for t in range(len(x)):
        d = x[t] - b.ref[t]
        match estimator:
            case "k1":  # in the reward, importance weighted
                weight = min(math.exp(frozen[t] - b.mu[t]), 8)
                penalties.append(weight * (frozen[t] - b.ref[t]) * x[t])
            case "k2":
                penalties.append(d * d / 2)
            case "k3":
                penalties.append(math.exp(-d) - 1 + d)
    return penalties


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_pull_to_the_reference_has_the_gradient_of_its_formula(estimator: str) -> None:
    b = behaving("ppo", batch_of())

    def objective(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
        return ppo(x, frozen, b) - 0.3 * sum(kl_penalty(estimator, x, frozen, b)) / len(x)

    terms, gradient = ours(recipe("ppo", beta=0.3, kl_estimator=estimator), b)
    assert gradient.tolist() == pytest.approx([-slope for slope in slope_of(objective, b)], rel=1e-5, abs=1e-9)
    difference = b.pi - b.ref
    values = {"k1": difference, "k2": difference**2 / 2, "k3": np.exp(-difference) - 1 + difference}
    assert float(terms.value) == pytest.approx(-ppo(b.pi, b.pi, b) + 0.3 * values[estimator].mean(), rel=1e-9)
    assert float(terms.sums["reference_kl"]) == pytest.approx(values["k3"].sum())


@pytest.mark.parametrize(("estimator", "reverse"), [("k1", True), ("k2", True), ("k3", False)])
@pytest.mark.parametrize("sampled_by_pi", [True, False])
def test_which_divergence_each_estimator_pulls_by(estimator: str, reverse: bool, sampled_by_pi: bool) -> None:
    """Summed over all tokens with the weight with which they are sampled: KL(pi || ref) or KL(ref || pi), exactly. On
    tokens of another policy that holds for k1 only."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1)
    other = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1)
    pi = torch.log_softmax(logits, -1)
    mu = pi.detach() if sampled_by_pi else other
    divergence = (pi.exp() * (pi - ref)).sum() if reverse else (ref.exp() * (ref - pi)).sum()
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    found = Recipe("reinforce", beta=1.0, kl_estimator=estimator)
    estimate = torch.zeros(6, dtype=torch.float64)
    for token in range(6):
        one = slice(token, token + 1)
        zero = torch.zeros(1, dtype=torch.float64)
        columns = columns_of(pi[one], behaviour=mu[one], advantages=zero, reference=ref[one])
        loss = policy_loss(columns, Totals(1, 1), found).loss
        estimate += mu[token].exp() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    is_exact = bool(torch.allclose(estimate, exact, rtol=1e-9, atol=1e-12))
    assert is_exact == (sampled_by_pi or estimator == "k1")


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


# where they coincide


def gradient(name_or_recipe: str | Recipe, b: Batch) -> list[float]:
    found = recipe(name_or_recipe) if isinstance(name_or_recipe, str) else name_or_recipe
    return ours(found, b)[1].tolist()


def on_policy(b: Batch) -> Batch:
    return replace(b, mu=b.pi, prox=b.pi)


@pytest.mark.parametrize("name", ["ppo", "dapo", "cispo", "tis", "decoupled", "importance"])
def test_on_policy_every_token_mean_has_the_gradient_of_reinforce(name: str) -> None:
    b = on_policy(batch_of())
    assert gradient(name, b) == pytest.approx(gradient("reinforce", b), rel=1e-12)


@pytest.mark.parametrize("name", ["gspo", "grpo", "icepop"])
def test_on_policy_every_sample_mean_has_the_gradient_of_reinforce(name: str) -> None:
    b = on_policy(batch_of())
    assert gradient(name, b) == pytest.approx(gradient(recipe("reinforce", normalize="sequence"), b), rel=1e-12)


def test_gspo_of_one_token_samples_is_ppo() -> None:
    b = behaving("ppo", batch_of((1,) * 12, drift=0.5))
    bounds = {"clip_low": 0.2, "clip_high": 0.3}
    one, other = (ours(recipe(name, **bounds), b) for name in ("gspo", "ppo"))
    assert float(one[0].value) == pytest.approx(float(other[0].value), rel=1e-12)
    assert one[1].tolist() == pytest.approx(other[1].tolist(), rel=1e-12)


def test_dapo_with_equal_clips_is_grpo_with_the_token_mean() -> None:
    b = behaving("ppo", batch_of(drift=0.6))
    assert gradient(recipe("dapo", clip_high=0.2), b) == gradient(recipe("grpo", normalize="token"), b)


def test_without_lag_the_decoupled_objective_is_plain_ppo() -> None:
    b = behaving("ppo", batch_of(drift=0.6))  # the policy that sampled is the one that the batch starts from
    assert gradient("decoupled", b) == gradient("ppo", b)


def test_unclipped_cispo_has_the_gradient_of_unmasked_importance() -> None:
    b = behaving("cispo", batch_of(drift=1.5))
    unclipped = recipe("cispo", clip_high=math.inf)
    assert gradient(unclipped, b) == pytest.approx(gradient(UNMASKED, b), rel=1e-12)


UNMASKED = Recipe("importance", ratio_low=0.0, ratio_high=math.inf)


@pytest.mark.parametrize("name", ["tis", "decoupled"])
def test_without_a_bound_the_first_pass_of_tis_has_the_gradient_of_unmasked_importance(name: str) -> None:
    b = batch_of(drift=1.0)
    first_pass = replace(b, prox=b.pi)
    expected = gradient(UNMASKED, replace(b, prox=b.mu))
    assert gradient(recipe(name, correction_high=math.inf), first_pass) == pytest.approx(expected, rel=1e-12)


def test_icepop_with_the_default_band_has_the_gradient_of_the_default_loss_on_its_first_pass() -> None:
    b = batch_of(drift=1.2)
    found = recipe("icepop", normalize="token", correction_low=0.125, correction_high=8.0)
    expected = gradient(Recipe("importance"), replace(b, prox=b.mu))
    assert gradient(found, replace(b, prox=b.pi)) == pytest.approx(expected, rel=1e-12)


def test_sequence_corrections_of_one_token_samples_are_those_by_token() -> None:
    b = batch_of((1,) * 12, drift=0.7)
    for by_sequence, by_token in (("sequence_truncate", "token_truncate"), ("sequence_mask", "token_mask")):
        bounds = {"correction_low": 0.6, "correction_high": 1.6}
        one, other = (gradient(recipe("tis", correction=kind, **bounds), b) for kind in (by_sequence, by_token))
        assert one == pytest.approx(other, rel=1e-12)


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
