"""The fate of every example, counted from the journal, and the audit of a run when it is asked for."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from functools import partial
from pathlib import Path
from typing import Any

from nicegui import run, ui

from trireme.base.processes import die_with_parent
from trireme.base.safe_text import decimal
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.charts import Canvas, bar_chart
from trireme.tools.dashboard.rollout_index import EXAMPLE_SORTS, OPEN, Found, index_of
from trireme.tools.dashboard.rollouts import PagedTable
from trireme.tools.dashboard.runs import RunSet
from trireme.tools.rollouts import MASKED, TRAINED

LOOK_S = 2.0
AUDIT_S = 1800.0
HOLDS, FAILED = "Nothing was lost, and nothing was trained twice.", "The audit failed."
REASONS = ("#e5647a", "#f59e0b", "#ec4899", "#a3763d", "#c2410c", "#f0a8b3", "#64748b", "#a5adbf", "#8a93a5")
COLUMNS = {
    **{"env": "environment", "example": "example", "groups": "groups", "trained": "trained", "masked": "masked"},
    **{"dropped": "dropped", "first_reward": "first reward", "last_reward": "last reward", "mean": "mean reward"},
    **{"last_step": "last in step", "why": ""},
}


async def build(runs: RunSet) -> None:
    await FatesPage(runs).count()


class FatesPage:
    """Rollouts by fate, the audit, and what became of each example."""

    def __init__(self, runs: RunSet) -> None:
        self._runs = runs
        self._index = index_of(runs.main.path)
        self._index.keep_current()
        self._progress = self._index.progress()
        self._figures = ui.element("div").classes("tr-figures")
        with theme.card("Rollouts by fate", "Of each batch: trained on, masked, or dropped and why."):
            self._chart = Canvas().style("height: 240px; width: 100%")
        with theme.card("Audit", "Proves from the files that nothing was lost and nothing was trained twice."):
            self._button = ui.button("Audit this run", icon="fact_check", on_click=self._audit).props("outline no-caps")
            self._button.style("align-self: flex-start")
            self._verdict = ui.element("div").props("aria-live=polite").style("width: 100%")
        with ui.element("div").classes("tr-split"):
            with theme.card("Examples"):
                self._list = PagedTable(COLUMNS, EXAMPLE_SORTS, self._read, self._open, opens="example")
            self._one = ui.element("section").classes("tr-card tr-reading").props('aria-label="Example" tabindex=0')
        with self._one:
            ui.label("Choose an example to see what became of each of its groups.").classes("tr-soft")
        ui.timer(LOOK_S, self._look, immediate=False)

    async def _look(self) -> None:
        if (progress := self._index.look()) != self._progress:
            self._progress = progress
            await self.count()

    async def count(self) -> None:
        try:
            counted = await run.io_bound(lambda: (self._index.totals(), self._index.by_step()))
        except sqlite3.DatabaseError:  # the index is built again
            return
        if counted is None or self._figures.is_deleted:
            return
        totals, (steps, fates) = counted
        done, total = self._progress
        reason, often = next(iter(totals.dropped.items()), ("none", 0))
        of = f"of {totals.of:,} in the training sets" if totals.of else "have a fate"
        self._figures.clear()
        with self._figures:
            theme.figure("trained", f"{totals.trained:,}", "rollouts")
            theme.figure("masked", f"{totals.masked:,}", "in a batch, without tokens that count")
            theme.figure("dropped", f"{sum(totals.dropped.values()):,}", f"{reason}: {often:,}" if often else "none")
            theme.figure("open", f"{totals.open_groups:,}", "groups begun, in no batch yet")
            theme.figure("examples", f"{totals.examples:,}", of)
            if done < total:
                theme.figure("indexed", f"{done:,}", f"of {total:,} batches; the others follow")
        reasons = [name for name in fates if name not in (TRAINED, MASKED)]
        colors = {TRAINED: theme.PROCESSES["engine"], MASKED: theme.PROCESSES["orchestrator"]}
        colors |= {name: REASONS[place % len(REASONS)] for place, name in enumerate(reasons)}
        self._chart.draw(bar_chart(steps, fates, colors))
        await self._list.refresh()

    # examples

    def _read(self, **page: Any) -> Found:
        found = self._index.examples(**page)
        for row in found.rows:
            row |= {name: decimal(row[name]) for name in ("first_reward", "last_reward", "mean")}
            why = ["open now"] * row[OPEN] + [f"dropped for {row['why']}"] * bool(row["why"])
            row |= {"id": f"{row['env']}/{row['example']}", "why": ", ".join(why)}
        return found

    async def _open(self, row: dict[str, Any]) -> None:
        env, _, example = row["id"].rpartition("/")
        groups = await run.io_bound(self._index.groups_of, env, int(example))
        self._one.clear()
        with self._one:
            with theme.row():
                theme.heading(f"{env} · example {example}")
                ui.space()
                term = f'"env={env}" example={example}' if " " in env else f"env={env} example={example}"
                ui.link("Its rollouts", self._runs.link("/rollouts", q=term)).classes("tr-go")
            for group in groups or []:
                with theme.row():
                    ui.label(f"group {group['group']}").classes("tr-mono")
                    ui.label(group["fate"]).classes(f"tr-fate {group['fate']}")
                    ui.label(group_text(group)).classes("tr-small")

    async def _audit(self) -> None:
        self._button.disable()
        self._verdict.clear()
        with self._verdict:
            ui.label("Reading everything once …").classes("tr-soft")
        verdict, text = await audit(self._index.run)
        self._button.enable()
        self._verdict.clear()
        with self._verdict:
            ui.label(verdict).classes("tr-title tr-good" if verdict == HOLDS else "tr-title tr-bad")
            ui.label(text).classes("tr-mono tr-words")


def group_text(group: dict[str, Any]) -> str:
    """
    Example:
        step 74: 16 trained, rewards 0.000 to 1.000, mean 0.812
    """
    if group["step"] is None:
        return "begun, and in no batch yet"
    counts = ", ".join(f"{group[name]} {name}" for name in (TRAINED, MASKED, "dropped") if group[name])
    text = f"step {group['step']}: {counts}"
    if group["mean"] is not None:
        text += f", rewards {decimal(group['low'])} to {decimal(group['high'])}, mean {decimal(group['mean'])}"
    return text + (f" ({group['why']})" if group["why"] else "")


_one_audit = asyncio.Lock()  # for all browsers: each audit reads a whole run


async def audit(folder: Path) -> tuple[str, str]:
    """Run `trireme audit` in a process of its own, as it may take long. Return its verdict, and what it printed."""
    command = (sys.executable, "-m", "trireme.cli.trireme", "audit", str(folder))
    pipe = asyncio.subprocess.PIPE
    async with _one_audit:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=pipe, stderr=pipe, preexec_fn=partial(die_with_parent, os.getpid())
        )
        try:
            async with asyncio.timeout(AUDIT_S):
                out, err = await process.communicate()
        except TimeoutError:
            return FAILED, f"It took more than {AUDIT_S / 60:.0f} minutes. Run it in a terminal: trireme audit {folder}"
        finally:
            if process.returncode is None:  # it took too long, or the browser has left
                process.kill()
    verdict = {0: HOLDS, 1: "Contradictions between the files of the run."}.get(process.returncode or 0, FAILED)
    return verdict, (out or err).decode(errors="replace").strip() or f"It ended with exit code {process.returncode}."
