"""Each loss of the literature, value and gradient, against its formula written out in NumPy.

The formulas below are objectives, to be maximised, in float64, sample by sample and token by token. What a paper puts
under a stop-gradient is computed from `frozen`. Gradients are central differences of the formula.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.algo.columns import Columns, Totals
from trireme.algo.loss.divergence import kl_estimate
from trireme.algo.loss.logprobs import token_logprobs
from trireme.algo.loss.loss import effective_share, policy_loss
from trireme.config.losses import RECIPES, Loss, has_ratio, resolve_loss

LENGTHS = (1, 4, 2, 6, 3, 5)
C = 7  # of the normalisation by a constant
STEP = 1e-6
ALL = [name for name in RECIPES if name != "custom"]


@dataclass(frozen=True)
class Batch:
    """Tokens of several samples, one after the other. All [T] float64 but `samples`, the number of each token's."""

    pi: np.ndarray
    mu: np.ndarray
    prox: np.ndarray
    ref: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray  # the same for all tokens of a sample
    samples: np.ndarray
    restrained: np.ndarray | None = None  # [T] bool: chosen by their covariance

    @property
    def slices(self) -> list[list[int]]:
        return [np.flatnonzero(self.samples == number).tolist() for number in range(int(self.samples.max()) + 1)]

    def part(self, which: np.ndarray) -> "Batch":
        return Batch(**{name: None if array is None else array[which] for name, array in vars(self).items()})

    @property
    def totals(self) -> Totals:
        return Totals(tokens=len(self.pi), samples=len(self.slices))


Objective = Callable[[np.ndarray, np.ndarray, Batch], float]
Gain = Callable[[np.ndarray, np.ndarray, Batch, int], float]  # of token t: x (logprobs), frozen, batch, t


def batch_of(lengths: Sequence[int] = LENGTHS, seed: int = 0, drift: float = 0.35) -> Batch:
    rng, count = np.random.default_rng(seed), sum(lengths)
    pi = -2.5 * rng.random(count) - 0.1
    prox = pi + 0.5 * drift * rng.normal(size=count)
    mu, ref = prox + drift * rng.normal(size=count), pi + drift * rng.normal(size=count)
    mu = np.minimum(mu, -0.01)  # a logarithm of a probability
    entropies, advantages = rng.random(count), np.repeat(rng.normal(size=len(lengths)), lengths)
    restrained = np.arange(count) % 3 == 1
    return Batch(pi, mu, prox, ref, entropies, advantages, np.repeat(np.arange(len(lengths)), lengths), restrained)


def over_tokens(gain: Gain) -> Objective:
    return lambda x, frozen, b: sum(gain(x, frozen, b, t) for t in range(len(x))) / len(x)


def over_samples(gain: Gain) -> Objective:
    return lambda x, frozen, b: float(np.mean([np.mean([gain(x, frozen, b, t) for t in s]) for s in b.slices]))


def over_a_constant(gain: Gain) -> Objective:
    return lambda x, frozen, b: sum(gain(x, frozen, b, t) for t in range(len(x))) / (len(b.slices) * C)


def clipped(r: float, a: float, low: float = 0.2, high: float = 0.2) -> float:
    return min(r * a, min(max(r, 1 - low), 1 + high) * a)


def sample_ratio(x: np.ndarray, base: np.ndarray, b: Batch, t: int) -> tuple[float, int]:
    """How likely a token's sample is under x, over how likely it was under `base`; and its length."""
    sample = b.slices[b.samples[t]]
    return np.prod([math.exp(x[i] - base[i]) for i in sample]), len(sample)


def ppo(high: float = 0.2) -> Gain:
    return lambda x, frozen, b, t: clipped(math.exp(x[t] - b.mu[t]), b.advantages[t], high=high)


