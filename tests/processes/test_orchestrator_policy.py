"""How a version becomes live, and what keeps it from it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fake_engine import FakeEngine, digests_of, open_fake_engine, ready_message, sent_message
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


@dataclass
class Stage:
    """A policy with its pool, and the fake engine behind it."""

    config: RunConfig
    engine: FakeEngine
    pool: InferencePool
    policy: Policy
    attempts: int = 0

    async def announce(self, version: int, attempt: int = 1, *, incarnation: str = "one") -> Any:
        """Asks as the trainer does: until there is an answer."""
        message = ready_message(self.config, version, attempt, incarnation=incarnation)
        while isinstance(reply := await self.policy.ready(message), NotYet):
            pass
        return reply

    async def send(self, go: Go, attempt: int = 1) -> Any:
        message = sent_message(self.config, go.version, attempt)
        if not message.payload:
            self.engine.wire.send(go.epoch, message.digests)
        while isinstance(reply := await self.policy.sent(message), NotYet):
            pass
        return reply

    async def publish(self, version: int, **who: Any) -> Any:
        """As one transfer after the other: the number of an attempt is never used twice."""
        self.attempts += 1
        attempt = who.pop("attempt", self.attempts)
        return await self.send(await self.announce(version, attempt, **who), attempt)


@asynccontextmanager
async def open_stage(config: RunConfig, *, offers: bool = False, **knobs: Any) -> AsyncIterator[Stage]:
    waits = Waits("orchestrator")
    async with (
        open_fake_engine(**knobs) as engine,
        open_inference_pool([engine.url], waits=waits, max_model_len=64, timeout_s=20, max_concurrent=64) as pool,
    ):
        policy = Policy(pool, config.weight_broadcast, waits, Versions(config.paths.journal), offers=offers)
        pool.retry_s = pool.health_interval_s = 0.02
        keeping = asyncio.create_task(keep_engines(pool, policy.judge, start_timeout_s=20))
        yield Stage(config, engine, pool, policy)
        keeping.cancel()


def on_stage(folder: Path, play: Callable[[Stage], Awaitable[Any]], *, kind: str = "gloo", **knobs: Any) -> Any:
    config = build_config(folder, weight_broadcast={"type": kind})

    async def main() -> Any:
        async with asyncio.timeout(10), open_stage(config, **knobs) as stage:
            return await play(stage)

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["gloo", "filesystem"])
def test_a_version_is_live_once_it_is_sent_and_confirmed_and_not_before(tmp_path, kind):
    async def play(stage):
        go = await stage.announce(0)
        assert not stage.engine.paused
        assert stage.policy.version == -1
        assert await stage.send(go) == Live(version=0)
        assert (stage.policy.version, stage.engine.version, stage.engine.paused) == (0, 0, False)
        assert stage.engine.weights == digests_of(0)

    on_stage(tmp_path, play, kind=kind)


def test_requests_go_on_while_weights_are_on_their_way(tmp_path):
    async def play(stage):
        await stage.publish(0)
        go = await stage.announce(1)
        turn = await stage.pool.generate([5, 6], {"max_tokens": 4})
        assert (set(turn.versions), stage.engine.paused) == ({0}, False)
        assert await stage.send(go) == Live(version=1)
        assert stage.engine.weights == digests_of(1)

    on_stage(tmp_path, play)


@pytest.mark.parametrize("has_room", [True, False])
def test_what_an_update_took_is_told_in_parts_that_lie_within_each_other(tmp_path, has_room):
    async def play(stage):
        for version in (0, 1):
            await stage.publish(version)
        took = stage.policy.take_seconds()
        assert took["time/update_weights"] > took["time/engines_paused"] > took["time/engines_load"] > 0
        assert set(stage.policy.take_seconds().values()) == {0.0}

    on_stage(tmp_path, play, has_room=has_room)


def test_an_engine_without_room_for_them_is_paused_before_they_are_sent(tmp_path):
    async def play(stage):
        await stage.publish(0)
        go = await stage.announce(1)
        while not stage.engine.paused:
            await asyncio.sleep(0.01)
        assert stage.engine.weights == digests_of(0)
        assert await stage.send(go) == Live(version=1)
        assert (stage.engine.paused, stage.engine.weights) == (False, digests_of(1))

    on_stage(tmp_path, play, has_room=False)


def test_an_engine_that_died_with_what_it_had_taken_in_makes_the_trainer_begin_again(tmp_path):
    async def play(stage):
        await stage.publish(0)
        await stage.announce(1, attempt=2)
        stage.engine.dead = True
        while stage.pool.engines[0].state != "starting":
            await asyncio.sleep(0.01)
        stage.engine.dead = False
        while stage.pool.engines[0].state == "starting":
            await asyncio.sleep(0.01)
        reply = await stage.announce(1, attempt=2)
        assert isinstance(reply, Again)
        assert "died before all was loaded" in reply.reason

    on_stage(tmp_path, play)


def test_new_requests_wait_in_engines_that_stand_still_and_are_answered_by_what_is_confirmed(tmp_path):
    async def play(stage):
        await stage.publish(0)
        go = await stage.announce(1, attempt=2)
        sending = asyncio.create_task(stage.send(go, attempt=2))
        await stage.policy.offered_after(0)
        asking = asyncio.create_task(stage.pool.generate([5, 6], {"max_tokens": 4}))
        while not stage.engine.requests:
            await asyncio.sleep(0.01)
        assert (stage.policy.version, stage.policy.offered, sending.done(), asking.done()) == (0, 1, False, False)
        turn = await asking
        assert stage.policy.version == 1
        assert set(turn.versions) == {1}
        assert await sending == Live(version=1)

    on_stage(tmp_path, play, offers=True, probe_s=0.3)


def test_requests_that_an_attempt_left_waiting_are_answered_after_the_next(tmp_path):
    async def play(stage):
        await stage.publish(0)
        stage.engine.failing_route = "resume"
        assert isinstance(await stage.publish(1, attempt=2), Again)
        asking = asyncio.create_task(stage.pool.generate([5, 6], {"max_tokens": 4}))
        while not stage.engine.requests:
            await asyncio.sleep(0.01)
        assert (stage.policy.version, stage.policy.offered, stage.engine.paused) == (0, 1, True)
        stage.engine.failing_route = None
        assert await stage.publish(1, attempt=3) == Live(version=1)
        assert set((await asking).versions) == {1}

    on_stage(tmp_path, play, offers=True)


@pytest.mark.parametrize("has_room", [True, False])
def test_nothing_is_loaded_into_an_engine_that_does_not_pause(tmp_path, has_room):
    async def play(stage):
        await stage.publish(0)
        stage.engine.calls.clear()
        stage.engine.failing_route = "pause"
        reply = await stage.publish(1, attempt=2)
        assert isinstance(reply, Again)
        assert "pause broke" in reply.reason
        assert "update_weights" not in stage.engine.calls
        assert (stage.engine.weights, stage.engine.paused) == (digests_of(0), False)

    on_stage(tmp_path, play, has_room=has_room)


def test_a_synchronous_run_offers_nothing_before_it_is_live(tmp_path):
    async def play(stage):
        await stage.publish(0)
        go = await stage.announce(1, attempt=2)
        sending = asyncio.create_task(stage.send(go, attempt=2))
        while not sending.done():
            assert stage.policy.offered == stage.policy.version
            await asyncio.sleep(0)
        assert stage.policy.offered == 1

    on_stage(tmp_path, play, probe_s=0.1)


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
    assert {route: calls.count(route) for route in calls} == {
        "pause": 2,
        "init_weight_transfer_engine": 1,
        "start_weight_update": 2,
        "update_weights": 2,
        "finish_weight_update": 2,
        "collective_rpc": 4,
        "resume": 2,
    }


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"digest_error": "model.norm.weight"}, "model.norm.weight has digest another, expected model.norm.weight@0"),
        ({"digest_error": "model.extra.weight"}, "model.extra.weight was not sent"),
        (
            {"incomplete": ("lm_head (0 of 512 values)",)},
            "not loaded whole.*lm_head .0 of 512 values. kept old weights",
        ),
        ({"probe_error": 0.25}, "logprobs differ from the trainer's by up to 0.25, allowed is 0.001"),
    ],
)
def test_weights_that_are_not_the_trainers_are_refused_and_never_live(tmp_path, knobs, words):
    async def play(stage):
        reply = await stage.publish(0)
        assert isinstance(reply, Refusal)
        assert stage.policy.version == -1
        assert stage.pool.engines[0].state == "quarantined"
        with pytest.raises(WeightsMismatch, match=words):
            await stage.policy.failure
        return reply.error

    error = on_stage(tmp_path, play, **knobs)
    assert "127.0.0.1" in error


def test_a_probe_with_a_number_that_is_none_is_refused(tmp_path):
    async def play(stage):
        go = await stage.announce(0)
        sent = sent_message(stage.config, 0)
        logprobs = [*sent.probe.logprobs[:-1], math.nan]
        stage.engine.wire.send(go.epoch, sent.digests)
        probe = msgspec.structs.replace(sent.probe, logprobs=logprobs)
        return await stage.policy.sent(msgspec.structs.replace(sent, probe=probe))

    assert "by up to nan" in on_stage(tmp_path, play).error


def test_no_rollout_of_a_version_that_is_found_wrong_gets_into_the_journal(tmp_path):
    """Requests in flight go on under the new weights before the probe is answered; they must wait for its verdict."""

    async def meanwhile(running):
        def spoil(version):
            running.engine.probe_error = 0.5

        running.trainer.before_step = spoil

    outcome = run(build_config(tmp_path, max_steps=4), engine={"token_s": 0.01, "probe_s": 0.3}, meanwhile=meanwhile)
    assert isinstance(outcome.error, WeightsMismatch)
    assert "does not compute with version 1" in str(outcome.error)
    versions = [sample.versions for record in outcome.records for r in record.rollouts for sample in r.samples]
    assert versions
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


def test_a_transfer_that_broke_is_begun_anew_with_other_peers(tmp_path):
    async def play(stage):
        await stage.publish(0)
        broken = await stage.announce(1)
        again = await stage.announce(1, attempt=2)
        assert again.epoch != broken.epoch
        assert await stage.send(again, attempt=2) == Live(version=1)
        late = await stage.announce(1)
        assert late == Refusal(error="attempt 1 at version 1 has been superseded")
        assert isinstance(await stage.send(broken), Again)
        assert (stage.policy.version, stage.engine.paused) == (1, False)
        assert stage.engine.epochs[1:] == [again.epoch]
        assert (await stage.announce(2, attempt=3)).epoch == again.epoch

    on_stage(tmp_path, play)


def test_no_evaluation_gets_between_a_broken_transfer_and_the_next_attempt(tmp_path):
    async def play(stage):
        await stage.publish(0)
        await stage.announce(1)

        async def evaluate():
            async with stage.policy.held() as version:
                return version, stage.engine.paused

        evaluating = asyncio.create_task(evaluate())
        await asyncio.sleep(0)
        assert await stage.send(await stage.announce(1, attempt=2), attempt=2) == Live(version=1)
        assert await evaluating == (1, False)

    on_stage(tmp_path, play)


def test_another_trainer_process_joins_anew_and_the_same_one_does_not(tmp_path):
    async def play(stage):
        for version in (0, 1, 2):
            assert isinstance(await stage.publish(version), Live)
        assert isinstance(await stage.publish(2, incarnation="two"), Live)
        assert isinstance(await stage.publish(3, incarnation="two"), Live)
        return stage.engine.epochs

    epochs = on_stage(tmp_path, play)
    assert [epoch.partition("/")[0] for epoch in epochs] == ["one", "two"]
    assert len(set(epochs)) == 2


def test_a_trainer_that_dies_before_it_has_sent_is_replaced_by_another(tmp_path):
    async def play(stage):
        await stage.announce(0)
        assert await stage.publish(0, incarnation="two") == Live(version=0)
        assert not stage.engine.paused

    on_stage(tmp_path, play)


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


def test_an_engine_that_fails_a_transfer_is_named_and_the_next_attempt_can_go_on(tmp_path):
    async def play(stage):
        stage.engine.failing_route = "update_weights"
        reply = await stage.publish(0)
        assert isinstance(reply, Again)
        assert f"{stage.engine.url}/update_weights failed (500)" in reply.reason
        assert "update_weights broke" in reply.reason
        stage.engine.failing_route = None
        assert await stage.publish(0, attempt=2) == Live(version=0)

    on_stage(tmp_path, play)


def test_weights_that_were_announced_to_an_orchestrator_before_are_asked_for_again(tmp_path):
    async def play(stage):
        return await stage.policy.sent(sent_message(stage.config, 5))

    assert on_stage(tmp_path, play) == Again(reason="version 5 was announced to an orchestrator that is no more")


def test_an_engine_that_somebody_left_paused_is_resumed(tmp_path):
    async def play(stage):
        stage.engine.running.clear()
        assert await stage.publish(0) == Live(version=0)
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
