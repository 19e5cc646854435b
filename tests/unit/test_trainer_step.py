"""Gradients of a batch: the same however it is packed and split, and the same as those of plain transformers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from families import build_config, save_family
from tiny import (
    VOCABULARY,
    backward,
    largest_difference,
    num_loss_tokens,
    open_state,
    random_samples,
    take_gradients,
    train_step,
    weights_of,
)
from trireme.algo.columns import LossFunction
from trireme.algo.loss import cross_entropy
from trireme.algo.packing import Sample, empty_micro_batch, micro_batches_of_rank
from trireme.config.trainer import ActivationCheckpointing, Loss, Optimizer, Scheduler, TrainerModel
from trireme.messages import MicroBatch, Tokens, build_tokens
from trireme.trainer.forward import compute_columns
from trireme.trainer.mesh import World
from trireme.trainer.model import load_model
from trireme.trainer.optim import build_optimizer, set_lr
from trireme.trainer.step import forward_backward, policy_gradient, update

LENGTHS = [40, 7, 23, 2, 31, 12, 12]
LOSS = Loss(kl_tau=0.1, ratio_low=0.2, ratio_high=5.0)
ATTENTIONS = ["sdpa", "eager"]

Tensors = dict[str, torch.Tensor]


def gradients(
    folder: Path, world: World, samples: list[Sample], *, capacity: int, attn: str = "sdpa"
) -> tuple[dict[str, float], Tensors]:
    state = open_state(folder, world, attn=attn)
    metrics = backward(state, samples, world, capacity=capacity, loss=LOSS)
    return metrics, take_gradients(state.model)


@pytest.fixture(scope="module", params=["gemma2", "vaultgemma"])
def capped_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention scores are capped, low enough to matter."""
    config = build_config(request.param, vocab_size=VOCABULARY, attn_logit_softcapping=2.0, initializer_range=0.5)
    return save_family(tmp_path_factory.mktemp(request.param), config)


def padded_logprobs(folder: Path, samples: list[Sample], attn: str) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Plain transformers, right-padded with an attention mask; [T] logprobs of each sample, 0 for its first token."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attn, dtype=torch.float32)
    longest = max(sample.tokens.length for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, : sample.tokens.length] = torch.tensor(sample.tokens.ids.tolist())
        attention[row, : sample.tokens.length] = 1
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
    rows = []
    for row, sample in enumerate(samples):
        logprobs = torch.log_softmax(logits[row, : sample.tokens.length - 1] / sample.temperature, -1)
        chosen = logprobs.gather(-1, ids[row, 1 : sample.tokens.length, None]).squeeze(-1)
        rows.append(torch.cat([torch.zeros(1), chosen]))
    return model, rows


def naive_loss(samples: list[Sample], logprobs: list[torch.Tensor]) -> torch.Tensor:
    """The formula of `algo.loss`, one token after the other."""
    terms = []
    for sample, row in zip(samples, logprobs, strict=True):
        tokens = sample.tokens
        for t in range(tokens.length):
            if not tokens.loss_mask[t]:
                continue
            log_ratio = row[t].item() - float(tokens.logprobs[t])
            ratio = math.exp(log_ratio)
            if LOSS.ratio_low <= ratio <= LOSS.ratio_high:
                terms.append(-ratio * (float(tokens.advantages[t]) - LOSS.kl_tau * log_ratio) * row[t])
    return torch.stack(terms).sum() / num_loss_tokens(samples)


@pytest.mark.parametrize("attn", ATTENTIONS)
def test_a_packed_batch_has_the_gradients_of_the_padded_one(tiny_model: Path, world: World, attn: str) -> None:
    samples = random_samples(LENGTHS)
    plain, logprobs = padded_logprobs(tiny_model, samples, attn)
    naive_loss(samples, logprobs).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    metrics, found = gradients(tiny_model, world, samples, capacity=80, attn=attn)
    assert largest_difference(expected, found) < 1e-5
    assert 0 < metrics["masked_frac"] < 0.5


