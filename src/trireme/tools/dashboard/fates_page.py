"""The fate of every example, and whether the run's files agree: counted from the journal, and audited when asked."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nicegui import run, ui

from trireme.base.processes import die_with_parent
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.canvas import Canvas
from trireme.tools.dashboard.example_fates import Totals, by_step, examples, groups_of, totals
from trireme.tools.dashboard.indexing import Index, shared_indexes
from trireme.tools.dashboard.paged_list import PagedList, column
from trireme.tools.dashboard.rollout_table import MASKED, TRAINED, find_batches
from trireme.tools.dashboard.rollouts_page import css
from trireme.tools.dashboard.runs import RunSet
from trireme.tools.rollouts import decimal

ROWS = 25
LOOK_S = 2.0
AUDIT_S = 1800.0
MOST_FINDINGS = 50
REASONS = ("#e5647a", "#f59e0b", "#ec4899", "#a3763d", "#c2410c", "#f0a8b3", "#64748b", "#a5adbf", "#8a93a5")


async def build(runs: RunSet) -> None:
    chosen = runs.main
    assert chosen is not None
    ui.add_css(css())
    if not find_batches(chosen.paths.journal):
        theme.nothing("There is no batch yet.", "Fates are shown as soon as the first batch is in the journal.")
        return
    await FatesPage(runs, shared_indexes().of(chosen.path)).show()


class Counted:
    """What is drawn, read in a thread."""

    def __init__(self, index: Index) -> None:
        self.totals: Totals = totals(index.table)
        self.by_step = by_step(index.table)


COLUMNS = [
    column("env", "environment", align="left"),
    column("example", "example"),
    column("groups", "groups"),
    column("trained", "trained"),
    column("masked", "masked"),
    column("dropped", "dropped"),
    column("first_reward", "first reward"),
    column("last_reward", "last reward"),
    column("mean", "mean reward"),
    column("last_step", "last in step"),
    column("why", "", align="left", sortable=False),
]


def to_row(row: dict[str, Any]) -> dict[str, Any]:
    rewards = {name: decimal(row[name]) for name in ("first_reward", "last_reward", "mean")}
    why = filter(None, ("open now" if row["open"] else "", f"dropped for {row['why']}" if row["why"] else ""))
    return row | rewards | {"id": f"{row['env']}/{row['example']}", "why": ", ".join(why)}


class FatesPage:
    def __init__(self, runs: RunSet, index: Index) -> None:
        self._runs = runs
        self._index = index

    async def show(self) -> None:
        self._progress = self._index.progress()
        self._figures = ui.element("div").classes("tr-figures")
        with theme.card("Rollouts by fate", "Of each batch: trained on, masked, or dropped and why."):
            self._chart = Canvas(_chart([], {})).style("height: 240px; width: 100%")
        with theme.card("Audit", "Proves from the files that nothing was lost and nothing was trained twice."):
            self._button = ui.button("Audit this run", icon="fact_check", on_click=self._audit).props("outline no-caps")
            self._button.style("align-self: flex-start")
            self._verdict = ui.element("div").props("aria-live=polite").style("width: 100%")
        with ui.element("div").classes("tr-split"):
            with theme.card("Examples"):
                self._build_list()
            self._one = ui.element("section").classes("tr-card tr-reading").props('aria-label="Example" tabindex=0')
        with self._one:
            ui.label("Choose an example to see what became of each of its groups.").classes("tr-soft")
        ui.timer(LOOK_S, self._look, immediate=False)
        await self._count()

    async def _look(self) -> None:
        if (progress := self._index.progress()) != self._progress:
            self._progress = progress
            await self._count()

    async def _count(self) -> None:
        with suppress(sqlite3.DatabaseError):  # is made anew
            counted = await run.io_bound(Counted, self._index)
            if counted is not None:
                self._draw_counted(counted)
                await self._search()

    def _draw_counted(self, counted: Counted) -> None:
        self._draw_figures(counted.totals)
        self._chart.draw(_chart(*counted.by_step))

    def _draw_figures(self, found: Totals) -> None:
        done, total = self._progress
        self._figures.clear()
        with self._figures:
            theme.figure("trained", f"{found.trained:,}", "rollouts")
            theme.figure("masked", f"{found.masked:,}", "in a batch, without tokens that count")
            reason, often = next(iter(found.dropped.items()), ("none", 0))
            theme.figure("dropped", f"{sum(found.dropped.values()):,}", f"{reason}: {often:,}" if often else "none")
            theme.figure("open", f"{found.open_groups:,}", "groups begun, in no batch yet")
            of = f"of {found.of:,} in the training sets" if found.of else "have a fate"
            theme.figure("examples", f"{found.examples:,}", of)
            if done < total:
                theme.figure("indexed", f"{done:,}", f"of {total:,} batches; the others follow")

    # examples

    def _build_list(self) -> None:
        self._list = PagedList(COLUMNS, length=ROWS, sort="example", backwards=False, turned=self._search)
        self._list.opens("example", "fate of example", ["env", "example"], self._read)

    async def _search(self) -> None:
        table, shown = self._index.table, self._list
        with suppress(sqlite3.DatabaseError):  # is made anew
            found = await run.io_bound(
                examples, table, sort=shown.sort, backwards=shown.backwards, limit=ROWS, offset=shown.offset
            )
            if found is not None:
                shown.show([to_row(row) for row in found.rows], found.total)

    async def _read(self, row: dict[str, Any]) -> None:
        env, example = str(row["env"]), int(row["example"])
        groups = await run.io_bound(groups_of, self._index.table, env, example)
        self._one.clear()
        with self._one:
            with ui.element("div").classes("tr-row"):
                theme.heading(f"{env} · example {example}")
                ui.space()
                term = f'"env={env}" example={example}' if " " in env else f"env={env} example={example}"
                ui.link("Its rollouts", self._runs.link("/rollouts", q=term)).classes("tr-go")
            for group in groups or []:
                _draw_group(group)

    # the audit

    async def _audit(self) -> None:
        """In a process of its own, as it may take long."""
        self._button.disable()
        self._verdict.clear()
        with self._verdict:
            ui.label("Reading everything once …").classes("tr-soft")
        report = await audit(self._index.run)
        self._button.enable()
        self._verdict.clear()
        with self._verdict:
            draw_audit(report)


_auditing = asyncio.Lock()  # one audit at a time for all browsers: each reads a whole run


async def audit(folder: Path) -> dict[str, Any] | str:
    """Return the report of `trireme audit`; its words where it could not be made, or took too long."""
    async with _auditing:
        return await _audit(folder)


async def _audit(folder: Path) -> dict[str, Any] | str:
    command = (sys.executable, "-m", "trireme.cli.trireme", "audit", str(folder), "--json")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdout=pipe, stderr=pipe, preexec_fn=partial(die_with_parent, os.getpid())
    )
    try:
        async with asyncio.timeout(AUDIT_S):
            out, err = await process.communicate()
        report = json.loads(out)
    except TimeoutError:
        return f"it took more than {AUDIT_S / 60:.0f} minutes. In a terminal it takes its time: trireme audit {folder}"
    except ValueError:
        return err.decode(errors="replace").strip() or f"it ended with {process.returncode}"
    finally:
        if process.returncode is None:  # too late, or nobody looks any more
            process.kill()
    return report


def draw_audit(report: dict[str, Any] | str) -> None:
    if isinstance(report, str):
        ui.label(f"The audit could not be made: {report}").classes("tr-bad")
        return
    number, summary = report["num_contradictions"], report["summary"]
    verdict = "Nothing was lost, and nothing was trained twice." if report["holds"] else f"Contradictions: {number:,}."
    ui.label(verdict).classes("tr-title tr-good" if report["holds"] else "tr-title tr-bad")
    ui.label(
        f"{summary['batches']:,} batches, {summary['trained']:,} rollouts trained, {summary['dropped']:,} dropped, "
        f"{summary['open_groups']:,} groups open, {summary['trained_tokens']:,} trained tokens, "
        f"{summary['versions_confirmed']:,} versions confirmed by digest."
    ).classes("tr-soft tr-small")
    for note in report["notes"]:
        ui.label(f"Note: {note}").classes("tr-small")
    for found in report["contradictions"][:MOST_FINDINGS]:
        with ui.element("div").classes("tr-said tool"):
            ui.label(found["found"])
            ui.label(f"expected: {found['expected']}").classes("tr-soft tr-small")
            ui.label(found["meaning"]).classes("tr-soft tr-small")
    if number > MOST_FINDINGS:
        ui.label(f"and {number - MOST_FINDINGS:,} more: trireme audit --all").classes("tr-soft")


def _draw_group(group: dict[str, Any]) -> None:
    """
    Example:
        group 593   trained   step 74: 16 trained, rewards 0.000 to 1.000, mean 0.812
    """
    with ui.element("div").classes("tr-row"):
        ui.label(f"group {group['grp']}").classes("tr-mono")
        ui.label(group["fate"]).classes(f"tr-fate {group['fate']}")
        ui.label(_told(group)).classes("tr-small")


def _told(group: dict[str, Any]) -> str:
    if group["step"] is None:
        return "begun, and in no batch yet"
    counts = ", ".join(f"{group[name]} {name}" for name in (TRAINED, MASKED, "dropped") if group[name])
    text = f"step {group['step']}: {counts}"
    if group["mean"] is not None:
        text += f", rewards {decimal(group['low'])} to {decimal(group['high'])}, mean {decimal(group['mean'])}"
    return text + (f" ({group['why']})" if group["why"] else "")


def _chart(steps: list[int], fates: dict[str, list[int]]) -> dict[str, Any]:
    reasons = [name for name in fates if name not in (TRAINED, MASKED)]
    colours = {TRAINED: theme.PROCESSES["engine"], MASKED: theme.PROCESSES["orchestrator"]}
    colours |= {name: REASONS[place % len(REASONS)] for place, name in enumerate(reasons)}
    axis = {"axisLine": {"lineStyle": {"color": theme.QUIET}}, "splitLine": {"lineStyle": {"opacity": 0.15}}}
    return {
        "animation": False,
        "grid": {"left": 54, "right": 16, "top": 34, "bottom": 54},
        "legend": {"textStyle": {"color": theme.QUIET}, "top": 2, "type": "scroll"},
        "tooltip": {"trigger": "axis", "axisPointer": {"type": "shadow"}, "renderMode": "richText"},
        "dataZoom": [{"type": "inside"}, {"type": "slider", "height": 16, "bottom": 6}],
        "xAxis": {"type": "category", "data": steps, **axis},
        "yAxis": {"type": "value", **axis},
        "series": [
            {"name": name, "type": "bar", "stack": "fates", "data": values, "color": colours[name], "barCategoryGap": 0}
            for name, values in fates.items()
        ],
    }
