"""How a version becomes live and what keeps it from it; requests to engines that drop, refuse, freeze, or die."""

import asyncio
import inspect
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from support.engines.fake_engine import (
    FakeEngine,
    WeightWire,
    digests_of,
    open_fake_engine,
    ready_message,
    sent_message,
)
from support.runs.whole_run import build_config
from trireme.base.errors import DeadlineExceeded, EngineRefused, PeerDied, WeightsMismatch
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.versions import Versions
from trireme.messages import Again, Done, GetBatch, Go, Live, NotYet, Publish, Refusal
from trireme.orchestrator.engines.engine import KEEP_IDLE_S, Member
from trireme.orchestrator.engines.health import POLL_S, keep_engines
from trireme.orchestrator.engines.pool import InferencePool, PromptTooLong, open_inference_pool
from trireme.orchestrator.trainer_requests import Peers, TrainerRequests
from trireme.orchestrator.weights.policy import Policy
from trireme.orchestrator.weights.update import WeightUpdates

END = 2
ASKED = [5, 6], {"max_tokens": 4}
SAYS_7 = {"answer": lambda asked: [7, END]}
SHORT_S = 0.3  # to come up
TWO_CORES = {"num_workers": 2, "num_cores": 2}


@dataclass
class Stage:
    config: RunConfig
    wire: WeightWire
    engines: list[FakeEngine]
    life: AsyncExitStack  # of the last engine
    pool: InferencePool
    policy: Policy
    updates: WeightUpdates
    keeping: asyncio.Task
    attempts: int = 0

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    @property
    def states(self) -> list[tuple[str, int | None]]:
        return [(engine.state, engine.version) for engine in self.pool.engines]

    async def announce(self, version: int, attempt: int = 1, *, incarnation: str = "one") -> Any:
        """Asks as the trainer does: until there is an answer."""
        message = ready_message(self.config, version, attempt, incarnation=incarnation)
        while isinstance(reply := await self.updates.ready(message), NotYet):
            pass
        return reply

    async def send(self, go: Go, attempt: int = 1, **probe: Any) -> Any:
        message = sent_message(self.config, go.version, attempt, **probe)
        if not message.payload:
            for _ in self.pool.reachable():
                self.wire.send(go.epoch, message.digests)
        while isinstance(reply := await self.updates.sent(message), NotYet):
            pass
        return reply

    async def publish(self, version: int, *, pause_s: float = 0.0, noise_age: int = 0, **who: Any) -> Any:
        """As one transfer after the other: the number of an attempt is never used twice."""
        self.attempts += 1
        go = await self.announce(version, self.attempts, **who)
        await asyncio.sleep(pause_s)
        return await self.send(go, self.attempts, noise_age=noise_age)

    async def generate(self) -> Any:
        return await self.pool.generate(*ASKED)

    async def lose_and_find(self) -> None:
        """As after a cut, or a restart of the orchestrator: the first engine is the same process as before."""
        self.engine.dead = True
        await until(lambda: self.pool.engines[0].state == "starting")
        self.engine.dead = False
        await until(lambda: self.pool.engines[0].state != "starting")

    async def kill(self) -> None:
        await self.life.aclose()
        await until(lambda: self.pool.engines[-1].state == "starting")


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def hold(engine: FakeEngine, route: str) -> tuple[asyncio.Event, asyncio.Event]:
    """Returns: set once this method of the engine is called; to be set so that it answers."""
    asked, release, answer = asyncio.Event(), asyncio.Event(), getattr(engine, route)

    async def held(*body: Any) -> Any:
        asked.set()
        await release.wait()
        return await answer(*body)

    setattr(engine, route, held)
    return asked, release


