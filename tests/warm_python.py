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
import subprocess
import sys
import tempfile
import threading
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


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Start all workers this way while the context is open."""
    servers: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="warm-"))

        def serving(python: str, env: dict[str, str]) -> str:
            if python not in servers:
                servers[python] = f"{folder}/{len(servers)}"
                server = subprocess.Popen([python, __file__, servers[python]], stdout=subprocess.PIPE, env=env)
                stack.callback(lambda: (server.kill(), server.wait()))
                assert server.stdout is not None
                assert select.select([server.stdout], [], [], IMPORT_S)[0], f"{python} imports for {IMPORT_S:.0f} s"
                assert server.stdout.readline() == b"ready\n", f"{python} cannot fork"
            return servers[python]

        async def start(program: str, *words: str, **more: Any) -> asyncio.subprocess.Process:
            if words and words[0].endswith("environments/worker"):
                words = ("-I", "-S", __file__, serving(program, more["env"]), *words)
                program = sys.executable
            return await create_subprocess_exec(program, *words, **more)

        stack.enter_context(mock.patch("asyncio.create_subprocess_exec", start))
        yield


def ask(address: str, folder: str, descriptor: str) -> int:
    """Have the worker started, and return its exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
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
    listening.bind(address)
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
    sys.argv[:] = [request["folder"], str(descriptors[0])]
    runpy.run_path(request["folder"], run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        sys.exit(ask(*sys.argv[1:]) % 256)
