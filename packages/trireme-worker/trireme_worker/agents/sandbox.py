"""Runs one program in a sandbox of Linux namespaces: `python .../trireme_worker agents.sandbox ORDER REPORT`.

Both are descriptors. The order is an `Order` as JSON. The report is JSON too: {"exit": 0}, {"stop": "agent_memory"}, or
{"failed": why}.

    worker - launcher - init (process 1 of its own namespace; its end is the end of all in it) - the program

The program sees the system's programs and libraries, what the order shows, an own /tmp, and folders that it may write.
Those have to lie in a private folder that the caller has just made: its owner is this user, its mode is 0700, and
device and inode are the ones in the order. Any other is refused. No file changes its owner: the program's user is the
caller, without any privilege, and with the user id 1000 inside.

Without the network, the program has a loopback interface of its own. Init opens a socket there, at the gateway's port,
and hands it to the launcher, which accepts connections and forwards them to the gateway. By another socket of init the
launcher sees how much memory the program's sockets take.
"""

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypedDict

from trireme_worker.agents import sandbox_kernel as kernel

USER = 1000  # inside; outside it is the caller
WATCH_EVERY_S = 0.2  # memory and number of processes
CHUNK = 1 << 16
MOST_CONNECTIONS = 128
MOST_FILES = 1024  # open at once in a process: the buffers of a socket may take megabytes
LARGEST_FILE = 4 << 30  # bytes
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)
CERTIFICATES = ("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/pki/ca-trust/extracted")
NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
LINKS = {"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1"}
LINKS |= {"/dev/stderr": "/proc/self/fd/2", "/dev/shm": "/tmp"}
USERS = {"/etc/passwd": f"root:x:0:0::/root:/bin/sh\nagent:x:{USER}:{USER}::/tmp:/bin/sh\n"}
USERS |= {"/etc/group": f"root:x:0:\nagent:x:{USER}:\n"}
TMP = "size=256m,nr_inodes=65536,mode=1777"
PID_MAX_OF_NAMESPACE, LEAST_PID_MAX = (6, 15), 302  # Linux that has the setting in each PID namespace; its least value
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1

# The kernel's list of sockets (man 7 sock_diag): a request for each kind, which asks for the attributes below.
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, NLMSG_ERROR, NLMSG_DONE = 4, 20, 0x301, 2, 3
UNIX_SOCKETS = struct.pack("BxxxIII8x", socket.AF_UNIX, 0xFFFFFFFF, 0, 0x20 | 0x10 | 0x4)
INET_SOCKETS = [
    struct.pack("BBBxI48x", family, protocol, 1 << 6, 0xFFFFFFFF)
    for family in (socket.AF_INET, socket.AF_INET6)
    for protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP)
]
LENGTH_OF_UNIX, LENGTH_OF_INET = 16, 72  # bytes of an answer before its attributes
PEER, QUEUES, MEMORY_OF_UNIX, MEMORY_OF_INET = 2, 4, 5, 7


class Order(TypedDict):
    """A program, and what it may see and use."""

    command: list[str]
    variables: dict[str, str]
    cwd: str
    folder: str  # private: all that is writable lies in it
    inode: list[int]  # device and inode of that folder
    readable: list[list[str]]  # [path here, path inside]
    writable: list[list[str]]
    gateway: list  # host and port, as seen from here
    network: bool
    memory_bytes: int  # limit for all its processes together
    num_processes: int


def main() -> None:
    kernel.die_with_parent()
    with open(int(sys.argv[1]), "rb") as file:
        order: Order = json.load(file)
    report = int(sys.argv[2])
    os.set_inheritable(report, False)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is for the program, whose end is ours
    try:
        stopped = run(order, report)
    except OSError as error:
        stopped = {"failed": f"{error.strerror or error}"}
    if stopped:
        _report(report, stopped)


def _report(descriptor: int, report: dict) -> None:
    os.write(descriptor, json.dumps(report).encode() + b"\n")


