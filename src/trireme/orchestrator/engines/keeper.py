"""Knows at any time which engines are there: who has come up, who fell silent, and who is not the process that it was.

The states that an engine goes through are those of `inference_pool`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import aiohttp

from trireme.base.errors import PeerDied
from trireme.base.log import Sparingly, get_logger
from trireme.base.token import TOKEN
from trireme.orchestrator.engines.health import is_healthy, is_listening
from trireme.orchestrator.engines.pool import Engine, InferencePool
from trireme.orchestrator.engines.responses import text_of, world_size_of

log = get_logger("engines")
sparingly = Sparingly(log)

HEALTH_MISSES = 5  # in a row, before an engine counts as dead

Judge = Callable[[Engine], Awaitable[bool]]
"""Whether an engine that has come up goes live as it is (and has gone); else it is put in quarantine."""


async def keep_engines(pool: InferencePool, judge: Judge, *, start_timeout_s: float) -> None:
    """Runs until cancelled.

    Raises:
        DeadlineExceeded: an engine did not come up (again).
    """
    async with asyncio.TaskGroup() as keepers:
        for engine in pool.engines:
            keepers.create_task(_keep(pool, engine, judge, start_timeout_s))


async def _keep(pool: InferencePool, engine: Engine, judge: Judge, start_timeout_s: float) -> None:
    """Produces the engine's state; waits for the clock, or for a request that it dropped."""
    while True:
        await until_up(pool, engine, start_timeout_s)
        try:
            if not await judge(engine):
                engine.state = "quarantined"
                pool.watch(engine)
        except PeerDied as error:
            log.warning("%s came up and went: %s", engine.url, error)
            continue
        await _until_gone(pool, engine)
        pool.quarantine(engine)
        engine.state = "starting"
        pool.is_given(engine, None)
        pool.live.set()  # who waits for it to confirm is to ask another


async def until_up(pool: InferencePool, engine: Engine, deadline_s: float) -> None:
    with pool.waits.waiting(f"{engine.url} to come up", peer="inference", deadline_s=deadline_s) as wait:
        while (num_workers := await world_size(pool, engine)) is None:
            if pool.is_missed(engine) or not pool.reachable():  # where others go on, one may stay away for long
                wait.check()
            await asyncio.sleep(0.25)
    engine.num_workers = num_workers
    engine.suspected.clear()
    engine.life += 1
    log.info("%s is up after %.0f s", engine.url, wait.waited_s)


async def world_size(pool: InferencePool, engine: Engine) -> int | None:
    """None while it is not there."""
    if not await is_healthy(pool.session, engine.url):
        return None
    with suppress(aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
        async with pool.session.get(f"{engine.url}/get_world_size") as response:
            if response.status == 401:
                sparingly.warning("%s does not let us in: %s is another one there", engine.url, TOKEN)
            return world_size_of(await response.json())
    return None


async def _until_gone(pool: InferencePool, engine: Engine) -> None:
    """Until it has not been healthy for a while, or another process has taken its place."""
    misses = 0
    while misses < HEALTH_MISSES:
        with suppress(TimeoutError):
            async with asyncio.timeout(pool.health_interval_s):
                await engine.suspected.wait()
        engine.suspected.clear()
        if not await is_healthy(pool.session, engine.url):
            misses += 1
            if not await is_listening(pool.session, engine.url):
                break
        elif await _is_another(pool, engine):
            log.warning("%s is not the process that it was: it has lost its weights", engine.url)
            return
        else:
            misses = 0
    log.warning("%s is gone: it is waited for, and its requests are sent again", engine.url)


async def _is_another(pool: InferencePool, engine: Engine) -> bool:
    """A successor that came up between two looks: it is live by our books, and has never been given our version."""
    if engine.state != "live":
        return False
    before = engine.life, engine.version
    try:
        timeout = aiohttp.ClientTimeout(5)
        async with pool.session.get(f"{engine.url}/weight_info", timeout=timeout) as response:
            version = text_of(await response.json(), "weight_version")
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
        return False  # busy, or going: `is_healthy` will tell
    is_as_before = engine.state == "live" and before == (engine.life, engine.version)
    return is_as_before and version != str(engine.version)
