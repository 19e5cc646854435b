"""Names that an environment's metrics are shown under: keys of metrics.jsonl, and text of the dashboard and of reports.

No name costs a rollout. One that is shown in another form, or left out, is logged once.
"""

from __future__ import annotations

import re

from trireme.base.log import get_logger
from trireme.orchestrator.session.wire import Done

log = get_logger("environments")

MOST_METRICS = 500  # largest number in one rollout
MOST_CHANGED = 500  # names of one environment; later ones are left out
LONGEST_NAME = 200  # characters
NOT_IN_A_NAME = re.compile(r"[^\w./@:+ -]")


class MetricNames:
    """The names of one environment's metrics.

    Example:
        MetricNames("gsm8k").apply(done)  # done.metrics: {"accuracy (%)": 1.0} -> {"accuracy ___": 1.0}
    """

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._shown: dict[str, str] = {}  # name that each is shown under, if it is another one
        self._told: set[str] = set()  # names and events that were logged

    def apply(self, done: Done) -> Done:
        """Replace the names of a result's metrics by those that they are shown under."""
        allowed = {name: value for name, value in done.metrics.items() if _allowed(name) == name}
        # names that may be shown keep their form, and none of the others may take it
        metrics = dict(allowed)
        for name, value in done.metrics.items():
            if name not in allowed and (shown := self._changed(name, taken=allowed)):
                metrics[shown] = value

        # logged once per kind, as each rollout of an environment would repeat it
        if len(metrics) > MOST_METRICS:
            self._tell("number", f"{len(metrics)} metrics of a rollout, of which the first {MOST_METRICS} are kept")
        for name, what in done.left_out.items():
            self._tell(f"value of {name[:LONGEST_NAME]}", f"metric {name[:80]!r} is left out where it is {what[:200]}")
        done.metrics = dict(list(metrics.items())[:MOST_METRICS])
        return done

    def _changed(self, name: str, taken: dict[str, float]) -> str | None:
        """Return what a name is shown as. The first one keeps its form if several would be shown as the same."""
        shown = self._shown.get(name)
        if shown is None and len(self._shown) >= MOST_CHANGED:
            self._tell("changed", f"more than {MOST_CHANGED} metrics have names that cannot be shown: left out")
            return None

        # numbered until it is free: two metrics under one name would overwrite each other
        number, form = 1, _allowed(name)
        while shown is None or shown in taken:
            shown = form if number == 1 else f"{form[: LONGEST_NAME - 8]}_{number}"
            shown = None if shown in self._shown.values() else shown
            number += 1
        self._tell(name, f"metric {name[:80]!r} is shown as {shown[:80]!r}")
        self._shown[name] = shown
        return shown

    def _tell(self, key: str, words: str) -> None:
        if key not in self._told and len(self._told) < 2 * MOST_CHANGED:
            self._told.add(key)
            log.warning("Environment %s: %s", self._environment, words)


def _allowed(name: str) -> str:
    """Return a name as it may be shown; `<lambda>`, as Python calls such a function, without its brackets."""
    return NOT_IN_A_NAME.sub("_", name.strip("<>"))[:LONGEST_NAME] or "metric"
