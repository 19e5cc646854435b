"""Gradients of a batch: the same however it is packed and split, and the same as those of plain transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tiny import (
    largest_difference,
    num_loss_tokens,
    open_state,
    random_samples,
    take_gradients,
    weights_of,
)
from trireme.algo.columns import LossFunction
from trireme.algo.loss import cross_entropy
from trireme.algo.packing import Sample, empty_micro_batch, micro_batches_of_rank
from trireme.config.trainer import ActivationCheckpointing, Loss, Optimizer, Scheduler, TrainerModel
from trireme.messages import MicroBatch, build_tokens
from trireme.trainer.mesh import World
from trireme.trainer.model import load_model
from trireme.trainer.optim import build_optimizer, set_lr
from trireme.trainer.step import forward_backward, policy_gradient, update

LENGTHS = [40, 7, 23, 2, 31, 12, 12]
LOSS = Loss(kl_tau=0.1, ratio_low=0.2, ratio_high=5.0)
POLICY = policy_gradient(LOSS)


def plain_pass(folder: Path, samples: list[Sample], attn: str = "sdpa") -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Plain transformers, one sample after the other; logprobs of the tokens of each that count."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attn, dtype=torch.float32)
    rows = []
    for sample in samples:
        ids = torch.tensor(sample.tokens.ids.astype("int64"))
        logprobs = torch.log_softmax(
            model(input_ids=ids[None], use_cache=False).logits[0, :-1] / sample.temperature, -1
        )
        rows.append(logprobs.gather(-1, ids[1:, None])[counting(sample)[1:], 0])
    return model, rows


def counting(sample: Sample) -> torch.Tensor:
    return torch.from_numpy(sample.tokens.loss_mask.astype(bool))


def at_loss(samples: list[Sample], column: str) -> torch.Tensor:
    return torch.cat([torch.from_numpy(getattr(sample.tokens, column))[counting(sample)] for sample in samples])


def passed(
    model: PreTrainedModel,
    samples: list[Sample],
    world: World,
    loss_function: LossFunction,
    *,
    capacity: int = 80,
    rows: list[MicroBatch] | None = None,
    loss_tokens: int | None = None,
) -> tuple[dict[str, float], Tensors]:
    """Return the metrics and the gradients of a forward and backward pass."""
    metrics = forward_backward(
        model,
        micro_batches_of_rank(samples, capacity=capacity, rank=0, world=1) if rows is None else rows,
        loss_tokens=num_loss_tokens(samples) if loss_tokens is None else loss_tokens,
        step=0,
        loss_function=loss_function,
        world=world,
    )
    return metrics, take_gradients(model)


Tensors = dict[str, torch.Tensor]


def gradients(
    folder: Path, world: World, samples: list[Sample], *, capacity: int = 80, **settings: Any
) -> tuple[dict[str, float], Tensors]:
    return passed(load_model(TrainerModel(**settings), str(folder), world), samples, world, POLICY, capacity=capacity)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_packed_batch_has_the_gradients_and_metrics_of_samples_alone(
    tiny_model: Path, world: World, attn: str
) -> None:
    """By the formula of `algo.loss`, beside plain transformers."""
    samples = random_samples(LENGTHS)
    plain, rows = plain_pass(tiny_model, samples, attn)
    logprobs = torch.cat(rows)
    log_ratio = logprobs.detach() - at_loss(samples, "logprobs")
    ratio = log_ratio.exp()
    is_kept = (ratio >= LOSS.ratio_low) & (ratio <= LOSS.ratio_high)
    terms = -ratio * (at_loss(samples, "advantages") - LOSS.kl_tau * log_ratio) * logprobs
    (terms[is_kept].sum() / len(terms)).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    metrics, found = gradients(tiny_model, world, samples, attn=attn)
    assert largest_difference(expected, found) < 1e-5
    estimate = (ratio - 1 - log_ratio).double()
    assert {name: metrics[name] for name in ("masked_frac", "importance_ratio", "policy/kl", "mismatch_kl")} == {
        "masked_frac": pytest.approx(1 - float(is_kept.double().mean())),
        "importance_ratio": pytest.approx(float(ratio.double().mean()), rel=1e-4),
        "policy/kl": pytest.approx(float(estimate.mean()), rel=1e-4),
        "mismatch_kl": pytest.approx(float(estimate[at_loss(samples, "versions") == 0].mean()), rel=1e-4),
    }
    assert 0 < metrics["masked_frac"] < 0.5


def test_a_packed_batch_has_the_cross_entropy_of_samples_alone(tiny_model: Path, world: World) -> None:
    samples = [Sample(sample.tokens, 1.0) for sample in random_samples(LENGTHS)]
    expected = -torch.cat(plain_pass(tiny_model, samples)[1]).mean()
    metrics, _ = passed(open_state(tiny_model, world).model, samples, world, cross_entropy)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_the_gradient_depends_neither_on_how_the_batch_is_split_nor_on_what_activations_are_kept(
    tiny_model: Path, world: World
) -> None:
    samples = random_samples(LENGTHS)
    metrics, whole = gradients(tiny_model, world, samples, capacity=sum(LENGTHS))
    for capacity, settings in ((40, {}), (64, {}), (80, {"ac": ActivationCheckpointing(freq=2)})):
        other_metrics, split = gradients(tiny_model, world, samples, capacity=capacity, **settings)
        assert largest_difference(whole, split) < 2e-6
        assert other_metrics == pytest.approx(metrics, rel=1e-5)


def test_a_sample_does_not_see_its_neighbours_in_the_row(tiny_model: Path, world: World) -> None:
    """Gradients of one sample are the same beside any other that teaches nothing."""
    taught, (*others,) = random_samples([20], seed=1), random_samples([11, 30], seed=2)
    silent = []
    for tokens in (sample.tokens for sample in others):
        none = [0] * tokens.length
        versions = [-1] * tokens.length
        columns = {"loss_mask": none, "logprobs": none, "advantages": none, "versions": versions}
        silent.append(Sample(build_tokens(ids=tokens.ids, **columns), 1.0))
    _, expected = gradients(tiny_model, world, taught, capacity=64)
    _, found = gradients(tiny_model, world, [*taught, *silent], capacity=64)
    assert largest_difference(expected, found) < 2e-6


def test_the_first_token_of_a_sample_is_never_predicted_from_its_neighbour(tiny_model: Path, world: World) -> None:
    tokens = build_tokens(
        ids=[5, 6, 7, 8], loss_mask=[1, 1, 1, 1], logprobs=[0.0] * 4, advantages=[1.0] * 4, versions=[0] * 4
    )
    model = open_state(tiny_model, world).model
    _, packed = passed(model, [Sample(tokens, 1.0)] * 2, world, cross_entropy)
    _, alone = passed(model, [Sample(tokens, 1.0)], world, cross_entropy, loss_tokens=8)
    assert largest_difference(packed, {name: 2 * gradient for name, gradient in alone.items()}) < 2e-6


def test_an_empty_row_changes_nothing(tiny_model: Path, world: World) -> None:
    samples, model = random_samples([20]), open_state(tiny_model, world).model
    rows = micro_batches_of_rank(samples, capacity=64, rank=0, world=1)
    expected, gradient = passed(model, samples, world, POLICY, rows=rows)
    padded = [empty_micro_batch(), *rows, empty_micro_batch()]
    found, other_gradient = passed(model, samples, world, POLICY, rows=padded)
    assert found == expected
    assert largest_difference(gradient, other_gradient) == 0.0


@pytest.mark.parametrize("loss_function", [cross_entropy, POLICY], ids=["cross_entropy", "policy"])
def test_a_batch_without_a_token_that_counts_leaves_the_weights_finite(
    tiny_model: Path, world: World, loss_function: LossFunction
) -> None:
    model, rows = open_state(tiny_model, world).model, [empty_micro_batch()]
    metrics, found = passed(model, [], world, loss_function, rows=rows, loss_tokens=0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())


def test_a_step_clips_the_norm_of_the_whole_gradient_and_leaves_out_one_that_is_not_finite(
    tiny_model: Path, world: World
) -> None:
    model = load_model(TrainerModel(), str(tiny_model), world)
    optimizer = build_optimizer(model, Optimizer(type="sgd", lr=1.0, betas=(0.0, 0.0)))
    _, gradient = passed(model, random_samples(LENGTHS), world, POLICY)

    def norm(tensors: Tensors) -> float:
        return math.sqrt(sum(float((tensor.double() ** 2).sum()) for tensor in tensors.values()))

    def updated(factor: float, max_norm: float) -> tuple[dict[str, float], Tensors]:
        before = weights_of(model)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.to_local().copy_(gradient[name])
        next(model.parameters()).grad.mul_(factor)
        metrics = update(model, optimizer, max_norm=max_norm)
        return metrics, {name: before[name] - tensor for name, tensor in weights_of(model).items()}

    metrics, moved = updated(float("nan"), max_norm=1.0)
    assert metrics["skipped_update"] == 1
    assert not any(bool(tensor.any()) for tensor in moved.values())
    metrics, moved = updated(1.0, max_norm=norm(gradient) / 10)
    assert metrics["skipped_update"] == 0
    assert metrics["grad_norm"] == pytest.approx(norm(gradient), rel=1e-5)
    assert norm(moved) == pytest.approx(norm(gradient) / 10, 1e-3)


def test_only_matrices_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(model, Optimizer(lr=0.1, weight_decay=0.5))
    optimizer.step()
    assert [round(float(p.detach().mean()), 6) for p in model.parameters()] == [0.95, 1.0, 1.0, 1.0]


def test_the_rate_is_set_from_the_step_alone() -> None:
    optim, scheduler = Optimizer(lr=2e-3), Scheduler(type="linear", warmup_steps=2, min_lr=1e-3)
    optimizer = build_optimizer(torch.nn.Linear(2, 2), optim)
    rates = [set_lr(optimizer, optim, scheduler, step=step, max_steps=6) for step in [4, 0, 6]]
    assert rates == pytest.approx([1.5e-3, 1e-3, 1e-3])
    assert {group["lr"] for group in optimizer.param_groups} == {rates[-1]}
