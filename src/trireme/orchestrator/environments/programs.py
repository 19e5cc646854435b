"""The process that runs the agent programs of an environment, as the orchestrator sees it.

Programs run in a process of their own (`trireme_worker/agents/programs.py`), because an agent cannot be asked to forget
that a worker or the orchestrator has died. In a run of the launcher that process outlives the orchestrator. It also
keeps the socket at which agents reach the gateway, so requests that come meanwhile wait in it, and the next
orchestrator finds the programs at work. Without a launcher it ends with this process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import subprocess
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from trireme.base.errors import ConfigError, PeerDied
from trireme.base.log import get_logger
from trireme.base.processes import PROCESS, TEMPORARY, make_socket_folder
from trireme.base.token import TOKEN
from trireme.orchestrator.environments.worker_process import WORKER

log = get_logger("environments")

MEMBER = "programs"  # its name in a run, next to those of the launcher's children

ABSENCE_S = 600.0
"""Programs are ended where no orchestrator has come for so long: SDKs of agents wait as long for an answer."""

ANSWER_S = 60.0
LONGEST_ANSWER = 64 << 20  # bytes: all rollouts that run, with their keys
STOP_S = 30.0
BACKLOG = 1024  # connections of agents that wait until the gateway takes them


class AgentPrograms:
    """The process of one environment's agent programs.

    `open`, `start` and `close` block, and belong into a thread. Ending a program takes seconds, with its container
    minutes, so `end` and `running` are coroutines: many at once must not take the threads that others wait for.

    Example:
        programs = AgentPrograms(python, folders=logs / "agents/shell", log_file=..., address=("127.0.0.1", 0))
        programs.open()
        key = programs.found.pop("17-3.0", None)  # a program that has run since before this orchestrator
    """

    def __init__(self, python: Path, *, folders: Path, log_file: Path, address: tuple[str, int]) -> None:
        """
        Args:
            folders: the folder that holds those of the rollouts.
            address: host and port at which agents reach the gateway.
        """
        self._python, self._folders, self._log_file, self._address = python, folders, log_file, address
        self.listener: socket.socket | None = None  # at that address
        self.found: dict[str, str] = {}  # rollouts whose programs run since before this process, and their keys
        self._process: subprocess.Popen[bytes] | None = None  # the process, if this one has started it
        self._held: socket.socket | None = None  # the connection that keeps it from ending
        self._starting = threading.Lock()  # when the process dies, so do all workers, and each one's keeper starts it
        self._is_kept = TEMPORARY in os.environ
        home = os.environ.get(TEMPORARY) or make_socket_folder("trireme-programs-")
        self.path = Path(home, "programs-" + hashlib.sha256(str(folders).encode()).hexdigest()[:16])

    def open(self) -> None:
        """Find the process that an earlier orchestrator has started, or start one.

        Raises: ConfigError if nothing can listen at the address.
        """
        with suppress(PeerDied):
            self._hold()
        self.start()

    def start(self) -> None:
        """Start the process unless it is there. Programs of one that has died end."""
        with self._starting:
            # a process that still runs has sent nothing, so reading from it would block
            if self._held is not None:
                try:
                    self._held.recv(1)  # its end, as nothing is sent
                except BlockingIOError:
                    return
                self._held.close()
                self._held = None

            # a new process gets the same socket: the gateway listens there, and requests may wait in it
            if self.listener is None:
                self.listener = listen(*self._address)
            self.path.unlink(missing_ok=True)
            self._log_file.parent.mkdir(parents=True, exist_ok=True)

            # the environment's interpreter finds its own packages; programs of a model must not see the run's token
            unwanted = {"VIRTUAL_ENV", "PYTHONHOME", "PYTHONSAFEPATH", "PYTHONPATH", TOKEN}
            variables = {name: value for name, value in os.environ.items() if name not in unwanted}

            # bound before the process exists, so that connecting needs no retries while it starts
            with socket.socket(socket.AF_UNIX) as requests, open(self._log_file, "ab") as output:
                requests.bind(str(self.path))
                requests.listen(BACKLOG)
                descriptors = requests.fileno(), self.listener.fileno()
                arguments = [*map(str, descriptors), str(self._folders), str(ABSENCE_S if self._is_kept else 0.0)]
                self._process = subprocess.Popen(
                    [str(self._python), WORKER, "agents.programs", *arguments],
                    pass_fds=descriptors, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    env=variables | {PROCESS: MEMBER, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
                )  # fmt: skip

            self._hold()

    def _hold(self) -> None:
        """Connect, and keep the process from ending. Raises: PeerDied if none listens."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(ANSWER_S)
            connection.connect(str(self.path))
            connection.sendall(b'{"do": "hold"}\n')
            # the descriptor of the agents' socket comes with the first byte, the rest of the line after it
            data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            with connection.makefile("rb") as rest:
                data += rest.readline()
            if not data.endswith(b"\n") or not descriptors:
                raise ConnectionResetError("it ended")
        except OSError as error:
            connection.close()
            raise PeerDied(
                f"The process that runs agent programs did not answer: {error} - expected an answer within "
                f"{ANSWER_S:.0f} s - the end of {self._log_file} says why."
            ) from error

        # kept open: the process ends once it has been without such a connection for `ABSENCE_S`
        connection.setblocking(False)
        self._held = connection

        # the process is that of an earlier orchestrator: its socket and its programs are taken over
        if self.listener is None:
            self.listener, self.found = socket.socket(fileno=descriptors[0]), msgspec.json.decode(data)["running"]
            if self.found:
                log.info("%d agent programs have outlived the orchestrator before this one", len(self.found))
        else:
            os.close(descriptors[0])

    async def running(self) -> dict[str, str]:
        """Return the rollouts whose programs run or have ended, with their keys; none if the process has died."""
        return (await self._ask({"do": "running"})).get("running", {})

    async def end(self, rollout: str) -> None:
        """End the programs of a rollout, and remove its folder and its container."""
        await self._ask({"do": "end", "rollout": rollout})

    async def _ask(self, request: dict[str, str]) -> dict[str, Any]:
        """Return the answer; an empty one if the process has died or does not answer in time."""
        with suppress(OSError, msgspec.DecodeError):
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self.path, limit=LONGEST_ANSWER)
                with closing(writer):
                    writer.write(msgspec.json.encode(request) + b"\n")
                    return msgspec.json.decode(await reader.readline())
        return {}

    def close(self) -> None:
        """Let the process end with all programs: at once, or with the launcher."""
        for connection in (self._held, self.listener):
            if connection is not None:
                connection.close()
        # without a launcher the process now ends by itself; nothing else waits for that, nor removes its socket
        if not self._is_kept:
            if self._process is not None:
                try:
                    self._process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket at which agents reach the policy, at a free port if `port` is 0.

    Raises: ConfigError if nothing can listen there.
    """
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"No server for agent programs can listen at {host}:{port}: {error} - expected a free port of this machine "
            "- correct `host` and `port` of `[orchestrator.env.agent]`, or leave them out."
        ) from error
