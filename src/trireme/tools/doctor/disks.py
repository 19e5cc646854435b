"""The disk that a run writes to: whether it can, how fast what must be on disk gets there, and what fits."""

from __future__ import annotations

import errno
import fcntl
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trireme.base.disk import is_full
from trireme.base.errors import ConfigError
from trireme.config.run import RunConfig
from trireme.tools.doctor.finding import Case, Finding, ok, problem, warning
from trireme.tools.plan.memory import GIB
from trireme.tools.plan.sizes import read_sizes

MIB = 1 << 20
SYNCS, SYNCED = 16, 64 << 10  # a batch is written, and waited for, before anybody trains on it
STREAM = 32 * MIB
SLOW_S = 0.1
SLOW_RATE = 30 * MIB
OTHER = GIB  # journal, logs and metrics of a long run
CHECKPOINT_BYTES, EXPORT_BYTES = 12, 4  # per parameter: weights and two moments; weights
FEW_FILES = 1000


def disk(case: Case) -> Iterator[Finding]:
    yield of_disk(case.folder, needed=room_for(case.config))


def room_for(config: RunConfig) -> float:
    """Bytes that a run leaves, and has at once. Only what is sure: of models that are not known, the rest alone."""
    try:
        parameters = read_sizes(config.trainer.model.name or config.model.name).architecture.num_parameters
    except ConfigError:
        return float(OTHER)
    saves = config.max_steps // config.trainer.ckpt.interval if config.trainer.ckpt.interval else 1
    kept = min(max(1, saves), (config.trainer.ckpt.keep_last or saves) + 1)
    return float(OTHER) + kept * parameters * (CHECKPOINT_BYTES + EXPORT_BYTES)


def of_disk(folder: Path, *, needed: float) -> Finding:
    """Writes there, and removes what it wrote."""
    file = folder / f".doctor-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync_s, rate = measure(file)
    except OSError as error:
        return _refused(folder, error)
    finally:
        _remove(file)
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    speed = f"{sync_s * 1000:.1f} ms until {SYNCED >> 10} KiB are on disk, {rate / MIB:,.0f} MiB/s"
    said = f"{speed}; {free / GIB:,.1f} GiB free"
    figures = {"sync_s": sync_s, "bytes_per_s": rate, "free": free, "needed": needed}
    if free < needed:
        return warning(
            f"{said} - expected {needed / GIB:,.1f} GiB, for checkpoints and journal: a full disk is a pause",
            "Make room, set another `output_dir`, or keep fewer checkpoints: `trainer.ckpt.keep_last`.",
            **figures,
        )
    if found.f_files and found.f_favail < FEW_FILES:
        return problem(
            f"{said}, and room for {found.f_favail} more files - expected {FEW_FILES} or more (`df -i`)",
            "Remove many small files there, or set another `output_dir`.",
            **figures,
        )
    if sync_s > SLOW_S or rate < SLOW_RATE:
        return warning(
            f"{said} - expected {SLOW_S * 1000:.0f} ms and {SLOW_RATE >> 20} MiB/s or better: each batch, and each "
            "version, waits for the disk",
            "Set `output_dir` to a local disk, and copy the run away afterwards.",
            **figures,
        )
    return ok(said, **figures)


def measure(file: Path) -> tuple[float, float]:
    """Seconds until a little is on disk (the median), and bytes per second of a lot.

    Raises: OSError where it cannot be written, locked, or given another name.
    """
    block, syncs = os.urandom(SYNCED), []
    with open(file, "wb", buffering=0) as out:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for _ in range(SYNCS):
            began = time.perf_counter()
            _write(out.fileno(), block)
            syncs.append(time.perf_counter() - began)
        began = time.perf_counter()
        _write(out.fileno(), block * (STREAM // SYNCED))
        streamed_s = time.perf_counter() - began
    os.replace(file, file.with_suffix(".renamed"))
    return statistics.median(syncs), STREAM / streamed_s


def _write(descriptor: int, block: bytes) -> None:
    left = memoryview(block)
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


def _remove(file: Path) -> None:
    for each in (file, file.with_suffix(".renamed")):
        with suppress(OSError):
            each.unlink()


def _refused(folder: Path, error: OSError) -> Finding:
    if is_full(error):
        return problem(
            f"{folder} is full ({error.strerror}) - expected room for {STREAM >> 20} MiB at the very least",
            "Make room there, or set another `output_dir`.",
        )
    if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EWOULDBLOCK):
        return problem(
            f"{folder} keeps no locks ({error.strerror}) - expected `flock` to work: it keeps two launchers apart",
            "Mount it with locks (NFS 4, or `local_lock=flock`), or set another `output_dir`.",
        )
    return problem(
        f"{folder} cannot be written ({error.strerror}) - expected a place for the run's folder",
        "Give yourself the right to write there, or set another `output_dir`.",
    )
