"""What the machine lends to processes: memory, memory that they share, and what the kernel lets each of them have."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.run import RunConfig
from trireme.tools.doctor.finding import Case, Finding, ok, problem, skipped, warning
from trireme.tools.plan.estimate import ORCHESTRATOR_BYTES, Estimate, estimate_run
from trireme.tools.plan.lengths import lengths_of
from trireme.tools.plan.machine import describe_machine
from trireme.tools.plan.memory import GIB
from trireme.tools.plan.sizes import read_sizes

MIB = 1 << 20
SHM = Path("/dev/shm")
SHARED = GIB  # what NCCL and vLLM pass tensors through between processes
LEAST_SHARED = 32 * MIB  # half of what a container has that nobody gave more
CGROUP = Path("/sys/fs/cgroup")
INFINIBAND = Path("/sys/class/infiniband")

FILES_OF_A_PROCESS = 256  # beside its connections

# Threads, beside those that compute. The quickstart was seen with 59 in its engine, 20 in its rank, 10 in each other.
ENGINE_THREADS, RANK_THREADS, WORKER_THREADS, OTHER_THREADS = 64, 32, 16, 64


# memory


def memory(case: Case) -> Iterator[Finding]:
    estimate = estimate_of(case)
    free = available()
    if estimate is None:
        yield skipped(f"the model's sizes are not known here; {free / GIB:.1f} GiB are free")
        return
    needs = needed(estimate)
    said = f"the run needs about {needs / GIB:.1f} GiB of this machine's memory"
    if found := list(estimate.problems()):
        yield problem(
            f"{'; '.join(found)} - expected room for all of it",
            "`trireme plan` with the same words says what would fit.",
        )
    elif needs > free:
        yield warning(
            f"{said}, {free / GIB:.1f} GiB are free now - expected more",
            "End what holds it (`ps aux --sort=-rss | head`), or lower what `trireme plan` lists.",
            needed=needs,
            free=free,
        )
    else:
        yield ok(f"{said}, {free / GIB:.1f} GiB are free", needed=needs, free=free)


def estimate_of(case: Case) -> Estimate | None:
    """None where the model's sizes, or the GPU's memory, cannot be had."""
    config, cores = case.config, case.devices.cores
    try:
        machine = describe_machine(case.devices if config.device == "cuda" else Devices(cores=cores))
        sized = read_sizes(config.trainer.model.name or config.model.name)
        lengths = lengths_of(config, prompt=None, sampled=None, examples=None, run=None)
    except ConfigError:
        return None
    return estimate_run(config, sized, machine, lengths)


def needed(estimate: Estimate) -> float:
    """Of the machine's own memory."""
    if not estimate.machine.is_on_cpu:
        return estimate.host_bytes
    return estimate.ranks * estimate.trainer_bytes + estimate.engine_bytes + ORCHESTRATOR_BYTES


def available(cgroup: Path = CGROUP) -> float:
    """Free now; in a container with a limit, what is left of that where it is less."""
    free = float(psutil.virtual_memory().available)
    limit, used = read_number(cgroup / "memory.max"), read_number(cgroup / "memory.current")
    return free if limit is None or used is None else min(free, max(0.0, limit - used))


