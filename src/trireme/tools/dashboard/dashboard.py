"""`trireme dashboard [RUN ...]`: show runs in the browser, live or long over, from their folders alone."""

from __future__ import annotations

import os
import socket
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.log import start_logging
from trireme.base.network import is_loopback
from trireme.base.token import HOW, token
from trireme.launch.process_tree import MARKER
from trireme.launch.ranks import end_with_parent
from trireme.transport.dashboard_key import address_of, key_of

USUAL = "outputs"
PORT = 8050
NICE = 10  # niceness next to a run on the same machine: training comes first


def command(argv: list[str]) -> int:
    """Serve until the process is asked to end.

    Raises: ConfigError if there is no such folder, if it cannot listen, or if it needs a token.
    """
    parser = ArgumentParser(
        prog="trireme dashboard",
        description="Shows runs in the browser: rewards and all other metrics, what each process did and waits for, "
        "rollouts token by token, logs, warnings. Live or long over, from the run's folder alone. Needs no internet, "
        "and writes nothing.",
        epilog="Ctrl-C ends it. With TRIREME_TOKEN set, the printed address holds a key that a browser must send. "
        "At anything but loopback, a token is required.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    runs = f"a run's folder, or one with runs below it; `{USUAL}` by default"
    add("runs", metavar="RUN", type=Path, nargs="*", default=[Path(USUAL)], help=runs)
    add("--host", default="127.0.0.1", help="address to listen at; 127.0.0.1 by default")
    add("--port", type=_port, help=f"{PORT} by default, or any that is free")
    options = parser.parse_args(argv)

    # A run may be about to start in a folder that does not exist yet, if its parent does.
    for run in (run for run in options.runs if not run.is_dir()):
        if run.exists() or not run.parent.is_dir():
            raise ConfigError(
                f"{run} is no folder, or lies in none - expected the folder of a run, or one with runs below it; the "
                f"default folder is `{USUAL}`. Check the path."
            )
        print(f"{run} does not exist yet: the run is shown as soon as it does.", flush=True)

    key = require_key(options.host)
    with listen(options.host, options.port) as listener:
        if is_beside_run := MARKER in os.environ:
            end_with_parent()
            os.nice(NICE)
        start_logging("dashboard", "warning")
        name = socket.gethostname() if options.host in ("0.0.0.0", "::") else options.host
        # The launcher prints the key; this output is a log in the run's folder, which must not have it.
        address = address_of(name, listener.getsockname()[1], None if is_beside_run else key)
        print(f"dashboard of {', '.join(map(str, options.runs))}: {address}", flush=True)

        from trireme.tools.dashboard.app import open_dashboard  # a second's worth of imports

        open_dashboard(options.runs, listener, key)
    return 0


def require_key(host: str) -> str | None:
    """Return the key that a browser must send; None if only this machine can connect, and there is no token.

    Raises: ConfigError if other machines can connect, and there is no token.
    """
    secret = token()
    if secret is None and not is_loopback(host):
        raise ConfigError(
            f"the dashboard would listen at {host}, where other machines reach it, and there is no token - expected "
            f"one, so that not everybody reads your rollouts. {HOW}"
        )
    return key_of(secret) if secret else None


def listen(host: str, port: int | None) -> socket.socket:
    """Listen at a port; without one, at the default port or, if that is taken, at any.

    Raises: ConfigError if the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, PORT if port is None else port), family=family, backlog=128)
    except OSError as error:
        if port is None:
            return listen(host, 0)
        raise ConfigError(
            f"the dashboard cannot listen at {host}:{port} ({error.strerror or error}) - expected a free port and an "
            "address of this machine. Leave `--port` out to take any that is free."
        ) from None


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ArgumentTypeError(f"{text!r} is not a port from 1 to 65535, or 0 for any that is free")
    return int(text)
