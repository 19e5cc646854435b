"""The process that runs the agent programs of one environment, so that they outlive its workers and the orchestrator.

    python .../trireme_worker agents.programs SOCKET GATEWAY FOLDERS ABSENCE_S

SOCKET and GATEWAY are descriptors: the first one listens for the requests below, the second one for those of agent
programs, and is kept for the next orchestrator. A request is a line of JSON on a connection of its own, and so is its
answer:

    {"do": "hold"}                  {"running": {ROLLOUT: KEY}}, with the descriptor GATEWAY. The orchestrator keeps the
                                    connection open. Without one for ABSENCE_S seconds, everything is ended
    {"do": "running"}               the same without the descriptor
    {"do": "find", "rollout"}       {"found": true, "began_ns"} if a program of the rollout runs, or has ended. One
                                    that is being ended is not found, and the answer waits until it is
    {"do": "run", "rollout", ...}   the end of the program, which is started unless it was before
    {"do": "end", "rollout"}        {"found": true} when no process of the rollout is left, its container is removed,
                                    and its folder is renamed and being deleted; {"found": false} if no program of it
                                    was started

Standard library only: it is started with the environment's interpreter.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trireme_worker import guard
from trireme_worker.agents.runtime import (
    CALL_S,
    LAUNCHER,
    Ended,
    Program,
    Subprocess,
    end_processes,
    make_runtime,
    remove_folder,
)

LONGEST_LINE = 64 << 20  # bytes of a request: a program's input and an example's fields are in it

BACKLOG = 4096
"""Requests that wait to be taken, as the rollouts of a whole run may begin or end at once: one more would fail."""

ANSWER_S = 60.0 + 2 * CALL_S
"""Time for an answer that waits for no program: ending one takes up to half a minute, and its container two calls."""

GONE = ".gone"  # end of the names of rollouts' folders that are being deleted
FIRST_S = 60.0  # time for the orchestrator that has started this process to connect

_PR_SET_CHILD_SUBREAPER = 36


class Programs:
    """The environment worker's connection to that process."""

    def __init__(self, agent: dict, readable: Sequence[str]) -> None:
        self._path, self._runtime = agent["programs"], {"agent": agent, "readable": list(readable)}

    async def find(self, rollout: str) -> int | None:
        """Return when the programs of a rollout began (ns of the file system's clock); None if none was started."""
        answer = await self._ask(ANSWER_S, do="find", rollout=rollout)
        return answer["began_ns"] if answer["found"] else None

    async def run(
        self, program: Program, *, rollout: str, key: str, began_ns: int, timeout_s: float, step: str
    ) -> Ended:
        """Run a program to its end. One that an earlier worker has started for this step is awaited instead.

        Raises: OSError if it cannot be run.
        """
        given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(program).items()}
        which = {"rollout": rollout, "key": key, "began_ns": began_ns, "step": step}
        order = {"program": given, "timeout_s": timeout_s, **self._runtime}
        answer = await self._ask(None, do="run", **which, **order)  # the rollout has a timeout
        if "error" in answer:
            raise OSError(answer["error"])
        return Ended(**answer)

    async def end(self, rollout: str) -> bool:
        """End all processes of a rollout, and remove its folder and its container.

        Returns: False if none of its programs was started, so that nothing is removed.
        Raises: OSError if that takes too long; it is not given up.
        """
        return (await self._ask(ANSWER_S, do="end", rollout=rollout))["found"]

    async def _ask(self, answer_s: float | None, **request: Any) -> dict[str, Any]:
        """Ask. Without that process this worker cannot run any rollout: it ends, and its rollouts are played again."""
        try:
            async with asyncio.timeout(answer_s):
                reader, writer = await asyncio.open_unix_connection(self._path, limit=LONGEST_LINE)
                with contextlib.closing(writer):
                    writer.write(json.dumps(request).encode() + b"\n")
                    await writer.drain()
                    return json.loads(await reader.readline())
        except TimeoutError as error:  # ending one rollout takes long, which costs no other
            raise OSError(
                f"The process that runs agent programs did not answer {request['do']!r} for {request['rollout']} "
                f"within {answer_s:g} s - expected its processes to end and its container to be removed by then - see "
                "how loaded the machine and its container engine are."
            ) from error
        except (OSError, ValueError) as error:
            print(f"The process that runs agent programs cannot be asked: {error!r}", file=sys.stderr, flush=True)
            guard.end_now()
            raise


@dataclass
class _Rollout:
    """The programs of one rollout, by their steps."""

    key: str
    began_ns: int
    parent: Path
    runtime: Subprocess
    steps: dict[str, "asyncio.Task[dict[str, Any]]"] = field(default_factory=dict)


