"""How a version becomes live, what keeps it from it, and what becomes of an engine that dies meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fake_engine import FakeEngine, WeightWire, digests_of, open_fake_engine, ready_message, sent_message
from trireme.base.errors import WeightsMismatch
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.ledger.versions import Versions
from trireme.messages import Again, GetBatch, Go, Live, NotYet, Refusal
from trireme.orchestrator.answers import Answers, Peers
from trireme.orchestrator.engine_keeper import keep_engines
from trireme.orchestrator.inference_pool import InferencePool, open_inference_pool
from trireme.orchestrator.policy import Policy
from whole_run import build_config, run

ASKED = [5, 6], {"max_tokens": 4}
SHORT_S = 0.5  # to come up


@dataclass
class Stage:
    """A policy with its pool, and the fake engines behind it; the last of them can be killed."""

    config: RunConfig
    wire: WeightWire
    engines: list[FakeEngine]
    life: AsyncExitStack
    pool: InferencePool
    policy: Policy
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
        while isinstance(reply := await self.policy.ready(message), NotYet):
            pass
        return reply

    async def send(self, go: Go, attempt: int = 1) -> Any:
        message = sent_message(self.config, go.version, attempt)
        if not message.payload:
            for _ in self.pool.reachable():
                self.wire.send(go.epoch, message.digests)
        while isinstance(reply := await self.policy.sent(message), NotYet):
            pass
        return reply

    async def publish(self, version: int, *, pause_s: float = 0.0, **who: Any) -> Any:
        """As one transfer after the other: the number of an attempt is never used twice."""
        self.attempts += 1
        go = await self.announce(version, self.attempts, **who)
        await asyncio.sleep(pause_s)
        return await self.send(go, self.attempts)

    async def kill(self) -> None:
        await self.life.aclose()
        await until(lambda: self.pool.engines[-1].state == "starting")


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def hold_probe(engine: FakeEngine) -> asyncio.Event:
    """Its answer to a probe waits for this event."""
    release, probe = asyncio.Event(), engine._probe

    async def held(ids: list[int]) -> Any:
        await release.wait()
        return await probe(ids)

    engine._probe = held  # type: ignore[method-assign]
    return release


@asynccontextmanager
async def open_policy(
    config: RunConfig, urls: list[str], *, offers: bool = False, start_timeout_s: float = 20
) -> AsyncIterator[tuple[InferencePool, Policy, asyncio.Task]]:
    """As an orchestrator has it that has just been started."""
    waits = Waits("orchestrator")
    async with open_inference_pool(urls, waits=waits, max_model_len=64, timeout_s=20, max_concurrent=64) as pool:
        policy = Policy(pool, config.weight_broadcast, waits, Versions(config.paths.journal), offers=offers)
        pool.retry_s = pool.health_interval_s = 0.02
        keeping = asyncio.create_task(keep_engines(pool, policy.judge, start_timeout_s=start_timeout_s))
        yield pool, policy, keeping
        keeping.cancel()
        await asyncio.wait([keeping])


def on_stage(
    folder: Path,
    play: Callable[[Stage], Awaitable[Any]],
    *,
    kind: str = "gloo",
    num_engines: int = 1,
    offers: bool = False,
    start_timeout_s: float = 20,
    **knobs: Any,
) -> Any:
    config = build_config(folder, weight_broadcast={"type": kind})

    async def main() -> Any:
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            wire, engines = WeightWire(), []
            for _ in range(num_engines):
                life = await stack.enter_async_context(AsyncExitStack())
                engines.append(await life.enter_async_context(open_fake_engine(wire, **knobs)))
            opened = open_policy(
                config, [engine.url for engine in engines], offers=offers, start_timeout_s=start_timeout_s
            )
            return await play(Stage(config, wire, engines, life, *await stack.enter_async_context(opened)))

    return asyncio.run(main())


@pytest.mark.parametrize(("kind", "has_room"), [("gloo", True), ("gloo", False), ("filesystem", True)])
def test_a_version_is_live_once_it_is_sent_and_confirmed_and_not_before(tmp_path, kind, has_room):
    """Without room for both an engine is paused before anything is sent; else requests go on until all is there."""

    async def play(stage):
        first = await stage.announce(0)
        assert (stage.policy.version, stage.engine.weights) == (-1, {})
        assert await stage.send(first) == Live(version=0)
        go = await stage.announce(1, attempt=2)
        if has_room:
            turn = await stage.pool.generate(*ASKED)
            assert (set(turn.versions), stage.engine.paused) == ({0}, False)
        await until(lambda: stage.engine.paused is not has_room)
        assert (stage.policy.version, stage.engine.weights) == (0, digests_of(0))
        assert await stage.send(go, attempt=2) == Live(version=1)
        assert (stage.policy.version, stage.engine.version, stage.engine.paused) == (1, 1, False)
        assert stage.engine.weights == digests_of(1)
        took = stage.policy.take_seconds()
        assert took["time/update_weights"] > took["time/engines_paused"] > took["time/engines_load"] > 0
        assert set(stage.policy.take_seconds().values()) == {0.0}

    on_stage(tmp_path, play, kind=kind, has_room=has_room)


@pytest.mark.parametrize("offers", [True, False])
def test_before_a_version_is_confirmed_requests_wait_in_the_engine_or_in_a_synchronous_run_outside(tmp_path, offers):
    async def play(stage):
        await stage.publish(0)
        release = hold_probe(stage.engine)
        sending = asyncio.create_task(stage.publish(1))
        await until(lambda: stage.engine.calls.count("resume") == 2)
        asking = asyncio.create_task(stage.pool.generate(*ASKED))
        await until(lambda: not offers or stage.engine.requests)
        await asyncio.sleep(0.02)
        assert len(stage.engine.requests) == stage.policy.offered == (1 if offers else 0)
        assert (stage.policy.version, sending.done(), asking.done()) == (0, False, False)
        release.set()
        assert set((await asking).versions) == {1}
        assert await sending == Live(version=1)
        assert (stage.policy.version, stage.policy.offered) == (1, 1)

    on_stage(tmp_path, play, offers=offers)


@pytest.mark.parametrize(
    ("route", "has_room", "is_paused"),
    [("pause", True, False), ("pause", False, False), ("update_weights", True, True), ("resume", True, True)],
)
def test_an_engine_that_fails_a_transfer_is_named_and_requests_are_answered_after_the_next_attempt(
    tmp_path, route, has_room, is_paused
):
    """Nothing is loaded into one that does not pause."""

    async def play(stage):
        await stage.publish(0)
        stage.engine.calls.clear()
        stage.engine.failing_route = route
        reply = await stage.publish(1)
        assert isinstance(reply, Again)
        assert f"{stage.engine.url}/{route}" in reply.reason
        assert f'failed (500): {{"error": "{route} broke"}}' in reply.reason
        assert ("update_weights" in stage.engine.calls) is (route != "pause")
        is_loaded = route == "resume"
        assert stage.engine.weights == digests_of(int(is_loaded))
        assert (stage.policy.version, stage.policy.offered, stage.engine.paused) == (0, int(is_loaded), is_paused)
        asking = asyncio.create_task(stage.pool.generate(*ASKED))
        await until(lambda: stage.engine.requests or not is_loaded)
        stage.engine.failing_route = None
        assert await stage.publish(1) == Live(version=1)
        assert set((await asking).versions) == {1}

    on_stage(tmp_path, play, offers=True, has_room=has_room)


def test_an_engine_that_died_with_what_it_had_taken_in_makes_the_trainer_begin_again(tmp_path):
    async def play(stage):
        await stage.publish(0)
        await stage.announce(1, attempt=2)
        stage.engine.dead = True
        await until(lambda: stage.pool.engines[0].state == "starting")
        stage.engine.dead = False
        await until(lambda: stage.pool.engines[0].state != "starting")
        reply = await stage.announce(1, attempt=2)
        assert isinstance(reply, Again)
        assert "died before all was loaded" in reply.reason

    on_stage(tmp_path, play)


def test_a_question_that_is_asked_twice_gets_the_same_answer_and_does_nothing_twice(tmp_path):
    async def play(stage):
        first, second = await asyncio.gather(stage.announce(0), stage.announce(0))
        assert first == second == await stage.announce(0)
        again = sent_message(stage.config, 0)
        lives = await asyncio.gather(stage.send(first), stage.policy.sent(again), stage.policy.sent(again))
        assert [*lives, await stage.policy.sent(again)] == [Live(version=0)] * 4
        assert await stage.announce(0) == first
        once, twice = await asyncio.gather(stage.announce(1), stage.announce(1))
        assert once == twice
        assert await stage.send(once) == Live(version=1)
        return stage.engine.calls

    calls = on_stage(tmp_path, play)
    twice = ("pause", "start_weight_update", "update_weights", "finish_weight_update", "resume")
    expected = dict.fromkeys(twice, 2) | {"init_weight_transfer_engine": 1, "collective_rpc": 4}
    assert {route: calls.count(route) for route in calls} == expected


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"digest_error": "model.norm.weight"}, "model.norm.weight has digest another, expected model.norm.weight@0"),
        ({"digest_error": "model.extra.weight"}, "model.extra.weight was not sent"),
        ({"incomplete": ("lm_head (0 of 8)",)}, r"not loaded whole.*lm_head \(0 of 8\) kept old weights"),
        ({"probe_error": 0.25}, "logprobs differ from the trainer's by up to 0.25, allowed is 0.001"),
    ],
)
def test_weights_that_are_not_the_trainers_are_refused_and_never_live(tmp_path, knobs, words):
    async def play(stage):
        reply = await stage.publish(0)
        assert isinstance(reply, Refusal)
        assert (stage.policy.version, stage.pool.engines[0].state) == (-1, "quarantined")
        with pytest.raises(WeightsMismatch, match=words):
            await stage.policy.failure
        return reply.error

    assert "127.0.0.1" in on_stage(tmp_path, play, **knobs)


def test_a_probe_with_a_number_that_is_none_is_refused(tmp_path):
    async def play(stage):
        go = await stage.announce(0)
        sent = sent_message(stage.config, 0)
        stage.wire.send(go.epoch, sent.digests)
        probe = msgspec.structs.replace(sent.probe, logprobs=[*sent.probe.logprobs[:-1], math.nan])
        return await stage.policy.sent(msgspec.structs.replace(sent, probe=probe))

    assert "by up to nan" in on_stage(tmp_path, play).error


def test_no_rollout_of_a_version_that_is_found_wrong_gets_into_the_journal(tmp_path):
    """Requests in flight go on under the new weights before the probe is answered; they must wait for its verdict."""

    async def meanwhile(running):
        running.trainer.before_step = lambda version: setattr(running.engine, "probe_error", 0.5)

    outcome = run(build_config(tmp_path, max_steps=4), engine={"token_s": 0.01, "probe_s": 0.3}, meanwhile=meanwhile)
    assert isinstance(outcome.error, WeightsMismatch)
    assert "does not compute with version 1" in str(outcome.error)
    versions = [sample.versions for record in outcome.records for r in record.rollouts for sample in r.samples]
    assert set(np.concatenate(versions)) == {-1, 0}


def test_a_held_version_stays_until_it_is_let_go(tmp_path):
    async def play(stage):
        await stage.publish(0)
        async with stage.policy.held() as version:
            announcing = asyncio.create_task(stage.announce(1))
            reply = await stage.policy.ready(ready_message(stage.config, 1))
            assert reply == NotYet(note="an evaluation is running")
            assert (version, stage.policy.version, stage.engine.paused) == (0, 0, False)
        assert isinstance(await announcing, Go)

    on_stage(tmp_path, play)


def test_a_transfer_that_broke_is_begun_anew_with_other_peers_and_no_evaluation_gets_in_between(tmp_path):
    async def play(stage):
        async def evaluate():
            async with stage.policy.held() as version:
                return version, stage.engine.paused

        await stage.publish(0)
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

    on_stage(tmp_path, play)


def test_another_trainer_process_joins_anew_and_the_same_one_does_not(tmp_path):
    async def play(stage):
        await stage.announce(0, incarnation="zero")  # and dies before it has sent
        for version, incarnation in [(0, "one"), (1, "one"), (2, "one"), (2, "two"), (3, "two")]:
            assert await stage.publish(version, incarnation=incarnation) == Live(version=version)
        return [epoch for epoch in stage.engine.epochs if not epoch.startswith("zero/")]

    one, two = on_stage(tmp_path, play)
    assert (one.partition("/")[0], two.partition("/")[0]) == ("one", "two")


@pytest.mark.parametrize("is_told_before", [True, False])
def test_after_a_transfer_that_failed_and_whose_trainer_died_the_next_one_is_asked_for_what_was_confirmed(
    tmp_path, is_told_before
):
    """The engine died too. Its successor is given version 0, so that batches can be made while it is gone on from."""

    async def play(stage):
        await stage.publish(0)
        go = await stage.announce(1, 2)
        stage.engine.failing_route = "finish_weight_update"
        sending = asyncio.create_task(stage.send(go, 2))
        if is_told_before:
            assert isinstance(await sending, Again)
        else:
            await asyncio.sleep(0)
        assert (await stage.policy.trainer_started()).version == 0
        await sending
        assert "came up without weights" in stage.policy.needs_weights(0)

    on_stage(tmp_path, play)


def test_what_an_orchestrator_that_is_no_more_had_begun_is_asked_for_again_and_its_paused_engine_goes_on(tmp_path):
    async def play(stage):
        stage.engine.running.clear()
        reply = await stage.policy.sent(sent_message(stage.config, 5))
        assert reply == Again(reason="version 5 was announced to an orchestrator that is no more")
        assert await stage.publish(5) == Live(version=5)
        assert not stage.engine.paused

    on_stage(tmp_path, play)


def test_the_trainer_of_another_run_is_refused_with_both_names(tmp_path):
    config = build_config(tmp_path)

    async def ask():
        answers = Answers(config, None, None, None, Peers(), Waits("orchestrator"))
        return await answers(GetBatch(run_id="/runs/other", step=0, rank=0, world=1))

    error = asyncio.run(ask()).error
    assert "/runs/other" in error
    assert str(tmp_path / "run") in error


# of two engines one dies


def test_an_engine_may_stay_away_for_long_also_during_an_update_and_across_a_restart_of_the_orchestrator(tmp_path):
    async def play(stage):
        assert await stage.publish(0) == Live(version=0)
        await stage.kill()
        await asyncio.sleep(2 * SHORT_S)
        assert await stage.publish(1, pause_s=2 * SHORT_S) == Live(version=1)
        assert not stage.keeping.done()
        stage.keeping.cancel()
        urls = [engine.url for engine in stage.engines]
        async with open_policy(stage.config, urls, start_timeout_s=SHORT_S) as opened:
            stage.pool, stage.policy, keeping = opened
            await until(lambda: stage.states[0] == ("live", 1))  # it serves what was confirmed
            await asyncio.sleep(2 * SHORT_S)
            assert await stage.publish(2) == Live(version=2)
            assert not keeping.done()
            assert stage.states == [("live", 2), ("starting", None)]

    # without room for two versions, it is updated for as long as they come
    on_stage(tmp_path, play, num_engines=2, start_timeout_s=SHORT_S, offers=True, has_room=False)


def test_a_run_begins_with_all_of_its_engines_or_says_which_one_is_missing(tmp_path):
    async def play(stage):
        await stage.kill()
        urls = [engine.url for engine in stage.engines]
        async with open_policy(stage.config, urls, start_timeout_s=SHORT_S) as (_, _, keeping):
            await asyncio.wait([keeping])
            assert f"{urls[1]} to come up" in str(keeping.exception().exceptions[0])

    on_stage(tmp_path, play, num_engines=2)


@pytest.mark.parametrize("is_probed", [True, False])
def test_an_engine_that_dies_before_the_confirmation_does_not_go_live_and_its_requests_are_sent_to_the_other(
    tmp_path, is_probed
):
    async def play(stage):
        other, mortal = stage.engines
        assert await stage.publish(0) == Live(version=0)
        may_answer = asyncio.Event()
        other.delay = mortal.delay = lambda asked: may_answer.wait()
        asking = [asyncio.create_task(stage.pool.generate(*ASKED)) for _ in range(2)]
        await until(lambda: other.requests and mortal.requests)
        release = hold_probe(other if is_probed else mortal)
        update = asyncio.create_task(stage.publish(1))
        await until(lambda: mortal.version == 1 and not mortal.paused)
        may_answer.set()
        await until(lambda: stage.pool.num_requests == 6)  # of which four are probes
        await until(lambda: [engine.in_flight for engine in stage.pool.engines] == [is_probed, not is_probed])
        assert not update.done()
        await stage.kill()
        release.set()
        if not is_probed:
            assert isinstance(await update, Again)
            update = asyncio.create_task(stage.publish(1))
        assert await update == Live(version=1)
        assert stage.states == [("live", 1), ("starting", None)]
        assert all(set(answer.versions) <= {0, 1} for answer in await asyncio.gather(*asking))
        answers = await asyncio.gather(*(stage.pool.generate(*ASKED) for _ in range(4)))
        assert all(set(answer.versions) == {1} for answer in answers)

    on_stage(tmp_path, play, num_engines=2, offers=True)
