"""Operating-system processes: no orphans, free ports, file locks, garbage collection, the end of a log."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import random
import resource
import signal
import socket
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trireme.base.errors import ConfigError

RANK_STORE = "TRIREME_RANK_STORE"
"""Environment variable of trainer ranks on one machine: the file in which they find each other, a `FileStore`."""

PROCESS = "TRIREME_PROCESS"
"""Environment variable with the name of the run's process that a process is, or descends from. The launcher ends all of
one name before it starts that process again (`launch/process_tree.py`, which imports nothing, has it as `MEMBER`)."""

TEMPORARY = "TRIREME_TEMPORARY"
"""Environment variable of a folder that is private to a run, and removed when its launcher ends."""

LONGEST_PARENT = 50
"""Characters of a folder's path: a socket's may have 107, and ours take up to 52 below it."""

_PR_SET_PDEATHSIG = 1

LOWEST_PORT = 12_000  # above those that servers listen at by custom, our own defaults among them
TRIES = 100
LOOPBACK_S = 5.0  # timeout of a connection of a process with itself
_random = random.SystemRandom()  # unseeded, so that two runs do not choose the same ports
_held: deque[socket.socket] = deque(maxlen=64)  # the last ports that were chosen

NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors of `flock` on a file system that cannot lock files, such as Lustre without `-o flock`."""

OPEN_FILES = 1 << 16
"""Most files that a process with many connections may open. Its children inherit the limit, and some of them close all
descriptors up to it."""

READ_BYTES = 128_000  # bytes of a log's end that are looked at

MANY = 1_000_000
"""More objects than there were, before the collector looks: some hundred MiB, if all of them were cycles."""


def die_with_parent(expected_parent: int | None = None) -> None:
    """Ask the kernel to send SIGTERM to this process when its parent ends, however that ends (also by SIGKILL).

    Args:
        expected_parent: the parent's pid. If the parent has ended already, this process ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    # The kernel reports only what happens from now on; the parent may have ended before.
    if expected_parent is not None and os.getppid() != expected_parent:
        os.kill(os.getpid(), signal.SIGTERM)


def raise_open_files() -> None:
    """Raise this process's limit of open files, often 1,024 by default, as far as the system permits."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def most_open_files() -> int:
    """Return the limit of open files that `raise_open_files` sets."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(files, OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES))


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection during large imports, which makes them a quarter faster.

    The imported objects stay excluded from collection, so that forked children share their memory pages.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Exclude the objects that exist now from collection, and collect rarely, until the context ends.

    For a process that makes many objects and hardly any cycles. By default the collector scans every live object after
    a number of allocations; with thousands of rollouts under way that took a third of the orchestrator's time, in
    pauses of a quarter of a second. Afterwards objects are collected as before, unless some were frozen before.
    """
    before, had_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.set_threshold(MANY, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not had_frozen:
            gc.unfreeze()


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Yield a list to which SIGINT, SIGTERM and SIGHUP are added, unless they are ignored already (`nohup`)."""
    received: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in caught}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def try_lock(descriptor: int, folder: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Return whether the lock of a file could be taken at once. The kernel releases it when its holder ends.

    Raises: ConfigError if the file system of `folder` cannot lock files.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise ConfigError(
            f"{folder} lies on a file system that cannot lock files ({error.strerror}) - expected one on which `flock` "
            "works, so that two processes never write to the same files. Choose another folder, or mount it with locks "
            "(Lustre: `-o flock`)."
        ) from error


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free, outside the range from which the kernel gives ports to connections.

    The server may take a while to start (vLLM ten seconds). Meanwhile a connection could be given a port of that range.
    This process holds the port by a socket that does not listen, so that no other call, in any process, returns it; a
    server that sets `SO_REUSEADDR`, as they all do, can listen at it.
    """
    holder = socket.socket()
    beyond = _first_port_of_the_kernel()

    for _ in range(TRIES if beyond > LOWEST_PORT else 0):
        with suppress(OSError):
            holder.bind((host, _random.randrange(LOWEST_PORT, beyond)))
            break
    else:
        # The system gives almost all ports to connections, or is crowded: take any port.
        try:
            holder.bind((host, 0))
        except OSError:
            if problem := loopback_problem():
                raise ConfigError(problem) from None
            raise
    port: int = holder.getsockname()[1]

    # Only after `bind`, which would otherwise succeed on a port that another call holds.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held.append(holder)
    return port


def _first_port_of_the_kernel() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def loopback_problem(address: str = "127.0.0.1") -> str | None:
    """Return why processes of this machine cannot reach each other; None if they can."""
    try:
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname(), LOOPBACK_S).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # Python's own text may repeat the address
        return (
            f"{address} cannot be reached on this machine ({reason}) - expected a loopback interface "
            f"with this address, by which the processes of a run reach each other, also where all else is IPv6. "
            f"`ip link set lo up` and `ip address add {address}/8 dev lo` make it; in a container, use its own network."
        )
    return None


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def last_lines(log: Path, count: int | None = None, *, start: int = 0) -> list[str]:
    """Return the last lines of a log without reading all of it; none if it cannot be read.

    Args:
        count: as many as `READ_BYTES` hold if not given.
        start: byte after which this run of the process began to append.
    """
    try:
        with open(log, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(min(start, size), size - READ_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines if count is None else lines[-count:]


def make_socket_folder(prefix: str) -> Path:
    """Make a private folder for sockets, in /tmp if TMPDIR is too long for the path of one."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent if len(parent) <= LONGEST_PARENT else "/tmp"))