@asynccontextmanager
async def open_policy(
    config: RunConfig, urls: list[str], *, start_timeout_s: float = 20, max_concurrent: int = 64
) -> AsyncIterator[tuple[InferencePool, Policy, WeightUpdates, asyncio.Task]]:
    waits = Waits("orchestrator")
    sizes = {"max_model_len": 64, "timeout_s": 20, "max_concurrent": max_concurrent}
    async with open_inference_pool(urls, waits=waits, **sizes) as pool:  # type: ignore[arg-type]
        policy = Policy(pool, waits, Versions(config.paths.journal))
        pool.retry_s = pool.health_interval_s = 0.01
        keeping = asyncio.create_task(keep_engines(pool, policy.admit, start_timeout_s=start_timeout_s))
        yield pool, policy, WeightUpdates(policy, config.weight_broadcast), keeping
        keeping.cancel()
        await asyncio.wait([keeping])


async def on_stage(
    folder: Path,
    play: Callable[[Stage], Awaitable[None]],
    *,
    kind: str = "gloo",
    num_engines: int = 1,
    is_live: bool = True,
    policy: dict[str, Any] | None = None,
    tolerance: float | None = 1e-3,
    **knobs: Any,
) -> None:
    config = build_config(folder, weight_broadcast={"type": kind, "probe_tolerance": tolerance})
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        wire, engines = WeightWire(), []
        for _ in range(num_engines):
            life = await stack.enter_async_context(AsyncExitStack())
            engines.append(await life.enter_async_context(open_fake_engine(wire, **knobs)))
        opened = open_policy(config, [engine.url for engine in engines], **(policy or {}))
        stage = Stage(config, wire, engines, life, *await stack.enter_async_context(opened))
        if is_live:
            assert await stage.publish(0) == Live(version=0)
        await play(stage)


