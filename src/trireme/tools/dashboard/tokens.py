"""One rollout token by token: the probabilities of engine and trainer, ratio, advantage and version of each token."""

from __future__ import annotations

import html
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from nicegui import run, ui

from trireme.base.paths import RunPaths
from trireme.base.safe_text import decimal
from trireme.journal.journal import Journal
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.runs import RunSet
from trireme.tools.rollouts import DROPPED, BatchFile, Record, Row
from trireme.tools.token_columns import (
    COLOURS,
    FAINTEST,
    TokenColumns,
    colours_of,
    facts_of,
    load_columns,
    shades_of,
    summary,
)
from trireme.tools.tokenizer import WINDOW, visible, window_of

NO_TRAINER = (
    "The trainer's side is not known: the step is not trained yet, or the run does not keep it "
    "(`trainer.save_logprobs`)."
)


class LoadedRollout(NamedTuple):
    """One rollout of a batch, with the rows of its group, itself among them."""

    record: Record
    samples: list[TokenColumns]
    group: list[Row]
    has_texts: bool  # the run's tokenizer is on this machine


def load_rollout(run: Path, step: int, number: int) -> LoadedRollout | str:
    """Return a rollout, or why it cannot be loaded. Blocks."""
    file = _batch_file(Journal(RunPaths(run).journal).path(step))
    file.read_more()
    if file.trouble:
        return file.trouble
    rows = [row for row in file.rows if row.fate != DROPPED]
    if not 0 <= number < len(rows):
        return f"Batch {step} has rollouts 0 to {len(rows) - 1}, not {number}: those dropped have no tokens."
    record = file.record(rows[number])
    assert record.rollout is not None, f"rollout {number} of batch {step} was not dropped"
    samples, has_texts = load_columns(run, step, record.rollout)
    return LoadedRollout(record, samples, [row for row in rows if row.group == record.row.group], has_texts)


_batch_file = lru_cache(maxsize=4)(BatchFile)


# the page


async def build(runs: RunSet) -> None:
    await TokensPage(runs).load()


