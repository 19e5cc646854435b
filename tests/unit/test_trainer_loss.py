"""Losses where they are used: several iterations, a reference model, bits, packing, and what the sampler was cut to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny import (
    are_equal,
    backward,
    batch_reply,
    content_of,
    largest_difference,
    num_loss_tokens,
    open_state,
    open_store,
    random_samples,
    save,
    take_gradients,
    weights_of,
)
from trireme.algo.columns import LossFunction, Totals
from trireme.algo.loss import build_loss
from trireme.algo.packing import Sample, micro_batches_of_rank
from trireme.config.losses import LOSSES
from trireme.config.resolve import updated
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Loss, Optimizer, TrainerConfig
from trireme.ledger.journal import Journal
from trireme.ledger.records import BatchRecord, Rollout, State
from trireme.ledger.shares import Shares
from trireme.messages import COLUMNS, Kept, build_tokens
from trireme.trainer.anchors import Anchors
from trireme.trainer.checkpoint import TrainerState
from trireme.trainer.forward import compute_columns
from trireme.trainer.mesh import World
from trireme.trainer.replay import retrace
from trireme.trainer.scorer import choices_at
from trireme.trainer.step import forward_backward, policy_gradient, update
from trireme.trainer.stepper import Stepper, base_state, merged

CAPACITY = 48
LENGTHS = [30, 20, 12, 7]


def config_of(model: Path, *, num_iterations: int = 1, lr: float = 1e-3, **loss: object) -> RunConfig:
    trainer = TrainerConfig(optim=Optimizer(lr=lr), loss=Loss(**loss), num_iterations=num_iterations)
    return RunConfig(model=Model(name=str(model)), seq_len=64, trainer=trainer)


def samples_at(step: int) -> list[Sample]:
    return random_samples(LENGTHS, seed=step)


def go_on(config: RunConfig, state: TrainerState, world: World, *, until: int) -> list[dict[str, float]]:
    stepper = Stepper(config, state, world)
    return [
        stepper.step(batch_reply(samples_at(step), world, capacity=CAPACITY, step=step))
        for step in range(state.version, until)
    ]


def trained(config: RunConfig, world: World, *, until: int = 1) -> tuple[TrainerState, list[dict[str, float]]]:
    state = base_state(config, world)
    return state, go_on(config, state, world, until=until)


def passed(state: TrainerState, world: World, loss: LossFunction, **options: Any) -> dict[str, float]:
    """Return the metrics of one forward and backward pass over batch 0."""
    return forward_backward(
        state.model,
        micro_batches_of_rank(samples_at(0), capacity=CAPACITY, rank=0, world=1),
        loss_tokens=num_loss_tokens(samples_at(0)),
        loss_samples=len(LENGTHS),
        step=0,
        loss_function=loss,
        world=world,
        **options,
    )


@pytest.mark.parametrize("name", ["importance", "ppo", "gspo", "decoupled", "icepop"])
def test_one_iteration_is_a_plain_step_to_the_bit(tiny_model: Path, world: World, name: str) -> None:
    state, metrics = trained(config_of(tiny_model, type=name, num_iterations=1), world)
    plain = open_state(tiny_model, world)
    plain.optimizer = torch.optim.AdamW(plain.model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    anchors = Anchors(recomputed=LOSSES[name].proximal == "recomputed")
    expected = passed(plain, world, policy_gradient(Loss(type=name)), anchors=anchors)
    expected |= update(plain.model, plain.optimizer, 1.0)
    assert are_equal(weights_of(state.model), weights_of(plain.model))
    assert metrics == [expected | {"lr": 1e-3, "skipped_in_a_row": 0.0}]


def test_later_iterations_are_against_the_weights_that_the_batch_began_with(tiny_model: Path, world: World) -> None:
    """Two iterations of the decoupled objective, beside the same with a forward pass of the first weights."""
    config = config_of(tiny_model, type="decoupled", num_iterations=2, lr=3e-3)
    state, _ = trained(config, world)

    by_hand = base_state(config, world)
    rows = micro_batches_of_rank(samples_at(0), capacity=CAPACITY, rank=0, world=1)
    with torch.no_grad():
        known = [compute_columns(by_hand.model, row, world.device).logprobs for row in rows]
    loss = build_loss(LOSSES["decoupled"])
    totals = Totals(num_loss_tokens(samples_at(0)), len(LENGTHS))
    clipped = 0.0
    for _ in range(2):
        for row, proximal in zip(rows, known, strict=True):
            columns = replace(compute_columns(by_hand.model, row, world.device), proximal=proximal)
            terms = loss(columns, totals)
            terms.loss.backward()
            clipped += float(terms.sums["clip_frac/low"] + terms.sums["clip_frac/high"])
        update(by_hand.model, by_hand.optimizer, 1.0)
    assert clipped > 0
    assert are_equal(weights_of(state.model), weights_of(by_hand.model))


def test_the_same_batches_give_the_same_bits_with_every_term_of_the_loss(tiny_model: Path, world: World) -> None:
    """Each batch makes one version, however often it is trained on."""
    config = config_of(tiny_model, type="tis", num_iterations=2, beta=0.1, reference_update_every=1, entropy_bonus=0.01)
    (one, metrics), (other, others) = (trained(config, world, until=3) for _ in range(2))
    assert are_equal(content_of(one), content_of(other))
    assert metrics == others
    assert (one.version, len(metrics)) == (3, 3)
    assert {int(entry["step"]) for entry in one.optimizer.state.values()} == {6}


def test_metrics_of_several_iterations_are_their_means_but_for_what_is_of_the_first() -> None:
    first = {"loss": 1.0, "mismatch_kl": 0.1, "skipped_update": 1.0}
    second = {"loss": 2.0, "mismatch_kl": 0.9, "skipped_update": 1.0}
    assert merged([first, second]) == {"loss": 1.5, "mismatch_kl": 0.1, "skipped_update": 2.0}
    assert merged([first]) == first


def test_the_base_model_is_the_reference_and_stays_so(tiny_model: Path, world: World) -> None:
    config = config_of(tiny_model, beta=0.05)
    state = base_state(config, world)
    base = weights_of(state.model)
    metrics = go_on(config, state, world, until=3)
    assert metrics[0]["reference_kl"] == 0.0  # to the bit
    assert metrics[2]["reference_kl"] > metrics[1]["reference_kl"] > 0
    assert state.reference is not None
    assert are_equal(weights_of(state.reference.model), base)
    assert all(parameter.grad is None for parameter in state.reference.model.parameters())
    without, (metrics_without,) = trained(config_of(tiny_model), world)
    assert without.reference is None
    assert "reference_kl" not in metrics_without


def test_only_a_reference_that_moved_is_in_checkpoints_which_serve_a_run_without_one(
    tmp_path: Path, tiny_model: Path, world: World
) -> None:
    sizes = {}
    for name, loss in (("fixed", {"beta": 0.1}), ("moving", {"beta": 0.1, "reference_update_every": 1})):
        state, _ = trained(config_of(tiny_model, **loss), world)
        save(tmp_path / name, state, world)
        sizes[name] = (tmp_path / name / "step_1" / "rank_0.safetensors").stat().st_size
        other = base_state(config_of(tiny_model), world)
        open_store(tmp_path / name, world).resume(other, resume=True)
        assert are_equal(content_of(other), content_of(state))
    assert sizes["moving"] == pytest.approx(4 / 3 * sizes["fixed"], rel=0.02)  # weights, two moments, and the reference


@pytest.mark.parametrize(
    ("weak", "strong", "metric", "expected"),
    [
        ({"beta": 1e-6}, {"beta": 5.0}, "reference_kl", lambda weak, strong: strong < 0.5 * weak),
        ({}, {"entropy_bonus": 1.0}, "policy/entropy", lambda weak, strong: strong > weak),
    ],
    ids=["a strong pull holds the policy near its reference", "the entropy bonus raises the entropy"],
)
def test_terms_of_the_loss_have_their_effect(
    tiny_model: Path, world: World, weak: dict, strong: dict, metric: str, expected: Callable[[float, float], bool]
) -> None:
    found = []
    for loss in (weak, strong):
        config = config_of(tiny_model, type="reinforce", kl_estimator="k2", **loss)
        stepper = Stepper(config, base_state(config, world), world)
        replies = [batch_reply(samples_at(0), world, capacity=CAPACITY, step=step) for step in range(6)]
        found.append([stepper.step(reply)[metric] for reply in replies][-1])
    assert expected(*found)


def test_the_policy_becomes_the_reference_every_so_many_versions(tiny_model: Path, world: World) -> None:
    config = config_of(tiny_model, beta=0.05, reference_update_every=2)
    state = base_state(config, world)
    assert state.reference is not None
    seen = {}
    for version in range(1, 5):
        go_on(config, state, world, until=version)
        seen[version] = (weights_of(state.model), weights_of(state.reference.model))
    assert are_equal(seen[2][1], seen[2][0])
    assert are_equal(seen[3][1], seen[2][0])
    assert are_equal(seen[4][1], seen[4][0])


@pytest.mark.parametrize("saved_at", [1, 2, 3])
def test_a_run_with_a_moving_reference_goes_on_from_a_checkpoint_to_the_same_bits(
    tmp_path: Path, tiny_model: Path, world: World, saved_at: int
) -> None:
    """Saved before the first update, right after it, and in between."""
    config = config_of(tiny_model, beta=0.3, kl_estimator="k1", reference_update_every=2, num_iterations=2)
    straight, metrics = trained(config, world, until=4)

    first, _ = trained(config, world, until=saved_at)
    save(tmp_path, first, world)
    resumed = base_state(config, world)
    open_store(tmp_path, world).resume(resumed, resume=True)
    assert resumed.version == saved_at
    assert go_on(config, resumed, world, until=4) == metrics[saved_at:]
    assert are_equal(content_of(resumed), content_of(straight))
    assert resumed.reference is not None
    assert straight.reference is not None
    assert are_equal(weights_of(resumed.reference.model), weights_of(straight.reference.model))


def test_the_reference_of_a_model_from_scratch_is_that_very_model(tiny_model: Path, world: World) -> None:
    config = updated(config_of(tiny_model, beta=0.05), {"trainer.model.from_scratch": True})
    state = base_state(config, world)
    assert state.reference is not None
    assert are_equal(weights_of(state.model), weights_of(state.reference.model))


@pytest.mark.parametrize("normalize", ["token", "sequence", "constant"])
@pytest.mark.parametrize("options", [{"type": "importance"}, {"type": "gspo", "clip_low": 0.5, "clip_high": 2.0}])
def test_gradients_do_not_depend_on_the_packing_however_they_are_normalized(
    tiny_model: Path, world: World, options: dict[str, Any], normalize: Any
) -> None:
    state, found = open_state(tiny_model, world), []
    for capacity in (sum(LENGTHS), 32):
        loss = Loss(normalize=normalize, **options)
        metrics = backward(state, samples_at(0), world, capacity=capacity, loss=loss)
        found.append((metrics, take_gradients(state.model)))
    assert largest_difference(found[0][1], found[1][1]) < 1e-5
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4, abs=1e-7)


def test_the_samples_of_a_row_are_told_apart(tiny_model: Path, world: World) -> None:
    (row,) = micro_batches_of_rank(samples_at(0), capacity=sum(LENGTHS), rank=0, world=1)
    columns = compute_columns(open_state(tiny_model, world).model, row, world.device)
    counts = [int(sample.tokens.loss_mask.sum()) for sample in samples_at(0)]
    assert (columns.num_samples, torch.bincount(columns.samples).tolist()) == (len(LENGTHS), counts)
    assert columns.lengths().tolist() == [count for count in counts for _ in range(count)]


def test_averages_over_samples_leave_out_those_without_a_token_that_counts(tiny_model: Path, world: World) -> None:
    silent = build_tokens(ids=[5, 6, 7], loss_mask=[0] * 3, logprobs=[0.0] * 3, advantages=[0.0] * 3, versions=[-1] * 3)
    state, loss, found = open_state(tiny_model, world), Loss(type="grpo"), []
    for samples in (samples_at(0), [*samples_at(0), Sample(silent, 1.0)]):
        backward(state, samples, world, capacity=CAPACITY, loss=loss)
        found.append(take_gradients(state.model))
    assert largest_difference(*found) < 1e-5


def kept_sample(seed: int = 0) -> tuple[Sample, list[list[int]]]:
    """A sample whose tokens were drawn from a few, from one, and from all tokens, in turn."""
    rng = np.random.default_rng(seed)
    (sample,) = random_samples([18], seed=seed)
    choices: list[list[int]] = []
    for place, counts in enumerate(sample.tokens.loss_mask):
        token = int(sample.tokens.ids[place])
        others = rng.choice(128, size=(0, 4, 9)[place % 3], replace=False).tolist() if counts and place % 4 else []
        choices.append(sorted({token, *others}) if counts and place % 4 else [])
    ids = np.array([token for each in choices for token in each], np.int32)
    kept = Kept(np.array([len(each) for each in choices], np.int32), ids)
    columns = {name: getattr(sample.tokens, name) for name in COLUMNS}
    return Sample(build_tokens(kept=kept, **columns), 0.7), choices


def test_logprobs_are_those_among_what_the_sampler_could_choose_from(tiny_model: Path, world: World) -> None:
    (one, choices), (two, more) = kept_sample(0), kept_sample(1)
    uncut = random_samples([10], seed=5)[0]
    (row,) = micro_batches_of_rank([one, uncut, two], capacity=64, rank=0, world=1)
    columns = compute_columns(open_state(tiny_model, world).model, row, world.device)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected: list[tuple[float, float]] = []
    for sample, allowed in ((one, choices), (two, more), (uncut, [[]] * 10)):
        ids = torch.tensor(sample.tokens.ids.astype("int64"))
        with torch.no_grad():
            logits = plain(ids[None]).logits[0].double() / sample.temperature
        for place in np.flatnonzero(sample.tokens.loss_mask):
            among = allowed[place] or list(range(128))
            logprobs = torch.log_softmax(logits[place - 1, among], -1)
            entropy = -(logprobs.exp() * logprobs).sum()
            expected.append((float(logprobs[among.index(int(ids[place]))]), float(entropy)))
    for found, values in zip((columns.logprobs, columns.entropies), zip(*expected, strict=True), strict=True):
        assert sorted(found.tolist()) == pytest.approx(sorted(values), abs=1e-5)


def test_choices_by_hand() -> None:
    kept = Kept(np.array([0, 2, 0, 3, 1], np.int32), np.array([4, 9, 1, 2, 3, 7], np.int32))
    found = choices_at(kept, np.array([1, 2, 4]), torch.device("cpu"))
    assert found is not None
    assert (found.positions.tolist(), found.counts.tolist(), found.ids.tolist()) == ([0, 2], [2, 1], [4, 9, 7])
    assert choices_at(kept, np.array([0, 2]), torch.device("cpu")) is None
    assert choices_at(None, np.array([0, 2]), torch.device("cpu")) is None


def test_a_custom_loss_that_says_the_same_trains_the_same(tmp_path: Path, tiny_model: Path, world: World) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def loss(columns, clip):\n"
        "    r = (columns.logprobs - columns.proximal).exp()\n"
        "    a = columns.advantages\n"
        "    return -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a)\n"
    )
    others = {"beta": 0.1, "entropy_bonus": 0.01, "num_iterations": 2}
    custom = config_of(tiny_model, type="custom", path=f"{file}:loss", args={"clip": 0.2}, **others)
    built_in = config_of(tiny_model, type="ppo", **others)
    (one, metrics), (other, expected) = (trained(config, world, until=2) for config in (custom, built_in))
    assert largest_difference(weights_of(other.model), weights_of(one.model)) < 1e-3  # AdamW blows rounding up
    assert [m["loss"] for m in metrics] == pytest.approx([m["loss"] for m in expected], rel=1e-4)


def test_a_replay_finds_the_same_bits_with_a_moving_reference_and_several_iterations(
    tmp_path: Path, tiny_model: Path, world: World
) -> None:
    """From the journal: from the base model on, and from a checkpoint that holds a reference of two versions before."""
    loss = Loss(type="decoupled", beta=0.2, reference_update_every=2)
    trainer = TrainerConfig(optim=Optimizer(lr=1e-3), loss=loss, num_iterations=2, micro_batch_tokens=CAPACITY)
    model = Model(name=str(tiny_model))
    config = RunConfig(output_dir=tmp_path, device="cpu", seq_len=CAPACITY, model=model, trainer=trainer)
    journal = Journal(config.paths.journal)
    for step in range(4):
        given = {"group": step, "attempt": 0, "env": "e", "example": 0, "reward": 0.0, "temperature": 1.0}
        rollouts = [
            Rollout(place=place, samples=[sample.tokens], **given) for place, sample in enumerate(samples_at(step))
        ]
        journal.append(BatchRecord(step=step, rollouts=rollouts, dropped=[], state=State(next_batch=step + 1)))
    original = list(retrace(config, world, range(4)))

    state = base_state(config, world)
    stepper = Stepper(config, state, world)
    for step in range(3):
        stepper.step(Shares(journal, config).of(step, rank=0, world=1))
    save(config.paths.checkpoints, state, world)
    again = list(retrace(config, world, range(3, 4)))
    assert [(each.version, each.digests) for each in again] == [(each.version, each.digests) for each in original[3:]]
    assert again[1].metrics == original[4].metrics


def naive_rows(model: torch.nn.Module, samples: list[Sample]) -> list[tuple[torch.Tensor, torch.Tensor, Sample]]:
    """Of each sample: logprobs and entropies of its tokens that count, one sample at a time, nothing packed."""
    rows = []
    for sample in samples:
        ids = torch.tensor(sample.tokens.ids.astype("int64"))
        counts = np.flatnonzero(sample.tokens.loss_mask)
        logprobs = torch.log_softmax(model(ids[None]).logits[0, counts - 1] / sample.temperature, -1)
        rows.append((logprobs.gather(-1, ids[counts, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1), sample))
    return rows


def at_loss(sample: Sample, column: str) -> torch.Tensor:
    return torch.from_numpy(getattr(sample.tokens, column)[sample.tokens.loss_mask.astype(bool)])


def naive_gspo(rows: list[tuple[torch.Tensor, torch.Tensor, Sample]]) -> torch.Tensor:
    """Equation 5 of the paper, whose ratio is differentiated as it stands."""
    gains = []
    for logprobs, _, sample in rows:
        ratio = (logprobs - at_loss(sample, "logprobs")).mean().exp()
        advantage = at_loss(sample, "advantages")[0]
        gains.append(torch.minimum(ratio * advantage, ratio.clamp(0.5, 3.0) * advantage))
    return -torch.stack(gains).mean()


def naive_entropy_bonus(rows: list[tuple[torch.Tensor, torch.Tensor, Sample]]) -> torch.Tensor:
    """REINFORCE by tokens with an entropy bonus."""
    logprobs = torch.cat([row[0] for row in rows])
    advantages = torch.cat([at_loss(row[2], "advantages") for row in rows])
    return -(advantages * logprobs).mean() - 0.7 * torch.cat([row[1] for row in rows]).mean()


@pytest.mark.parametrize(
    ("loss", "naive"),
    [
        ({"type": "gspo", "clip_low": 0.5, "clip_high": 2.0}, naive_gspo),
        ({"type": "reinforce", "entropy_bonus": 0.7}, naive_entropy_bonus),
    ],
    ids=["gspo", "entropy_bonus"],
)
def test_a_packed_batch_has_the_gradients_of_plain_transformers(
    tiny_model: Path, world: World, loss: dict[str, object], naive: Callable[..., torch.Tensor]
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = naive(naive_rows(plain, samples_at(0)))
    expected.backward()
    state, is_with_entropy = open_state(tiny_model, world), "entropy_bonus" in loss
    metrics = passed(state, world, policy_gradient(Loss(**loss)), entropy_gradient=is_with_entropy)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["clip_frac/low"] + metrics["clip_frac/high"] < 0.9
    assert largest_difference(gradients, take_gradients(state.model)) < 1e-5
