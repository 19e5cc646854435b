"""The rollouts of a run: searched, sorted, and read one beside the list."""

from __future__ import annotations

import sqlite3
from functools import cache
from pathlib import Path
from typing import Any

from nicegui import run, ui

from trireme.base.errors import ConfigError
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.indexing import Index, shared_indexes
from trireme.tools.dashboard.paged_list import PagedList, column
from trireme.tools.dashboard.reading import components_html, conversation_html, facts
from trireme.tools.dashboard.rollout_query import Query, query_of
from trireme.tools.dashboard.rollout_table import DROPPED, Found, RolloutTable, find_batches, name_of
from trireme.tools.dashboard.runs import RunSet
from trireme.tools.dashboard.token_view import LoadedRollout, load_rollout
from trireme.tools.rollouts import decimal

ROWS = 50  # of a page of the list
LOOK_S = 2.0
EXAMPLES = ("reward<0.5", "is:truncated", "is:failed", "-is:failed", "example=12", "stop~length")
HELP = (
    "Words are looked for in prompt and completion. `reward<0.5`, `step>=10`, `turns>1`, `tokens`, `advantage`, "
    "`group`, `rollout`, `env=name`, `example=12`, `stop~length`, `error~timeout`, `is:truncated`, `is:failed` "
    "(dropped), `is:flawed`; - in front turns a term round."
)


@cache
def css() -> str:
    return Path(__file__).with_name("rollouts.css").read_text()


async def build(runs: RunSet) -> None:
    chosen = runs.main
    assert chosen is not None
    ui.add_css(css())
    if not find_batches(chosen.paths.journal):
        theme.nothing("There is no batch yet.", "Rollouts are shown as soon as the first batch is in the journal.")
        return
    await RolloutsPage(runs, shared_indexes().of(chosen.path)).show()


COLUMNS = [
    column("step", "step"),
    column("env", "environment", align="left"),
    column("example", "example"),
    column("place", "rollout"),
    column("fate", "fate", align="left"),
    column("reward", "reward"),
    column("advantage", "advantage"),
    column("tokens", "tokens"),
    column("turns", "turns"),
    column("ended", "ended by", align="left", sortable=False),
    column("said", "said last", align="left", sortable=False),
]


def to_row(row: dict[str, Any]) -> dict[str, Any]:
    """As the list shows it."""
    return {
        "id": f"{row['step']}/{row['number']}",
        **{
            name: row[name] for name in ("step", "number", "env", "example", "place", "fate", "tokens", "turns", "said")
        },
        "reward": decimal(row["reward"]),
        "advantage": "-" if row["advantage"] is None else f"{row['advantage']:+.3f}",
        "ended": row["error"] or row["stop"],
    }


