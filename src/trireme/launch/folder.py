"""The run folder before a run starts in it: held by one launcher at a time, and never written over."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, step_of

_LOCK = ".launcher"


def holds_run(paths: RunPaths) -> bool:
    return paths.metrics.exists() or paths.journal.exists()


@contextmanager
def hold_folder(paths: RunPaths) -> Iterator[None]:
    """Keeps other launchers out of the folder for as long as this process lives, however it ends.

    Raises: ConfigError where one is at work there already.
    """
    paths.root.mkdir(parents=True, exist_ok=True)
    with open(paths.root / _LOCK, "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"another launcher (process {lock.read().strip() or 'unknown'}) is at work in {paths.root} - "
                "expected one run per folder. Stop it, or give this run its own: `--name another`."
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def prepare_folder(paths: RunPaths, *, resume: bool, resume_step: int | None) -> Path | None:
    """Makes room for a fresh run, or makes sure that there is one to go on with.

    Returns: where an earlier run's files were moved, if there was one in the way. Nothing is ever deleted.
    """
    if resume or resume_step is not None:
        _check_resumable(paths, resume_step)
        return None
    return move_aside(paths) if holds_run(paths) else None


def _check_resumable(paths: RunPaths, step: int | None) -> None:
    asked = "`--resume`" if step is None else f"ckpt.resume_step = {step}"
    if not holds_run(paths):
        raise ConfigError(
            f"{asked} was given, and there is no run in {paths.root} - expected `metrics.jsonl` or `journal/` there. "
            f"Leave it out to start afresh, or check `output_dir` and `name`.{_runs_nearby(paths.root)}"
        )
    have = sorted(number for entry in paths.checkpoints.glob("step_*") if (number := step_of(entry)) is not None)
    if step is not None and step >= 0 and step not in have:
        raise ConfigError(
            f"{asked} was given, and {paths.checkpoints} has no such checkpoint - it has steps {have or 'none'}. "
            "Take one of these, or -1 for the newest."
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