def staged(**how: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Plays once version 0 is live. What is not for `on_stage` are knobs of engines; a test's `knobs` are added."""

    def made(play: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def test(tmp_path: Path, **given: Any) -> None:
            asyncio.run(on_stage(tmp_path, partial(play, **given), **how | given.get("knobs", {})))

        names = ["tmp_path", *list(inspect.signature(play).parameters)[1:]]
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore
        return test

    return made


@pytest.mark.parametrize("knobs", [{"kind": "gloo"}, {"has_room": False}, {"kind": "filesystem"}])
@staged(is_live=False)
async def test_a_version_is_live_once_it_is_sent_and_confirmed_and_not_before(stage, knobs):
    """Without room for both an engine is paused before anything is sent; else requests go on until all is there."""
    first = await stage.announce(0)
    assert (stage.policy.version, stage.engine.weights) == (-1, {})
    assert await stage.send(first) == Live(version=0)
    go = await stage.announce(1, attempt=2)
    if stage.engine.has_room:
        turn = await stage.generate()
        assert (set(turn.versions), stage.engine.paused) == ({0}, False)
    await until(lambda: stage.engine.paused is not stage.engine.has_room)
    assert (stage.policy.version, stage.engine.weights) == (0, digests_of(0))
    assert await stage.send(go, attempt=2) == Live(version=1)
    assert (stage.policy.version, stage.engine.version, stage.engine.paused) == (1, 1, False)
    assert stage.engine.weights == digests_of(1)
    took = stage.updates.take_seconds()
    assert took["time/update_weights"] > took["time/engines_paused"] > took["time/engines_load"] > 0
    assert set(stage.updates.take_seconds().values()) == {0.0}


@staged()
async def test_requests_wait_until_a_version_is_confirmed(stage, monkeypatch):
    monkeypatch.setattr("trireme.transport.control.PATIENCE_S", 0.1)
    probed, release = hold(stage.engine, "_probe")
    sending = asyncio.create_task(stage.publish(1))
    await probed.wait()
    asking = asyncio.create_task(stage.generate())
    reply = await stage.updates.sent(sent_message(stage.config, 1, stage.attempts))
    assert (reply, stage.engine.requests) == (NotYet(note="engines are probed"), [])
    assert (stage.policy.version, sending.done(), asking.done()) == (0, False, False)
    release.set()
    assert set((await asking).versions) == {1}
    assert await sending == Live(version=1)
    assert stage.policy.version == 1


@pytest.mark.parametrize(
    ("route", "has_room"),
    [("pause", False), *((route, True) for route in ("pause", "update", "update_weight_version", "resume"))],
)
@staged()
async def test_engine_that_failed_a_transfer_serves_after_the_next(stage, route, has_room):
    stage.engine.calls.clear()
    stage.engine.failing_route, stage.engine.has_room = route, has_room
    reply = await stage.publish(1)
    assert isinstance(reply, Again)
    assert stage.engine.url in reply.reason
    assert f"{route} broke" in reply.reason
    assert ("update" in stage.engine.calls) is (route != "pause")
    assert stage.engine.weights == digests_of(int(route in ("update_weight_version", "resume")))
    assert (stage.policy.version, stage.engine.paused) == (0, route != "pause")
    asking = asyncio.create_task(stage.generate())
    stage.engine.failing_route = None
    assert await stage.publish(1) == Live(version=1)
    assert set((await asking).versions) == {1}


REPORT = {"digests": {}, "incomplete": []}


@pytest.mark.parametrize("answer", [{}, *({"results": each} for each in ([], None, [{"digests": None}], [REPORT] * 2))])
@staged(kind="filesystem")
async def test_malformed_weight_report_confirms_no_version(stage, answer):
    stage.engine.mangle_call = lambda _: answer
    assert isinstance(await stage.publish(1), Again)
    stage.engine.mangle_call = lambda honest: honest
    assert await stage.publish(1) == Live(version=1)
    assert stage.engine.weights == digests_of(1)


@staged()
async def test_waiting_trainer_hears_at_once_that_an_engine_cannot_receive(stage, monkeypatch):
    stage.engine.failing_route = "receive_ahead"
    assert isinstance(await stage.announce(1), Go)
    while isinstance(reply := await stage.announce(1), Go):
        await asyncio.sleep(0.005)
    assert "receive_ahead broke" in reply.reason
    stage.engine.failing_route = None
    await stage.announce(1, attempt=2)
    await stage.lose_and_find()
    reply = await stage.announce(1, attempt=2)
    assert isinstance(reply, Again)
    assert "died before all was loaded" in reply.reason
    # a mistake of ours stops the trainer instead of making it begin again
    monkeypatch.setattr("trireme.orchestrator.weights.update.receives_ahead", lambda *_: 1 / 0)
    await stage.announce(1, attempt=3)
    await asyncio.sleep(0.05)
    assert "ZeroDivisionError" in (await stage.announce(1, attempt=3)).error


@staged(is_live=False)
async def test_repeated_weight_update_requests_are_idempotent(stage):
    first, second = await asyncio.gather(stage.announce(0), stage.announce(0))
    assert first == second == await stage.announce(0)
    again = sent_message(stage.config, 0)
    lives = await asyncio.gather(stage.send(first), stage.updates.sent(again), stage.updates.sent(again))
    assert [*lives, await stage.updates.sent(again)] == [Live(version=0)] * 4
    assert await stage.announce(0) == first
    once, twice = await asyncio.gather(stage.announce(1), stage.announce(1))
    assert once == twice
    assert await stage.send(once) == Live(version=1)
    expected = dict.fromkeys(("receive_ahead", "pause", "update", "update_weight_version", "resume"), 2) | {"join": 1}
    assert Counter(stage.engine.calls) == expected


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"digest_error": "model.norm.weight"}, "model.norm.weight has digest another, expected model.norm.weight@0"),
        ({"digest_error": "model.extra.weight"}, "model.extra.weight was not sent"),
        ({"incomplete": ("lm_head (0 of 8)",)}, r"not loaded whole.*lm_head \(0 of 8\) kept old weights"),
        ({"probe_error": 0.25}, "logprobs differ from the trainer's by up to 0.25, allowed is 0.001"),
        ({"probe_error": 0.25, "tolerance": None}, "differ from the trainer's in the mean by 0.25, allowed is 0.001"),
        (TWO_CORES | {"digest_error": "model.norm.weight"}, "worker 2 of 2, as it was sent: model.norm.weight has"),
        (TWO_CORES | {"incomplete": ("lm_head (0 of 8)",)}, "not loaded whole by http.*, worker 2 of 2: lm_head"),
        (TWO_CORES | {"probe_error": 0.25}, "core 2 of 2, does not compute with version 0"),
    ],
)
@staged(is_live=False)
async def test_weights_that_are_not_the_trainers_are_refused_and_never_live(stage, knobs, words):
    reply = await stage.publish(0)
    assert isinstance(reply, Refusal)
    assert stage.engine.url in reply.error
    assert (stage.policy.version, stage.pool.engines[0].state) == (-1, "quarantined")
    with pytest.raises(WeightsMismatch, match=words):
        await stage.updates.fail_on_wrong_weights()


