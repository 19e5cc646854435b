"""The rollouts of a run: searched and sorted page by page, with one of them in full next to the list."""

from __future__ import annotations

import html
import math
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import run, ui

from trireme.base.errors import ConfigError
from trireme.base.safe_text import clean, decimal, shortened
from trireme.journal.message_text import as_text
from trireme.journal.records import Branch
from trireme.tools.conversation import Block, Message, blocks
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.pictures import pictures_html
from trireme.tools.dashboard.rollout_index import ROLLOUT_SORTS, Found, index_of
from trireme.tools.dashboard.runs import RunSet
from trireme.tools.dashboard.tokens import LoadedRollout, load_rollout, show_group
from trireme.tools.rollout_filters import SYNTAX
from trireme.tools.rollouts import DROPPED, Record

ROWS = 50  # of a page of the list
LOOK_S = 1.0  # between two looks at the index, while it grows
LONGEST = 20_000  # characters of a message that are shown
FOLDED = 1_000  # characters of instructions that are shown only when asked for
MOST_BRANCHES = 100  # of a rollout that are shown
MOST_PICTURES = 32  # of a message
ROLES = {"system", "developer", "user", "assistant", "tool"}
EXAMPLES = ("reward<0.5", "is:truncated", "is:failed", "-is:failed", "example=12", "stop~length")
COLUMNS = {
    **{"step": "step", "env": "environment", "example": "example", "rollout": "rollout", "fate": "fate"},
    **{"reward": "reward", "advantage": "advantage", "tokens": "tokens", "turns": "turns"},
    **{"ended": "ended by", "last_message": "last message"},
}


class PagedTable:
    """A table that is read page by page. Each row has an `id`; the column `env` is there once rows have several."""

    def __init__(
        self,
        columns: dict[str, str],
        sorts: tuple[str, ...],
        read: Callable[..., Found],
        open: Callable[[dict[str, Any]], Awaitable[None]],
        *,
        opens: str,
        backwards: bool = False,
        on_page: Callable[[Found], None] = lambda found: None,
    ) -> None:
        """
        Args:
            columns: labels by name.
            sorts: columns that can be sorted by.
            read: returns a page, called in a thread with `sort`, `backwards`, `limit` and `offset`. Where it raises
                sqlite3.DatabaseError, the rows that are shown stay.
            open: called with a row that was clicked.
            opens: the column that is a button, for the keyboard, and sorted by at first.
            on_page: called with each page that is shown, also after a click on a column.
        """
        self._read, self._on_page = read, on_page
        self._requests = 0
        self.rows: list[dict[str, Any]] = []
        self.page: dict[str, Any] = {"page": 1, "rowsPerPage": ROWS, "rowsNumber": 0}
        self.page |= {"sortBy": opens, "descending": backwards}
        self._columns = theme.columns(columns, sorts)
        few = [column for column in self._columns if column["name"] != "env"]
        self._table = ui.table(rows=[], columns=few, row_key="id", pagination=self.page).classes("tr-list")
        self._table.props(f'flat dense binary-state-sort :rows-per-page-options="[{ROWS}]"')
        self._table.props(":table-row-class-fn=\"row => row.chosen ? 'chosen' : ''\"")
        self._table.add_slot(
            f"body-cell-{opens}",
            '<q-td :props="props"><q-btn flat dense no-caps padding="0 6px" class="tr-open" :label="props.value" '
            ":aria-label=\"'open ' + props.row.id\" @click.stop=\"$parent.$emit('read', props.row)\" /></q-td>",
        )
        fate = '<q-td :props="props"><span :class="\'tr-fate \' + props.value">{{ props.value }}</span></q-td>'
        self._table.add_slot("body-cell-fate", fate)
        self._table.on("rowClick", lambda event: open(event.args[1]), [[], ["id"], []])
        self._table.on("read", lambda event: open(event.args), ["id"])
        self._table.on("request", self._turn)
        self._table.on_pagination_change(self._keep_page)

    def _keep_page(self) -> None:
        """Undo what a browser sends back when it mounts the table: the page as it was created, without rows."""
        self._table.pagination = dict(self.page)

    async def _turn(self, event: Any) -> None:
        wanted = event.args["pagination"]
        if wanted.get("sortBy"):
            self.page |= {"page": int(wanted["page"]), "sortBy": str(wanted["sortBy"])}
            self.page["descending"] = bool(wanted["descending"])
        await self.refresh()

    async def refresh(self, *, first_page: bool = False) -> None:
        """Read the page that is shown. Nothing changes where another request came meanwhile."""
        if first_page:
            self.page["page"] = 1
        self._requests += 1
        request, page = self._requests, dict(self.page)
        offset = (page["page"] - 1) * ROWS
        try:
            found = await run.io_bound(
                self._read, sort=page["sortBy"], backwards=page["descending"], limit=ROWS, offset=offset
            )
        except sqlite3.DatabaseError:  # the index is built again
            return
        if found is None or request != self._requests or self._table.is_deleted:
            return
        self.rows = found.rows
        self.page["rowsNumber"] = found.total
        self._table.pagination = dict(self.page)
        self._table.rows = found.rows
        if len({row["env"] for row in found.rows}) > 1:
            self._table.columns = self._columns
        self._table.update()
        self._on_page(found)

    def mark(self, id: str) -> None:
        for row in self.rows:
            row["chosen"] = row["id"] == id
        self._table.update()


