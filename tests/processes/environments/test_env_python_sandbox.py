"""The Python sandbox: real processes, confined in each of the ways that this machine allows."""

import asyncio
import functools
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.processes.stage import until
from support.runs.toy_environments import SHIPPED, import_shipped

FOLDER = SHIPPED / "python_sandbox"
sandbox = import_shipped("python_sandbox", "python_sandbox")
Limits = sandbox.Limits
NAME = "import ctypes, time; ctypes.CDLL(None).prctl(15, {name!r}.encode(), 0, 0, 0)\n"  # for `ps`; children inherit it


def run(code: str, **options: Any) -> Any:
    return asyncio.run(sandbox.run_python(textwrap.dedent(code), **options))


@functools.cache
def why_not(confinement: str) -> str:
    try:
        run("pass", confinement=confinement)
    except sandbox.SandboxError as error:
        return f"not on this machine: {error}"
    return ""


@pytest.fixture(params=["namespaces", "filter"])
def confinement(request):
    if why := why_not(request.param):
        pytest.skip(why)
    return request.param


only_namespaces = pytest.mark.parametrize("confinement", ["namespaces"], indirect=True)


@pytest.fixture
def name():
    """A name for processes. Whatever a test does, none of that name is left."""
    name = secrets.token_hex(6)
    yield name
    for pid in pids_named(name):
        os.kill(pid, signal.SIGKILL)


def pids_named(name: str) -> list[int]:
    return [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == name]


def test_a_program_is_run_with_nothing_of_the_callers_and_its_outcome_told(confinement, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "do not tell")
    code = """
        import numpy, os, sys
        print(6 * 7, input(), os.environ.get("SECRET_KEY"))
        print("x", file=sys.stderr)
        for fd in range(3, 60):
            try:
                os.fstat(fd); print(fd)
            except OSError: pass
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.set_inheritable(server.fileno(), True)
        result = run(code, stdin="in\n", memory_mib=2048, confinement=confinement)
    assert result == sandbox.Result(stdout="42 in None\n", stderr="x\n", exit_code=0, reason="done")
    failed = run("def f(x):\n    return 1 / x\nf(0)", confinement=confinement)
    assert (failed.reason, failed.exit_code) == ("error", 1)
    lines = failed.stderr.splitlines()
    assert lines[:3] == ["Traceback (most recent call last):", '  File "main.py", line 3, in <module>', "    f(0)"]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    killed = run("import ctypes; ctypes.string_at(0)", confinement=confinement)
    assert (killed.reason, killed.exit_code) == ("killed", -signal.SIGSEGV)


@pytest.mark.parametrize(
    ("code", "reason", "exit_code", "limits"),
    [
        ("exit(7)", "error", 7, {}),
        ("x =", "error", 1, {}),
        ("while True: pass", "cpu_time", None, {"timeout_s": 60, "cpu_s": 1}),
        ("x = bytearray(300 << 20)", "memory", 1, {"memory_mib": 200}),
        ("x = bytearray(100 << 20)", "done", 0, {"memory_mib": 200}),
        ("while True: print('x' * 1000)", "output", None, {"output_kib": 8}),
    ],
)
def test_the_reason_tells_how_a_program_ended(code, reason, exit_code, limits):
    result = run(code, limits=Limits(**limits))
    assert (result.reason, result.exit_code if exit_code is not None else None) == (reason, exit_code)
    assert len(result.stdout) == (8 * 1024 if reason == "output" else 0)


def test_sandbox_stops_endless_programs_and_fork_bombs(confinement, name):
    code = NAME.format(name=name) + "print('begun', flush=True)\ntime.sleep(100)"
    result = run(code, timeout_s=3.0, confinement=confinement)  # a busy machine must start a Python in that, too
    assert (result.stdout, result.reason) == ("begun\n", "timeout")
    assert pids_named(name) == []
    code = NAME.format(name=name) + "import os\nwhile True:\n    os.fork()"
    result = run(code, limits=Limits(num_processes=8, timeout_s=5), confinement=confinement)
    assert not result.is_done
    assert "BlockingIOError" in result.stderr or "PermissionError" in result.stderr
    assert pids_named(name) == []


@only_namespaces
def test_grandchildren_that_leave_their_group_do_not_survive(confinement, name):
    code = """
        import os
        told, tell = os.pipe()
        if os.fork() == 0:
            os.setsid()
            for _ in range(3):
                if os.fork() == 0:
                    os.write(tell, b"1")
                    os.close(1), os.close(2)
                    time.sleep(100)
            os._exit(0)
        print(*(os.read(told, 1) for _ in range(3)))
    """
    result = run(NAME.format(name=name) + textwrap.dedent(code), confinement=confinement)
    assert (result.stdout, result.reason) == ("b'1' b'1' b'1'\n", "done")
    assert pids_named(name) == []


def test_files_outside_can_neither_be_changed_nor_made(confinement, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("whole")
    os.chmod(tmp_path, 0o777)
    os.chmod(victim, 0o666)
    code = f"""
        import os, pathlib
        victim = pathlib.Path({str(victim)!r})
        for attempt in (
            lambda: victim.write_text("broken"), victim.unlink, lambda: os.chmod(victim, 0),
            lambda: os.rename(victim, str(victim) + "2"), lambda: os.truncate(victim, 0),
            victim.with_name("new").touch, pathlib.Path("/usr/new").touch,
        ):
            try:
                attempt()
                print("did it")
            except OSError:
                pass
        print("done")
    """
    assert run(code, confinement=confinement).stdout == "done\n"
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("whole", 0o666)
    assert not Path("/usr/new").exists()


@only_namespaces
def test_its_own_folder_takes_so_many_bytes_and_is_gone_afterwards(confinement):
    code = """
        import os, tempfile
        open("note", "w").write("mine")
        short = "/tmp" if os.path.islink("/tmp") else tempfile.gettempdir()  # no link where packages lie in /tmp
        print(open(f"{short}/note").read(), os.getcwd())
        for number in range(9):
            open(f"file{number}", "wb").write(bytes(1 << 20))
    """
    result = run(code, limits=Limits(file_mib=4), confinement=confinement)
    assert result.stdout == "mine /sandbox\n"
    assert "No space left" in result.stderr
    assert run("open('note')", confinement=confinement).reason == "error"


@only_namespaces
def test_sandboxed_programs_see_neither_each_other_nor_host_files(confinement, tmp_path):
    (tmp_path / "secret").write_text("s")
    looks = f"print(os.path.exists({str(tmp_path / 'secret')!r}), os.path.exists('/proc/self'), os.getpid())"
    code = "import os, time\nopen('name', 'w').write('{name}')\ntime.sleep(0.2)\nprint(open('name').read())\n" + looks

    async def both() -> list[Any]:
        programs = [code.replace("{name}", name) for name in ("a", "b")]
        return await asyncio.gather(*(sandbox.run_python(each, confinement=confinement) for each in programs))

    assert [result.stdout for result in asyncio.run(both())] == ["a\nFalse False 2\n", "b\nFalse False 2\n"]


CONNECTS = """
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=2).close()
    print("connected")
