"""How the programs of rollouts are run and ended: as plain processes, in a sandbox, or in containers."""

import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import trireme_worker
from trireme_worker.agents import sandbox

ROLLOUT = "TRIREME_ROLLOUT"
"""Environment variable by which all processes of a rollout's program are found. Its value is the rollout's folder."""

LAUNCHER = ("TRIREME_PARENT", "TRIREME_PROCESS")  # variables by which the launcher finds all processes of a run
KEPT_OUTPUT = 64 << 10  # bytes of the program's output that are kept
GRACE_S = 2.0  # between SIGTERM and SIGKILL, and for what is left of the output
REAP_S = 30.0  # time for a killed process to end
CHECK_S = 60.0  # time for the command that shows whether the runtime works
CALL_S = 120.0  # time for one command of a container engine that runs no program
BUILD_S = 1800.0  # time for building an image

_PR_GET_CHILD_SUBREAPER = 37

ENGINE = re.compile(r"(PATH|HOME|TMPDIR|DOCKER_\w+|CONTAINER\w*|XDG_\w+|LD_\w+)$")
"""Variables that the command line of a container engine, or its loader, reads."""


@dataclass
class Program:
    """A program to run for a rollout."""

    parent: Path  # the rollout's private folder
    command: list[str]
    variables: dict[str, str]
    folder: Path  # the folder in which it runs
    hidden: list[str] = field(default_factory=list)  # variables with values that no list of processes may show
    gateway: str = "http://127.0.0.1:1"
    stdin: str = ""
    user: str | None = None  # user in a container; None: that of the image
    readable: list[tuple[str, str]] = field(default_factory=list)  # paths here and inside
    writable: list[tuple[str, str]] = field(default_factory=list)  # the same, below `parent`; copied out of a container


@dataclass(frozen=True)
class Ended:
    """The end of a program."""

    exit_code: int | None  # None if it was ended, because of its time or a limit
    stop: str
    output: str  # the end of it
    seconds: float = 0.0  # run time


class Subprocess:
    """Runs programs as processes of this user, without any confinement."""

    inherits = True  # variables of this process mean something to the program
    has_reaper = True  # a launcher that ends all that descends from the program

    def __init__(self, agent: dict) -> None:
        self._agent = agent

    async def check(self) -> None:
        """Raises: FileNotFoundError, PermissionError, ... if the program cannot be run here."""
        name = self._agent["command"][0]
        if shutil.which(name) is None:
            raise FileNotFoundError(
                f"The agent's program {name!r} was not found in PATH={os.environ.get('PATH', '')} - install it, or "
                "give its whole path in `command`."
            )

    def gateway(self, url: str) -> str:
        """Return the gateway's address as the program has to use it."""
        return url

    async def open(self, parent: Path, image: str | None, limits: dict[str, float]) -> None:
        """Prepare to run the programs of a rollout."""

    async def close(self, parent: Path) -> None:
        """Remove what `open` made, if it is there."""

    async def run(self, program: Program, *, timeout_s: float) -> Ended:
        """Run a program to its end, or end it when its time is over. Then no process of it is left."""
        async with _reading() as (write_end, output):
            with _sealed(program.stdin.encode()) as stdin, tempfile.TemporaryFile() as report:
                began = asyncio.get_running_loop().time()
                process = await self._start(program, stdin, write_end, report)
                exit_code: int | None = None
                stop = "agent_timeout"
                try:
                    async with asyncio.timeout(timeout_s):
                        exit_code, stop = await process.wait(), "agent_ended"
                except TimeoutError:
                    pass
                finally:
                    await self._end(process, program.parent)
                report.seek(0)
                said = report.read()
                # the program may have ended, and its launcher been ending what was left when its time was over
                if stop == "agent_ended" or (said and self.has_reaper):
                    exit_code, stop = self._read_report(said, exit_code)
        seconds = asyncio.get_running_loop().time() - began
        return Ended(exit_code, stop, output.decode(errors="replace"), round(seconds, 3))

    async def _start(self, program: Program, stdin: IO, output: int, report: IO) -> asyncio.subprocess.Process:
        order = {"command": program.command, "cwd": str(program.folder), "parent": os.getpid()}
        order["variables"] = program.variables | {ROLLOUT: str(program.parent)}
        return await _spawn_with("agents.reaper", order, program, stdin, output, report, f"{GRACE_S}")

    async def _end(self, process: asyncio.subprocess.Process, parent: Path) -> None:
        """End a program and all that it has started."""
        # the launcher ends what descends from the program; what it missed is found by variable and session
        if self.has_reaper:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S + REAP_S):
                    await process.wait()
        await end_processes(parent, session=process.pid)
        async with asyncio.timeout(REAP_S):
            await process.wait()
        _started.discard(process.pid)
        if self.has_reaper:
            await _end_adopted()

    def _read_report(self, report: bytes, exit_code: int | None) -> tuple[int | None, str]:
        """Return a program's exit code and how it ended, as its launcher reports them."""
        said = {name: value for line in report.splitlines() for name, value in json.loads(line).items()}
        # without a report the launcher was killed, and nothing is known of the program
        if "failed" in said or not said:
            raise OSError(
                f"The runtime {self._agent['runtime']!r} could not run the program: "
                f"{said.get('failed', 'its launcher was killed')}"
            )
        return said.get("exit"), said.get("stop", "agent_ended")


