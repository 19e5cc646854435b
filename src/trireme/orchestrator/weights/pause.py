"""How an engine stands still for new weights no longer than it loads them: what comes is taken in before, where there
is room for it, and vLLM's own wait after a pause is not waited for twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from trireme.base.errors import PeerDied
from trireme.messages import TensorSpec
from trireme.orchestrator.engines.pool import Engine, InferencePool
from trireme.orchestrator.engines.responses import BadAnswer, all_take_in_ahead, flag_of

LOOK_S = 0.001
"""Between two questions whether an engine has paused. It answers between two of its iterations, which are longer."""


async def receives_ahead(pool: InferencePool, engine: Engine, specs: list[TensorSpec]) -> bool:
    """Whether its workers take in what will be sent while they go on serving. Raises PeerDied."""
    asked = {"method": "trireme_receive_ahead", "args": [msgspec.to_builtins(specs)]}
    try:
        return all_take_in_ahead(await pool.post(engine, "collective_rpc", asked))
    except BadAnswer as error:
        raise PeerDied(f"{engine.url}: {error}") from error


@asynccontextmanager
async def pausing(pool: InferencePool, engine: Engine, *, timeout_s: float) -> AsyncIterator[None]:
    """Requests freeze, and what was kept of prompts is forgotten. Inside they stand still already; vLLM says so 20 ms
    later, and that is waited for at the end. Raises PeerDied."""
    asked = asyncio.create_task(pool.post(engine, "pause?mode=keep"))
    try:
        deadline_s = time.monotonic() + timeout_s
        while not asked.done() and not await _is_paused(pool, engine):
            if time.monotonic() > deadline_s:
                raise PeerDied(
                    f"{engine.url} was asked {timeout_s:.0f} s ago to pause, and generates on. Look at "
                    "logs/inference.stdout"
                )
            await asyncio.sleep(LOOK_S)
        if asked.done():
            asked.result()  # raises where it was refused: nothing may be loaded then
        yield
        await asked
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def _is_paused(pool: InferencePool, engine: Engine) -> bool:
    try:
        async with pool.session.get(f"{engine.url}/is_paused") as response:
            return flag_of(await response.json(), "is_paused")
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
        engine.suspected.set()
        raise PeerDied(f"{engine.url}/is_paused got no answer: {error or type(error).__name__}") from error
