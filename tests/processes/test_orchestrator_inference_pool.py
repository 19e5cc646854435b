"""Requests to engines that drop them, refuse them, freeze, or die."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fake_engine import open_fake_engine
from trireme.base.errors import DeadlineExceeded
from trireme.base.waiting import Waits
from trireme.orchestrator.engine_keeper import keep_engines
from trireme.orchestrator.inference_pool import KEEP_IDLE_S, Engine, OverlongPrompt, open_inference_pool

END = 2
SAYS_7 = {"answer": lambda asked: [7, END]}


def with_pool(
    use: Callable[..., Awaitable[Any]],
    *,
    num_engines: int = 1,
    timeout_s: float = 20,
    request_timeout_s: float | None = None,
    max_concurrent: int = 64,
    **knobs: Any,
) -> Any:
    """Calls `use(pool, engine, ...)` with engines that serve version 0."""

    async def main() -> Any:
        async with AsyncExitStack() as stack, asyncio.timeout(20):
            engines = [await stack.enter_async_context(open_fake_engine(**knobs)) for _ in range(num_engines)]
            opened = open_inference_pool(
                [engine.url for engine in engines],
                waits=Waits("orchestrator"),
                max_model_len=32,
                timeout_s=timeout_s,
                request_timeout_s=request_timeout_s,
                max_concurrent=max_concurrent,
            )
            pool = await stack.enter_async_context(opened)
            pool.retry_s = pool.health_interval_s = 0.01
            for engine in engines:
                engine.version = 0

            async def judge(engine: Engine) -> bool:
                pool.go_live(engine, 0)
                return True

            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(keep_engines(pool, judge, start_timeout_s=20))
                await until(lambda: len(pool.live_engines()) == num_engines)
                result = await use(pool, *engines)
                keeping.cancel()
            return result

    return asyncio.run(main())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_a_turn_comes_back_as_the_engine_gave_it():
    async def use(pool, engine):
        turn = await pool.generate([5, 6], {"temperature": 0.5, "max_tokens": 3})
        (asked,) = engine.requests
        assert (asked.ids, asked.sampling["temperature"], asked.sampling["max_tokens"]) == ([5, 6], 0.5, 3)
        return turn

    turn = with_pool(use, answer=lambda asked: [7, 8, END])
    assert (turn.ids, turn.spoken, turn.versions, len(turn.logprobs)) == ([7, 8, END], [7, 8], [0, 0, 0], 3)
    assert (turn.finish_reason, turn.cut) == ("stop", None)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "cut"), [(30, 9, "context_full"), (30, 2, "context_full"), (30, 1, "max_tokens")]
)
def test_it_is_known_what_a_turn_ran_out_of(prompt, max_tokens, cut):
    async def use(pool, engine):
        return await pool.generate([5] * prompt, {"max_tokens": max_tokens})

    assert with_pool(use, answer=lambda asked: [7, 7, 7, 7]).cut == cut


def test_a_prompt_that_fills_the_context_is_not_sent_and_a_long_one_leaves_less_room():
    async def use(pool, engine):
        with pytest.raises(OverlongPrompt, match="32 tokens, the model takes 32"):
            await pool.generate([5] * 32, {})
        await pool.generate([5] * 31, {"max_tokens": 10})
        await pool.generate([5] * 30, {})
        return [asked.sampling["max_tokens"] for asked in engine.requests]

    assert with_pool(use) == [1, 2]


def test_a_request_that_the_engine_drops_or_aborts_is_sent_again():
    """What it had sampled by then is no turn."""
    endings = iter(["abort", "stop"])

    def end(response: dict) -> dict:
        response["choices"][0]["finish_reason"] = next(endings)
        return response

    async def use(pool, engine):
        return await pool.generate([5], {"max_tokens": 9}), len(engine.requests)

    turn, num_requests = with_pool(use, drop_next=2, mangle=end, **SAYS_7)
    assert (turn.ids, turn.finish_reason, num_requests) == ([7, END], "stop", 4)


def test_a_request_that_is_dropped_again_and_again_ends_with_the_engines_name():
    async def use(pool, engine):
        with pytest.raises(DeadlineExceeded, match=f"{engine.url} to answer a request that it dropped again and again"):
            await pool.generate([5], {})

    with_pool(use, drop_next=1_000_000, timeout_s=0.2)


def test_a_request_that_was_long_under_way_before_it_was_dropped_for_the_first_time_is_sent_again():
    async def slow_and_in_vain(asked):
        if asked.number == 0:
            await asyncio.sleep(0.5)
            raise web.HTTPBadGateway

    async def use(pool, engine):
        return (await pool.generate([5], {})).ids, len(engine.requests)

    assert with_pool(use, delay=slow_and_in_vain, timeout_s=0.3, request_timeout_s=20, **SAYS_7) == ([7, END], 2)


def test_a_request_that_the_engine_refuses_is_not_tried_again():
    async def use(pool, engine):
        with pytest.raises(ValueError, match=r"refused a request \(400\).*refused with 400"):
            await pool.generate([5], {})
        return len(engine.requests)

    assert with_pool(use, refuse=lambda asked: 400) == 1


def test_versions_are_told_for_each_token_of_a_turn_that_an_update_interrupts():
    async def use(pool, engine):
        turn = asyncio.create_task(pool.generate([5], {}))
        await until(lambda: engine.requests)
        await asyncio.sleep(0.05)
        pool.quarantine(pool.engines[0])
        await pool.post(pool.engines[0], "pause")
        engine.version = 1
        await pool.post(pool.engines[0], "resume")
        pool.go_live(pool.engines[0], 1)
        return (await turn).versions

    versions = with_pool(use, answer=lambda asked: list(range(10, 20)), token_s=0.02)
    assert len(versions) == 10
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


def test_nothing_is_asked_of_an_engine_that_has_confirmed_nothing_and_the_time_is_not_its_fault():
    async def use(pool, engine):
        pool.quarantine(pool.engines[0])
        turn = asyncio.create_task(pool.generate([5], {}))
        await asyncio.sleep(0.3)
        assert (turn.done(), engine.requests, pool.describe()) == (False, [], f"{engine.url} is quarantined")
        pool.go_live(pool.engines[0], 0)
        return (await turn).ids

    assert with_pool(use, timeout_s=0.2, **SAYS_7) == [7, END]


def test_no_more_requests_are_under_way_than_allowed():
    async def use(pool, engine):
        await asyncio.gather(*(pool.generate([5], {}) for _ in range(30)))
        return engine.most_at_once

    assert with_pool(use, max_concurrent=4, token_s=0.001) == 4


def test_requests_spread_over_the_engines():
    async def use(pool, one, two):
        await asyncio.gather(*(pool.generate([5], {}) for _ in range(20)))
        return len(one.requests), len(two.requests)

    assert with_pool(use, num_engines=2, token_s=0.01) == (10, 10)


def test_an_engine_whose_core_is_dead_is_asked_nothing_though_its_server_stands():
    async def use(pool, engine):
        engine.dead = True
        await until(lambda: pool.engines[0].state == "starting")
        turn = asyncio.create_task(pool.generate([5], {}))
        await asyncio.sleep(0.05)
        assert engine.requests == []
        engine.dead = False
        return (await turn).ids

    assert with_pool(use, **SAYS_7) == [7, END]


def test_an_engine_that_is_unwell_for_a_moment_is_not_given_up():
    async def use(pool, engine):
        for _ in range(10):
            engine.dead = not engine.dead
            await asyncio.sleep(0.015)
        engine.dead = False
        await asyncio.sleep(0.05)
        return pool.engines[0].life, pool.engines[0].state

    assert with_pool(use) == (1, "live")


def test_an_engine_that_is_replaced_between_two_looks_is_noticed_by_the_version_that_it_does_not_know():
    async def use(pool, engine):
        engine.version = -1
        await until(lambda: pool.engines[0].life == 2)
        return pool.interruptions

    assert with_pool(use) == 1


def test_an_answer_by_weights_that_nobody_confirmed_is_thrown_away_and_asked_for_again():
    async def use(pool, engine):
        pool.health_interval_s = 60.0
        await asyncio.sleep(0.05)
        engine.version = -1  # a successor that holds the base model
        turn = asyncio.create_task(pool.generate([5], {}))
        await until(lambda: engine.requests)
        await until(lambda: pool.engines[0].life >= 2)  # suspected at once, whatever the interval
        engine.version = 0
        return (await turn).versions

    assert with_pool(use, **SAYS_7) == [0, 0]


def test_an_answer_of_an_earlier_life_is_not_taken_for_one_of_the_weights_confirmed_since():
    async def use(pool, engine):
        hold = asyncio.Event()
        engine.delay = lambda asked: hold.wait()
        turn = asyncio.create_task(pool.generate([5], {}))
        await until(lambda: engine.requests)
        pool.quarantine(pool.engines[0])
        hold.set()
        await until(lambda: not pool.engines[0].in_flight)
        pool.engines[0].life += 1
        pool.go_live(pool.engines[0], 0)
        await turn
        return len(engine.requests)

    assert with_pool(use, **SAYS_7) == 2


def test_no_request_goes_out_on_a_connection_that_the_engine_is_about_to_close():
    """An engine closes what was idle for so long; the request that comes just then is lost, and costs a second."""
    settings = Path(find_spec("vllm").submodule_search_locations[0]) / "envs.py"
    closes_after_s = re.search(r"VLLM_HTTP_TIMEOUT_KEEP_ALIVE: int = (\d+)", settings.read_text())[1]
    assert int(closes_after_s) > KEEP_IDLE_S

    async def use(pool, engine):
        return pool.session.connector._keepalive_timeout

    assert with_pool(use) == KEEP_IDLE_S
