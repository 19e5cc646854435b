"""`inference --join ADDRESS`: an engine that joins a running run, serves, and leaves.

Its requests are answered by `orchestrator/engines/joined.py`. This process starts the server as a child and beats for
it. SIGTERM makes it leave: the orchestrator sends the engine no more requests, and the server ends once those under way
are answered, or have gone to other engines.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError, DeadlineExceeded, PeerRefused, WeightsMismatch
from trireme.base.log import get_logger, start_logging
from trireme.base.network import EVERYWHERE, address_towards, is_loopback
from trireme.base.processes import catch_signals, free_port, last_lines
from trireme.base.token import TOKEN, adopt_token
from trireme.base.waiting import Waits
from trireme.config.engine_facts import Facts, engine_facts
from trireme.config.files import write_run
from trireme.config.load import load_run_config
from trireme.config.resolve import KNOWN_PORTS, resolve, updated
from trireme.config.rules.check import check_launch
from trireme.config.run import RunConfig, place_of
from trireme.launch.children import open_children
from trireme.launch.plan import ProcessSpec, plan
from trireme.messages import Again, Beat, Dismissed, GetTerms, Join, Joined, Leave, Reply, Request, Terms
from trireme.transport.control import ControlClient

log = get_logger("inference")

POLL_S = 0.2
BEAT_S = 1.0
ANSWER_S = 2.0  # longest wait for one answer, after which the server and signals are looked at again
END_S = 5.0  # between SIGTERM and SIGKILL for the server, which has nothing to save


def join(argv: list[str]) -> int:
    """Join, serve and leave. Return the exit code.

    Raises: ConfigError if this machine cannot serve the run's model, or the run refuses this engine.
    """
    typed, invocation = load_run_config(argv, section="inference", program="inference")
    os.environ.update(typed.env_vars)
    adopt_token(typed.hosts.token_file)
    start_logging("inference", typed.log_level)
    try:
        host, port = place_of(invocation.join or "")
    except ValueError:
        raise ConfigError(
            f'`--join {invocation.join}` is no address - expected the orchestrator\'s, as "10.0.0.10" or '
            '"10.0.0.10:5555" (`ports.batches`). `trireme status RUN` shows it.'
        ) from None

    address, patience_s = f"{host}:{port or KNOWN_PORTS['ports.batches']}", typed.inference.start_timeout_s
    log.info("joining the run at %s", address)
    with catch_signals() as signals, closing(Membership(address, signals, patience_s=patience_s)) as membership:
        if (terms := membership.terms()) is None:
            return 0
        config = _resolve(argv, host, terms)
        url, facts = f"http://{config.hosts.inference[0]}:{config.inference.server.port}", engine_facts(config)

        # Nothing expensive is loaded before the run has accepted this engine.
        if not membership.register(terms, url, facts):
            return 0
        name = f"inference-{membership.id}"
        run_file, log_file = config.paths.configs / f"{name}.json", config.paths.logs / f"{name}.stdout"
        write_run(config, run_file)
        spec = replace(plan(config, run_file, detect_devices())["inference"], log=log_file)
        log.info("engine %d of the run at %s; log of its server: %s", membership.id, address, log_file)
        return serve(spec, membership, signals, drain_timeout_s=config.inference.drain_timeout_s)


def _resolve(argv: list[str], host: str, terms: Terms) -> RunConfig:
    """Return the run as this engine serves it: what was typed goes over the run's keys; addresses and GPUs are ours."""
    config, invocation = load_run_config(argv, section="inference", program="inference", beneath=json.loads(terms.run))
    bound, port = config.inference.server.host, config.inference.server.port
    if "host" not in config.inference.server.model_fields_set or bound in (EVERYWHERE, "::", ""):
        bound = "127.0.0.1" if is_loopback(host) else address_towards(host) or host
    places = {"hosts.orchestrator": host, "hosts.inference": (bound,)}
    config, devices = (
        updated(config, places | {"inference.server.port": port or free_port(EVERYWHERE)}),
        detect_devices(),
    )
    with invocation.their_keys_named():
        config = resolve(config, devices, section="inference")
        check_launch(config, devices, section="inference")
    return config


