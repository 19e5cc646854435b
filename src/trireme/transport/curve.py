"""CURVE authentication and encryption for the ZeroMQ sockets.

Both ends derive both key pairs from the token. A client without the token cannot complete the handshake, because the
server's public key is as secret as the token; a client key other than the derived one is rejected too.
"""

from __future__ import annotations

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from trireme.base.network import ASK_AFTER_S, ASK_EVERY_S, QUESTIONS, SILENCE_S
from trireme.base.token import derive

CONNECT_S = 5
DOMAIN = "trireme"
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def pair_of(token: str, end: str) -> tuple[bytes, bytes]:
    """Return the public and the secret key of one end, in ZeroMQ's encoding."""
    secret = z85.encode(derive(token, f"curve {end}"))
    return zmq.curve_public(secret), secret


def set_client_keys(socket: zmq.Socket, token: str) -> None:
    """Set the client's keys on a socket. Call it before connecting."""
    socket.curve_publickey, socket.curve_secretkey = pair_of(token, "asker")
    socket.curve_serverkey, _ = pair_of(token, "server")


class ServerAuthenticator:
    """Authenticator that accepts clients with our token, for one context's sockets. Requires a running event loop."""

    def __init__(self, context: zmq.asyncio.Context, token: str) -> None:
        self._client_key, _ = pair_of(token, "asker")
        _, self._server_secret = pair_of(token, "server")
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Decide about a client's key. Called by the authenticator."""
        return key == self._client_key

    def set_server_keys(self, socket: zmq.Socket) -> None:
        """Set the server's keys on a socket. Call it before binding."""
        socket.curve_server, socket.curve_secretkey = True, self._server_secret
        socket.zap_domain = DOMAIN.encode()

    def close(self) -> None:
        self._authenticator.stop()


def enable_heartbeats(socket: zmq.Socket) -> None:
    """Enable heartbeats, so that a connection breaks when its other end is cut off, and reconnects."""
    socket.heartbeat_ivl = ASK_EVERY_S * 1000
    socket.heartbeat_timeout = SILENCE_S * 1000
    socket.connect_timeout = CONNECT_S * 1000
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = ASK_AFTER_S, ASK_EVERY_S
    socket.tcp_keepalive_cnt = QUESTIONS
