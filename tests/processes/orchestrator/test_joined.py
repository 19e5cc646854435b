"""Engines that join a running run and leave it, as those of `inference --join` do, between a scripted trainer and the
real orchestrator. What they compute is scripted; registration, heartbeats and leaving are the real client's."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

import pytest

from support.engines.answering import answering
from support.engines.fake_engine import TENSORS, FakeEngine, open_fake_engine
from support.models.tiny_tokenizer import END
from support.runs.whole_run import DEADLINE_S, WholeRun, build_config, run
from trireme.base.errors import ConfigError
from trireme.base.processes import free_port
from trireme.base.token import TOKEN
from trireme.config.engine_facts import engine_facts
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.launch.joined_engine import Membership, serve
from trireme.launch.plan import ProcessSpec
from trireme.messages import Again, Dismissed, GetTerms, Join, Joined, Ok, Terms, encode
from trireme.orchestrator.engines import joined
from trireme.orchestrator.engines.engine import Engine

STEPS = 8
QUICK = {"retry_s": 0.02, "health_interval_s": 0.02}


def config_of(folder, **sections: Any) -> RunConfig:
    """A synchronous run, whose tokens depend on no engine, and whose engines all join."""
    files = {"type": "filesystem", "probe_tolerance": 1e-3}  # each engine finds the weights by itself
    sections = {"max_async_level": 0, "hosts": {"inference": []}, "weight_broadcast": files} | sections
    return build_config(folder, max_steps=STEPS, resume=True, **sections)


def rollouts_of(config: RunConfig) -> list[bytes]:
    journal = Journal(config.paths.journal)
    assert journal.steps() == list(range(STEPS))
    return [encode(journal.read(step).rollouts) for step in journal.steps()]


@dataclass
class Guest:
    """An engine that joined, and its end of the membership."""

    whole: WholeRun
    server: FakeEngine
    membership: Membership
    last: Any = None  # reply to its last heartbeat
    is_silent: bool = False

    @property
    def engine(self) -> Engine | None:
        """As the orchestrator knows it."""
        engines = self.whole.orchestrator.pool.engines
        return next((each for each in engines if each.member and each.member.id == self.membership.id), None)

    @property
    def is_live(self) -> bool:
        return self.engine is not None and self.engine.state == "live"

    async def beat(self) -> None:
        while not (self.is_silent or isinstance(self.last, Dismissed)):
            self.last = await asyncio.to_thread(self.membership.beat)
            if isinstance(self.last, Again):
                await asyncio.to_thread(self.membership.register_again)
            await asyncio.sleep(0.02)

    async def leave(self, within_s: float) -> None:
        self.is_silent = True
        await self.beating  # one thread at a time may use a client
        await asyncio.to_thread(self.membership.leave, within_s)


@asynccontextmanager
async def joining(whole: WholeRun, facts: dict[str, str] | None = None, **knobs: Any) -> AsyncIterator[Guest]:
    address = f"127.0.0.1:{whole.config.ports.batches}"
    membership = Membership(address, signals := list[int](), patience_s=DEADLINE_S)
    async with open_fake_engine(whole.engine.wire, end=END, **knobs) as server:
        guest = Guest(whole, server, membership)
        with closing(membership):
            terms = await asyncio.to_thread(membership.terms)
            own = engine_facts(whole.config) | (facts or {})
            assert await asyncio.to_thread(membership.register, terms, server.url, own)
            guest.beating = asyncio.create_task(guest.beat())
            try:
                yield guest
            finally:
                guest.is_silent = True
                signals.append(signal.SIGTERM)
                await guest.beating


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Rollouts of the run with one engine that is there from the beginning to the end."""
    config = config_of(tmp_path_factory.mktemp("undisturbed"), hosts={"inference": ["127.0.0.1"]})
    assert run(config, pool=QUICK).error is None
    return rollouts_of(config)


