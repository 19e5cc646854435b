"""How the dashboard looks: one set of colours for processes, activities and runs, in the light and in the dark."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from nicegui import context, ui

ACCENT = "#6d4aff"

PROCESSES = {"trainer": "#7c5cff", "orchestrator": "#f59e0b", "inference": "#14b8a6", "engine": "#14b8a6"}
"""By the first word of a process's name."""

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
"""What the lanes do. Work is cool, waiting is red."""

RUNS = ("#7c5cff", "#0ea5a0", "#f08c00", "#e64980", "#228be6", "#74b816", "#c2410c", "#7e8aa6")
"""By place among those that are compared."""

STATES = {"running": "#0f9d6b", "starting": "#228be6", "finishing": "#228be6", "finished": "#7c5cff", "done": "#7c5cff"}
QUIET = "#8a93a5"  # text and lines of charts, on white and on black

FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><g fill="none" stroke-width="4" '
    'stroke-linecap="round"><path d="M4 8h24" stroke="#14b8a6"/><path d="M4 16h17" stroke="#f59e0b"/>'
    '<path d="M4 24h21" stroke="#7c5cff"/></g></svg>'
)

COOKIE = "trireme_theme"
DARKNESS = {"light": False, "dark": True}


@cache
def _css() -> str:
    return Path(__file__).with_name("style.css").read_text()


def apply() -> ui.dark_mode:
    """To the page that is being built."""
    ui.add_css(_css())
    ui.colors(primary=ACCENT)
    request = context.client.request
    return ui.dark_mode(DARKNESS.get(request.cookies.get(COOKIE, "")))


def process_color(name: str) -> str:
    return PROCESSES.get(name.replace("-", " ").split(" ")[0], QUIET)


def run_color(place: int) -> str:
    return RUNS[place % len(RUNS)]


def state_color(state: str) -> str:
    return STATES.get(state, QUIET)


def card(title: str = "", note: str = "") -> ui.element:
    """A box; `with card("Reward"): ...`."""
    box = ui.element("section").classes("tr-card")
    with box:
        if title:
            heading(title)
        if note:
            ui.label(note).classes("tr-soft tr-small")
    return box


def heading(text: str) -> ui.element:
    with ui.element("h2").classes("tr-title") as element:
        ui.label(text)
    return element


def figure(name: str, value: str, note: str = "") -> None:
    """One number with its name above and what there is to say about it below."""
    with ui.element("section").classes("tr-card"):
        ui.label(name).classes("tr-soft tr-small")
        ui.label(value).classes("tr-value")
        if note:
            ui.label(note).classes("tr-soft tr-small")


def nothing(what: str, why: str, icon: str = "hourglass_empty") -> None:
    """In the place of what cannot be shown: what is missing, and what to do."""
    with ui.element("section").classes("tr-card tr-nothing"):
        ui.icon(icon).props("aria-hidden=true")
        ui.label(what).classes("tr-title")
        ui.label(why).classes("tr-soft")
