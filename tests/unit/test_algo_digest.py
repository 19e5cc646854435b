"""The fingerprint of tensors: what it must notice, and what it is."""

from __future__ import annotations

import hashlib
import struct
from functools import cache

import numpy as np
import pytest
import torch

from trireme.algo import digest
from trireme.algo.compare import first_difference
from trireme.algo.digest import model_digest, tensor_digest

DTYPES = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.float64]


def digest_by_the_formula(tensor: torch.Tensor) -> str:
    """Python's own integers, from the raw bytes; the weights by numpy's generator-free arithmetic on uint64."""
    raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    raw += bytes(-len(raw) % 8)
    total = 0
    for index, (word,) in enumerate(struct.iter_unpack("<q", raw)):
        row, k = divmod(index, digest.ROW)
        total += (word ^ (word >> 29)) * weight(k) * (2 * row + 1)
    text = f"{tensor.dtype} {list(tensor.shape)} {total % 2**64}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def weight(k: int) -> int:
    """splitmix64 by numpy, whose unsigned integers wrap by themselves."""
    with np.errstate(over="ignore"):
        z = np.uint64(k + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int(z ^ (z >> np.uint64(31))) | 1


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (1,), (), (0, 3)], ids=str)
def test_a_digest_is_the_documented_sum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(dtype, *shape)
    assert tensor_digest(tensor) == digest_by_the_formula(tensor)


def test_a_digest_does_not_depend_on_how_much_is_summed_at_once_nor_on_where_values_lie(monkeypatch) -> None:
    tensor = random_tensor(torch.float32, 4 * digest.ROW + 5)
    expected = digest_by_the_formula(tensor)
    assert tensor_digest(tensor) == expected
    monkeypatch.setattr(digest, "_ROWS_AT_ONCE", {"cpu": 3})
    assert tensor_digest(tensor) == expected
    tensor = random_tensor(torch.float32, 8, 6)
    strided = tensor.t().contiguous().t()
    assert not strided.is_contiguous()
    assert tensor_digest(strided) == tensor_digest(tensor) == tensor_digest(tensor.clone().requires_grad_())
    for start in range(1, 5):
        part = random_tensor(torch.bfloat16, 21)[start : start + 16]
        assert tensor_digest(part) == tensor_digest(part.clone())


def test_a_models_digest_depends_on_names_and_not_on_their_order_and_a_difference_is_named() -> None:
    digests = {"a": "1", "b": "2"}
    assert model_digest(digests) == model_digest({"b": "2", "a": "1"})
    assert len({model_digest(d) for d in [digests, {"a": "2", "b": "1"}, {"a": "1"}, {"a": "1", "c": "2"}]}) == 4
    assert first_difference(digests, dict(digests)) is None
    assert first_difference(digests, {"a": "x", "b": "y"}) == "a has digest x, expected 1"
    assert first_difference(digests, {"b": "2"}) == "a is missing"
    assert first_difference(digests, digests | {"c": "3"}) == "c was not sent"
