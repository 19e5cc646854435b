"""From a batch to the next version: all that decides what the weights become, and nothing that only watches.

The run's trainer and a replay both train through this, so the same batches give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trireme.algo.columns import LossFunction
from trireme.base.timing import Timer
from trireme.config.losses import Recipe, recipe_of
from trireme.config.run import RunConfig
from trireme.messages import BatchReply
from trireme.trainer.checkpoint.checkpoint import TrainerState
from trireme.trainer.model.anchors import Anchors
from trireme.trainer.model.model import load_model
from trireme.trainer.model.moe import expert_metrics
from trireme.trainer.model.reference import load_reference
from trireme.trainer.optim.optim import build_optimizer, set_lr
from trireme.trainer.parallel.mesh import World
from trireme.trainer.said import Said
from trireme.trainer.step import forward_backward, optimizer_step, policy_gradient


def base_state(config: RunConfig, world: World) -> TrainerState:
    """Version 0 on this rank: the base model, and an optimizer that has seen nothing.

    Raises:
        ConfigError: the loss or the model cannot be had.
    """
    trainer = config.trainer
    loss_of(config)  # before anything expensive
    torch.manual_seed(config.seed)  # weights `from_scratch` are drawn, and so is dropout
    model = load_model(trainer.model, trainer.model.name or config.model.name, world)
    reference = load_reference(config, model, world)
    return TrainerState(model=model, optimizer=build_optimizer(model, trainer.optim), reference=reference)


def loss_of(config: RunConfig) -> tuple[Recipe, LossFunction]:
    """Raises: ConfigError where it is one of the user's, and cannot be had."""
    recipe = recipe_of(config.trainer.loss, length=config.loss_length)
    return recipe, policy_gradient(recipe)


class Stepper:
    """Changes `state`, one version per batch."""

    def __init__(
        self,
        config: RunConfig,
        state: TrainerState,
        world: World,
        timer: Timer | None = None,
        said: Said | None = None,
        before_weights_change: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            said: is told what the weights said of the batch before the step.
            before_weights_change: called before each optimizer step, when its gradients are there.
        """
        self._config = config
        self._state = state
        self._world = world
        self._timer = timer or Timer()
        self._said = said
        self._before_weights_change = before_weights_change
        self._recipe, self._loss = loss_of(config)

    def step(self, batch: BatchReply) -> dict[str, float]:
        """Version n becomes n + 1, in as many optimizer steps as configured. Returns metrics. A collective."""
        state, trainer = self._state, self._config.trainer
        assert batch.step == state.version, f"batch {batch.step} for version {state.version}"
        lr = set_lr(
            state.optimizer, trainer.optim, trainer.scheduler, step=state.version, max_steps=self._config.max_steps
        )
        anchors = Anchors(
            recomputed=self._recipe.proximal == "recomputed",
            reference=state.reference,
        )
        if self._said:
            self._said.begin(batch)
        iterations = range(trainer.num_iterations)
        metrics = merged([self._iterate(batch, anchors, said=None if n else self._said) for n in iterations])
        state.version += 1
        if state.reference:
            state.reference.update_if_due(state.model, state.version)
        return metrics | {"lr": lr}

    def _iterate(self, batch: BatchReply, anchors: Anchors, *, said: Said | None) -> dict[str, float]:
        """One optimizer step on the whole batch."""
        state = self._state
        with self._timer.span("forward_backward"):
            metrics = forward_backward(
                state.model,
                batch.micro_batches,
                loss_tokens=batch.loss_tokens,
                loss_samples=batch.loss_samples,
                step=state.version,
                loss_function=self._loss,
                world=self._world,
                anchors=anchors,
                entropy_gradient=self._recipe.entropy_bonus > 0,
                said=said,
            ) | expert_metrics(state.model, self._world)
        self._before_weights_change()
        with self._timer.span("optimizer"):
            return metrics | optimizer_step(state, self._config.trainer.optim)


def merged(iterations: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of a batch; but `skipped_update` counts, in a row up to the last, and the mismatch
    of trainer and engine is that of the first, whose weights are those that sampled."""
    first, last = iterations[0], iterations[-1]
    means = {name: sum(metrics[name] for metrics in iterations) / len(iterations) for name in first}
    kept = {name: first[name] for name in ("mismatch_kl",) if name in first}
    kept |= {name: last[name] for name in ("skipped_in_a_row",) if name in last}
    return means | kept | {"skipped_update": sum(metrics["skipped_update"] for metrics in iterations)}
