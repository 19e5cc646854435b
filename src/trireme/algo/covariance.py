"""The tokens of a batch that `clip_cov` and `kl_cov` restrain: those whose update would cost the policy most entropy.

    cov_t = (A_t - mean(A)) * (log mu(t) - mean(log mu))        means over the batch's trained tokens

Entropy falls with the covariance of advantages and logprobs, and few tokens carry most of it (Cui et al. 2025, "The
Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617, Clip-Cov and KL-Cov):

- `clip_cov`: `cov_ratio` of all tokens, drawn from those with cov_low < cov_t < cov_high.
- `kl_cov`: `cov_ratio` of all tokens, those with the largest cov_t.

At least one token either way, as in the authors' code (verl's `clip_cov` and `kl_cov`), which has these values too.
Deviation: logprobs are those of the engine, not of the policy at each optimizer step. So the choice is made once, over
the whole batch, and depends neither on its split nor on the rank; theirs is made in each micro-batch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from msgspec.structs import replace

from trireme.algo.packing import Sample
from trireme.config.losses import Loss

RESTRAINING = ("clip_cov", "kl_cov")
"""Surrogates that restrain some tokens."""


def with_restrained(samples: list[Sample], recipe: Loss, *, step: int) -> list[Sample]:
    """Return the samples of a batch with `Tokens.restrained`. The same batch gives the same tokens."""
    if recipe.surrogate not in RESTRAINING or not samples:
        return samples

    counts = [sample.tokens.by_policy_loss & (np.arange(sample.tokens.length) > 0) for sample in samples]
    counted = np.concatenate(counts)
    advantages, logprobs = (
        np.concatenate([getattr(sample.tokens, name) for sample in samples])[counted].astype(np.float64)
        for name in ("advantages", "logprobs")
    )
    restrained = np.zeros(len(counted), np.uint8)
    restrained[np.flatnonzero(counted)[chosen(recipe.adv_tau * advantages, logprobs, recipe, step=step)]] = 1

    ends = np.cumsum([len(each) for each in counts])[:-1]
    parts = zip(samples, np.split(restrained, ends), strict=True)
    return [dataclasses.replace(sample, tokens=replace(sample.tokens, restrained=part)) for sample, part in parts]


def chosen(advantages_N: np.ndarray, logprobs_N: np.ndarray, recipe: Loss, *, step: int) -> np.ndarray:
    """Return the indices of the tokens that are restrained, among the N that count."""
    if not len(advantages_N):
        return np.zeros(0, np.int64)
    assert recipe.cov_ratio is not None, f"not resolved: {recipe}"
    covariances = (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())
    count = max(1, int(recipe.cov_ratio * len(covariances)))
    if recipe.surrogate == "kl_cov":
        return np.argsort(-covariances, kind="stable")[:count]
    between = np.flatnonzero((covariances > recipe.cov_low) & (covariances < recipe.cov_high))
    return np.random.default_rng(step).permutation(between)[:count]
