"""A step is tried before the first: it finds what is missing, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe import save_moe
from tiny import are_equal, batch_reply, content_of, random_samples
from trireme.config.losses import Loss
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Lora, Optimizer, TrainerConfig, TrainerModel
from trireme.trainer.mesh import World
from trireme.trainer.state import TrainerState
from trireme.trainer.stepper import Stepper, base_state
from trireme.trainer.trial import longest_row, try_step

CAPACITY = 100
EVERY_TERM = Loss(beta=0.1, proximal="recomputed", entropy_bonus=0.01, reference_update_every=1)


def config_of(folder: Path, **trainer: Any) -> RunConfig:
    settings = {"optim": Optimizer(lr=1e-3, weight_decay=0.1), "micro_batch_tokens": CAPACITY} | trainer
    return RunConfig(device="cpu", seq_len=40, model=Model(name=str(folder)), trainer=TrainerConfig(**settings))


def steps(config: RunConfig, state: TrainerState, world: World, *, count: int) -> list[dict[str, float]]:
    stepper = Stepper(config, state, world)
    return [
        stepper.step(batch_reply(random_samples([30, 20, 12], seed=step), world, capacity=CAPACITY, step=state.version))
        for step in range(state.version, state.version + count)
    ]


def trained(config: RunConfig, world: World, *, tried_at: list[int]) -> tuple[list[dict[str, float]], Any]:
    """Three steps."""
    state, metrics = base_state(config, world), []
    for version in range(3):
        if version in tried_at:
            try_step(config, state, world)
        metrics += steps(config, state, world, count=1)
    return metrics, content_of(state)


OTHER_WAYS: dict[str, dict[str, Any]] = {
    **{kind: {"optim": Optimizer(type=kind, lr=1e-3, weight_decay=0.1)} for kind in ("adamw_8bit", "muon", "sgd")},
    "adapters that drop": {"model": TrainerModel(lora=Lora(dropout=0.3))},
    "every term": {"loss": EVERY_TERM},
    "every term with adapters": {"loss": EVERY_TERM, "model": TrainerModel(lora=Lora())},
    "two iterations": {"num_iterations": 2},
    "as it is": {},
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_a_tried_step_changes_nothing_to_the_bit(tiny_model: Path, world: World, way: str) -> None:
    """Neither of a fresh run nor of one that has an optimizer's state, as after a restart."""
    config = config_of(tiny_model, **OTHER_WAYS[way])
    metrics, content = trained(config, world, tried_at=[])
    tried_metrics, tried_content = trained(config, world, tried_at=[0, 2])
    assert tried_metrics == metrics
    assert are_equal(tried_content, content)


def test_tried_tokens_do_not_count_as_loads_of_experts(tmp_path: Path, world: World) -> None:
    config = config_of(save_moe(tmp_path))
    metrics, content = trained(config, world, tried_at=[])
    tried_metrics, tried_content = trained(config, world, tried_at=[0, 2])
    assert "moe/busiest_expert" in metrics[0]
    assert tried_metrics == metrics
    assert are_equal(tried_content, content)


def test_the_tried_row_is_as_long_as_any_and_spares_no_token(tiny_model: Path) -> None:
    for vocabulary in (7, 40, 151_936):
        row = longest_row(config_of(tiny_model), vocabulary=vocabulary, version=3)
        assert row.lengths == [40, 40, 20]
        assert row.tokens.length == CAPACITY
        assert row.tokens.loss_mask.sum() == CAPACITY - 3
        first = [int(row.tokens.ids[at]) for at in (0, 40, 80)]
        assert len(set(first)) == 3
        assert 0 <= row.tokens.ids.min() <= row.tokens.ids.max() < vocabulary
        assert np.all(row.tokens.versions == 3)


def test_the_tried_row_has_several_samples_though_one_fills_it(tiny_model: Path) -> None:
    """Where a model needs a mask to keep them apart, it is the largest that any row needs."""
    row = longest_row(config_of(tiny_model, micro_batch_tokens=40), vocabulary=128, version=0)
    assert row.lengths == [38, 2]


def test_a_tried_step_holds_all_that_a_later_one_holds(tiny_model: Path, world: World) -> None:
    """When its forward pass begins: gradients of earlier rows, and the optimizer's state."""
    config = config_of(tiny_model)
    state = base_state(config, world)
    parameters = list(state.model.parameters())
    seen = []

    def look(*_: Any) -> None:
        has_gradients = [parameter.grad is not None for parameter in parameters]
        seen.append((sum(has_gradients), len(state.optimizer.state)))

    state.model.base_model.register_forward_pre_hook(look)
    try_step(config, state, world)
    assert seen[-1] == (len(parameters), len(parameters))
    assert all(parameter.grad is None for parameter in parameters)
    assert not state.optimizer.state