def run(order: Order, report: int) -> dict:
    """Run the program to its end, which init reports. Return why it was ended, if it was."""
    steps = list(plan(order))
    _write("/proc/self/oom_score_adj", "1000")  # if memory runs out, the kernel ends this before a trainer

    ours, theirs = socket.socketpair()
    child = kernel.clone(kernel.NEW_ALL_BUT_NET | (0 if order["network"] else kernel.NEW_NET))
    if child == 0:
        ours.close()
        _as_child(report, lambda: _be_init(order, steps, theirs, report))

    # the launcher maps the user, and init waits for that; a user can map its group only without `setgroups`
    theirs.close()
    _write(f"/proc/{child}/setgroups", "deny")
    _write(f"/proc/{child}/uid_map", f"{USER} {os.geteuid()} 1\n")
    _write(f"/proc/{child}/gid_map", f"{USER} {os.getegid()} 1\n")
    ours.send(b"1")

    kernel_list = None
    if not order["network"]:
        _, sockets, _, _ = socket.recv_fds(ours, 1, 2)
        if sockets:  # if there is none, init has failed and has said why
            accepting, kernel_list = (socket.socket(fileno=descriptor) for descriptor in sockets)
            threading.Thread(target=_forward, args=(accepting, *order["gateway"]), daemon=True).start()
    return _watch(child, order, kernel_list)


def _as_child(report: int, body) -> None:  # type: ignore[no-untyped-def]
    """Never returns: a forked child must not continue as its parent."""
    try:
        body()
    except OSError as error:
        _report(report, {"failed": f"{error.strerror or error}"})
    except Exception as error:  # a NUL byte in a word of the command, for example
        _report(report, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(1)


def _write(path: str, text: str) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())


def _watch(child: int, order: Order, kernel_list: socket.socket | None) -> dict:
    """Wait until init ends. End it if its processes are too many or hold too much memory."""
    handle = os.pidfd_open(child)
    events = select.poll()
    events.register(handle, select.POLLIN)
    stopped = {}
    while not events.poll(WATCH_EVERY_S * 1000):
        num_processes, memory = _use_of(child, order["num_processes"])
        most = order["memory_bytes"] - (_in_buffers(kernel_list) if kernel_list else 0)
        if num_processes > order["num_processes"]:
            stopped = {"stop": "agent_processes"}
        # the first number counts shared memory for each process, so the exact one decides, which takes longer
        elif memory > most < _use_of(child, order["num_processes"], _exact_memory)[1]:
            stopped = {"stop": "agent_memory"}
        if stopped:
            os.kill(child, signal.SIGKILL)
            break
    os.waitpid(child, 0)
    return stopped


def _memory(pid: int) -> int:
    """Return the bytes of a process in memory, without its files. Memory that processes share counts for each."""
    return _sum_of(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:"))


def _exact_memory(pid: int) -> int:
    """Return the same, with a share of what it shares. The kernel takes 60 ms for each GiB to find that out."""
    try:
        return _sum_of(f"/proc/{pid}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:"))
    except OSError:
        return _memory(pid)


def _sum_of(path: str, names: tuple[bytes, ...]) -> int:
    with open(path, "rb") as file:  # the name of a process need not be text
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(names))


def _in_buffers(kernel_list: socket.socket) -> int:
    """Return the bytes in buffers of all sockets of the namespace, which are the kernel's and no process's."""
    kinds = [(UNIX_SOCKETS, LENGTH_OF_UNIX, MEMORY_OF_UNIX)]
    kinds += [(request, LENGTH_OF_INET, MEMORY_OF_INET) for request in INET_SOCKETS]
    total = 0
    for request, length, memory in kinds:
        for found in _list_sockets(kernel_list, request, length):
            received, _, sending, _, _, queued, *_ = struct.unpack_from("9I", found.get(memory, bytes(36)))
            total += received + max(sending, queued)
            # data belong to the socket that has sent them, as long as that is there
            if memory == MEMORY_OF_UNIX and not any(found.get(PEER, b"")):
                total += struct.unpack_from("I", found.get(QUEUES, bytes(4)))[0]
    return total