async def build(runs: RunSet) -> None:
    page = RolloutsPage(runs)
    await page.refresh()
    await page.open_first()


class RolloutsPage:
    """The search, the list, and the rollout that is read."""

    def __init__(self, runs: RunSet) -> None:
        self._runs = runs
        self._index = index_of(runs.main.path)
        self._index.keep_current()
        self._number = whole_number(runs.query.get("rollout"))
        self._progress = self._index.progress()
        with theme.card():
            with theme.row():
                self._input = ui.input("Search: words, reward<0.5, is:truncated …", value=runs.query.get("q", ""))
                self._input.props("dense outlined clearable debounce=300 autocomplete=off")
                with self._input.style("flex: 1; min-width: 260px"):
                    ui.tooltip(f"{SYNTAX}\n\nOf long rollouts, beginning and end are searched.").classes(
                        "tr-mono tr-words"
                    )
                step = whole_number(runs.query.get("step"))
                self._step_field = ui.number("Step", value=step, min=0, precision=0)
                self._step_field.props('dense outlined clearable debounce=300 placeholder="every"').style(
                    "width: 110px"
                )
                for field in (self._input, self._step_field):
                    field.on_value_change(lambda: self.refresh(first_page=True))
            with theme.row():
                self._summary = theme.soft().props("aria-live=polite")
                ui.space()
                for term in EXAMPLES:
                    button = ui.button(term, on_click=lambda term=term: self._input.set_value(term))
                    button.props("flat dense no-caps size=sm").classes("tr-mono")
        with ui.element("div").classes("tr-split"):
            with theme.card():
                self._list = PagedTable(
                    COLUMNS,
                    ROLLOUT_SORTS,
                    self._read,
                    self._open,
                    opens="step",
                    backwards=True,
                    on_page=self._summarize,
                )
            self._reading = ui.element("section").classes("tr-card tr-reading").props('aria-label="Rollout" tabindex=0')
        ui.timer(LOOK_S, self._look, immediate=False)

    @property
    def _step(self) -> int | None:
        """The only step whose rollouts are listed, where there is one."""
        return None if self._step_field.value is None else int(self._step_field.value)

    async def refresh(self, *, first_page: bool = False) -> None:
        try:
            await self._list.refresh(first_page=first_page)
        except ConfigError as error:
            self._summary.set_text(str(error))

    def _summarize(self, found: Found) -> None:
        done, total = self._progress
        more = f" · {done:,} of {total:,} batches are indexed, the others follow" if done < total else ""
        self._summary.set_text(f"{found.total:,} rollout{'' if found.total == 1 else 's'}{more}")
        self._list.mark(f"{self._step if self._step is not None else ''}/{self._number}")
        rollout = self._number if self._step is not None else None
        link = self._runs.link("/rollouts", q=self._input.value or None, step=self._step, rollout=rollout)
        ui.navigate.history.replace(link)  # an address that can be shared

    def _read(self, **page: Any) -> Found:
        in_step = "" if self._step is None else f"step={self._step} "
        found = self._index.search(in_step + (self._input.value or ""), **page)
        for row in found.rows:
            advantage = row["advantage"]
            row |= {"id": f"{row['step']}/{row['number']}", "ended": row["error"] or row["stop"]}
            row |= {"reward": decimal(row["reward"]), "advantage": "-" if advantage is None else f"{advantage:+.3f}"}
        return found

    async def _look(self) -> None:
        if (progress := self._index.look()) != self._progress:
            self._progress = progress
            was_empty = not self._list.rows
            await self.refresh()
            if was_empty and self._number is None:
                await self.open_first()

    async def open_first(self) -> None:
        if self._step is not None and self._number is not None:
            await self._open({"id": f"{self._step}/{self._number}"})
        elif self._list.rows:
            await self._open(self._list.rows[0])
        else:
            with self._reading:
                ui.label("Nothing was found. Shorten the search, or leave the step empty for every step.")

    async def _open(self, listed: dict[str, Any]) -> None:
        self._list.mark(listed["id"])
        step, self._number = map(int, listed["id"].split("/"))
        self._opened = listed["id"]
        loaded = await run.io_bound(load_rollout, self._index.run, step, self._number)
        if self._opened != listed["id"] or self._reading.is_deleted:
            return
        self._reading.clear()
        known = next((each for each in self._list.rows if each["id"] == listed["id"]), None)
        with self._reading:
            if isinstance(loaded, LoadedRollout):
                record, row = loaded.record, loaded.record.row
                with theme.row():
                    theme.heading(f"{row.env} · example {row.example} · rollout {row.rollout}")
                    ui.space()
                    ui.link("Token by token", self._runs.link("/tokens", step=step, rollout=row.number)).classes(
                        "tr-go"
                    )
                place = [f"step {step}", f"group {row.group}", f"attempt {row.attempt}"]
                theme.soft(" · ".join(place + record.facts))
                ui.html(components_html(record.metrics, row.reward), sanitize=False)
                ui.label(f"Rewards of its group of {len(loaded.group)}").classes("tr-part")
                show_group(loaded, lambda number: self._open({"id": f"{step}/{number}"}))
                ui.html(conversation_html(record, self._runs.main.name), sanitize=False)
            elif known and known["fate"] == DROPPED:
                theme.heading(f"{known['env']} · example {known['example']} · rollout {known['rollout']}")
                ui.label("Dropped: it is not trained on, and the journal keeps only why.").classes("tr-soft")
                ui.label(known["ended"]).classes("tr-mono")
            else:
                theme.heading("This rollout cannot be shown.")
                ui.label(str(loaded)).classes("tr-soft")


