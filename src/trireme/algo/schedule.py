"""The learning rate as a function of the step."""

from __future__ import annotations

import math


def lr_factor(step: int, *, kind: str, warmup_steps: int, max_steps: int, floor: float, decay_steps: int = 1) -> float:
    """What the peak learning rate is multiplied by at optimizer step `step` (0-based).

    Rises linearly over `warmup_steps`, the first step already above 0; then stays (`constant`), falls to `floor` at
    `max_steps` along a line or half a cosine, or stays until the last `decay_steps` and falls along a line in these
    (`wsd`: warm-up, stable, decay; Hu et al. 2024, arXiv 2404.06395, section 4.2, with the linear fall of Haegele et
    al. 2024, arXiv 2405.18392).

    Args:
        decay_steps: of `wsd`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    first = max(warmup_steps, max_steps - decay_steps) if kind == "wsd" else warmup_steps
    done = min(1.0, max(0, step - first) / max(1, max_steps - first))
    shape = 0.5 * (1.0 + math.cos(math.pi * done)) if kind == "cosine" else 1.0 - done
    return floor + (1.0 - floor) * shape