def test_engines_that_come_leave_or_die_change_no_rollout(tmp_path, undisturbed, monkeypatch):
    monkeypatch.setattr(joined, "SILENT_S", 0.5)
    config = config_of(tmp_path)
    going, held = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def with_requests(whole: WholeRun) -> AsyncIterator[Guest]:
        """Yield an engine that joined and was given requests, which it keeps while the run waits for them."""
        async with joining(whole, delay=lambda asked: held.wait()) as guest:
            await whole.until(lambda: guest.is_live, "it to be live")
            going.set()
            await whole.until(lambda: guest.server.requests, "its requests")
            going.clear()
            yield guest

    async def play(whole: WholeRun) -> list[int]:
        waits = whole.orchestrator.waits
        await whole.until(lambda: "for an engine to join" in str(waits), "the run to wait for an engine")
        async with joining(whole, delay=lambda asked: going.wait()) as first:
            await whole.until(lambda: first.server.requests, "requests at the first")

            # It finishes what it has, and gets nothing more.
            async with with_requests(whole) as drained:
                leaving = asyncio.create_task(drained.leave(DEADLINE_S))
                await whole.until(lambda: drained.engine.is_leaving, "it to be leaving")
                num_given = len(drained.server.requests)
                held.set()
                await leaving
                assert (drained.engine, len(drained.server.requests)) == (None, num_given)
            held.clear()

            # Its requests go to others at once.
            async with with_requests(whole) as hasty:
                await hasty.leave(0.0)
                assert hasty.engine is None

            # It dies with requests, and without a word.
            async with with_requests(whole) as dead:
                pass
            await whole.until(lambda: dead.engine is None, "the dead one to be forgotten")

            # A restarted orchestrator hears of its members, which serve on.
            found = [guest.membership.id for guest in (first, drained, hasty, dead)]
            await whole.kill_orchestrator()
            published = len(whole.trainer.asked_to_publish)
            whole.start_orchestrator()
            await whole.until(lambda: whole.orchestrator.policy.version >= 0 and first.is_live, "it to be found again")
            assert len(whole.trainer.asked_to_publish) == published
            going.set()
            await whole.over()
            await first.beating
            assert first.last == Dismissed("the run is over", is_over=True)
        return [*found, first.membership.id]

    whole = run(config, pool=QUICK, meanwhile=play)
    assert (whole.error, whole.trainer_error, whole.trainer.version) == (None, [], STEPS)
    assert rollouts_of(config) == undisturbed
    assert whole.found == [1, 2, 3, 4, 5]


WRONG = {
    "another precision": ({"inference.model.dtype": '"float16"'}, "inference.model.dtype.*float16.*expected.*auto"),
    "an older engine": ({"vllm": "0.31.0"}, "vllm 0.31.0 - expected 0.32.0.*Install"),
    "another model": ({"the model's tokenizer": "77"}, "the model's tokenizer of the engine is 77 .*--model.name"),
}


def test_strangers_are_refused_with_a_sentence_while_the_run_goes_on(tmp_path, undisturbed, caplog):
    config = config_of(tmp_path)
    going = asyncio.Event()

    async def play(whole: WholeRun) -> None:
        async with joining(whole, delay=lambda asked: going.wait()) as good:
            await whole.until(lambda: good.is_live and good.last == Ok(), "a good engine")
            for facts, words in WRONG.values():
                with pytest.raises(ConfigError, match=words):
                    async with joining(whole, facts):
                        pass

            # A copy of its registration, and an invented one.
            member = good.engine.member
            for ticket in (member.ticket, "f" * 32):
                copy = Join(ticket, good.server.url, member.facts)
                reply = await whole.ask(lambda trainer, copy=copy: trainer.ask(copy, what="a place"))
                assert isinstance(reply, Again)
                assert "ticket" in reply.reason
            before = good.engine

            # Weights that do not arrive whole, another computation, and a server that never takes any in.
            for fault in ({"digest_error": TENSORS[0]}, {"probe_error": 0.5}, {"failing_route": "join"}):
                async with joining(whole, **fault) as bad:
                    await bad.beating
                    assert isinstance(bad.last, Dismissed)
                    assert bad.server.url in bad.last.reason
                    assert not bad.server.requests
            assert good.engine is before
            going.set()
            await whole.over()

    whole = run(config, pool=QUICK, meanwhile=play)
    assert (whole.error, whole.trainer_error) == (None, [])
    assert rollouts_of(config) == undisturbed
    assert caplog.text.count("was refused") == len(WRONG) + 2
    assert caplog.text.count("is sent away") == 3


def test_server_that_ends_while_the_orchestrator_is_away_is_noticed(tmp_path):
    replies = {GetTerms: Terms(run="{}", ticket="t"), Join: Joined(member=1)}
    signals = list[int]()
    with answering(lambda request: replies[type(request)], port := free_port()):
        membership = Membership(f"127.0.0.1:{port}", signals, patience_s=DEADLINE_S)
        assert membership.register(membership.terms(), "http://127.0.0.1:1", {})
    ends = (sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(7)")
    spec = ProcessSpec("inference", ends, env={}, log=tmp_path / "log", gpus=(), ports={})
    with closing(membership):
        assert serve(spec, membership, signals, drain_timeout_s=0.0) == 7


def test_run_without_an_engine_ends_after_its_deadline_with_its_name(tmp_path):
    whole = run(config_of(tmp_path, hosts={"inference": [], "join_timeout_s": 0.2}))
    assert "for an engine to join from inference (none has joined yet), longer than the 0 s allowed" in str(whole.error)


def test_engine_with_another_token_is_refused_before_it_loads_anything(monkeypatch):
    monkeypatch.setenv(TOKEN, "the-token-of-the-run-itself")
    with answering(lambda request: Ok(), free_port()) as address:
        monkeypatch.setenv(TOKEN, "a-token-of-another-run-of-mine")
        with closing(Membership(address.removeprefix("tcp://"), [], patience_s=DEADLINE_S)) as membership:
            with pytest.raises(ConfigError, match=f"rejects the connection - expected the run's token in {TOKEN}"):
                membership.terms()
