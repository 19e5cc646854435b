"""Start workers of packages by forking an interpreter that has imported verifiers, which takes six seconds otherwise.

    test process -- exec --> client, seen by the pool -- socket --> server -- fork --> keeper -- fork --> worker

Each interpreter has a server, a child of the test process. The client has the worker's exit code. If the client is
killed, the worker sees its socket hang up. How a worker is really started, and its end, are tested on other packages.
"""

import asyncio
import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from asyncio import create_subprocess_exec
from collections.abc import Iterator
from typing import Any
from unittest import mock

IMPORTED = {
    "0.2.0": ("datasets", "pandas", "verifiers.clients", "verifiers.envs.env_group", "verifiers.envs.tool_env"),
    "0.4.0": ("verifiers.v1.envs.isolated_verifier", "verifiers.v1.tasksets.harbor"),
}
"""By the version of verifiers: what a worker would import, some of it for the first environment alone."""

IMPORT_S = 300.0
SERVERS: dict[str, str] = {}
"""Abstract addresses, by interpreter."""


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Start all workers this way while the context is open."""

    async def start(program: str, *words: str, **more: Any) -> asyncio.subprocess.Process:
        if words[1:2] == ("server",) and words[0].endswith("/trireme_worker"):
            words = ("-I", "-S", __file__, _server(program, more["env"]), words[0], words[2])
            program = sys.executable
        return await create_subprocess_exec(program, *words, **more)

    with mock.patch("asyncio.create_subprocess_exec", start):
        yield


def _server(python: str, env: dict[str, str]) -> str:
    """Start the server of an interpreter, unless it is there; it ends with this process. Returns: its address."""
    if python not in SERVERS:
        address = f"warm-{os.getpid()}-{len(SERVERS)}"
        server = subprocess.Popen([python, __file__, address], stdout=subprocess.PIPE, env=env)
        assert server.stdout is not None
        assert select.select([server.stdout], [], [], IMPORT_S)[0], f"{python} imports for {IMPORT_S:.0f} s"
        assert server.stdout.readline() == b"ready\n", f"{python} cannot fork"
        SERVERS[python] = address
    return SERVERS[python]


def is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the other end is. An abstract address is open to all users of the machine."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.getuid()


def ask(address: str, folder: str, descriptor: str) -> int:
    """Have the worker started, and return its exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"\0{address}")
        assert is_of_this_user(server), f"{address} is another user's"
        request = json.dumps({"folder": folder, "env": dict(os.environ), "cwd": os.getcwd()})
        socket.send_fds(server, [request.encode() + b"\n"], [int(descriptor), 1])
        os.close(int(descriptor))
        return int(server.recv(100) or b"1")


def serve(address: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # with the test process
    sys.path.pop(0)
    for module in IMPORTED[importlib.metadata.version("verifiers")]:
        importlib.import_module(module)
    assert threading.active_count() == 1, "a fork would copy locks that other threads hold"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{address}")
    listening.listen(16)
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of keepers
    while True:
        client, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            return keep(client)
        client.close()


def keep(client: socket.socket) -> None:
    assert is_of_this_user(client)
    data, descriptors, _, _ = socket.recv_fds(client, 1, 2)
    with client.makefile("rb") as rest:
        data += rest.readline()  # cut off, which is no JSON, if the client is killed
    if worker := os.fork():
        for each in descriptors:
            os.close(each)
        _, status = os.waitpid(worker, 0)
        with contextlib.suppress(OSError):
            client.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    client.close()
    request = json.loads(data)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for standard in (1, 2):
        os.dup2(descriptors[1], standard)
    os.close(descriptors[1])
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    random.seed()
    sys.argv[:] = [request["folder"], "server", str(descriptors[0])]
    code: Any = 1
    try:
        runpy.run_path(request["folder"], run_name="__main__")
        code = 0
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
    sys.modules["trireme_worker.guard"]._end_descendants()
    os._exit(code)  # an interpreter that has imported all this takes seconds to end


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        sys.exit(ask(*sys.argv[1:]) % 256)
