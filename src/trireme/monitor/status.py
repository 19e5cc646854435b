"""The orchestrator's `/status`, as other processes read it: what it holds, and how it is asked for."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from functools import cache
from pathlib import Path

import httpx
import msgspec

from trireme.base.token import bearer, read_key

POLL_S = 1.0
TIMEOUT_S = 0.8  # the longest wait for one answer


class StatusWait(msgspec.Struct, frozen=True):
    """A wait in the orchestrator's `/status`, written by `base.waiting.Wait`."""

    who: str = ""
    what: str = ""
    peer: str = ""
    waited_s: float = 0.0
    deadline_s: float = 0.0
    note: str = ""
    text: str = ""


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine in the orchestrator's `/status`."""

    url: str = ""
    state: str = ""
    version: int | None = None
    prefix_hit_frac: float | None = None  # share of prompts' tokens that its prefix cache had
    in_flight: int = 0
    member: int | None = None  # its number if it joined the run
    joined_s_ago: float | None = None
    software: dict[str, str] = {}  # versions with which it joined

    def __str__(self) -> str:
        words = [f"{self.url} {self.state}"]
        if self.version is not None:
            words.append(f"version {self.version}, {self.in_flight} requests")
        if self.prefix_hit_frac is not None:
            words.append(f"{self.prefix_hit_frac:.0%} of prompts cached")
        if self.member is not None:
            since = f"{timedelta(seconds=int(self.joined_s_ago or 0))} ago"
            words.append(f"joined as {self.member} {since} with vLLM {self.software.get('vllm', '?')}")
        return ", ".join(words)


class Status(msgspec.Struct, frozen=True):
    """The orchestrator's `/status`. Keys that are missing there have defaults here.

    Example:
        {"run": "x", "state": "running", "version": 3, "batch": 4, "max_steps": 20, "in_flight": 64, "waits": [...]}
    """

    run: str = ""
    state: str = "starting"  # starting | running | finishing | done
    version: int = 0
    batch: int = 0
    max_steps: int = 0
    in_flight: int = 0
    waits: tuple[StatusWait, ...] = ()
    engines: tuple[EngineStatus, ...] = ()

    def root_wait(self) -> StatusWait | None:
        """Return the longest wait for a peer that does not wait itself, or else the longest: it holds up the others."""
        waiting = {wait.who for wait in self.waits}
        roots = [wait for wait in self.waits if wait.peer and wait.peer not in waiting]
        return max(roots or self.waits, key=lambda wait: wait.waited_s, default=None)


def fetch_status(url: str, run: Path, *, timeout_s: float) -> Status | None:
    """Return the orchestrator's answer; None if there is none, or if it is no status.

    Args:
        run: the run's folder, whose key is sent: the address may be one that a folder from another person names.
    """
    try:
        answer = _client().get(f"{url}/status", headers=bearer(read_key(run)), timeout=timeout_s).raise_for_status()
        return msgspec.json.decode(answer.content, type=Status)
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, ValueError, RecursionError):
        return None


def ask_status(url: str, folder: Path, *, timeout_s: float) -> Status | None:
    """Return the answer; None if there is none, or if it is about another run than the one in `folder`.

    The port may be another run's by now. A run that was started with a relative path is compared by its name alone.
    """
    status = fetch_status(url, folder, timeout_s=timeout_s)
    if status is None:
        return None
    run = Path(status.run)
    if run.is_absolute():
        return status if os.path.realpath(run) == os.path.realpath(folder) else None
    return status if run.name == folder.resolve().name else None


@cache
def _client() -> httpx.Client:
    """One for all runs: to build one takes tens of milliseconds."""
    return httpx.Client(trust_env=False)


class StatusPoller:
    """Ask the orchestrator for its status once a second, in a thread, so that a slow answer does not delay the view."""

    def __init__(self, url: str, run: Path) -> None:
        self.url = url
        self._run = run
        self.latest: Status | None = None  # None while the orchestrator does not answer
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="status-poller", daemon=True)

    def __enter__(self) -> StatusPoller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(2 * TIMEOUT_S)

    def _poll(self) -> None:
        while not self._closing.wait(POLL_S):
            self.latest = fetch_status(self.url, self._run, timeout_s=TIMEOUT_S)