def _sealed(content: bytes) -> IO:
    """Return a sealed file in memory: a program cannot write to it, also not by opening `/dev/stdin`."""
    file = os.fdopen(os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    file.write(content)
    file.seek(0)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


_started: set[int] = set()  # pids of the processes that `_spawn` has started
_starting: set[str] = set()  # the folders of rollouts for which it is starting one


async def _spawn(
    words: list[str], variables: dict[str, str], program: Program, stdin: IO, output: int, **more: Any
) -> asyncio.subprocess.Process:
    """Start the process that is, or runs, a program of a rollout."""
    variables = variables | {ROLLOUT: str(program.parent)}
    _starting.add(str(program.parent))
    try:
        process = await asyncio.create_subprocess_exec(
            *words, env=variables, stdin=stdin, stdout=output, stderr=output, start_new_session=True, **more
        )
        _started.add(process.pid)
    finally:
        _starting.discard(str(program.parent))
    return process


async def _spawn_with(
    launcher: str, order: Any, program: Program, stdin: IO, output: int, report: IO, *arguments: str
) -> asyncio.subprocess.Process:
    """Start a launcher, a program of this package that needs the standard library alone. It reports to a file."""
    # the second one is for an interpreter that does not find its library without
    kept = {name: os.environ[name] for name in (*LAUNCHER, "LD_LIBRARY_PATH") if name in os.environ}
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(order).encode())
        file.seek(0)
        descriptors = (file.fileno(), report.fileno())
        words = [sys.executable, "-E", "-s", "-S", trireme_worker.__path__[0], launcher]
        words += [*map(str, descriptors), *arguments]
        return await _spawn(words, kept, program, stdin, output, pass_fds=descriptors)


