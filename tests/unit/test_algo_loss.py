"""The default loss and what all losses share, against calculations that share no line with them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from columns import columns_of
from trireme.algo.columns import LossTerms, Totals
from trireme.algo.loss import effective_share, kl_estimate, policy_loss
from trireme.config.losses import Recipe

LOW, HIGH = 0.5, 2.0


def loss_of(logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, **changed: float) -> LossTerms:
    recipe = Recipe("importance", **{"ratio_low": LOW, "ratio_high": HIGH, "kl_tau": 0.0} | changed)
    columns = columns_of(logprobs, behaviour=behaviour, advantages=advantages)
    return policy_loss(columns, Totals(tokens=len(logprobs), samples=1), recipe)


def gradient_of(
    logprobs: list[float], behaviour: list[float], advantages: list[float], **changed: float
) -> list[float]:
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    others = (torch.tensor(column, dtype=torch.float64) for column in (behaviour, advantages))
    loss_of(leaf, *others, **changed).loss.backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()


def test_the_divergence_term_by_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = -3 * torch.rand(400, generator=generator, dtype=torch.float64)
    behaviour = logprobs + torch.randn(400, generator=generator, dtype=torch.float64)
    columns = [
        each.tolist() for each in (logprobs, behaviour, torch.randn(400, generator=generator, dtype=torch.float64))
    ]
    tau, expected = 0.3, []
    for pi, mu, advantage in zip(*columns, strict=True):
        ratio = math.exp(pi - mu)
        expected.append(-ratio * (advantage - tau * (pi - mu)) / 400 if LOW <= ratio <= HIGH else 0.0)
    assert 100 < expected.count(0.0) < 300
    assert gradient_of(*columns, kl_tau=tau) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [LOW * 0.99, HIGH * 1.01, 1e-30, 1e30, LOW * 1.01, HIGH * 0.99])
def test_only_a_token_inside_the_band_gets_a_gradient(ratio: float, advantage: float) -> None:
    expected = -ratio * advantage if LOW <= ratio <= HIGH else 0.0
    assert gradient_of([-1.0], [-1.0 - math.log(ratio)], [advantage]) == pytest.approx([expected])


def test_both_ends_of_the_band_are_inside() -> None:
    assert gradient_of([-1.0], [-1.0], [1.0], ratio_low=1.0, ratio_high=1.0) == [-1.0]


def test_infinite_behaviour_logprobs_give_no_gradient_and_no_nan() -> None:
    assert gradient_of([-1.0, -1.0], [-math.inf, -1.0], [1.0, 1.0], kl_tau=0.5) == pytest.approx([0.0, -0.5])


def test_sums_by_hand() -> None:
    # ratios 1, 4 (outside), 0.5 (on the edge, which counts)
    logprobs = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    behaviour = logprobs - torch.tensor([1.0, 4.0, 0.5], dtype=torch.float64).log()
    terms = loss_of(logprobs, behaviour, torch.tensor([2.0, 3.0, -1.0], dtype=torch.float64), ratio_low=0.499)
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


def test_the_effective_share_of_equal_weights_is_one_and_of_a_single_weight_one_of_all() -> None:
    assert effective_share(weights=8.0, squared_weights=16.0, tokens=4) == 1.0
    assert effective_share(weights=3.0, squared_weights=9.0, tokens=10) == pytest.approx(0.1)


def test_the_divergence_estimate_is_never_negative() -> None:
    size = torch.logspace(-40, 2, 20_000, dtype=torch.float64)
    assert float(kl_estimate(torch.cat([size, -size])).min()) >= 0
    assert float(kl_estimate(torch.cat([size, -size]).float()).min()) >= 0


@pytest.mark.parametrize("difference", [1e-7, -1e-7, 3e-6, 0.5])
def test_the_divergence_estimate_is_exact_where_float32_would_drown(difference: float) -> None:
    d = Fraction(difference)
    series = sum(d**n / math.factorial(n) for n in range(2, 20))
    found = float(kl_estimate(torch.tensor([difference], dtype=torch.float64))[0])
    assert found == pytest.approx(float(series), rel=1e-8)
    assert found > 0
