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


def loss_of(logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, **changed) -> LossTerms:
    count = len(logprobs)
    options = {"loss_tokens": count, "ratio_low": LOW, "ratio_high": HIGH, "kl_tau": 0.0} | changed
    mask = options.pop("mask", None)
    totals = Totals(tokens=options.pop("loss_tokens"), samples=1)
    columns = columns_of(logprobs, behaviour=behaviour, advantages=advantages, mask=mask)
    return policy_loss(columns, totals, Recipe("importance", **options))


def gradient_of(logprobs: list[float], behaviour: list[float], advantages: list[float], **changed) -> list[float]:
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    others = (torch.tensor(column, dtype=torch.float64) for column in (behaviour, advantages))
    loss_of(leaf, *others, **changed).loss.backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()


def random_columns(count: int = 400) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logprobs = -3 * torch.rand(count, generator=generator, dtype=torch.float64)
    behaviour = logprobs + torch.randn(count, generator=generator, dtype=torch.float64)
    return logprobs, behaviour, torch.randn(count, generator=generator, dtype=torch.float64)


def test_the_gradient_is_that_of_the_masked_sum_of_ratio_times_advantage() -> None:
    logprobs, behaviour, advantages = random_columns()
    naive = logprobs.clone().requires_grad_()
    ratio = (naive - behaviour).exp()
    kept = [i for i in range(len(ratio)) if LOW <= ratio[i].item() <= HIGH]
    assert 100 < len(kept) < 300  # some of both
    (-sum(ratio[i] * advantages[i] for i in kept) / len(ratio)).backward()
    found = gradient_of(logprobs.tolist(), behaviour.tolist(), advantages.tolist())
    assert found == pytest.approx(naive.grad.tolist(), rel=1e-12, abs=1e-15)


def test_the_divergence_term_by_its_formula() -> None:
    logprobs, behaviour, advantages = random_columns()
    tau, count = 0.3, len(logprobs)
    expected = []
    for pi, mu, advantage in zip(logprobs.tolist(), behaviour.tolist(), advantages.tolist(), strict=True):
        ratio = math.exp(pi - mu)
        kept = LOW <= ratio <= HIGH
        expected.append(-ratio * (advantage - tau * (pi - mu)) / count if kept else 0.0)
    found = gradient_of(logprobs.tolist(), behaviour.tolist(), advantages.tolist(), kl_tau=tau)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_the_divergence_term_alone_is_the_gradient_of_the_divergence() -> None:
    """Summed over all tokens with the weight with which mu samples them, the estimate is exact: KL(pi || mu)."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    mu = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), -1)
    pi = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((pi.exp() * (pi - mu)).sum(), logits)

    estimate = torch.zeros(7, dtype=torch.float64)
    for token in range(7):
        one = torch.log_softmax(logits, -1)[token : token + 1]
        zero = torch.zeros(1, dtype=torch.float64)
        terms = loss_of(one, mu[token : token + 1], zero, kl_tau=1.0, ratio_low=0.0, ratio_high=1e9)
        estimate += mu[token].exp() * torch.autograd.grad(terms.loss, logits)[0]
    assert estimate.tolist() == pytest.approx(exact.tolist(), rel=1e-9, abs=1e-12)


def test_at_ratio_one_it_is_reinforce() -> None:
    assert gradient_of([-1.0, -2.0], [-1.0, -2.0], [0.5, -1.5]) == pytest.approx([-0.25, 0.75])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [LOW * 0.99, HIGH * 1.01, 1e-30, 1e30])
def test_a_token_outside_the_band_gets_no_gradient_in_either_direction(ratio: float, advantage: float) -> None:
    assert gradient_of([-1.0], [-1.0 - math.log(ratio)], [advantage], kl_tau=0.5) == [0.0]


@pytest.mark.parametrize("ratio", [LOW * 1.01, HIGH * 0.99])
def test_a_token_inside_the_band_gets_its_whole_ratio(ratio: float) -> None:
    assert gradient_of([-1.0], [-1.0 - math.log(ratio)], [1.0]) == pytest.approx([-ratio])


def test_masked_tokens_count_in_nothing() -> None:
    logprobs, behaviour, advantages = random_columns(10)
    mask = torch.arange(10) < 6
    whole = loss_of(logprobs, behaviour, advantages, mask=mask, loss_tokens=6)
    part = loss_of(logprobs[:6], behaviour[:6], advantages[:6], loss_tokens=6)
    assert float(whole.loss) == float(part.loss)
    assert float(whole.value) == float(part.value)
    assert {name: float(value) for name, value in whole.sums.items()} == pytest.approx(
        {name: float(value) for name, value in part.sums.items()}
    )


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
