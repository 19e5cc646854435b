"""Memory of the trainer: its share of a GPU that the engine uses too, and the error when it runs out.

What to change, and how much it saves, is worked out by the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trireme.algo.model.chips import CUDA_BYTES
from trireme.base.errors import ConfigError


def leave_to_engine(share: float, device: torch.device) -> None:
    """Limit torch's allocator on a GPU of which the engine has this share, so that an engine finds its memory whenever
    it starts: before the trainer, at the same time, or again while the trainer is at work."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(max(0.0, 1 - share - CUDA_BYTES / total), device)


@contextmanager
def explain_out_of_memory(table: str) -> Iterator[None]:
    """Turn torch's out-of-memory error into what to change, as the same configuration would run out of memory again.

    Args:
        table: the user's table of the trainer, with a dot at its end; empty for the top of the file.

    Raises:
        ConfigError: instead of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"The trainer ran out of memory: {' '.join(str(error).split())[:300]}\n"
            "Expected a step to fit. What needs less, the cheapest first:\n"
            f"  - `[{table}model.ac]` with `freq = 1`: every layer is recomputed in the backward pass\n"
            f"  - a smaller `{table}micro_batch_tokens`: shorter rows, of `seq_len` tokens at least\n"
            f"  - on GPUs `{table}model.activation_offload = true`\n"
            f"  - `[{table}model.lora]`, more ranks, or a smaller `seq_len`\n"
            "  - on a GPU that an engine shares, a smaller `inference.gpu_memory_utilization`, its part\n"
            "`trireme plan @ CONFIG` shows what takes how much, and what each of these saves."
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether torch lacked memory, of a GPU or of the machine."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
