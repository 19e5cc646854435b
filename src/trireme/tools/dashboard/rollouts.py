"""The rollouts of a run: searched and sorted page by page, with one of them in full next to the list."""

from __future__ import annotations

import html
import re
import sqlite3
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from fastapi import FastAPI, Response
from nicegui import run, ui

from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.base.safe_text import clean, decimal, shortened
from trireme.journal.message_text import as_text
from trireme.journal.records import Branch
from trireme.tools.conversation import Block, Message, blocks
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.rollout_index import ROLLOUT_SORTS, Found, index_of
from trireme.tools.dashboard.runs import Library, RunSet
from trireme.tools.dashboard.tokens import LoadedRollout, load_rollout, show_group
from trireme.tools.record_differences import counted
from trireme.tools.rollout_filters import SYNTAX
from trireme.tools.rollouts import DROPPED, Record

ROWS = 50  # rollouts on a page of the list
LOOK_S = 1.0  # seconds between two looks at the index, while it grows
LONGEST = 20_000  # characters of a message that are shown
FOLDED = 1_000  # characters of instructions that are shown only when asked for
MOST_BRANCHES = 100  # number of a rollout's conversations that are shown
MOST_PICTURES = 32  # number of a message's pictures that are shown
ROLES = {"system", "developer", "user", "assistant", "tool"}
COLUMNS = {
    **{"step": "step", "env": "environment", "example": "example", "rollout": "rollout", "fate": "fate"},
    **{"reward": "reward", "advantage": "advantage", "tokens": "tokens", "turns": "turns"},
    **{"ended": "ended by", "last_message": "last message"},
}
OPENING_CELL = """<q-td :props="props">
  <q-btn flat dense no-caps padding="0 6px" class="tr-open" :label="props.value" :aria-label="'open ' + props.row.id"
    @click.stop="$parent.$emit('read', props.row)" />
</q-td>"""
"""Cell of a table that opens its row, also by the keyboard."""
FATE_CELL = '<q-td :props="props"><span :class="\'tr-fate \' + props.value">{{ props.value }}</span></q-td>'
PICTURES = "/pictures"  # route
PICTURE_HEADERS = {"cache-control": "private, max-age=31536000, immutable"}  # a digest has one picture


async def build(runs: RunSet) -> None:
    page = RolloutsPage(runs)
    await page.refresh()
    await page.open_first()


