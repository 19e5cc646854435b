"""A batch of sources with losses of their own has the gradients of each source alone, weighted as documented."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from support.models import tiny
from trireme.algo.columns import Totals
from trireme.algo.packing import Sample, micro_batches_of_rank, unsampled_row
from trireme.base.errors import ConfigError
from trireme.config.run import RunConfig
from trireme.messages import MicroBatch
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.parallel.mesh import World
from trireme.trainer.step import Stepper, base_state, forward_backward, run_loss

LENGTHS = [30, 12, 23, 7, 31, 9]
SEQUENCE = {"type": "dapo", "normalize": "sequence", "entropy_bonus": 0.01}
CLIPPED = {"type": "reinforce", "correction": "token_truncate"}  # with a proximal policy of its own


def config_of(model: Any, *, own: dict[str, Any] | None, **loss: Any) -> RunConfig:
    env = [{"id": "a"}, {"id": "b", **({"loss": own} if own else {})}, {"id": "c"}]
    given = {"model": {"name": str(model)}, "seq_len": 64, "trainer": {"loss": loss}, "orchestrator": {"env": env}}
    return RunConfig.model_validate(given)


def samples_of(*sources: str) -> list[Sample]:
    """Half of them are of `a`, half of `b`."""
    samples = [replace(one, source="ab"[place % 2]) for place, one in enumerate(tiny.random_samples(LENGTHS))]
    return [sample for sample in samples if sample.source in sources]


def passed(model: Any, rows: list[MicroBatch], of: list[Sample], world: World, config: RunConfig) -> Any:
    """Return metrics and gradients of rows, in a batch of these samples."""
    loss, recipes = run_loss(config)
    stepper = Stepper(config, base_state(config, world), world)
    metrics = forward_backward(
        model, rows, loss_tokens=tiny.num_loss_tokens(of), loss_samples=len(of), step=0, loss_function=loss,
        world=world, fixed=stepper.fixed_logprobs(), entropy_gradient=any(each.entropy_bonus for each in recipes),
    )  # fmt: skip
    return metrics, tiny.take_gradients(model)


def added(*parts: tuple[float, dict[str, Any]]) -> dict[str, Any]:
    return {name: sum(weight * gradient[name] for weight, gradient in parts) for name in parts[0][1]}


@pytest.mark.parametrize(
    ("run", "own"), [({"kl_tau": 0.1}, SEQUENCE), (SEQUENCE, {"type": "importance"}), ({}, CLIPPED)]
)
@pytest.mark.parametrize("capacity", [48, 200])
def test_a_mixture_has_the_weighted_gradient_of_its_sources(tiny_model, world, run, own, capacity):
    """`token` weighs a source by its share of the tokens, `sequence` by its share of the samples."""
    both, config = samples_of("a", "b"), config_of(tiny_model, own=own, **run)
    model = base_state(config, world).model
    pack = partial(micro_batches_of_rank, capacity=capacity)
    metrics, found = passed(model, pack(both, rank=0, world=1), both, world, config)

    alone = []
    for name, loss in (("a", run), ("b", own)):
        samples = [replace(sample, source="") for sample in samples_of(name)]
        single = config_of(tiny_model, own=None, **loss)
        share = len(samples) / len(both)
        if loss != SEQUENCE:
            share = tiny.num_loss_tokens(samples) / tiny.num_loss_tokens(both)
        its, gradient = passed(model, pack(samples, rank=0, world=1), samples, world, single)
        alone.append((share, gradient))
        assert metrics[f"loss/{name}"] == pytest.approx(share * its["loss"], rel=1e-4, abs=1e-7)
        assert metrics[f"masked_frac/{name}"] == pytest.approx(its["masked_frac"])
        assert metrics[f"importance_ratio/{name}"] == pytest.approx(its["importance_ratio"], rel=1e-5)
        assert metrics[f"tokens/{name}"] == tiny.num_loss_tokens(samples)
    assert tiny.largest_difference(found, added(*alone)) < 1e-5
    assert metrics["loss"] == pytest.approx(metrics["loss/a"] + metrics["loss/b"])
    assert not [name for name in metrics if name.endswith("/c")]  # it has no sample in this batch

    # Two ranks have a part of the rows each, and one of the rows may be empty.
    parts = [
        passed(model, [*pack(both, rank=rank, world=2), unsampled_row([0], [1])], both, world, config)
        for rank in (0, 1)
    ]
    assert tiny.largest_difference(found, added(*((1.0, gradient) for _, gradient in parts))) < 1e-5


def test_every_row_has_sums_of_the_same_names(tiny_model, world):
    """Ranks add them up by name, so a rank without samples of a source must have its sums too."""
    config = config_of(tiny_model, own=SEQUENCE)
    loss, model = run_loss(config)[0], base_state(config, world).model
    rows = [tiny.one_row(samples_of(*sources)) for sources in ("a", "b", "ab")]
    rows += [unsampled_row([0], [1]), unsampled_row([0, 1, 2], [3])]
    terms = [loss(compute_columns(model, row, world.device), Totals(9, 3)) for row in rows]
    assert len({frozenset(each.sums) for each in terms}) == 1
    assert all(torch.isfinite(each.loss) for each in terms)


def test_one_loss_in_every_source_is_that_loss_over_the_batch(tiny_model, world):
    both, config = samples_of("a", "b"), config_of(tiny_model, own={"clip_high": 0.1}, type="grpo", clip_high=0.1)
    model, pack = base_state(config, world).model, partial(micro_batches_of_rank, capacity=80, rank=0, world=1)
    metrics, found = passed(model, pack(both), both, world, config)
    plain = config_of(tiny_model, own=None, type="grpo", clip_high=0.1)
    expected, gradient = passed(model, pack([replace(each, source="") for each in both]), both, world, plain)
    assert tiny.largest_difference(found, gradient) < 1e-5
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_reference_is_loaded_if_only_one_source_asks_for_it(tiny_model, world):
    config = config_of(tiny_model, own={"beta": 0.5, "reference_update_every": 3})
    state = base_state(config, world)
    assert state.reference is not None
    assert state.reference.update_every == 3
    stepper = Stepper(config, state, world)
    batches = [tiny.batch_reply(samples_of("a", "b"), world, capacity=80, step=step) for step in range(2)]
    first, second = map(stepper.step, batches)
    assert (first["reference_kl/b"], first["loss/a"] != 0) == (0.0, True)
    assert second["reference_kl/b"] > 0


def test_a_trainer_refuses_samples_of_a_source_whose_loss_it_lacks(tiny_model, world):
    for own, sources in (None, "ab"), ({"type": "grpo"}, ""):
        config = config_of(tiny_model, own=own)
        samples = [each if sources else replace(each, source="") for each in samples_of("a", "b")]
        stepper = Stepper(config, base_state(config, world), world)
        with pytest.raises(ConfigError, match=r"same `\[\[orchestrator.env\]\]` tables"):
            stepper.step(tiny.batch_reply(samples, world, capacity=80, step=0))
