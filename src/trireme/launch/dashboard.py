"""The dashboard that `rl --dashboard` starts. It can end no run, and never outlives one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trireme.base.processes import free_port, port_is_free
from trireme.base.token import token
from trireme.config.run import RunConfig
from trireme.launch.process_tree import MARKER
from trireme.transport.dashboard_key import address_of, key_of

LOG = "dashboard"
STOP_S = 3.0  # between SIGTERM and SIGKILL


@contextmanager
def run_dashboard(config: RunConfig) -> Iterator[None]:
    """Run the dashboard of a run, if the configuration asks for it, and print its address. A failure is a warning."""
    process = _start(config) if config.dashboard else None
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)


def _start(config: RunConfig) -> subprocess.Popen[bytes] | None:
    wanted = config.ports.dashboard
    if wanted and not port_is_free(wanted):
        print(f"warning: port {wanted} is taken; the dashboard uses another one", flush=True)
        wanted = None

    port = wanted or free_port()
    command = [sys.executable, "-m", "trireme.cli.trireme", "dashboard", str(config.paths.root), "--port", str(port)]

    # A dashboard is a convenience: without it, the run starts all the same.
    log = config.paths.log(LOG)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            process = subprocess.Popen(
                command,
                env=os.environ | {MARKER: str(os.getpid())},  # it ends with this process, even if this one is killed
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        print(f"warning: the dashboard could not be started ({error}); the run continues without it", flush=True)
        return None

    # The key is printed here, and not by the dashboard: its output is a log in the run's folder.
    secret = token()
    address = address_of("127.0.0.1", port, key_of(secret) if secret else None)
    print(f"dashboard    {address}  (its log: {log})", flush=True)
    return process
