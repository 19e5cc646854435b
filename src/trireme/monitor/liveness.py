"""The orchestrator's `/status`, asked for from outside of the run."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import httpx
import msgspec

from trireme.base.token import bearer
from trireme.monitor.progress import Status

ANYWHERE = ("0.0.0.0", "::", "")
"""Addresses that a server listens at, and that a client cannot connect to."""


def status_address(bound: str | None, port: int | None, known: str | None) -> str:
    """Return the address of `/status`.

    Args:
        bound: the address that the orchestrator's configuration says it listens at.
        known: the name of its machine, which counts where it listens at every address.
    """
    host = bound or "127.0.0.1"
    return f"http://{(known or '127.0.0.1') if host in ANYWHERE else host}:{port or 8001}/status"


def ask_status(address: str, folder: Path, key: str | None, *, timeout_s: float) -> Status | None:
    """Return the answer, or None where there is none, or where it is about another run than the one in `folder`.

    The port may be another run's by now. A run that was started with a relative path is compared by its name alone.
    """
    try:
        answer = _client().get(address, headers=bearer(key), timeout=timeout_s).raise_for_status()
        status = msgspec.json.decode(answer.content, type=Status)
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, ValueError, RecursionError):
        return None
    run = Path(status.run)
    if run.is_absolute():
        return status if os.path.realpath(run) == os.path.realpath(folder) else None
    return status if run.name == folder.resolve().name else None


@cache
def _client() -> httpx.Client:
    """One for all runs: to build one takes tens of milliseconds."""
    return httpx.Client(trust_env=False)
