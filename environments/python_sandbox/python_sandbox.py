"""Runs untrusted Python: `result = await run_python("print(6 * 7)", timeout_s=5, memory_mib=512)`.

Each run has processes, time, memory, files and output of limited size, no network, no view of our files, environment
or memory, and nothing of it is left when the call returns. How it is confined depends on the kernel; see README.md.
"""

import ast
import asyncio
import contextlib
import logging
import marshal
import os
import signal
import sys
import sysconfig
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["Confinement", "Limits", "Reason", "Result", "SandboxError", "find_confinement", "run_python", "score_code"]

log = logging.getLogger("python_sandbox")

Confinement = Literal["namespaces", "filter"]
Reason = Literal["done", "error", "timeout", "cpu_time", "memory", "output", "killed"]
LAUNCHER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import python_sandbox_launcher
python_sandbox_launcher.main()
"""  # imported, not run, so that Python keeps it compiled
PATIENCE_S = 10.0  # time beyond the limit, for a launcher on a busy machine
CHUNK = 1 << 16


class SandboxError(RuntimeError):
    """Nothing was run: this machine has no way to confine it, or the launcher failed."""


@dataclass(frozen=True)
class Result:
    """What came of a run.

    Example:
        Result(stdout="42\\n", stderr="", exit_code=0, reason="done")
    """

    stdout: str
    stderr: str
    exit_code: int  # negative: the signal that ended it
    reason: Reason  # "error": it ended by itself, with another code than 0. "killed": by a signal of its own making

    @property
    def is_done(self) -> bool:
        return self.reason == "done"


@dataclass(frozen=True)
class Limits:
    """Of one run. A process's own limits (CPU, memory, files) hold for each of its processes."""

    timeout_s: float = 10.0  # wall-clock time
    cpu_s: float | None = None  # CPU time of one process; None is a second more than `timeout_s`
    memory_mib: int = 512  # addresses of one process
    num_processes: int = 16  # and threads, at once
    file_mib: int = 16  # a file, and all files together
    num_files: int = 64  # open at once
    output_kib: int = 64  # of stdout, and of stderr; more ends the run

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r} - a number above 0 was expected. Give another limit.")


async def run_python(
    code: str,
    *,
    timeout_s: float = 10.0,
    memory_mib: int = 512,
    limits: Limits | None = None,
    stdin: str = "",
    packages: bool = True,
    allow_network: bool = False,
    confinement: Confinement | None = None,
) -> Result:
    """Runs `code` as a program of its own. Cancelling ends it; at most one per CPU runs at a time, the others wait.

    Args:
        limits: instead of `timeout_s` and `memory_mib`, all of them.
        stdin: what the code may read with `input()`.
        packages: the packages installed beside this one can be imported (they can be read, not changed).
        confinement: None takes the strongest that works here. "filter" by name also runs where the kernel cannot keep
            the files of this user from it (Landlock): what other processes of this user have in their environment, the
            code can read then.

    Raises:
        SandboxError: it cannot be confined here. Nothing has run.
    """
    limits = limits or Limits(timeout_s=timeout_s, memory_mib=memory_mib)
    strict = confinement is None
    confinement = confinement or await find_confinement()
    return await _run_confined(code, stdin, limits, packages, allow_network, confinement, strict=strict)


async def _run_confined(
    code: str, stdin: str, limits: Limits, packages: bool, network: bool, confinement: Confinement, *, strict: bool
) -> Result:
    async with _slots():
        with tempfile.TemporaryDirectory(prefix="python-sandbox-") as folder:
            order = _order(code, stdin, limits, folder, packages, network, confinement)
            return await _Run(limits).follow(order | {"strict": strict})


