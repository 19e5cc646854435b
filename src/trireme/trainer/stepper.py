"""From a batch to the next version: all that decides what the weights become, and nothing that only watches.

The run's trainer and a replay both train through this, so the same batches give the same bits.
"""

from __future__ import annotations

import torch

from trireme.base.timing import Timer
from trireme.config.run import RunConfig
from trireme.messages import BatchReply
from trireme.trainer.checkpoint import TrainerState
from trireme.trainer.mesh import World
from trireme.trainer.model import load_model
from trireme.trainer.optim import build_optimizer, set_lr
from trireme.trainer.step import forward_backward, policy_gradient, update


def base_state(config: RunConfig, world: World) -> TrainerState:
    """Version 0 on this rank: the base model, and an optimizer that has seen nothing."""
    trainer = config.trainer
    torch.manual_seed(config.seed)  # weights `from_scratch` are drawn, and so is dropout
    model = load_model(trainer.model, trainer.model.name or config.model.name, world)
    return TrainerState(model=model, optimizer=build_optimizer(model, trainer.optim))


class Stepper:
    """Changes `state`, one version per batch."""

    def __init__(self, config: RunConfig, state: TrainerState, world: World, timer: Timer | None = None) -> None:
        self._config = config
        self._state = state
        self._world = world
        self._timer = timer or Timer()
        self._loss = policy_gradient(config.trainer.loss)

    def step(self, batch: BatchReply) -> dict[str, float]:
        """One optimizer step: version n becomes n + 1. Returns its metrics. A collective."""
        state, trainer = self._state, self._config.trainer
        assert batch.step == state.version, f"batch {batch.step} for version {state.version}"
        lr = set_lr(
            state.optimizer, trainer.optim, trainer.scheduler, step=state.version, max_steps=self._config.max_steps
        )
        with self._timer.span("forward_backward"):
            metrics = forward_backward(
                state.model,
                batch.micro_batches,
                loss_tokens=batch.loss_tokens,
                step=state.version,
                loss_function=self._loss,
                world=self._world,
            )
        with self._timer.span("optimizer"):
            metrics |= update(state.model, state.optimizer, trainer.optim.max_norm)
        state.version += 1
        return metrics | {"lr": lr}
