"""Losses where they are used: several iterations, a reference model, bits, packing, and what the sampler was cut to.

Gradients are the same however a batch is packed and split, and the same as those of plain transformers.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.models import tiny
from support.models.families import build_config, save_family
from trireme.algo.columns import Totals
from trireme.algo.loss.loss import cross_entropy, policy_loss
from trireme.algo.packing import Sample, micro_batches_of_rank, unsampled_row
from trireme.base.errors import ConfigError
from trireme.config.losses import resolve_loss
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Checkpoints, Loss, Optimizer, Scheduler, TrainerConfig, TrainerModel
from trireme.messages import COLUMNS, Kept, build_tokens
from trireme.trainer.checkpoint.state import TrainerState, tensors_of
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.model.model import load_model
from trireme.trainer.optim.optimizer import build_optimizer, set_lr
from trireme.trainer.parallel.mesh import World
from trireme.trainer.step import base_state, forward_backward, merge_iterations, policy_gradient, update

CAPACITY = 48
LENGTHS = [30, 20, 12, 7]
MIXED = [40, 7, 23, 2, 31, 12, 12]
CUT = Loss(type="importance", kl_tau=0.1, ratio_low=0.2, ratio_high=5.0)
POLICY = policy_gradient(CUT)
Tensors = dict[str, torch.Tensor]

Tokens = tuple[torch.Tensor, torch.Tensor]


def plain_pass(folder: Path, samples: list[Sample], attn: str = "sdpa") -> tuple[torch.nn.Module, list[Tokens]]:
    """Return transformers' own model, and per sample the logprobs and entropies of the tokens that count."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attn, dtype=torch.float32)
    found = []
    for sample in samples:
        ids, counts = torch.tensor(sample.tokens.ids.astype("int64")), counting(sample)[1:]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / sample.temperature
        logprobs = torch.log_softmax(logits, -1)[counts]
        chosen = logprobs.gather(-1, ids[1:][counts, None])[:, 0]
        found.append((chosen, -(logprobs.exp() * logprobs).sum(-1)))
    return model, found


def counting(sample: Sample) -> torch.Tensor:
    return torch.from_numpy(sample.tokens.loss_mask.astype(bool))


def at_loss(samples: list[Sample], column: str) -> torch.Tensor:
    return torch.cat([torch.from_numpy(getattr(sample.tokens, column))[counting(sample)] for sample in samples])


def passed(model, samples, world, loss_function, *, capacity=80, rows=None, loss_tokens=None, **options: Any):
    """Return the metrics and the gradients of a batch."""
    metrics = forward_backward(
        model, micro_batches_of_rank(samples, capacity=capacity, rank=0, world=1) if rows is None else rows,
        loss_tokens=tiny.num_loss_tokens(samples) if loss_tokens is None else loss_tokens, step=0,
        loss_function=loss_function, world=world, **options,
    )  # fmt: skip
    return metrics, tiny.take_gradients(model)


def config_of(model: Path, *, num_iterations: int = 1, lr: float = 1e-3, **loss: object) -> RunConfig:
    trainer = TrainerConfig(optim=Optimizer(lr=lr), loss=Loss(**loss), num_iterations=num_iterations)
    return RunConfig(model=Model(name=str(model)), seq_len=64, trainer=trainer)


def samples_at(step: int) -> list[Sample]:
    return tiny.random_samples(LENGTHS, seed=step)


def go_on(config: RunConfig, state: TrainerState, world: World, *, until: int) -> list[dict[str, float]]:
    return tiny.train(config, state, world, until=until, lengths=LENGTHS, capacity=CAPACITY)


def test_proximal_logprobs_are_of_the_weights_before_the_batch(tiny_model, world):
    config = config_of(tiny_model, type="decoupled", num_iterations=2, lr=3e-3)
    state, by_hand = base_state(config, world), base_state(config, world)
    go_on(config, state, world, until=1)
    rows = micro_batches_of_rank(samples_at(0), capacity=CAPACITY, rank=0, world=1)
    with torch.no_grad():
        known = [compute_columns(by_hand.model, row, world.device).logprobs for row in rows]
    recipe = resolve_loss(config.trainer.loss, length=1)
    totals = Totals(tiny.num_loss_tokens(samples_at(0)), len(LENGTHS))
    clipped = 0.0
    for _ in range(2):
        for row, proximal in zip(rows, known, strict=True):
            columns = replace(compute_columns(by_hand.model, row, world.device), proximal=proximal)
            terms = policy_loss(columns, totals, recipe)
            terms.loss.backward()
            clipped += float(terms.sums["clip_frac/low"] + terms.sums["clip_frac/high"])
        update(by_hand.model, by_hand.optimizer, 1.0)
    assert clipped > 0
    assert tiny.are_equal(tiny.weights_of(state.model), tiny.weights_of(by_hand.model))


