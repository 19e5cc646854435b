"""Whether a run is alive, and what it says of itself."""

from __future__ import annotations

import fcntl
import os
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec

from trireme.base.paths import RunPaths
from trireme.base.token import bearer, read_key
from trireme.monitor.progress import Status

ANSWER_S = 0.8
ANYWHERE = ("0.0.0.0", "::", "")


def launcher_of(paths: RunPaths) -> int | None:
    """The process that holds the folder now (`launch/folder.py` has the lock's other side)."""
    try:
        with open(paths.root / ".launcher") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = lock.read().strip()
                return int(holder) if holder.isdigit() else 0
    except OSError:
        pass
    return None


def status_url(config: dict[str, Any]) -> str:
    """Of the orchestrator, by its resolved configuration."""
    server = _table(_table(config, "orchestrator"), "server") or _table(config, "server")
    bound = str(server.get("host") or "127.0.0.1")
    known = str(_table(config, "hosts").get("orchestrator") or "127.0.0.1")
    return f"http://{known if bound in ANYWHERE else bound}:{server.get('port') or 8001}/status"


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    value = table.get(key)
    return value if isinstance(value, dict) else {}


def ask_status(config: dict[str, Any], folder: Path) -> Status | None:
    """The port may be another run's by now: an answer counts where it is about this folder."""
    try:
        answer = _client().get(status_url(config), headers=bearer(read_key(folder)))
        status = msgspec.json.decode(answer.raise_for_status().content, type=Status)
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, ValueError, RecursionError):
        return None
    return status if _is_about(status, folder) else None


@cache
def _client() -> httpx.Client:
    """One for all runs: it takes tens of milliseconds to make."""
    return httpx.Client(timeout=ANSWER_S, trust_env=False)


def _is_about(status: Status, folder: Path) -> bool:
    answered = Path(status.run)
    if answered.is_absolute():
        return os.path.realpath(answered) == os.path.realpath(folder)
    return answered.name == folder.resolve().name
