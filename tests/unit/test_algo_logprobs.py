"""Logprobs and entropies of tokens, against the plain definition."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.algo.logprobs import token_logprobs

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
