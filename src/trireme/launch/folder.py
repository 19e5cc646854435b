"""The run folder: locks (one launcher, one orchestrator, one trainer at a time), and making room for a new run.

Files of an earlier run are moved aside, never overwritten or deleted.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.base.processes import try_lock
from trireme.base.token import KEY_FILE
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.journal.manifest import complete_steps
from trireme.launch.settings import training

LOCKS = {"launcher": ".launcher", "orchestrator": ".orchestrator", "trainer": ".trainer"}
"""Lock files by process. The launcher's is inherited by all processes that it starts."""
LEAVE_S = 30.0  # for the processes of a launcher that was killed

RUN_ENTRIES = frozenset(
    {"configs", "origin", "logs", "journal", "logprobs", "checkpoints", "weights", "data", "broadcast", "evals"}
    | {"metrics.jsonl", "spans.jsonl", "rollouts", "rollouts.jsonl", "report.html", "report.md"}
    | {"wandb", "runs", KEY_FILE}
    | {*LOCKS.values()}
)
"""Names that a run writes into its folder. Only these are moved when another run takes the folder."""
NO_OBSTACLES = frozenset({"lost+found", ".snapshot", "gepa", "env-check"})
"""Entries that do not keep a run out: those of file systems, and folders that our other commands make in `outputs`."""
SUBMISSIONS = ".submissions"  # ending of the folders of `trireme submit`, next to those of their runs
RUN_PREFIXES = ("checkpoint-", ".checkpoint-", f"{KEY_FILE}.")


@contextmanager
def hold_folder(paths: RunPaths, *, leave_s: float = LEAVE_S) -> Iterator[int]:
    """Lock the folder against other launchers, and commands that write to it, until this process ends, however it does.

    An orchestrator or a trainer that was started alone in the folder also keeps a launcher out.

    Yields: the lock's file descriptor. Child processes inherit it, so that a new launcher waits until those of a killed
    one have ended.

    Raises: ConfigError if a launcher, an orchestrator or a trainer is running in the folder.
    """
    with hold(paths, "launcher", leave_s=leave_s) as descriptor:
        # Only checked, and released at once: the processes of this run take these locks themselves.
        with ExitStack() as others:
            for process in ("orchestrator", "trainer"):
                others.enter_context(hold(paths, process, leave_s=leave_s))
        yield descriptor


@contextmanager
def hold(paths: RunPaths, process: str, *, leave_s: float = LEAVE_S) -> Iterator[int]:
    """Lock the folder against other processes of this kind (a key of LOCKS) for as long as this process lives.

    Yields: the lock's file descriptor.

    Raises: ConfigError if another one is running there, or its children still are after `leave_s` seconds.
    """
    paths.root.mkdir(parents=True, exist_ok=True)
    with open(paths.root / LOCKS[process], "a+") as lock:
        give_up = time.monotonic() + leave_s
        while not try_lock(lock.fileno(), paths.root):
            # A dead holder means that children of a killed launcher still have the lock open. They end soon.
            holder = _holder(lock)  # "" if the lock was taken a moment ago
            is_alive = not holder.isdigit() or Path(f"/proc/{holder}").exists()
            if is_alive or time.monotonic() >= give_up:
                raise ConfigError(
                    f"another {process} (process {holder or 'unknown'}) is running in {paths.root} - "
                    "expected one at a time. Stop it, or name another folder, such as `--name another` or "
                    "`--output-dir DIR`."
                )
            time.sleep(0.1)

        # The pid is for messages and for `launcher_of`; the lock itself is that of the kernel.
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield lock.fileno()


def launcher_of(paths: RunPaths) -> int | None:
    """Return the pid of the launcher that has locked the folder; None if the folder is not locked."""
    file = paths.root / LOCKS["launcher"]
    if not file.exists():
        return None
    with open(file) as lock:
        if not try_lock(lock.fileno(), paths.root, fcntl.LOCK_SH):
            holder = _holder(lock)
            return int(holder) if holder.isdigit() else None
    return None


def holds_launcher_lock(paths: RunPaths, pid: int) -> bool:
    """Return whether a process of this machine has the launcher's lock open. A pid in that file can also be one of a
    container, of another machine, or of a launcher that was killed."""
    with suppress(OSError):  # it has ended, or is another user's
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed since
                if descriptor.samefile(paths.root / LOCKS["launcher"]):
                    return True
    return False


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read().strip()