def test_attention_scores_that_a_model_caps_are_capped_in_training_too(
    capped_model: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    samples = random_samples(LENGTHS)
    plain, logprobs = padded_logprobs(capped_model, samples, "eager")
    naive_loss(samples, logprobs).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    with caplog.at_level("INFO"):
        model = load_model(TrainerModel(), str(capped_model), world)
    assert "attn_logit_softcapping" in caplog.text
    for sample, theirs in zip(samples, logprobs, strict=True):
        row = micro_batches_of_rank([sample], capacity=64, rank=0, world=1)[0]
        ours = compute_columns(model, row, torch.device("cpu")).logprobs
        torch.testing.assert_close(ours, theirs[torch.from_numpy(sample.tokens.loss_mask == 1)], rtol=0, atol=1e-4)
    _, found = gradients(capped_model, world, samples, capacity=80)
    assert largest_difference(expected, found) < 1e-4
    assert (padded_logprobs(capped_model, samples, "sdpa")[1][0] - logprobs[0]).abs().max() > 0.01


def test_a_packed_batch_has_the_cross_entropy_of_the_padded_one(tiny_model: Path, world: World) -> None:
    samples = [Sample(sample.tokens, 1.0) for sample in random_samples(LENGTHS)]
    _, logprobs = padded_logprobs(tiny_model, samples, "sdpa")
    masks = [torch.from_numpy(sample.tokens.loss_mask.astype(bool)) for sample in samples]
    expected = -torch.cat([row[mask] for row, mask in zip(logprobs, masks, strict=True)]).mean()
    state = open_state(tiny_model, world)
    metrics = _forward_backward(state.model, samples, world, cross_entropy)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)


def _forward_backward(
    model: PreTrainedModel,
    samples: list[Sample],
    world: World,
    loss_function: LossFunction,
    *,
    rows: list[MicroBatch] | None = None,
    loss_tokens: int | None = None,
) -> dict[str, float]:
    return forward_backward(
        model,
        micro_batches_of_rank(samples, capacity=80, rank=0, world=1) if rows is None else rows,
        loss_tokens=num_loss_tokens(samples) if loss_tokens is None else loss_tokens,
        step=0,
        loss_function=loss_function,
        world=world,
    )


@pytest.mark.parametrize("capacity", [40, 64])
def test_the_gradient_does_not_depend_on_how_the_batch_is_split(tiny_model: Path, world: World, capacity: int) -> None:
    samples = random_samples(LENGTHS)
    metrics, whole = gradients(tiny_model, world, samples, capacity=sum(LENGTHS))
    other_metrics, split = gradients(tiny_model, world, samples, capacity=capacity)
    assert largest_difference(whole, split) < 2e-6
    assert other_metrics == pytest.approx(metrics, rel=1e-5)


def test_a_sample_does_not_see_its_neighbours_in_the_row(tiny_model: Path, world: World) -> None:
    """Gradients of one sample are the same beside any other that teaches nothing."""
    taught, (*others,) = random_samples([20], seed=1), random_samples([11, 30], seed=2)
    silent = [Sample(_silenced(sample), 1.0) for sample in others]
    _, expected = gradients(tiny_model, world, taught, capacity=64)
    _, found = gradients(tiny_model, world, [*taught, *silent], capacity=64)
    assert largest_difference(expected, found) < 2e-6


def _silenced(sample: Sample) -> Tokens:
    count = sample.tokens.length
    return build_tokens(
        ids=sample.tokens.ids,
        loss_mask=[0] * count,
        logprobs=[0] * count,
        advantages=[0] * count,
        versions=[-1] * count,
    )


def test_the_first_token_of_a_sample_is_never_predicted_from_its_neighbour(tiny_model: Path, world: World) -> None:
    tokens = build_tokens(
        ids=[5, 6, 7, 8], loss_mask=[1, 1, 1, 1], logprobs=[0.0] * 4, advantages=[1.0] * 4, versions=[0] * 4
    )
    samples = [Sample(tokens, 1.0), Sample(tokens, 1.0)]
    state = open_state(tiny_model, world)
    _forward_backward(state.model, samples, world, cross_entropy)
    packed = take_gradients(state.model)
    for sample in samples:
        _forward_backward(state.model, [sample], world, cross_entropy, loss_tokens=8)
    assert largest_difference(packed, take_gradients(state.model)) < 2e-6


def test_an_empty_row_changes_nothing(tiny_model: Path, world: World) -> None:
    samples = random_samples([20])
    state = open_state(tiny_model, world)
    rows = micro_batches_of_rank(samples, capacity=64, rank=0, world=1)
    expected = _forward_backward(state.model, samples, world, policy_gradient(LOSS), rows=rows)
    gradient = take_gradients(state.model)
    padded = [empty_micro_batch(), *rows, empty_micro_batch()]
    assert _forward_backward(state.model, samples, world, policy_gradient(LOSS), rows=padded) == expected
    assert largest_difference(gradient, take_gradients(state.model)) == 0.0