def gspo(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
    ratio, length = sample_ratio(x, b.mu, b, t)
    return clipped(ratio ** (1 / length), b.advantages[t], 3e-4, 4e-4)


def banded(value: float, low: float, high: float) -> float:
    return value if low <= value <= high else 0.0


def weighted(weight_of: Callable[[Batch, int], float]) -> Gain:
    """PPO against the proximal policy, each token weighted."""
    return lambda x, frozen, b, t: weight_of(b, t) * clipped(math.exp(x[t] - b.prox[t]), b.advantages[t])


def tis(cap: float) -> Gain:
    return weighted(lambda b, t: min(math.exp(b.prox[t] - b.mu[t]), cap))


def masked(keeps: Callable[[float, float, float], bool], cap: float) -> Gain:
    """The ratio, fixed beyond `cap`, of tokens that `keeps(pi, mu, A)` lets through."""

    def gain(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
        now, before, a = math.exp(frozen[t]), math.exp(b.mu[t]), b.advantages[t]
        return min(now / before, cap) * (1 + x[t] - frozen[t]) * a if keeps(now, before, a) else 0.0

    return gain


def keeps_tv(pi: float, mu: float, a: float) -> bool:
    return not ((a > 0 and pi - mu > 0.2) or (a < 0 and mu - pi > 0.2))


def keeps_kl(pi: float, mu: float, a: float) -> bool:
    divergence = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    return not (divergence > 0.05 and ((a > 0 and pi > mu) or (a < 0 and pi < mu)))


def gmpo(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
    """The paper's objective for one sample, whose value stands at each of its tokens."""
    sign = math.copysign(1, b.advantages[t])
    sample, product = b.slices[b.samples[t]], 1.0
    for i in sample:
        r = math.exp(x[i] - b.mu[i]) ** sign
        product *= min(r, min(max(r, math.exp(-0.4)), math.exp(0.4))) ** sign
    return product ** (1 / len(sample)) * abs(b.advantages[t]) * sign


def sapo(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
    tau = 1.0 if b.advantages[t] > 0 else 1.05
    return 4 / tau / (1 + math.exp(-tau * (math.exp(x[t] - b.mu[t]) - 1))) * b.advantages[t]


def vespo(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
    weight, _ = sample_ratio(frozen, b.mu, b, t)
    k, decay = (2, 3) if b.advantages[t] >= 0 else (3, 2)
    return weight**k * math.exp(decay * (1 - weight)) * b.advantages[t] * x[t]


def luspo(x: np.ndarray, frozen: np.ndarray, b: Batch) -> float:
    """GSPO's clipped ratio of each sample, times its length."""
    gains = []
    for sample in b.slices:
        ratio = math.exp(sum(x[i] - b.mu[i] for i in sample) / len(sample))
        gains.append(len(sample) * clipped(ratio, b.advantages[sample[0]], 2e-3, 2.5e-3))
    return float(np.mean(gains))


def kl_cov(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
    drift = x[t] - b.mu[t]
    return math.exp(drift) * b.advantages[t] - (abs(drift) if b.restrained[t] else 0.0)


OBJECTIVES: dict[str, Objective] = {
    "clip_cov": over_tokens(lambda x, fz, b, t: 0.0 if b.restrained[t] else ppo()(x, fz, b, t)),
    "kl_cov": over_tokens(kl_cov),
    "ipo": over_tokens(masked(lambda pi, mu, a: abs(pi - mu) <= 0.3, 1e4)),
    "dppo_tv": over_tokens(masked(keeps_tv, 20)),
    "dppo_kl": over_tokens(masked(keeps_kl, 20)),
    "luspo": luspo,
    "gmpo": over_samples(gmpo),
    "sapo": over_samples(sapo),
    "vespo": over_tokens(vespo),
    "importance": over_tokens(lambda x, fz, b, t: banded(math.exp(x[t] - b.mu[t]), 0.125, 8) * b.advantages[t]),
    "grpo": over_samples(ppo()),
    "ppo": over_tokens(ppo()),
    "dr_grpo": over_a_constant(ppo()),
    "dapo": over_tokens(ppo(high=0.28)),
    "gspo": over_samples(gspo),
    "cispo": over_tokens(lambda x, fz, b, t: min(max(math.exp(fz[t] - b.mu[t]), 0), 5) * b.advantages[t] * x[t]),
    "reinforce": over_tokens(lambda x, frozen, b, t: b.advantages[t] * x[t]),
    "tis": over_tokens(tis(cap=2.0)),
    "icepop": over_samples(weighted(lambda b, t: banded(math.exp(b.prox[t] - b.mu[t]), 0.5, 5))),
    "decoupled": over_tokens(tis(cap=math.inf)),
    "cross_entropy": over_tokens(lambda x, frozen, b, t: x[t] if b.advantages[t] > 0 else 0.0),
}


NAMES = {"pi": "logprobs", "mu": "behaviour", "prox": "proximal", "ref": "reference"}


def to_columns(b: Batch) -> Columns:
    given = {NAMES.get(name, name): torch.tensor(array) for name, array in vars(b).items() if array is not None}
    given["logprobs"].requires_grad_()
    given["entropies"].requires_grad_()
    given |= {"versions": torch.zeros(len(b.pi), dtype=torch.int64), "mask": torch.ones(len(b.pi), dtype=torch.bool)}
    return Columns(**given, num_samples=len(b.slices))


def solved(found: Loss, columns: Columns, totals: Totals) -> tuple[float, dict[str, float], list[float]]:
    """The loss's value, its sums, and the gradient with respect to pi's logprobs."""
    terms = policy_loss(columns, totals, found)
    terms.loss.backward()
    sums = {name: float(total) for name, total in terms.sums.items()}
    return float(terms.value), sums, columns.logprobs.grad.tolist()


def behaving(name: str, b: Batch) -> Batch:
    """Where the ratio is against the behaviour policy, that is the proximal policy too."""
    return replace(b, prox=b.mu) if recipe(name).proximal == "behaviour" else b


def recipe(name: str, **changed: object) -> Loss:
    return resolve_loss(Loss(type=name, **changed), length=C)


def check(found: Loss, objective: Objective, b: Batch, value: float | None = None) -> dict[str, float]:
    """Check the gradient, and the value, which is that of the objective unless another is given; return the sums."""
    value_found, sums, gradient = solved(found, to_columns(b), b.totals)
    slopes = []
    for step in STEP * np.eye(len(b.pi)):
        slopes.append((objective(b.pi + step, b.pi, b) - objective(b.pi - step, b.pi, b)) / (2 * STEP))
    assert gradient == pytest.approx([-slope for slope in slopes], rel=1e-5, abs=1e-9)
    assert value_found == pytest.approx(-objective(b.pi, b.pi, b) if value is None else value, rel=1e-9, abs=1e-12)
    return sums


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ALL)
def test_a_recipe_has_the_value_and_the_gradient_of_its_formula(name: str, seed: int) -> None:
    check(recipe(name), OBJECTIVES[name], behaving(name, batch_of(seed=seed, drift=0.8)))


@pytest.mark.parametrize(
    ("kind", "low", "high", "weight"),
    [
        ("sequence_truncate", 0.0, 2.0, lambda product, length: min(product, 2.0)),
        ("sequence_mask", 0.5, 2.0, lambda product, length: banded(product, 0.5, 2.0)),
        ("geometric_mask", 0.8, 1.25, lambda product, length: 0.8 <= product ** (1 / length) <= 1.25),
    ],
)
def test_sequence_correction_agrees_with_its_formula(kind, low, high, weight) -> None:
    b = batch_of(drift=0.5)
    objective = over_tokens(weighted(lambda b, t: weight(*sample_ratio(b.prox, b.mu, b, t))))
    sums = check(recipe("tis", correction=kind, correction_low=low, correction_high=high), objective, b)
    assert 0 < sums["capped_frac" if kind == "sequence_truncate" else "masked_frac"] < len(b.pi)


@pytest.mark.parametrize(("name", "mean"), [("ppo", over_tokens), ("icepop", over_samples)])
def test_a_dual_clip_bounds_what_a_bad_token_costs(name: str, mean: Callable[[Gain], Objective]) -> None:
    def gain(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
        found, a = clipped(math.exp(x[t] - b.prox[t]), b.advantages[t]), b.advantages[t]
        weight = banded(math.exp(b.prox[t] - b.mu[t]), 0.5, 5)  # 1 for `ppo`
        return weight * (max(found, 1.5 * a) if a < 0 else found)

    b = behaving(name, batch_of(drift=1.0))
    with_it = check(recipe(name, dual_clip=1.5), mean(gain), b)
    assert with_it["clip_frac/high"] > check(recipe(name), OBJECTIVES[name], b)["clip_frac/high"]


ACROSS = 1e-6  # on either side of a bound, in probability


@pytest.mark.parametrize("side", [-ACROSS, ACROSS])
@pytest.mark.parametrize(
    ("name", "move", "advantage"),
    [
        *[("ipo", move, advantage) for move in (0.3, -0.3) for advantage in (1.0, -1.0)],
        *[("dppo_tv", 0.2, 1.0), ("dppo_tv", -0.2, -1.0)],
    ],
)
def test_a_token_is_dropped_just_beyond_the_bound_of_its_move(name, move, advantage, side) -> None:
    pi, mu = np.log([0.5 + move + math.copysign(side, side * move)]), np.log([0.5])
    b = Batch(pi, mu, mu, mu, 0 * mu, np.array([advantage]), samples=np.array([0]))
    _, sums, gradient = solved(recipe(name), to_columns(b), b.totals)
    is_beyond = abs(math.exp(pi[0]) - 0.5) > abs(move)
    assert sums["masked_frac"] == is_beyond
    assert gradient == pytest.approx([0.0 if is_beyond else -advantage * math.exp(pi[0] - mu[0])])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize(("pi", "advantage"), [(0.95, -1.0), (0.05, 1.0), (0.95, 0.0), (0.05, 0.0)])
def test_dppo_keeps_a_token_that_its_advantage_pulls_back(name: str, pi: float, advantage: float) -> None:
    mu = np.log([0.5])
    b = Batch(np.log([pi]), mu, mu, mu, 0 * mu, np.array([advantage]), samples=np.array([0]))
    _, sums, gradient = solved(recipe(name), to_columns(b), b.totals)
    assert sums["masked_frac"] == 0
    assert gradient == pytest.approx([-advantage * pi / 0.5])


@pytest.mark.parametrize("logprob", [0.0, -1e-8, -1e-6])
def test_dppo_keeps_a_token_that_was_all_but_certain_before_and_still_is(logprob: float) -> None:
    """In float32, where the probability of any other token rounds to 0 on one side only."""
    pi, mu = np.array([logprob], np.float32), np.array([-1e-5], np.float32)
    b = Batch(pi, mu, mu, mu, 0 * mu, np.ones(1, np.float32), samples=np.array([0]))
    assert solved(recipe("dppo_kl"), to_columns(b), b.totals)[1]["masked_frac"] == 0


def test_kl_cov_leaves_fresh_tokens_to_their_advantage() -> None:
    """Where trainer and engine differ by rounding, which has a sign."""
    mu = np.array([-1.0, -1.0, -1.0])
    b = Batch(mu + np.array([3e-7, -3e-7, -0.1]), mu, mu, mu, 0 * mu, np.ones(3), np.array([0, 0, 0]), np.full(3, True))
    _, _, gradient = solved(recipe("kl_cov"), to_columns(b), b.totals)
    assert gradient == pytest.approx([-1 / 3, -1 / 3, (-math.exp(-0.1) - 1) / 3], rel=1e-5)


def test_a_ratio_beyond_the_cap_weighs_as_much_as_the_cap() -> None:
    mu = np.log([1e-4, 1e-4, 0.1])
    b = Batch(np.log([0.1, 1e-3, 0.2]), mu, mu, mu, 0 * mu, np.array([1.0, -1.0, -1.0]), samples=np.array([0, 0, 0]))
    _, _, gradient = solved(recipe("ipo", max_importance_ratio=20), to_columns(b), b.totals)
    assert gradient == pytest.approx([-20 / 3, 10 / 3, 2 / 3])


@pytest.mark.parametrize("name", ["ipo", "dppo_tv", "dppo_kl"])
def test_the_squared_log_ratio_pulls_masked_tokens_too(name: str) -> None:
    def gain(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
        keeps = {"ipo": lambda pi, mu, a: abs(pi - mu) <= 0.3, "dppo_tv": keeps_tv, "dppo_kl": keeps_kl}
        return masked(keeps[name], math.inf)(x, frozen, b, t) - 0.3 * (x[t] - b.mu[t]) ** 2

    b = behaving(name, batch_of(drift=1.5))
    sums = check(recipe(name, kl_tau=0.3, max_importance_ratio=math.inf), over_tokens(gain), b)
    assert 0 < sums["masked_frac"] < len(b.pi)


@pytest.mark.parametrize("name", ALL)
def test_adv_tau_is_a_factor_of_all_advantages(name: str) -> None:
    b = behaving(name, batch_of())
    found = solved(recipe(name, adv_tau=0.25), to_columns(b), b.totals)
    assert found == solved(recipe(name), to_columns(replace(b, advantages=0.25 * b.advantages)), b.totals)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_pull_to_the_reference_has_the_gradient_of_its_formula(estimator: str) -> None:
    def gain(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
        d, now = x[t] - b.ref[t], frozen[t]
        penalties = {
            "k1": min(math.exp(now - b.mu[t]), 8) * (now - b.ref[t]) * x[t],  # in the reward, importance weighted
            "k2": d * d / 2,
            "k3": math.exp(-d) - 1 + d,
        }
        return ppo()(x, frozen, b, t) - 0.3 * penalties[estimator]

    b = behaving("ppo", batch_of())
    d = b.pi - b.ref
    values = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}
    value = -OBJECTIVES["ppo"](b.pi, b.pi, b) + 0.3 * values[estimator].mean()
    sums = check(recipe("ppo", beta=0.3, kl_estimator=estimator), over_tokens(gain), b, value)
    assert sums["reference_kl"] == pytest.approx(values["k3"].sum())


def test_importance_pulls_towards_the_behaviour_policy() -> None:
    def gain(x: np.ndarray, frozen: np.ndarray, b: Batch, t: int) -> float:
        r = math.exp(frozen[t] - b.mu[t])
        return r * (b.advantages[t] - 0.3 * math.log(r)) * x[t] if 0.5 <= r <= 2 else 0.0

    b = behaving("importance", batch_of(drift=0.8))
    value = -np.mean([banded(r, 0.5, 2) * a for r, a in zip(np.exp(b.pi - b.mu), b.advantages, strict=True)])
    sums = check(recipe("importance", kl_tau=0.3, ratio_low=0.5, ratio_high=2.0), over_tokens(gain), b, value)
    assert 0 < sums["masked_frac"] < len(b.pi)


def test_the_sums_of_importance_by_hand() -> None:
    # ratios 1, 4 (outside), 0.5; both ends of the band are inside
    pi, samples = np.zeros(3), np.zeros(3, dtype=int)
    mu = -np.log([1.0, 4.0, 0.5])
    b = Batch(pi, mu, prox=mu, ref=pi, entropies=pi, advantages=np.array([2.0, 3.0, -1.0]), samples=samples)
    found = recipe("importance", kl_tau=0.0, ratio_low=0.5, ratio_high=1.0)
    value, sums, _ = solved(found, replace(to_columns(b), reference=None), Totals(3, 1))
    none = dict.fromkeys(("capped_frac", "clip_frac/low", "clip_frac/high"), 0.0)
    weights = {"importance_ratio": 5.5, "weights": 5.5, "squared_weights": 1 + 16 + 0.25}
    kl = (4 - 1 - math.log(4)) + (0.5 - 1 - math.log(0.5))
    assert sums == pytest.approx(none | weights | {"masked_frac": 1.0, "policy/kl": kl})
    assert value == pytest.approx(-(2.0 - 0.5) / 3)
    assert effective_share(weights=8.0, squared_weights=16.0, tokens=4) == 1.0
    assert effective_share(weights=3.0, squared_weights=9.0, tokens=10) == pytest.approx(0.1)


def test_kl_estimate_stays_exact_for_tiny_differences() -> None:
    for difference in (1e-7, -1e-7, 3e-6, 0.5):
        d = Fraction(difference)
        series = sum(d**n / math.factorial(n) for n in range(2, 20))
        found = float(kl_estimate(torch.tensor([difference], dtype=torch.float64))[0])
        assert found == pytest.approx(float(series), rel=1e-8)
        assert found > 0
    size = torch.logspace(-40, 2, 20_000)
    assert float(kl_estimate(torch.cat([size, -size])).min()) >= 0


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 8), max_size=3),
    name=st.sampled_from(ALL),
    normalize=st.sampled_from(["token", "sequence", "constant"]),
)
@settings(max_examples=40)
def test_loss_and_gradient_are_independent_of_how_samples_form_rows(lengths, cuts, name, normalize) -> None:
    b = batch_of(lengths, drift=0.7)
    found = recipe(name, normalize=normalize, beta=0.1, entropy_bonus=0.05)
    whole_value, whole_sums, whole_gradient = solved(found, to_columns(b), b.totals)
    value, sums, gradient = 0.0, dict.fromkeys(whole_sums, 0.0), []
    for first, last in pairwise([0, *sorted(min(cut, len(lengths)) for cut in cuts), len(lengths)]):
        if first < last:
            part = b.part((b.samples >= first) & (b.samples < last))
            own = solved(found, to_columns(replace(part, samples=part.samples - first)), b.totals)
            value += own[0]
            sums = {name: total + own[1][name] for name, total in sums.items()}
            gradient += own[2]
    assert value == pytest.approx(whole_value, rel=1e-9, abs=1e-12)
    assert gradient == pytest.approx(whole_gradient, rel=1e-9, abs=1e-12)
    assert sums == pytest.approx(whole_sums)


@pytest.mark.parametrize("name", ALL)
def test_tokens_that_do_not_count_change_nothing(name: str) -> None:
    b = batch_of()
    found = recipe(name, beta=0.1, entropy_bonus=0.1)
    part = b.part(b.samples < 4)
    value, sums, gradient = solved(found, to_columns(part), part.totals)
    counted = torch.tensor(b.samples < 4)
    columns = to_columns(b)
    wild = torch.where(counted, columns.behaviour, -math.inf)
    columns = replace(columns, behaviour=wild, proximal=torch.where(counted, columns.proximal, math.nan), mask=counted)
    found_value, found_sums, found_gradient = solved(found, columns, part.totals)
    assert found_value == pytest.approx(value, rel=1e-12)
    assert found_gradient == pytest.approx([*gradient, *[0.0] * 8], rel=1e-12)
    assert found_sums == pytest.approx(sums)


@pytest.mark.parametrize("kl_tau", [0.0, 0.1])
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_token_that_the_policy_rules_out_is_pulled_nowhere(kl_tau: float, advantage: float) -> None:
    """With `ratio_low = 0` its ratio of 0 is within the band; r (A - kl_tau log r) is 0 in the limit."""
    pi, mu = np.array([-math.inf, -1.0]), np.array([-1.0, -2.0])
    b = Batch(pi, mu, mu, mu, 0 * mu, np.full(2, advantage), samples=np.array([0, 0]))
    value, _, gradient = solved(recipe("importance", ratio_low=0.0, kl_tau=kl_tau), to_columns(b), b.totals)
    assert gradient == pytest.approx([0.0, -math.e * (advantage - kl_tau) / 2])
    assert math.isfinite(value)


def test_a_token_that_the_policy_rules_out_has_a_finite_penalty() -> None:
    pi, mu = np.array([-math.inf]), np.array([-1.0])
    b = Batch(pi, mu, mu, mu, 0 * mu, np.ones(1), samples=np.array([0]))
    value, _, gradient = solved(recipe("ipo", kl_tau=0.1, eps=1), to_columns(b), b.totals)
    assert (value, gradient) == (pytest.approx(0.1 * 400), [pytest.approx(-0.1 * 40)])


@pytest.mark.parametrize("name", [name for name in ALL if has_ratio(recipe(name))])
@pytest.mark.parametrize("log_ratio", [-100.0, 100.0])
def test_a_ratio_out_of_all_bounds_gives_no_nan(name: str, log_ratio: float) -> None:
    """In float32, where the ratio overflows; a zero advantage is the worst case."""
    pi = np.full(3, -1.0, dtype=np.float32)
    prox = pi if recipe(name).proximal == "recomputed" else pi - np.float32(log_ratio)
    b = Batch(pi, pi - np.float32(log_ratio), prox, pi, 0 * pi, 0 * pi, samples=np.array([0, 0, 1]))
    value, sums, gradient = solved(recipe(name), to_columns(b), b.totals)
    assert (value, gradient) == (0.0, [0.0, 0.0, 0.0])
    assert math.isfinite(sums["weights"])


def test_entropy_gradient_is_finite_if_logits_rule_a_token_out() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -math.inf, -math.inf, -math.inf]], requires_grad=True)
    _, entropies = token_logprobs(logits, torch.tensor([0, 0]), torch.ones(2), entropy_gradient=True)
    assert entropies.tolist() == pytest.approx([math.log(4), 0.0])
    entropies.sum().backward()
    assert bool(logits.grad.isfinite().all())
