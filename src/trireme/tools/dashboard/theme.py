"""How the dashboard looks: colours for processes, activities and runs, in light and dark, and small parts of pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from nicegui import context, ui

ACCENT = "#6d4aff"
PROCESSES = {"trainer": "#7c5cff", "orchestrator": "#f59e0b", "engine": "#14b8a6"}
ACTIVITIES = {
    "train": "#7c5cff",
    "generate": "#14b8a6",
    "transfer": "#3b82f6",
    "evaluate": "#ec4899",
    "save": "#f59e0b",
    "journal": "#a3763d",
    "start": "#64748b",
    "wait": "#e5647a",
    "idle": "#f0a8b3",
    "other": "#a5adbf",
}
"""Colours of what processes do, here and in the report. Work is cool, waiting is red."""
RUNS = ("#7c5cff", "#0ea5a0", "#f08c00", "#e64980", "#228be6", "#74b816", "#c2410c", "#7e8aa6")
"""Colours of the runs that are compared, by their place."""
STATES = {"running": "#0f9d6b", "starting": "#228be6", "finishing": "#228be6", "finished": "#7c5cff", "done": "#7c5cff"}
QUIET = "#8a93a5"  # text of charts: readable on white and on black

FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><g fill="none" stroke-width="4" '
    'stroke-linecap="round"><path d="M4 8h24" stroke="#14b8a6"/><path d="M4 16h17" stroke="#f59e0b"/>'
    '<path d="M4 24h21" stroke="#7c5cff"/></g></svg>'
)
COOKIE = "trireme_theme"


@cache
def _css() -> str:
    return Path(__file__).with_name("style.css").read_text()


def apply() -> ui.dark_mode:
    """Give the page that is being built its style; light or dark as the browser's cookie or its system says."""
    ui.add_css(_css())
    ui.colors(primary=ACCENT)
    return ui.dark_mode({"light": False, "dark": True}.get(context.client.request.cookies.get(COOKIE, "")))


def run_color(place: int) -> str:
    return RUNS[place % len(RUNS)]


def row() -> ui.element:
    return ui.element("div").classes("tr-row")


def column() -> ui.element:
    return ui.element("div").classes("tr-charts")


def card(title: str = "", note: str = "") -> ui.element:
    """A box; `with card("Reward"): ...`."""
    box = ui.element("section").classes("tr-card")
    with box:
        if title:
            heading(title)
        if note:
            soft(note)
    return box


def heading(text: str) -> None:
    with ui.element("h2").classes("tr-title"):
        ui.label(text)


def soft(text: str = "") -> ui.label:
    return ui.label(text).classes("tr-soft tr-small")


def icon_button(icon: str, label: str, act: Callable[[], Any]) -> None:
    """
    Args:
        label: a constant of ours: it becomes a property, which NiceGUI parses.
    """
    ui.button(icon=icon, on_click=act).props(f'flat round dense aria-label="{label}"').tooltip(label)


def figure(name: str, value: str, note: str = "") -> None:
    """One number with its name above and a note below."""
    with card():
        soft(name)
        ui.label(value).classes("tr-value")
        if note:
            soft(note)


def legend(colors: dict[str, str]) -> None:
    for name, color in colors.items():
        with ui.element("div").classes("tr-state"):
            ui.element("span").classes("tr-dot").style(f"background: {color}")
            ui.label(name)


def table(rows: list[list[str]], head: list[str] = [], mono: int = 1) -> None:  # noqa: B006
    """
    Args:
        mono: the first so many columns hold names of metrics or keys.
    """
    with ui.element("table").classes("tr-table"):
        for cells in [head, *rows] if head else rows:
            with ui.element("tr"):
                for place, cell in enumerate(cells):
                    with ui.element("th" if cells is head else "td").classes("tr-mono" if place < mono else ""):
                        ui.label(cell)


def nothing(what: str, why: str, icon: str = "hourglass_empty") -> None:
    """Say in the place of something that cannot be shown what is missing, and what to do."""
    with ui.element("section").classes("tr-card tr-nothing"):
        ui.icon(icon).props("aria-hidden=true")
        ui.label(what).classes("tr-title")
        ui.label(why).classes("tr-soft")
