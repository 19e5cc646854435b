"""Logprobs and entropies of tokens, against the plain definition."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.algo.logprobs import Choices, token_logprobs

K, V = 1500, 11  # more positions than are normalised at once


def test_logprobs_and_entropies_are_those_of_the_plain_definition_at_any_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(K, V, generator=generator)
    targets = torch.randint(0, V, (K,), generator=generator)
    temperatures = torch.tensor([0.3, 0.7, 1.0, 1.6]).repeat(K // 4)
    logprobs, entropies = token_logprobs(logits, targets, temperatures)
    for k in range(0, K, 7):
        exponentials = [math.exp(x / float(temperatures[k])) for x in logits[k].tolist()]
        shares = [x / sum(exponentials) for x in exponentials]
        assert float(logprobs[k]) == pytest.approx(math.log(shares[targets[k]]), rel=1e-4, abs=1e-6)
        assert float(entropies[k]) == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-4, abs=1e-6)


def test_the_gradient_is_that_of_the_plain_definition() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(K, V, generator=generator, dtype=torch.float32)
    targets = torch.randint(0, V, (K,), generator=generator)
    temperatures = torch.rand(K, generator=generator) + 0.5
    weights = torch.randn(K, generator=generator)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (token_logprobs(ours, targets, temperatures)[0] * weights).sum().backward()
    (torch.log_softmax(plain / temperatures[:, None], -1)[torch.arange(K), targets] * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_greedy_counts_as_temperature_one() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    zero = token_logprobs(logits, torch.tensor([1]), torch.tensor([0.0]))
    one = token_logprobs(logits, torch.tensor([1]), torch.tensor([1.0]))
    assert (zero[0].item(), zero[1].item()) == (one[0].item(), one[1].item())


def test_the_entropy_of_an_even_choice_and_of_none() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -math.inf, -math.inf, -math.inf]])
    _, entropies = token_logprobs(logits, torch.tensor([0, 0]), torch.ones(2))
    assert entropies.tolist() == pytest.approx([math.log(4), 0.0])


def test_low_precision_logits_are_normalised_in_float32() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2)).bfloat16()
    logprobs, entropies = token_logprobs(logits, torch.arange(5), torch.ones(5))
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert torch.equal(logprobs, torch.log_softmax(logits.float(), -1)[torch.arange(5), torch.arange(5)])


def naive_among(
    logits: torch.Tensor, among: list[int], target: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(logits[among] / temperature, -1)
    return logprobs[among.index(target)], -(logprobs.exp() * logprobs).sum()


def cut_positions(count: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[int, list[int]], Choices]:
    """Every second position was drawn from a few tokens."""
    generator = torch.Generator().manual_seed(7)
    logits = 2 * torch.randn(count, V, generator=generator)
    targets = torch.randint(0, V, (count,), generator=generator)
    temperatures = torch.rand(count, generator=generator) + 0.5
    among = {
        k: sorted({int(targets[k]), *torch.randint(0, V, (k % 5,), generator=generator).tolist()})
        for k in range(0, count, 2)
    }
    choices = Choices(
        positions=torch.tensor(list(among)),
        counts=torch.tensor([len(ids) for ids in among.values()]),
        ids=torch.tensor([token for ids in among.values() for token in ids]),
    )
    return logits, targets, temperatures, among, choices


def test_where_sampling_was_cut_probabilities_are_those_among_what_was_kept() -> None:
    logits, targets, temperatures, among, choices = cut_positions()
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, entropies = token_logprobs(ours, targets, temperatures, choices=choices, entropy_gradient=True)
    expected = [
        naive_among(plain[k], among.get(k, list(range(V))), int(targets[k]), float(temperatures[k]))
        for k in range(len(targets))
    ]
    torch.testing.assert_close(logprobs, torch.stack([each[0] for each in expected]))
    torch.testing.assert_close(entropies, torch.stack([each[1] for each in expected]))
    weights = torch.linspace(-1, 1, len(targets))
    (logprobs @ weights + entropies @ weights.flip(0)).backward()
    sum(w * e[0] + v * e[1] for w, v, e in zip(weights, weights.flip(0), expected, strict=True)).backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-4, atol=1e-6)


def test_a_token_that_had_to_be_is_certain_and_moves_nothing() -> None:
    logits = torch.randn(2, V, requires_grad=True)
    choices = Choices(torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([3, 5]))
    logprobs, entropies = token_logprobs(logits, torch.tensor([3, 5]), torch.ones(2), choices=choices)
    logprobs.sum().backward()
    assert (logprobs.tolist(), entropies.tolist()) == ([0.0, 0.0], [0.0, 0.0])
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("count", [5, K])
def test_the_gradient_of_the_entropy_is_that_of_the_plain_definition(count: int) -> None:
    logits = torch.randn(count, V, generator=torch.Generator().manual_seed(3))
    targets, temperatures = torch.zeros(count, dtype=torch.int64), torch.full((count,), 0.8)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, entropies = token_logprobs(ours, targets, temperatures, entropy_gradient=True)
    (entropies.square().sum() + logprobs.sum()).backward()
    naive = torch.log_softmax(plain / 0.8, -1)
    (-(naive.exp() * naive).sum(-1)).square().sum().add(naive[:, 0].sum()).backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_an_entropy_has_no_gradient_unless_it_is_asked_for() -> None:
    logits = torch.randn(3, V, requires_grad=True)
    assert not token_logprobs(logits, torch.arange(3), torch.ones(3))[1].requires_grad
    *_, choices = cut_positions(4)
    assert not token_logprobs(torch.randn(4, V, requires_grad=True), torch.arange(4), torch.ones(4), choices=choices)[
        1
    ].requires_grad
    assert token_logprobs(logits, torch.arange(3), torch.ones(3), entropy_gradient=True)[1].requires_grad


def test_logits_that_rule_a_token_out_leave_the_gradient_of_the_entropy_finite() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    _, entropies = token_logprobs(logits, torch.tensor([0]), torch.ones(1), entropy_gradient=True)
    entropies.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
