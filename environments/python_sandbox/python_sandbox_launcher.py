"""Between the caller and untrusted Python: confines it, watches the clock, and ends it with all its children.

It reads its order from stdin (a dict, as `marshal` writes it) and leaves the pipe open for as long as the caller wants
the run. When it closes (the caller cancels, or dies, however), or the time is over, the run is ended. What there is to
report goes to a descriptor of its own, each report a line with a dict as `repr` writes it. Both are quicker to import
than `json`, and an interpreter's start is what most runs mostly consist of.

    caller - launcher - init (process 1 of its own namespace; its end is the end of all in it) - the untrusted process
"""

import marshal
import os
import resource
import select
import sys
import time

import python_sandbox_kernel as kernel

USER = 1000  # user id inside; outside it is the caller's, or one that no other user has
HIGH_USERS = 1 << 30  # far above those of people and services
OWN = "/sandbox"  # the folder it may write in
CODE, INPUT = "main.py", "stdin"
MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
LOOK_EVERY_S = 0.2  # interval of looks at the memory of all processes together
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/pki")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
VARIABLES = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
# Without Python's `site`, which costs more than the rest of its start; its `exit` and the packages are put back here.
BOOT = """
import builtins, sys
builtins.exit = builtins.quit = sys.exit
sys.path[:] = ['', *sys.path, *{packages!r}]
def _show(kind, error, trace):
    import traceback
    traceback.print_exception(kind, error, trace and trace.tb_next)
sys.excepthook = _show
sys.argv = ['main.py']
with open('main.py', encoding='utf-8') as _file:
    _code = _file.read()
__file__ = 'main.py'
del builtins, sys, _show, _file
exec(compile(_code, 'main.py', 'exec'), {{'__name__': '__main__', '__builtins__': __builtins__, '__file__': 'main.py'}})
"""


def main() -> None:
    status = int(sys.argv[1])
    # The untrusted process must not be able to write reports.
    os.set_inheritable(status, False)
    order = marshal.load(sys.stdin.buffer)
    try:
        report = run(order, status)
    except OSError as error:
        report = {"failed": f"{error.strerror or error}"}
    if report:
        _report(status, report)


def _report(status: int, report: dict) -> None:
    os.write(status, f"{report!r}\n".encode())


def run(order: dict, status: int) -> dict:
    """Returns what is to be reported; where there is an init, it reports the untrusted process's end."""
    has_init = order["confinement"] == "namespaces"
    _write("/proc/self/oom_score_adj", "1000")  # if memory runs out, this ends before a trainer does
    os.nice(5)
    child = _start_namespaces(order, status) if has_init else _start_filtered(order, status)
    reason, ended = _watch(child, order["timeout_s"], 2 * order["memory_mib"] * MIB)

    # A caller that died cannot remove its folder.
    if reason == "cancelled":
        _remove(order["folder"])
    if reason:
        return {"reason": reason}
    return {} if has_init else {"status": ended}


def _remove(folder: str) -> None:
    """The caller's own work, unless it died."""
    for remove, path in ((os.unlink, f"{folder}/{CODE}"), (os.unlink, f"{folder}/{INPUT}"), (os.rmdir, folder)):
        try:  # noqa: SIM105 - importing `contextlib` costs more
            remove(path)
        except OSError:  # the caller was quicker, or has put nothing there
            pass