def test_merged_metrics_average_the_loss_over_iterations():
    first = {"loss": 1.0, "mismatch_kl": 0.1, "skipped_update": 1.0}
    second = {"loss": 2.0, "mismatch_kl": 0.9, "skipped_update": 1.0}
    assert merge_iterations([first, second]) == {"loss": 1.5, "mismatch_kl": 0.1, "skipped_update": 2.0}
    assert merge_iterations([first]) == first


def test_the_base_model_is_the_reference_and_stays_so(tiny_model, world):
    config = config_of(tiny_model, beta=0.05)
    state = base_state(config, world)
    base = tiny.weights_of(state.model)
    metrics = go_on(config, state, world, until=3)
    assert metrics[0]["reference_kl"] == 0.0  # to the bit
    assert metrics[2]["reference_kl"] > metrics[1]["reference_kl"] > 0
    assert state.reference is not None
    assert tiny.are_equal(tiny.weights_of(state.reference.model), base)
    assert all(parameter.grad is None for parameter in state.reference.model.parameters())
    assert not any(name.startswith("reference") for name in tensors_of(state))  # checkpoints hold none that stays
    assert base_state(config_of(tiny_model), world).reference is None


def test_reference_model_follows_the_policy_every_two_versions(tmp_path, tiny_model, world):
    """Saved before the first update, and after it."""
    terms = {"beta": 0.3, "kl_estimator": "k1", "reference_update_every": 2, "entropy_bonus": 0.01}
    config = config_of(tiny_model, type="tis", **terms, num_iterations=2)
    straight = base_state(config, world)
    for version in (1, 3):
        go_on(config, straight, world, until=version)
        tiny.save(tmp_path, straight, world)
    without = base_state(config_of(tiny_model), world)
    with pytest.raises(ConfigError, match=r"holds reference\..* no place"):
        tiny.open_store(tmp_path, world).resume(without, resume=True)
    assert straight.reference is not None
    assert not tiny.are_equal(tiny.weights_of(straight.reference.model), tiny.weights_of(straight.model))
    (metrics,) = go_on(config, straight, world, until=4)  # a batch makes one version, whatever the iterations
    at_4 = tiny.weights_of(straight.reference.model)
    assert tiny.are_equal(at_4, tiny.weights_of(straight.model))
    for version in (3, 1):
        resumed = base_state(config, world)
        tiny.open_store(tmp_path, world, Checkpoints(resume_step=version)).resume(resumed, resume=True)
        assert (resumed.version, resumed.reference is None) == (version, False)
        assert go_on(config, resumed, world, until=4)[-1] == metrics
        assert tiny.are_equal(tiny.content_of(resumed), tiny.content_of(straight))
        assert resumed.reference is not None
        assert tiny.are_equal(tiny.weights_of(resumed.reference.model), at_4)


def kept_sample(seed: int) -> tuple[Sample, list[list[int]]]:
    """A sample and, for each of its tokens, what the sampler could choose from; nothing where it was not cut."""
    (sample,) = tiny.random_samples([18], seed=seed)
    choices: list[list[int]] = []
    for place, token in enumerate(sample.tokens.ids.tolist()):
        others = [(token + 7 * number) % tiny.VOCABULARY for number in range((1, 5, 10)[place % 3])]
        choices.append(sorted(others) if sample.tokens.loss_mask[place] and place % 4 else [])
    counts, ids = list(map(len, choices)), [token for each in choices for token in each]
    kept = Kept(np.array(counts, np.int32), np.array(ids, np.int32))
    columns = {name: getattr(sample.tokens, name) for name in COLUMNS}
    return Sample(build_tokens(kept=kept, **columns), 0.7), choices


