"""An engine that joins a running run: it registers, serves, and leaves. `orchestrator/engines/joined.py` answers.

This process starts the server as a child, and beats for it. SIGTERM makes it leave: the orchestrator sends the engine
no more requests, and the server ends once those under way are answered, or have gone to other engines.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import httpx

from trireme.base.errors import ConfigError, DeadlineExceeded, EngineDismissed, PeerRefused, message_of
from trireme.base.log import get_logger
from trireme.base.processes import last_lines
from trireme.base.token import TOKEN, bearer, token
from trireme.base.waiting import Waits
from trireme.config.engine_facts import Facts
from trireme.launch.children import open_children
from trireme.launch.plan import ProcessSpec
from trireme.messages import Again, Beat, Dismissed, GetTerms, Join, Joined, Leave, Reply, Request, Terms
from trireme.transport.control import ControlClient

log = get_logger("inference")

POLL_S = 0.2
BEAT_S = 1.0
ANSWER_S = 2.0  # longest wait for one answer, after which the server and signals are looked at again
END_S = 5.0  # between SIGTERM and SIGKILL for the server, which has nothing to save
ASK_SERVER_S = 10.0  # between two looks at the server's counters
HITS = re.compile(r"^vllm:prefix_cache_(hits|queries)_total(?:\{.*\})? (\S+)$", re.MULTILINE)


class Membership:
    """The engine's end of a membership."""

    def __init__(self, address: str, signals: Sequence[int], *, patience_s: float) -> None:
        """
        Args:
            signals: received by this process; the first ends all waits.
            patience_s: longest time for which the orchestrator may not answer.
        """
        self.id, self._ticket = 0, ""
        self._address, self._signals, self._patience_s = address, signals, patience_s
        self._client = ControlClient(f"tcp://{address}", Waits("inference"), ask_again_s=ANSWER_S / 2)

    def terms(self) -> Terms | None:
        """Return what the run expects; None after a signal. Raises: as `_ask`."""
        reply = self._ask(GetTerms(), what="the terms of the run")
        assert reply is None or isinstance(reply, Terms), reply
        return reply

    def register(self, terms: Terms, url: str, facts: Facts) -> bool:
        """Become a member. Return False after a signal.

        Raises: ConfigError if the run refuses this engine; otherwise as `_ask`.
        """
        found: Terms | None = terms
        while found is not None:
            self._ticket = found.ticket
            match self._ask(Join(found.ticket, url, facts), what="its place in the run"):
                case Joined(member=id):
                    self.id = id
                    return True
                case Again(reason=reason):
                    log.warning("%s did not take this engine in: %s", self._address, reason)
                    found = self.terms()
                case _:
                    break
        return False

    def beat(self, prefix_hits: float | None) -> Reply | None:
        """Say that the server's process lives. Return `Ok`, `Again`, `Dismissed`, or None after a signal."""
        return self._ask(Beat(self.id, self._ticket, prefix_hits), what="an answer to its heartbeat")

    def leave(self, within_s: float) -> None:
        """Have the orchestrator stop using the server, and wait until it may end: at most `within_s`, and no longer
        after a second signal."""
        leaving, give_up_at = Leave(self.id, self._ticket, at_once=False), time.monotonic() + within_s
        while time.monotonic() < give_up_at and len(self._signals) < 2:
            left_s = max(0.1, min(ANSWER_S, give_up_at - time.monotonic()))
            if self._once(leaving, "its requests to be answered", left_s) is not None:
                return
        self._once(Leave(self.id, self._ticket, at_once=True), "its requests to go elsewhere", ANSWER_S)

    def _ask(self, request: Request, *, what: str) -> Reply | None:
        """Return the reply; None after a signal.

        Raises:
            ConfigError: the token is another one, or the orchestrator refuses the request.
            DeadlineExceeded: there was no answer in time.
        """
        give_up_at = time.monotonic() + self._patience_s
        while not self._signals:
            if (reply := self._once(request, what, ANSWER_S)) is not None:
                return reply
            if self._client.is_rejected and not self.id:
                raise ConfigError(
                    f"the orchestrator at {self._address} rejects the connection - expected the run's token in {TOKEN}."
                    f" Set it to the same value as there (on one machine it is in the run's folder, in .token)."
                )
            if time.monotonic() > give_up_at:
                raise DeadlineExceeded(
                    f"{self._address} gave no answer for {self._patience_s:.0f} s - expected {what} from the "
                    "orchestrator. Check the address and port (`ports.batches`), and the orchestrator's log."
                )
        return None

    def _once(self, request: Request, what: str, wait_s: float) -> Reply | None:
        try:
            return self._client.ask(request, what=what, deadline_s=wait_s)
        except DeadlineExceeded:
            return None
        except PeerRefused as error:
            raise ConfigError(f"the run at {self._address} refuses this engine: {error}") from error

    def close(self) -> None:
        self._client.close()


def serve(
    spec: ProcessSpec, membership: Membership, signals: Sequence[int], *, url: str, facts: Facts, drain_timeout_s: float
) -> int:
    """Run the server of a member until a signal, the end of the run, or its own. Return the exit code.

    Raises: EngineDismissed if the run sends it away; otherwise as `Membership`. The server is ended.
    """
    hits, beat_at, ask_at = None, 0.0, 0.0
    with open_children([spec], lambda: len(signals) > 1, END_S) as children:
        child = children.children[0]
        while not signals:
            children.look()
            if child.exit is not None:
                membership.leave(0.0)
                _explain(spec, str(child.exit))
                return child.exit.code if child.exit.code > 0 else 1

            if time.monotonic() > ask_at:
                hits, ask_at = _prefix_hits(url), time.monotonic() + ASK_SERVER_S
            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + BEAT_S
                match membership.beat(hits):
                    case Dismissed(reason=reason, is_over=True):
                        log.info("engine %d ends: %s", membership.id, reason)
                        return 0
                    case Dismissed(reason=reason):
                        raise EngineDismissed(f"The run sent engine {membership.id} away: {reason}")
                    case Again(reason=reason):
                        log.warning("%s; joining again", reason)
                        if (terms := membership.terms()) is not None:
                            membership.register(terms, url, facts)
            time.sleep(POLL_S)

        log.info("engine %d leaves the run, within %.0f s", membership.id, drain_timeout_s)
        membership.leave(drain_timeout_s)
    return 0


def _explain(spec: ProcessSpec, how: str) -> None:
    end = "\n".join(f"  {line}" for line in last_lines(spec.log, 12))
    log.error("the server ended (%s); the run goes on without it. The end of %s:\n%s", how, spec.log, end)


def _prefix_hits(url: str) -> float | None:
    """Return the share of its prompts' tokens that the server had cached; None while it does not say so."""
    try:
        text = httpx.get(f"{url}/metrics", headers=bearer(token()), timeout=1.0, trust_env=False).text
    except httpx.HTTPError as error:
        log.debug("no counters of %s: %s", url, message_of(error))
        return None
    sums = {"hits": 0.0, "queries": 0.0}
    for name, value in HITS.findall(text):
        sums[name] += float(value)
    return min(1.0, sums["hits"] / sums["queries"]) if sums["queries"] else None
