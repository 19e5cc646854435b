"""The learning rate as a function of the step."""

from __future__ import annotations

import math


def lr_factor(step: int, *, kind: str, warmup_steps: int, max_steps: int, floor: float) -> float:
    """What the peak learning rate is multiplied by at optimizer step `step` (0-based).

    Rises linearly over `warmup_steps`, the first step already above 0; then stays (`constant`) or falls to `floor`
    at `max_steps` along a line or half a cosine.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    shape = 1.0 - done if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (1.0 - floor) * shape