except OSError as error:
    print("refused")
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_no_socket_reaches_even_this_machine_unless_it_is_allowed(confinement, allowed):
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run(CONNECTS.format(port=server.getsockname()[1]), confinement=confinement, allow_network=allowed)
        has_come = bool(select.select([server], [], [], 0)[0])
    assert (result.stdout, has_come) == (("connected\n", True) if allowed else ("refused\n", False))


def test_sandboxed_code_cannot_touch_processes_or_locks_of_the_host(confinement):
    code = f"""
        import ctypes, fcntl, os, signal
        for pid in (os.getppid(), {os.getpid()}, -1):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        try:
            fcntl.fcntl(0, fcntl.F_SETOWN, {os.getpid()})
            print("owned")
        except OSError:
            print("refused")
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.unshare(0x10000000), ctypes.get_errno())
        for call in (libc.semget, libc.semop, libc.semctl, libc.shmget, libc.shmctl, libc.msgget, libc.msgctl):
            print(call(0, 0, 0), ctypes.get_errno())
    """
    assert run(code, confinement=confinement).stdout == "refused\n" + 8 * "-1 1\n"
    if confinement == "filter":  # a file that can only be read
        result = run("import fcntl, os; fcntl.flock(open(os.__file__), fcntl.LOCK_EX)", confinement=confinement)
        assert "PermissionError" in result.stderr


def test_a_cancelled_run_leaves_nothing(confinement, name):
    async def main() -> None:
        code = NAME.format(name=name) + "time.sleep(100)"
        running = asyncio.create_task(sandbox.run_python(code, timeout_s=100, confinement=confinement))
        await asyncio.to_thread(until, lambda: pids_named(name))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert pids_named(name) == []


