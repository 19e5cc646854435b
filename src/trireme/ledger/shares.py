"""From a journal entry to what one trainer rank is handed. Pure: whoever reads the entry later gets the same rows."""

from __future__ import annotations

from trireme.algo.packing import Sample, micro_batches_of_rank
from trireme.config.run import RunConfig
from trireme.ledger.records import BatchRecord, Rollout
from trireme.messages import BatchReply


def share_of(record: BatchRecord, *, rank: int, world: int, capacity: int) -> BatchReply:
    """The micro-batches of rank `rank` of `world`.

    Args:
        capacity: tokens of a row, see `row_capacity`.
    """
    samples = samples_of(record.rollouts)
    return BatchReply(
        step=record.step,
        micro_batches=micro_batches_of_rank(samples, capacity=capacity, rank=rank, world=world),
        loss_tokens=sum(int(sample.tokens.loss_mask.sum()) for sample in samples),
        num_rollouts=len(record.rollouts),
    )


def samples_of(rollouts: list[Rollout]) -> list[Sample]:
    """In the order of the journal, on which the packing of rows depends."""
    return [Sample(sample, rollout.temperature) for rollout in rollouts for sample in rollout.samples]


def row_capacity(config: RunConfig) -> int:
    """Tokens of one packed row."""
    return config.trainer.micro_batch_tokens or config.seq_len
