"""Namespaces, mounts and system call filters of Linux, through ctypes, as Python has no functions for them.

`os.fork` cannot make namespaces, and `os.unshare` would need one process more for the new process numbers
to count. `clone` is therefore called directly; the caller has one thread, so nothing is left locked in the child.

The environment `python_sandbox` and the worker's `agents/sandbox_kernel.py` hold the same file, as either is installed
without the other. A test compares them.
"""

import ctypes
import errno
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
SIGKILL, SIGCHLD = 9, 17  # importing `signal` would cost the launcher a third of its start
AT_RECURSIVE = 0x8000
AT_FDCWD = -100
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 0x1, 0x2, 0x4
NEW_NET = 0x40000000
NEW_ALL_BUT_NET = 0x10000000 | 0x20000 | 0x20000000 | 0x8000000 | 0x4000000  # user, mounts, pids, IPC, host name
NEW_ANY = 0x7E020000
CLONE_THREAD = 0x10000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 24, 22, 38
LAST_CAPABILITY = 63
SECCOMP_MODE_FILTER = 2
WRITES = 0x1 | 0x2 | 0x40 | 0x200  # flags of `open`: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC

# name: (x86_64, aarch64), after asm/unistd_64.h and asm-generic/unistd.h
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "openat": (257, 56), "openat2": (437, 437), "creat": (85, None), "clone": (56, 220),
    "clone3": (435, 435), "tgkill": (234, 131), "prlimit64": (302, 261), "fcntl": (72, 25), "ioctl": (16, 29),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "semtimedop": (220, 192), "mq_open": (240, 180), "flock": (73, 32),
    "mq_unlink": (241, 181), "shmat": (30, 196), "shmctl": (31, 195), "semop": (65, 193),
    "semctl": (66, 191), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "personality": (135, 92), "socket": (41, 198), "socketpair": (53, 199),
    "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "fork": (57, None), "vfork": (58, None), "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "kcmp": (312, 272), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "open_by_handle_at": (304, 265),
    "truncate": (76, 45), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None),
    "linkat": (265, 37), "unlink": (87, None), "unlinkat": (263, 35), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "utimensat": (280, 88), "futimesat": (261, None), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "open_tree_attr": (467, 467),
    "file_setattr": (469, 469), "chroot": (161, 51), "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "adjtimex": (159, 171), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "setsid": (112, 157), "setpgid": (109, 154),
}  # fmt: skip
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, AUDIT_ARCH

# What no maths needs, and much of what holes in kernels were found in; memory that no limit of ours would count.
KERNEL_CALLS = """
    unshare setns mount umount2 pivot_root open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick
    mount_setattr ptrace process_vm_readv process_vm_writev bpf perf_event_open userfaultfd keyctl add_key
    request_key io_uring_setup io_uring_enter io_uring_register memfd_create memfd_secret shmget shmat shmctl
    msgget msgsnd msgrcv msgctl semget semop semtimedop semctl mq_open mq_unlink
    init_module finit_module delete_module kexec_load kexec_file_load personality
""".split()  # noqa: SIM905
SOCKET_CALLS = ["socket", "socketpair", "bind", "connect", "listen", "accept", "accept4"]
PROCESS_CALLS = """
    fork vfork kill tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal pidfd_getfd process_madvise
    process_mrelease migrate_pages move_pages kcmp setpriority ioprio_set sched_setaffinity sched_setscheduler
    sched_setparam sched_setattr setsid setpgid
""".split()  # noqa: SIM905
FILE_CALLS = """
    creat open_by_handle_at truncate rename renameat renameat2 link linkat unlink unlinkat mkdir mkdirat rmdir
    symlink symlinkat mknod mknodat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes
    utimensat futimesat setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat
    file_setattr flock chroot acct swapon swapoff reboot sethostname setdomainname settimeofday adjtimex clock_settime
    clock_adjtime quotactl quotactl_fd
""".split()  # noqa: SIM905
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6. Other families, such as AF_VSOCK, are in no network namespace
AF_NETLINK = 16  # the C library looks up host names with it
SIGNAL_OWNERS = (8, 15, 10)  # fcntl: F_SETOWN, F_SETOWN_EX, F_SETSIG, which make the kernel send signals for us
IOCTLS = (0x8901, 0x8902, 0x5412, 0x541C, 0x40086602)  # FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX, FS_IOC_SETFLAGS


def number(name: str) -> int | None:
    """Return the number of a system call on this machine; None where it has no such call."""
    return _NUMBERS[name][_machine()[0]]


def _machine() -> tuple[int, int]:
    name = os.uname().machine
    if name not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {name}, only for {', '.join(_MACHINES)}")
    return _MACHINES[name]


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _syscall(name: str, *arguments: object) -> int:
    return _checked(_libc.syscall(ctypes.c_long(number(name) or -1), *arguments), name)


def clone(flags: int) -> int:
    """Fork into namespaces of its own, as `os.fork` does otherwise."""
    zero = ctypes.c_ulong(0)
    return _syscall("clone", ctypes.c_ulong(flags | SIGCHLD), zero, zero, zero, zero)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _checked(result, f"mount {source} on {target}")


def make_read_only(path: str, *, recursive: bool) -> None:
    attributes = struct.pack("QQQQ", ATTR_RDONLY | ATTR_NOSUID | (ATTR_NODEV if recursive else 0), 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    _syscall("mount_setattr", AT_FDCWD, path.encode(), flags, attributes, ctypes.c_size_t(len(attributes)))


def change_root(folder: str) -> None:
    """`folder` (a mount) becomes the root, and the old one is gone."""
    os.chdir(folder)
    _syscall("pivot_root", b".", b".")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def prctl(option: int, value: int, pointer: object = 0) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), f"prctl {option}")


