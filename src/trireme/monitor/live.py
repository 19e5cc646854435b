"""The view of a run that fits where the output goes: a live picture in a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from trireme.config.run import RunConfig
from trireme.monitor.plain_view import PlainView
from trireme.monitor.terminal_view import TerminalView
from trireme.monitor.vf_rl_view import VfRlView
from trireme.monitor.view import StatusPoller, View


@contextmanager
def open_view(config: RunConfig, console: Console | None = None) -> Iterator[View]:
    console = console or _Console()
    live = console.is_terminal and sys.stdout.isatty() and not console.is_dumb_terminal
    with StatusPoller(status_url(config)) as poller:
        view = _view_class(config, live=live)(config, poller, console)
        try:
            yield view
        finally:
            view.close()


def _view_class(config: RunConfig, *, live: bool) -> type[View]:
    if config.console.style == "vf-rl":
        return VfRlView
    return TerminalView if live else PlainView


class _Console(Console):
    """rich ends the process when its reader goes away (`rl | head`). A run is worth more."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def status_url(config: RunConfig) -> str:
    server = config.orchestrator.server
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    return f"http://{host}:{server.port or 8001}/status"