class RolloutsPage:
    """The search, the list, which is read page by page, and the rollout that is read."""

    def __init__(self, runs: RunSet) -> None:
        self._runs = runs
        self._index = index_of(runs.main.path)
        self._index.keep_current()
        self._progress = self._index.progress()

        self._opened = runs.query.get("rollout", "")  # STEP/NUMBER of the rollout that is read
        self._rows: list[dict[str, Any]] = []
        self._num_requests = 0
        self._page: dict[str, Any] = {"page": 1, "rowsPerPage": ROWS, "rowsNumber": 0}
        self._page |= {"sortBy": "step", "descending": True}
        # the search
        with theme.card():
            self._input = ui.input("Search: words, reward<0.5, is:truncated, step=3 …", value=runs.query.get("q", ""))
            self._input.props("dense outlined clearable debounce=300 autocomplete=off").style("width: 100%")
            self._input.on_value_change(lambda: self.refresh(first_page=True))
            with self._input:
                syntax = f"{SYNTAX}\n\nOf long rollouts, beginning and end are searched."
                ui.tooltip(syntax).classes("tr-mono tr-words")
            self._summary = theme.soft().props("aria-live=polite")
        # the list, next to the rollout that is read
        with ui.element("div").classes("tr-split"):
            with theme.card():
                columns = theme.columns(COLUMNS, ROLLOUT_SORTS)
                self._table = ui.table(rows=[], columns=columns, row_key="id", pagination=self._page)
                self._table.classes("tr-list").props(f'flat dense binary-state-sort :rows-per-page-options="[{ROWS}]"')
                self._table.props(":table-row-class-fn=\"row => row.chosen ? 'chosen' : ''\"")
                self._table.add_slot("body-cell-step", OPENING_CELL)
                self._table.add_slot("body-cell-fate", FATE_CELL)
                # the browser sends back the id of the row alone
                self._table.on("rowClick", lambda event: self._open(event.args[1]["id"]), [[], ["id"], []])
                self._table.on("read", lambda event: self._open(event.args["id"]), ["id"])
                self._table.on("request", self._turn)
                self._table.on_pagination_change(self._keep_page)
            self._reading = ui.element("section").classes("tr-card tr-reading").props('aria-label="Rollout" tabindex=0')
        ui.timer(LOOK_S, self._look, immediate=False)

    # the list

    def _keep_page(self) -> None:
        """Undo what a browser sends back when it mounts the table: the page as it was created, without rows."""
        self._table.pagination = dict(self._page)

    async def _turn(self, event: Any) -> None:
        wanted = event.args["pagination"]
        if wanted.get("sortBy"):
            self._page |= {"page": int(wanted["page"]), "sortBy": str(wanted["sortBy"])}
            self._page["descending"] = bool(wanted["descending"])
        await self.refresh()

    async def refresh(self, *, first_page: bool = False) -> None:
        """Read the page that is shown. Nothing changes if another request came meanwhile."""
        if first_page:
            self._page["page"] = 1
        # requests are numbered, as a slow search may end after a later one
        self._num_requests += 1
        request = self._num_requests
        try:
            found = await run.io_bound(self._read, self._input.value or "", dict(self._page))
        except ConfigError as error:
            self._summary.set_text(str(error))
            return
        except sqlite3.DatabaseError:  # the index is built again
            return
        if found is None or request != self._num_requests or self._table.is_deleted:
            return

        self._rows = found.rows
        self._page["rowsNumber"] = found.total
        self._table.pagination = dict(self._page)
        self._table.rows = found.rows

        done, total = self._progress
        more = f" · {done:,} of {total:,} batches are indexed, the others follow" if done < total else ""
        self._summary.set_text(f"{counted(found.total, 'rollout')}{more}")
        self._mark_opened()

    def _read(self, line: str, page: dict[str, Any]) -> Found:
        offset = (page["page"] - 1) * ROWS
        found = self._index.search(line, sort=page["sortBy"], backwards=page["descending"], limit=ROWS, offset=offset)
        for row in found.rows:
            advantage = row["advantage"]
            row |= {"id": f"{row['step']}/{row['number']}", "ended": row["error"] or row["stop"]}
            row |= {"reward": decimal(row["reward"]), "advantage": "-" if advantage is None else f"{advantage:+.3f}"}
        return found

    def _mark_opened(self) -> None:
        """Show in the list and in the address, which can be shared, which rollout is read."""
        for row in self._rows:
            row["chosen"] = row["id"] == self._opened
        self._table.update()
        link = self._runs.link("/rollouts", q=self._input.value or None, rollout=self._opened or None)
        ui.navigate.history.replace(link)

    async def _look(self) -> None:
        if (progress := self._index.look()) != self._progress:
            self._progress = progress
            was_empty = not self._rows
            await self.refresh()
            if was_empty and not self._opened:
                await self.open_first()

    # the rollout that is read

    async def open_first(self) -> None:
        """Open the rollout of the address, or else the first of the list."""
        if opened := self._opened or next((row["id"] for row in self._rows), ""):
            await self._open(opened)
        else:
            self._reading.clear()
            with self._reading:
                ui.label(nothing_found(*self._index.progress(), searched=bool(self._input.value)))

    async def _open(self, id: str) -> None:
        self._opened = id
        self._mark_opened()
        # the id may come from an address that a user typed
        place = re.fullmatch(r"(\d{1,9})/(\d{1,9})", id)
        step, number = (int(place[1]), int(place[2])) if place else (0, -1)
        loaded = await run.io_bound(load_rollout, self._runs.main, step, number)
        if self._opened != id or self._reading.is_deleted:
            return
        # the user may have opened another rollout while this one was read
        self._reading.clear()
        known = next((each for each in self._rows if each["id"] == id), None)
        with self._reading:
            if isinstance(loaded, LoadedRollout):
                record, row = loaded.record, loaded.record.row
                with theme.row():
                    theme.heading(f"{row.env} · example {row.example} · rollout {row.rollout}")
                    ui.space()
                    tokens = self._runs.link("/tokens", step=step, rollout=row.number)
                    ui.link("Token by token", tokens).classes("tr-go")
                where = [f"step {step}", f"group {row.group}", f"attempt {row.attempt}"]
                theme.soft(" · ".join(where + record.facts))
                rewards = ({} if row.reward is None else {"reward": row.reward}) | record.metrics
                theme.soft(" · ".join(f"{clean(name)} {decimal(value)}" for name, value in rewards.items()))
                ui.label(f"Rewards of its group of {len(loaded.group)}").classes("tr-part")
                show_group(loaded, lambda number: self._open(f"{step}/{number}"))
                ui.html(conversation_html(record, self._runs.main.name), sanitize=False)
            # a dropped rollout has no conversation in the journal
            elif known and known["fate"] == DROPPED:
                theme.heading(f"{known['env']} · example {known['example']} · rollout {known['rollout']}")
                ui.label("Dropped: it is not trained on, and the journal keeps only why.").classes("tr-soft")
                ui.label(known["ended"]).classes("tr-mono")
            else:
                theme.heading("This rollout cannot be shown.")
                ui.label(str(loaded)).classes("tr-soft")


