"""The GPUs, their driver and the CPU cores that a run may use, found without importing torch (which takes seconds)."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# What torch 2.13 and vLLM need, which are built for CUDA 13.
LEAST_CUDA = 13000
LEAST_DRIVER = "580.65.06"
LEAST_CAPABILITY = (7, 5)
BFLOAT16_CAPABILITY = (8, 0)

CUDA = "libcuda.so.1"  # the driver's library, or that of the package cuda-compat if it is installed
ASK_S = 60.0  # eight GPUs without persistence mode take the driver ten seconds

Capability = tuple[int, int]


@dataclass(frozen=True)
class Devices:
    """The GPUs and cores that a run may use. Unknown values keep their defaults, and no rule refuses a run for them.

    Example:
        Devices(gpus=("4", "5"), cores=64)  # CUDA_VISIBLE_DEVICES=4,5: GPU 0 of a configuration is the machine's 4
    """

    gpus: tuple[str, ...] = ()  # the name of each in CUDA_VISIBLE_DEVICES: a number or "GPU-…"
    cores: int = 1
    hides_some: bool = False  # this machine has more GPUs than CUDA_VISIBLE_DEVICES names
    driver: str | None = None  # version of the kernel module; None if /proc does not say, as in WSL2
    cuda: int | None = None  # newest CUDA that the driver's library offers: 13000 is 13.0
    cuda_error: int = 0  # the driver's reason not to start CUDA
    capabilities: tuple[Capability, ...] = ()  # compute capability of each of `gpus`; empty if unknown

    @property
    def num_gpus(self) -> int:
        return len(self.gpus)

    def known_capabilities(self, ids: Iterable[int]) -> dict[int, Capability]:
        """Return the compute capability of each of these GPUs that is known."""
        return {gpu: self.capabilities[gpu] for gpu in ids if 0 <= gpu < len(self.capabilities)}

    def have_bfloat16(self, ids: Iterable[int]) -> bool:
        """Return whether these GPUs compute in bfloat16, as is assumed of unknown ones."""
        return all(capability >= BFLOAT16_CAPABILITY for capability in self.known_capabilities(ids).values())


def detect_devices(
    environ: Mapping[str, str] = os.environ,
    dev: Path = Path("/dev"),
    version: Path = Path("/proc/driver/nvidia/version"),
    library: str = CUDA,
) -> Devices:
    count = _count_gpus(dev)
    gpus = _visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), count)

    # Without GPUs there is no driver to ask, and no process to start for it.
    if not gpus:
        return Devices(cores=_count_cores())

    cuda, error, capabilities = _ask_cuda(environ, library)
    return Devices(
        gpus=gpus,
        cores=_count_cores(),
        hides_some=len(gpus) < count,
        driver=_driver_version(version),
        cuda=cuda,
        cuda_error=error,
        # CUDA may list other GPUs than were counted here, so that its answers cannot be assigned to ours.
        capabilities=capabilities if len(capabilities) == len(gpus) else (),
    )


def _count_gpus(dev: Path) -> int:
    return sum(bool(re.fullmatch(r"nvidia\d+", entry.name)) for entry in dev.glob("nvidia*"))


def _visible_gpus(visible: str | None, count: int) -> tuple[str, ...]:
    """Return the visible GPUs as CUDA reads the variable: unset shows all; the list ends at the first invalid entry."""
    if visible is None:
        return tuple(map(str, range(count)))
    names = [entry.strip() for entry in visible.split(",")]
    valid = [name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < count) for name in names]
    return tuple(names[: [*valid, False].index(False)]) if count else ()


def _driver_version(file: Path) -> str | None:
    """Read the kernel module's version.

    Example:
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)"
    """
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(\.\d+)+)", file.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _ask_cuda(environ: Mapping[str, str], library: str) -> tuple[int | None, int, tuple[Capability, ...]]:
    """Return the newest CUDA that the driver offers, its error, and the visible GPUs' compute capabilities.

    A process of its own asks: CUDA reads CUDA_VISIBLE_DEVICES once, when it starts, and commands set it later.
    """
    command = [sys.executable, "-I", "-S", __file__, library]
    try:
        ended = subprocess.run(command, env=environ, capture_output=True, timeout=ASK_S, check=True)
        cuda, error, capabilities = json.loads(ended.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):  # no such library, or a driver that does not answer
        return None, 0, ()
    return cuda, error, tuple((major, minor) for major, minor in capabilities)


def ask_cuda(library: str) -> tuple[int, int, list[Capability]]:
    """Return what `_ask_cuda` does, from the driver's library itself. Raises: OSError if it is not there or fails."""
    cuda, number = ctypes.CDLL(library), ctypes.c_int()

    def get(function: str, *arguments: int) -> int:
        if code := getattr(cuda, function)(ctypes.byref(number), *arguments):
            raise OSError(f"{function} returned {code}")
        return number.value

    # The version is known even if CUDA does not start.
    offers, error = get("cuDriverGetVersion"), cuda.cuInit(0)

    gpus = [] if error else [get("cuDeviceGet", at) for at in range(get("cuDeviceGetCount"))]
    major, minor = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    attribute = "cuDeviceGetAttribute"
    return offers, error, [(get(attribute, major, gpu), get(attribute, minor, gpu)) for gpu in gpus]


def _count_cores() -> int:
    """Return the number of cores that this process may use, limited by a container's quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or the quota is "max"
        return allowed


if __name__ == "__main__":
    print(json.dumps(ask_cuda(sys.argv[1])))
