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


def weighted(sample: Sample, kind: int) -> Sample:
    """Return a sample of the policy, one whose given tokens have weights, or one that a teacher sampled."""
    mask, rng = sample.tokens.loss_mask == 1, np.random.default_rng(kind)
    others = np.where(~mask, rng.choice([0.0, 0.1, 0.75], sample.tokens.length), 0.0)
    changes: list[dict[str, Any]] = [
        {},
        {"ce_weights": others.astype(np.float32)},
        {"ce_weights": np.where(mask, 0.5, 0.0).astype(np.float32), "versions": np.full(len(mask), -1, np.int32)},
    ]
    return replace(sample, tokens=msgspec.structs.replace(sample.tokens, **changes[kind]))


def without_weights(sample: Sample) -> Sample:
    """Return the tokens that the policy loss trains."""
    mask = sample.tokens.by_policy_loss.astype(np.uint8)
    return replace(sample, tokens=msgspec.structs.replace(sample.tokens, loss_mask=mask, ce_weights=None))


def expected_terms(model: torch.nn.Module, samples: list[Sample]) -> tuple[float, float]:
    """Add the gradient of 1/N_ce * sum of -w * log pi to the model's, sample by sample; return the sum, and the mean of
    -log pi."""
    terms, nll = [], []
    for tokens in (sample.tokens for sample in samples if sample.tokens.ce_weights is not None):
        logits = model(torch.from_numpy(tokens.ids.astype(np.int64))[None]).logits[0].double()
        for place in range(1, tokens.length):  # nothing precedes the first token
            if tokens.ce_weights[place] > 0:
                nll.append(-logits[place - 1].log_softmax(-1)[int(tokens.ids[place])])
                terms.append(nll[-1] * float(tokens.ce_weights[place]))
    total = torch.stack(terms).sum() / len(terms)
    total.backward()
    return float(total.detach()), float(torch.stack(nll).detach().mean())


@pytest.mark.parametrize("kinds", ["012012", "222222"])
@pytest.mark.parametrize("capacity", [48, 200])
def test_weighted_tokens_add_their_cross_entropy_to_the_policy_loss(tiny_model, world, kinds, capacity):
    pairs = zip(tiny.random_samples(LENGTHS), map(int, kinds), strict=True)
    samples, loss = [weighted(sample, kind) for sample, kind in pairs], policy_gradient(Loss(kl_tau=0.1))
    model = base_state(RunConfig.model_validate({"model": {"name": str(tiny_model)}}), world).model
    num_ce = sum(int((each.tokens.ce_weights[1:] > 0).sum()) for each in samples if each.tokens.ce_weights is not None)
    totals = {"loss_tokens": max(1, sum(num_learned(samples))), "ce_tokens": num_ce, "step": 0, "world": world}
    run = partial(forward_backward, model, loss_function=loss, **totals)

    # The policy's part is that of a batch which has nothing else; N is the same.
    rows = micro_batches_of_rank([*map(without_weights, samples)], capacity=200, rank=0, world=1)
    alone = forward_backward(model, rows, loss_function=loss, **totals | {"ce_tokens": 0})
    total, nll = expected_terms(model, samples)
    expected = tiny.take_gradients(model)

    metrics = run(micro_batches_of_rank(samples, capacity=capacity, rank=0, world=1))
    assert tiny.largest_difference(tiny.take_gradients(model), expected) < 1e-5
    assert metrics["ce/loss"] == pytest.approx(total, rel=1e-5)
    assert metrics["ce/nll"] == pytest.approx(nll, rel=1e-5)
    assert metrics["loss"] == pytest.approx(alone["loss"] + total, rel=1e-5)
    # What is said of the policy is of its own tokens; where there are none, nothing is said.
    of_policy = {name: value for name, value in alone.items() if name != "loss"} if "0" in kinds else {}
    assert {name: metrics[name] for name in metrics.keys() - {"loss", "ce/loss", "ce/nll"}} == pytest.approx(of_policy)

    # Two ranks have a part of the rows each, and one of the rows may be empty. Their gradients add up.
    for rank in (0, 1):
        run([*micro_batches_of_rank(samples, capacity=capacity, rank=rank, world=2), unsampled_row([0], [1])])
    assert tiny.largest_difference(tiny.take_gradients(model), expected) < 1e-5
