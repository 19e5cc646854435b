"""The run folder before a run starts in it: held by one launcher at a time, and never written over."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.config.run import RunConfig
from trireme.ledger.manifest import complete_steps

_LOCK = ".launcher"
LEAVE_S = 30.0  # for the processes of a launcher that was killed


def holds_run(paths: RunPaths) -> bool:
    return paths.metrics.exists() or paths.journal.exists()


@contextmanager
def hold_folder(paths: RunPaths, *, leave_s: float = LEAVE_S) -> Iterator[int]:
    """Keeps other launchers out of the folder for as long as this process lives, however it ends.

    Yields: the lock's file descriptor. Who inherits it keeps them out too: what a killed launcher leaves behind must
    be gone before anything is started in its place, and is waited for.

    Raises: ConfigError where a launcher is at work there already.
    """
    paths.root.mkdir(parents=True, exist_ok=True)
    with open(paths.root / _LOCK, "a+") as lock:
        _take(lock, paths.root, leave_s)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield lock.fileno()


def launcher_of(paths: RunPaths) -> int | None:
    """The process that holds the folder now; None where nobody does."""
    if not (paths.root / _LOCK).exists():
        return None
    with open(paths.root / _LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(lock)
            return int(holder) if holder.isdigit() else None
    return None


def _take(lock: IO[str], root: Path, leave_s: float) -> None:
    give_up = time.monotonic() + leave_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = _holder(lock)
        if _is_alive(holder) or time.monotonic() >= give_up:
            raise ConfigError(
                f"another launcher (process {holder or 'unknown'}) is at work in {root} - "
                "expected one run per folder. Stop it, or give this run its own: `--name another`."
            )
        time.sleep(0.1)


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read().strip()


def _is_alive(pid: str) -> bool:
    """Where nobody has signed yet, somebody is about to."""
    return not pid.isdigit() or Path(f"/proc/{pid}").exists()


def prepare_folder(paths: RunPaths, *, resume: bool, resume_step: int | None) -> Path | None:
    """Makes room for a fresh run, or makes sure that there is one to go on with, at the step from which it is to.

    Returns: where an earlier run's files were moved, if there was one in the way. Nothing is ever deleted.
    """
    if resume or resume_step is not None:
        _check_resumable(paths, resume_step)
        if resume_step is not None and resume_step >= 0:
            from trireme.launch.rewind import rewind  # numpy behind it is not for `--help` to wait for

            rewind(paths, resume_step)
        return None
    return move_aside(paths) if holds_run(paths) else None


def check_resumable(config: RunConfig) -> None:
    """Changes nothing. Raises: ConfigError where there is no run to go on with, or no such step."""
    step = config.trainer.ckpt.resume_step
    if config.resume or step is not None:
        _check_resumable(config.paths, step)


def _check_resumable(paths: RunPaths, step: int | None) -> None:
    asked = "`--resume`" if step is None else f"ckpt.resume_step = {step}"
    if step in (None, -1) and paths.run_config.exists():
        return  # a launcher was at work here, and may have been killed before anything else was written
    if not holds_run(paths):
        raise ConfigError(
            f"{asked} was given, and there is no run in {paths.root} - expected `metrics.jsonl` or `journal/` there. "
            f"Leave it out to start afresh, or check `output_dir` and `name`.{_runs_nearby(paths.root)}"
        )
    have = complete_steps(paths.checkpoints)
    if step is not None and step > 0 and step not in have:
        raise ConfigError(
            f"{asked} was given, and {paths.checkpoints} has no complete checkpoint of that step - it has "
            f"{have or 'none'}. Take one of these, 0 for the base model, or -1 for the newest."
        )


def _runs_nearby(root: Path) -> str:
    found = sorted(str(folder) for folder in root.parent.glob("*") if holds_run(RunPaths(folder)))[:5]
    return f" Runs nearby: {', '.join(found)}." if found else ""


def move_aside(paths: RunPaths) -> Path:
    """Moves the run's own files to a folder beside it; runs in folders of their own inside stay where they are."""
    aside = _name_aside(paths.root.resolve())
    mine = [entry for entry in paths.root.iterdir() if entry.name != _LOCK and not _is_another_run(entry)]
    aside.mkdir()
    for entry in mine:
        entry.rename(aside / entry.name)
    return aside


def _is_another_run(entry: Path) -> bool:
    return entry.is_dir() and (holds_run(RunPaths(entry)) or RunPaths(entry).run_config.exists())


def _name_aside(root: Path) -> Path:
    """Beside the folder; inside it where it is a mount point, because a move must not become a copy."""
    base = root / "run" if os.path.ismount(root) else root
    names = (base.with_name(f"{base.name}.earlier-{number}") for number in count(1))
    return next(name for name in names if not name.exists())
