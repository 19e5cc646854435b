"""The fingerprint of tensors: what it must notice, and what it is."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import pytest
import torch

from trireme.algo import digest
from trireme.algo.compare import first_difference
from trireme.algo.digest import model_digest, tensor_digest

SMALL = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float16]
DTYPES = sorted([*SMALL, torch.int32, torch.float32, torch.int64, torch.float64], key=str)


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
def test_it_is_the_documented_sum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(dtype, *shape)
    assert tensor_digest(tensor) == digest_by_the_formula(tensor)


def test_it_does_not_depend_on_how_much_is_summed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor(torch.float32, 7 * digest.ROW + 5)
    row_by_row = tensor_digest(tensor)
    assert row_by_row == digest_by_the_formula(tensor)
    monkeypatch.setattr(digest, "_ROWS_AT_ONCE", {"cpu": 3})
    assert tensor_digest(tensor) == row_by_row


def test_two_words_that_differ_in_their_sign_alone_show_when_exchanged() -> None:
    there, back = torch.tensor([[1, -(2**63) + 1]]), torch.tensor([[-(2**63) + 1, 1]])
    assert tensor_digest(there) != tensor_digest(back)


def test_the_same_values_have_the_same_digest_however_they_lie_in_memory() -> None:
    tensor = random_tensor(torch.float32, 8, 6)
    strided = tensor.t().contiguous().t()
    assert not strided.is_contiguous()
    assert tensor_digest(strided) == tensor_digest(tensor) == tensor_digest(tensor.clone().requires_grad_())


@pytest.mark.parametrize("start", range(1, 5))
def test_it_does_not_depend_on_where_in_memory_a_tensor_begins(start: int) -> None:
    part = random_tensor(torch.bfloat16, 21)[start : start + 16]
    assert tensor_digest(part) == tensor_digest(part.clone())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_two_values_exchanged_show(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, 16, 16)
    seen = {tensor_digest(tensor)}
    for other in range(1, 256):
        exchanged = tensor.clone().reshape(-1)
        exchanged[[0, other]] = exchanged[[other, 0]]
        if not torch.equal(exchanged, tensor.reshape(-1)):
            seen.add(tensor_digest(exchanged.reshape(16, 16)))
    assert len(seen) > 200


@pytest.mark.parametrize("bit", range(16))
def test_one_flipped_bit_shows(bit: int) -> None:
    tensor = random_tensor(torch.bfloat16, 4, 5)
    flipped = tensor.clone()
    mask = torch.tensor((1 << bit) - (1 << 16 if bit == 15 else 0), dtype=torch.int16)
    flipped.view(torch.int16)[2, 3] ^= mask
    assert tensor_digest(flipped) != tensor_digest(tensor)


def test_another_dtype_or_shape_of_the_same_bytes_shows() -> None:
    tensor = random_tensor(torch.float32, 4, 6)
    others = [tensor.view(torch.int32), tensor.reshape(6, 4), tensor.reshape(-1), tensor.reshape(1, 4, 6)]
    assert len({tensor_digest(other) for other in [tensor, *others]}) == 5


def test_zero_and_minus_zero_differ_and_nan_equals_itself() -> None:
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    assert tensor_digest(torch.tensor([math.nan])) == tensor_digest(torch.tensor([math.nan]))


def test_a_models_digest_depends_on_names_and_not_on_their_order() -> None:
    digests = {"a": "1", "b": "2"}
    assert model_digest(digests) == model_digest({"b": "2", "a": "1"})
    assert len({model_digest(d) for d in [digests, {"a": "2", "b": "1"}, {"a": "1"}, {"a": "1", "c": "2"}]}) == 4


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ({"norm": "ab", "head": "cd"}, None),
        ({"norm": "ab", "head": "ef"}, "head has digest ef, expected cd"),
        ({"norm": "xx", "head": "ef"}, "norm has digest xx, expected ab"),
        ({"head": "cd"}, "norm is missing"),
        ({"norm": "ab", "head": "cd", "bias": "gh"}, "bias was not sent"),
    ],
)
def test_the_first_difference_is_named(found: dict[str, str], difference: str | None) -> None:
    assert first_difference({"norm": "ab", "head": "cd"}, found) == difference
