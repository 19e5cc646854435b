"""Warnings: signs that a run collapses, in words - what is seen, what it usually means, what to try."""

from __future__ import annotations

from collections.abc import Sequence

from nicegui import run as threads
from nicegui import ui

from trireme.monitor.collapse import SIGNS
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.runs import RunFolder, RunSet
from trireme.tools.dashboard.signs import Finding

MOST = 100  # shown of a run


async def build(runs: RunSet) -> None:
    page = WarningsPage(runs)
    await page.renew()
    runs.watch(page.renew)


class WarningsPage:
    """All chosen runs, one after the other."""

    def __init__(self, runs: RunSet) -> None:
        self.runs = runs
        self._body = ui.element("div").classes("tr-charts")
        self._drawn: list[list[Finding]] | None = None

    async def renew(self) -> None:
        """What is new. Others who look may have read it already."""
        for run in self.runs.chosen:
            await threads.io_bound(run.signs.refresh)
        found = [run.signs.findings() for run in self.runs.chosen]
        if found != self._drawn and not self._body.is_deleted:
            self._drawn = found
            self._draw(found)

    def _draw(self, found: Sequence[Sequence[Finding]]) -> None:
        self._body.clear()
        with self._body:
            for run, findings in zip(self.runs.chosen, found, strict=True):
                _of_run(self.runs, run, findings)
            _what_is_looked_for()


def _of_run(runs: RunSet, run: RunFolder, findings: Sequence[Finding]) -> None:
    lasting = sum(finding.lasts for finding in findings)
    with ui.element("div").classes("tr-row tr-group"):
        theme.heading(run.name)
        ui.label(f"{lasting} now, {len(findings) - lasting} earlier").classes("tr-soft tr-small")
    if not findings:
        theme.nothing(
            "No sign of a collapse.",
            f"{len(SIGNS)} are looked for in every row of its metrics; {run.num_done} steps so far.",
            icon="check_circle_outline",
        )
    for finding in findings[:MOST]:
        warning(runs, finding)


def warning(runs: RunSet, finding: Finding) -> None:
    """One of them, in words."""
    with (
        ui.element("section")
        .classes("tr-card")
        .style(f"border-left: 4px solid var(--tr-{'bad' if finding.lasts else 'line'})")
    ):
        with ui.element("div").classes("tr-row"):
            ui.icon("warning_amber" if finding.lasts else "history").classes("tr-warn" if finding.lasts else "tr-soft")
            theme.heading(finding.title)
            still = ", and still" if finding.lasts else ""
            ui.label(f"step {finding.warned.step}{still}").classes("tr-soft tr-small")
            ui.space()
            ui.link(f"look at {finding.metric}", runs.link("/metrics", find=finding.metric))
        ui.label(f"{finding.seen}.".replace("..", "."))
        ui.label(finding.meaning).classes("tr-soft")
        if finding.advice:
            ui.label(f"What to try: {finding.advice}")


def _what_is_looked_for() -> None:
    with ui.expansion(f"What is looked for ({len(SIGNS)} signs)").classes("tr-card").style("padding: 4px"):
        with ui.element("table").classes("tr-table"):
            for sign in SIGNS:
                with ui.element("tr"):
                    with ui.element("td").classes("tr-mono"):
                        ui.label(sign.name.replace("_", " "))
                    with ui.element("td"):
                        ui.label(", ".join(sign.watched)).classes("tr-mono tr-soft")
                    with ui.element("td"):
                        ui.label(sign.meaning)
