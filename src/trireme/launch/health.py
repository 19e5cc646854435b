"""Health checks: kill servers that stop answering and processes that are stopped, so that the supervisor restarts them.

A refused connection counts for less time than a missing answer: no process listens there, and none will. vLLM is left
like this when its engine core dies during a weight update: it closes its port and waits for that request forever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import httpx

from trireme.launch.children import Child
from trireme.launch.process_tree import Process

ASK_EVERY_S = 2.0
STARTING_EVERY_S = 0.1  # until the first good answer: an engine may die of the weights that it is given at once
ANSWER_WITHIN_S = 5.0
LONGEST_LOOK_S = 2.0  # between two looks; a longer gap means that the launcher itself was stopped
REFUSED_FOR_S = 10.0  # a server that leaves by itself is given this long


class HealthCheck:
    """Poll a server in a thread, until it is started again, and count for how long it has failed to answer since its
    first good answer."""

    def __init__(self, child: Child, every_s: float) -> None:
        self.number = child.num_starts  # the start of the server that the answers are about
        self.silent_s: float | None = None  # seconds without a good answer; None if it never answered since its start
        self.refused_s = 0.0  # seconds for which its port has refused connections without a break, up to now
        self.is_closed = threading.Event()
        self._url = child.spec.health or ""
        self._every_s = every_s
        threading.Thread(target=self._follow, name=f"health of {child.name}", daemon=True).start()

    def _follow(self) -> None:
        asked = time.monotonic()
        with httpx.Client(timeout=ANSWER_WITHIN_S, trust_env=False) as client:
            while not self.is_closed.wait(self._every_s if self.silent_s is not None else STARTING_EVERY_S):
                is_healthy, is_refused = False, False
                try:
                    is_healthy = client.get(self._url).status_code == 200
                except httpx.ConnectError:
                    is_refused = True
                except httpx.HTTPError:
                    pass
                # At most what one check can take counts: the launcher itself may have slept.
                passed_s = min(time.monotonic() - asked, self._every_s + ANSWER_WITHIN_S)
                asked = time.monotonic()

                # Silence counts only after the first good answer: a start has a timeout of its own.
                if is_healthy:
                    self.silent_s, self.refused_s = 0.0, 0.0
                elif self.silent_s is not None:
                    self.silent_s += passed_s
                    self.refused_s = self.refused_s + passed_s if is_refused else 0.0


class HealthWatch:
    """The health checks of all servers of a run."""

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
        self._every_s = every_s
        self._servers = [child for child in children if child.spec.health]
        self.checks = {child.name: HealthCheck(child, every_s) for child in self._servers}

    def close(self) -> None:
        """Stop polling. Does not wait for the answers to the last requests."""
        for check in self.checks.values():
            check.is_closed.set()

    def kill_silent(self) -> list[str]:
        """Kill servers that were unhealthy for too long. Return a line for each. Call it often: it notices restarts."""
        lines = []
        for child in self._servers:
            # A server that was started again has a check of its own: an answer to an earlier request is not about it.
            if self.checks[child.name].number != child.num_starts:
                self.checks[child.name].is_closed.set()
                self.checks[child.name] = HealthCheck(child, self._every_s)

            check = self.checks[child.name]
            silent_s, is_refusing = check.silent_s, check.refused_s >= self._refused_for_s
            if child.exit is not None or silent_s is None or (silent_s < self._after_s and not is_refusing):
                continue
            if check.is_closed.is_set():  # it was killed already, and is about to end
                continue

            check.is_closed.set()
            listens = ", and its port is closed" if is_refusing else ""
            why = f"{child.spec.health} did not answer for {silent_s:.0f} s{listens}"
            child.kill(why)
            lines.append(f"{child.name} killed: {why}")
        return lines


class FrozenWatch:
    """Count how long each process of a run has been stopped (SIGSTOP, a debugger): it would hold up the whole run."""

    def __init__(self, after_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s = after_s
        self._clock = clock
        self._looked: float | None = None
        self._stopped_s: dict[tuple[int, int], float] = {}  # seconds stopped so far, by pid and start

    def kill_frozen(self, children: Sequence[Child], table: dict[int, Process] | None) -> list[str]:
        """Kill processes that were stopped for too long. Return a line for each.

        Time in which the launcher itself was stopped does not count, so that a whole run may be stopped and continued.
        Nothing is done if the machine's processes were not read this time (`table` is None).
        """
        if table is None:
            return []
        now = self._clock()
        passed_s = min(LONGEST_LOOK_S, now - self._looked) if self._looked is not None else 0.0
        self._looked = now

        # A process that runs again loses its time. One that was found now for the first time begins at 0.
        stopped = {(p.pid, p.start): (child, p) for child in children for p in child.family.members(table) if p.stopped}
        self._stopped_s = {key: self._stopped_s[key] + passed_s if key in self._stopped_s else 0.0 for key in stopped}

        lines = []
        for key, for_s in self._stopped_s.items():
            if for_s >= self._after_s:
                child, process = stopped[key]
                why = f"it was stopped for {for_s:.0f} s"
                lines.append(f"{child.name}: process {process.pid} ({process.command}) killed, {why}")
                child.kill_member(process, why)
        return lines