class _Server:
    def __init__(self, gateway: socket.socket, folders: str, absence_s: float) -> None:
        self._gateway = gateway
        self._folders = folders
        self._absence_s = absence_s
        self._rollouts: dict[str, _Rollout] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}  # rollouts that are being removed, and in `_rollouts` no more
        self._deletions = ThreadPoolExecutor(4, "deletions")  # may take minutes; ending processes needs other threads
        self._num_holding = 0
        self._stopped = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stopped.set)

        # a process like this one may have been killed, and have left programs and folders
        await end_processes(Path(self._folders))
        for folder in Path(self._folders).glob(f".*{GONE}"):
            self._deletions.submit(remove_folder, folder)

        self._absent = loop.call_later(FIRST_S, self._stopped.set)
        server = await asyncio.start_unix_server(self._answer, sock=listener, limit=LONGEST_LINE, backlog=BACKLOG)
        await self._stopped.wait()

        # each program gets its time to end, and no container stays behind
        server.close()
        await asyncio.gather(*(self._end(rollout) for rollout in [*self._rollouts, *self._ending]))
        self._deletions.shutdown()
        os._exit(0)  # connections that are still open end, too

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            if not (line := await reader.readline()):
                return
            request = json.loads(line)
            if request["do"] == "hold":
                return await self._hold(reader, writer)
            answers: dict[str, Any] = {"running": self._running, "find": self._find, "run": self._run, "end": self._end}
            answer = await answers[request.pop("do")](**request)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand the gateway's descriptor over, and wait until the orchestrator is gone."""
        self._absent.cancel()
        self._num_holding += 1
        try:
            # asyncio cannot send a descriptor, so a duplicate of the socket sends it with the first byte of the answer
            answer = json.dumps(await self._running()).encode() + b"\n"
            with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
                socket.send_fds(connection, [answer[:1]], [self._gateway.fileno()])
            writer.write(answer[1:])
            while await reader.read(1 << 10):
                pass
        finally:
            self._num_holding -= 1
            if not self._num_holding:
                self._absent = asyncio.get_running_loop().call_later(self._absence_s, self._stopped.set)

    async def _running(self) -> dict[str, Any]:
        return {"running": {name: rollout.key for name, rollout in self._rollouts.items()}}

    async def _find(self, rollout: str) -> dict[str, Any]:
        if rollout in self._ending:  # its worker has died meanwhile; the next attempt uses the same folder
            await asyncio.wait({self._ending[rollout]})
        known = self._rollouts.get(rollout)
        return {"found": known is not None, "began_ns": known.began_ns if known else 0}

    async def _run(self, rollout: str, key: str, step: str, began_ns: int, **order: Any) -> dict[str, Any]:
        if rollout in self._ending:
            return {"error": "it was ended"}
        if rollout not in self._rollouts:
            runtime = make_runtime(order["agent"], order["readable"])
            self._rollouts[rollout] = _Rollout(key, began_ns, Path(order["program"]["parent"]), runtime)
        known = self._rollouts[rollout]
        # a worker that replaces a dead one asks for the same step, and awaits the program that runs already
        if step not in known.steps:
            known.steps[step] = asyncio.create_task(_play(known.runtime, order["program"], order["timeout_s"]))
        task = known.steps[step]
        await asyncio.wait({task})  # the program runs on if the worker that asked dies
        return {"error": "it was ended"} if task.cancelled() else task.result()

    async def _end(self, rollout: str) -> dict[str, Any]:
        if (known := self._rollouts.pop(rollout, None)) is not None:
            self._ending[rollout] = asyncio.create_task(self._remove(known))
            self._ending[rollout].add_done_callback(lambda _: self._ending.pop(rollout))
        if rollout not in self._ending:
            return {"found": False}
        await asyncio.wait({self._ending[rollout]})  # the orchestrator and a worker may both ask for it
        return {"found": True}

    async def _remove(self, known: _Rollout) -> None:
        try:
            for task in known.steps.values():
                task.cancel()
            await asyncio.gather(*known.steps.values(), return_exceptions=True)
            await known.runtime.close(known.parent)
        finally:
            # renamed first, as the next attempt may use the same name while a large folder is still being deleted
            aside = known.parent.with_name(f".{known.parent.name}.{time.time_ns()}{GONE}")
            with contextlib.suppress(FileNotFoundError):
                await asyncio.to_thread(known.parent.rename, aside)
            self._deletions.submit(remove_folder, aside)


async def _play(runtime: Subprocess, program: dict, timeout_s: float) -> dict[str, Any]:
    """Run a program to its end."""
    for name in LAUNCHER:  # the launcher finds it as one of this process
        if name in program["variables"] and name in os.environ:
            program["variables"][name] = os.environ[name]
    given = Program(**program | {name: Path(program[name]) for name in ("parent", "folder")})
    try:
        return dataclasses.asdict(await runtime.run(given, timeout_s=timeout_s))
    except Exception as error:  # for the rollout alone
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    listener, gateway = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3])
    listener.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a program stay below this process
    asyncio.run(_Server(gateway, sys.argv[3], float(sys.argv[4])).serve(listener))
