"""Routes of the gateway by which the clients of a user's own harness play rollouts (`agent.external`).

    POST /sessions                  {"env": NAME}: the next rollout that is wanted; with "example": INDEX, one of that
                                    example (and "split": "eval", of the held-out ones); with "rollout": NAME, that one
    GET  /sessions/{id}             whether it is open, and its number of model turns
    POST /sessions/{id}/reward      {"reward": 0.5, "metrics": {"steps": 3}} ends it; {} lets the environment's `reward`
                                    decide; {"error": TEXT} drops it

The first needs the run's token, the others the session's own key. Model calls are as for any agent program.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from fastapi import Request, Response
from starlette.routing import Route, request_response

from trireme.base.errors import ConfigError, DeadlineExceeded
from trireme.base.faults import reach
from trireme.base.network import is_loopback
from trireme.base.token import TOKEN, token
from trireme.base.waiting import Waits
from trireme.orchestrator.gateway.dialects.chat import CHAT
from trireme.orchestrator.gateway.dialects.turn import Dialect, Rejected, decode_body
from trireme.orchestrator.gateway.endpoint import Endpoint
from trireme.orchestrator.gateway.server import Gateway, as_json, refusal, wait_for_disconnect
from trireme.orchestrator.session.session import RolloutFailed
from trireme.orchestrator.session.wire import Ask, Played, Reply, RunTask, check_rewards
from trireme.transport.bearer import ClientDisconnected, RequireToken

LARGEST_BODY = 1 << 20  # bytes of a request to these routes

MOST_ASKING = 256
"""Requests for a rollout that wait at once. Further ones are refused, and retry."""

WAIT_S = 4.0  # a client waits this long until a rollout is wanted; less than the timeouts of HTTP clients
CLIENT_TIMEOUT_S = 1800.0  # the run ends if rollouts wait this long while no session is open


class Wanted(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /sessions`."""

    env: str
    example: int | None = None
    split: Literal["train", "eval"] = "train"
    rollout: str | None = None

    def is_for(self, task: RunTask) -> bool:
        if self.rollout is not None:
            return task.task == self.rollout
        return self.example is None or (task.split, task.index) == (self.split, self.example)

    def __str__(self) -> str:
        return f"{self.split} example {self.example}" if self.rollout is None else f"rollout {self.rollout!r:.80}"


