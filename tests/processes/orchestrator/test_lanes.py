"""The lanes of a real orchestrator between scripted ends: they add up to the time that passed."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.engines.fake_engine import Asked
from support.runs.whole_run import block_until, build_config, run
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.monitor.metrics import read_metrics
from trireme.monitor.spans import Span, SpansFile, read_spans, reason_of
from trireme.monitor.timeline import OTHER, joined, lanes_of, shares
from trireme.orchestrator.engines.pool import InferencePool, open_inference_pool
from trireme.orchestrator.lanes import Lanes, engine_lane

STEPS = 4
TOUCH_S = 2e-6


def by_lane(config: RunConfig) -> dict[str, list[Span]]:
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in joined(read_spans(config.paths.spans)[0]):
        lanes["engine" if span.lane == engine_lane(config.engine_urls[0]) else span.lane].append(span)
    return lanes


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run, its lanes, and what its engine saw itself: from when to when it had which request."""
    evaluation = {"interval": 2, "num_examples": 4, "rollouts_per_example": 1, "sampling": {"temperature": 1.0}}
    config = build_config(tmp_path_factory.mktemp("run"), max_steps=STEPS, orchestrator={"eval": evaluation})
    seen, began = [], time.time()

    async def delay(asked: Asked) -> None:
        begin_s = time.time()
        await asyncio.sleep(0.02)
        seen.append((begin_s, time.time()))

    def hold(version: int) -> None:
        if version == 1:  # a long step: the engine may not run further ahead
            block_until(lambda: Journal(config.paths.journal).has(2), "batch 2")
            time.sleep(0.15)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trireme.monitor.spans.MOST_A_SECOND", 10_000)  # so short a run turns very often
        assert run(config, engine={"delay": delay}, trainer={"before_step": hold}).error is None
    return SimpleNamespace(config=config, seen=seen, began=began, ended=time.time(), lanes=by_lane(config))


def test_the_lanes_add_up_to_the_wall_time_with_nothing_left_over(whole: SimpleNamespace) -> None:
    names = ["orchestrator", engine_lane(whole.config.engine_urls[0])]
    assert lanes_of(read_spans(whole.config.paths.spans)[0]) == names
    for spans in whole.lanes.values():
        assert all(second.begin_s == pytest.approx(first.end_s, abs=TOUCH_S) for first, second in pairwise(spans))
        begin_s, end_s = spans[0].begin_s, spans[-1].end_s
        assert sum(span.seconds for span in spans) == pytest.approx(end_s - begin_s, abs=1e-3)
        of_all = shares(spans, spans[0].lane, begin_s, end_s)
        assert sum(of_all.values()) == pytest.approx(1.0)
        assert of_all[OTHER] < 1e-3
        assert begin_s < end_s <= whole.ended + 0.01
    assert whole.lanes["engine"][0].begin_s >= whole.began - 0.01


def test_an_engine_generates_whenever_it_has_a_request(whole: SimpleNamespace) -> None:
    """By its own account: what it worked on lies within what its lane calls generating, or a transfer."""
    busy = [span for span in whole.lanes["engine"] if span.what in ("generate", "transfer")]
    assert len(whole.seen) >= STEPS * 8
    for begin_s, end_s in whole.seen:
        covered = sum(max(0, min(span.end_s, end_s) - max(span.begin_s, begin_s)) for span in busy)
        assert covered == pytest.approx(end_s - begin_s, abs=5e-3)
    rows = [row for row in read_metrics(whole.config.paths.metrics)[0] if "reward/mean" in row]
    fractions = [row["perf/engine_idle_frac"] for row in rows]
    assert len(fractions) == STEPS
    assert all(0.0 <= fraction <= 1.0 for fraction in fractions)
    assert max(fractions) > 0.0


def test_lanes_record_every_transfer_and_journal_write_in_order(whole):
    engine, own = whole.lanes["engine"], whole.lanes["orchestrator"]
    assert engine[0].what == "start"
    versions = [span.step for span in engine if span.what == "transfer"]
    assert (sorted(set(versions)), versions) == (list(range(STEPS + 1)), sorted(versions))
    assert [span.step for span in own if span.what == "journal"] == list(range(STEPS))
    assert own[-1].what == "idle"
    waits = {span.why for span in engine if span.what == "wait"}
    assert "max_async_level 1: the trainer is at batch 1" in waits
    known = {"", "no weights yet", "max_async_level 1", "the orchestrator", "environments are working", "evaluation"}
    assert {reason_of(why) for why in waits} <= known | {"every batch is full"}


