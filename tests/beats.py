"""How often others had their turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def with_beats(work: Awaitable[Any]) -> tuple[Any, int]:
    """What it returned, and how many turns another task had meanwhile."""
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    beating = asyncio.create_task(beat())
    try:
        return await work, beats
    finally:
        beating.cancel()
