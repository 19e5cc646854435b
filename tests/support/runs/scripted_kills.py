"""Whole runs in which processes are killed at named points, and what must be true of them afterwards.

A point is armed with `hold`: the process that reaches it waits there, the victim is killed (it may be the one that
waits), and the one that waits is let go.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from support.runs.real_run import Process, Run, wait_until
from trireme.journal.versions import Versions
from trireme.tools.audit.audit import command as audit

SCRIPTED = ("python", "tests/support/engines/scripted_rl.py", "@", "tests/e2e/scripted.toml")
REAL = ("rl", "@", "tests/e2e/synchronous.toml")
DEADLINE_S = 120.0  # for a point to be reached, and for a run to recover
END_S = 240.0
POLL_S = 0.01

VICTIMS = (
    "launcher", "orchestrator", "trainer rank 0", "trainer rank 1", "inference server", "engine core",
    "environment worker",
)  # fmt: skip


@dataclass(frozen=True)
class Faults:
    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def env(self) -> dict[str, str]:
        return {"TRIREME_FAULTS": f"folder={self.folder}"}

    def arm(self, point: str, what: str = "hold") -> None:
        for leftover in (f"{point}.reached", f"{point}.go"):
            (self.folder / leftover).unlink(missing_ok=True)
        partial = self.folder / f"{point}.arming"
        partial.write_text(what)
        partial.rename(self.folder / point)

    def is_reached(self, point: str) -> bool:
        return (self.folder / f"{point}.reached").exists()

    def release(self, point: str) -> None:
        (self.folder / f"{point}.go").touch()


def find(victim: str, launcher: int, ranks: int = 1) -> psutil.Process | None:
    """The process that plays this part now, below the launcher; None while there is none.

    Args:
        ranks: of the trainer. Several have a process above them, which is none of them.
    """
    with suppress(psutil.Error):
        root = psutil.Process(launcher)
        if victim == "launcher":
            return root
        # the process of the programs outlives its parent, and is below the launcher no more
        candidates = psutil.process_iter() if victim == "agent programs" else root.children(recursive=True)
        for process in candidates:
            with suppress(psutil.Error):  # of one that has just ended
                if process.status() != psutil.STATUS_ZOMBIE and _plays(process, victim, launcher, ranks):
                    return process
    return None


def _plays(process: psutil.Process, victim: str, launcher: int, ranks: int) -> bool:
    words = " ".join(process.cmdline())
    match victim:
        case "orchestrator":
            return "trireme.cli.orchestrator" in words
        case "trainer rank 0" | "trainer rank 1":
            return "trireme.cli.trainer" in words and (ranks == 1 or _rank(process, words) == victim[-1])
        case "inference server":
            is_scripted = "scripted_engine.py" in words and "--core" not in words
            return is_scripted or "trireme.cli.inference" in words
        case "engine core":
            return "scripted_engine.py --core" in words or "VLLM::EngineCore" in words
        case "environment worker":
            return "trireme_worker server" in words
        case "agent programs":
            ours = process.environ().get("TRIREME_PARENT") == str(launcher)
            return ours and "trireme_worker agents.programs" in words
    raise AssertionError(f"{victim} is none of {VICTIMS}")


def _rank(process: psutil.Process, words: str) -> str | None:
    """Of a forked process, the command that /proc shows ends with its rank."""
    return words.rpartition(" RANK=")[2] if " RANK=" in words else process.environ().get("RANK")


@dataclass
class KilledRun:
    folder: Path
    flags: list[str]
    command: tuple[str, ...] = SCRIPTED
    name: str = "the run"
    ranks: int = 1
    patience_s: float = DEADLINE_S  # for a point to be come to, and for getting over a kill
    kills: list[str] = field(default_factory=list)
    num_starts: int = 0

    def __post_init__(self) -> None:
        self.faults = Faults(self.folder / "faults")
        self.run = Run(self.folder / "run")
        self._began = time.monotonic()

    def start(self, *more: str) -> None:
        self.num_starts += 1
        name, *arguments = self.command
        self.process = Process(
            name, *arguments,
            *("--output-dir", str(self.run.root), "--trainer.num-ranks", str(self.ranks), *self.flags, *more),
            log=self.folder / f"launcher-{self.num_starts}.log", env=self.faults.env, forked=True,
        )  # fmt: skip

    @property
    def launcher(self) -> int:
        return self.process._popen.pid

    @property
    def version(self) -> int:
        return Versions(self.run.paths.journal).newest  # opened each time: it remembers what it found

    def say(self, words: object) -> None:
        print(f"{self.name} [{time.monotonic() - self._began:6.1f} s] {words}", flush=True)

    def until(self, condition: Callable[[], object], what: str) -> None:
        give_up = time.monotonic() + self.patience_s
        while not condition():
            code = self.process.poll()
            if code is not None and not condition():
                raise AssertionError(f"the run ended with code {code} before {what}\n{self.tell()}")
            if time.monotonic() > give_up:
                raise AssertionError(f"waited {self.patience_s:.0f} s for {what}\n{self.tell()}")
            time.sleep(POLL_S)

    def find(self, victim: str) -> psutil.Process:
        found: list[psutil.Process] = []

        def look() -> bool:
            process = find(victim, self.launcher, self.ranks)
            found.extend([process] if process else [])
            return bool(found)

        self.until(look, f"a living {victim}")
        return found[0]

    def kill_at(self, victim: str, point: str, *, wake: str | None = None) -> None:
        """Kill `victim` while a process is at `point`, and see that the run goes on. Start the run where it is not.

        Args:
            wake: who is killed before, so that the point is come to at all: it lies on the way up.
        """
        self.faults.arm(point)
        if not self.num_starts:
            self.start()
        if wake is not None:
            self.find(wake).kill()
        self.until(lambda: self.faults.is_reached(point), f"{point} is reached, where {victim} is to be killed")
        process = self.find(victim)
        began = time.monotonic()
        self.kill(victim, process)
        version = self.version
        self.faults.release(point)
        self.until(lambda: self.version > version, f"the run goes on after {victim} was killed at {point}")
        seconds = time.monotonic() - began
        self.note(f"{victim} killed at {point}, version {version}: version {self.version} after {seconds:.1f} s")

    def note(self, kill: str) -> None:
        self.kills.append(kill)
        self.say(kill)

    def kill_at_the_end(self, victim: str, points: Sequence[str]) -> None:
        """As `kill_at`, where no version comes any more: at each of these points that is come to before the end."""
        left, ended = list(points), re.compile(f"{victim}: .*-> ended")
        for point in left:
            self.faults.arm(point)

        def living() -> psutil.Process | None:
            return find(victim, self.launcher, self.ranks)

        def next_reached() -> list[str]:
            return [point for point in left if self.faults.is_reached(point)]

        while left:
            self.until(lambda: next_reached() or self.process.poll() == 0, f"{left} or a good end")
            if not next_reached():
                return
            left.remove(point := next_reached()[0])
            # It may have to come up again first. But no worker does while the orchestrator waits at a point, and an
            # orchestrator that comes up when all is done ends at once.
            if victim != "environment worker" or not point.startswith("orchestrator."):
                self.until(lambda: living() or ended.search(self.process.output), f"a living {victim}")
            process = living()
            if process is not None:
                self.kill(victim, process)
                self.note(f"{victim} killed at {point}")
            self.faults.release(point)

    def kill(self, victim: str, process: psutil.Process | None = None) -> None:
        """A launcher is started again, by the same command with `--resume`; all others are its business."""
        if victim != "launcher":
            (process or self.find(victim)).kill()
            return
        self.process.kill()
        wait_until(lambda: not self.process.left(), "everything of a killed launcher to end", [self.process])
        self.start("--resume")

    def wait(self, deadline_s: float = END_S) -> None:
        assert self.process.wait(deadline_s=deadline_s) == 0, self.tell()
        assert self.process.left() == [], self.tell()

    def tell(self) -> str:
        logs = sorted(self.run.paths.logs.glob("*.stdout")) if self.run.paths.logs.is_dir() else []
        told = [f"{self.name} in {self.folder}, version {self.version}; {len(self.kills)} kills, the last:"]
        told += [*(f"    {kill}" for kill in self.kills[-3:]), self.process.tail(25)]
        for log in logs:
            told += [f"the end of {log}:", *log.read_text(errors="replace").splitlines()[-25:]]
        return "\n".join(told)


@contextmanager
def open_run(run: KilledRun) -> Iterator[KilledRun]:
    """Must stay in one thread: the kernel ends the launcher with the thread that started it."""
    try:
        yield run
    finally:
        if run.num_starts:
            run.process.end()


def first_other_version(run: Run, undisturbed: Run) -> str | None:
    """Where two runs part; None where all versions of both are the same weights."""
    ours, theirs = (
        {version: versions.read(version).digests for version in versions.known()}
        for versions in (Versions(run.paths.journal), Versions(undisturbed.paths.journal))
    )
    if ours.keys() != theirs.keys():
        return f"versions {sorted(ours.keys() ^ theirs.keys())} were confirmed in one of the runs only"
    others = [version for version in ours if ours[version] != theirs[version]]
    return f"version {others[0]} is the first of {len(others)} that are not the same weights" if others else None


def finish_undisturbed(run: KilledRun) -> Run:
    with open_run(run):
        run.start()
        run.wait()
    return run.run


def assert_same_weights(run: KilledRun, undisturbed: Run, last: int, file: str = "model.safetensors") -> None:
    """Of all versions, and of the file that the last step has left; and the journal is audited."""
    other = first_other_version(run.run, undisturbed)
    assert other is None, f"{other}\n{run.tell()}"
    ours, theirs = (each.weights(last).with_name(file) for each in (run.run, undisturbed))
    assert ours.read_bytes() == theirs.read_bytes(), f"{ours} is not {theirs}\n{run.tell()}"
    assert_audited(run)


def assert_audited(run: KilledRun) -> None:
    assert audit([str(run.run.root)]) == 0, run.tell()