def read_number(file: Path) -> float | None:
    """None where there is none, or it is "max"."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return None


# shared memory


def shared_memory(case: Case) -> Iterator[Finding]:
    parallel = case.config.inference.parallel
    yield of_shared_memory(SHM, is_shared=max(case.config.trainer.num_ranks or 1, parallel.tp * (parallel.dp or 1)) > 1)


def of_shared_memory(folder: Path, *, is_shared: bool) -> Finding:
    """
    Args:
        is_shared: several ranks, or an engine of several workers, pass tensors through it.
    """
    fix = f"In a container `--shm-size 8g` (or `--ipc host`); else `mount -o remount,size=8g {folder}`."
    try:
        free = _free(folder)
        _write(folder / f".trireme-doctor-{os.getpid()}", MIB)
    except OSError as error:
        return problem(f"{folder} cannot be written ({error.strerror}) - expected memory that processes share", fix)
    said = f"{folder} has {free / MIB:,.0f} MiB free"
    if free >= SHARED:
        return ok(said, free=free)
    expected = f"{SHARED / MIB:,.0f} MiB or more"
    if is_shared or free < LEAST_SHARED:
        return problem(f"{said} - expected {expected}: without it processes end with a bus error", fix, free=free)
    return warning(f"{said} - expected {expected} as soon as there are several ranks or GPUs", fix, free=free)


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _write(file: Path, num_bytes: int) -> None:
    try:
        file.write_bytes(bytes(num_bytes))
    finally:
        file.unlink(missing_ok=True)


# limits


@dataclass(frozen=True)
class Needs:
    """What a run asks of the kernel."""

    files: int  # open at once in one process
    threads: int  # of all processes together
    file_bytes: int  # of the largest file


def needs_of(config: RunConfig, cores: int, model_bytes: float) -> Needs:
    """Each rollout under way is a connection to an engine; one for its environment may be beside it."""
    ahead = 1 + config.max_async_level
    rollouts = int(config.orchestrator.batch_size * config.orchestrator.oversampling_factor * ahead)
    connections = min(rollouts, config.orchestrator.max_concurrent)
    engines = config.inference.parallel.tp * (config.inference.parallel.dp or 1) * (ENGINE_THREADS + cores)
    ranks = (config.trainer.num_ranks or 1) * (RANK_THREADS + cores)
    workers = sum(each.num_workers for each in config.orchestrator.env) * WORKER_THREADS
    return Needs(
        files=FILES_OF_A_PROCESS + 2 * connections,
        threads=engines + ranks + workers + OTHER_THREADS,
        file_bytes=int(model_bytes),
    )


def limits(case: Case) -> Iterator[Finding]:
    estimate = estimate_of(case)
    model_bytes = 12.0 * estimate.sized.architecture.num_parameters if estimate else 0.0
    needs = needs_of(case.config, case.devices.cores, model_bytes)
    found = [
        _open_files(needs),
        _threads(needs),
        _largest_file(needs),
        _address_space(),
        _locked_memory(case),
    ]
    bad = [finding for finding in found if finding is not None and finding.verdict != "ok"]
    if bad:
        yield from bad
        return
    yield ok("; ".join(finding.found for finding in found if finding is not None))


def _open_files(needs: Needs) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{_words(soft)} open files"
    if _is_enough(soft, needs.files):
        return ok(said)
    more = max(65536, needs.files) if hard == resource.RLIM_INFINITY else min(hard, max(65536, needs.files))
    lasting = "raise `nofile` in /etc/security/limits.conf (a service: `LimitNOFILE`, a container: `--ulimit nofile`)"
    way = f"`ulimit -n {more}` in this shell." if _is_enough(hard, needs.files) else f"As root, {lasting}."
    return problem(f"{said} per process - expected {needs.files} or more, for as many connections", way)


def _threads(needs: Needs) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    left = {"`ulimit -u`": float("inf") if soft == resource.RLIM_INFINITY else soft - _own_threads()}
    most, now = read_number(CGROUP / "pids.max"), read_number(CGROUP / "pids.current")
    if most is not None and now is not None:
        left["the container's `pids.max`"] = most - now
    which, least = min(left.items(), key=lambda item: item[1])
    said = f"room for {'any number of' if least == float('inf') else f'{max(0.0, least):,.0f}'} more threads"
    if least >= needs.threads:
        return ok(said)
    return problem(
        f"{said} ({which}) - expected {needs.threads}, which a run's processes start together",
        "`ulimit -u 65536`, or a container with a higher `--pids-limit`; or lower `trainer.threads` and "
        "`inference.cpu.threads`.",
    )


def _own_threads() -> int:
    """Of this user: what the kernel counts."""
    mine = os.getuid()
    total = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == mine:
            total += process.info["num_threads"] or 1
    return total


def _largest_file(needs: Needs) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    least = max(needs.file_bytes, GIB)
    if _is_enough(soft, least):
        return ok(f"files of {_words(soft)} bytes")
    return problem(
        f"no file may grow beyond {soft:,} bytes - expected {least:,} or more, for checkpoints",
        "`ulimit -f unlimited`.",
    )


def _address_space() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return ok("any address space")
    return warning(
        f"a process may have {soft / GIB:,.1f} GiB of address space - expected no limit: torch and vLLM reserve far "
        "more than they use",
        "`ulimit -v unlimited`.",
    )


def _locked_memory(case: Case) -> Finding | None:
    """Only InfiniBand needs more than the little that is usual."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = f"{_words(soft)} bytes of locked memory"
    if soft == resource.RLIM_INFINITY or not (INFINIBAND.is_dir() and any(INFINIBAND.iterdir())):
        return ok(said)
    if case.config.device == "cpu":
        return None
    return warning(
        f"{said}, and this machine has InfiniBand - expected no limit: NCCL cannot register its buffers",
        "`ulimit -l unlimited` (a container: `--ulimit memlock=-1`).",
    )


def _is_enough(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed


def _words(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