def _order(
    code: str, stdin: str, limits: Limits, folder: str, packages: bool, network: bool, confinement: Confinement
) -> dict:
    """A filter allows no writing, so the code's folder is filled beforehand."""
    if confinement == "filter":
        Path(folder, "main.py").write_bytes(code.encode("utf-8", "replace"))
        Path(folder, "stdin").write_bytes(stdin.encode("utf-8", "replace"))

    python = os.path.realpath(sys.executable)  # not the virtual environment's link: its target is what must be shown
    sites = [sysconfig.get_path(name) for name in ("purelib", "platlib")] if packages else []
    return asdict(limits) | {
        "cpu_s": limits.cpu_s or limits.timeout_s + 1,
        "code": code.encode("utf-8", "replace").decode(),  # half a pair of surrogates is no text
        "stdin": stdin.encode("utf-8", "replace").decode(),
        "folder": folder,
        "python": python,
        "packages": list(dict.fromkeys(sites)),
        "readable": [os.path.realpath(sys.base_prefix), str(Path(python).parents[1]), *sites],
        "allow_network": network,
        "confinement": confinement,
    }


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """The launcher's caller: gives the order, gathers output, hangs up when it is too much or we are cancelled.

    Produces: a Result. Waits for: the launcher, which watches the clock. Woken by: output, and the launcher's end.
    """

    limits: Limits
    _is_over: bool = field(default=False, init=False)  # more output than allowed

    async def follow(self, order: dict) -> Result:
        status, told = os.pipe()
        try:
            process = await _start_launcher(told)
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(told)
        try:
            stdout, stderr = await self._gather(process, order)
        finally:
            await _end(process)
            with open(status, "rb") as file:
                reports = [ast.literal_eval(line) for line in file.read().decode().splitlines()]

        # A launcher that dies writes no report; its stderr has the reason.
        if not reports:
            raise SandboxError(f"The launcher ended with code {process.returncode} and no report: {stderr[-500:]}")
        return self._result(stdout, stderr, reports)

    async def _gather(self, process: asyncio.subprocess.Process, order: dict) -> tuple[str, str]:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # a launcher that is gone already has said why
            process.stdin.write(marshal.dumps(order))
            await process.stdin.drain()

        # Both streams are read at once: a full pipe would stop the code.
        streams = (process.stdout, process.stderr)
        reading = [asyncio.ensure_future(self._read(stream, process.stdin.close)) for stream in streams]
        try:
            async with asyncio.timeout(self.limits.timeout_s + PATIENCE_S):
                out, err = await asyncio.gather(*reading)
        except TimeoutError:
            raise SandboxError(
                f"The launcher was not done {PATIENCE_S:g} s after its time limit of {self.limits.timeout_s:g} s - "
                "expected it to end the run by then - see whether this machine is overloaded."
            ) from None
        finally:
            for task in reading:
                task.cancel()
        return out, err

    async def _read(self, stream: asyncio.StreamReader, hang_up: Callable[[], None]) -> str:
        """To the end, which comes soon after the limit."""
        limit = self.limits.output_kib * 1024
        data = bytearray()
        while chunk := await stream.read(CHUNK):
            data += chunk[: limit + 1 - len(data)]
            if len(data) > limit and not self._is_over:
                self._is_over = True
                hang_up()
        return data[:limit].decode(errors="replace")

    def _result(self, stdout: str, stderr: str, reports: list[dict]) -> Result:
        # The launcher and its init may both have reported: why the run was ended, and the status.
        report = {key: value for each in reports for key, value in each.items()}
        if "failed" in report:
            raise SandboxError(report["failed"])

        # Without a status, init was killed before it could report one.
        code = os.waitstatus_to_exitcode(report["status"]) if "status" in report else -signal.SIGKILL

        # We hung up on too much output, which the launcher calls cancelled.
        if self._is_over:
            return Result(stdout, stderr, code, "output")
        return Result(stdout, stderr, code, report.get("reason") or _reason(code, stderr))


def _reason(code: int, stderr: str) -> Reason:
    if code == 0:
        return "done"
    if code == -signal.SIGXCPU:
        return "cpu_time"

    # The limit of memory shows as an ordinary exception of Python, in the last line of its traceback.
    last = stderr.rstrip().rpartition("\n")[2]
    if last.startswith("MemoryError"):
        return "memory"
    return "error" if code > 0 else "killed"


async def _start_launcher(told: int) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", LAUNCHER, str(told),
        stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=(told,), env={}, start_new_session=True,
    )  # fmt: skip