def test_a_caller_that_is_killed_leaves_nothing(confinement, name, tmp_path):
    code = NAME.format(name=name) + "time.sleep(100)"
    script = (
        f"import asyncio, sys; sys.path.insert(0, {str(FOLDER)!r}); import python_sandbox\n"
        f"asyncio.run(python_sandbox.run_python({code!r}, timeout_s=100, confinement={confinement!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"TMPDIR": str(tmp_path)}) as caller:
        until(lambda: pids_named(name))
        assert list(tmp_path.iterdir())
        caller.kill()
    until(lambda: not pids_named(name))
    until(lambda: not list(tmp_path.iterdir()))


@only_namespaces
def test_packages_can_be_left_out_and_one_that_lies_in_tmp_is_found(confinement, tmp_path, monkeypatch):
    assert "ModuleNotFoundError" in run("import numpy", packages=False, confinement=confinement).stderr
    (tmp_path / "toy_package.py").write_text("ANSWER = 42")
    monkeypatch.setattr(sandbox.sysconfig, "get_path", lambda name: str(tmp_path))
    os.chmod(tmp_path, 0o755)
    result = run("import toy_package; print(toy_package.ANSWER); open('x', 'w')", confinement=confinement)
    assert (result.stdout, result.reason) == ("42\n", "done")


def test_where_nothing_confines_nothing_is_run(monkeypatch):
    monkeypatch.setattr(sandbox, "_known", {})
    report = {"failed": "clone: Operation not permitted"}
    launcher = f"import os, sys; sys.stdin.buffer.read(1); os.write(int(sys.argv[1]), {str(report).encode()!r})"
    monkeypatch.setattr(sandbox, "LAUNCHER", launcher)
    with pytest.raises(sandbox.SandboxError, match=r"namespaces: clone: Operation not permitted; filter: clone"):
        run("print(1)")
    monkeypatch.setattr(sandbox, "_CHOICES", ())
    with pytest.raises(sandbox.SandboxError, match=r"cannot be confined .* - expected Linux on .* - allow"):
        run("print(1)")


def test_limits_that_allow_nothing_and_a_score_without_tests_are_refused():
    for limits in ({"timeout_s": 0}, {"memory_mib": -1}, {"num_processes": 0}):
        with pytest.raises(ValueError, match="a number above 0 was expected"):
            Limits(**limits)
    with pytest.raises(ValueError, match="No tests were given"):
        asyncio.run(sandbox.score_code("pass", []))


SPY = """
import glob, os, socket
seen = []
for path in [*glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/mem"), ANSWERS, "/etc/passwd"]:
    try:
        with open(path, "rb") as file:
            seen.append((path, b"sk-very-secret" in file.read(1 << 20)))
    except OSError:
        pass
try:
    seen.append(socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))
except OSError:
    pass
print(seen)
"""
AS_SOMEBODY_ELSE = """
import asyncio, sys
sys.dont_write_bytecode = True
sys.path.insert(0, {folder!r})
from python_sandbox import run_python
code = "import os; child = os.fork(); print(1); print([os.path.exists(p) for p in ('/proc', '/home', '/root')])"
code += "; child and (os.wait(), None)"  # what still runs at the end of the program is stopped with it
print(asyncio.run(run_python(code, confinement="namespaces")))
print(asyncio.run(run_python("import os; os.fork()", confinement="filter")))
for confinement in ("namespaces", "filter"):
    print(asyncio.run(run_python({spy!r}, confinement=confinement)))
"""


def test_sandbox_confines_code_started_by_an_unprivileged_user():
    """By the system's own Python, as ours may lie where others cannot reach it."""
    names = ("python3.13", "python3.12", "python3.11")
    python = next(filter(None, (shutil.which(name, path="/usr/bin:/usr/local/bin") for name in names)), None)
    if os.geteuid() != 0 or python is None:
        pytest.skip("needs root, to become another user, and a Python 3.11 or newer that everyone may run")
    folder = Path("/tmp") / f"sandbox-{secrets.token_hex(6)}"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        os.chmod(folder, 0o755)
        (folder / "answers.txt").write_text("sk-very-secret")
        spy = SPY.replace("ANSWERS", repr(str(folder / "answers.txt")))
        script = AS_SOMEBODY_ELSE.format(folder=str(folder), spy=spy)
        done = subprocess.run([python, "-c", script], user=65534, group=65534, extra_groups=[], cwd="/",
                              env={"SECRET_API_KEY": "sk-very-secret"}, capture_output=True, text=True,
                              timeout=60)  # fmt: skip
    finally:
        shutil.rmtree(folder)
    if "namespaces" in done.stderr or "clone" in done.stderr:
        pytest.skip(f"not on this machine: {done.stderr}")
    first, second, *spied = done.stdout.splitlines()
    assert first.count("1\\n") == 2
    assert first.count("[False, False, False]\\n") == 2
    assert "PermissionError" in second
    assert ["stdout='[]\\n'" in each for each in spied] == [True, True], spied


ADDS = "def add(a, b):\n    return a + b if a < 10 else 0"
PRINTS = "a, b = map(int, input().split())\nprint(a + b, ' ')\n"


@pytest.mark.parametrize(
    ("code", "tests", "score"),
    [
        (ADDS, ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(10, 1) == 11"], 2 / 3),
        ("import sys; sys.exit(0)", ["assert False"], 0),
        ("def add(a, b", ["assert True"], 0),
        # what code prints is compared line by line
        (PRINTS, [{"input": "1 2\n", "output": "3"}, {"input": "4 5\n", "output": "9\n\n"}], 1),
        (PRINTS, [{"input": "1 1", "output": "3"}], 0),
    ],
)
def test_the_score_of_code_is_the_fraction_of_tests_that_it_passes(code, tests, score):
    assert asyncio.run(sandbox.score_code(code, tests, timeout_s=5)) == pytest.approx(score)


@only_namespaces
def test_all_processes_together_use_no_more_memory_than_two_may(confinement):
    code = """
        import os, time
        for _ in range(4):
            if not os.fork():
                held = bytearray(90 << 20)
                time.sleep(30)
        time.sleep(30)
    """
    result = run(code, limits=Limits(timeout_s=20, memory_mib=128), confinement=confinement)
    assert result.reason == "memory"
    assert run("held = bytearray(90 << 20)", memory_mib=128, confinement=confinement).is_done
