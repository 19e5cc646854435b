"""A conversation stays with the engine core that has computed it, and moves when that is faster."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engines.fake_engine import FakeEngine, WeightWire, open_fake_engine
from trireme.base.waiting import Waits
from trireme.config.inference import KeepPrefixCache
from trireme.orchestrator.engines.affinity import BLOCK, Affinity, Place, prefix_hashes
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.pool import InferencePool, open_inference_pool
from trireme.orchestrator.engines.responses import PromptDetails, Response, Usage

SAYS = {"answer": lambda asked: [asked.rng.randrange(20, 40) for _ in range(40)], "block": BLOCK}
PROMPT = list(range(20, 120))  # three whole blocks
SAMPLING = {"max_tokens": 40}


@asynccontextmanager
async def opened(
    kept: KeepPrefixCache = "never", **knobs: Any
) -> AsyncIterator[tuple[InferencePool, list[FakeEngine]]]:
    limits = {"max_model_len": 4096, "timeout_s": 20.0, "max_concurrent": 64}
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(open_fake_engine(WeightWire(), **SAYS | knobs)) for _ in range(2)]
        urls = [fake.url for fake in fakes]
        pool = await stack.enter_async_context(open_inference_pool(urls, waits=Waits("test"), **limits))
        pool.keep_prefix_cache = kept
        pool.affinity.request_s, pool.affinity.measure = 1e-4, lambda *_, **__: None  # one request: as one token
        for engine, fake in zip(pool.engines, fakes, strict=True):
            engine.num_cores = fake.num_cores
        await update(pool, 0)
        yield pool, fakes


async def update(pool: InferencePool, version: int) -> None:
    """As an update of all engines does, without tensors: none is asked before all of them have the version."""
    for engine in pool.engines:
        pool.quarantine(engine)
    keeps = version > 0 and pool.keep_prefix_cache != "never"
    for engine in pool.engines:
        await engine.post("pause?mode=keep" + "&clear_cache=false" * keeps)
        await engine.post("update_weight_version", {"new_version": str(version)})
        await engine.post("resume")
    for engine in pool.engines:
        pool.go_live(engine, version, keeps_caches=keeps)


@pytest.mark.parametrize("num_cores", [1, 2])
def test_conversations_stay_with_the_core_that_has_computed_them(num_cores):
    """Members of groups share a prompt and nothing else; the engines themselves count what they compute."""

    async def converse(pool: InferencePool, number: int) -> tuple[int, int, list[int]]:
        ids, rng, computed = [number // 4, *PROMPT], random.Random(number), 0
        for _ in range(6):
            turn = await pool.generate(ids, SAMPLING)
            computed += turn.num_computed
            ids += [*turn.ids, *(rng.randrange(20, 40) for _ in range(40))]
            await asyncio.sleep(0.01 * rng.random())
        return computed, len(ids) - 40, ids

    async def main() -> None:
        async with opened(num_cores=num_cores) as (pool, fakes):
            found = await asyncio.gather(*(converse(pool, number) for number in range(12)))

        # once a conversation differs from all others, it is asked of one core
        cores = defaultdict(set)
        for fake in fakes:
            for asked in fake.requests:
                cores[tuple(asked.ids[:200])].add((fake.port, asked.core))
        assert {len(each) for ids, each in cores.items() if len(ids) == 200} == {1}
        assert len(set.union(*cores.values())) > num_cores

        # each turn computes again the block that was not whole, and its prompt in whole blocks at each core
        assert sum(computed for computed, _, _ in found) == sum(fake.num_computed for fake in fakes)
        assert all(computed < length + 6 * BLOCK for computed, length, _ in found)

    asyncio.run(main())


def away(pool: InferencePool, engine: Engine) -> None:
    pool.quarantine(engine)


def restarted(pool: InferencePool, engine: Engine) -> None:
    """Its cache is empty, and it has another request."""
    engine.life += 1
    engine.in_flight_by_core[0] += 1


def given_weights(pool: InferencePool, engine: Engine) -> None:
    engine.version = 1
    engine.in_flight_by_core[0] += 1


def slow(pool: InferencePool, engine: Engine) -> None:
    """More requests than the tokens that it has computed: another engine has computed them before these are over."""
    engine.in_flight_by_core[0] += 4 * BLOCK + 1


@pytest.mark.parametrize("event", [away, restarted, given_weights, slow], ids=lambda event: event.__name__)
def test_a_conversation_moves_when_its_engine_cannot_answer_first(event: Callable[[InferencePool, Engine], None]):
    async def main() -> None:
        async with opened() as (pool, fakes):
            turn = await pool.generate(PROMPT, SAMPLING)
            ids = PROMPT + turn.ids + [7] * 8  # of 148, four blocks of 32 are known
            pool.engines[0].in_flight_by_core[0] += 4 * BLOCK - 1
            known = await pool.generate(ids, SAMPLING)
            pool.engines[0].in_flight_by_core[0] -= 4 * BLOCK - 1
            assert ([len(fake.requests) for fake in fakes], known.num_computed) == ([2, 0], 148 - 128 + 40)
            event(pool, pool.engines[0])
            moved = await pool.generate(ids, SAMPLING)
            assert ([len(fake.requests) for fake in fakes], moved.num_computed) == ([2, 1], 148 + 40)

    asyncio.run(main())


def test_what_an_update_makes_an_engine_compute_again_is_counted():
    async def main() -> None:
        async with opened(token_s=0.01) as (pool, fakes):
            turning = asyncio.create_task(pool.generate(PROMPT, SAMPLING))
            while fakes[0].num_computed < len(PROMPT) + 5:
                await asyncio.sleep(0.001)
            await update(pool, 1)
            turn = await turning
            place = turn.versions.index(1)
            assert turn.num_computed == 100 + 40 + 100 + place == fakes[0].num_computed

    asyncio.run(main())


Recorded = list[tuple[tuple[int, ...], int | None, int]]
"""Of each turn: its prompt, what the conversation had attended to before it, and what is recorded for it."""


async def converse_over_updates(kept: KeepPrefixCache) -> tuple[list[FakeEngine], Recorded, list[tuple[int, int]]]:
    """Also returns of each conversation the tokens computed for it, and its length."""
    recorded: Recorded = []

    async def converse(pool: InferencePool, number: int) -> tuple[int, int]:
        ids, rng, computed, since = [number // 4, *PROMPT], random.Random(number), 0, None
        for _ in range(6):
            turn = await pool.generate(ids, SAMPLING, since=since)
            computed += turn.num_computed
            recorded.append((tuple(ids), since, turn.oldest))
            since = min(turn.oldest, turn.oldest if since is None else since)
            ids += [*turn.ids, *(rng.randrange(20, 40) for _ in range(40))]
            await asyncio.sleep(0.05 * rng.random())
        return computed, len(ids) - 40

    async with opened(kept, token_s=0.001) as (pool, fakes):
        talking = asyncio.gather(*(converse(pool, number) for number in range(8)))
        version = 0
        # Eight turns may be under way at an update: of each twelve that end, four or more have met none.
        while not talking.done():
            await asyncio.sleep(0.005)
            if len(recorded) >= 12 * (version + 1):
                version += 1
                await update(pool, version)
        assert version > 2
        return fakes, recorded, await talking


@pytest.mark.parametrize("kept", ["running", "always"])
def test_oldest_version_attended_to_is_what_the_engines_count(kept):
    fakes, recorded, conversations = asyncio.run(converse_over_updates(kept))
    counted = {tuple(asked.ids): asked for fake in fakes for asked in fake.requests if asked.oldest}
    exact = [(oldest, counted[ids].oldest) for ids, _, oldest in recorded if not counted[ids].met]
    assert all({oldest} == set(known) for oldest, known in exact)
    assert exact
    # a request that an update met on its way may have begun by either version
    assert all(oldest <= min(counted[ids].oldest) for ids, _, oldest in recorded)
    assert all(since <= oldest for _, since, oldest in recorded if since is not None)
    # with "always" hardly any block is computed twice
    assert all(computed < length + 6 * BLOCK for computed, length in conversations) == (kept == "always")
    assert any(since == oldest for _, since, oldest in recorded if since is not None) or kept == "running"


@given(st.floats(0, 0.01), st.floats(0.002, 0.02), st.floats(1e-6, 1e-3), st.lists(st.integers(1, 500), min_size=60))
def test_factors_are_measured_within_what_engines_can_do(per_load_s, token_s, prefill_s, prompts):
    """Answers of 50 tokens that each take `token_s`, and `per_load_s` more for each request that shares the core."""
    affinity, place = Affinity(), Place(Engine("a", None), 0)
    for load, num_prompt in enumerate(prompts[:60], 1):
        rate = token_s + per_load_s * load
        response = Response(choices=[], prefill_s=prefill_s * num_prompt)
        seconds = 50 * rate + response.prefill_s
        affinity.measure(place, num_prompt, 50, response, seconds=seconds, load=load)
    equal_part = token_s / 30.5 + per_load_s  # of the mean load
    assert affinity.request_s == pytest.approx(50 * max(per_load_s, 0.1 * equal_part), rel=0.01)
    assert affinity.token_s == pytest.approx(prefill_s)


def test_records_that_no_cache_confirms_count_less_and_less():
    engines, affinity, hashes = [Engine("a", None), Engine("b", None)], Affinity(request_s=1e-5), prefix_hashes(PROMPT)
    affinity.record(Place(engines[1], 0), hashes)
    place = affinity.choose(engines, hashes, 100)
    assert (place.engine.url, place.num_held) == ("b", 96)
    for _ in range(10):
        response = Response(choices=[], usage=Usage(PromptDetails(0)))
        affinity.measure(place, 100, 40, response, seconds=1.0, load=1)
    assert affinity.hit_frac == 0
    assert affinity.choose(engines, hashes, 100).engine.url == "a"
