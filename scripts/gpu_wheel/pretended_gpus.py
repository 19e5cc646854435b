"""A platform for vLLM (its entry point `vllm.platform_plugins`): NVIDIA GPUs of one kind, on a machine that has none.

It replaces what vLLM asks the driver through NVML. All else is vLLM's own platform for CUDA.
"""

from __future__ import annotations

import os

from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability

GIB = 80
MULTIPROCESSORS = 132


def register() -> str:
    return f"{__name__}.{PretendedGpus.__name__}"


class PretendedGpus(CudaPlatformBase):
    """GPUs of the compute capability in PRETENDED_CAPABILITY, as many as PRETENDED_GPUS names."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*map(int, os.environ["PRETENDED_CAPABILITY"].split(".")))

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return f"pretended GPU of compute capability {os.environ['PRETENDED_CAPABILITY']}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return GIB << 30

    @classmethod
    def device_count(cls) -> int:
        return len(os.environ.get("PRETENDED_GPUS", "0").split(","))

    @classmethod
    def is_fully_connected(cls, device_ids: list[int]) -> bool:
        return True

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return MULTIPROCESSORS

    @classmethod
    def is_integrated_gpu(cls, device_id: int = 0) -> bool:
        return False
