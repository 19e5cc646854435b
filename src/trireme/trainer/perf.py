"""How fast a step was, in units that can be compared."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "L40": 181e12, "4090": 165e12}
"""Dense bf16, without sparsity, from the makers' data sheets."""


def flops_per_token(model: PreTrainedModel, num_parameters: int, mean_length: float) -> float:
    """Forward and backward: 6 per parameter, plus attention's 12 * layers * hidden * length / 2 (causal).

    Kaplan et al. 2020 (arXiv 2001.08361, table 1), with the attention term of Chowdhery et al. 2022 (PaLM, appendix B).
    """
    config = model.config.get_text_config()
    attention = 6 * config.num_hidden_layers * config.hidden_size * mean_length
    return 6 * num_parameters + attention


def peak_flops() -> float | None:
    """Of one device; None where the device is not in the table (CPUs never are)."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def throughput(*, tokens: int, seconds: float, flops: float, world_size: int) -> dict[str, float]:
    """`perf/tokens_per_s` over all ranks, and `perf/mfu` where the device's peak is known."""
    rate = tokens / max(seconds, 1e-9)
    peak = peak_flops()
    return {"perf/tokens_per_s": rate} | ({"perf/mfu": rate * flops / (peak * world_size)} if peak else {})
