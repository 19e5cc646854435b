"""A step before the first one, which changes nothing. What a step needs is then there, or known to be missing, while
engines still start: memory, kernels, compiled blocks, a user's own loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from trireme.algo.packing import positions
from trireme.algo.weight_checks import probe_ids
from trireme.config.run import RunConfig
from trireme.journal.rank_shares import row_capacity
from trireme.messages import MicroBatch, build_tokens
from trireme.trainer.checkpoint.state import TrainerState
from trireme.trainer.model.moe import expert_metrics
from trireme.trainer.model.reference import FixedLogprobs
from trireme.trainer.parallel.mesh import World
from trireme.trainer.step import forward_backward, loss_of, update

SHORT = 2  # tokens: the fewest of which one is learned


def try_step(config: RunConfig, state: TrainerState, world: World) -> None:
    """Gradients of the longest row that a batch can have, beside all that a step ever holds with them: gradients of
    earlier rows, and the optimizer's state. Weights, state and version are afterwards what they were, to the bit. A
    collective.

    Raises:
        RuntimeError: torch's, where there is not enough memory.
    """
    with _optimizer_state_for_now(state, config.trainer.optim.max_norm):
        _zero_gradients(state.model)
        _gradients(config, state, world)
        state.optimizer.zero_grad(set_to_none=True)


@contextmanager
def _optimizer_state_for_now(state: TrainerState, max_norm: float) -> Iterator[None]:
    """What the first step makes, which is forgotten afterwards; what comes from a checkpoint is there already."""
    optimizer = state.optimizer
    if optimizer.state:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    _zero_gradients(state.model)
    update(state.model, optimizer, max_norm)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    yield
    optimizer.state.clear()


def _zero_gradients(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def _gradients(config: RunConfig, state: TrainerState, world: World) -> None:
    recipe, loss = loss_of(config)
    row = longest_row(config, vocabulary=state.model.config.get_text_config().vocab_size, version=state.version)
    forward_backward(
        state.model,
        [row],
        loss_tokens=row.tokens.length * world.dp_size,
        loss_samples=len(row.lengths) * world.dp_size,
        step=state.version,
        loss_function=loss,
        world=world,
        fixed=FixedLogprobs(recomputed=recipe.proximal == "recomputed", reference=state.reference),
        entropy_gradient=recipe.entropy_bonus > 0,
    )
    expert_metrics(state.model, world)  # these tokens do not count


def longest_row(config: RunConfig, *, vocabulary: int, version: int) -> MicroBatch:
    """Made-up samples of full length. All their tokens count, and no two begin alike, so that none is spared. There are
    at least two: what it takes to keep samples of a row apart is a part of what is tried.

    Args:
        vocabulary: number of tokens that the model knows.
        version: of the weights that "sampled" them.
    """
    capacity = row_capacity(config)
    length = min(config.seq_len, capacity)
    lengths = [min(length, capacity - first) for first in range(0, capacity, length)]
    if len(lengths) == 1:
        lengths = [length - SHORT, SHORT]
    number = np.repeat(np.arange(len(lengths)), lengths)
    place = positions(lengths)
    tokens = build_tokens(
        ids=(np.array(probe_ids(vocabulary, length))[place] + number) % vocabulary,
        loss_mask=place > 0,
        logprobs=np.full(capacity, -1.0),
        advantages=np.where(number % 2, 1.0, -1.0),
        versions=np.full(capacity, version),
    )
    return MicroBatch(tokens=tokens, lengths=lengths, temperatures=[1.0] * len(lengths))
