"""The timeline that the orchestrator records: its own lane, and one for each engine, by the requests that it sends.

An engine's lane changes with its work. The reason why an engine is idle, and the orchestrator's own activity, change
without an event: they are polled after each change of an engine, and ten times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from urllib.parse import urlsplit

from trireme.base.timing import age_s
from trireme.config.run import RunConfig
from trireme.monitor.spans import ENGINE, ENVIRONMENTS, FEW, ORCHESTRATOR, Lane, SpansFile, What
from trireme.monitor.timeline import idle
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.pool import InferencePool
from trireme.orchestrator.scheduler import Scheduler
from trireme.orchestrator.weights.policy import Policy

POLL_S = 0.1


class Evaluating(Protocol):
    """The part of an evaluator that is read here."""

    version: int | None  # being evaluated


class Lanes:
    """Follows the engines of a pool from its construction on, and the rest once `keep` runs."""

    def __init__(self, config: RunConfig, spans: SpansFile, pool: InferencePool) -> None:
        self.own = spans.lane(ORCHESTRATOR, what="start", ago_s=age_s())
        self._config = config
        self._pool = pool
        self._of_engine = {engine.url: spans.lane(engine_lane(engine.url)) for engine in pool.engines}
        self._is_closing = False
        self._is_to_look = False
        self._policy: Policy | None = None
        self._scheduler: Scheduler | None = None
        self._evaluator: Evaluating | None = None
        pool.watch = self.turned
        for engine in pool.engines:
            self.turned(engine)

    def turned(self, engine: Engine) -> None:
        """Record a change of an engine: another state, its first request, or its last."""
        what = _what(engine)
        self._lane(engine).enter(what, step=self._step(engine), why=_why(engine))
        if self._scheduler is not None and not self._is_to_look:
            self._is_to_look = True
            asyncio.get_running_loop().call_soon(self.look)

    def _lane(self, engine: Engine) -> Lane:
        return self._of_engine[engine.url]

    def _step(self, engine: Engine) -> int:
        """Return the version that the engine is given, or the batch that is being filled."""
        if _what(engine) == "transfer" and engine.receives is not None:
            return engine.receives
        return -1 if self._scheduler is None else self._scheduler.next_batch

    async def keep(self, policy: Policy, scheduler: Scheduler, evaluator: Evaluating) -> None:
        """Poll until cancelled."""
        self._policy, self._scheduler, self._evaluator = policy, scheduler, evaluator
        while True:
            self.look()
            await asyncio.sleep(POLL_S)

    def look(self) -> None:
        self._is_to_look = False
        if self._policy is None or self._scheduler is None or self._evaluator is None:
            return
        reason = _IdleReason(self._config, self._pool, self._policy, self._scheduler, self._evaluator)
        for engine in self._pool.engines:
            if engine.state == "live" and not engine.in_flight:
                self._lane(engine).explain(reason.why_no_request())
        if not self._is_closing:
            what, step, why = reason.what_now()
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


def _what(engine: Engine) -> What:
    if engine.state == "starting":
        return "start"
    if engine.in_flight and not engine.is_paused:
        return "generate"
    return "wait" if engine.receives is None else "transfer"


def _why(engine: Engine) -> str:
    if engine.state == "starting":
        return "it is gone: its successor is waited for" if engine.life else ""
    if engine.in_flight and not engine.is_paused:
        return f"{FEW}: less than half of the {engine.most_in_flight} that it had" if engine.has_few else ""
    if engine.state == "quarantined" and _what(engine) == "wait":
        return "no weights yet: the trainer is to send them"
    return ""


class _IdleReason:
    """Explains, for one moment, why no more is generated."""

    def __init__(
        self, config: RunConfig, pool: InferencePool, policy: Policy, scheduler: Scheduler, evaluator: Evaluating
    ) -> None:
        self._config = config
        self._pool = pool
        self._policy = policy
        self._scheduler = scheduler
        self._evaluated = evaluator.version

    def what_now(self) -> tuple[What, int, str]:
        """Return what the orchestrator does, for which batch or version, and why."""
        if self._scheduler.num_under_way:
            return "generate", self._scheduler.next_batch, ""
        if self._evaluated is not None:
            return "evaluate", self._evaluated, ""
        if self._is_at_the_end:
            return "idle", self._config.max_steps, self._why_none_begun()
        return "wait", self._scheduler.next_batch, self._why_none_begun()

    def why_no_request(self) -> str:
        """Return why a live engine has no request."""
        elsewhere = sum(engine.in_flight for engine in self._pool.engines)
        if self._scheduler.num_under_way:
            return f"{FEW}: other engines have {elsewhere}" if elsewhere else ENVIRONMENTS
        if self._evaluated is not None:
            return f"evaluation: of version {self._evaluated}"
        return self._why_none_begun()

    def _why_none_begun(self) -> str:
        version, batch, level = self._policy.version, self._scheduler.next_batch, self._config.max_async_level
        if self._is_at_the_end:
            return f"every batch is full: the trainer is at batch {version}"
        if version < 0:
            return "no weights yet: the trainer is to send them"
        if version < batch - level:
            held = f", and version {version} is being evaluated" if self._evaluated is not None else ""
            return f"max_async_level {level}: the trainer is at batch {version}{held}"
        return "the orchestrator: the next rollouts are about to begin"

    @property
    def _is_at_the_end(self) -> bool:
        return self._scheduler.next_batch >= self._config.max_steps
