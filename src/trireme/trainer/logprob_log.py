"""The trainer's own logprobs of a batch's tokens, written after the step for the dashboard.

Logprobs stay on their device until the step is over, so that the step never waits for a copy.
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
    """Collects the logprobs of one batch at a time. A failed write is logged once and never ends the run."""

    def __init__(self, paths: RunPaths, world: World) -> None:
        self._folder = paths.logprobs
        self._rank = world.dp_rank
        self._writes = world.cp_rank == 0  # all ranks of a team have the same logprobs
        self._batch: BatchReply | None = None
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._has_failed = False

    def begin(self, batch: BatchReply) -> None:
        self._batch, self._rows = batch, []

    def take(self, columns: Columns) -> None:
        """Keep the logprobs of a row. Rows come in their order; only the first pass has the weights before the step."""
        if self._writes and self._batch is not None and len(self._rows) < len(self._batch.micro_batches):
            self._rows.append((columns.logprobs.detach(), columns.mask))

    def write(self) -> None:
        """Write the logprobs of the batch that began last. A second call writes nothing."""
        # Forgotten first: a failed write must not be repeated with the next batch.
        batch, rows = self._batch, self._rows
        self._batch, self._rows = None, []
        if batch is None or not self._writes:
            return

        parts = [logprobs[mask].float().cpu().numpy() for logprobs, mask in rows]
        logprobs = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        try:
            write_logprobs(self._folder, batch.step, self._rank, batch.micro_batches, logprobs)
        except OSError as error:
            if not self._has_failed:
                log.warning(
                    "Could not write %s: %s. Training continues; the dashboard lacks the trainer's logprobs of this "
                    "step and of others that cannot be written. Free space on that disk, or set "
                    "`trainer.save_logprobs = false`.",
                    self._folder,
                    error.strerror or error,
                )
            self._has_failed = True