@pytest.mark.parametrize("knobs", [TWO_CORES, {"kind": "nccl", "has_room": False}])
@staged()
async def test_nothing_is_asked_of_cores_in_step_or_a_gpu_before_pause_answers(stage, knobs):
    answered_after = []

    async def pause_slowly(body: dict) -> None:
        stage.engine.running.clear()
        await asyncio.sleep(0.05)
        answered_after.append(stage.engine.calls[-1])

    stage.engine._pause = pause_slowly
    assert await stage.publish(1, incarnation="two") == Live(version=1)
    assert answered_after == ["pause"]


@staged(is_live=False, probe_error=0.25, tolerance=None)
async def test_weights_are_refused_only_by_the_noise_of_their_own_version(stage):
    assert isinstance(await stage.publish(0, noise_age=3), Again)
    assert stage.pool.engines[0].state == "quarantined"
    assert isinstance(await stage.publish(0), Refusal)


@staged(is_live=False, probe_status=404)
async def test_a_probe_that_an_engine_takes_for_invalid_is_final_in_its_words(stage):
    assert isinstance(await stage.publish(0), Again)
    stage.engine.probe_status = 400
    assert isinstance(await stage.publish(0), Refusal)
    with pytest.raises(EngineRefused, match=r"\(400\).*a prompt of \d+ tokens"):
        await stage.updates.fail_on_wrong_weights()


@staged(tolerance=None, probe_error=5e-4)
async def test_a_probe_without_noise_admits_what_is_as_good_as_equal(stage):
    assert stage.policy.version == 0


@staged()
async def test_broken_transfer_restarts_with_new_peers(stage):
    async def evaluate():
        async with stage.policy.held() as version:
            return version, stage.engine.paused

    broken = await stage.announce(1)
    evaluating = asyncio.create_task(evaluate())
    again = await stage.announce(1, attempt=2)
    assert again.epoch != broken.epoch
    assert await stage.send(again, attempt=2) == Live(version=1)
    assert await evaluating == (1, False)
    assert await stage.announce(1) == Refusal(error="attempt 1 at version 1 has been superseded")
    assert isinstance(await stage.send(broken), Again)
    assert (stage.policy.version, stage.engine.paused) == (1, False)
    assert stage.engine.epochs[1:] == [again.epoch]
    assert (await stage.announce(2, attempt=3)).epoch == again.epoch


@staged(is_live=False)
async def test_another_trainer_process_joins_anew_and_the_same_one_does_not(stage):
    await stage.announce(0, incarnation="zero")  # and dies before it has sent
    for version, incarnation in [(0, "one"), (1, "one"), (2, "one"), (2, "two"), (3, "two")]:
        assert await stage.publish(version, incarnation=incarnation) == Live(version=version)
    joined = [epoch.partition("/")[0] for epoch in stage.engine.epochs]
    assert [incarnation for incarnation in joined if incarnation != "zero"] == ["one", "two"]


@pytest.mark.parametrize("is_told_before", [True, False])
@staged()
async def test_new_trainer_starts_from_the_last_confirmed_version(stage, is_told_before):
    """The engine died too. Its successor is given version 0, so that batches can be made while it is gone on from."""
    go = await stage.announce(1, 2)
    stage.engine.failing_route = "update"
    sending = asyncio.create_task(stage.send(go, 2))
    if is_told_before:
        assert isinstance(await sending, Again)
    else:
        await asyncio.sleep(0)
    assert (await stage.updates.trainer_started()).version == 0
    await sending
    assert "came up without weights" in stage.updates.needed(0).reason