def whole_number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and len(text) < 12 else None


# HTML of a rollout. Text of a model or a tool is escaped, and never becomes markup.


def conversation_html(record: Record, run: str) -> str:
    """
    Args:
        run: the name of its run, for the addresses of pictures.
    """
    if record.rollout and len(record.rollout.branches) > 1:
        parts = [_tree_html(record, record.rollout.branches, run)]
    else:
        parts = []
        for title, messages in (("Prompt", record.prompt), ("Completion", record.completion)):
            parts += [f'<h3 class="tr-part">{title}</h3>'] if messages else []
            parts += [_block_html(block, run) for block in blocks(messages)]
    rest: dict[str, Any] = {
        "answer": record.answer,
        **(_program_texts(record.info) or {"info": record.info}),
        **record.more,
    }
    parts += [_message_html("other", name, as_text(value)) for name, value in rest.items() if value]
    return "".join(parts)


def _tree_html(record: Record, all_branches: list[Branch], run: str) -> str:
    """Return the conversations of an agent program, each where it leaves the one that it has most in common with."""
    branches = all_branches[:MOST_BRANCHES]
    wholes: list[list[Message]] = []
    children: dict[int, list[int]] = {}
    for number, branch in enumerate(branches):
        parent = branch.parent if branch.parent < number else -1
        shared = wholes[parent][: branch.place] if parent >= 0 else []
        wholes.append(shared + branch.messages if branch.messages else record.prompt + record.completion)
        children.setdefault(max(parent, -1), []).append(number)

    def branch_html(number: int) -> str:
        branch, whole = branches[number], wholes[number]
        at = branch.place if branch.parent >= 0 else 0
        parts: list[str] = []
        before = len(blocks(whole[:at]))
        for child in [*sorted(children.get(number, ()), key=lambda child: branches[child].place), None]:
            found = blocks(whole if child is None else whole[: branches[child].place])
            parts += [_block_html(block, run) for block in found[before:]]
            before = max(before, len(found))
            parts += [branch_html(child)] if child is not None else []
        counts = {"turn": branch.num_turns, "tool": branch.num_tools}
        facts = [branch.why, *(f"{count} {noun}{'s' * (count != 1)}" for noun, count in counts.items())]
        facts.append(f"sample {branch.sample}" if branch.sample >= 0 else "not trained on")
        heading = _escaped(f"Conversation {number}: {', '.join(facts)}")
        is_open = " open" if number == 0 or not branch.messages else ""
        return f'<details class="tr-branch"{is_open}><summary>{heading}</summary>{"".join(parts)}</details>'

    left_out = len(all_branches) - len(branches)
    more = f"<p>and {left_out:,} more conversations</p>" if left_out else ""
    return "".join(map(branch_html, children.get(-1, ()))) + more


