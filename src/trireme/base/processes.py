"""Small truths about operating-system processes: no orphans, free ports, last words."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_parent: int | None = None) -> None:
    """Asks the kernel to end this process when its parent ends, however that ends (also by SIGKILL).

    Args:
        expected_parent: the parent's pid; where it has ended before this call, this process ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if expected_parent is not None and os.getppid() != expected_parent:
        os.kill(os.getpid(), signal.SIGTERM)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Another process may take it before it is bound: bind soon."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def last_lines(log: Path, count: int = 20) -> list[str]:
    """The end of a log, without reading the whole of it."""
    if not log.exists():
        return []
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 64_000))
        return file.read().decode(errors="replace").splitlines()[-count:]
