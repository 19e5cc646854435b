"""Health checks: which engines have come up, died, or been replaced by another process. States: see `pool`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import aiohttp

from trireme.base.errors import PeerDied
from trireme.base.log import RateLimitedLog, get_logger
from trireme.orchestrator.engines.engine import HEALTH_TIMEOUT_S, REQUEST_ERRORS, Engine
from trireme.orchestrator.engines.pool import InferencePool
from trireme.orchestrator.engines.responses import LOAD_ROUTE, WeightInfo, read_answer, read_load

log = get_logger("engines")
rate_limited = RateLimitedLog(log)

HEALTH_MISSES = 5  # in a row, before an engine counts as dead
POLL_S = 0.25  # while an engine is waited for
LOAD_POLL_S = 5.0  # while one has requests

Admit = Callable[[Engine], Awaitable[bool]]
"""Lets an engine that has come up go live, if it may; returns whether it is."""


async def keep_engines(pool: InferencePool, admit: Admit, start_timeout_s: float) -> None:
    """Follow the state of each engine of `hosts.inference` until cancelled.

    Raises: DeadlineExceeded if one did not come up (again).
    """
    async with asyncio.TaskGroup() as keepers:
        for engine in [each for each in pool.engines if each.member is None]:
            keepers.create_task(keep_engine(pool, engine, admit, start_timeout_s))


async def keep_engine(pool: InferencePool, engine: Engine, admit: Admit, start_timeout_s: float) -> None:
    """Produces the engine's state; waits for the clock, or for a request that the engine dropped.

    Raises: DeadlineExceeded if it did not come up (again), and the run cannot do without it or it has just joined.
    """
    while True:
        if not await _until_up(pool, engine, admit, start_timeout_s):
            engine.state = "quarantined"
            pool.watch(engine)
        await _until_gone(pool, engine)
        pool.lose(engine)


async def _until_up(pool: InferencePool, engine: Engine, admit: Admit, deadline_s: float) -> bool:
    """Return whether it is live, once it is up and has answered what it serves."""
    with pool.waits.waiting(f"{engine.url} to come up", peer="inference", deadline_s=deadline_s) as wait:
        while True:
            if await engine.learn_size():
                # A new life: nothing that was sent to the process before counts for this one.
                engine.suspected.clear()
                engine.life += 1
                engine.load = None
                await poll_load(pool, engine)
                try:
                    is_live = await admit(engine)
                    log.info("%s is up after %.0f s", engine.url, wait.waited_s)
                    return is_live
                except PeerDied as error:
                    wait.note = str(error)
                    rate_limited.warning("%s came up and went: %s", engine.url, error)
            # an engine that the others make up for may stay away; one that joined is replaced by another that joins
            if engine.member or pool.is_missed(engine) or not pool.reachable():
                wait.check()
            else:
                wait.restart_deadline()
            await asyncio.sleep(POLL_S)


async def _until_gone(pool: InferencePool, engine: Engine) -> None:
    """Return once it has failed its health checks for a while, or another process has taken its place."""
    misses, polled = 0, time.monotonic()
    while misses < HEALTH_MISSES:
        # A dropped request wakes this at once. Otherwise the engine is checked at each interval.
        with suppress(TimeoutError):
            async with asyncio.timeout(pool.health_interval_s):
                await engine.suspected.wait()
        engine.suspected.clear()

        health = await engine.health()
        if health == "gone":
            break
        if health == "good" and await _is_replaced(engine):
            log.warning("%s restarted; its weights must be sent again", engine.url)
            return
        misses = 0 if health == "good" else misses + 1
        if health == "good" and engine.in_flight and time.monotonic() > polled + LOAD_POLL_S:
            await poll_load(pool, engine)
            polled = time.monotonic()
    log.warning("%s is gone; its requests are sent again, and its successor is waited for", engine.url)


async def poll_load(pool: InferencePool, engine: Engine) -> None:
    """Read an engine's load. One that is too busy to answer has the one before."""
    with suppress(*REQUEST_ERRORS, ValueError):
        status, answer = await engine.request(LOAD_ROUTE, timeout=aiohttp.ClientTimeout(HEALTH_TIMEOUT_S))
        pool.window.observe(engine, read_load(answer.decode()) if status == 200 else None)


async def _is_replaced(engine: Engine) -> bool:
    """Detect an engine that restarted between two health checks: still live here, but without our weights."""
    if engine.state != "live":
        return False

    # An update may give the engine a version, or a new life may begin, while the request is under way.
    before = engine.life, engine.version
    try:
        _, answer = await engine.request("weight_info", timeout=aiohttp.ClientTimeout(HEALTH_TIMEOUT_S))
        version = str(read_answer(answer, WeightInfo).weight_version)
    except (*REQUEST_ERRORS, ValueError):
        return False  # busy, or ending: the next health check will tell
    is_as_before = engine.state == "live" and before == (engine.life, engine.version)
    return is_as_before and version != str(engine.version)
