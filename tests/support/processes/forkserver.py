"""Start Python programs by forking a process that has imported torch, transformers and, where asked, vLLM already.

A trainer spends ten seconds of processor time on imports, vLLM fifteen, and a kill matrix starts hundreds of processes.
`popen` gives what `subprocess.Popen` gives, for a program of ours; what that program starts with `subprocess.Popen` is
forked too, where it is one of `FORKED`. All else is executed as usual. Starting by `exec` is tested in `test_rl.py`.

    test process --- socket ---> server --- fork ---> keeper --- fork ---> the program --- seed ---> its processes

The keeper stays until nothing of the program is left, so `keeper_pid` is above every orphan (PR_SET_CHILD_SUBREAPER).
A program may have threads when it starts another one, and a fork would copy the locks that these hold: of a module that
one of them imports, or inside the C library. Therefore it has a `_Seed`: a copy of itself from before its first thread,
which makes children for it.
"""

import atexit
import ctypes
import fcntl
import functools
import gc
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from setproctitle import getproctitle, setproctitle

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is run as a script, too

from support.processes.warm_python import is_of_this_user

FORKED = ("trireme.cli.orchestrator", "trireme.cli.trainer", "trireme.cli.sft", "trireme.cli.trireme")
FORKED += ("trireme.cli.inference",)
FORKED_SCRIPTS = ("scripted_engine.py",)
IMPORTED = ("trireme.trainer.loop", "trireme.orchestrator.loop", "trireme.launch.supervise", "trireme.cli.rl")
VLLM = ("trireme.inference.cpu.forked_engine", "vllm.entrypoints.launchers.cli_args")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SYS_CLONE, CLONE_PARENT = {"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x8000
START_S = 120.0
MOST_FDS = 16  # of a request


# the test process


class Forked:
    """A program that was forked, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._replies = connection.makefile("r")
        self._connection = connection
        first = json.loads(self._replies.readline())
        self.pid, self.keeper_pid = first["pid"], first["keeper"]
        self.returncode: int | None = None
        connection.setblocking(False)

    def poll(self) -> int | None:
        if self.returncode is None:
            with suppress(BlockingIOError):
                if line := self._connection.recv(1000):
                    self.returncode = json.loads(line)["code"]
                else:
                    raise AssertionError(f"the keeper of process {self.pid} died")
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        give_up = time.monotonic() + (START_S if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > give_up:
                raise subprocess.TimeoutExpired("a forked program", timeout or START_S)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Let the keeper kill what is left, and leave."""
        self._replies.close()
        self._connection.close()


def popen(argv: Sequence[str], *, output: int, env: Mapping[str, str], cwd: Path, with_vllm=False) -> Forked:
    """Run `argv` (`python SCRIPT …`, `python -m MODULE …` or a script of the installation) with both outputs sent to
    the descriptor `output`, in a session of its own."""
    ours, theirs = socket.socketpair()
    request = {"argv": list(argv), "env": dict(env), "cwd": str(cwd)}
    with theirs, _connect(with_vllm) as server:
        _send(server, request, [output, theirs.fileno()])
    return Forked(ours)


def _connect(with_vllm: bool) -> socket.socket:
    """Connect to the server of this test session. The first process that needs the server starts it."""
    session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    address, server = f"\0trireme-tests-{session}-{with_vllm}", socket.socket(socket.AF_UNIX)
    give_up = time.monotonic() + START_S
    while server.connect_ex(address):
        assert time.monotonic() < give_up, f"no server at {address} after {START_S:.0f} s"
        _start(address, session, with_vllm)
        time.sleep(0.01)
    assert is_of_this_user(server), f"{address} is another user's"
    return server


@functools.cache
def _start(address: str, session: int, with_vllm: bool) -> subprocess.Popen[bytes]:
    threads = {"OMP_NUM_THREADS": str(os.cpu_count() if with_vllm else 1), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, __file__, address[1:], str(session), *(["vllm"] if with_vllm else [])],
        stdin=subprocess.DEVNULL, env=os.environ | threads | {"OMP_WAIT_POLICY": "PASSIVE"}, start_new_session=True,
    )  # fmt: skip


# the server


