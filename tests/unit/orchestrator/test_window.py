"""Which conversations have their turns, by the load of the engines."""

import asyncio
import random

import msgspec
import pytest

from trireme.base.waiting import Waits
from trireme.journal.model_turn import Turn
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.responses import Load, read_load
from trireme.orchestrator.engines.window import GROW, Window
from trireme.orchestrator.session.session import Session
from trireme.orchestrator.session.wire import Done, RunTask

pytestmark = pytest.mark.anyio


def load_of(*, fits: int = 10, kv_usage: float = 0.5, waiting: int = 0, preemptions: int = 0) -> Load:
    return Load(100 * fits, kv_usage, waiting, preemptions)


def window_of(*fits: int, joined: int = 0) -> tuple[Window, list[Engine]]:
    """Open a window on engines whose caches hold so many conversations of 100 tokens each."""
    engines = [Engine(f"http://{n}", None, state="live") for n in range(len(fits))]
    window = Window(lambda: [each for each in engines if each.state == "live"], Waits("test"), 100, lambda: 1e-9)
    for engine, number in zip(engines, fits, strict=True):
        window.observe(engine, load_of(fits=number) if number else None)
    assert [window.join() for _ in range(joined)] == list(range(1, joined + 1))
    return window, engines


def go_on(window: Window) -> list[int]:
    return [each for each in window.conversations if window.may_go(each)]


async def test_turns_are_those_of_the_oldest_conversations_in_the_window():
    """Conversations come, go and wait at random while the window moves: none is stuck, and each begins in its turn."""
    (window, (engine,)), rng, begun = window_of(5), random.Random(3), []

    async def converse() -> None:
        number = window.join()
        for _ in range(4):
            await window.wait_for_turn(number)
            assert list(window.conversations).index(number) < max(1, int(window.size))
            begun.append(number)
            await asyncio.sleep(0.001 * rng.random())
        window.leave(number)

    async def poll() -> None:
        for preemptions in range(10_000):
            window.observe(engine, load_of(preemptions=preemptions // 3, waiting=rng.randrange(3), kv_usage=0.95))
            assert [*window.conversations][:1] == go_on(window)[:1]  # the oldest always goes on
            await asyncio.sleep(0.002)

    polling = asyncio.create_task(poll())
    await asyncio.wait_for(asyncio.gather(*(converse() for _ in range(150))), 60)
    polling.cancel()
    assert list(dict.fromkeys(begun)) == list(range(1, 151))
    assert (window.conversations, window.waiting, window.waits.now()) == ({}, {}, [])


def test_window_is_the_share_of_live_engines_that_report_a_cache():
    window, engines = window_of(3, 3, joined=10)
    assert go_on(window) == [1, 2, 3, 4, 5, 6]
    engines[0].state = "quarantined"
    window.engines_changed()
    assert go_on(window) == [1, 2, 3]
    assert len(go_on(window_of(0, joined=2000)[0])) == 2000  # without a report


BUSY, FULL, PREEMPTING = load_of(waiting=2), load_of(kv_usage=0.95, waiting=2), load_of(preemptions=4)


@pytest.mark.parametrize(
    ("seen", "is_updated", "size"),
    [(BUSY, False, 10), (FULL, False, 6.4), (PREEMPTING, False, 8), (PREEMPTING, True, 10)],
)
async def test_window_shrinks_once_until_the_last_change_shows(seen, is_updated, size):
    window, (engine,) = window_of(10, joined=10)
    if is_updated:  # which makes an engine preempt its requests
        window.engines_changed()
    window.observe(engine, msgspec.structs.replace(seen))
    assert window.size == pytest.approx(size)
    window.observe(engine, load_of(preemptions=9))  # the youngest still have the turns that they had
    assert window.size == pytest.approx(min(size, 8))


@pytest.mark.parametrize(("token_s", "size"), [(1e-9, 10), (1.0, 0.8)])
async def test_evicted_tokens_count_by_the_time_that_they_take(token_s, size):
    window, _ = window_of(10, joined=1)
    window.token_s = lambda: token_s
    window._round = 0, 0.0, asyncio.get_running_loop().time() - 10
    for num_known in (0, *[900] * 8):  # nothing of which was in the cache
        turn = Turn([0] * 10, [], [0], "stop", num_computed=1010)
        window.learn(1, 1000, num_known, turn)
    assert window.width == pytest.approx(size)


async def test_window_doubles_until_the_first_congestion_while_as_many_end():
    window, (engine,) = window_of(4, joined=50)
    turns = [asyncio.create_task(window.wait_for_turn(each)) for each in window.conversations]
    await asyncio.sleep(0)
    for number in range(41, 51):  # those that are cancelled while they wait have shown nothing
        turns[number - 1].cancel()
        window.leave(number)
    assert window.size == 4
    for number in range(1, 5):
        window.leave(number)
    assert window.size == 8
    window.observe(engine, load_of(preemptions=1))
    window._is_calm = True
    window.leave(5)
    assert window.size == pytest.approx(0.8 * 8 + GROW)
    for turn in turns:
        turn.cancel()


async def test_waiting_for_older_rollouts_is_none_of_a_rollouts_own_time():
    session = Session(RunTask(task="t", index=0), timeout_s=0.05)
    session.begin(lambda: None)
    following = asyncio.create_task(session.follow(lambda message: None))
    await asyncio.sleep(0)
    with session.clock_stopped():
        await asyncio.sleep(0.2)
    session.deliver(Done(task="t", reward=1.0))
    assert (await following).reward == 1.0


def test_load_is_that_of_all_cores():
    values = {"num_requests_waiting": (2, 1), "kv_cache_usage_perc": (0.25, 0.75), "num_preemptions_total": (5, 0)}
    lines = [f'vllm:{name}{{engine="{n}"}} {value}' for name, of in values.items() for n, value in enumerate(of)]
    lines += ['vllm:cache_config_info{kv_cache_size_tokens="1600"} 1.0'] * 2
    assert read_load("\n".join(lines)) == Load(3200, 0.75, 3, 5)
    assert read_load("\n".join(lines[1:2])) is None
