"""Look of the dashboard: its colours, in light and dark, and small parts of pages."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from nicegui import ui

ACCENT = "#6d4aff"
STATES = {"running": "#0f9d6b", "starting": "#228be6", "finishing": "#228be6", "finished": "#7c5cff", "done": "#7c5cff"}
QUIET = "#8a93a5"  # text of charts: readable on white and on black
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
"""Colours of what processes do: cool for work, red for waiting."""
RUNS = ("#7c5cff", "#0ea5a0", "#f08c00", "#e64980", "#228be6", "#74b816", "#c2410c", "#7e8aa6")
"""Colours of runs that are compared, by their place."""

FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><g fill="none" stroke-width="4" '
    'stroke-linecap="round"><path d="M4 8h24" stroke="#14b8a6"/><path d="M4 16h17" stroke="#f59e0b"/>'
    '<path d="M4 24h21" stroke="#7c5cff"/></g></svg>'
)
ROWS = 20  # rows on a page of a table


def apply() -> None:
    """Give the page that is being built its style."""
    ui.add_css(Path(__file__).with_name("style.css"))
    ui.colors(primary=ACCENT)


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


def columns(labels: dict[str, str], sortable: Container[str] = ()) -> list[dict[str, Any]]:
    """Return the columns of a `ui.table` by the names of their fields."""
    return [
        {"name": name, "label": label, "field": name, "align": "left", "sortable": name in sortable}
        for name, label in labels.items()
    ]


def table(rows: list[dict[str, Any]], labels: dict[str, str], sortable: Container[str] = ()) -> ui.table:
    """
    Args:
        labels: headings by the names of fields. The first field is unique to its row.
    """
    key = next(iter(labels))
    made = ui.table(rows=rows, columns=columns(labels, sortable), row_key=key, pagination=ROWS)
    return made.classes("tr-plain").props("flat dense wrap-cells" + " hide-pagination" * (len(rows) <= ROWS))


def nothing(what: str, why: str, icon: str = "hourglass_empty") -> None:
    """Say in the place of something that cannot be shown what is missing, and what to do."""
    with ui.element("section").classes("tr-card tr-nothing"):
        ui.icon(icon).props("aria-hidden=true")
        ui.label(what).classes("tr-title")
        ui.label(why).classes("tr-soft")