class TokensPage:
    """The rollout that is shown, and the quantity that its tokens are coloured by."""

    def __init__(self, runs: RunSet) -> None:
        self._runs = runs
        self._steps = Journal(runs.main.paths.journal).steps()
        self._colour = runs.query.get("colour", "engine")
        self._first = 0  # token of the window
        self._loaded: LoadedRollout | None = None
        with theme.card(), theme.row():
            fields = []
            for label, newest in (("Step", self._steps[-1]), ("Rollout", 0)):
                wanted = runs.query.get(label.lower(), "")
                value = int(wanted) if wanted.isdigit() else newest
                fields.append(ui.number(label, value=value, min=0, precision=0, on_change=self.load))
                fields[-1].props("dense outlined debounce=300").style("width: 110px")
            self._step, self._number = fields
            self._toggle = ui.toggle([], on_change=self._choose_colour)
            self._toggle.props("no-caps unelevated dense padding='4px 12px'")
            self._legend = theme.soft()
        self._body = theme.column()

    async def load(self) -> None:
        if self._step.value is None or self._number.value is None:
            return
        wanted = int(self._step.value), int(self._number.value)
        loaded = await run.io_bound(load_rollout, self._runs.main.path, *wanted)
        if loaded is None or wanted != (self._step.value, self._number.value) or self._body.is_deleted:
            return
        self._first = 0
        if isinstance(loaded, LoadedRollout):
            self._loaded = loaded
            colours = colours_of(loaded.samples)
            self._colour = self._colour if self._colour in colours else colours[0]
            labels = {name: f"{name} p" if name in ("engine", "trainer") else name for name in colours}
            self._toggle.set_options(labels, value=self._colour)
            self._show()
            return
        self._loaded = None
        self._body.clear()
        with self._body:
            known = f"The run has batches {self._steps[0]} to {self._steps[-1]} so far."
            theme.nothing("This rollout cannot be shown.", f"{loaded} {known}", icon="error_outline")

    def _choose_colour(self) -> None:
        if self._toggle.value and self._toggle.value != self._colour:
            self._colour = self._toggle.value
            self._show()

    def _show(self) -> None:
        loaded = self._loaded
        if loaded is None:
            return
        row = loaded.record.row
        here = {"step": row.step, "rollout": row.number}
        self._legend.set_text(COLOURS[self._colour])
        ui.navigate.history.replace(self._runs.link("/tokens", **here, colour=self._colour))
        self._body.clear()
        with self._body:
            with theme.card():
                with theme.row():
                    theme.heading(f"{row.env} · example {row.example} · rollout {row.rollout}")
                    theme.soft(f"step {row.step} · group {row.group} · reward {decimal(row.reward)}")
                    ui.space()
                    where = {"q": f"step={row.step}", "rollout": f"{row.step}/{row.number}"}
                    ui.link("What was said", self._runs.link("/rollouts", **where)).classes("tr-go")
                show_group(loaded, self._number.set_value)
                masked = loaded.record.more.get("masked")
                if masked:
                    ui.label(f"Masked: {masked}.").classes("tr-warn")
                if not loaded.has_texts:
                    ui.label("The run's tokenizer is not on this machine: numbers instead of text.").classes("tr-warn")
                if not masked and not any(columns.has_trainer for columns in loaded.samples):
                    theme.soft(NO_TRAINER)
            for place, columns in enumerate(loaded.samples):
                with theme.card(f"Sample {place + 1} of {len(loaded.samples)}", summary(columns)):
                    self._show_sample(columns, step=int(row.step or 0))

    def _show_sample(self, columns: TokenColumns, *, step: int) -> None:
        def turn(first: int) -> None:
            self._first = first
            self._show()

        window = window_of(min(self._first, max(0, columns.length - 1)), columns.length)
        if columns.length > WINDOW:
            with theme.row():
                for start in range(0, columns.length, WINDOW):
                    label = f"{start + 1} – {min(columns.length, start + WINDOW)}"
                    button = ui.button(label, on_click=lambda start=start: turn(start)).props("dense size=sm")
                    button.props("outline" if start == window.start else "flat")
        text = ui.html(token_html(columns, self._colour, window, step=step), sanitize=False).classes("tr-tokens")
        text.props('tabindex=0 aria-label="Tokens"')


def show_group(loaded: LoadedRollout, open: Callable[[int], Any]) -> None:
    """Show the rewards of a rollout's group as buttons.

    Args:
        open: called with the number of the rollout that was clicked.
    """
    with ui.element("div").classes("tr-mates"):
        for row in loaded.group:
            with ui.element("button").classes("tr-mate") as mate:
                ui.label(decimal(row.reward, 2))
            mate.props["aria-label"] = f"rollout {row.rollout} of the group"
            mate.props["aria-current"] = str(row is loaded.record.row).lower()
            mate.on("click", lambda number=row.number: open(number))


def token_html(columns: TokenColumns, colour: str, window: range, *, step: int) -> str:
    """Return a `span` for each token, with what is known of it in `data-t`, which the style sheet shows on hovering.

    Text of a model is escaped, and never becomes markup.
    """
    spans, shades = [], shades_of(columns, colour)
    for place in window:
        (red, green, blue), strength = shades[place]
        alpha = f"{0.75 * strength:.2f}"
        style = f' style="background:rgba({red},{green},{blue},{alpha})"' if strength > FAINTEST else ""
        given = "" if columns.sampled[place] else " given"
        facts = "\n".join(f"{name:10}{fact}" for name, fact in facts_of(columns, place, step=step))
        known = html.escape(facts, quote=True).replace("\n", "&#10;")
        text = html.escape(visible(columns.texts[place])).replace("\n", "<br>")
        spans.append(f'<span class="tr-token{given}"{style} data-t="{known}">{text}</span>')
    return "".join(spans)