class Membership:
    """The engine's end of a membership. Each method raises ConfigError if the run refuses it, and DeadlineExceeded if
    there was no answer in time."""

    def __init__(self, address: str, signals: Sequence[int], *, patience_s: float) -> None:
        """
        Args:
            signals: received by this process; the first ends all waits.
            patience_s: longest time for which the orchestrator may not answer.
        """
        self.id, self._ticket = 0, ""
        self.has_server_ended: Callable[[], bool] = lambda: False  # asked between two requests; ends all waits too
        self._address, self._signals, self._patience_s = address, signals, patience_s
        self._client = ControlClient(f"tcp://{address}", Waits("inference"), ask_again_s=ANSWER_S / 2)
        self.close = self._client.close

    def terms(self) -> Terms | None:
        """Return what the run expects; None after a signal."""
        reply = self._ask(GetTerms())
        assert reply is None or isinstance(reply, Terms), reply
        return reply

    def register(self, terms: Terms, url: str, facts: Facts) -> bool:
        """Become a member. Return False after a signal."""
        self._own = url, facts
        reply = self._ask(Join(terms.ticket, url, facts))
        if isinstance(reply, Again):
            raise PeerRefused(f"The run at {self._address} did not take this engine in: {reply.reason}")
        if isinstance(reply, Joined):
            self.id, self._ticket = reply.member, terms.ticket
        return isinstance(reply, Joined)

    def register_again(self) -> None:
        """Become another member, after the orchestrator has forgotten this one."""
        if (terms := self.terms()) is not None:
            self.register(terms, *self._own)

    def beat(self) -> Reply | None:
        """Say that the server's process lives. Return `Ok`, `Again`, `Dismissed`, or None as `_ask`."""
        return self._ask(Beat(self.id, self._ticket))

    def leave(self, within_s: float) -> None:
        """Have the orchestrator stop using the server, and wait until it may end: at most `within_s`, and no longer
        after a second signal."""
        give_up_at = time.monotonic() + within_s
        while (left_s := give_up_at - time.monotonic()) > 0 and len(self._signals) < 2:
            if self._once(Leave(self.id, self._ticket, at_once=False), min(ANSWER_S, left_s)) is not None:
                return
        self._once(Leave(self.id, self._ticket, at_once=True), ANSWER_S)

    def _ask(self, request: Request) -> Reply | None:
        """Return the reply; None after a signal, or if the server ended."""
        give_up_at = time.monotonic() + self._patience_s
        while not (self._signals or self.has_server_ended()):
            if (reply := self._once(request, ANSWER_S)) is not None:
                return reply
            if self._client.is_rejected and not self.id:
                raise ConfigError(
                    f"the orchestrator at {self._address} rejects the connection - expected the run's token in {TOKEN}."
                    " Set it to the same value as there (on one machine it is in the run's folder, in .token)."
                )
            if time.monotonic() > give_up_at:
                raise DeadlineExceeded(
                    f"{self._address} has not answered {type(request).__name__} for {self._patience_s:.0f} s - expected"
                    " a run's orchestrator there. Check the address, the port (`ports.batches`) and its log."
                )
        return None

    def _once(self, request: Request, wait_s: float) -> Reply | None:
        try:
            return self._client.ask(request, what="an answer", deadline_s=wait_s)
        except DeadlineExceeded:
            return None
        except PeerRefused as error:
            raise ConfigError(f"the run at {self._address} refuses this engine: {error}") from error


def serve(spec: ProcessSpec, membership: Membership, signals: Sequence[int], *, drain_timeout_s: float) -> int:
    """Run the server of a member until a signal, the end of the run, or its own. Return the exit code.

    Raises: WeightsMismatch if the run sends it away; otherwise as `Membership`. The server is ended.
    """
    beat_at = 0.0
    with open_children([spec], lambda: len(signals) > 1, END_S) as children:
        child = children.children[0]

        def has_ended() -> bool:
            children.look()
            return child.exit is not None

        membership.has_server_ended = has_ended  # an orchestrator that is away for long must not hide it
        while not signals:
            if has_ended() and child.exit is not None:
                membership.leave(0.0)
                end = "\n".join(f"  {line}" for line in last_lines(spec.log, 12))
                log.error("the server ended (%s); the run goes on. The end of %s:\n%s", child.exit, spec.log, end)
                return child.exit.code if child.exit.code > 0 else 1

            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + BEAT_S
                match membership.beat():
                    case Dismissed(reason=reason, is_over=True):
                        log.info("engine %d ends: %s", membership.id, reason)
                        return 0
                    case Dismissed(reason=reason):
                        raise WeightsMismatch(f"The run sent engine {membership.id} away: {reason}")
                    case Again(reason=reason):
                        log.warning("%s; joining again", reason)
                        membership.register_again()
            time.sleep(POLL_S)

        log.info("engine %d leaves the run, within %.0f s", membership.id, drain_timeout_s)
        membership.leave(drain_timeout_s)
    return 0
