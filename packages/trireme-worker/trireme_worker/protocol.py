"""The worker's end of the wire: JSON lines over the inherited socket. The orchestrator's end is `wire.py`."""

import asyncio
import json
import math
import socket
from collections.abc import Callable

Message = dict
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)


def encode(message: Message) -> bytes:
    """One line. What an environment may hold and JSON may not (NaN, half of a surrogate pair) is replaced."""
    try:
        return _ENCODER.encode(message).encode() + b"\n"
    except (ValueError, TypeError):  # UnicodeEncodeError is a ValueError; TypeError: a dict key that is no string
        return _ENCODER.encode(_plain(message)).encode(errors="replace") + b"\n"


def read_first_message(connection: socket.socket) -> tuple[Message, bytes]:
    """Waits for one message, without an event loop. Returns it and the bytes that came after it."""
    received = b""
    while b"\n" not in received:
        piece = connection.recv(1 << 16)
        if not piece:
            raise SystemExit("The orchestrator hung up before it said which environment to load.")
        received += piece
    line, _, rest = received.partition(b"\n")
    return json.loads(line), rest


def send_and_wait(connection: socket.socket, message: Message) -> None:
    connection.setblocking(True)
    connection.sendall(encode(message))


class Wire(asyncio.Protocol):
    """Calls `on_message` for each line, and sends messages."""

    def __init__(self, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self._transport: asyncio.Transport | None = None
        self._partial = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        end = data.rfind(b"\n") + 1
        if not end:
            self._partial += data
            return
        lines = bytes(self._partial) + data[:end]
        self._partial = bytearray(data[end:])
        for line in lines.splitlines():
            self._on_message(json.loads(line))

    def send(self, message: Message) -> None:
        assert self._transport is not None, "send before the connection was made"
        self._transport.write(encode(message))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