def die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, SIGKILL)


def drop_privileges() -> None:
    """After the next exec there are none left, and no set-uid program gives any back."""
    for capability in range(LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # an ordinary user may not, and needs not; or the kernel has fewer
            break
    prctl(PR_SET_NO_NEW_PRIVS, 1)


# --- Landlock: which files may be read (Linux 5.13 or newer) ----------------------------------------------------------

READ_FILE, READ_DIR, WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
_PATH_BENEATH = 1


def confine_files(readable: list[str]) -> None:
    """Let this process, and all that it starts, read only below these paths; `PR_SET_NO_NEW_PRIVS` comes first.

    That shuts /proc, where others of the same user show their environment and memory. Raises: OSError where the kernel
    has no Landlock.
    """
    wanted = struct.pack("Q", READ_FILE | READ_DIR | WRITE_FILE)
    rules = _syscall("landlock_create_ruleset", wanted, ctypes.c_size_t(len(wanted)), 0)
    for path in readable:
        try:
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not on this machine
            continue
        access = READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
        _syscall("landlock_add_rule", rules, _PATH_BENEATH, struct.pack("=Qi", access, beneath), 0)
        os.close(beneath)
    _syscall("landlock_restrict_self", rules, 0)
    os.close(rules)


# --- system call filters: classic BPF over (number, architecture, instruction, six arguments) -------------------------

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
X32 = 0x40000000  # another set of numbers for the same calls


def filter_calls(*, confine_all: bool, allow_network: bool) -> None:
    """Filter the system calls of this process and all that it starts, for good.

    `prctl(PR_SET_NO_NEW_PRIVS)` comes first.

    Args:
        confine_all: the filter stands alone: no writing of files, no processes, no signals to others.
    """
    program = [*_prologue(), *_refuse_all(KERNEL_CALLS), *_refuse("clone3", errno.ENOSYS)]

    # Each guard looks at one argument of a call that Python itself needs in its harmless forms.
    if confine_all:
        program += [*_refuse_all(PROCESS_CALLS + FILE_CALLS), *_refuse("openat2", errno.ENOSYS)]
        program += [] if allow_network else _refuse_all(SOCKET_CALLS)
        program += _families(allow_network)
        program += _guard("clone", 0, [_jump(_ANY_BIT, CLONE_THREAD, 1, 0), _deny()])
        program += _guard("open", 1, [_jump(_ANY_BIT, WRITES, 0, 1), _deny()])
        program += _guard("openat", 2, [_jump(_ANY_BIT, WRITES, 0, 1), _deny()])
        program += _guard("tgkill", 0, [_jump(_EQUAL, os.getpid(), 1, 0), _deny()])
        program += _guard("prlimit64", 0, [_jump(_EQUAL, 0, 1, 0), _deny()])
        program += _guard("fcntl", 1, _deny_values(SIGNAL_OWNERS))
        program += _guard("ioctl", 1, _deny_values(IOCTLS))
    else:
        program += _families(allow_network)
        program += _guard("clone", 0, [_jump(_ANY_BIT, NEW_ANY, 0, 1), _deny()])
    _install([*program, _instruction(_RETURN, _ALLOW)])


def _families(allow_network: bool) -> list[bytes]:
    """Refuse sockets of all other families."""
    allowed = (*FAMILIES, AF_NETLINK) if allow_network else FAMILIES
    tests = [_jump(_EQUAL, family, len(allowed) - place, 0) for place, family in enumerate(allowed)]
    tests.append(_deny(errno.EAFNOSUPPORT))
    return [*_guard("socket", 0, tests), *_guard("socketpair", 0, tests)]


def _install(program: list[bytes]) -> None:
    code = ctypes.create_string_buffer(b"".join(program))
    # `struct sock_fprog`: the number of instructions and a pointer to them.
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(header)))


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _jump(test: int, value: int, if_true: int, if_false: int) -> bytes:
    """Skips so many instructions."""
    return _instruction(test, value, if_true, if_false)


def _deny(code: int = errno.EPERM) -> bytes:
    return _instruction(_RETURN, _ERRNO | code)


def _prologue() -> list[bytes]:
    """Leaves the call's number loaded."""
    kill = _instruction(_RETURN, _KILL)
    # The x32 numbers of x86_64 would go past all tests for the usual ones.
    wrong_table = [_jump(_AT_LEAST, X32, 0, 1), kill] if os.uname().machine == "x86_64" else []
    return [
        _instruction(_LOAD, 4),
        _jump(_EQUAL, _machine()[1], 1, 0),
        kill,
        _instruction(_LOAD, 0),
        *wrong_table,
    ]


def _refuse_all(names: list[str]) -> list[bytes]:
    return [instruction for name in names for instruction in _refuse(name, errno.EPERM)]


def _refuse(name: str, code: int) -> list[bytes]:
    wanted = number(name)
    return [] if wanted is None else [_jump(_EQUAL, wanted, 0, 1), _deny(code)]


def _guard(name: str, argument: int, tests: list[bytes]) -> list[bytes]:
    """Runs `tests` on the low half of one argument of one call; those that fall through go on."""
    wanted = number(name)
    if wanted is None:
        return []

    # The last instruction loads the call's number again, which the next test expects.
    body = [_instruction(_LOAD, 16 + 8 * argument), *tests, _instruction(_LOAD, 0)]
    return [_jump(_EQUAL, wanted, 0, len(body)), *body]


def _deny_values(values: tuple[int, ...]) -> list[bytes]:
    return [instruction for value in values for instruction in (_jump(_EQUAL, value, 0, 1), _deny())]