class RolloutsPage:
    def __init__(self, runs: RunSet, index: Index) -> None:
        assert runs.main is not None
        self._runs = runs
        self._index = index
        self._line = runs.query.get("q", "")
        self._step = _whole(runs.query.get("step"))
        self._number = _whole(runs.query.get("rollout"))
        self._single = RolloutTable(":memory:")  # of a step that the table does not have yet
        self._single_step: int | None = None
        self._asked = 0  # of several searches, and of several rollouts, the one that was asked for last counts
        self._wanted: tuple[int, int] | None = None

    async def show(self) -> None:
        with theme.card():
            self._build_controls()
        with ui.element("div").classes("tr-split"):
            with theme.card():
                self._build_list()
            self._reading = ui.element("section").classes("tr-card tr-reading").props('aria-label="Rollout" tabindex=0')
        self._note_progress()
        ui.timer(LOOK_S, self._look, immediate=False)
        await self._search()
        await self._open_first()

    # what is looked for

    def _build_controls(self) -> None:
        with ui.element("div").classes("tr-row"):
            self._input = ui.input("Search: words, reward<0.5, is:truncated …", value=self._line, on_change=self._typed)
            self._input.props("dense outlined clearable debounce=300 autocomplete=off").style(
                "flex: 1; min-width: 260px"
            )
            self._input.tooltip(HELP)
            self._step_field = ui.number("Step", value=self._step, min=0, precision=0, on_change=self._step_typed)
            self._step_field.props('dense outlined clearable debounce=300 placeholder="every"').style("width: 110px")
            for icon, label, by in (("chevron_left", "Step before", -1), ("chevron_right", "Next step", 1)):
                ui.button(icon=icon, on_click=lambda by=by: self._step_by(by)).props(
                    f'flat round dense aria-label="{label}"'
                )
        with ui.element("div").classes("tr-row"):
            self._said = ui.label().classes("tr-soft tr-small").props("aria-live=polite")
            ui.space()
            for line in EXAMPLES:
                ui.button(line, on_click=lambda line=line: self._add(line)).props("flat dense no-caps size=sm").classes(
                    "tr-mono"
                )

    def _add(self, term: str) -> None:
        """One of the examples: in, or out again."""
        terms = (self._input.value or "").split()
        terms = [word for word in terms if word != term] if term in terms else [*terms, term]
        self._input.set_value(" ".join(terms))

    async def _typed(self) -> None:
        self._line = self._input.value or ""
        await self._search_anew()

    async def _step_typed(self) -> None:
        value = self._step_field.value
        self._step = None if value is None else int(value)
        await self._search_anew()

    def _step_by(self, by: int) -> None:
        steps = find_batches(self._index.journal)
        if self._step is None:
            wanted = steps[-1] if by < 0 else steps[0]
        else:
            wanted = max(steps[0], min(steps[-1], self._step + by))
        self._step_field.set_value(wanted)

    async def _search_anew(self) -> None:
        self._list.page = 1
        await self._search()

    async def _search(self) -> None:
        self._asked += 1
        asked = self._asked
        try:
            query = query_of(self._line)
        except ConfigError as error:
            self._said.set_text(str(error))
            return
        found = await run.io_bound(self._find, query)
        if asked == self._asked and found is not None:
            self._show_list(found)
            self._remember()

    def _find(self, query: Query) -> Found:
        """In a thread."""
        if self._step is not None:
            query &= Query("step = ?", (self._step,))
        try:
            shown = self._list
            return self._table().search(
                query, sort=shown.sort, backwards=shown.backwards, limit=ROWS, offset=shown.offset
            )
        except sqlite3.DatabaseError:  # is made anew
            return Found([], 0, 0)

    def _table(self) -> RolloutTable:
        """That of the run; of one batch alone where the run's does not have it yet, or nothing yet."""
        table, wanted = self._index.table, self._step
        known = table.ask("SELECT 1 FROM batches WHERE step = ?1 OR ?1 IS NULL LIMIT 1", (wanted,))
        if known:
            return table
        wanted = max(find_batches(self._index.journal), default=None) if wanted is None else wanted
        if wanted is not None and self._single_step != wanted:
            self._single = RolloutTable(":memory:")
            if wanted in find_batches(self._index.journal):
                self._single.take(wanted, self._index.journal / name_of(wanted))
            self._single_step = wanted
        return self._single

    # the list

    def _build_list(self) -> None:
        self._list = PagedList(COLUMNS, length=ROWS, sort="step", backwards=True, turned=self._search)
        self._list.marks("chosen")
        self._list.draws("fate", "<span :class=\"'tr-fate ' + props.value\">{{ props.value }}</span>")
        self._list.opens("step", "read rollout", ["step", "number"], self._clicked)

    def _show_list(self, found: Found) -> None:
        self._list.show([to_row(row) for row in found.rows], found.total)
        self._mark()
        self._found = found
        self._note_progress()

    def _note_progress(self) -> None:
        found = getattr(self, "_found", None)
        done, total = self._index.progress()
        parts = [f"{found.total:,} rollout{'' if found.total == 1 else 's'}"] if found else []
        if done < total and self._step is None:
            parts.append(f"{done:,} of {total:,} batches are indexed, the others follow")
        if found and found.cut:
            parts.append(f"of {found.cut:,} long ones only beginning and end were searched")
        self._said.set_text(" · ".join(parts))
        self._progress = done, total

    async def _look(self) -> None:
        """While the table grows, what is found grows with it."""
        before = self._progress
        if self._index.progress() != before and self._step is None:
            await self._search()

    def _remember(self) -> None:
        """In the address, for those who share it or come back."""
        link = self._runs.link(
            "/rollouts", q=self._line or None, step=self._step, rollout=self._number if self._step is not None else None
        )
        ui.navigate.history.replace(link)

    # the one that is read

    async def _open_first(self) -> None:
        if self._step is not None and self._number is not None:
            await self._read(self._step, self._number)
        elif self._list.rows:
            await self._clicked(self._list.rows[0])
        else:
            with self._reading:
                ui.label("Nothing was found. Shorten the search, or leave the step empty for every step.")

    async def _clicked(self, row: dict[str, Any]) -> None:
        await self._read(int(row["step"]), int(row["number"]))

    def _mark(self) -> None:
        """The row of the one that is read."""
        wanted = "{}/{}".format(*self._wanted) if self._wanted else ""
        for row in self._list.rows:
            row["chosen"] = row["id"] == wanted
        self._list.update()

    async def _read(self, step: int, number: int) -> None:
        self._number, self._wanted = number, (step, number)
        self._mark()
        loaded = await run.io_bound(load_rollout, self._index.run, step, number)
        if self._wanted != (step, number):
            return
        dropped = next((row for row in self._list.rows if row["id"] == f"{step}/{number}"), None)
        self._reading.clear()
        with self._reading:
            if isinstance(loaded, LoadedRollout):
                self._draw(loaded, number)
            elif dropped and dropped["fate"] == DROPPED:
                _draw_dropped(dropped)
            else:
                theme.heading("This rollout cannot be shown.")
                ui.label(str(loaded)).classes("tr-soft")

    def _draw(self, loaded: LoadedRollout, number: int) -> None:
        rollout, record = loaded.rollout, loaded.record
        with ui.element("div").classes("tr-row"):
            theme.heading(f"{rollout.env} · example {rollout.example} · rollout {rollout.place}")
            ui.space()
            link = self._runs.link("/tokens", step=loaded.step, rollout=number)
            ui.link("Token by token", link).classes("tr-go")
        place = f"step {loaded.step} · group {rollout.group} · attempt {rollout.attempt} · " + " · ".join(facts(record))
        ui.label(place).classes("tr-soft tr-small")
        ui.html(components_html(record.metrics, record.row.reward), sanitize=False)
        self._draw_group(loaded, number)
        ui.html(conversation_html(record), sanitize=False)

    def _draw_group(self, loaded: LoadedRollout, number: int) -> None:
        ui.label(f"Rewards of its group of {len(loaded.group)}").classes("tr-part")
        with ui.element("div").classes("tr-mates"):
            for other, rollout in loaded.group:
                mate = (
                    ui.element("button").classes("tr-mate").props(f'aria-label="rollout {rollout.place} of the group"')
                )
                mate.props(f'aria-current="{str(other == number).lower()}"')
                mate.on("click", lambda other=other: self._read(loaded.step, other))
                with mate:
                    ui.label(decimal(rollout.reward, 2))


def _draw_dropped(row: dict[str, Any]) -> None:
    theme.heading(f"{row['env']} · example {row['example']} · rollout {row['place']}")
    ui.label("Dropped: it is not trained on, and the journal keeps only why.").classes("tr-soft")
    ui.label(row["ended"]).classes("tr-mono")


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
