"""Warn when the run seems to collapse: in the log, in `/status`, and as `warnings/NAME` in the metrics."""

from __future__ import annotations

import asyncio

from trireme.base.log import get_logger
from trireme.monitor.collapse import Warned, Watch
from trireme.monitor.metrics import MetricsFile, read_in_pieces

POLL_S = 2.0

log = get_logger("warnings")


class Watcher:
    """Reads the metrics of all processes as they are written, each row once."""

    def __init__(self, metrics: MetricsFile) -> None:
        self._metrics = metrics
        self._watch = Watch()
        self._offset = 0
        for rows, offset in read_in_pieces(metrics.path):
            self._offset = offset
            for row in rows:  # rows from before a restart, which were reported then
                self._watch.take(row)

    @property
    def lasting(self) -> list[Warned]:
        """Warnings that hold at the moment."""
        return list(self._watch.lasting.values())

    async def run(self) -> None:
        """Look every `POLL_S` until cancelled, and once more then."""
        try:
            while True:
                self.look()
                await asyncio.sleep(POLL_S)
        finally:
            self.look()

    def look(self) -> None:
        for rows, offset in read_in_pieces(self._metrics.path, self._offset):
            self._offset = offset
            for warned in (warned for row in rows for warned in self._watch.take(row)):
                log.warning("step %d, %s: %s", warned.step, warned.name, warned.text)
                self._metrics.append(warned.step, {f"warnings/{warned.name}": 1.0})
