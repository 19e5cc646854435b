"""The GPUs and CPU cores that a run may use, found without importing torch (which takes seconds)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Devices:
    """The GPUs and cores that a run may use.

    Example:
        Devices(gpus=("4", "5"), cores=64)  # CUDA_VISIBLE_DEVICES=4,5: GPU 0 of a configuration is the machine's 4
    """

    gpus: tuple[str, ...] = ()  # what CUDA_VISIBLE_DEVICES calls each: a number or a "GPU-…" name
    cores: int = 1

    @property
    def num_gpus(self) -> int:
        return len(self.gpus)


def detect_devices(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> Devices:
    return Devices(gpus=_visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), _count_gpus(dev)), cores=_count_cores())


def _count_gpus(dev: Path) -> int:
    return sum(bool(re.fullmatch(r"nvidia\d+", entry.name)) for entry in dev.glob("nvidia*"))


def _visible_gpus(visible: str | None, count: int) -> tuple[str, ...]:
    """Return the visible GPUs as CUDA reads the variable: unset shows all; the list ends at the first invalid entry."""
    if visible is None:
        return tuple(map(str, range(count)))
    names = [entry.strip() for entry in visible.split(",")]
    valid = [name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < count) for name in names]
    return tuple(names[: [*valid, False].index(False)]) if count else ()


def _count_cores() -> int:
    """Return the number of cores that this process may use, limited by a container's quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or the quota is "max"
        return allowed