class Sandbox(Subprocess):
    """Runs programs in namespaces of their own (`sandbox.py`)."""

    has_reaper = False

    def __init__(self, agent: dict, readable: list[str]) -> None:
        super().__init__(agent)
        python = dict.fromkeys(os.path.realpath(path) for path in (sys.prefix, sys.base_prefix))
        named = [(os.path.realpath(path), path) for path in readable]
        self._readable = [*named, *((path, path) for path in (*python, sys.prefix))]

    async def check(self) -> None:
        await super().check()
        self._check_readable()
        self._check_visible(shutil.which(self._agent["command"][0]) or "")

        # kernels and containers refuse namespaces in many ways, so a real program is run
        folders = Path(self._agent["folders"])
        folders.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folders) as folder:
            parent = Path(os.path.realpath(folder))
            program = Program(parent, ["/bin/sh", "-c", "echo it works"], {}, Path("/"))
            try:
                ended = await self.run(program, timeout_s=CHECK_S)
            except OSError as error:
                ended = Ended(None, str(error), "")

        if ended.output.strip() != "it works":
            raise PermissionError(
                f"This machine has no sandbox for agent programs ({ended.stop}; {ended.output[-300:].strip()}) - "
                "expected Linux 5.12 or newer that allows user namespaces - allow them (`sysctl "
                "user.max_user_namespaces`, `kernel.apparmor_restrict_unprivileged_userns`, the security options of "
                'the container), or choose another `agent.runtime`. "subprocess" confines nothing.'
            )

    def _check_readable(self) -> None:
        """Refuse to show the user's home, or the files of the run."""
        for source, path in self._readable:
            if not (os.path.isabs(path) and os.path.exists(source)):
                raise FileNotFoundError(
                    f"`agent.readable` names {path!r} - expected the absolute path of something that exists, or one "
                    "that begins with {here} - correct it."
                )
            for what, hidden in (("the home folder", Path.home()), ("other rollouts", self._agent["folders"])):
                if sandbox.is_below(real := os.path.realpath(hidden), source):
                    raise PermissionError(
                        f"`agent.readable` names {path!r}, which shows {what} ({real}) to the program - expected "
                        "folders of programs and data alone - name a folder further below."
                    )

    def _check_visible(self, command: str) -> None:
        visible = [*sandbox.SYSTEM, *(path for _, path in self._readable)]
        for path in (os.path.abspath(command), os.path.realpath(command)):
            if not any(sandbox.is_below(path, folder) for folder in visible):
                raise FileNotFoundError(
                    f"The agent's program {path} is not visible in the sandbox, which shows {', '.join(visible)} - "
                    "expected its folder among them - add it to `agent.readable`."
                )

    def gateway(self, url: str) -> str:
        return url if self._agent["network"] else f"http://127.0.0.1:{urlsplit(url).port}"

    async def _start(self, program: Program, stdin: IO, output: int, report: IO) -> asyncio.subprocess.Process:
        found, address = os.lstat(program.parent), urlsplit(program.gateway)
        order: sandbox.Order = {
            "command": program.command,
            "variables": program.variables,
            "cwd": str(program.folder),
            "folder": str(program.parent),
            "inode": [found.st_dev, found.st_ino],
            "readable": [list(pair) for pair in (*self._readable, *program.readable)],
            "writable": [list(pair) for pair in program.writable],
            "gateway": [address.hostname, address.port],
            "network": self._agent["network"],
            "memory_bytes": int(self._agent["memory_gib"] * (1 << 30)),
            "num_processes": self._agent["num_processes"],
        }
        return await _spawn_with("agents.sandbox", order, program, stdin, output, report)


def names_network(agent: dict) -> bool:
    """Return whether the user gives the containers of an agent a network."""
    return any(word.startswith(("--network", "--net=")) for word in agent["container_args"])