def test_logprobs_are_those_among_what_the_sampler_could_choose_from(tiny_model, world):
    (one, choices), (two, more) = kept_sample(0), kept_sample(1)
    (uncut,) = tiny.random_samples([10], seed=5)
    columns = compute_columns(tiny.open_state(tiny_model, world).model, tiny.one_row([one, uncut, two]), world.device)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected: list[tuple[float, float]] = []
    for sample, allowed in ((one, choices), (two, more), (uncut, [[]] * 10)):
        ids = torch.tensor(sample.tokens.ids.astype("int64"))
        with torch.no_grad():
            logits = plain(ids[None]).logits[0].double() / sample.temperature
        for place in np.flatnonzero(sample.tokens.loss_mask):
            among = allowed[place] or list(range(tiny.VOCABULARY))
            logprobs = torch.log_softmax(logits[place - 1, among], -1)
            entropy = -(logprobs.exp() * logprobs).sum()
            expected.append((float(logprobs[among.index(int(ids[place]))]), float(entropy)))
    for found, values in zip((columns.logprobs, columns.entropies), zip(*expected, strict=True), strict=True):
        assert sorted(found.tolist()) == pytest.approx(sorted(values), abs=1e-5)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_packed_batch_has_the_gradients_of_samples_alone(tiny_model, world, attn):
    samples = tiny.random_samples(MIXED)
    plain, found = plain_pass(tiny_model, samples, attn)
    logprobs = torch.cat([each for each, _ in found])
    log_ratio = logprobs.detach() - at_loss(samples, "logprobs")
    ratio = log_ratio.exp()
    is_kept = (ratio >= CUT.ratio_low) & (ratio <= CUT.ratio_high)
    terms = -ratio * (at_loss(samples, "advantages") - CUT.kl_tau * log_ratio) * logprobs
    (terms[is_kept].sum() / len(terms)).backward()
    metrics, gradient = passed(tiny.open_state(tiny_model, world, attn=attn).model, samples, world, POLICY)
    assert tiny.largest_difference(tiny.take_gradients(plain), gradient) < 1e-5
    estimate = (ratio - 1 - log_ratio).double()
    assert {name: metrics[name] for name in ("masked_frac", "importance_ratio", "policy/kl", "mismatch_kl")} == {
        "masked_frac": pytest.approx(1 - float(is_kept.double().mean())),
        "importance_ratio": pytest.approx(float(ratio.double().mean()), rel=1e-4),
        "policy/kl": pytest.approx(float(estimate.mean()), rel=1e-4),
        "mismatch_kl": pytest.approx(float(estimate[at_loss(samples, "versions") == 0].mean()), rel=1e-4),
    }
    assert 0 < metrics["masked_frac"] < 0.5


def test_attention_scores_that_a_model_caps_are_capped_in_training_too(tmp_path, world):
    changes = {"vocab_size": tiny.VOCABULARY, "attn_logit_softcapping": 2.0, "initializer_range": 0.5}
    folder, samples = save_family(tmp_path, build_config("gemma2", **changes)), tiny.random_samples(MIXED)
    plain, found = plain_pass(folder, samples, "eager")
    (expected := -torch.cat([logprobs for logprobs, _ in found]).mean()).backward()
    metrics, gradient = passed(load_model(TrainerModel(), str(folder), world), samples, world, cross_entropy)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert tiny.largest_difference(tiny.take_gradients(plain), gradient) < 1e-4
    _, uncapped = plain_pass(folder, samples, "sdpa")
    assert (uncapped[0][0] - found[0][0]).abs().max() > 0.01


def test_a_loss_of_entropies_has_the_gradients_of_samples_alone(tiny_model, world):
    samples = samples_at(0)
    plain, found = plain_pass(tiny_model, samples)
    gain = at_loss(samples, "advantages") * torch.cat([logprobs for logprobs, _ in found])
    (expected := -gain.mean() - 0.7 * torch.cat([entropies for _, entropies in found]).mean()).backward()
    loss = policy_gradient(Loss(type="reinforce", entropy_bonus=0.7))
    options = {"loss_samples": len(samples), "entropy_gradient": True, "capacity": 48}
    metrics, gradient = passed(tiny.open_state(tiny_model, world).model, samples, world, loss, **options)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert tiny.largest_difference(tiny.take_gradients(plain), gradient) < 1e-5


def test_the_first_token_of_a_sample_is_never_predicted_from_its_neighbour(tiny_model, world):
    tokens = build_tokens(ids=[5, 6, 7, 8], loss_mask=[1] * 4, logprobs=[0] * 4, advantages=[1] * 4, versions=[0] * 4)
    model = tiny.open_state(tiny_model, world).model
    _, packed = passed(model, [Sample(tokens, 1.0)] * 2, world, cross_entropy)
    _, alone = passed(model, [Sample(tokens, 1.0)], world, cross_entropy, loss_tokens=8)
    assert tiny.largest_difference(packed, {name: 2 * gradient for name, gradient in alone.items()}) < 2e-6


