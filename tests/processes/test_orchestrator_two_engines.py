"""Two engines, one of which dies: the other one goes on, and whatever waits for the dead one is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, WeightWire, open_fake_engine, ready_message, sent_message
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.ledger.versions import Versions
from trireme.messages import Again, Live, NotYet
from trireme.orchestrator.engine_keeper import keep_engines
from trireme.orchestrator.inference_pool import InferencePool, open_inference_pool
from trireme.orchestrator.policy import Policy
from whole_run import build_config

DEADLINE_S = 60
START_TIMEOUT_S = 1.0
ASKED = {"max_tokens": 4}


@dataclass
class Pair:
    """`mortal` can be killed, once."""

    config: RunConfig
    wire: WeightWire
    other: FakeEngine
    mortal: FakeEngine
    pool: InferencePool
    policy: Policy
    keeping: asyncio.Task
    life: AsyncExitStack
    attempts: int = 0

    async def kill(self) -> None:
        await self.life.aclose()
        await self.until(lambda: self.pool.engines[1].state == "starting")

    async def publish(self, version: int, *, engines: int = 2, pause_s: float = 0.0) -> Any:
        self.attempts += 1
        ready = ready_message(self.config, version, self.attempts, incarnation="one")
        while isinstance(go := await self.policy.ready(ready), NotYet):
            pass
        await asyncio.sleep(pause_s)
        sent = sent_message(self.config, version, self.attempts)
        for _ in range(engines):
            self.wire.send(go.epoch, sent.digests)
        while isinstance(reply := await self.policy.sent(sent), NotYet):
            pass
        return reply

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def mortal_computes_with(self, version: int) -> None:
        await self.until(lambda: self.mortal.version == version and not self.mortal.paused)


@asynccontextmanager
async def open_policy(config: RunConfig, urls: list[str]) -> AsyncIterator[tuple[InferencePool, Policy, asyncio.Task]]:
    """As an orchestrator has it that has just been started."""
    waits = Waits("orchestrator")
    async with open_inference_pool(urls, waits=waits, max_model_len=64, timeout_s=20, max_concurrent=64) as pool:
        pool.retry_s = pool.health_interval_s = 0.02
        policy = Policy(pool, config.weight_broadcast, waits, Versions(config.paths.journal), offers=True)
        keeping = asyncio.create_task(keep_engines(pool, policy.judge, start_timeout_s=START_TIMEOUT_S))
        try:
            yield pool, policy, keeping
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])


@asynccontextmanager
async def open_pair(config: RunConfig, **knobs: Any) -> AsyncIterator[Pair]:
    wire = WeightWire()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(open_fake_engine(wire, **knobs))
        life = await stack.enter_async_context(AsyncExitStack())
        mortal = await life.enter_async_context(open_fake_engine(wire, **knobs))
        pool, policy, keeping = await stack.enter_async_context(open_policy(config, [other.url, mortal.url]))
        yield Pair(config, wire, other, mortal, pool, policy, keeping, life)


def with_pair(folder: Path, play: Callable[[Pair], Awaitable[None]], **knobs: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), open_pair(build_config(folder), **knobs) as pair:
            await play(pair)

    asyncio.run(main())


def test_an_engine_may_stay_away_for_long_also_while_the_other_is_updated(tmp_path):
    async def play(pair: Pair) -> None:
        assert await pair.publish(0) == Live(version=0)
        await pair.kill()
        await asyncio.sleep(2 * START_TIMEOUT_S)
        assert await pair.publish(1, engines=1, pause_s=1.0) == Live(version=1)
        await asyncio.sleep(0.5)
        assert not pair.keeping.done()
        assert [engine.state for engine in pair.pool.engines] == ["live", "starting"]

    with_pair(tmp_path, play, has_room=False)  # without room for two versions, it is updated for as long as they come


def test_an_orchestrator_that_is_restarted_while_an_engine_is_away_goes_on_with_the_other(tmp_path):
    async def play(pair: Pair) -> None:
        assert await pair.publish(0) == Live(version=0)
        await pair.kill()
        pair.keeping.cancel()
        async with open_policy(pair.config, [pair.other.url, pair.mortal.url]) as (pool, policy, keeping):
            pair.pool, pair.policy = pool, policy
            await pair.until(lambda: pool.engines[0].state == "live")  # it serves what was confirmed
            await asyncio.sleep(2 * START_TIMEOUT_S)
            assert await pair.publish(1, engines=1) == Live(version=1)
            assert not keeping.done()
            assert [engine.state for engine in pool.engines] == ["live", "starting"]

    with_pair(tmp_path, play)


def test_a_run_begins_with_all_of_its_engines_or_says_which_one_is_missing(tmp_path):
    async def play(pair: Pair) -> None:
        await pair.kill()
        pair.keeping.cancel()
        async with open_policy(pair.config, [pair.other.url, pair.mortal.url]) as (_, _, keeping):
            await asyncio.wait([keeping])
            assert f"{pair.mortal.url} to come up" in str(keeping.exception().exceptions[0])

    with_pair(tmp_path, play)


def test_an_engine_that_dies_after_its_probe_does_not_go_live_with_the_other(tmp_path):
    async def play(pair: Pair) -> None:
        assert await pair.publish(0) == Live(version=0)
        pair.other.probe_s = 3.0
        update = asyncio.create_task(pair.publish(1))
        await pair.mortal_computes_with(1)
        await asyncio.sleep(0.3)
        await pair.kill()
        assert not update.done()
        assert await update == Live(version=1)
        assert [(engine.state, engine.version) for engine in pair.pool.engines] == [("live", 1), ("starting", None)]
        answers = await asyncio.gather(*(pair.pool.generate([5, 6], ASKED) for _ in range(4)))
        assert all(set(answer.versions) == {1} for answer in answers)

    with_pair(tmp_path, play)


def test_a_request_whose_engine_dies_before_it_has_confirmed_is_sent_to_the_other(tmp_path):
    async def play(pair: Pair) -> None:
        assert await pair.publish(0) == Live(version=0)
        may_answer = asyncio.Event()

        async def wait(_: Any) -> None:
            await may_answer.wait()

        pair.mortal.delay = pair.other.delay = wait
        asking = [asyncio.create_task(pair.pool.generate([5, 6], ASKED)) for _ in range(2)]
        await pair.until(lambda: bool(pair.other.requests and pair.mortal.requests))
        pair.mortal.probe_s = 5.0
        update = asyncio.create_task(pair.publish(1))
        await pair.mortal_computes_with(1)
        may_answer.set()
        pair.other.delay = None
        await asyncio.sleep(0.3)
        await pair.kill()
        assert isinstance(await update, Again)
        assert await pair.publish(1, engines=1) == Live(version=1)
        assert all(set(answer.versions) <= {0, 1} for answer in await asyncio.gather(*asking))

    with_pair(tmp_path, play)
