"""Score centring against its definition, written out in NumPy over a whole vocabulary, in float64."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from trireme.algo.columns import Columns, Totals
from trireme.algo.loss.centering import centering
from trireme.algo.loss.loss import policy_loss
from trireme.config.losses import Loss, resolve_loss

V = 9
ADVANTAGE = 1.7
RECIPES = {
    "importance": {"ratio_low": 0.6, "ratio_high": 1.5},
    "ipo": {"eps": 0.05, "max_importance_ratio": 1.2},
    "reinforce": {},
}


def recipe(name: str) -> Loss:
    return resolve_loss(Loss(type=name, score_centering=True, **RECIPES[name]), length=1)


def weight(name: str, pi: float, mu: float) -> float:
    """The weight of a token, from its two probabilities."""
    ratio = pi / mu
    return {
        "importance": ratio if 0.6 <= ratio <= 1.5 else 0.0,
        "ipo": min(ratio, 1.2) if abs(pi - mu) <= 0.05 else 0.0,
        "reinforce": 1.0,
    }[name]


def distribution(seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=V)
    return np.exp(drawn) / np.exp(drawn).sum()


def with_tail_like(mu: np.ndarray, pi: np.ndarray, head: list[int]) -> np.ndarray:
    """`mu` with its probability beyond the head spread as `pi` spreads its own."""
    tail = [v for v in range(V) if v not in head]
    found = mu.copy()
    found[tail] = mu[tail].sum() * pi[tail] / pi[tail].sum()
    return found


def columns_of(logits: torch.Tensor, mu: np.ndarray, sampled: list[int], head: list[int]) -> Columns:
    """One place for each sampled token, all with the same distributions."""
    log_pi, log_mu = torch.log_softmax(logits, -1), torch.tensor(np.log(mu))
    count, ids = len(sampled), torch.tensor(sampled)
    behaviour = log_mu[ids]
    return Columns(
        logprobs=log_pi[ids],
        entropies=torch.zeros(count, dtype=torch.float64),
        behaviour=behaviour,
        proximal=behaviour,
        advantages=torch.full((count,), ADVANTAGE, dtype=torch.float64),
        versions=torch.zeros(count, dtype=torch.int64),
        samples=torch.arange(count),
        num_samples=count,
        mask=torch.ones(count, dtype=torch.bool),
        top_logprobs=log_pi[head][:, None].expand(-1, count),
        top_behaviour=log_mu[head][:, None].expand(-1, count),
    )


def slopes(name: str, pi: np.ndarray, mu: np.ndarray, head: list[int], token: int) -> np.ndarray:
    """The gradient of the loss of one token with respect to the logits, by the definition over the whole vocabulary."""
    scores = np.eye(V) - pi  # of each token: d log pi / d logits
    known = with_tail_like(mu, pi, head)
    average = sum(known[v] * beyond(name, pi, known, head, v) * scores[v] for v in range(V))
    return -ADVANTAGE * (weight(name, pi[token], mu[token]) * scores[token] - average)


def beyond(name: str, pi: np.ndarray, mu: np.ndarray, head: list[int], v: int) -> float:
    """The weight of a token. Beyond the head no probability is known, so none has moved by more than `eps`."""
    if v in head or name != "ipo":
        return weight(name, pi[v], mu[v])
    return min(pi[v] / mu[v], 1.2)


@pytest.mark.parametrize("head", [list(range(V)), [4, 0, 7], [2]], ids=["all", "three", "one"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RECIPES)
def test_the_gradient_is_that_of_the_definition_over_the_vocabulary(name, seed, head) -> None:
    pi, mu = distribution(seed), distribution(seed + 10)
    for token in range(V):
        logits = torch.tensor(np.log(pi), requires_grad=True)
        terms = policy_loss(columns_of(logits, mu, [token], head), Totals(1, 1), recipe(name))
        terms.loss.backward()
        assert logits.grad.tolist() == pytest.approx(slopes(name, pi, mu, head, token).tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("head", [list(range(V)), [4, 0, 7]], ids=["all", "three"])
@pytest.mark.parametrize("name", RECIPES)
def test_an_advantage_that_all_tokens_share_changes_nothing_on_average(name, head) -> None:
    pi = distribution(1)
    mu = with_tail_like(distribution(2), pi, head)
    if name == "ipo":
        mu[[v for v in range(V) if v not in head]] = pi[[v for v in range(V) if v not in head]]
        mu /= mu.sum()
        pi = with_tail_like(pi, mu, head)
    average = np.zeros(V)
    for token in range(V):
        logits = torch.tensor(np.log(pi), requires_grad=True)
        policy_loss(columns_of(logits, mu, [token], head), Totals(1, 1), recipe(name)).loss.backward()
        average += mu[token] * logits.grad.numpy()
    assert average.tolist() == pytest.approx([0.0] * V, abs=1e-7)


def test_the_term_by_hand() -> None:
    # pi = (1/2, 1/4, 1/4), mu = (1/4, 1/4, 1/2), of which only token 0 is known: rho = (3/4) / (1/2)
    logits = torch.tensor(np.log([0.5, 0.25, 0.25]), requires_grad=True)
    columns = columns_of(logits, np.array([0.25, 0.25, 0.5]), [1], [0])
    found = centering(columns, resolve_loss(Loss(type="reinforce", score_centering=True), length=1))
    (found.sum() / ADVANTAGE).backward()
    coefficient = 0.25 - 1.5 * 0.5
    assert logits.grad.tolist() == pytest.approx([coefficient * 0.5, -coefficient * 0.25, -coefficient * 0.25])


def test_a_cut_samplers_tokens_leave_no_tail() -> None:
    """All that it could choose from is known: with the ratio as its weight, nothing is left to be subtracted."""
    kept, pi, mu = [1, 3, 6], distribution(5), distribution(6)
    pi[[v for v in range(V) if v not in kept]] = 1e-30
    mu[[v for v in range(V) if v not in kept]] = 1e-30
    logits = torch.tensor(np.log(pi / pi.sum()), requires_grad=True)
    columns = columns_of(logits, mu / mu.sum(), [3], kept)
    wide = resolve_loss(Loss(type="importance", ratio_low=0, ratio_high=math.inf, score_centering=True), length=1)
    centering(columns, wide).sum().backward()
    assert logits.grad.tolist() == pytest.approx([0.0] * V, abs=1e-9)


@pytest.mark.parametrize("name", RECIPES)
def test_places_without_a_list_have_the_loss_without_centring(name) -> None:
    columns = columns_of(torch.tensor(np.log(distribution(3)), requires_grad=True), distribution(4), [2, 5], [0, 1])
    unknown = replace(columns, top_behaviour=torch.full_like(columns.top_behaviour, -math.inf))
    without = resolve_loss(Loss(type=name, **RECIPES[name]), length=1)
    for given in (unknown, replace(columns, top_behaviour=None, top_logprobs=None)):
        found = policy_loss(given, Totals(2, 2), recipe(name))
        assert torch.equal(found.loss, policy_loss(given, Totals(2, 2), without).loss)
        assert float(found.sums.get("top_mass", 0.0)) == 0.0


def test_another_loss_on_a_batch_that_was_filled_for_centring_has_no_term() -> None:
    """A run that was resumed with another loss."""
    columns = columns_of(torch.tensor(np.log(distribution(3)), requires_grad=True), distribution(4), [2, 5], [0, 1])
    found = policy_loss(columns, Totals(2, 2), resolve_loss(Loss(type="ppo", score_centering=True), length=1))
    expected = policy_loss(columns, Totals(2, 2), resolve_loss(Loss(type="ppo"), length=1))
    assert torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("name", RECIPES)
def test_the_centred_gradient_is_independent_of_how_places_form_rows(name) -> None:
    pi, mu, sampled = distribution(7), distribution(8), [0, 3, 3, 8, 1]
    whole = torch.tensor(np.log(pi), requires_grad=True)
    policy_loss(columns_of(whole, mu, sampled, [0, 3]), Totals(5, 5), recipe(name)).loss.backward()
    parts = torch.tensor(np.log(pi), requires_grad=True)
    for first, last in pairwise([0, 2, 5]):
        policy_loss(columns_of(parts, mu, sampled[first:last], [0, 3]), Totals(5, 5), recipe(name)).loss.backward()
    assert parts.grad.tolist() == pytest.approx(whole.grad.tolist(), rel=1e-12)


def test_tokens_that_the_policy_rules_out_give_no_nan() -> None:
    logits = torch.tensor([0.0, 1.0, -math.inf], dtype=torch.float64, requires_grad=True)
    columns = columns_of(logits, np.array([0.25, 0.5, 0.25]), [1], [0, 1, 2])
    for name in RECIPES:
        (gradient,) = torch.autograd.grad(centering(columns, recipe(name)).sum(), logits, retain_graph=True)
        assert bool(gradient[:2].isfinite().all())