class Outcome(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /sessions/{id}/reward`."""

    reward: float | None = None
    metrics: dict[str, float] = {}
    error: str | None = None


class OfferedEndpoint(Endpoint):
    """The endpoint of a session that is offered to clients, and then played by the one that takes it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id = secrets.token_urlsafe(12)
        create_future = asyncio.get_running_loop().create_future
        self.taken: asyncio.Future[None] = create_future()
        self.shown: asyncio.Future[dict[str, Any]] = create_future()  # `example` and `prompt`, from the environment
        self.outcome: asyncio.Future[Outcome] = create_future()
        self.has_reward = False  # its environment can score it

    async def play(self, question: Ask) -> Reply:
        """Show the client its example, and return what it has made of that. Raises: RolloutFailed if it gives up."""
        self.has_reward = question.has_reward
        if not self.shown.done():  # the client may have it already, from a worker that has died
            self.shown.set_result({"example": question.example, "prompt": question.messages})
        await asyncio.wait({self.outcome})
        outcome = self.outcome.result()
        if outcome.error is not None:
            raise RolloutFailed("rollout", f"the client gave it up: {outcome.error:.2000}")
        return Reply(played=Played(messages=self.transcript, reward=outcome.reward, metrics=outcome.metrics))


@dataclass
class Offers:
    """The rollouts of one environment that wait for a client, and those that clients play."""

    gateway: Gateway
    env: str
    host: str
    max_open: int
    waits: Waits
    _offered: list[OfferedEndpoint] = field(default_factory=list)
    _open: dict[str, OfferedEndpoint] = field(default_factory=dict)  # keyed by the rollout's id
    _asking: dict[asyncio.Future[OfferedEndpoint], Wanted] = field(default_factory=dict)
    _num_asking: int = 0
    _idle: ExitStack | None = None
    _is_over: bool = False

    def __post_init__(self) -> None:
        if token() is None and not is_loopback(self.host):
            raise ConfigError(
                f"Sessions of environment {self.env!r} would be open to the network at {self.host}, and this run has "
                f"no token - expected one beyond loopback - set {TOKEN}, or leave `agent.host` out."
            )

        # taking a rollout needs the run's token; the other routes need the key of its session
        app = self.gateway.app
        app.router.routes.append(Route("/sessions", RequireToken(request_response(self._take)), methods=["POST"]))
        app.add_api_route("/sessions/{id}", self._show, methods=["GET"])
        app.add_api_route("/sessions/{id}/reward", self.gateway.serve(CHAT, self._finish), methods=["POST"])

    @asynccontextmanager
    async def offer(self, rollout: OfferedEndpoint) -> AsyncIterator[None]:
        """Wait until a client takes the rollout. Its session is open until the context ends.

        Raises: DeadlineExceeded if no client comes at all.
        """
        self._offered.append(rollout)
        self._match()
        try:
            await rollout.taken
            yield
        finally:
            # a client that still waits for its example is told to retry, and its place is free for another one
            rollout.shown.cancel()
            self._open.pop(rollout.id, None)
            if rollout in self._offered:
                self._offered.remove(rollout)
            self._match()

    def _match(self) -> None:
        """Give rollouts to the clients that wait, in the order of both."""
        # each client gets the first rollout that it may have, and those that asked first choose first
        for asking, wanted in list(self._asking.items()):
            if not self._offered or len(self._open) >= self.max_open:
                break
            if (rollout := next((each for each in self._offered if wanted.is_for(each.task)), None)) is not None:
                self._offered.remove(rollout)
                self._open[rollout.id] = rollout
                # a rollout whose client left before it had the example is offered a second time
                if not rollout.taken.done():
                    rollout.taken.set_result(None)
                del self._asking[asking]
                asking.set_result(rollout)
        self._watch_for_clients()

    def _watch_for_clients(self) -> None:
        """While rollouts are offered and no client plays, show that as a wait, with its deadline."""
        is_idle = bool(self._offered) and not self._open
        if is_idle and self._idle is None:
            self._idle = ExitStack()
            what = f"a session of environment {self.env!r} (POST {self.gateway.url}/sessions)"
            waiting = self.waits.waiting(what, peer="a client", deadline_s=CLIENT_TIMEOUT_S)
            wait = self._idle.enter_context(waiting)
            timer = asyncio.get_running_loop().call_later(CLIENT_TIMEOUT_S, self._give_up, wait)
            self._idle.callback(timer.cancel)
        elif not is_idle and self._idle is not None:
            self._idle.close()
            self._idle = None

    def _give_up(self, wait: object) -> None:
        words = f"{wait}, longer than the {CLIENT_TIMEOUT_S:.0f} s allowed. Start your clients, and resume the run."
        for rollout in [each for each in self._offered if not each.taken.done()]:
            rollout.taken.set_exception(DeadlineExceeded(words))

    def close(self) -> None:
        """Refuse the clients that wait, and those that come later."""
        self._is_over = True
        for asking in self._asking:
            asking.cancel()

    # routes

    async def _take(self, request: Request) -> Response:
        self._num_asking += 1
        gone: asyncio.Task[None] | None = None
        asking: asyncio.Future[OfferedEndpoint] = asyncio.get_running_loop().create_future()
        try:
            # counted before the body is read, so that clients beyond the limit take no memory
            if self._num_asking > MOST_ASKING:
                raise Rejected("busy", f"{MOST_ASKING} clients wait for a rollout. Retry later.", retry_after_s=5)
            wanted = decode_body(await self.gateway.receive(request, None, LARGEST_BODY), Wanted)
            if self._is_over:
                raise Rejected("ended", "The run is over.")
            if wanted.env != self.env:
                raise Rejected("unknown", f"env: {wanted.env!r:.80} is not served here, {self.env!r} is.")

            # wait for a rollout, but no longer than HTTP clients do; a client that leaves must not be given one
            self._asking[asking] = wanted
            self._match()
            gone = asyncio.create_task(wait_for_disconnect(request.receive))
            either: set[asyncio.Future[Any]] = {asking, gone}
            await asyncio.wait(either, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            if asking.cancelled():
                raise Rejected("ended", "The run is over.")
            if not asking.done():
                raise self._refuse(wanted)

            # the rollout is this client's; its environment worker now reads the example
            rollout = asking.result()
            either = {rollout.shown, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if rollout.shown.cancelled():
                raise Rejected("busy", "The rollout ended before its example was read. Retry.", retry_after_s=1)
            if gone.done():  # another client may have the rollout
                if self._open.pop(rollout.id, None) is not None:
                    self._offered.insert(0, rollout)
                raise Rejected("ended", "The client has gone.")

            # the client learns the key of its session, with which it reaches the model and posts the reward
            reach("session.taken")
            address = str(request.base_url).rstrip("/")
            shown = {"id": rollout.id, "api_key": rollout.key, "base_url": f"{address}/v1", "gateway": address}
            task = rollout.task
            which = {"env": self.env, "rollout": task.task, "split": task.split, "index": task.index}
            return as_json(shown | which | rollout.shown.result())
        except Rejected as refused:
            return refusal(refused, CHAT)
        except ClientDisconnected:
            return Response(status_code=400)  # the client has left
        finally:
            # a rollout that was put back, or a place that is free, may serve another client that waits
            self._num_asking -= 1
            self._asking.pop(asking, None)
            if gone is not None:
                gone.cancel()
            self._match()

    def _refuse(self, wanted: Wanted) -> Rejected:
        if len(self._open) >= self.max_open:
            words = f"{self.max_open} sessions are open, the most at once (`max_concurrent`). Retry later."
        elif wanted.example is None and wanted.rollout is None:
            words = f"No rollout of environment {self.env!r} is wanted at the moment. Retry later."
        else:
            words = f"{wanted} is not wanted at the moment. Leave `example` and `rollout` out for another one."
            return Rejected("unknown", words)
        return Rejected("busy", words, retry_after_s=1)

    async def _show(self, request: Request) -> Response:
        try:
            rollout = self._find(request, await self.gateway.find(request))
        except Rejected as refused:
            if refused.problem == "ended":
                return as_json({"state": "ended", "reason": str(refused)})
            return refusal(refused, CHAT)
        return as_json({"state": "open", "num_turns": rollout.num_turns})

    async def _finish(self, request: Request, endpoint: Endpoint, dialect: Dialect) -> Response:
        rollout = self._find(request, endpoint)
        outcome = decode_body(await self.gateway.receive(request, endpoint, LARGEST_BODY), Outcome)
        # refused before the session ends, so that the client can correct its request
        if outcome.error is None:
            if outcome.reward is None and not rollout.has_reward:
                raise Rejected("invalid", f"reward: none, and {self.env!r} has no `reward` itself. Post a number.")
            if not rollout.num_turns:
                raise Rejected("invalid", "This session has no model turn to be rewarded. Post an `error` to drop it.")
            try:
                check_rewards([] if outcome.reward is None else [outcome.reward])
            except ValueError as error:
                raise Rejected("invalid", f"The reward cannot be used: {error}.") from error

        if rollout.outcome.done():  # a second request came while this one was read
            raise Rejected("ended", "The session has ended: its reward was posted.")
        rollout.outcome.set_result(outcome)
        reach("session.rewarded")
        self.gateway.close(rollout.key, "its reward was posted")
        return as_json({"state": "ended"})

    def _find(self, request: Request, endpoint: Endpoint) -> OfferedEndpoint:
        """Return the open rollout of a session's key, which the path must name. Raises: Rejected."""
        rollout = self._open.get(request.path_params["id"])
        if rollout is None or rollout is not endpoint:
            raise Rejected("unknown", "This API key belongs to another session than the one of the path.")
        return rollout