@staged(is_live=False)
async def test_update_begun_by_a_previous_orchestrator_is_requested_again(stage):
    stage.engine.running.clear()
    reply = await stage.updates.sent(sent_message(stage.config, 5))
    assert reply == Again(reason="version 5 was announced to an orchestrator that is no more")
    assert await stage.publish(5) == Live(version=5)
    assert not stage.engine.paused


@staged()
async def test_trainer_stays_while_an_engine_lacks_its_weights(stage):
    journal, scheduler = Journal(stage.config.paths.journal), SimpleNamespace(next_batch=3)
    parts = stage.config, journal, stage.policy, stage.updates, scheduler
    answers = TrainerRequests(*parts, Peers(), Waits("test"), joined=None)
    stage.engine.version = -1
    await until(lambda: stage.updates.needed(0))
    assert isinstance(await answers(Done(run_id=stage.config.run_id, version=0)), Publish)
    error = (await answers(GetBatch(run_id="/runs/other", step=0, rank=0, world=1))).error
    assert "/runs/other" in error
    assert stage.config.run_id in error


@staged()
async def test_engine_found_again_is_live_only_if_all_its_workers_agree(stage):
    stage.pool.adapter = "policy"  # which an orchestrator that died had yet to name
    await stage.lose_and_find()
    assert (stage.states, stage.engine.names) == ([("live", 0)], ["policy"])

    stage.engine.num_workers, stage.engine.digest_error = 2, "model.norm.weight"
    await stage.lose_and_find()
    assert stage.states == [("quarantined", None)]


# of two engines one dies


# without room for two versions, an engine is updated for as long as they come
@staged(num_engines=2, policy={"start_timeout_s": SHORT_S}, has_room=False)
async def test_engine_that_was_live_may_be_away_beyond_the_start_timeout(stage):
    await stage.kill()
    assert await stage.publish(1, pause_s=2 * SHORT_S) == Live(version=1)
    assert not stage.keeping.done()
    stage.keeping.cancel()
    urls = [engine.url for engine in stage.engines]
    async with open_policy(stage.config, urls, start_timeout_s=SHORT_S) as opened:
        stage.pool, stage.policy, stage.updates, keeping = opened
        await until(lambda: stage.states[0] == ("live", 1))  # it serves what was confirmed
        await asyncio.sleep(2 * SHORT_S)
        assert await stage.publish(2) == Live(version=2)
        assert not keeping.done()
        assert stage.states == [("live", 2), ("starting", None)]


@staged(num_engines=2, is_live=False)
async def test_a_run_begins_with_all_of_its_engines_or_says_which_one_is_missing(stage):
    await stage.kill()
    urls = [engine.url for engine in stage.engines]
    async with open_policy(stage.config, urls, start_timeout_s=SHORT_S) as (*_, keeping):
        await asyncio.wait([keeping])
        assert f"{urls[1]} to come up" in str(keeping.exception().exceptions[0])


@staged(policy={"start_timeout_s": SHORT_S})
async def test_engine_without_a_weight_report_counts_as_starting(stage):
    stage.engine.calls.clear()
    stage.engine.failing_route = "weight_report"
    stage.engine.dead = True
    await until(lambda: stage.states == [("starting", None)])
    stage.engine.dead = False
    await asyncio.wait([stage.keeping])
    words = str(stage.keeping.exception().exceptions[0])
    assert "to come up from inference (" in words
    assert "weight_report broke" in words
    assert stage.engine.calls.count("weight_report") <= SHORT_S / POLL_S + 2