def serve(address: str, session: int, with_vllm: bool) -> NoReturn:
    """Fork a keeper for each request, until the test session ends."""
    from trireme.base.processes import quick_imports

    setproctitle(getproctitle())  # it finds its place behind the environment, which programs will replace
    listener, end = socket.socket(socket.AF_UNIX), os.pidfd_open(session)
    try:
        listener.bind(f"\0{address}")
    except OSError:  # another worker of the session was faster
        os._exit(0)
    listener.listen()
    if with_vllm:
        from trireme.config.run import RunConfig
        from trireme.inference.server import environment

        os.environ.update(environment(RunConfig.model_validate({"device": "cpu"})))
    with quick_imports():
        for module in (*IMPORTED, *(VLLM if with_vllm else ())):
            __import__(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need not be waited for
    while end not in select.select([listener, end], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            if os.fork():
                continue
            assert is_of_this_user(connection)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            request, fds = _receive(connection)
        _keep(request, output=fds[0], connection=fds[1])
    with suppress(ChildProcessError):
        os.wait()  # until every keeper has killed what is left
    os._exit(0)


def _send(connection: socket.socket, request: dict[str, Any], fds: Sequence[int]) -> None:
    data = json.dumps(request).encode()
    socket.send_fds(connection, [len(data).to_bytes(4, "big")], fds)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for a request and its file descriptors; leave where the other end is closed."""
    header, fds, _, _ = socket.recv_fds(connection, 4, MOST_FDS)
    if not header:
        os._exit(0)
    length, data = int.from_bytes(header, "big"), b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            os._exit(0)
        data += part
    return json.loads(data), fds


def _keep(request: dict[str, Any], *, output: int, connection: int) -> NoReturn:
    """Start the program, tell its pid and its exit code, and wait until nothing of it is left or nobody asks."""
    _die_with_parent()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pid = os.fork()
    if not pid:
        _become(request["argv"], (-1, output, output), env=request["env"], cwd=request["cwd"], new_session=True)
    asked = socket.socket(fileno=connection)
    asked.sendall(json.dumps({"pid": pid, "keeper": os.getpid()}).encode() + b"\n")
    asked.settimeout(0.01)
    with suppress(ConnectionError):
        while not _is_closed(asked):
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] == pid:
                        asked.sendall(json.dumps({"code": os.waitstatus_to_exitcode(ended[1])}).encode())
    import psutil

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
    os._exit(0)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# a program


def _become(
    argv: Sequence[str],
    outputs: Sequence[int],
    *,
    env: Mapping[str, str],
    cwd: str | None,
    new_session: bool,
    keep: Sequence[int] = (),
) -> NoReturn:
    """Turn this forked process into the program, as `exec` would, but for what is imported already."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    if new_session:
        os.setsid()
    for fd, there in enumerate(outputs):
        there = there if there >= 0 or fd else os.open(os.devnull, os.O_RDONLY)
        if there >= 0:
            os.dup2(there, fd)
    _close_all_but(set(keep))
    os.environ.clear()
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    gc.freeze()  # objects of the parent must not close descriptors that are ours now
    atexit._clear()
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    ForkingPopen.seeds.append(_Seed())
    sys.stdout.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    _name(argv)
    os._exit(_run(list(argv)))


def _close_all_but(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with suppress(OSError):
                os.close(int(name))


def _name(argv: Sequence[str]) -> None:
    """Show the command in /proc, where a forked process has that of the server, and its rank behind it."""
    rank = f" RANK={os.environ['RANK']}" if "RANK" in os.environ else ""
    setproctitle(" ".join(argv) + rank)


def _run(argv: list[str]) -> int:
    """Returns: the exit code."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    words = argv[1:] if Path(argv[0]).name.startswith("python") else argv
    code: Any = 1
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as ending:
        code = ending.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    ForkingPopen.seeds[-1].end()
    return (code or 0) & 0xFF


class _Seed:
    """A copy of this process that has one thread, and makes children for this process."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(START_S)
        self._pid = os.fork()
        if not self._pid:
            _die_with_parent()
            _close_all_but({theirs.fileno()})
            self._serve(theirs)
        theirs.close()

    def fork(self, argv: list[str], outputs: Sequence[int], keep: Sequence[int], **how: Any) -> int:
        """Start a program. It gets `outputs` as its standard streams, and `keep` by the numbers that they have here.

        Returns: its pid.
        """
        fds = sorted({fd for fd in (*outputs, *keep) if fd >= 0})
        _send(self._connection, how | {"argv": argv, "fds": fds, "outputs": outputs, "keep": keep}, fds)
        try:
            return int(self._connection.recv(20))
        except (OSError, ValueError):
            raise AssertionError(f"process {os.getpid()} could not start {argv} in {START_S:.0f} s") from None

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _serve(self, connection: socket.socket) -> NoReturn:
        while True:
            request, fds = _receive(connection)
            pid = _fork_sibling()
            if not pid:
                try:
                    _become_child(request, fds)
                finally:
                    os._exit(1)
            for fd in fds:
                os.close(fd)
            connection.sendall(str(pid).encode())


def _fork_sibling() -> int:
    """Fork a child of this process's parent: `os.fork` with CLONE_PARENT, for a process with one thread."""
    api, libc = ctypes.pythonapi, ctypes.PyDLL(None)
    api.PyOS_BeforeFork()
    pid = libc.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid:
        api.PyOS_AfterFork_Parent()
    else:
        api.PyOS_AfterFork_Child()
    assert pid >= 0, "this process could not be forked"
    return pid


def _become_child(request: dict[str, Any], fds: list[int]) -> NoReturn:
    there = dict(zip(request.pop("fds"), (fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for fd in fds), strict=True))
    for fd in request["keep"]:
        os.dup2(there[fd], fd)
    outputs = [there.get(fd, -1) for fd in request.pop("outputs")]
    _become(request.pop("argv"), outputs, **request)


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, but that programs of `FORKED` are forked, by a process where everything is imported."""

    seeds: ClassVar[list[_Seed]] = []
    """The last one is that of this process. Those before it stay, because their end would close a descriptor of it."""

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(subprocess_execute).bind(self, *args, **kwargs).arguments
        argv = list(map(str, bound["args"])) if isinstance(bound["args"], (list, tuple)) else []
        if not _is_forked(argv):
            subprocess_execute(self, *args, **kwargs)
            return
        self.pid = self.seeds[-1].fork(
            argv, (bound["p2cread"], bound["c2pwrite"], bound["errwrite"]), bound["pass_fds"],
            env=dict(os.environ if bound["env"] is None else bound["env"]),
            cwd=None if bound["cwd"] is None else str(bound["cwd"]), new_session=bool(bound["start_new_session"]),
        )  # fmt: skip
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(bound[name] for name in names))  # type: ignore[attr-defined]


subprocess_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _is_forked(argv: list[str]) -> bool:
    if len(argv) < 3 or argv[0] != sys.executable:
        return False
    return (argv[1] == "-m" and argv[2] in FORKED) or Path(argv[1]).name in FORKED_SCRIPTS


if __name__ == "__main__":
    sys.modules["support.processes.forkserver"] = sys.modules["__main__"]
    serve(sys.argv[1], int(sys.argv[2]), with_vllm="vllm" in sys.argv[3:])