@pytest.mark.parametrize("loss_function", [cross_entropy, POLICY], ids=["cross_entropy", "policy"])
def test_an_empty_row_changes_nothing(tiny_model, world, loss_function):
    samples, model = tiny.random_samples([20]), tiny.open_state(tiny_model, world).model
    rows, empty = micro_batches_of_rank(samples, capacity=64, rank=0, world=1), unsampled_row([0], [1])
    expected, gradient = passed(model, samples, world, loss_function, rows=rows)
    found, other_gradient = passed(model, samples, world, loss_function, rows=[empty, *rows, empty])
    assert found == expected
    assert tiny.are_equal(gradient, other_gradient)
    metrics, zeros = passed(model, [], world, loss_function, rows=[empty], loss_tokens=0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert zeros.keys() == gradient.keys()  # another rank, which has tokens, waits for each
    assert not any(bool(tensor.any()) for tensor in zeros.values())


def test_a_step_clips_the_norm_of_the_whole_gradient(tiny_model, world):
    model = load_model(TrainerModel(), str(tiny_model), world)
    _, gradient = passed(model, tiny.random_samples(MIXED), world, POLICY)
    before, norm = tiny.weights_of(model), norm_of(gradient)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.to_local().copy_(gradient[name])
    optimizer = build_optimizer(model, Optimizer(type="sgd", lr=1.0, weight_decay=0, betas=(0.0, 0.0)))
    metrics = update(model, optimizer, max_norm=norm / 10)
    assert metrics == {"skipped_update": 0, "grad_norm": pytest.approx(norm, rel=1e-5)}
    moved = {name: before[name] - tensor for name, tensor in tiny.weights_of(model).items()}
    assert norm_of(moved) == pytest.approx(norm / 10, 1e-3)


def norm_of(tensors: Tensors) -> float:
    return math.sqrt(sum(float((tensor.double() ** 2).sum()) for tensor in tensors.values()))


def test_the_rate_is_set_from_the_step_alone():
    optim, scheduler = Optimizer(lr=2e-3), Scheduler(type="linear", warmup_steps=2, min_lr=1e-3)
    optimizer = build_optimizer(torch.nn.Linear(2, 2), optim)
    rates = [set_lr(optimizer, optim, scheduler, step=step, max_steps=6) for step in [4, 0, 6]]
    assert rates == pytest.approx([1.5e-3, 1e-3, 1e-3])
    assert {group["lr"] for group in optimizer.param_groups} == {rates[-1]}


def test_logprobs_of_the_likeliest_tokens_stand_at_their_places(tiny_model, world):
    (one, tops), (two, more) = (tiny.with_likeliest(*tiny.random_samples([15], seed=seed)) for seed in (0, 1))
    (unknown,) = tiny.random_samples([10], seed=5)
    row = tiny.one_row([one, unknown, two])
    columns = compute_columns(tiny.open_state(tiny_model, world).model, row, world.device)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected: list[tuple[float, float, float]] = []  # each token's own logprob, and both policies' of a likely one
    for sample, listed in ((one, tops), (two, more), (unknown, [{}] * 10)):
        ids = torch.tensor(sample.tokens.ids.astype("int64"))
        with torch.no_grad():
            logprobs = torch.log_softmax(plain(ids[None]).logits[0].double() / sample.temperature, -1)
        for place in np.flatnonzero(sample.tokens.loss_mask):
            own = logprobs[place - 1]
            expected += [(float(own[ids[place]]), float(own[token]), mu) for token, mu in listed[place].items()]
    assert columns.top_behaviour.shape == columns.top_logprobs.shape == (3, len(columns.logprobs))
    known = -torch.inf < columns.top_behaviour.T
    found = [columns.logprobs[:, None].expand(-1, 3), columns.top_logprobs.T, columns.top_behaviour.T]
    values = torch.stack([each[known] for each in found], dim=1).tolist()
    assert np.array(sorted(values)) == pytest.approx(np.array(sorted(expected)), abs=1e-5)
    with torch.no_grad():
        assert compute_columns(tiny.open_state(tiny_model, world).model, row, world.device).top_logprobs is None
