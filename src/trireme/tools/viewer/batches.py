"""A batch of training as a list of rollouts: those that are trained on, then those that were dropped, and why."""

from __future__ import annotations

from pathlib import Path

from trireme.journal.records import BatchRecord, Rollout
from trireme.tools.rollouts import Record, Row, dropped_row_of, read_batch, record_of_rollout, row_of, text_to_search


class BatchFile:
    """An entry of the journal. It is whole when it appears and does not change, so it is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.damaged: list[int] = []
        self.trouble = ""
        self._rollouts: list[Rollout] = []
        self._file: tuple[int, int, int] | None = None

    def read_on(self) -> bool:
        """Returns False: it is read at once, or not at all."""
        try:
            found = self.path.stat()
            file = (found.st_ino, found.st_size, found.st_mtime_ns)
            if file != self._file:
                record, self.trouble = read_batch(self.path)
                if record is not None:
                    self._take(record)
                    self._file = file
        except OSError as error:
            self.trouble = str(error)
        return False

    def _take(self, batch: BatchRecord) -> None:
        self._rollouts = batch.rollouts
        trained = [row_of(number, rollout) for number, rollout in enumerate(batch.rollouts)]
        dropped = [dropped_row_of(len(trained) + number, fate) for number, fate in enumerate(batch.dropped)]
        self.rows = trained + dropped

    def record(self, row: Row) -> Record:
        if row.number >= len(self._rollouts):
            return Record(row=row)
        return record_of_rollout(row, self._rollouts[row.number])

    def text(self, row: Row) -> str:
        return text_to_search(self.record(row))