class Container(Subprocess):
    """Runs programs in containers, by the command line of Docker or Podman.

    A rollout has one container, from `open` to `close`. Files are copied into it and out of it; nothing is mounted.
    """

    inherits = False
    has_reaper = False

    async def check(self) -> None:
        engine, image, program = self._agent["runtime"], self._agent["image"], self._agent["command"][0]
        if shutil.which(engine) is None:
            raise FileNotFoundError(
                f"The program {engine!r} was not found in PATH={os.environ.get('PATH', '')} - expected the container "
                "engine that `agent.runtime` names - install it, or choose another runtime."
            )
        if not (self._agent["network"] or names_network(self._agent)):
            raise ValueError(
                f"`agent.runtime = {engine!r}` with `agent.network = false` - expected a network, by which the program "
                "reaches the policy - set it to true (the machine's network), or name one with `--network=...` in "
                "`agent.container_args` and set `agent.host` to this machine's address in it."
            )
        await self.call("version")
        # a command with a placeholder is known only for each example
        if image and "{" not in program:
            await self.call("run", "--rm", "--entrypoint", "sh", image, "-c", 'command -v "$1"', "sh", program)

    async def open(self, parent: Path, image: str | None, limits: dict[str, float]) -> None:
        await self.close(parent)  # an interrupted attempt may have left its container
        labels = {"trireme.rollout": str(parent), "trireme.environment": self._agent["label"]}
        words = ["run", "--detach", "--name", _container_of(parent)]
        words += [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
        memory_mb = math.ceil(limits.get("memory_mb", self._agent["memory_gib"] * 1024))  # 0 would be no limit
        words += [f"--memory={memory_mb}m", f"--pids-limit={self._agent['num_processes']}"]
        words += [f"--cpus={limits['cpus']:g}"] if "cpus" in limits else []
        words += [] if names_network(self._agent) else ["--network=host"]
        await self.call(*words, *self._agent["container_args"], "--entrypoint", "sleep", image or "", "infinity")

    async def close(self, parent: Path) -> None:
        await self.call("rm", "--force", _container_of(parent), may_fail=True)

    async def workdir(self, parent: Path) -> str:
        """Return the folder in which programs of a rollout's container run if they name none."""
        found = await self.call("container", "inspect", "--format", "{{.Config.WorkingDir}}", _container_of(parent))
        return (found or "").strip() or "/"

    async def run(self, program: Program, *, timeout_s: float) -> Ended:
        name = _container_of(program.parent)
        await self.call("start", name)
        # each path is emptied first: an earlier program may have put files there, in /tests for example
        for source, target in (*program.readable, *program.writable):
            await self._as_root(name, 'rm -rf "$1" && mkdir -p "$1"', target)
            await self.call("cp", f"{source}/.", f"{name}:{target}")
        for _, target in program.writable:
            await self._as_root(name, 'chmod -R a+rwX "$1"', target)  # the program may run as another user
        try:
            ended = await super().run(program, timeout_s=timeout_s)
        finally:
            await self.call("stop", "-t", "0", name)  # ends all processes in it
        # what the program wrote replaces what was copied in
        for source, target in program.writable:
            await asyncio.to_thread(remove_folder, Path(source))
            Path(source).mkdir(mode=0o700)
            await self.call("cp", f"{name}:{target}/.", source)
        return ended

    async def _as_root(self, container: str, script: str, path: str) -> None:
        await self.call("exec", "--user", "0", container, "sh", "-c", script, "sh", path)

    async def _start(self, program: Program, stdin: IO, output: int, report: IO) -> asyncio.subprocess.Process:
        # By name alone, so that no list of processes shows the key. All others would change the engine's own program,
        # which runs on this machine: DOCKER_HOST or LD_PRELOAD of a task that was downloaded.
        by_name = {name: program.variables[name] for name in program.hidden if not ENGINE.match(name)}
        words = [name if name in by_name else f"{name}={value}" for name, value in program.variables.items()]
        options = [word for each in words for word in ("--env", each)]
        options += ["--workdir", str(program.folder)] if program.folder != Path() else []
        options += ["--user", program.user] if program.user else []
        engine = [self._agent["runtime"], "exec", "--interactive", *options, _container_of(program.parent)]
        return await _spawn([*engine, *program.command], os.environ | by_name, program, stdin, output)

    def _read_report(self, report: bytes, exit_code: int | None) -> tuple[int | None, str]:
        return exit_code, "agent_ended"  # it has no launcher

    async def build(self, folder: Path) -> str:
        """Return the name of the image of a folder with a Dockerfile. It is built once for the same content."""
        # the content names the image, so that a changed task gets a new one
        digest = hashlib.sha256()
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
        image = f"trireme-task:{digest.hexdigest()[:24]}"
        if await self.call("image", "inspect", image, may_fail=True) is None:
            await self.call("build", "--tag", image, str(folder), timeout_s=BUILD_S)
        return image

    async def call(self, *words: str, timeout_s: float = CALL_S, may_fail: bool = False) -> str | None:
        """Return what a command of the engine prints; None if it fails and may. Raises: OSError."""
        engine, pipe = self._agent["runtime"], asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            engine, *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )

        try:
            async with asyncio.timeout(timeout_s):
                output, errors = await process.communicate()
        except TimeoutError as error:
            raise OSError(f"`{engine} {words[0]}` has not ended within {timeout_s:g} s: does it run?") from error
        finally:
            # also when the rollout was cancelled: no command of the engine may stay behind
            if process.returncode is None:
                process.kill()
                await process.wait()

        if process.returncode and not may_fail:
            raise OSError(
                f"`{engine} {' '.join(words)}` ended with code {process.returncode}: "
                f"{errors.decode(errors='replace').strip()[-500:]} - expected 0 - run it by hand, or see "
                "`agent.image` and `agent.container_args`."
            )
        return None if process.returncode else output.decode(errors="replace")


