"""Split a batch of the journal into the micro-batches of each trainer rank.

Deterministic: a re-read gives the same rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np

from trireme.algo.covariance import with_restrained
from trireme.algo.model.flops import LINEAR, Cost, cost_of
from trireme.algo.packing import Sample, deal, num_learned, rows_of
from trireme.config.losses import Loss
from trireme.config.model.folder import read_config
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.pictures import PictureFiles, pictures_folder
from trireme.journal.records import BatchRecord, Rollout
from trireme.journal.settings import Settings
from trireme.messages import BatchReply


class Shares:
    """The shares of a run's batches. The last batch is cached, because all ranks ask for it one after the other."""

    def __init__(self, journal: Journal, config: RunConfig) -> None:
        self._journal = journal
        self._pictures = PictureFiles(pictures_folder(config.paths.journal))
        self._settings = Settings(config, "orchestrator")
        self._dealing = asyncio.Lock()
        self._kept: tuple[int, int, DealtBatch] | None = None  # step, number of ranks

    def of(self, step: int, *, rank: int, world: int) -> BatchReply:
        """Return what rank `rank` of `world` trains on; ranks that share rows (`cp`) count as one.

        Raises: JournalCorrupt if the batch, or a picture of it, is not what was written.
        """
        # Dealing a batch is slow and gives all ranks their shares at once, so it is done once per step.
        if self._kept is None or self._kept[:2] != (step, world):
            config = self._settings.at(step)  # a step that is repeated has the rows that it had
            batch = DealtBatch(
                self._journal.read(step),
                world=world,
                capacity=row_capacity(config),
                cost=row_cost(config),
                losses=config.recipes,
            )
            self._kept = step, world, batch
        return self._kept[2].share(rank, self._pictures)

    async def in_thread(self, step: int, *, rank: int, world: int) -> BatchReply:
        """Return the same from a thread: to balance many ranks takes long (half a second for 64)."""
        async with self._dealing:
            return await asyncio.to_thread(self.of, step, rank=rank, world=world)


class DealtBatch:
    """A batch split over `world` ranks, in rows of `row_capacity` tokens that are balanced by `row_cost`.

    With several `losses`, samples carry the names of their sources, which decide the loss of each. Each loss chooses
    the tokens that it restrains among those that it trains, in the whole batch.
    """

    def __init__(
        self,
        record: BatchRecord,
        *,
        world: int,
        capacity: int,
        cost: Cost = LINEAR,
        losses: Mapping[str, Loss] = {},
    ) -> None:
        self._samples = samples_of(record.rollouts, by_source=len(losses) > 1)
        for name, loss in losses.items():
            own = [i for i, each in enumerate(self._samples) if (each.source if each.source in losses else "") == name]
            chosen = with_restrained([self._samples[i] for i in own], loss, step=record.step)
            for i, sample in zip(own, chosen, strict=True):
                self._samples[i] = sample

        lengths = [sample.tokens.length for sample in self._samples]
        self._dealt = deal(lengths, capacity=capacity, ranks=world, cost=cost)
        self._counts = num_learned(self._samples)
        weighted = [sample.tokens for sample in self._samples if sample.tokens.ce_weights is not None]
        self._ce_tokens = sum(int(np.count_nonzero(tokens.by_cross_entropy[1:])) for tokens in weighted)
        self._step = record.step
        self._num_rollouts = len(record.rollouts)

    def share(self, rank: int, pictures: PictureFiles | None = None) -> BatchReply:
        """Return the micro-batches of a rank, with their pictures if those of the run are given.

        If every rollout is masked, each rank gets one empty row, and the counts by which the loss is divided are 1.
        """
        rows = rows_of(self._samples, self._dealt[rank])
        digests = {picture.digest for row in rows for picture in row.tokens.pictures}

        # The counts are those of the whole batch: each rank divides its loss by them, so the split does not matter.
        return BatchReply(
            step=self._step,
            micro_batches=rows,
            loss_tokens=max(1, sum(self._counts)),
            num_rollouts=self._num_rollouts,
            loss_samples=max(1, sum(map(bool, self._counts))),
            ce_tokens=self._ce_tokens,
            pictures={digest: pictures.read(digest) for digest in sorted(digests)} if pictures else {},
        )


def samples_of(rollouts: list[Rollout], *, by_source: bool = False) -> list[Sample]:
    """Return the samples that are trained on, in the order of the journal, on which packing depends."""
    trained = [rollout for rollout in rollouts if rollout.masked is None]
    return [
        Sample(sample, rollout.temperature, rollout.env if by_source else "")
        for rollout in trained
        for sample in rollout.samples
    ]


def row_capacity(config: RunConfig) -> int:
    """Return the tokens of one packed row. With `trainer.model.cp` several ranks share a row."""
    return config.trainer.micro_batch_tokens or config.seq_len


def row_cost(config: RunConfig) -> Cost:
    """Return the cost function of rows for the trained model. It is the same wherever rows are packed."""
    model = config.trainer.model
    return cost_of_model(model.name or config.model.name, attention=model.attn, cp=model.cp)


def cost_of_model(name: str | None, *, attention: str, cp: int = 1) -> Cost:
    """Return the cost function from the model's `config.json`; token counts if there is none on this disk."""
    config = read_config(name)
    return cost_of(config, attention=attention, cp=cp) if config else LINEAR