@pytest.mark.parametrize("loss_function", [cross_entropy, policy_gradient(LOSS)], ids=["cross_entropy", "policy"])
def test_a_batch_without_a_token_that_counts_leaves_the_weights_finite(
    tiny_model: Path, world: World, loss_function: LossFunction
) -> None:
    state = open_state(tiny_model, world)
    metrics = _forward_backward(state.model, [], world, loss_function, rows=[empty_micro_batch()], loss_tokens=0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(bool(gradient.isfinite().all()) for gradient in take_gradients(state.model).values())


def test_activation_checkpointing_changes_no_gradient(tiny_model: Path, world: World) -> None:
    samples = random_samples(LENGTHS)
    _, expected = gradients(tiny_model, world, samples, capacity=80)
    model = load_model(TrainerModel(ac=ActivationCheckpointing(freq=2)), str(tiny_model), world)
    _forward_backward(model, samples, world, policy_gradient(LOSS))
    assert largest_difference(expected, take_gradients(model)) < 1e-6


def test_metrics_by_an_independent_forward(tiny_model: Path, world: World) -> None:
    samples = random_samples(LENGTHS)
    metrics, _ = gradients(tiny_model, world, samples, capacity=80)
    _, logprobs = padded_logprobs(tiny_model, samples, "sdpa")
    differences, fresh = [], []
    for sample, row in zip(samples, logprobs, strict=True):
        mask = torch.from_numpy(sample.tokens.loss_mask.astype(bool))
        difference = (row.detach() - torch.from_numpy(sample.tokens.logprobs))[mask].double()
        differences.append(difference)
        fresh.append(torch.from_numpy(sample.tokens.versions)[mask] == 0)
    d = torch.cat(differences)
    estimate = d.exp() - 1 - d
    assert metrics["importance_ratio"] == pytest.approx(float(d.exp().mean()), rel=1e-4)
    assert metrics["policy/kl"] == pytest.approx(float(estimate.mean()), rel=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx(float(estimate[torch.cat(fresh)].mean()), rel=1e-4)


def test_a_step_clips_the_norm_of_the_whole_gradient(tiny_model: Path, world: World) -> None:
    samples = random_samples(LENGTHS)
    _, gradient = gradients(tiny_model, world, samples, capacity=64)
    expected = math.sqrt(sum(float((tensor.double() ** 2).sum()) for tensor in gradient.values()))
    model = load_model(TrainerModel(), str(tiny_model), world)
    optimizer = build_optimizer(model, Optimizer(type="sgd", lr=1.0, betas=(0.0, 0.0)))
    before = weights_of(model)
    _forward_backward(model, samples, world, policy_gradient(LOSS))
    assert update(model, optimizer, max_norm=expected / 10)["grad_norm"] == pytest.approx(expected, rel=1e-5)
    after = weights_of(model)
    moved = {name: before[name] - after[name] for name in before}
    assert math.sqrt(sum(float((m.double() ** 2).sum()) for m in moved.values())) == pytest.approx(expected / 10, 1e-3)


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tiny_model: Path, world: World) -> None:
    model = load_model(TrainerModel(), str(tiny_model), world)
    optimizer = build_optimizer(model, Optimizer(lr=1e-3))
    before = weights_of(model)
    _forward_backward(model, random_samples(LENGTHS), world, policy_gradient(LOSS))
    next(model.parameters()).grad.mul_(float("nan"))
    assert update(model, optimizer, max_norm=1.0)["skipped_update"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(model).items())
    _forward_backward(model, random_samples(LENGTHS), world, policy_gradient(LOSS))
    assert update(model, optimizer, max_norm=1.0)["skipped_update"] == 0


def test_training_raises_the_probability_of_what_was_rewarded(tiny_model: Path, world: World) -> None:
    (sample,) = random_samples([12])
    count = sample.tokens.length
    rewarded = Sample(
        build_tokens(
            ids=sample.tokens.ids,
            loss_mask=sample.tokens.loss_mask,
            logprobs=sample.tokens.loss_mask * -4.85,
            advantages=[1.0] * count,
            versions=[0] * count,
        ),
        1.0,
    )
    state = open_state(tiny_model, world)
    ratios = [train_step(state, [rewarded], world)["importance_ratio"] for _ in range(5)]
    assert ratios == sorted(ratios)
    assert ratios[-1] > 1.2 * ratios[0]


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
