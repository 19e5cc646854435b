"""Minimise the pause of a weight update: engines take tensors in while they serve, and load as soon as they are paused.

vLLM answers a request to pause 20 ms after its last iteration. An engine is asked instead whether it has paused, and
loads meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from trireme.base.errors import PeerDied
from trireme.messages import TensorSpec
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.responses import BadAnswer, all_take_in_ahead, flag_of

POLL_S = 0.001
"""Between two looks whether an engine has paused. It answers between two of its iterations, which take longer."""


async def receives_ahead(engine: Engine, specs: list[TensorSpec]) -> bool:
    """Have the engine take in what will be sent while it goes on serving. Returns whether it can. Raises PeerDied."""
    request = {"method": "trireme_receive_ahead", "args": [msgspec.to_builtins(specs)]}
    try:
        return all_take_in_ahead(await engine.post("collective_rpc", request))
    except BadAnswer as error:
        raise PeerDied(f"{engine.url}: {error}") from error


@asynccontextmanager
async def pausing(engine: Engine, *, timeout_s: float) -> AsyncIterator[None]:
    """Freeze the engine's requests and forget cached prompts. They are frozen inside; the end waits for vLLM's answer.

    Raises: PeerDied where the engine does not pause.
    """
    pause = asyncio.create_task(engine.post("pause?mode=keep"))
    try:
        deadline_s = time.monotonic() + timeout_s
        while not pause.done() and not await _is_paused(engine):
            if time.monotonic() > deadline_s:
                raise PeerDied(
                    f"{engine.url} did not pause within {timeout_s:.0f} s and is still generating. Look at "
                    "logs/inference.stdout"
                )
            await asyncio.sleep(POLL_S)
        if pause.done():
            pause.result()  # raises where it was refused: nothing may be loaded then
        yield
        await pause
    finally:
        pause.cancel()
        await asyncio.gather(pause, return_exceptions=True)


async def _is_paused(engine: Engine) -> bool:
    try:
        return flag_of(await engine.get("is_paused"), "is_paused")
    except BadAnswer as error:
        raise PeerDied(f"{engine.url}: {error}") from error
