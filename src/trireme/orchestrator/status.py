"""The status server: `/health`, `/status` and `/metrics` say what the run does and what each process waits for."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from trireme.base.errors import ConfigError
from trireme.base.token import status_key
from trireme.base.waiting import Waits
from trireme.config.engine_facts import PACKAGES
from trireme.config.orchestrator import StatusServer
from trireme.config.run import RunConfig
from trireme.monitor.collapse import Warned
from trireme.orchestrator.engines.pool import InferencePool
from trireme.orchestrator.scheduler import Scheduler
from trireme.orchestrator.trainer_requests import Peers
from trireme.orchestrator.watcher import Watcher
from trireme.orchestrator.weights.policy import Policy
from trireme.transport.bearer import RequireToken

STALE_HEARTBEAT_S = 10.0
BIND_S = 5.0

STUCK_S = 30.0  # after this long without an iteration of the event loop, `/health` answers 503


@dataclass
class Status:
    """Reads the parts of a running orchestrator, from another thread than theirs, and never changes them."""

    config: RunConfig
    waits: Waits
    peers: Peers
    pool: InferencePool | None = None
    policy: Policy | None = None
    scheduler: Scheduler | None = None
    watcher: Watcher | None = None
    state: str = "starting"
    beat_at: float | None = None  # last iteration of the event loop, once `keep_beating` runs

    async def keep_beating(self) -> None:
        """Record that the event loop runs, once a second, until cancelled."""
        while True:
            self.beat_at = time.monotonic()
            await asyncio.sleep(1.0)

    @property
    def stuck(self) -> str | None:
        """Return why the orchestrator counts as hung; None while it does not."""
        stuck_s = 0.0 if self.beat_at is None else time.monotonic() - self.beat_at
        if stuck_s < STUCK_S:
            return None
        return (
            f"The orchestrator's event loop has not run for {stuck_s:.0f} s - at most {STUCK_S:.0f} s were expected "
            "- look at the end of logs/orchestrator.stdout, and start it again."
        )

    def snapshot(self) -> dict[str, Any]:
        now = time.monotonic()
        heartbeats = list(self.peers.heartbeats.items())  # a copy: more may arrive while it is read
        engines = list(self.pool.engines) if self.pool else []

        # Ages, not times, as a reader on another machine may have another clock.
        processes = {
            name: {"state": beat.state, "version": beat.version, "heard_s_ago": round(now - heard, 1)}
            for name, (heard, beat) in heartbeats
        }

        # The orchestrator's own waits have all their fields. Those of other processes arrive as text in heartbeats.
        waits = [
            {
                "who": wait.who,
                "what": wait.what,
                "peer": wait.peer,
                "waited_s": round(wait.waited_s, 1),
                "deadline_s": wait.deadline_s,
                "note": wait.note,
                "text": str(wait),
            }
            for wait in self.waits.now()
        ]

        # A silent process counts as a wait: what it last said it waits for is as old as its last heartbeat.
        for name, (heard, beat) in heartbeats:
            if now - heard > STALE_HEARTBEAT_S and beat.state != "done":
                waits.append({"who": name, "text": f"{name} has sent no heartbeat for {now - heard:.0f} s"})
            waits += [{"who": name, "text": text} for text in beat.waits]

        return {
            "run": str(self.config.paths.root),
            "state": self.state,
            "version": self.policy.version if self.policy else -1,
            "batch": self.scheduler.next_batch if self.scheduler else 0,
            "max_steps": self.config.max_steps,
            "in_flight": sum(engine.in_flight for engine in engines),
            "groups_under_way": self.scheduler.num_under_way if self.scheduler else 0,
            "failures": self.scheduler.num_failures if self.scheduler else 0,
            "waits": waits,
            "engines": [
                {
                    **{"url": engine.url, "state": "leaving" if engine.is_leaving else engine.state},
                    **{"version": engine.version, "in_flight": engine.in_flight},
                    "prefix_hit_frac": engine.prefix_hit_frac,
                    "member": engine.member.id if engine.member else None,
                    "joined_s_ago": round(time.time() - engine.member.since, 1) if engine.member else None,
                    "software": {name: engine.member.facts.get(name, "") for name in PACKAGES} if engine.member else {},
                }
                for engine in engines
            ],
            "processes": {"orchestrator": {"state": self.state}} | processes,
            "warnings": [{"name": each.name, "step": each.step, "text": each.text} for each in self.warnings],
        }

    @property
    def warnings(self) -> list[Warned]:
        """Signs of a collapse that hold at the moment."""
        return self.watcher.lasting if self.watcher else []


def build_app(status: Status) -> FastAPI:
    app = FastAPI(title="Trireme orchestrator", docs_url=None, redoc_url=None)
    app.add_middleware(RequireToken, reader_key=status_key())

    # A registry of its own leaves out the metrics of Python itself.
    registry = CollectorRegistry()
    gauges = {
        name: Gauge(f"trireme_{name}", text, registry=registry)
        for name, text in {
            "version": "Live policy version",
            "batch": "Batch being filled",
            "in_flight": "Requests at the engines",
            "groups_under_way": "Groups being rolled out",
            "failures": "Rollouts that failed",
        }.items()
    }
    waiting = Gauge("trireme_waiting_seconds", "How long the orchestrator has waited", ["peer"], registry=registry)
    warning = Gauge("trireme_warning", "Signs of a collapse: 1 while seen", ["name"], registry=registry)

    @app.get("/health")
    def health() -> Response:
        if reason := status.stuck:
            return JSONResponse({"status": "stuck", "state": status.state, "reason": reason}, status_code=503)
        return JSONResponse({"status": "ok", "state": status.state})

    @app.get("/status")
    def full() -> dict[str, Any]:
        return status.snapshot()

    @app.get("/metrics")
    def metrics() -> Response:
        snapshot = status.snapshot()
        for name, gauge in gauges.items():
            gauge.set(snapshot[name])

        # Labels that are not cleared would be reported forever, after their wait or warning has ended.
        waiting.clear()
        for wait in status.waits.now():
            waiting.labels(peer=wait.peer).set(wait.waited_s)
        warning.clear()
        for warned in status.warnings:
            warning.labels(name=warned.name).set(1)
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    return app


@contextmanager
def serve_status(status: Status, config: StatusServer) -> Iterator[None]:
    """Serve from a thread of its own, which answers while the event loop is busy."""
    listener = _bind(config)
    server = uvicorn.Server(uvicorn.Config(build_app(status), log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(timeout=5)
        listener.close()


def _bind(config: StatusServer) -> socket.socket:
    """Bind the port. Retry for a while if it is taken: a connection of our predecessor may still be closing."""
    give_up = time.monotonic() + BIND_S
    while True:
        try:  # requests that arrive before the server's thread runs wait in the backlog
            # All interfaces are those of IPv4 too.
            family, is_dual = (socket.AF_INET6, config.host == "::") if ":" in config.host else (socket.AF_INET, False)
            return socket.create_server((config.host, config.port or 0), family=family, dualstack_ipv6=is_dual)
        except OSError as error:
            if time.monotonic() > give_up:
                raise ConfigError(
                    f"The status server cannot listen on {config.host}:{config.port}: {error.strerror} - a free port "
                    f"was expected. See who has it with `lsof -i :{config.port}`, or set `orchestrator.server.port` to "
                    "another."
                ) from error
            time.sleep(0.2)
