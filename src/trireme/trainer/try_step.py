"""A trial step before the first one, which changes nothing.

While engines still start, it shows whether all that a step needs is there: memory, kernels, compiled blocks, and a loss
function of the user's.
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
from trireme.messages import BatchReply, MicroBatch, build_tokens
from trireme.trainer.checkpoint.state import TrainerState
from trireme.trainer.step import Stepper, update

SHORT = 2  # tokens of the shortest sample of which one is learned


def try_step(stepper: Stepper) -> None:
    """Compute gradients of the longest row that a batch can have. A collective.

    Gradients of earlier rows and the optimizer's state exist meanwhile, as in any step. Afterwards weights, state and
    version are what they were, to the bit.

    Raises:
        RuntimeError: torch's own, if there is not enough memory.
    """
    config, state, ranks = stepper.config, stepper.state, stepper.world.dp_size
    with _temporary_optimizer_state(state, config.trainer.optim.max_norm):
        # In a real step, gradients of earlier rows take memory while a later row is computed.
        _zero_gradients(state.model)
        row = longest_row(config, vocabulary=state.model.config.get_text_config().vocab_size, version=state.version)
        num_samples = len(row.lengths) * ranks

        batch = BatchReply(
            step=state.version,
            micro_batches=[row],
            loss_tokens=row.tokens.length * ranks,
            num_rollouts=num_samples,
            loss_samples=num_samples,
        )

        stepper.compute_gradients(batch, stepper.fixed_logprobs())  # also takes the counts of experts for these tokens
        state.optimizer.zero_grad(set_to_none=True)


@contextmanager
def _temporary_optimizer_state(state: TrainerState, max_norm: float) -> Iterator[None]:
    """Let the optimizer allocate its state by a step with learning rate 0, and forget that state afterwards.

    State that comes from a checkpoint is kept.
    """
    optimizer = state.optimizer
    if optimizer.state:
        yield
        return

    # The rate of 0 changes no weight, but allocates what the optimizer needs.
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


def longest_row(config: RunConfig, *, vocabulary: int, version: int) -> MicroBatch:
    """Build a row of made-up samples of full length.

    All their tokens count, and no two samples begin alike, so that no shared prefix saves work. There are at least two
    samples, because keeping the samples of a row apart takes memory too.
    """
    capacity = row_capacity(config)
    length = min(config.seq_len, capacity)
    lengths = [min(length, capacity - first) for first in range(0, capacity, length)]
    if len(lengths) == 1:
        lengths = [length - SHORT, SHORT]

    # Each sample's ids differ from those of the others in the first token already.
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