@pytest.mark.parametrize("is_probed", [True, False])
@staged(num_engines=2)
async def test_requests_of_a_dead_unconfirmed_engine_move_to_another(stage, is_probed):
    other, mortal = stage.engines
    may_answer = asyncio.Event()
    other.delay = mortal.delay = lambda asked: may_answer.wait()
    asking = [asyncio.create_task(stage.generate()) for _ in range(2)]
    await until(lambda: other.requests and mortal.requests)
    _, release = hold(other if is_probed else mortal, "_probe")
    update = asyncio.create_task(stage.publish(1))
    await until(lambda: mortal.version == 1 and not mortal.paused)
    may_answer.set()
    await until(lambda: stage.pool.num_requests == 6)  # of which four are probes
    await until(lambda: [engine.in_flight for engine in stage.pool.engines] == [is_probed, not is_probed])
    assert not update.done()
    await stage.kill()
    with pytest.raises(PeerDied, match="got no answer"):
        await stage.pool.engines[1].post("resume")
    release.set()
    if not is_probed:
        assert isinstance(await update, Again)
        update = asyncio.create_task(stage.publish(1))
    assert await update == Live(version=1)
    assert stage.states == [("live", 1), ("starting", None)]
    assert all(set(answer.versions) <= {0, 1} for answer in await asyncio.gather(*asking))
    assert set((await stage.generate()).versions) == {1}


@staged(num_engines=2)
async def test_requests_of_an_engine_whose_machine_is_gone_end_at_once(stage):
    """No connection breaks, as after a cut cable. What waits for its weights ends too, though others still load."""
    gone, other = stage.engines
    gone.delay = lambda asked: asyncio.Event().wait()
    asking = [asyncio.create_task(stage.generate()) for _ in range(2)]
    await until(lambda: gone.requests and other.requests)
    go = await stage.announce(1)
    for engine in stage.engines:  # both wait for the other's part of a broadcast
        hold(engine, "_update")
    update = asyncio.create_task(stage.send(go))
    await until(lambda: all(engine.paused for engine in stage.engines))
    gone.dead = True
    reply = await update
    assert isinstance(reply, Again)
    assert f"{gone.url} died before all was loaded" in reply.reason
    del other._update
    assert await stage.publish(1, incarnation="two") == Live(version=1)
    assert {version for turn in await asyncio.gather(*asking) for version in turn.versions} <= {0, 1}


@staged(num_engines=2)
async def test_caches_are_emptied_whenever_a_version_may_get_other_weights(stage):
    """They are named by versions: by a trainer that restarted, or publishes one again, or failed to deliver one."""
    stage.pool.keep_prefix_cache = "always"
    emptied = [stage.engine.num_cleared]
    for version, incarnation in ((1, "one"), (2, "one"), (2, "one"), (3, "one"), (4, "two"), (5, "two")):
        assert await stage.publish(version, incarnation=incarnation) == Live(version=version)
        emptied.append(stage.engine.num_cleared)
        assert {engine.cached_since for engine in stage.pool.engines} <= {0, 2, 4}
    assert np.diff(emptied).tolist() == [0, 0, 1, 0, 1, 0]

    go = await stage.announce(6, 10, incarnation="two")
    stage.engine.failing_route = "collective_rpc"
    assert isinstance(await stage.send(go, 10), Again)
    stage.engine.failing_route = ""
    stage.attempts = 10
    before = stage.engine.num_cleared
    assert await stage.publish(6, incarnation="two") == Live(version=6)
    assert stage.engine.num_cleared == before + 1


@staged()
async def test_newcomer_that_hangs_costs_one_timeout_once_it_is_alone(stage, monkeypatch):
    sent_away: list[str] = []
    stage.pool.expel = lambda engine, why: (sent_away.append(engine.url), stage.pool.remove(engine))
    async with open_fake_engine(stage.wire) as hanging, open_fake_engine(stage.wire) as good:
        for number, server in enumerate((hanging, good)):
            engine = stage.pool.add(server.url, Member(number, "ticket", {}))
            engine.state, engine.life = "quarantined", 1
        hold(hanging, "_join")
        _, release = hold(good, "_join")  # which waits for the other, as in a real group

        # The trainer gives each attempt up: once at once, as its connection broke, and else after its timeout.
        sizes = []
        for attempt, late in {2: 0.0, 3: 0.0, 4: math.inf, 5: 0.0}.items():
            monkeypatch.setattr("trireme.orchestrator.weights.update.LATE", late)  # of the attempt before
            go = await stage.updates.ready(ready_message(stage.config, 0, attempt, everywhere=False))
            sizes.append(go.world_size)
        assert (sizes, sent_away) == ([3, 2, 2, 2], [hanging.url])
        release.set()
        assert await stage.send(go, attempt=5) == Live(version=0)
        assert stage.states == [("live", 0), ("live", 0)]


