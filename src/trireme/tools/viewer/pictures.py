"""Small pictures of numbers in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"


def histogram(values: Sequence[float], width: int = 10) -> str:
    """How many values lie in each of `width` equal parts from the lowest to the highest.

    Example:
        histogram([0, 0, 0, 0.5, 1], width=3)  # "█▃▃"
    """
    if not values:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    counts = [0] * width
    for value in values:
        counts[min(width - 1, int(width * (value - low) / span))] += 1
    most = max(counts)
    return "".join(BLOCKS[math.ceil(8 * count / most)] for count in counts)
