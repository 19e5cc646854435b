"""The error for a trainer that ran out of memory. What to change, and how much it saves, is worked out by the plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trireme.base.errors import ConfigError


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
            "`trireme plan @ CONFIG` shows what takes how much, and what each of these saves."
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether torch lacked memory, of a GPU or of the machine."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
