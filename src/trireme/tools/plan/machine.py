"""The machine that a plan is made for: this one, or one that flags describe."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from trireme.algo.model.chips import CHIPS, GIB, Chip, chip_called
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError

ASK_S = 5.0
GPUS_PER_NODE, HOST_GIB_PER_GPU = 8, 128.0  # a common node, assumed for GPUs that are not in this machine

# One core of a server, as this trainer and vLLM's CPU build were seen to use it.
CORE_FLOPS = 40e9
CORE_BANDWIDTH = 8e9


@dataclass(frozen=True)
class Machine:
    """GPUs that are alike, or cores."""

    chip: Chip  # a GPU, or all cores together
    num_gpus: int  # 0 on CPU
    cores: int
    host_memory: float  # bytes, of one node
    gpus_per_node: int

    @property
    def is_on_cpu(self) -> bool:
        return self.num_gpus == 0

    @property
    def devices(self) -> Devices:
        return Devices(gpus=tuple(map(str, range(self.num_gpus))), cores=self.cores)


def describe_machine(
    here: Devices, *, gpu: str | None = None, gpus: int | None = None, memory_gib: float | None = None
) -> Machine:
    """Describe the machine that a plan is made for.

    Args:
        here: what was found on this machine, for what no other argument says.
        gpu: a name of `CHIPS`.
        memory_gib: memory of each GPU, or of the machine if it has none.

    Raises: ConfigError if the GPU is not in the table, and nothing says how much memory it has.
    """
    count = gpus if gpus is not None else (1 if gpu else 0) or here.num_gpus
    is_here = not gpu and count <= here.num_gpus

    # Without GPUs all cores together are the chip, and the machine's memory is its memory.
    if count == 0:
        memory, flops = memory_gib * GIB if memory_gib else host_memory(), here.cores * CORE_FLOPS
        return Machine(Chip("CPU", memory, flops, flops, here.cores * CORE_BANDWIDTH), 0, here.cores, memory, 1)

    # The table describes GPUs that the user names. Others are like those that are here, which the driver describes.
    found = CHIPS.get(gpu.lower()) if gpu else find_chip(here.gpus[0]) if here.gpus else None
    if found is None and memory_gib is None:
        what = f"--gpu {gpu} is not in the table" if gpu else "No GPU was named, and none was found on this machine"
        raise ConfigError(f"{what} - expected one of {', '.join(CHIPS)}. Name one of these, or add `--memory-gib`.")

    # A GPU of known memory that is not in the table counts as an H100.
    known = found or CHIPS["h100"]
    memory = memory_gib * GIB if memory_gib else known.memory
    chip = replace(known, name=found.name if found else gpu or "GPU", memory=memory)

    per_node = min(count, GPUS_PER_NODE)
    host = host_memory() if is_here else HOST_GIB_PER_GPU * per_node * GIB
    return Machine(chip, count, here.cores, host, per_node)


def find_chip(gpu: str) -> Chip | None:
    """Return a GPU of this machine, as its driver reports it; None if no driver answers.

    Args:
        gpu: its number or UUID. Its memory is what programs can have: the driver keeps some to itself.
    """
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=name,memory.total,memory.reserved"]
    command.append("--format=csv,noheader,nounits")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True).stdout
        name, total, reserved = answer.splitlines()[0].rsplit(",", 2)
        # The driver reports MiB.
        memory = (float(total) - float(reserved)) * (1 << 20)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None

    # The driver does not report speeds. A GPU that is not in the table counts as an H100.
    like = chip_called(name) or CHIPS["h100"]
    return replace(like, name=name.strip(), memory=memory)


def host_memory() -> float:
    """Return the bytes that this process may use; a container's limit counts if it is smaller."""
    total = float(psutil.virtual_memory().total)
    try:
        return min(total, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no cgroup v2, or the limit is "max"
        return total