@pytest.mark.parametrize("held", ["_weight_report", "_resume"])
@staged(num_engines=2)
async def test_engine_that_returns_during_an_update_is_quarantined(stage, held):
    stage.engines[1].dead = True
    await until(lambda: stage.states[1] == ("starting", None))
    asked, may_answer = hold(stage.engines[1], held)
    stage.engines[1].dead = False
    await asked.wait()
    assert await stage.publish(1) == Live(version=1)
    may_answer.set()
    await until(lambda: stage.states[1] != ("starting", None))
    assert stage.states == [("live", 1), ("quarantined", None)]
    assert stage.updates.needed(1) is not None


# requests


@staged(answer=lambda asked: [7] * 4)
async def test_prompt_leaves_the_rest_of_the_context_to_the_turn(stage):
    with pytest.raises(PromptTooLong, match="64 tokens, the model takes 64"):
        await stage.pool.generate([5] * 64, {})
    for length, max_tokens, room, cut in [
        (63, 10, 1, "context_full"),
        (62, None, 2, "context_full"),
        (62, 2, 2, "context_full"),
        (62, 1, 1, "max_tokens"),
    ]:
        turn = await stage.pool.generate([5] * length, {"max_tokens": max_tokens})
        assert (stage.engine.requests[-1].sampling["max_tokens"], turn.cut) == (room, cut)


@staged(drop_next=2, **SAYS_7)
async def test_dropped_or_aborted_request_is_retried_unlike_a_refused_one(stage):
    async def fail_the_fifth_late(asked):
        if asked.number == 4:
            await asyncio.sleep(0.3)
            raise web.HTTPBadGateway

    def abort_the_third(response: dict) -> dict:
        response["choices"][0]["finish_reason"] = "abort" if response["request_id"] == "2" else "stop"
        return response

    stage.engine.mangle, stage.engine.delay = abort_the_third, fail_the_fifth_late
    turn = await stage.generate()
    assert (turn.ids, turn.finish_reason, len(stage.engine.requests)) == ([7, END], "stop", 4)
    stage.pool.timeout_s = 0.2
    assert ((await stage.generate()).ids, len(stage.engine.requests)) == ([7, END], 6)
    stage.engine.refuse = lambda asked: 400
    with pytest.raises(ValueError, match=r"refused a request \(400\).*refused with 400"):
        await stage.generate()
    stage.engine.drop_next = 1_000_000
    with pytest.raises(DeadlineExceeded, match=f"{stage.engine.url} to answer a request that it dropped again and"):
        await stage.generate()


@staged(answer=lambda asked: list(range(10, 25)), token_s=0.02)
async def test_turn_interrupted_by_an_update_has_a_version_per_token(stage):
    turn = asyncio.create_task(stage.pool.generate([5], {}))
    await until(lambda: stage.engine.requests)
    await asyncio.sleep(0.05)
    await stage.publish(1)
    versions = (await turn).versions
    assert (len(versions), versions) == (15, sorted(versions))
    assert set(versions) == {0, 1}


@staged(num_engines=2, policy={"max_concurrent": 4}, token_s=0.01, **SAYS_7)
async def test_max_concurrent_requests_are_spread_evenly_over_engines(stage):
    await asyncio.gather(*(stage.generate() for _ in range(20)))
    assert [engine.most_at_once for engine in stage.engines] == [2, 2]
    assert min(len(engine.requests) for engine in stage.engines) > 5


