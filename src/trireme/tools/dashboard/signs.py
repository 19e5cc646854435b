"""Warnings of a run, found again in its metrics: the same signs that the orchestrator and the launcher look for."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from trireme.monitor.collapse import SIGNS, Sign, Warned, Watch
from trireme.monitor.metrics import read_metrics

BY_NAME: dict[str, Sign] = {sign.name: sign for sign in SIGNS}


@dataclass(frozen=True)
class Finding:
    """One warning, taken apart."""

    warned: Warned
    lasts: bool  # seen lately

    @property
    def title(self) -> str:
        return self.warned.name.replace("_", " ")

    @property
    def seen(self) -> str:
        sign = BY_NAME.get(self.warned.name)
        return self.warned.text.removesuffix(f" {sign.meaning} {sign.advice}") if sign else self.warned.text

    @property
    def meaning(self) -> str:
        sign = BY_NAME.get(self.warned.name)
        return sign.meaning if sign else ""

    @property
    def advice(self) -> str:
        sign = BY_NAME.get(self.warned.name)
        return sign.advice if sign else ""

    @property
    def metric(self) -> str:
        """What to look at."""
        sign = BY_NAME.get(self.warned.name)
        return sign.watched[0] if sign else self.warned.name


class Signs:
    """Of one run, as its metrics grow."""

    def __init__(self, metrics: Path) -> None:
        self._path = metrics
        self._offset = 0
        self._watch = Watch()
        self._lock = threading.Lock()

    def refresh(self) -> bool:
        """Whether there is anything new. Blocks."""
        with self._lock:
            rows, offset = read_metrics(self._path, self._offset)
            if offset < self._offset:
                self._watch = Watch()
            self._offset = offset
            before = self._state()
            for row in rows:
                self._watch.take(row)
            return self._state() != before

    def _state(self) -> tuple[int, tuple[str, ...]]:
        return len(self._watch.said), tuple(self._watch.lasting)

    def findings(self) -> list[Finding]:
        """What lasts first, then the newest."""
        lasting = set(self._watch.lasting.values())
        found = [Finding(warned, warned in lasting) for warned in self._watch.said]
        return sorted(found, key=lambda finding: (not finding.lasts, -finding.warned.step))