# by hand: two engines, and parts of a run that do nothing


@asynccontextmanager
async def open_lanes(path: Path) -> AsyncIterator[tuple[Lanes, InferencePool]]:
    urls = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    waits = Waits("test")
    async with open_inference_pool(urls, waits=waits, max_model_len=1, timeout_s=1, max_concurrent=1) as pool:
        for engine in pool.engines:
            pool.go_live(engine, 3)
        file = SpansFile(path)
        yield Lanes(RunConfig(max_steps=20), file, pool), pool
        file.close()


@pytest.mark.parametrize(
    ("state", "busy", "own", "why"),
    [
        ({}, False, ("wait", 5), "max_async_level 1: the trainer is at batch 3"),
        ({"version": 4}, False, ("wait", 5), "the orchestrator: the next rollouts are about to begin"),
        ({"num_under_way": 2}, False, ("generate", 5), "environments are working"),
        ({"num_under_way": 2}, True, ("generate", 5), "few requests: other engines have 1"),
        ({"evaluates": 2}, True, ("evaluate", 2), "evaluation: of version 2"),
        ({"next_batch": 20, "version": 19}, False, ("idle", 20), "every batch is full: the trainer is at batch 19"),
        ({"version": -1, "next_batch": 0}, False, ("wait", 0), "no weights yet: the trainer is to send them"),
    ],
)
def test_what_holds_an_engine_that_has_no_request(tmp_path, state, busy, own, why):
    now = {"version": 3, "next_batch": 5, "num_under_way": 0, "evaluates": None} | state

    async def hold() -> None:
        async with open_lanes(tmp_path / "spans.jsonl") as (lanes, pool):
            if busy:
                pool.count(pool.engines[0], 1)
            policy, evaluator = SimpleNamespace(version=now["version"]), SimpleNamespace(version=now["evaluates"])
            looking = asyncio.create_task(lanes.keep(policy, SimpleNamespace(**now), evaluator))
            await asyncio.sleep(0.002)
            looking.cancel()
            assert (lanes.own.now, lanes.own.step) == own

    asyncio.run(hold())
    spans = joined(read_spans(tmp_path / "spans.jsonl")[0])
    assert [(span.what, span.why) for span in spans if span.lane == "engine 10.0.0.2:8000"] == [("wait", why)]
    assert [span.what for span in spans if span.lane == "engine 10.0.0.1:8000"][-1] == ("generate" if busy else "wait")


def test_lane_follows_its_engine_through_transfers_and_death(tmp_path: Path):
    async def turn() -> list[tuple[str | None, int, str]]:
        async with open_lanes(tmp_path / "spans.jsonl") as (lanes, pool):
            engine, lane, told = pool.engines[0], lanes.lane_of(pool.engines[0]), []

            def close_batch() -> None:
                with lanes.closing(5):
                    pass

            def die() -> None:  # as health checks see it
                engine.life, engine.state = 1, "starting"
                pool.is_given(engine, None)

            for happens in [
                lambda: pool.count(engine, 5),
                lambda: pool.count(engine, -2),
                lambda: pool.count(engine, -1),
                close_batch,
                lambda: (pool.is_given(engine, 7, is_paused=True), pool.quarantine(engine)),
                lambda: pool.is_given(engine, 7),  # it goes on, and is not confirmed yet
                lambda: pool.count(engine, -2),
                lambda: pool.go_live(engine, 7),
                die,
            ]:
                happens()
                told.append((lane.now, lane.step, lane._why))
            return told

    assert asyncio.run(turn()) == [
        ("generate", -1, ""),
        ("generate", -1, ""),
        ("generate", -1, "few requests: less than half of the 5 that it had"),
        ("generate", -1, ""),
        ("transfer", 7, ""),
        ("generate", -1, ""),
        ("transfer", 7, ""),
        ("wait", -1, ""),
        ("start", -1, "it is gone: its successor is waited for"),
    ]
