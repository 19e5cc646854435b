"""How the chosen runs stand: figures, what is waited for now, reward and time at once, what differs, all other runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from nicegui import run as threads
from nicegui import ui

from trireme.tools.dashboard import theme
from trireme.tools.dashboard.canvas import Canvas
from trireme.tools.dashboard.curves import Frame, curve
from trireme.tools.dashboard.glance import Glance, ago, differences, figures, glance
from trireme.tools.dashboard.pictures import Line, line_chart
from trireme.tools.dashboard.runs import RunFolder, RunSet
from trireme.tools.dashboard.warnings_page import warning

MOST_WARNINGS = 3
MOST_DIFFERENCES = 60
STEP_PARTS = {
    "time/forward_backward": ("train", "train"),
    "time/optimizer": ("optimizer", "evaluate"),
    "time/publish": ("send weights", "transfer"),
    "time/confirm": ("wait until they are confirmed", "save"),
    "time/wait_for_batch": ("wait for a batch", "wait"),
}


async def build(runs: RunSet) -> None:
    page = Overview(runs)
    await page.renew()
    runs.watch(page.renew)


class Overview:
    """The first of the chosen runs in full, the others beside it."""

    def __init__(self, runs: RunSet) -> None:
        assert runs.main is not None
        self.runs = runs
        self.run = runs.main
        self._figures = ui.element("div").classes("tr-figures")
        self._now = ui.element("div").classes("tr-charts")
        self._warnings = ui.element("div").classes("tr-charts")
        self._charts: dict[str, Canvas] = {}
        self._pictures = (
            ui.element("div")
            .classes("tr-grid")
            .style("grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr))")
        )
        self._compared = ui.element("div").classes("tr-charts")
        self._others = ui.element("div").classes("tr-charts")
        self._listed: list[str] = []

    async def renew(self) -> None:
        await threads.io_bound(self.run.signs.refresh)
        if self._figures.is_deleted:
            return
        self._show_figures()
        self._show_now()
        self._show_warnings()
        self._show_pictures()
        self._show_differences()
        await self._show_others()

    def _show_figures(self) -> None:
        self._figures.clear()
        with self._figures:
            for figure in figures(self.run):
                theme.figure(*figure)

    def _show_now(self) -> None:
        self._now.clear()
        with self._now, theme.card("Now"):
            for line in _standing(self.run):
                ui.label(line)

    def _show_warnings(self) -> None:
        lasting = [finding for finding in self.run.signs.findings() if finding.lasts]
        self._warnings.clear()
        with self._warnings:
            for finding in lasting[:MOST_WARNINGS]:
                warning(self.runs, finding)

    def _show_pictures(self) -> None:
        self._picture("Reward of the batches", self._lines("reward/mean") or self._lines("loss"))
        held_out = sorted({name for run in self.runs.chosen for name in run.columns.names() if _is_held_out(name)})
        several = len(held_out) > 1
        lines = [line for name in held_out for line in self._lines(name, _env_of(name) if several else "")]
        self._picture("Reward of held-out examples", lines)
        self._picture("Where the seconds of a step go", self._parts(), stacked=True)
        self._picture("Tokens a second", self._lines("perf/tokens_per_s"))

    def _picture(self, title: str, lines: Sequence[Line], *, stacked: bool = False) -> None:
        if not lines:
            return
        options = line_chart(lines, Frame())
        if stacked:
            _stack(options)
        if title not in self._charts:
            with self._pictures, theme.card(title):
                self._charts[title] = Canvas().classes("tr-chart")
        self._charts[title].draw(options)

    def _lines(self, name: str, about: str = "") -> list[Line]:
        return [
            Line(f"{run.name} {about}".strip(), theme.run_color(place), curve(run.columns, name, Frame()))
            for place, run in enumerate(self.runs.chosen)
            if len(run.columns.series(name).steps)
        ]

    def _parts(self) -> list[Line]:
        columns = self.run.columns
        return [
            Line(said, theme.ACTIVITIES[color], curve(columns, name, Frame(points=300)))
            for name, (said, color) in STEP_PARTS.items()
            if len(columns.series(name).steps)
        ]

    def _show_differences(self) -> None:
        self._compared.clear()
        if len(self.runs.chosen) < 2:
            return
        rows = differences(self.runs.chosen)
        with self._compared, theme.card("What differs", "of the configurations of the chosen runs"):
            if not rows:
                ui.label("Nothing but where they are.").classes("tr-soft")
            else:
                _table(["key", *(run.name for run in self.runs.chosen)], [[key, *values] for key, values in rows])
            if len(rows) > MOST_DIFFERENCES:
                ui.label(f"{len(rows) - MOST_DIFFERENCES} more").classes("tr-soft")

    async def _show_others(self) -> None:
        """Only where runs have come or gone: hundreds of files are looked into for it."""
        library = self.runs.library.runs()
        names = [run.name for run in library]
        if len(library) < 2 or names == self._listed:
            return
        self._listed = names
        glances = await threads.io_bound(lambda: [glance(run) for run in library])
        if glances is None or self._others.is_deleted:
            return
        self._others.clear()
        note = f"{len(library)}; click on one to look at it, or choose several above"
        with self._others, theme.card("All runs", note):
            self._list(glances)

    def _list(self, glances: Sequence[Glance]) -> None:
        columns: list[dict[str, Any]] = [
            {"name": "name", "label": "Run", "field": "name", "align": "left", "sortable": True},
            {"name": "step", "label": "Steps", "field": "step", "sortable": True},
            {"name": "reward", "label": "Newest reward", "field": "reward", "sortable": True},
            {"name": "changed", "label": "Last written", "field": "changed", "sortable": True},
            {"name": "ago", "label": "", "field": "ago", "align": "left"},
        ]
        table = ui.table(rows=[_row(one) for one in glances], columns=columns, row_key="name", pagination=20)
        table.classes("tr-plain").props("flat dense")
        table.add_slot(
            "body-cell-name",
            '<q-td :props="props"><a href="#" @click.prevent="$parent.$emit(\'look\', props.row.name)">'
            "{{ props.row.name }}</a></q-td>",
        )
        table.on("look", lambda event: self._look_at(str(event.args)))

    def _look_at(self, name: str) -> None:
        if run := self.runs.library.named(name):
            ui.navigate.to(RunSet(self.runs.library, [run]).link("/"))


def _is_held_out(name: str) -> bool:
    return (name.startswith("eval/") and name.endswith("/reward")) or name == "validation/loss"


def _env_of(name: str) -> str:
    return name.removeprefix("eval/").removesuffix("/reward")


def _row(one: Glance) -> dict[str, Any]:
    return {
        "name": one.name,
        "step": one.step,
        "reward": None if one.reward is None else round(one.reward, 4),
        "changed": datetime.fromtimestamp(one.changed_s).strftime("%Y-%m-%d %H:%M") if one.changed_s else "",
        "ago": ago(one.changed_s),
    }


def _table(head: list[str], rows: list[list[str]]) -> None:
    with ui.element("table").classes("tr-table"):
        with ui.element("tr"):
            for name in head:
                with ui.element("th"):
                    ui.label(name)
        for row in rows[:MOST_DIFFERENCES]:
            with ui.element("tr"):
                for place, cell in enumerate(row):
                    with ui.element("td").classes("tr-mono" if place == 0 else ""):
                        ui.label(cell)


def _stack(options: dict[str, Any]) -> None:
    for series in options["series"]:
        series |= {"stack": "seconds", "areaStyle": {"opacity": 0.55}, "showSymbol": False}
        series["lineStyle"]["width"] = 0.5
    options["yAxis"] |= {"scale": False, "max": _usual(options["series"])}
    options["tooltip"]["order"] = "seriesDesc"


def _usual(series: Sequence[dict[str, Any]]) -> float | None:
    """Where the picture ends: the first step, with the start in it, must not flatten all others."""
    sums: dict[float, float] = {}
    for one in series:
        for x, y in one["data"]:
            sums[x] = sums.get(x, 0.0) + (y or 0.0)
    ordered = sorted(sums.values())
    usual = 1.5 * ordered[int(0.95 * (len(ordered) - 1))] if ordered else 0.0
    return float(f"{usual:.2g}") if usual and ordered[-1] > usual else None


def _standing(run: RunFolder) -> list[str]:
    """What it waits for, in the words of its orchestrator; where nobody answers, what is known of it."""
    status = run.status()
    if status is None:
        return _at_rest(run)
    weights = f"weights of version {status.version}" if status.version >= 0 else "no weights yet"
    state = (
        f"The orchestrator is {status.state}: batch {status.batch}, {weights}, {status.in_flight} rollouts in flight."
    )
    lines = [state]
    lines += [f"Waits: {wait.text}" for wait in status.waits] or ["Nobody waits for anything for long."]
    return lines + [
        f"Engine {engine.url}: {engine.state}" + (f", version {engine.version}" if engine.version is not None else "")
        for engine in status.engines
    ]


def _at_rest(run: RunFolder) -> list[str]:
    changed = ago(glance(run).changed_s)
    words = {
        "not there yet": f"{run.path} is not there yet. It is shown as soon as it is.",
        "starting": "Its processes are coming up: the logs say how far they are.",
        "running": "Its launcher is at work; the orchestrator does not answer at the moment.",
        "finished": f"All steps are trained. Last written to {changed}.",
        "stopped": f"Nobody is at work on it. Last written to {changed}; `--resume` goes on with it.",
        "not started": f"It has not reported anything. Last written to {changed}.",
    }
    return [words.get(run.state(), f"Last written to {changed}.")]
