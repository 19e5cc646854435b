"""Performance metrics of a step: throughput, MFU and memory."""

from __future__ import annotations

import resource
from contextlib import suppress

import torch
from transformers import PreTrainedModel

from trireme.algo.model import flops
from trireme.algo.model.architecture import architecture_of, experts_used
from trireme.algo.model.chips import GIB, chip_called
from trireme.config.trainer import TOWER


def flops_per_token(model: PreTrainedModel, mean_length: float) -> float:
    """Return the operations of the forward and backward pass per token; see `algo.model.flops`."""
    attention = 0.0
    with suppress(KeyError, TypeError, AttributeError):  # Mamba-2 has no heads
        attention = flops.attention_flops(architecture_of(model.config.get_text_config().to_dict()), mean_length)
    return flops.flops_per_token(*matrix_parameters(model), attention=attention)


def matrix_parameters(model: PreTrainedModel) -> tuple[float, float]:
    """Return the number of parameters that a token is multiplied with, and how many of these are trained.

    An embedding counts only if it is the head too, and a vision encoder not at all, as tokens do not pass through it.
    Of experts, held as [experts, in, out], those count that a token is sent to.
    """
    used = experts_used(model.config.get_text_config().to_dict())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    total = trained = 0.0
    for name, parameter in model.named_parameters():
        is_lookup_only = parameter is embedding.weight and (head is None or parameter is not head.weight)
        if parameter.ndim > 1 and not is_lookup_only and not name.startswith(f"{TOWER}."):
            is_of_experts = parameter.ndim == 3 and ".experts." in name
            share = used / parameter.shape[0] if is_of_experts else 1.0
            total += parameter.numel() * share
            trained += parameter.numel() * share * parameter.requires_grad
    return total, trained


def throughput(*, tokens: int, seconds: float, flops: float, world_size: int) -> dict[str, float]:
    """Return `perf/tokens_per_s` over all ranks, and `perf/mfu` if the device's peak is known."""
    rate = tokens / max(seconds, 1e-9)
    chip = chip_called(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return {"perf/tokens_per_s": rate} | ({"perf/mfu": rate * flops / (chip.flops * world_size)} if chip else {})


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return `perf/peak_memory_gib` of this rank: on a GPU that of tensors since the last call, on a CPU that of the
    process since its start. On a GPU also `perf/reserved_memory_gib`, with what the allocator keeps for later."""
    if device.type != "cuda":
        return {"perf/peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    peaks = {
        "perf/peak_memory_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "perf/reserved_memory_gib": torch.cuda.max_memory_reserved(device) / GIB,
    }
    torch.cuda.reset_peak_memory_stats(device)
    return peaks