def _list_sockets(kernel_list: socket.socket, request: bytes, length: int) -> Iterator[dict[int, bytes]]:
    """Yield the attributes of each socket of a kind; none if the kernel cannot list it."""
    kernel_list.send(struct.pack("IHHII", 16 + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, 0, 0) + request)
    while data := kernel_list.recv(CHUNK):
        while data:
            size, kind, *_ = struct.unpack_from("IHHII", data)
            if kind in (NLMSG_DONE, NLMSG_ERROR):
                return
            attributes, rest = {}, data[16 + length : size]
            while len(rest) >= 4:
                taken, name = struct.unpack_from("HH", rest)
                attributes[name], rest = rest[4:taken], rest[(taken + 3) & ~3 :]
            yield attributes
            data = data[(size + 3) & ~3 :]


def _use_of(init: int, most: int, memory_of: Callable[[int], int] = _memory) -> tuple[int, int]:
    """Return the number of processes below init, and their bytes in memory. It stops counting above `most`."""
    found, memory = [init], 0
    for pid in found:  # grows as it is walked
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            memory += memory_of(pid)
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    found += map(int, file.read().split())
        if len(found) > most + 1:
            break
    return len(found) - 1, memory


def _forward(listener: socket.socket, host: str, port: int) -> None:
    """Connect each connection of the sandbox with the gateway."""
    free = threading.Semaphore(MOST_CONNECTIONS)

    def connect(inside: socket.socket) -> None:
        with free, inside, contextlib.suppress(OSError), socket.create_connection((host, port)) as gateway:
            back = threading.Thread(target=_pump, args=(gateway, inside), daemon=True)
            back.start()
            _pump(inside, gateway)
            back.join()

    while True:
        free.acquire()  # here too, so that no threads wait
        free.release()
        threading.Thread(target=connect, args=(listener.accept()[0],), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


# --- inside -----------------------------------------------------------------------------------------------------------


def _be_init(order: Order, steps: list[tuple[str, str, str]], launcher: socket.socket, report: int) -> None:
    kernel.die_with_parent()
    if launcher.recv(1) != b"1":  # the user is mapped
        return
    if not order["network"]:
        with socket.socket() as listener:
            fcntl.ioctl(listener, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
            listener.bind(("127.0.0.1", order["gateway"][1]))
            listener.listen(MOST_CONNECTIONS)
            with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel_list:
                socket.send_fds(launcher, [b"1"], [listener.fileno(), kernel_list.fileno()])
    _build_root(order["folder"], steps, order["num_processes"])

    program = os.fork()
    if program == 0:
        _as_child(report, lambda: _become_program(order))
    # process 1 of a namespace reaps all orphans in it, and ends them all with its own end
    while True:
        pid, status = os.wait()
        if pid == program:
            _report(report, {"exit": os.waitstatus_to_exitcode(status)})
            return


def _become_program(order: Order) -> None:
    for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
        signal.signal(number, signal.SIG_DFL)
    os.chdir(order["cwd"])
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: MOST_FILES, resource.RLIMIT_FSIZE: LARGEST_FILE}
    limits[resource.RLIMIT_NPROC] = order["num_processes"] + 1  # it has no effect if the caller is root
    # a hard limit of this user can only be lowered
    for which, most in limits.items():
        allowed = resource.getrlimit(which)[1]
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(which, (most, most))

    # in this order, as a filter needs the promise that no program gives privileges back
    kernel.drop_privileges()
    kernel.filter_calls(confine_all=False, allow_network=True)
    try:
        os.execvpe(order["command"][0], order["command"], order["variables"])
    except FileNotFoundError as error:
        words = f"{order['command'][0]} is not there inside of the sandbox: add its folder to `agent.readable`"
        raise OSError(words) from error


def _build_root(folder: str, steps: list[tuple[str, str, str]], num_processes: int) -> None:
    """Take the steps of a plan below `folder`, which is hidden by that, and make the result the root."""
    # the mount below hides the folder, and its writable folders are reached by this descriptor then
    held = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    # no mount from here on is seen outside
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=4m,mode=755")

    for step, target, what in steps:
        path = folder + target
        if step in ("read", "device", "write", "proc", "tmpfs"):
            is_folder = step in ("write", "proc", "tmpfs") or os.path.isdir(what)
            os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
            if not is_folder:
                open(path, "wb").close()
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)

        if step == "link":
            os.symlink(what, path)
        elif step == "text":
            _write(path, what)
        elif step == "tmpfs":
            kernel.mount("tmpfs", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, what)
        elif step == "proc":
            _mount_proc(path, num_processes)
        else:
            source = f"/proc/self/fd/{held}{what.removeprefix(folder)}" if step == "write" else what
            kernel.mount(source, path, None, kernel.MS_BIND | (0 if step == "write" else kernel.MS_REC))
        # a read-only device can still be written to, but keeps its mode and owner: under root, the program would own it
        if step in ("read", "device"):
            kernel.make_read_only(path, recursive=step == "read")

    os.close(held)
    kernel.change_root(folder)
    kernel.make_read_only("/", recursive=False)