@staged(**SAYS_7)
async def test_engine_with_a_dead_core_is_unhealthy_behind_a_live_server(stage):
    for _ in range(10):
        stage.engine.dead = not stage.engine.dead
        await asyncio.sleep(0.015)
    stage.engine.dead = False
    await asyncio.sleep(0.05)
    assert (stage.pool.engines[0].life, stage.states) == (1, [("live", 0)])
    seen: list[str] = []
    stage.pool.watch = lambda engine: seen.append(engine.state)  # as lanes do
    stage.engine.dead, stage.pool.timeout_s = True, 0.01  # the time is not the engine's fault
    await until(lambda: stage.states == [("starting", None)])
    assert seen == ["starting"]
    turn = asyncio.create_task(stage.generate())
    await asyncio.sleep(0.05)
    assert stage.engine.requests == []
    stage.engine.dead = False
    assert (await turn).ids == [7, END]


@staged(**SAYS_7)
async def test_answer_from_unconfirmed_weights_is_discarded(stage):
    stage.pool.health_interval_s = 60.0
    await asyncio.sleep(0.05)
    stage.engine.version = -1  # a successor that holds the base model
    turn = asyncio.create_task(stage.generate())
    await until(lambda: stage.pool.engines[0].life == 2)  # suspected at once, whatever the interval
    assert stage.pool.interruptions == 1
    await until(lambda: stage.updates.needed(0))
    await stage.publish(0)
    assert (await turn).versions == [0, 0]


@staged(**SAYS_7)
async def test_answer_from_an_earlier_life_of_an_engine_is_discarded(stage):
    may_answer = asyncio.Event()
    stage.engine.delay = lambda asked: may_answer.wait()
    turn = asyncio.create_task(stage.generate())
    await until(lambda: stage.engine.requests)
    (engine,) = stage.pool.engines
    stage.pool.quarantine(engine)
    may_answer.set()
    await until(lambda: not engine.in_flight)
    engine.life += 1
    stage.pool.go_live(engine, 0)
    await turn
    assert len(stage.engine.requests) == 2


@staged(mangle=lambda response: response | {"more": "x" * (8 << 20)})
async def test_cancelled_request_ends_in_the_engine(stage):
    with pytest.raises(ValueError, match=r"inference/v1/generate answered more than \d+ bytes"):
        await stage.generate()
    ended = asyncio.Event()

    async def wait_for_the_end(asked):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    stage.engine.delay = wait_for_the_end
    turn = asyncio.create_task(stage.generate())
    await until(lambda: len(stage.engine.requests) == 2)
    turn.cancel()
    await ended.wait()
    assert not stage.pool.engines[0].in_flight


def test_idle_connections_are_closed_before_the_engine_closes_them():
    """An engine closes what was idle for so long; the request that comes just then is lost, and costs a second."""
    settings = Path(find_spec("vllm").submodule_search_locations[0]) / "envs.py"
    assert int(re.search(r"VLLM_HTTP_TIMEOUT_KEEP_ALIVE: int = (\d+)", settings.read_text())[1]) > KEEP_IDLE_S


def test_abandoned_confirmation_is_never_written(tmp_path, monkeypatch):
    full = tmp_path / "full"
    full.touch()
    monkeypatch.setenv("TRIREME_FAULTS", f"disk_full={full}")
    engines: Any = [SimpleNamespace(url="http://x")]

    async def play(policy: Policy) -> None:
        abandoned = asyncio.create_task(policy.record(5, engines, {"w": "abandoned"}, 0.0))
        await until(policy.waits.now)
        abandoned.cancel()
        await asyncio.sleep(0)
        full.unlink()
        await asyncio.gather(abandoned, return_exceptions=True)
        await policy.record(5, engines, {"w": "sent"}, 0.0)

    versions, pool = Versions(tmp_path / "journal"), SimpleNamespace(is_begun=False)
    versions.folder.mkdir()
    asyncio.run(asyncio.wait_for(play(Policy(pool, Waits("orchestrator"), versions)), 30))
    assert [each.digests["w"] for each in versions.read(5).confirmations] == ["sent"]
