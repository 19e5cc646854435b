"""Conversations about pictures with every answer for each picture, to warm a model up before reinforcement learning.

The model learns which words are answers, and nothing about pictures: each colour is equally often the answer to each
of them. Reinforcement learning teaches it to look.
"""

from __future__ import annotations

import runpy
from pathlib import Path

ENVIRONMENT = Path(__file__).parents[2] / "environments/examples/color_squares.py"


def conversations(num_pictures: int = 300, seed: int = 1) -> list[dict]:
    squares = runpy.run_path(str(ENVIRONMENT))
    return [
        {"messages": [*example["prompt"], {"role": "assistant", "content": color}]}
        for example in squares["dataset"](num_pictures, seed)
        for color in squares["COLORS"]
    ]
