"""A picture of the screen after some keys, without a terminal: for documents, and for reports of what looks wrong."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from textual.events import Key
from textual.pilot import Pilot
from textual.worker import WorkerCancelled

from trireme.base.errors import ConfigError
from trireme.base.paths import atomic_write
from trireme.tools.viewer.app import EvalView

FETCHED = re.compile(r"@font-face\s*\{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)
KINDS = (".svg", ".txt")
ROUNDS = 4  # of messages that bring about others, before one can say that there are no more
NAMES = {"solidus": "slash", "hyphen_minus": "minus", "plus_sign": "plus", "low_line": "underscore"}
"""Where a key is called otherwise than its sign."""
SIGNS = {"space": " ", "slash": "/", "comma": ","}


def capture(app: EvalView, file: Path, *, keys: Sequence[str], size: tuple[int, int]) -> None:
    """Writes the screen as it is after the keys, as an SVG or as text by the file's name.

    Raises: ConfigError where the name says neither.
    """
    if file.suffix not in KINDS:
        raise ConfigError(
            f"{file}: a screen is written as {' or '.join(KINDS)} - expected a name that ends so. Change it."
        )
    text = asyncio.run(_after(app, keys, size, as_svg=file.suffix == ".svg"))
    with atomic_write(file) as out:
        out.write(text.encode())


async def _after(app: EvalView, keys: Sequence[str], size: tuple[int, int], *, as_svg: bool) -> str:
    async with app.run_test(size=size, notifications=True) as pilot:
        await settle(pilot)
        for key in keys:
            app.post_message(key_event(key))
            await settle(pilot)
        return svg(app) if as_svg else text(app)


async def settle(pilot: Pilot[None]) -> None:
    """Returns when nothing is being looked for or read, and all that came of it is drawn."""
    app = pilot.app
    assert isinstance(app, EvalView)
    seen = -1
    while seen != app.num_worker_changes or any(not worker.is_finished for worker in app.workers):
        seen = app.num_worker_changes
        with suppress(WorkerCancelled):  # one that is not needed any more
            await app.workers.wait_for_complete()
        for _ in range(ROUNDS):
            await pilot.pause(0)


def key_event(name: str) -> Key:
    """Of a key by its name, or of the letter or sign that it types.

    Example:
        key_event("enter"), key_event("space"), key_event("s"), key_event("/")
    """
    if len(name) > 1:
        return Key(name, SIGNS.get(name))
    named = unicodedata.name(name).lower().replace(" ", "_").replace("-", "_")
    return Key(name if name.isalnum() else NAMES.get(named, named), name)


def svg(app: EvalView) -> str:
    """With the fonts of whoever looks at it: nothing is fetched."""
    return FETCHED.sub("", app.export_screenshot(title=app.TITLE, simplify=True))


def text(app: EvalView) -> str:
    strips = app.screen._compositor.render_strips()  # there is no public way to the same
    return "\n".join(strip.text.rstrip() for strip in strips) + "\n"
