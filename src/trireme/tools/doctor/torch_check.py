"""Print what torch finds on this machine, as a line of JSON: `python -m trireme.tools.doctor.torch_check`.

Each device multiplies two matrices whose product and gradient are known to the bit. With `--share`, another process
reads memory of the first GPU by a handle, as engines do with `weight_broadcast.type = "ipc"`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from trireme.algo.digest import tensor_digest
from trireme.messages import TensorSpec
from trireme.transport.weights.backends import IpcReceiver, IpcSender

SIDE = 256
SHARED = TensorSpec("shared", "float32", [SIDE, SIDE])
SHARE_S = 120.0


def describe_gpu(number: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    facts = {"name": properties.name, "capability": f"{properties.major}.{properties.minor}"}
    return facts | {"memory": total, "free": free, "computes": computes(f"cuda:{number}")}


def computes(device: str) -> bool:
    """Whole numbers below 2^24 are exact in float32, in whatever order they are added."""
    # every entry of the product is SIDE times a small whole number, so rounding cannot hide an error
    rows = torch.arange(SIDE, dtype=torch.float32, device=device).reshape(SIDE, 1) % 7
    left = rows.expand(SIDE, SIDE).contiguous().requires_grad_()
    product = left @ torch.ones(SIDE, SIDE, device=device)
    product.sum().backward()
    is_right = bool((product == rows * SIDE).all()) and left.grad is not None
    return is_right and bool((left.grad == SIDE).all())


def share_error() -> str:
    """Return why another process cannot read memory of the first GPU; empty if it reads what is there."""
    sender, tensor = IpcSender(), torch.arange(SIDE * SIDE, dtype=torch.float32, device="cuda:0").reshape(SIDE, SIDE)
    try:
        payload = json.dumps(sender.send([SHARED], [tensor]))
        command = [sys.executable, "-m", "trireme.tools.doctor.torch_check", "--receive"]
        ended = subprocess.run(command, input=payload, capture_output=True, text=True, timeout=SHARE_S)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return " ".join(str(error).split())
    if ended.returncode:
        return ended.stderr.strip().rpartition("\n")[2]
    return "" if ended.stdout.strip() == tensor_digest(tensor) else "it reads other values"


def receive() -> str:
    received = dict(IpcReceiver(torch.device("cuda", 0)).tensors([SHARED], json.load(sys.stdin)))
    return tensor_digest(received[SHARED.name])


if __name__ == "__main__":
    if "--receive" in sys.argv:
        print(receive())
        sys.exit()

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    if "--share" in sys.argv and count:
        facts["share_error"] = share_error()
    print(json.dumps(facts | {"computes": computes("cpu"), "gpus": list(map(describe_gpu, range(count)))}))