def _container_of(parent: Path) -> str:
    """Return the name of a rollout's container: the same one when it is played again."""
    return f"trireme-{hashlib.sha256(str(parent).encode()).hexdigest()[:20]}"


def make_runtime(agent: dict, readable: Sequence[str]) -> Subprocess:
    """Return the runtime of an agent's table."""
    if agent["runtime"] == "sandbox":
        return Sandbox(agent, list(readable))
    return Container(agent) if agent["runtime"] in ("docker", "podman") else Subprocess(agent)


@contextlib.asynccontextmanager
async def _reading() -> AsyncIterator[tuple[int, bytearray]]:
    """Yield a descriptor for the program's output, and the buffer that keeps the end of it.

    A pipe of our own: asyncio takes a process whose children hold its output open for one that has not ended.
    """
    output = bytearray()
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read_end, "rb", 0))

    async def keep_end() -> None:
        while data := await reader.read(1 << 16):
            output.extend(data)
            # cut only at twice the size, so that not every piece moves the whole buffer
            if len(output) > 2 * KEPT_OUTPUT:
                del output[:-KEPT_OUTPUT]

    reading = asyncio.create_task(keep_end())
    try:
        yield write_end, output
    finally:
        os.close(write_end)
        await asyncio.wait({reading}, timeout=GRACE_S)  # all that could write is dead
        reading.cancel()
        transport.close()


async def end_processes(parent: Path, *, session: int = 0) -> None:
    """End all processes of a rollout that are found by their variables or in the program's session.

    Those that this process has adopted are waited for, but not the leader of the session.

    Args:
        parent: the rollout's folder, or one that holds the folders of many.
        session: the program's session; 0 for none.
    """
    killed: set[int] = set()
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, REAP_S)):
        give_up = asyncio.get_running_loop().time() + wait_s
        # looked for again each time, as processes may start others while they are ended
        while pids := await asyncio.to_thread(processes_of, parent, session, killed):
            killed.update(pids)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if asyncio.get_running_loop().time() > give_up:
                break
            await asyncio.sleep(0.05)


async def _end_adopted() -> None:
    """Kill the orphans of programs that have killed their launcher. Only a process that adopts orphans has any."""
    is_subreaper = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0)
    give_up = asyncio.get_running_loop().time() + REAP_S
    while is_subreaper and asyncio.get_running_loop().time() < give_up:
        # while a program is being started, its process is in no list
        orphans = [] if _starting else [pid for pid in _children() if pid not in _started]
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not (orphans or _starting):
            return
        await asyncio.sleep(0.02)


def _children() -> Iterator[int]:
    """Yield the children of this process that are in another session, so that no other function of it has them."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            for pid in map(int, Path("/proc/self/task", task, "children").read_text().split()):
                with contextlib.suppress(ProcessLookupError):
                    if os.getsid(pid) != os.getsid(0):
                        yield pid


def processes_of(parent: Path, session: int, killed: Set[int]) -> list[int]:
    """Return the processes that run for rollouts of a folder, by a variable that they have inherited, or in a session.

    Args:
        killed: processes of theirs that may still be ending.
    """
    # a folder below counts too; the end of the value is checked, so that `a-1` is not taken for `a-10`
    marker = re.compile(re.escape(f"{ROLLOUT}={parent}".encode()) + rb"[/\0]")
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            pid, status, variables = int(name), Path("/proc", name, "stat"), Path("/proc", name, "environ")
            state, parent_pid, _, its_session, *_ = status.read_bytes().rpartition(b")")[2].split()
            is_adopted, is_inside = int(parent_pid) == os.getpid(), 0 < session == int(its_session)
            if is_inside or (is_adopted and pid in killed) or marker.search(variables.read_bytes() + b"\0"):
                if state != b"Z":
                    found.append(pid)
                elif is_adopted and pid != session:
                    os.waitpid(pid, os.WNOHANG)
    return found


def remove_folder(folder: Path) -> None:
    """Remove a folder if it is there, with folders in it that a program has made read-only or very deep."""
    with contextlib.suppress(RecursionError):  # Python 3.11 recurses into folders, and gives up a thousand deep
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists() and not folder.is_symlink():
        for command in (("chmod", "-R", "u+rwx"), ("rm", "-rf")):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)