def prepare_folder(config: RunConfig | SftConfig) -> Path | None:
    """Prepare the folder for a new run, or go back to the step from which a run is resumed.

    Returns: the folder to which an earlier run's files were moved; None if there was none. Nothing is deleted.

    Raises: ConfigError as `check_folder`.
    """
    paths, step = config.paths, training(config).ckpt.resume_step
    check_folder(config)

    # Going back moves the later steps aside, and keeps the rest of the run in its place.
    if step is not None and step >= 0:
        from trireme.launch.resume import rewind  # `rl --help` does not wait for its imports

        rewind(paths, step)

    is_in_the_way = paths.holds_run and not config.resume and step is None
    return move_aside(paths) if is_in_the_way else None


def check_folder(config: RunConfig | SftConfig) -> None:
    """Check the folder without changing it.

    Raises: ConfigError if there is no run, or no such step, to resume; or if a new run would write among files
        that are not a run's.
    """
    step = training(config).ckpt.resume_step
    if config.resume or step is not None:
        _check_resumable(config.paths, step)
    else:
        check_is_ours(config.paths)


def check_is_ours(paths: RunPaths) -> None:
    """Raise ConfigError if the folder holds files but no run: the user keeps other things there."""
    if paths.holds_run or not paths.root.is_dir():
        return

    # Folders of other runs, and of their submissions, may lie inside.
    others = [entry for entry in paths.root.iterdir() if not _is_of_a_run(entry) and entry.name not in NO_OBSTACLES]
    foreign = sorted(entry.name for entry in others if not (entry.suffix == SUBMISSIONS or _holds_runs(entry)))
    if foreign:
        shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise ConfigError(
            f"{paths.root} holds no run, but {shown} - expected an empty folder, a new one, or that of an earlier run. "
            "Choose another `output_dir`, or add a `name`: the run gets a folder of that name."
        )


def _check_resumable(paths: RunPaths, step: int | None) -> None:
    asked = "`--resume`" if step is None else f"ckpt.resume_step = {step}"
    if step in (None, -1) and paths.run_config.exists():
        return  # a launcher was killed here before anything else was written

    # A misspelt name is the usual cause, so name the runs next to it.
    if not paths.holds_run:
        found = sorted(str(folder) for folder in paths.root.parent.glob("*") if RunPaths(folder).holds_run)[:5]
        nearby = f" Runs nearby: {', '.join(found)}." if found else ""
        raise ConfigError(
            f"{asked} was given, and there is no run in {paths.root} - expected `metrics.jsonl` or `journal/` there. "
            f"Leave it out to start a new run, or check `output_dir` and `name`.{nearby}"
        )

    from trireme.journal.origin import first_version  # it imports numpy, which `rl --help` does not wait for

    have, first = complete_steps(paths.checkpoints), first_version(paths.root)
    if step not in (None, -1, first, *have):
        beginning = f"{first} for the checkpoint that it began from" if first else "0 for the base model"
        raise ConfigError(
            f"{asked} was given, and {paths.checkpoints} has no complete checkpoint of that step - it has "
            f"{have or 'none'}. Take one of these, {beginning}, or -1 for the newest."
        )


def move_aside(paths: RunPaths) -> Path:
    """Move the files of a run to a new folder next to its own; inside it if that is a mount point.

    Other runs inside it, and files of the user, stay.
    """
    root = paths.root.resolve()
    base = root / "run" if os.path.ismount(root) else root  # a move must not copy

    names = (base.with_name(f"{base.name}.earlier-{number}") for number in count(1))
    aside = next(name for name in names if not name.exists())

    # The lock files stay: this process holds them by their open files.
    locks = LOCKS.values()
    mine = [entry for entry in paths.root.iterdir() if _is_of_a_run(entry) and entry.name not in locks]

    aside.mkdir()
    last = (paths.metrics, paths.journal, paths.origin)  # `holds_run` until the end
    for entry in sorted(mine, key=lambda entry: entry in last):
        entry.rename(aside / entry.name)
    return aside


def _is_of_a_run(entry: Path) -> bool:
    return entry.name in RUN_ENTRIES or entry.name.startswith(RUN_PREFIXES)


def _holds_runs(entry: Path) -> bool:
    """Return whether the entry is the folder of another run, or of a group of runs."""
    folders = [entry, *entry.iterdir()] if entry.is_dir() else []
    return any(_is_run(folder) for folder in folders)


def _is_run(folder: Path) -> bool:
    """Return whether a command of ours has written a run there, or begun to: a dry run leaves its configuration, a run
    that was refused its lock, a process that is started alone its own configuration.
    """
    paths = RunPaths(folder)
    begun = (*(folder / lock for lock in LOCKS.values()), paths.configs / "dry-run")
    return paths.holds_run or any(path.exists() for path in begun) or bool(next(paths.configs.glob("*.json"), None))