# HTML of a rollout. Text of a model or a tool is escaped, and never becomes markup.


def nothing_found(done: int, total: int, *, searched: bool) -> str:
    """Return why no rollout is listed.

    Args:
        done: batches that are in the index.
        total: batches that there are.
    """
    if done < total:
        return f"The index is being built: {done:,} of {total:,} batches are in it. Rollouts are listed as it grows."
    if not total:
        return "No batch is complete yet. Its rollouts are listed once it is."
    return "Nothing was found. Shorten the search." if searched else "The batches hold no rollouts."


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
    # the whole conversation of each branch: what it shares with its parent, and its own messages
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
        # children are shown at the place where they leave this conversation, and the rest of it last
        before = len(blocks(whole[:at]))
        for child in [*sorted(children.get(number, ()), key=lambda child: branches[child].place), None]:
            found = blocks(whole if child is None else whole[: branches[child].place])
            parts += [_block_html(block, run) for block in found[before:]]
            before = max(before, len(found))
            parts += [branch_html(child)] if child is not None else []
        facts = [branch.why, counted(branch.num_turns, "turn"), counted(branch.num_tools, "tool")]
        facts.append(f"sample {branch.sample}" if branch.sample >= 0 else "not trained on")
        heading = _escaped(f"Conversation {number}: {', '.join(facts)}")
        is_open = " open" if number == 0 or not branch.messages else ""
        return f'<details class="tr-branch"{is_open}><summary>{heading}</summary>{"".join(parts)}</details>'

    left_out = len(all_branches) - len(branches)
    more = f"<p>and {left_out:,} more conversations</p>" if left_out else ""
    return "".join(map(branch_html, children.get(-1, ()))) + more


def _program_texts(info: dict[str, Any]) -> dict[str, Any]:
    """Return how an agent program ended, with headings; nothing if the rollout is of none."""
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


# pictures: the route that serves them, and how a page shows them


def serve_pictures(app: FastAPI, library: Library) -> None:
    """Serve the pictures of the library's runs, by their digests."""

    @app.get(f"{PICTURES}/{{digest}}")
    def picture(digest: str, run: str = "") -> Response:
        found = library.named(run)
        try:
            png = found.pictures.read(digest) if found else None
        except (ValueError, OSError, JournalCorrupt):
            png = None
        if png is None:
            return Response(status_code=404)
        return Response(png, media_type="image/png", headers=PICTURE_HEADERS)


def pictures_html(digests: Sequence[str], run: str) -> str:
    """Return an image for each digest, which opens in full in a tab of its own when it is clicked.

    Args:
        run: its name in the library.
    """
    parts = []
    for digest in digests:
        address = html.escape(f"{PICTURES}/{digest}?{urlencode({'run': run})}", quote=True)
        image = f'<img class="tr-picture" src="{address}" alt="picture {digest[:8]}…" loading="lazy">'
        parts.append(f'<a href="{address}" target="_blank" rel="noopener" title="Open in full">{image}</a>')
    return f'<div class="tr-pictures">{"".join(parts)}</div>' if parts else ""
