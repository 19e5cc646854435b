"""The timeline that the orchestrator records: its own lane, and one for each engine, by the requests that it sends.

An engine's lane changes with its work. The reason why an engine is idle, and the orchestrator's own activity, change
without an event: they are polled after each change of an engine, and ten times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from trireme.base.timing import age_s
from trireme.config.run import RunConfig
from trireme.monitor.spans import ENGINE, ENVIRONMENTS, FEW, ORCHESTRATOR, Lane, SpansFile, What
from trireme.monitor.timeline import idle
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.pool import InferencePool
from trireme.orchestrator.evaluation.evaluator import Evaluator
from trireme.orchestrator.scheduler import Scheduler
from trireme.orchestrator.weights.policy import Policy

POLL_S = 0.1


class Lanes:
    """Follows the engines of a pool from its construction on, and the rest once `keep` runs."""

    def __init__(self, config: RunConfig, spans: SpansFile, pool: InferencePool) -> None:
        self.own = spans.lane(ORCHESTRATOR, what="start", ago_s=age_s())
        self._config = config
        self._pool = pool
        self._spans = spans
        self._of_engine: dict[int, Lane] = {}  # lanes by identity: an engine may join where another left
        self._is_closing = False
        self._is_to_look = False
        self._run: tuple[Policy, Scheduler, Evaluator] | None = None

        # From here on the pool reports changes. The states up to now are recorded by hand.
        pool.watch = self.turned
        for engine in pool.engines:
            self.turned(engine)

    async def keep(self, policy: Policy, scheduler: Scheduler, evaluator: Evaluator) -> None:
        """Poll until cancelled."""
        self._run = policy, scheduler, evaluator
        while True:
            self.look()
            await asyncio.sleep(POLL_S)

    def turned(self, engine: Engine) -> None:
        """Record a change of an engine: another state, its first request, or its last."""
        what, why = _activity(engine)
        if not any(engine is each for each in self._pool.engines):  # it has left
            self.lane_of(engine).enter(None)
            del self._of_engine[id(engine)]
            return

        # A transfer belongs to the version that the engine is given, all other work to the batch that is being filled.
        if what == "transfer" and engine.receives is not None:
            step = engine.receives
        else:
            step = -1 if self._run is None else self._run[1].next_batch
        self.lane_of(engine).enter(what, step=step, why=why)

        # Many changes arrive together, and one look after the last of them is enough.
        if self._run is not None and not self._is_to_look:
            self._is_to_look = True
            asyncio.get_running_loop().call_soon(self.look)

    def lane_of(self, engine: Engine) -> Lane:
        if id(engine) not in self._of_engine:
            self._of_engine[id(engine)] = self._spans.lane(engine_lane(engine.url))
        return self._of_engine[id(engine)]

    def look(self) -> None:
        """Record what the orchestrator does, and why engines without a request have none."""
        self._is_to_look = False
        if self._run is None:
            return
        policy, scheduler, evaluator = self._run
        version, batch, level = policy.version, scheduler.next_batch, self._config.max_async_level

        # Why no rollout is begun: the most final of the reasons that hold.
        why_none_begun = "the orchestrator: the next rollouts are about to begin"
        if batch >= self._config.max_steps:
            why_none_begun = f"every batch is full: the trainer is at batch {version}"
        elif version < 0:
            why_none_begun = "no weights yet: the trainer is to send them"
        elif version < batch - level:
            held = f", and version {version} is being evaluated" if evaluator.version is not None else ""
            why_none_begun = f"max_async_level {level}: the trainer is at batch {version}{held}"

        # What the orchestrator itself does, and why a live engine may be idle meanwhile.
        what: What
        if scheduler.num_under_way:
            what, step, why = "generate", batch, ""
            elsewhere = sum(engine.in_flight for engine in self._pool.engines)
            why_no_request = f"{FEW}: other engines have {elsewhere}" if elsewhere else ENVIRONMENTS
        elif evaluator.version is not None:
            what, step, why = "evaluate", evaluator.version, ""
            why_no_request = f"evaluation: of version {evaluator.version}"
        else:
            what, step, why = "idle" if batch >= self._config.max_steps else "wait", batch, why_none_begun
            why_no_request = why_none_begun

        # Only live engines: `turned` has said why the others are idle.
        for engine in self._pool.engines:
            if engine.state == "live" and not engine.in_flight:
                self.lane_of(engine).explain(why_no_request)

        # Until the batch is on disk, the lane shows the activity that `closing` entered.
        if not self._is_closing:
            if (self.own.now, self.own.step) != (what, step):
                self.own.enter(what, step=step, why=why)
            self.own.explain(why)

    @contextmanager
    def closing(self, step: int) -> Iterator[None]:
        """Record the time from when a batch is full until it is on disk."""
        self._is_closing = True
        try:
            with self.own.doing("journal", step=step):
                yield
        finally:
            self._is_closing = False
            # `has_few` compares with the most requests since the last batch, which is counted from here on.
            for engine in self._pool.engines:
                engine.most_in_flight = engine.in_flight
                self.turned(engine)
            self.look()

    def idle_frac(self) -> float:
        """Return the share of the time since the last call in which engines had no request: the mean over engines."""
        taken = [lane.take() for lane in self._of_engine.values()]
        return sum(idle(seconds) for seconds in taken) / max(1e-9, sum(sum(seconds.values()) for seconds in taken))


def engine_lane(url: str) -> str:
    return f"{ENGINE} {urlsplit(url).netloc}"


def _activity(engine: Engine) -> tuple[What, str]:
    """Return what an engine does, by its state and its requests, and why it does no more."""
    if engine.state == "starting":
        return "start", "it is gone: its successor is waited for" if engine.life else ""
    if engine.in_flight and not engine.is_paused:
        few = f"{FEW}: less than half of the {engine.most_in_flight} that it had"
        return "generate", few if engine.has_few else ""
    if engine.receives is not None:
        return "transfer", ""
    return "wait", "no weights yet: the trainer is to send them" if engine.state == "quarantined" else ""
