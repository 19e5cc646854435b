"""Logprobs and entropies of tokens, against the plain definition."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.algo.logprobs import Choices, token_logprobs

K, V = 40, 11


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_logprobs_entropies_and_gradient_are_those_of_the_plain_definition(entropy_gradient: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(K, V, generator=generator)
    targets = torch.randint(0, V, (K,), generator=generator)
    temperatures = torch.rand(K, generator=generator) + 0.5
    temperatures[0] = 0.0  # greedy counts as 1
    weights = torch.randn(K, generator=generator)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, entropies = token_logprobs(ours, targets, temperatures, entropy_gradient=entropy_gradient)
    assert entropies.requires_grad == entropy_gradient
    (logprobs @ weights + entropies.square().sum()).backward()
    temperatures[0] = 1.0
    naive = torch.log_softmax(plain / temperatures[:, None], -1)
    loss = naive[torch.arange(K), targets] @ weights
    if entropy_gradient:
        loss = loss + (naive.exp() * naive).sum(-1).square().sum()
    loss.backward()
    torch.testing.assert_close(logprobs, naive[torch.arange(K), targets])
    torch.testing.assert_close(entropies, -(naive.exp() * naive).sum(-1))
    torch.testing.assert_close(ours.grad, plain.grad)


def test_entropies_of_an_even_choice_of_none_and_of_logits_that_rule_a_token_out() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -math.inf, -math.inf, -math.inf]], requires_grad=True)
    _, entropies = token_logprobs(logits, torch.tensor([0, 0]), torch.ones(2), entropy_gradient=True)
    assert entropies.tolist() == pytest.approx([math.log(4), 0.0])
    entropies.sum().backward()
    assert bool(logits.grad.isfinite().all())


def test_low_precision_logits_are_normalised_in_float32() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2)).bfloat16()
    logprobs, entropies = token_logprobs(logits, torch.arange(5), torch.ones(5))
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert torch.equal(logprobs, torch.log_softmax(logits.float(), -1)[torch.arange(5), torch.arange(5)])


def test_where_sampling_was_cut_probabilities_are_those_among_what_was_kept() -> None:
    generator = torch.Generator().manual_seed(7)
    logits = 2 * torch.randn(K, V, generator=generator)
    targets = torch.randint(0, V, (K,), generator=generator)
    temperatures = torch.rand(K, generator=generator) + 0.5
    among = {  # every second position was drawn from a few tokens, every tenth had no choice
        k: sorted({int(targets[k]), *torch.randint(0, V, (k % 5,), generator=generator).tolist()})
        for k in range(0, K, 2)
    }
    choices = Choices(
        positions=torch.tensor(list(among)),
        counts=torch.tensor([len(ids) for ids in among.values()]),
        ids=torch.tensor([token for ids in among.values() for token in ids]),
    )
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, entropies = token_logprobs(ours, targets, temperatures, choices=choices, entropy_gradient=True)
    expected = []
    for k, target in enumerate(targets.tolist()):
        kept = among.get(k, list(range(V)))
        naive = torch.log_softmax(plain[k][kept] / temperatures[k], -1)
        expected.append((naive[kept.index(target)], -(naive.exp() * naive).sum()))
    torch.testing.assert_close(logprobs, torch.stack([each[0] for each in expected]))
    torch.testing.assert_close(entropies, torch.stack([each[1] for each in expected]))
    assert not token_logprobs(ours, targets, temperatures, choices=choices)[1].requires_grad
    weights = torch.linspace(-1, 1, len(targets))
    (logprobs @ weights + entropies @ weights.flip(0)).backward()
    sum(w * e[0] + v * e[1] for w, v, e in zip(weights, weights.flip(0), expected, strict=True)).backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-4, atol=1e-6)