async def _end(process: asyncio.subprocess.Process) -> None:
    """Hangs up, upon which the launcher ends what it started and itself. A cancelled caller waits for that, too."""
    assert process.stdin
    process.stdin.close()
    waiting = asyncio.ensure_future(process.wait())
    try:
        await _wait_whatever_comes(waiting)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process._transport.close()  # type: ignore[attr-defined]  # else unread output keeps its pipes open


async def _wait_whatever_comes(waiting: asyncio.Future) -> None:
    """A second cancel does not end the wait: it is short, and what it waits for must not outlive us."""
    cancelled: asyncio.CancelledError | None = None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while not waiting.done() and (left := deadline - loop.time()) > 0:
        try:
            await asyncio.wait([waiting], timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


_slots_of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def _slots() -> asyncio.Semaphore:
    """Of this event loop. Runs beyond the number of CPUs would only use up each other's time."""
    return _slots_of.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(max(2, len(os.sched_getaffinity(0)))))


# --- how it can be confined here --------------------------------------------------------------------------------------


async def find_confinement() -> Confinement:
    """The strongest that works on this machine, found out once by running something.

    Raises: SandboxError where there is none.
    """
    found = _known.get("confinement")
    if found is None:
        found = _known["confinement"] = await _try_all()
    return found


_known: dict[str, Confinement] = {}
_CHOICES: tuple[Confinement, ...] = ("namespaces", "filter")


async def _try_all() -> Confinement:
    problems = []
    for confinement in _CHOICES:
        try:
            limits = Limits(timeout_s=30)
            result = await _run_confined("print(6 * 7)", "", limits, True, False, confinement, strict=True)
        except SandboxError as error:
            problems.append(f"{confinement}: {error}")
            continue

        # The confinement is judged by what a run in it printed, not by the kernel's version.
        if result.stdout == "42\n":
            if confinement != "namespaces":
                log.warning("Untrusted Python is confined by %s alone: %s. See the README.", confinement, problems[-1])
            return confinement
        problems.append(f"{confinement}: Python did not run in it ({result.reason}: {result.stderr.strip()[-200:]})")
    raise SandboxError(
        f"Untrusted Python cannot be confined on this machine ({'; '.join(problems)}) - expected Linux on x86_64 or "
        "aarch64 that allows user namespaces (kernel 5.12 or newer) or system call filters (seccomp) - allow one of "
        "them (`sysctl user.max_user_namespaces`, the container's security options), or run on another machine."
    )


# --- code as an answer ------------------------------------------------------------------------------------------------


async def score_code(code: str, tests: list, **options) -> float:
    """The fraction of `tests` that `code` passes, each run on its own; `options` are `run_python`'s.

    Args:
        tests: statements that raise where the code is wrong ("assert add(1, 2) == 3"), or what the code is to read and
            to print: {"input": "1 2\\n", "output": "3\\n"}. The second kind cannot be fooled by code that sees the
            tests; the first can by code that tries to, as code and test share a process.
    """
    if not tests:
        raise ValueError("No tests were given - at least one was expected. Give some.")
    passed = await asyncio.gather(*(_passes(code, test, **options) for test in tests))
    return sum(passed) / len(passed)


async def _passes(code: str, test: str | dict, **options) -> bool:
    # Output is compared outside of the sandbox, where the code cannot reach it.
    if isinstance(test, dict):
        result = await run_python(code, stdin=test["input"], **options)
        return result.is_done and _same_lines(result.stdout, test["output"])

    reached = f"passed-{os.urandom(16).hex()}"  # else `sys.exit()` would pass all tests
    result = await run_python(f"{code}\n{test}\nprint({reached!r})\n", **options)
    return result.is_done and result.stdout.rstrip("\n").endswith(reached)


def _same_lines(one: str, other: str) -> bool:
    """Spaces at the ends of lines and empty lines at the end are nobody's mistake."""
    return [line.rstrip() for line in one.rstrip().split("\n")] == [
        line.rstrip() for line in other.rstrip().split("\n")
    ]
