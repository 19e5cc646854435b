"""One rollout token by token: what engine and trainer said of each, coloured by what one wants to see."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from nicegui import run, ui

from trireme.tools.dashboard import theme
from trireme.tools.dashboard.canvas import Canvas
from trireme.tools.dashboard.rollout_table import find_batches
from trireme.tools.dashboard.rollouts_page import css
from trireme.tools.dashboard.runs import RunSet
from trireme.tools.dashboard.token_view import (
    COLOURS,
    LoadedRollout,
    TokenColumns,
    colours_of,
    figures_of,
    load_rollout,
    token_html,
)
from trireme.tools.rollouts import clean, decimal
from trireme.tools.tokenizer import WINDOW, window_of

NO_TRAINER = (
    "The trainer's side is not known: the step is not trained yet, or the run does not keep it "
    "(`trainer.save_logprobs`)."
)


LABELS = {"engine": "engine p", "trainer": "trainer p"}


async def build(runs: RunSet) -> None:
    chosen = runs.main
    assert chosen is not None
    ui.add_css(css())
    steps = find_batches(chosen.paths.journal)
    if not steps:
        theme.nothing("There is no batch yet.", "Tokens are shown as soon as the first batch is in the journal.")
        return
    await TokensPage(runs, steps).show()


class TokensPage:
    def __init__(self, runs: RunSet, steps: list[int]) -> None:
        self._runs = runs
        self._steps = steps
        self._step = int(runs.query.get("step") or steps[-1]) if runs.query.get("step", "0").isdigit() else steps[-1]
        self._number = int(runs.query.get("rollout", "0")) if runs.query.get("rollout", "0").isdigit() else 0
        self._colour = runs.query.get("colour", next(iter(COLOURS)))
        self._first = 0  # token that is shown
        self._loaded: LoadedRollout | None = None

    async def show(self) -> None:
        with theme.card(), ui.element("div").classes("tr-row"):
            self._step_field = ui.number("Step", value=self._step, min=0, precision=0, on_change=self._chosen)
            self._number_field = ui.number("Rollout", value=self._number, min=0, precision=0, on_change=self._chosen)
            for field in (self._step_field, self._number_field):
                field.props("dense outlined debounce=300").style("width: 110px")
            self._toggle = ui.toggle({self._colour: self._colour}, value=self._colour, on_change=self._coloured)
            self._toggle.props("no-caps unelevated dense padding='4px 12px'")
            self._legend = ui.label().classes("tr-soft tr-small")
        self._body = ui.element("div").style("display: flex; flex-direction: column; gap: 14px; width: 100%")
        await self._load()

    async def _chosen(self) -> None:
        step, number = self._step_field.value, self._number_field.value
        if step is not None and number is not None and (int(step), int(number)) != (self._step, self._number):
            self._step, self._number, self._first = int(step), int(number), 0
            await self._load()

    async def _go(self, number: int) -> None:
        self._number_field.set_value(number)

    def _coloured(self) -> None:
        if self._toggle.value and self._toggle.value != self._colour:
            self._colour = self._toggle.value
            self._draw()

    async def _load(self) -> None:
        assert self._runs.main is not None
        wanted = self._step, self._number
        loaded = await run.io_bound(load_rollout, self._runs.main.path, *wanted)
        if wanted != (self._step, self._number):
            return
        if isinstance(loaded, LoadedRollout):
            self._loaded = loaded
            colours = colours_of(loaded.samples)
            self._colour = self._colour if self._colour in colours else colours[0]
            self._toggle.set_options({name: LABELS.get(name, name) for name in colours}, value=self._colour)
            self._draw()
        else:
            self._loaded = None
            self._body.clear()
            with self._body:
                last = f"The run has batches {self._steps[0]} to {self._steps[-1]} so far."
                theme.nothing("This rollout cannot be shown.", f"{loaded} {last}", icon="error_outline")

    def _draw(self) -> None:
        loaded = self._loaded
        if loaded is None:
            return
        self._legend.set_text(COLOURS[self._colour][0])
        ui.navigate.history.replace(
            self._runs.link("/tokens", step=self._step, rollout=self._number, colour=self._colour)
        )
        self._body.clear()
        with self._body:
            self._draw_head(loaded)
            for place, columns in enumerate(loaded.samples):
                self._draw_sample(loaded, place, columns)

    def _draw_head(self, loaded: LoadedRollout) -> None:
        rollout = loaded.rollout
        with theme.card():
            with ui.element("div").classes("tr-row"):
                theme.heading(f"{rollout.env} · example {rollout.example} · rollout {rollout.place}")
                ui.label(f"step {loaded.step} · group {rollout.group} · reward {decimal(rollout.reward)}").classes(
                    "tr-soft"
                )
                ui.space()
                address = self._runs.link("/rollouts", step=loaded.step, rollout=self._number)
                ui.link("What was said", address).classes("tr-go")
            with ui.element("div").classes("tr-mates"):
                for other, one in loaded.group:
                    mate = (
                        ui.element("button").classes("tr-mate").props(f'aria-label="rollout {one.place} of the group"')
                    )
                    mate.props(f'aria-current="{str(other == self._number).lower()}"')
                    mate.on("click", lambda other=other: self._go(other))
                    with mate:
                        ui.label(decimal(one.reward, 2))
            if rollout.masked:
                ui.label(f"Masked ({rollout.masked}): none of its tokens is trained on.").classes("tr-warn")
            if not loaded.has_texts:
                ui.label("The run's tokenizer is not on this machine: numbers instead of text.").classes("tr-warn")
            if not rollout.masked and not any(columns.has_trainer for columns in loaded.samples):
                ui.label(NO_TRAINER).classes("tr-soft tr-small")

    def _draw_sample(self, loaded: LoadedRollout, place: int, columns: TokenColumns) -> None:
        window = window_of(min(self._first, max(0, columns.length - 1)), columns.length)
        with theme.card(f"Sample {place + 1} of {len(loaded.samples)}", _summary(columns)):
            if columns.length > WINDOW:
                self._draw_windows(columns, window)
            with ui.element("div").classes("tr-split"):
                text = token_html(columns, self._colour, window, step=loaded.step)
                ui.html(text, sanitize=False).classes("tr-tokens").props('tabindex=0 aria-label="Tokens"')
                Canvas(chart_of(columns, window)).style("height: 240px; width: 100%")

    def _draw_windows(self, columns: TokenColumns, window: range) -> None:
        with ui.element("div").classes("tr-row"):
            for start in range(0, columns.length, WINDOW):
                label = f"{start + 1} – {min(columns.length, start + WINDOW)}"
                button = ui.button(label, on_click=lambda start=start: self._turn(start)).props("flat dense size=sm")
                if start == window.start:
                    button.props("outline", remove="flat")

    def _turn(self, first: int) -> None:
        self._first = first
        self._draw()


def _summary(columns: TokenColumns) -> str:
    """
    Example:
        97 tokens, 57 sampled by version 11 · mean p 0.812 · ratio 1.001 on average, 1.104 at most
    """
    figures = figures_of(columns)
    versions = ", ".join(map(str, figures.versions))
    text = f"{columns.length} tokens, {figures.sampled} sampled"
    if versions:
        text += f" by version{'s' * (len(figures.versions) > 1)} {versions}"
    if figures.mean_p is not None:
        text += f" · mean p {figures.mean_p:.3f}"
    if figures.mean_ratio is not None and figures.farthest is not None:
        text += f" · ratio {figures.mean_ratio:.4f} on average, {figures.farthest:.4f} farthest from 1"
    return text


def chart_of(columns: TokenColumns, window: range) -> dict[str, Any]:
    """Probabilities of the tokens that were sampled, under the engine and under the trainer, and their ratio."""
    places = [place for place in window if columns.sampled[place]]
    series = [_line("engine", np.exp(columns.engine[places]), theme.PROCESSES["engine"])]
    if columns.has_trainer:
        series.append(_line("trainer", np.exp(columns.trainer[places]), theme.PROCESSES["trainer"]))
        series.append(_line("ratio", columns.ratios[places], theme.ACTIVITIES["wait"], axis=1))
    axis = {"axisLine": {"lineStyle": {"color": theme.QUIET}}, "splitLine": {"show": False}}
    return {
        "animation": False,
        "grid": {"left": 46, "right": 50, "top": 34, "bottom": 28},
        "legend": {"textStyle": {"color": theme.QUIET}, "top": 4},
        "tooltip": {"trigger": "axis", "renderMode": "richText"},  # a token is text, not HTML
        "xAxis": {"type": "category", "data": [f"{n + 1} {_on_one_line(columns.texts[n])}" for n in places], **axis},
        "yAxis": [
            {"type": "value", "min": 0, "max": 1, "name": "p", **axis},
            {"type": "value", "scale": True, "name": "ratio" if columns.has_trainer else "", **axis},
        ],
        "series": series,
    }


def _on_one_line(text: str) -> str:
    return clean(text).replace("\n", "⏎")[:20]


def _line(name: str, values: np.ndarray, colour: str, *, axis: int = 0) -> dict[str, Any]:
    return {
        "name": name,
        "type": "line",
        "data": [round(float(value), 5) if math.isfinite(value) else None for value in values],
        "yAxisIndex": axis,
        "symbolSize": 4,
        "lineStyle": {"width": 1.5, "type": "dotted" if axis else "solid"},
        "color": colour,
    }
