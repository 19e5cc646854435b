"""A fingerprint of a tensor that comes out the same on any device.

Integer arithmetic modulo 2^64 on the raw bits, so neither the device nor the order of summation matters, and nothing
needs to leave the GPU but two numbers. It finds corruption, loss, exchange and reordering; it is no defence against
somebody who wants to deceive.
"""

from __future__ import annotations

import hashlib

import torch

_CHUNK = 1 << 22
_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)  # two odd constants (of splitmix64 and xxhash), as signed
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_digest(tensor: torch.Tensor) -> str:
    """32 hexadecimal digits from the values, their places, the dtype and the shape.

    For two multipliers m: with p = 2 i + 1 and y = (x_i + 1) p m, the sum over places i of (y xor (y >> 29)) p
    mod 2^64, where the shift keeps the sign. Each place has a weight of its own, so exchanged values show.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    sums = [0, 0]
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + chunk.numel(), device=bits.device, dtype=torch.int64) * 2 + 1
        for which, multiplier in enumerate(_MULTIPLIERS):
            mixed = (chunk + 1) * place * multiplier
            mixed = mixed ^ (mixed >> 29)
            sums[which] += int((mixed * place).sum())
    text = f"{tensor.dtype} {list(tensor.shape)} {sums[0] % 2**64} {sums[1] % 2**64}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def model_digest(digests: dict[str, str]) -> str:
    """One digest for all tensors, by name."""
    lines = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:32]
