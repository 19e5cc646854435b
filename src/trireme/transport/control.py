"""Requests and replies between trainer and orchestrator, over ZeroMQ.

Lost, duplicated or reordered messages do no harm: a request carries a number, replies to earlier requests are dropped,
and every reply is idempotent. The server replies within a second, with `NotYet` while there is nothing to tell, so
silence always means that the peer is gone.

    request    [b"VERSION:NUMBER", a request]     VERSION: the client's `WIRE_VERSION`
    reply      [the same first frame, a reply]

With a token (`base.token`) the connection is authenticated and encrypted.

Any process can reach a port. Malformed requests are refused with what was expected, and logged at a limited rate;
malformed replies are logged and skipped. Neither ends a process.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from trireme import messages
from trireme.base.errors import PeerRefused, TriremeError
from trireme.base.log import RateLimitedLog, get_logger
from trireme.base.network import is_loopback, listening_address, numeric
from trireme.base.token import TOKEN, token
from trireme.base.waiting import Waits
from trireme.transport.curve import HANDSHAKE_FAILED, ServerAuthenticator, enable_heartbeats, set_client_keys

log = get_logger("control")
rate_limited = RateLimitedLog(log)

ASK_AGAIN_S = 5.0  # a request without a reply for this long is sent again
PATIENCE_S = 1.0  # a server answers `NotYet` after this long
LARGEST_REQUEST = 64 << 20  # bytes; specs and digests of 100,000 tensors take a tenth of it
LARGEST_PLAIN_REQUEST = 1 << 20  # bytes of a request that does not list the tensors of a model
REQUESTS_AT_ONCE = 64  # limit for one client; ours has one under way, and a heartbeat a second
BYTES_AT_ONCE = 4 * LARGEST_REQUEST  # limit for all clients; requests beyond are dropped and will be sent again
QUEUE_LENGTH = 2  # messages of one client that ZeroMQ reads ahead; a client waits for each reply

ANSWERS: dict[type, tuple[type, ...]] = {
    messages.GetNewest: (messages.Newest,),
    messages.GetBatch: (messages.BatchReply, messages.Publish),
    messages.PolicyReady: (messages.Go, messages.Again, messages.Live),
    messages.PolicySent: (messages.Live, messages.Again),
    messages.Heartbeat: (messages.Ok,),
    messages.Done: (messages.Ok, messages.Publish),
    messages.GetTerms: (messages.Terms,),
    messages.Join: (messages.Joined, messages.Again),
    messages.Beat: (messages.Ok, messages.Again, messages.Dismissed),
    messages.Leave: (messages.Ok,),
}
"""The replies to each request, in addition to `NotYet` and `Refusal`."""


class ControlClient:
    """The client. Use one per thread: ZeroMQ sockets are not thread-safe."""

    def __init__(
        self,
        address: str,
        waits: Waits,
        *,
        ask_again_s: float = ASK_AGAIN_S,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            meanwhile: called again and again while an answer is waited for.
        """
        self._meanwhile = meanwhile
        self._address = address
        self._waits = waits
        self._ask_again_s = ask_again_s
        self._numbers = itertools.count(1)
        self._token = token()
        self.is_rejected = False
        self._connect()

    def _connect(self) -> None:
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._has_connected = False

        # Keys and heartbeats must be set before the socket connects.
        if self._token is not None:
            set_client_keys(self._socket, self._token)
        if not is_loopback(self._address.removeprefix("tcp://").partition(":")[0]):
            enable_heartbeats(self._socket)

        # A restarted peer never gets what was sent to the old one, so `_once` listens for disconnects.
        self._events: zmq.Socket = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED
        )

        self._socket.connect(self._address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)

    def ask(
        self, request: messages.Request, *, what: str, deadline_s: float, keeps_alive: bool = True
    ) -> messages.Reply:
        """Send a request until there is a reply other than `NotYet`.

        Args:
            keeps_alive: call `meanwhile` between requests. It may be a collective, so this is False while the other
                ranks are in another one.

        Raises:
            PeerRefused: the orchestrator refuses the request for good, or its reply does not belong to it.
            DeadlineExceeded: there was no reply within `deadline_s`.
        """
        with self._waits.waiting(what, peer="orchestrator", deadline_s=deadline_s) as wait:
            while True:
                reply = self._once(request)
                match reply:
                    case None:
                        wait.note = "no answer"
                        if self.is_rejected:
                            wait.note = f"it rejects the connection: {TOKEN} must be the same on both machines"

                    # A busy peer (an evaluation, a full disk) has its own deadlines: ours counts from the end.
                    case messages.NotYet(note, busy):
                        wait.note = note
                        if busy:
                            wait.restart_deadline()

                    case messages.Refusal(error):
                        raise PeerRefused(error)
                    case _:
                        # Another version of Trireme sent this reply, and would send it again.
                        expected = ANSWERS[type(request)]
                        if not isinstance(reply, expected):
                            names = " or ".join(kind.__name__ for kind in expected)
                            raise PeerRefused(
                                f"The orchestrator answered {type(request).__name__} with {type(reply).__name__} - "
                                f"{names} was expected - install the same version of Trireme on both sides."
                            )
                        return reply

                wait.check()
                if keeps_alive:
                    self._meanwhile()

    def tell(self, request: messages.Request) -> None:
        """Send a request without waiting for a reply."""
        # Discard the replies to earlier calls, which no code reads, or they would fill the queue.
        for _ in range(REQUESTS_AT_ONCE):
            if not self._socket.poll(0):
                break
            self._socket.recv_multipart()

        self._send(_first_frame(0), request)

    def _once(self, request: messages.Request) -> messages.Reply | None:
        first = _first_frame(next(self._numbers))
        self._send(first, request)

        ask_again_at = time.monotonic() + self._ask_again_s
        while (left_s := ask_again_at - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(left_s * 1000)))
            if self._socket in ready and (reply := _read_reply(self._socket.recv_multipart(), first)) is not None:
                return reply
            if self._events in ready and self._peer_is_gone():  # its successor never got the request
                self._drop_unsent()
                self._send(first, request)

        # Close the socket: the request may still wait in its queue, and would be sent together with the next one.
        self._drop_unsent()
        return None

    def _peer_is_gone(self) -> bool:
        """Return whether the peer has disconnected. A peer that rejects our handshake is not asked again at once."""
        event = parse_monitor_message(self._events.recv_multipart())["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._has_connected, self.is_rejected = True, False
            return False
        self.is_rejected = not self._has_connected
        return self._has_connected

    def _send(self, first: bytes, request: messages.Request) -> None:
        frames = [first, messages.encode(request)]
        if len(frames[1]) > LARGEST_REQUEST:
            raise PeerRefused(
                f"{type(request).__name__} has {len(frames[1])} bytes - at most {LARGEST_REQUEST} were expected - "
                "raise `LARGEST_REQUEST` in transport/control.py on both sides."
            )
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:  # the queue to a dead peer is full: blocking would be a wait without a deadline
            self._drop_unsent()
            self._socket.send_multipart(frames)

    def _drop_unsent(self) -> None:
        self.close()
        self._connect()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()


def _first_frame(number: int) -> bytes:
    return b"%d:%d" % (messages.WIRE_VERSION, number)


def _read_reply(frames: list[bytes], first: bytes) -> messages.Reply | None:
    """Return the reply; None if it belongs to an earlier request, or is malformed."""
    if len(frames) != 2:
        rate_limited.warning("ignored a reply of %d frames; two were expected", len(frames))
        return None
    if frames[0] != first:
        return None
    try:
        return messages.decode_reply(frames[1])
    except Exception as error:  # broken bytes make decoders raise RecursionError, UnicodeDecodeError, ...
        rate_limited.warning("ignored a reply that cannot be decoded: %s: %s", type(error).__name__, error)
        return None


Handler = Callable[[messages.Request], Awaitable[messages.Reply]]


class MalformedRequest(TriremeError):
    """A message is not a request, or has another wire version."""


class ControlServer:
    """The server. It is bound before any client connects."""

    def __init__(self, host: str, port: int) -> None:
        secret = token()
        self._context = zmq.asyncio.Context()  # its own, because only the end of a context waits until the port is free
        self._authenticator = None if secret is None else ServerAuthenticator(self._context, secret)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize, self._socket.rcvhwm = LARGEST_REQUEST, QUEUE_LENGTH
        if self._authenticator is not None:
            self._authenticator.set_server_keys(self._socket)
            self._rejections = self._socket.get_monitor_socket(HANDSHAKE_FAILED)
        if not is_loopback(host):
            enable_heartbeats(self._socket)
        self._socket.bind(f"tcp://{numeric(listening_address(host))}:{port}")

        self._answering: set[asyncio.Task] = set()
        self._under_way: Counter[bytes] = Counter()  # requests by client
        self._bytes_under_way = 0

    async def serve(self, handle: Handler) -> None:
        """Answer requests until cancelled. Waits for requests; is woken by the socket."""
        if self._authenticator is not None:
            self._keep(asyncio.create_task(self._log_rejections()))
        while True:
            peer, *frames = await self._socket.recv_multipart()

            try:
                request = read_request(frames)
            except MalformedRequest as error:
                rate_limited.warning("%s was refused: %s", _name(peer), error)
                if frames and len(frames[0]) <= LONGEST_FIRST_FRAME:
                    await self._socket.send_multipart(
                        [peer, frames[0], messages.encode(messages.Refusal(error=str(error)))]
                    )
            else:
                self._begin(handle, peer, frames[0], request, len(frames[1]))
            await asyncio.sleep(0)  # receiving a queued message does not yield to other tasks

    def _begin(self, handle: Handler, peer: bytes, first: bytes, request: messages.Request, num_bytes: int) -> None:
        if self._under_way[peer] >= REQUESTS_AT_ONCE or self._bytes_under_way + num_bytes > BYTES_AT_ONCE:
            rate_limited.warning(
                "dropped a request of %s: %d of it and %d MiB of all clients are being answered",
                _name(peer),
                self._under_way[peer],
                self._bytes_under_way >> 20,
            )
            return

        # Answered in a task of its own: a request that waits for a batch must not hold up heartbeats.
        self._under_way[peer] += 1
        self._bytes_under_way += num_bytes
        self._keep(asyncio.create_task(self._answer(handle, peer, first, request, num_bytes)))

    def _keep(self, task: asyncio.Task) -> None:
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _log_rejections(self) -> None:
        while True:
            await self._rejections.recv_multipart()
            rate_limited.warning("rejected a connection without the run's token: %s must be the same everywhere", TOKEN)

    async def _answer(
        self, handle: Handler, peer: bytes, first: bytes, request: messages.Request, num_bytes: int
    ) -> None:
        try:
            reply = messages.encode(await handle(request))
        except Exception as error:
            log.exception("could not answer a request")
            reply = messages.encode(messages.Refusal(error=f"{type(error).__name__}: {error}"))
        finally:
            self._bytes_under_way -= num_bytes
            self._under_way[peer] -= 1
            if not self._under_way[peer]:
                del self._under_way[peer]
        await self._socket.send_multipart([peer, first, reply])

    def close(self) -> None:
        for task in self._answering:
            task.cancel()
        if self._authenticator is not None:
            self._socket.disable_monitor()
            self._authenticator.close()
        self._context.destroy(linger=0)


LONGEST_FIRST_FRAME = 64


def read_request(frames: list[bytes]) -> messages.Request:
    """Parse a request. Raises MalformedRequest with what was expected."""
    if len(frames) != 2:
        raise MalformedRequest(
            f"A message of {len(frames)} frames - two were expected, `VERSION:NUMBER` and a request."
        )

    theirs = re.fullmatch(rb"(?:(\d{1,9}):)?\d{1,20}", frames[0])
    if theirs is None:
        raise MalformedRequest(f"A message that begins with {frames[0][:40]!r} - `VERSION:NUMBER` was expected.")

    # The version comes before the request, which another version may encode differently.
    if theirs[1] is None or int(theirs[1]) != messages.WIRE_VERSION:
        version = int(theirs[1]) if theirs[1] else "an earlier one"
        raise MalformedRequest(
            f"This orchestrator speaks wire version {messages.WIRE_VERSION}, its peer {version} - the same was "
            "expected - install the same version of Trireme on both."
        )

    try:
        request = messages.decode_request(frames[1])
    except Exception as error:  # broken bytes make decoders raise RecursionError, UnicodeDecodeError, ...
        names = ", ".join(kind.__name__ for kind in ANSWERS)
        raise MalformedRequest(
            f"A request of {len(frames[1])} bytes cannot be read ({type(error).__name__}: {error}) - one of {names} "
            f"was expected, in wire version {messages.WIRE_VERSION}."
        ) from error

    # Only requests that list the tensors of a model are large; others would fill the memory of the server.
    if len(frames[1]) > LARGEST_PLAIN_REQUEST and not isinstance(request, (messages.PolicyReady, messages.PolicySent)):
        raise MalformedRequest(
            f"{type(request).__name__} has {len(frames[1])} bytes - at most {LARGEST_PLAIN_REQUEST} were expected."
        )
    return request


def _name(peer: bytes) -> str:
    return f"client {peer.hex()[:20]}"


async def is_done_soon(task: asyncio.Future) -> bool:
    """Wait for `task` at most as long as a client may be kept without a reply. Return whether it is done."""
    done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
    return bool(done)
