"""Print what torch finds on this machine, as a line of JSON: `python -m trireme.tools.doctor.torch_check`.

Each device multiplies two matrices whose product and gradient are known to the bit.
"""

from __future__ import annotations

import json
from typing import Any

import torch

SIDE = 256


def describe_gpu(number: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    facts = {"name": properties.name, "capability": f"{properties.major}.{properties.minor}"}
    return facts | {"memory": total, "free": free, "computes": computes(f"cuda:{number}")}


def computes(device: str) -> bool:
    """Whole numbers below 2^24 are exact in float32, in whatever order they are added."""
    rows = torch.arange(SIDE, dtype=torch.float32, device=device).reshape(SIDE, 1) % 7
    left = rows.expand(SIDE, SIDE).contiguous().requires_grad_()
    product = left @ torch.ones(SIDE, SIDE, device=device)
    product.sum().backward()
    is_right = bool((product == rows * SIDE).all()) and left.grad is not None
    return is_right and bool((left.grad == SIDE).all())


if __name__ == "__main__":
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    print(json.dumps(facts | {"computes": computes("cpu"), "gpus": list(map(describe_gpu, range(count)))}))
