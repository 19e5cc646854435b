"""The trainer's own logprobs of a batch's tokens: collected during the step and written after it, for the dashboard.

Logprobs stay where they were computed until the step is over, so nothing waits for them.
"""

from __future__ import annotations

import numpy as np
import torch

from trireme.algo.columns import Columns
from trireme.base.log import get_logger
from trireme.base.paths import RunPaths
from trireme.journal.logprobs import write_logprobs
from trireme.messages import BatchReply
from trireme.trainer.parallel.mesh import World

log = get_logger("trainer")


class LogprobLog:
    """Of one batch at a time. Never ends a run: what cannot be written is left out."""

    def __init__(self, paths: RunPaths, world: World) -> None:
        self._folder = paths.logprobs
        self._rank = world.dp_rank
        self._writes = world.cp_rank == 0  # all of a team have the same
        self._batch: BatchReply | None = None
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._has_failed = False

    def begin(self, batch: BatchReply) -> None:
        self._batch, self._rows = batch, []

    def take(self, columns: Columns) -> None:
        """A row; to be called in the order of rows."""
        if self._writes:
            self._rows.append((columns.logprobs.detach(), columns.mask))

    def write(self) -> None:
        """The batch that was begun last, once."""
        batch, rows = self._batch, self._rows
        self._batch, self._rows = None, []
        if batch is None or not self._writes:
            return
        parts = [logprobs[mask].float().cpu().numpy() for logprobs, mask in rows]
        logprobs = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        try:
            write_logprobs(self._folder, batch.step, self._rank, batch.micro_batches, logprobs)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_failed:
            log.warning(
                "Could not write %s: %s. Training goes on; the dashboard lacks the trainer's side of this step, and of "
                "others like it. Free space on that disk, or set `trainer.save_logprobs = false`.",
                self._folder,
                error.strerror or error,
            )
        self._has_failed = True
