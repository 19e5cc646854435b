"""Memory, speed and bandwidth of GPUs, from their makers' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1 << 30

CUDA_BYTES = 1.2 * GIB  # taken by each rank besides tensors: CUDA, its libraries' workspaces, NCCL


@dataclass(frozen=True)
class Chip:
    name: str
    memory: float  # bytes
    flops: float  # per second, dense bfloat16
    flops_float32: float
    bandwidth: float  # bytes per second, of its memory

    def peak(self, value_bytes: int) -> float:
        return self.flops if value_bytes == 2 else self.flops_float32


def _chip(name: str, memory_gib: float, teraflops: float, float32: float, terabytes_per_s: float) -> Chip:
    return Chip(name, memory_gib * GIB, teraflops * 1e12, float32 * 1e12, terabytes_per_s * 1e12)


CHIPS = {
    "b200": _chip("B200", 178, 2250, 75, 8.0),
    "h200": _chip("H200", 139, 989, 67, 4.8),
    "h100": _chip("H100", 79, 989, 67, 3.35),
    "h100-pcie": _chip("H100 PCIe", 79, 756, 51, 2.0),
    "a100": _chip("A100", 79, 312, 19.5, 2.0),
    "a100-40": _chip("A100 40GB", 39, 312, 19.5, 1.55),
    "l40": _chip("L40", 44, 181, 90.5, 0.864),
    "l40s": _chip("L40S", 44, 362, 91.6, 0.864),
    "4090": _chip("RTX 4090", 23.5, 165, 82.6, 1.0),
}
"""GPUs by the name that `--gpu` takes. The memory is what the driver reports, a little less than advertised."""


def chip_called(name: str) -> Chip | None:
    """Return the GPU that a driver reports by this name.

    Example:
        chip_called("NVIDIA A100-SXM4-40GB").name  # "A100 40GB"
    """
    words = set(re.split(r"[\s-]+", name.lower().replace("gb200", "b200")))  # a GB200 has the same chips
    if "a100" in words and "40gb" in words:
        return CHIPS["a100-40"]
    if "h100" in words and "pcie" in words:
        return CHIPS["h100-pcie"]
    return next((chip for key, chip in CHIPS.items() if key in words), None)
