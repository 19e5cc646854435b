"""Asks the servers of a run whether they are well, in threads of their own, and kills one that fell silent for long.

A port that refuses needs less patience than an answer that does not come: nobody listens there any more, and nobody
will. vLLM is left like this when its engine core dies in an update of the weights: it closes its port, and waits for
the answer to that request for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Literal

import httpx

from trireme.launch.children import Child

ASK_EVERY_S = 2.0
ANSWER_WITHIN_S = 5.0
REFUSED_FOR_S = 10.0  # a server that leaves by itself is given this long


Found = Literal["well", "silent", "refused"]


class Pulse:
    """One server's: for how long it has failed to answer, once it has answered."""

    def __init__(self, url: str, every_s: float = ASK_EVERY_S) -> None:
        self.url = url
        self._every_s = every_s
        self._silent_s: float | None = None
        self._refused_s = 0.0
        self._round = 0  # counts resets: an answer that was asked for before one says nothing about the new server
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"health of {url}", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float | None:
        """None where it never answered since the last reset."""
        return self._silent_s

    @property
    def refused_s(self) -> float:
        """For how long nobody has listened at its port, in one piece and up to now."""
        return self._refused_s

    def reset(self) -> None:
        with self._lock:
            self._round += 1
            self._silent_s, self._refused_s = None, 0.0

    def close(self) -> None:
        """Does not wait for an answer that is still owed."""
        self._closing.set()

    def _follow(self) -> None:
        asked = time.monotonic()
        with httpx.Client(timeout=ANSWER_WITHIN_S, trust_env=False) as client:
            while not self._closing.wait(self._every_s):
                this_round = self._round
                found = _ask(client, self.url)
                asked, passed_s = time.monotonic(), time.monotonic() - asked
                with self._lock:
                    if this_round == self._round:
                        self._note(found, passed_s)

    def _note(self, found: Found, passed_s: float) -> None:
        """More time than one question can take was slept through by ourselves, and is not held against the server."""
        if found == "well":
            self._silent_s, self._refused_s = 0.0, 0.0
        elif self._silent_s is not None:
            passed_s = min(passed_s, self._every_s + ANSWER_WITHIN_S)
            self._silent_s += passed_s
            self._refused_s = self._refused_s + passed_s if found == "refused" else 0.0


def _ask(client: httpx.Client, url: str) -> Found:
    try:
        return "well" if client.get(url).status_code == 200 else "silent"
    except httpx.ConnectError:
        return "refused"
    except httpx.HTTPError:
        return "silent"


class HealthWatch:
    """The pulses of all servers of a run."""

    def __init__(
        self,
        children: Sequence[Child],
        after_s: float,
        *,
        every_s: float = ASK_EVERY_S,
        refused_for_s: float = REFUSED_FOR_S,
    ) -> None:
        self._after_s = after_s
        self._refused_for_s = min(refused_for_s, after_s)
        self._children = [child for child in children if child.spec.health]
        self._pulses = {child.name: Pulse(child.spec.health or "", every_s) for child in self._children}
        self._starts = {child.name: child.num_starts for child in self._children}

    def close(self) -> None:
        for pulse in self._pulses.values():
            pulse.close()

    def unhealthy_for(self, name: str) -> float | None:
        """Seconds since the last good answer, None where it never answered since its start."""
        return self._pulses[name].silent_s

    def kill_silent(self) -> list[str]:
        """Returns a line on each server that it killed. To be called often: it also notes who was started again."""
        return [line for child in self._children if (line := self._look(child))]

    def _look(self, child: Child) -> str | None:
        if self._starts[child.name] != child.num_starts:
            self._starts[child.name] = child.num_starts
            self._pulses[child.name].reset()
        silent_s = self.unhealthy_for(child.name)
        if child.exit is not None or silent_s is None:
            return None
        is_closed = self._pulses[child.name].refused_s >= self._refused_for_s
        if silent_s < self._after_s and not is_closed:
            return None
        self._pulses[child.name].reset()
        listens = ", and nobody listens there" if is_closed else ""
        why = f"{child.spec.health} had not answered for {silent_s:.0f} s{listens}"
        child.kill(why)
        return f"{child.name} killed: {why}, though it did before"
