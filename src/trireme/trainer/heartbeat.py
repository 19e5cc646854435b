"""Heartbeats: tell the orchestrator once a second what the trainer does and waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trireme.base.waiting import Waits
from trireme.messages import Heartbeat
from trireme.transport.control import ControlClient

INTERVAL_S = 1.0


@dataclass
class Activity:
    """The state that heartbeats report."""

    state: str = "starting"
    version: int = 0


@contextmanager
def heartbeat(address: str, run_id: str, waits: Waits, activity: Activity) -> Iterator[None]:
    """Send heartbeats from a thread of their own, so that a long step does not look like a dead trainer."""
    stop = threading.Event()

    def beat() -> None:
        # ZeroMQ sockets belong to one thread, so this one has a client of its own.
        client = ControlClient(address, Waits("heartbeat"))
        while not stop.wait(INTERVAL_S):
            client.tell(
                Heartbeat(
                    run_id=run_id,
                    process=waits.who,
                    state=activity.state,
                    version=activity.version,
                    waits=[str(wait) for wait in waits.now()],
                    busy=waits.is_busy,
                )
            )
        client.close()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=2 * INTERVAL_S)
