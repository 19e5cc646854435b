"""The viewer without a terminal: keys are pressed, and the screen is written as a picture or a text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from textual.events import Key
from textual.keys import _character_to_key
from textual.pilot import Pilot
from textual.worker import WorkerCancelled

from trireme.base.errors import ConfigError
from trireme.base.paths import atomic_write
from trireme.tools.viewer.app import EvalView

FETCHED = re.compile(r"@font-face\s*\{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)
KINDS = (".svg", ".txt")
ROUNDS = 4  # of messages that cause other messages, until there are no more
CHARACTERS = {"space": " ", "slash": "/", "comma": ","}


def capture(app: EvalView, file: Path, *, keys: Sequence[str], size: tuple[int, int]) -> None:
    """Write the screen as it is after the keys, as an SVG or as text by the file's name.

    Raises: ConfigError if the name ends with neither.
    """
    if file.suffix not in KINDS:
        raise ConfigError(f"{file}: a screen is written as {' or '.join(KINDS)}. Give the file such a name.")

    async def run() -> str:
        async with app.run_test(size=size, notifications=True) as pilot:
            await settle(pilot)
            for key in keys:
                await press(pilot, key)
            return svg(app) if file.suffix == ".svg" else text(app)

    screen = asyncio.run(run())
    with atomic_write(file) as out:
        out.write(screen.encode())


async def press(pilot: Pilot[None], *keys: str) -> None:
    """Press keys and wait until their effect is on the screen.

    `Pilot.press` does not wait for workers, and sleeps until the process is idle.

    Args:
        keys: Names of keys, or characters that keys type: "enter", "space", "s", "/".
    """
    for key in keys:
        name = _character_to_key(key) if len(key) == 1 else key
        pilot.app.post_message(Key(name, key if len(key) == 1 else CHARACTERS.get(key)))
    await settle(pilot)


async def settle(pilot: Pilot[None]) -> None:
    """Wait until no worker looks for files or reads, and the screen stays the same."""
    app = pilot.app
    assert isinstance(app, EvalView)
    before = None
    while True:
        now = app.num_worker_changes, text(app)
        if now == before and all(worker.is_finished for worker in app.workers):
            return
        before = now
        with suppress(WorkerCancelled):  # one that was replaced by a newer one
            await app.workers.wait_for_complete()
        for _ in range(ROUNDS):
            await pilot.pause(0)


def svg(app: EvalView) -> str:
    """Return the screen as an SVG in the fonts of its reader, so that nothing is fetched."""
    return FETCHED.sub("", app.export_screenshot(title=app.TITLE, simplify=True))


def text(app: EvalView) -> str:
    """Return the characters on the screen, a line each."""
    strips = app.screen._compositor.render_strips()  # Textual has no public way
    return "\n".join(strip.text.rstrip() for strip in strips) + "\n"
