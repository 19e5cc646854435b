"""What torch makes of this machine, as a line of JSON: `python -m trireme.tools.replay.about`, for `trireme doctor`.

Each device multiplies two matrices whose product is known to the bit, and its gradient.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

SIDE = 256


def about() -> dict[str, Any]:
    gpus = [_gpu(number) for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "threads": torch.get_num_threads(),
        "computes": computes("cpu"),
        "gpus": gpus,
    }


def _gpu(number: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    capability = f"{properties.major}.{properties.minor}"
    facts = {"name": properties.name, "capability": capability, "memory": total, "free": free}
    return facts | {"computes": computes(f"cuda:{number}"), "bfloat16": properties.major >= 8}


def computes(device: str) -> bool:
    """Whole numbers below 2^24 are exact in float32, in whatever order they are added."""
    rows = torch.arange(SIDE, dtype=torch.float32, device=device).reshape(SIDE, 1) % 7
    left = rows.expand(SIDE, SIDE).contiguous().requires_grad_()
    right = torch.ones(SIDE, SIDE, device=device)
    product = left @ right
    product.sum().backward()
    is_right = bool((product == rows * SIDE).all()) and left.grad is not None
    return is_right and bool((left.grad == SIDE).all())


if __name__ == "__main__":
    began = time.monotonic()
    print(json.dumps(about() | {"seconds": time.monotonic() - began}))