def _watch(child: int, timeout_s: float, memory: int) -> tuple[str, int]:
    """Wait until the child ends, the caller hangs up, time is over, or all processes together use more than `memory`
    bytes. Then nothing of it is left.

    Returns: why it was ended, "" where it ended by itself, and the child's status.
    """
    # One poll waits for both: the child's end, and the caller's end of the pipe.
    handle = os.pidfd_open(child)
    events = select.poll()
    events.register(handle, select.POLLIN)
    events.register(0, select.POLLHUP)
    give_up = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, give_up - time.monotonic())
        ready = {descriptor for descriptor, _ in events.poll(min(left_s, LOOK_EVERY_S) * 1000)}
        reason = "" if handle in ready else "cancelled" if ready else "timeout" if left_s <= LOOK_EVERY_S else None
        # The kernel limits each process by itself; their sum is only known by looking.
        if reason is None and _memory_of(child) > memory:
            reason = "memory"
        if reason is not None:
            break
    if reason:
        os.kill(child, kernel.SIGKILL)

    # With namespaces the child is init, whose end is the end of all processes in it.
    _, ended = os.waitpid(child, 0)
    return reason, ended


def _memory_of(pid: int) -> int:
    """Bytes in memory of a process and all below it."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            total = int(file.read().split()[1]) * PAGE
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                total += sum(_memory_of(int(child)) for child in file.read().split())
        return total
    except OSError:  # it has ended meanwhile
        return 0


# --- confined by namespaces -------------------------------------------------------------------------------------------


def _start_namespaces(order: dict, status: int) -> int:
    """The child waits until its users are mapped, as only its parent may do that."""
    mapped, tell_mapped = os.pipe()
    flags = kernel.NEW_ALL_BUT_NET | (0 if order["allow_network"] else kernel.NEW_NET)
    child = kernel.clone(flags)
    if child == 0:
        os.close(tell_mapped)
        _as_child(status, lambda: _be_init(order, status, mapped))
    try:
        _map_users(child)
    except OSError:
        os.kill(child, kernel.SIGKILL)
        os.waitpid(child, 0)
        raise
    os.close(mapped)
    os.write(tell_mapped, b"1")
    os.close(tell_mapped)
    return child


def _as_child(status: int, body) -> None:
    """Never returns: a forked child must not go on as its parent."""
    code = 1
    try:
        code = body() or 0
    except OSError as error:
        _report(status, {"failed": f"{error.strerror or error}"})
    finally:
        os._exit(code)


def _map_users(child: int) -> None:
    """For root, a second user beside it: only a user other than root is counted against the limit of processes."""
    if os.geteuid() == 0:
        user = HIGH_USERS + os.getpid()
        users = groups = f"0 0 1\n{USER} {user} 1\n"
    else:
        _write(f"/proc/{child}/setgroups", "deny")
        users, groups = f"{USER} {os.geteuid()} 1\n", f"{USER} {os.getegid()} 1\n"
    _write(f"/proc/{child}/uid_map", users)
    _write(f"/proc/{child}/gid_map", groups)


def _write(path: str, text: str) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())


def _be_init(order: dict, status: int, mapped: int) -> int:
    if os.read(mapped, 1) != b"1":
        return 1
    kernel.die_with_parent()
    _build_root(order)

    # Init stays outside of the limits, so it can reap and report whatever the untrusted process does.
    main = os.fork()
    if main == 0:
        _as_child(status, lambda: _become_untrusted(order, folder=OWN))
    _report(status, {"status": _reap_until(main)})
    return 0


def _reap_until(main: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == main:
            return status


def _build_root(order: dict) -> None:
    """Read-only: system libraries, Python, packages. To write in: a folder in memory, of a fixed size."""
    # Mounts of this namespace must not show outside of it.
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    root = order["folder"]
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path in dict.fromkeys([*SYSTEM, *order["readable"], *(NETWORK if order["allow_network"] else ())]):
        _show_read_only(root, path)
    for path in DEVICES:
        _bind(root, path)

    # The code's own folder is in memory, so nothing of it is left after the run.
    os.makedirs(root + OWN)
    options = f"size={order['file_mib']}m,nr_inodes=4096,mode=1777"
    kernel.mount("tmpfs", root + OWN, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for name, text in ((CODE, order["code"]), (INPUT, order["stdin"])):
        _write(f"{root}{OWN}/{name}", text)
        os.chmod(f"{root}{OWN}/{name}", 0o644)

    # Many programs write to /tmp, whatever TMPDIR says.
    if not os.path.exists(f"{root}/tmp"):  # else a package lies there
        os.symlink(OWN, f"{root}/tmp")

    # The root becomes read-only last, as all of the above was written to it.
    kernel.change_root(root)
    kernel.make_read_only("/", recursive=False)


def _show_read_only(root: str, path: str) -> None:
    """A folder inside of one that is shown already is there."""
    if os.path.islink(path) and path in SYSTEM:
        os.symlink(os.readlink(path), root + path)
    elif os.path.exists(path) and not os.path.exists(root + path):
        _bind(root, path)
        kernel.make_read_only(root + path, recursive=True)


def _bind(root: str, path: str) -> None:
    if os.path.isdir(path):
        os.makedirs(root + path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        open(root + path, "wb").close()
    kernel.mount(path, root + path, None, kernel.MS_BIND | kernel.MS_REC)


# --- confined by a filter of system calls -----------------------------------------------------------------------------


def _start_filtered(order: dict, status: int) -> int:
    """There is no init: the filter lets it start no process."""
    child = os.fork()
    if child == 0:
        _as_child(status, lambda: _become_untrusted(order, folder=order["folder"]))
    return child


# --- in every case ----------------------------------------------------------------------------------------------------


def _become_untrusted(order: dict, *, folder: str) -> None:
    os.chdir(folder)
    os.dup2(os.open(INPUT, os.O_RDONLY), 0)
    has_init = order["confinement"] == "namespaces"

    # Limits on processes do not count for root.
    if has_init and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)

    # Landlock and the filter of calls need what `drop_privileges` sets, so they come after it.
    _limit(order, count_processes=has_init or os.geteuid() != 0)
    kernel.die_with_parent()
    kernel.drop_privileges()
    if not has_init:
        _confine_files(order, folder)
    kernel.filter_calls(confine_all=not has_init, allow_network=order["allow_network"])

    flags = ["-I", "-S", "-B", "-X", "utf8", "-c", BOOT.format(packages=order["packages"])]
    os.execve(order["python"], ["python", *flags], VARIABLES | {"HOME": folder, "TMPDIR": folder})


def _confine_files(order: dict, folder: str) -> None:
    """Raises: OSError where the kernel cannot, unless the weaker confinement was asked for by name."""
    network = NETWORK if order["allow_network"] else ()
    try:
        kernel.confine_files([*SYSTEM, *order["readable"], *order["packages"], *DEVICES, *network, folder])
    except OSError as error:
        if order["strict"]:
            raise OSError(error.errno, f"no Landlock to keep files of others from it ({error})") from error


def _limit(order: dict, *, count_processes: bool) -> None:
    """The count of processes is that of a user: where the filter stands alone, those of the caller's user are added."""
    cpu_s = max(1, int(-(-order["cpu_s"] // 1)))
    _at_most(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
    _at_most(resource.RLIMIT_AS, order["memory_mib"] * MIB)
    _at_most(resource.RLIMIT_FSIZE, order["file_mib"] * MIB)
    _at_most(resource.RLIMIT_NOFILE, order["num_files"])
    _at_most(resource.RLIMIT_CORE, 0)
    if count_processes:
        others = 1 if order["confinement"] == "namespaces" else _num_threads()  # init may be of the same user
        _at_most(resource.RLIMIT_NPROC, order["num_processes"] + others)


def _num_threads() -> int:
    """Threads of this user now, all of which count against the limit of processes."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended meanwhile
            pass
    return count


def _at_most(kind: int, soft: int, hard: int | None = None) -> None:
    """Never more than is allowed to ourselves."""
    allowed = resource.getrlimit(kind)[1]
    values = (soft, soft if hard is None else hard)
    # Raising a hard limit would be refused.
    if allowed != resource.RLIM_INFINITY:
        values = (min(values[0], allowed), min(values[1], allowed))
    resource.setrlimit(kind, values)