def _mount_proc(path: str, num_processes: int) -> None:
    """Show its own processes. The mount is read-only: the kernel's settings there ask for root's id alone."""
    try:
        kernel.mount("proc", path, "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
    except OSError:  # in a container that hides a part of /proc
        return
    if tuple(map(int, os.uname().release.split(".")[:2])) >= PID_MAX_OF_NAMESPACE:
        with contextlib.suppress(OSError):  # for root: of an ordinary user, RLIMIT_NPROC counts
            _write(f"{path}/sys/kernel/pid_max", str(max(num_processes, LEAST_PID_MAX)))
    kernel.make_read_only(path, recursive=True)


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan(order: Order) -> Iterator[tuple[str, str, str]]:
    """Yield the steps that make the program's root: what to do, the path inside, and the source or content.

    Raises: PermissionError for a folder that must not be written.
    """
    _check_private(order)
    # links of the system (/bin to usr/bin) stay links, and what lies below them is shown by their targets
    seen = list(filter(os.path.islink, SYSTEM))
    for path in seen:
        yield "link", path, os.readlink(path)
    yield "tmpfs", "/tmp", TMP
    yield "proc", "/proc", ""

    # shorter paths first: what is in a folder that is shown already needs no mount of its own
    shown = [(path, path) for path in (*SYSTEM, *CERTIFICATES) if not os.path.islink(path)]
    shown += [(os.path.realpath(path), path) for path in NETWORK] if order["network"] else []
    shown += [(source, target) for source, target in order["readable"]]
    for source, target in sorted(dict.fromkeys(shown), key=lambda pair: len(pair[1])):
        if os.path.exists(source) and not any(is_below(target, other) for other in seen):
            seen.append(target)
            yield "read", target, source

    for path in DEVICES:
        yield "device", path, path
    for path, content in LINKS.items():
        yield "link", path, content
    for path, content in (USERS | ({} if order["network"] else {"/etc/hosts": "127.0.0.1 localhost\n"})).items():
        yield "text", path, content

    # last, so that a writable folder may lie in a readable one
    for source, target in sorted(order["writable"], key=lambda pair: len(pair[1])):
        yield "write", target, source


def is_below(path: str, folder: str) -> bool:
    """Return whether a path is a folder, or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _check_private(order: Order) -> None:
    """Refuse to let anything be written but what lies in a private folder that the caller has made for this program."""
    folder = order["folder"]
    found = os.lstat(folder)
    is_ours = (
        stat.S_ISDIR(found.st_mode)
        and stat.S_IMODE(found.st_mode) == 0o700
        and found.st_uid == os.geteuid()
        and [found.st_dev, found.st_ino] == order["inode"]
        and os.path.realpath(folder) == folder
    )
    if not is_ours:
        raise PermissionError(f"{folder} is not the private folder (mode 0700, owned by this user) of this program")
    for source, target in order["writable"]:
        if not (is_below(source, folder) and os.path.realpath(source) == source and os.path.isdir(source)):
            raise PermissionError(f"{source} may not be written: it is no folder in {folder}")
        if target == "/" or any(is_below(target, path) for path in (*SYSTEM, "/proc", "/dev", "/etc")):
            raise PermissionError(f"{source} may not be shown as {target}, which belongs to the system")
        others = [path for _, path in (*order["readable"], *order["writable"]) if path != target]
        if within := [path for path in others if is_below(path, target)]:
            # in addition, the way to a mount inside of it could be a link that an earlier program has made
            raise PermissionError(f"{source} may not be shown as {target}, which would hide {within[0]}")
