"""What a plan is made for: this machine, or one that was described by flags."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from trireme.algo.chips import CHIPS, GIB, Chip, chip_called
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError

ASK_S = 5.0
HOST_GIB_PER_GPU = 128.0  # where nothing is known of the machine that GPUs are in

# One core of a server, as this trainer and vLLM's CPU build were seen to use it.
CORE_FLOPS = 40e9
CORE_BANDWIDTH = 8e9


@dataclass(frozen=True)
class Machine:
    """Of GPUs that are alike, or of cores."""

    chip: Chip  # a GPU, or all cores together
    num_gpus: int  # 0 on CPU
    cores: int
    host_memory: float  # bytes, of one node
    gpus_per_node: int
    is_here: bool  # else it was described

    @property
    def is_on_cpu(self) -> bool:
        return self.num_gpus == 0

    @property
    def devices(self) -> Devices:
        return Devices(gpus=tuple(map(str, range(self.num_gpus))), cores=self.cores)

    @property
    def memory(self) -> float:
        """Of one device."""
        return self.chip.memory


def describe_machine(
    here: Devices,
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    memory_gib: float | None = None,
    host_memory_gib: float | None = None,
) -> Machine:
    """
    Args:
        here: what was found on this machine: the answer where nothing else is said.
        gpu: a name of `CHIPS`.
        memory_gib: of each GPU; of the machine where there are none.

    Raises:
        ConfigError: the GPU is not in the table, and nothing says how much memory it has.
    """
    count = gpus if gpus is not None else (1 if gpu else 0) or here.num_gpus
    described = bool(gpu) or gpus is not None
    if count == 0:
        return _of_cores(here.cores, memory_gib or host_memory_gib, is_here=not described)
    chip = _chip(gpu, memory_gib, described=described)
    per_node = gpus_per_node or min(count, 8)
    host = host_memory_gib * GIB if host_memory_gib else HOST_GIB_PER_GPU * per_node * GIB
    if not described and not host_memory_gib:
        host = host_memory()
    return Machine(chip, count, here.cores, host, per_node, is_here=not described)


def _of_cores(cores: int, memory_gib: float | None, *, is_here: bool) -> Machine:
    memory = memory_gib * GIB if memory_gib else host_memory()
    chip = Chip("CPU", memory, cores * CORE_FLOPS, cores * CORE_FLOPS, cores * CORE_BANDWIDTH)
    return Machine(chip, 0, cores, memory, 1, is_here=is_here and memory_gib is None)


def _chip(gpu: str | None, memory_gib: float | None, *, described: bool) -> Chip:
    chip = CHIPS.get(gpu.lower()) if gpu else None if described else find_chip()
    if gpu and chip is None and memory_gib is None:
        raise ConfigError(
            f"--gpu {gpu} - expected one of {', '.join(CHIPS)}. Take one of these, or add `--memory-gib` to plan for a "
            "GPU that is not in the table."
        )
    if chip is None and memory_gib is None:
        raise ConfigError(
            "No GPU was named, and none was found here whose memory is known - expected a name for each of them. "
            "Add `--gpu h100`, or `--memory-gib 80`."
        )
    known = chip or CHIPS["h100"]
    memory = memory_gib * GIB if memory_gib else known.memory
    return replace(known, name=chip.name if chip else gpu or "GPU", memory=memory)


def find_chip() -> Chip | None:
    """The first GPU of this machine, as its driver reports it; None where there is no driver that answers."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True).stdout
        name, mebibytes = answer.splitlines()[0].rsplit(",", 1)
        memory = float(mebibytes) * (1 << 20)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    like = chip_called(name) or CHIPS["h100"]
    return replace(like, name=name.strip(), memory=memory)


def host_memory(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> float:
    """That this process may use; a container's limit counts where it is smaller."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", proc.read_text(), re.MULTILINE)
    total = int(found[1]) * 1024.0 if found else float("inf")
    try:
        return min(total, float(cgroup.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or the limit is "max"
        return total
