"""The error for a trainer that ran out of memory: which settings are left to change, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import torch

from trireme.base.errors import ConfigError
from trireme.config.sft import SftConfig
from trireme.config.trainer import TrainerConfig

SMALL_CHUNK = 256
NUM_PROPOSALS = 4


@contextmanager
def explain_out_of_memory(
    table: str, config: TrainerConfig | SftConfig, *, seq_len: int, device: str
) -> Iterator[None]:
    """Turn torch's out-of-memory error into proposals, as the same configuration would run out of memory again.

    Args:
        table: the user's table of `config`, with a dot at its end; empty for the top of the file.

    Raises:
        ConfigError: instead of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        left = proposals(table, config, seq_len=seq_len, on_gpu=device == "cuda")
        listed = "\n".join(f"  - {proposal}" for proposal in islice(left, NUM_PROPOSALS))
        raise ConfigError(
            f"The trainer ran out of memory: {' '.join(str(error).split())[:300]}\n"
            f"Expected a step to fit. What is left to change, the cheapest first:\n{listed}\n"
            "`trireme plan @ CONFIG` shows what takes how much, and what each of these saves."
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether torch lacked memory, of a GPU or of the machine."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def proposals(table: str, config: TrainerConfig | SftConfig, *, seq_len: int, on_gpu: bool) -> Iterator[str]:
    """Yield the settings that could still save memory."""
    model, row = config.model, config.micro_batch_tokens or seq_len
    if model.ac is None or model.ac.freq > 1 or model.ac.mode == "selective":
        yield f'`[{table}model.ac]` with `freq = 1`, `mode = "full"`: every layer is recomputed in the backward pass'
    if row > seq_len:
        yield f"`{table}micro_batch_tokens = {seq_len}`: shorter rows (now {row} tokens)"
    if on_gpu and model.optimization_dtype == "float32":
        yield f'`{table}model.optimization_dtype = "bfloat16"`: half the activations'
    if model.head_chunk > SMALL_CHUNK:
        yield f"`{table}model.head_chunk = {SMALL_CHUNK}`: fewer logits at once (now of {model.head_chunk} tokens)"
    if on_gpu and not model.activation_offload:
        yield f"`{table}model.activation_offload = true`: activations wait in CPU memory"
    if model.lora is None:
        yield f"`[{table}model.lora]`: adapters alone have gradients and an optimizer"
        if config.optim.type == "adamw":
            yield f'`{table}optim.type = "adamw_8bit"`: a quarter of the optimizer\'s state'
    if on_gpu and not model.fsdp_cpu_offload:
        yield f"`{table}model.fsdp_cpu_offload = true`: parameters and optimizer state in CPU memory"
    if model.dp_replicate > 1:
        yield f"`{table}model.dp_replicate = 1`: each rank holds a smaller part of the model"
    yield f"more ranks, which share the model; or `{table}model.cp`, so that they share a row too"
    yield f"a smaller `seq_len` (now {seq_len})"