def _program_texts(info: dict[str, Any]) -> dict[str, Any]:
    """Return how an agent program ended, with headings; nothing where none played."""
    if not {"exit_code", "output", "files"} <= info.keys() or not isinstance(info["files"], dict):
        return {}
    ended = "ended by its time limit" if info["exit_code"] is None else f"exit code {info['exit_code']}"
    return {
        "files written": "\n".join(f"{path}  ({size} bytes)" for path, size in info["files"].items()),
        f"program: {ended}, after {info.get('seconds', '?')} s; end of its output": str(info["output"]) or "(nothing)",
        **{name: value for name, value in info.items() if name not in ("exit_code", "output", "files", "seconds")},
    }


def _block_html(block: Block, run: str) -> str:
    role = block.role if block.role in ROLES else "other"
    pictures = pictures_html(block.pictures[:MOST_PICTURES], run)
    shown = _message_html(f"{role} {block.kind}", block.heading, block.text, pictures)
    if role in ("system", "developer") and len(block.text) > FOLDED:
        return f"<details><summary>{_escaped(block.role)}: {len(block.text):,} characters</summary>{shown}</details>"
    return shown


def _message_html(classes: str, heading: str, text: str, below_html: str = "") -> str:
    return (
        f'<div class="tr-said {classes}"><div class="tr-who">{_escaped(heading)}</div>'
        f'<div class="tr-words">{_escaped(text)}</div>{below_html}</div>'
    )


def _escaped(text: str) -> str:
    return html.escape(clean(shortened(text, LONGEST)))


def components_html(metrics: dict[str, float], reward: float | None) -> str:
    """Return the reward and its components, each with a bar in proportion to the largest."""
    values = ({} if reward is None else {"reward": reward}) | metrics
    largest = max((abs(value) for value in values.values() if math.isfinite(value)), default=0.0) or 1.0
    parts = []
    for name, value in values.items():
        width = 100 * abs(value) / largest if math.isfinite(value) else 0
        bar = f'<span class="{"bad" if value < 0 else "good"}" style="width:{width:.0f}%"></span>'
        parts.append(f'<span>{_escaped(name)}</span><span class="tr-track">{bar}</span>')
        parts.append(f'<span class="tr-mono">{decimal(value)}</span>')
    return f'<div class="tr-components">{"".join(parts)}</div>'
