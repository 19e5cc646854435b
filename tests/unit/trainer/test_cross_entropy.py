"""Tokens that the policy did not sample add their cross-entropy, however a batch is split."""

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from support.models import tiny
from trireme.algo.packing import Sample, micro_batches_of_rank, num_learned, unsampled_row
from trireme.config.losses import Loss
from trireme.config.run import RunConfig
from trireme.trainer.step import base_state, forward_backward, policy_gradient

LENGTHS = [30, 12, 23, 7, 31, 9]


def changed(sample: Sample, **columns: Any) -> Sample:
    return replace(sample, tokens=msgspec.structs.replace(sample.tokens, **columns))


def weighted(sample: Sample, kind: str) -> Sample:
    """Return a sample whose given tokens have weights (`e`), one that a teacher sampled (`t`), or the policy's own."""
    mask, rng = sample.tokens.loss_mask == 1, np.random.default_rng(0)
    if kind == "e":
        return changed(sample, ce_weights=np.where(mask, 0, rng.choice([0, 0.1, 0.75], len(mask))).astype(np.float32))
    taught = {"ce_weights": mask.astype(np.float32) / 2, "versions": np.full(len(mask), -1, np.int32)}
    return changed(sample, **taught) if kind == "t" else sample


def expected_terms(model: torch.nn.Module, samples: list[Sample]) -> tuple[float, float, int]:
    """Add the gradient of 1/N_ce * sum of -w log pi to the model's; return it, the mean of -log pi, and N_ce."""
    terms, nll = [], []
    for tokens in (sample.tokens for sample in samples if sample.tokens.ce_weights is not None):
        logits = model(torch.from_numpy(tokens.ids.astype(np.int64))[None]).logits[0].double()
        for place in range(1, tokens.length):  # nothing precedes the first token
            if tokens.ce_weights[place] > 0:
                nll.append(-logits[place - 1].log_softmax(-1)[int(tokens.ids[place])])
                terms.append(nll[-1] * float(tokens.ce_weights[place]))
    total = torch.stack(terms).sum() / len(terms)
    total.backward()
    return float(total.detach()), float(torch.stack(nll).detach().mean()), len(terms)


@pytest.mark.parametrize("kinds", ["petpet", "tttttt"])
@pytest.mark.parametrize("capacity", [48, 200])
def test_weighted_tokens_add_their_cross_entropy_to_the_policy_loss(tiny_model, world, kinds, capacity):
    samples, loss = [*map(weighted, tiny.random_samples(LENGTHS), kinds)], policy_gradient(Loss(kl_tau=0.1))
    model = base_state(RunConfig.model_validate({"model": {"name": str(tiny_model)}}), world).model
    total, nll, num_ce = expected_terms(model, samples)
    totals = {"loss_tokens": max(1, sum(num_learned(samples))), "step": 0, "loss_function": loss, "world": world}
    run = partial(forward_backward, model, **totals, ce_tokens=num_ce)

    # The policy's part is that of a batch which has nothing else; N is the same.
    own = [changed(each, loss_mask=each.tokens.by_policy_loss.astype(np.uint8), ce_weights=None) for each in samples]
    alone = forward_backward(model, micro_batches_of_rank(own, capacity=200, rank=0, world=1), **totals)
    expected = tiny.take_gradients(model)

    metrics = run(micro_batches_of_rank(samples, capacity=capacity, rank=0, world=1))
    assert tiny.largest_difference(tiny.take_gradients(model), expected) < 1e-5
    # What is said of the policy is of its own tokens; where there are none, nothing is said.
    of_policy = alone if "p" in kinds else {}
    found = {"loss": alone["loss"] + total, "ce/loss": total, "ce/nll": nll}
    assert metrics == pytest.approx(of_policy | found, rel=1e-5)

    # Two ranks have a part of the rows each, and one of the rows may be empty. Their gradients add up.
    for rank in (0, 1):
        run([*micro_batches_of_rank(samples, capacity=capacity, rank=rank, world=2), unsampled_row([0], [1])])
    assert tiny.largest_difference(tiny.take_gradients(model), expected) < 1e-5
