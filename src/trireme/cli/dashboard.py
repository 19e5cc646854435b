"""`trireme dashboard [RUN ...]`: runs in the browser, live or long over, from their folders alone."""

from __future__ import annotations

import os
import socket
from argparse import ArgumentParser, Namespace
from difflib import get_close_matches
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.log import start_logging
from trireme.base.network import is_loopback
from trireme.base.token import HOW, token
from trireme.cli.door import end_with_parent
from trireme.launch.process_tree import MARKER

USUAL = "outputs"
PORT = 8050
NICE = 10  # beside a run: training goes before watching


def dashboard(argv: list[str]) -> int:
    """Serves until it is asked to end.

    Raises: ConfigError where there is no such place, or where it cannot listen.
    """
    options = _parse(argv)
    runs = options.runs or [Path(USUAL)]
    for run in runs:
        require_place(run)
    secret = key_for(options.host)
    with listen(options.host, options.port) as listener:
        if MARKER in os.environ:
            end_with_parent()
            os.nice(NICE)
        start_logging("dashboard", "warning")
        shown = None if MARKER in os.environ else secret  # the launcher prints it; a log in the run's folder must not
        print(f"dashboard of {', '.join(map(str, runs))}: {address_of(listener, options.host, shown)}", flush=True)
        _serve(runs, listener, secret)
    return 0


def _serve(runs: list[Path], listener: socket.socket, secret: str | None) -> None:
    from trireme.tools.dashboard.app import open_dashboard  # a second's worth of imports

    open_dashboard(runs, listener, secret)


def require_place(run: Path) -> None:
    """A run may be yet to come; the folder that it will be in is there.

    Raises: ConfigError where nothing can come there.
    """
    if run.is_dir():
        return
    if run.exists():
        raise ConfigError(f"{run} is a file - expected the folder of a run, or one with runs below it.")
    if not run.parent.is_dir():
        raise ConfigError(
            f"{run} does not exist, and neither does {run.parent} - expected the folder of a run, or one with runs "
            f"below it; runs are in `{USUAL}` where nothing else was said. Check the path."
        )
    near = get_close_matches(run.name, [entry.name for entry in run.parent.iterdir() if entry.is_dir()], n=1)
    hint = f" Near it: {run.parent / near[0]}." if near else ""
    print(f"{run} is not there yet: it is shown as soon as it is.{hint}", flush=True)


def key_for(host: str) -> str | None:
    """What a browser has to know; None where only this machine can ask, and nobody gave a token.

    Raises: ConfigError where others could ask, and there is no token.
    """
    from trireme.transport.gate import key_of

    secret = token()
    if secret is None and not is_loopback(host):
        raise ConfigError(
            f"the dashboard would listen at {host}, where other machines reach it, and there is no token - expected "
            f"one, so that not everybody reads your rollouts. {HOW}"
        )
    return key_of(secret) if secret else None


def listen(host: str, port: int | None) -> socket.socket:
    """At the port that was asked for; else at the usual one, or at any where that is taken.

    Raises: ConfigError where that cannot be done.
    """
    try:
        return _bound(host, PORT if port is None else port)
    except OSError as error:
        if port is None:
            return listen(host, 0)
        raise ConfigError(
            f"the dashboard cannot listen at {host}:{port} ({error.strerror or error}) - expected a free port and an "
            "address of this machine. Leave `--port` out to take any that is free."
        ) from None


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def address_of(listener: socket.socket, host: str, secret: str | None) -> str:
    """With the key in it, where there is one."""
    from trireme.transport.gate import KEY

    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}/" + (f"?{KEY}={secret}" if secret else "")


def _parse(argv: list[str]) -> Namespace:
    parser = ArgumentParser(
        prog="trireme dashboard",
        description="Shows runs in the browser: rewards and all other metrics, what each process did and waits for, "
        "rollouts token by token, the fate of every example, logs, warnings. Live or long over, from the run's folder "
        "alone. Needs no internet, and writes nothing.",
        epilog="Ctrl-C ends it. With TRIREME_TOKEN set, the printed address holds a key without which nobody is let "
        "in; at anything but loopback that is a must.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="*",
        help=f"a run's folder, or one with runs below it; `{USUAL}` where not given",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 127.0.0.1 where not given")
    parser.add_argument("--port", help=f"{PORT} where not given, or any that is free")
    options, unknown = parser.parse_known_args(argv)
    for word in unknown:
        near = get_close_matches(word, ("--host", "--port", "--help"), n=1)
        hint = f"Did you mean `{near[0]}`?" if near else "See `trireme dashboard --help`."
        raise ConfigError(f"unknown flag `{word}` - no such flag exists. {hint}")
    options.port = None if options.port is None else _port(options.port)
    return options


def _port(text: str) -> int:
    """Raises: ConfigError where it is none; what argparse would say has no advice in it."""
    if not text.isdigit() or int(text) > 65535:
        raise ConfigError(f"--port {text} is no port - expected a number from 1 to 65535, or 0 for any that is free.")
    return int(text)
