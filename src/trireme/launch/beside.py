"""What is started beside a run for those who watch it. Nothing here ends a run, and nothing of it outlives one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trireme.base.processes import free_port, port_is_free
from trireme.config.run import RunConfig
from trireme.launch.process_tree import MARKER

LOG = "dashboard"
LEAVE_S = 3.0  # between SIGTERM and SIGKILL


@contextmanager
def dashboard_beside(config: RunConfig) -> Iterator[None]:
    """The dashboard of this run, where it was asked for; its address is printed."""
    process = _start(config) if config.dashboard else None
    try:
        yield
    finally:
        if process is not None:
            _end(process)


def _start(config: RunConfig) -> subprocess.Popen[bytes] | None:
    port = _port(config)
    command = [sys.executable, "-m", "trireme.cli.trireme", "dashboard", str(config.paths.root), "--port", str(port)]
    log = config.paths.log(LOG)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            process = subprocess.Popen(
                command,
                env=os.environ | {MARKER: str(os.getpid())},  # it ends with us, however we end
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        print(f"warning: the dashboard could not be started ({error}); the run goes on without it", flush=True)
        return None
    print(f"dashboard    {_address(port)}  (its log: {log})", flush=True)
    return process


def _port(config: RunConfig) -> int:
    wanted = config.ports.dashboard
    if wanted and port_is_free(wanted):
        return wanted
    if wanted:
        print(f"warning: port {wanted} for the dashboard is taken; it gets another", flush=True)
    return free_port()


def _address(port: int) -> str:
    from trireme.base.token import token
    from trireme.transport.gate import KEY, key_of

    secret = token()
    return f"http://127.0.0.1:{port}/" + (f"?{KEY}={key_of(secret)}" if secret else "")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(LEAVE_S)
