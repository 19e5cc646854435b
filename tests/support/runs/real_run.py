"""Real processes, started as a user starts them, watched until they end, and never left behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
from safetensors import safe_open

from support.processes import forkserver
from support.processes.interrupts import heed_interrupts
from trireme.base.paths import RunPaths, step_folder
from trireme.base.processes import die_with_parent, free_port
from trireme.journal.journal import Journal
from trireme.journal.records import BatchRecord
from trireme.journal.versions import Versions
from trireme.monitor.metrics import Row, read_metrics

REPOSITORY = Path(__file__).resolve().parents[3]
QUICKSTART = "configs/reverse-text/rl.toml"
SYNCHRONOUS = "tests/e2e/synchronous.toml"
DEADLINE_S = 900.0  # far above anything that was ever seen: a test that gets there hangs
END_S = 20.0  # for a process that was asked to end
POLL_S = 0.02
WITH_VLLM = {"inference", "rl", "rl_in_one_file.py", "ask_vllm.py"}
MARK = "TRIREME_TEST"  # environment variable that everything we start inherits


def command(name: str) -> str:
    return str(Path(sys.executable).parent / name)


class Process:
    """A command of ours, and everything that it starts."""

    def __init__(self, name: str, *arguments: str | Path, log: Path, env: Mapping | None = None, forked=False) -> None:
        """`forked`: start it, and what it starts, from a process that has imported everything (see `forkserver`)."""
        self.name = name
        self.log = log
        self.family: set[psutil.Process] = set()
        self._mark = uuid.uuid4().hex
        log.parent.mkdir(parents=True, exist_ok=True)
        argv = [command(name), *map(str, arguments)]
        environment = os.environ | {MARK: self._mark} | dict(env or {})
        self._popen: subprocess.Popen[bytes] | forkserver.Forked
        with open(log, "wb") as output:
            if forked:
                argv[0] = sys.executable if name == "python" else argv[0]
                where = {"output": output.fileno(), "env": environment, "cwd": REPOSITORY}
                with_vllm = any(Path(word).name in WITH_VLLM for word in argv[:2])
                self._popen = forkserver.popen(argv, **where, with_vllm=with_vllm)
                return
            self._popen = subprocess.Popen(
                argv, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_before_exec,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def poll(self) -> int | None:
        """The exit code once it has ended; remembers who is below it meanwhile."""
        with suppress(psutil.Error):
            self.family.update(psutil.Process(self._popen.pid).children(recursive=True))
        return self._popen.poll()

    def wait(self, *, deadline_s: float = DEADLINE_S) -> int:
        wait_until(lambda: self.poll() is not None, f"{self.name} to end", [self], deadline_s=deadline_s)
        assert self._popen.returncode is not None
        return self._popen.returncode

    def interrupt(self) -> None:
        self._popen.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait(END_S)

    def left(self) -> list[str]:
        if isinstance(self._popen, forkserver.Forked):
            with suppress(psutil.Error):
                below = psutil.Process(self._popen.keeper_pid).children(recursive=True)
                return [_describe(each) for each in below if is_alive(each) and each.pid != self._popen.pid]
            return []
        self.family.update(process for process in psutil.process_iter() if self._is_marked(process))
        return [_describe(process) for process in self.family if is_alive(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark
        except psutil.Error:
            return False

    def end(self) -> None:
        if self.poll() is None:
            self._popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(END_S)
        self.left()
        for process in self.family:
            with suppress(psutil.Error):
                process.kill()
        self._popen.wait(END_S)
        if isinstance(self._popen, forkserver.Forked):
            self._popen.close()

    def tail(self, count: int = 40) -> str:
        lines = "\n".join(f"    {line}" for line in self.output.splitlines()[-count:])
        return f"{self.name} (exit code {self._popen.poll()}), the end of {self.log}:\n{lines}"


def _before_exec() -> None:
    heed_interrupts()
    die_with_parent()  # also when the tests themselves are killed


def is_alive(process: psutil.Process | str) -> bool:
    """Whether a process, or the one with this pid, runs. One that has ended and was not waited for does not."""
    try:
        process = psutil.Process(int(process)) if isinstance(process, str) else process
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)


@contextmanager
def started(name, *arguments: str | Path, log: Path, env: Mapping | None = None, forked=True) -> Iterator[Process]:
    process = Process(name, *arguments, log=log, env=env, forked=forked)
    try:
        yield process
    finally:
        process.end()


def run_command(name: str, *arguments: str | Path, env: Mapping | None = None) -> str:
    """Run a command to its good end, and return what it printed."""
    with TemporaryDirectory() as folder, started(name, *arguments, log=Path(folder, "log"), env=env) as process:
        assert process.wait() == 0, process.tail()
        return process.output


def wait_until(condition: Callable, what: str, processes: list[Process], *, deadline_s: float = DEADLINE_S) -> None:
    give_up = time.monotonic() + deadline_s
    while not condition():
        for process in processes:
            process.poll()
        if time.monotonic() > give_up:
            told = "\n".join(process.tail() for process in processes)
            raise AssertionError(f"waited {deadline_s:.0f} s for {what}\n{told}")
        time.sleep(POLL_S)


def listening_sockets(processes: Iterable[Process]) -> set[tuple[str, int]]:
    """Addresses and ports at which these processes, or any below them, accept TCP connections."""
    found: set[tuple[str, int]] = set()
    for process in processes:
        top = psutil.Process(process._popen.pid)
        for each in (top, *top.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                sockets = each.net_connections("tcp")
                found.update((one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN)
    return found


# an engine that many runs share


@dataclass(frozen=True)
class SharedEngine:
    process: Process
    port: int


@contextmanager
def open_engine(folder: Path, *flags: str | Path, config=SYNCHRONOUS, forked: bool = True) -> Iterator[SharedEngine]:
    port = free_port()
    arguments = ["@", config, "--output-dir", folder, "--server.port", str(port), *flags]
    with started("inference", *arguments, log=folder / "inference.log", forked=forked) as process:
        engine = SharedEngine(process, port)

        def is_up() -> bool:
            assert process.poll() is None, process.tail()
            return _answers(f"http://127.0.0.1:{port}/health")

        wait_until(is_up, "the engine to come up", [process])
        yield engine


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


# a run


@dataclass(frozen=True)
class Run:
    root: Path

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.root)

    def rows(self, process: str) -> list[Row]:
        rows, _ = read_metrics(self.paths.metrics)
        own = {"trainer": "loss", "orchestrator": "reward/mean"}[process]
        return [row for row in rows if row["process"] == process and own in row]

    def evaluations(self) -> dict[int, float]:
        rows, _ = read_metrics(self.paths.metrics)
        held_out = {name for row in rows for name in row if name.startswith("eval/") and name.endswith("/reward")}
        return {row["step"]: row[name] for row in rows for name in held_out & row.keys()}

    def batches(self) -> list[BatchRecord]:
        journal = Journal(self.paths.journal)
        return [journal.read(step) for step in journal.steps()]

    @property
    def version(self) -> int:
        """The newest version that was confirmed."""
        return Versions(self.paths.journal).newest

    def engines_of(self, version: int) -> set[str]:
        """Return the hosts of the engines that confirmed a version at first."""
        first = Versions(self.paths.journal).read(version).confirmations[0]
        return {url.removeprefix("http://").partition(":")[0] for url in first.engines}

    def weights(self, step: int) -> Path:
        return step_folder(self.paths.weights, step) / "model.safetensors"

    def tensors(self, step: int) -> dict[str, Any]:
        with safe_open(self.weights(step), framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


@dataclass(frozen=True)
class Pair:
    run: Run
    engine: SharedEngine
    orchestrator: Process
    trainer: Process
    status_port: int

    @property
    def processes(self) -> list[Process]:
        return [self.orchestrator, self.trainer]

    def is_done(self) -> bool:
        codes = [process.poll() for process in self.processes]
        if any(codes):
            time.sleep(1)  # the other one's last words
            raise AssertionError("\n".join([*(process.tail() for process in self.processes), self.status()]))
        return None not in codes

    def until_trained(self, steps: int) -> None:
        """Steps of a run that was stopped before count too."""

        def is_trained() -> bool:
            return self.is_done() or any(row["step"] + 1 >= steps for row in self.run.rows("trainer"))

        wait_until(is_trained, f"step {steps}", [*self.processes, self.engine.process])

    def until_done(self) -> None:
        wait_until(self.is_done, "orchestrator and trainer to end", [*self.processes, self.engine.process])
        assert [process.left() for process in self.processes] == [[], []]

    def status(self) -> str:
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.status_port}/status", timeout=2, trust_env=False).text
        return "the orchestrator has no status to tell"


@contextmanager
def started_apart(engine: SharedEngine, root: Path, *flags: str | Path, config: str = SYNCHRONOUS) -> Iterator[Pair]:
    status, batches, weights = (free_port() for _ in range(3))
    meeting = {"inference.server.port": engine.port, "orchestrator.server.port": status}
    meeting |= {"ports.batches": batches, "ports.weights": weights}
    ports = [word for key, port in meeting.items() for word in (f"--{key}", str(port))]
    arguments = ["@", config, "--output-dir", root, *ports, *flags]
    logs = RunPaths(root).logs
    with (
        started("orchestrator", *arguments, log=_fresh(logs / "orchestrator.stdout")) as orchestrator,
        started("trainer", *arguments, log=_fresh(logs / "trainer.stdout")) as trainer,
    ):
        yield Pair(Run(root), engine, orchestrator, trainer, status)


def run_apart(engine: SharedEngine, root: Path, *flags: str | Path, config: str = SYNCHRONOUS) -> Run:
    with started_apart(engine, root, *flags, config=config) as pair:
        pair.until_done()
    return pair.run


def _fresh(log: Path) -> Path:
    if log.exists():
        log.rename(log.with_suffix(f".{time.time_ns()}"))
    return log
