"""Tensors in bytes, to the bit: what changed in them, their fingerprint, and two moments in 8 bits each."""

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trireme.algo import digest, patch
from trireme.algo.digest import model_digest, tensor_digest
from trireme.algo.patch import Form, Patch, apply_patch, build_patch, changed, to_bytes, to_integers, whole_patch
from trireme.algo.weight_checks import first_difference
from trireme.trainer.optim.adamw_8bit import SPAN, decode, encode

DTYPES = [torch.uint8, torch.bool, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]


def random_bits(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits whatever: NaNs of all kinds, infinities, numbers below the smallest normal one."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).nbytes
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(to_bytes(one), to_bytes(other))


def patched(before: torch.Tensor, made: Patch, times: int = 1) -> torch.Tensor:
    found = before.clone()
    for _ in range(times):
        apply_patch(made, found)
    return found


@given(
    shape=st.sampled_from([[], [0], [0, 4], [1], [7], [8], [3, 5], [257], [40, 33]]),
    dtype=st.sampled_from(DTYPES),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.3, 0.95, 1.0]),
    seed=st.integers(0, 1000),
    times=st.sampled_from([1, 2]),
)
def test_a_patch_brings_every_bit_and_a_digest_is_the_documented_sum(shape, dtype, share, seed, times):
    before, fresh = random_bits(shape, dtype, seed), random_bits(shape, dtype, seed + 1)
    generator = torch.Generator().manual_seed(seed)
    is_fresh = (torch.rand(shape, generator=generator) < share).view(-1)
    after = torch.where(is_fresh, to_integers(fresh), to_integers(before)).view(dtype).view(shape)
    made = build_patch(after, changed(after, before))
    assert same_bits(patched(before, made, times), after)
    assert made.num_bytes <= after.nbytes
    assert (made.where.numel(), made.values.numel()) == patch.sizes_of(made.form, made.num_changed, after)
    assert made.num_changed == int((to_integers(before) != to_integers(after)).sum())
    assert tensor_digest(after) == digest_by_the_formula(after)


@pytest.mark.parametrize(
    ("num_values", "places", "form", "num_bytes"),
    [
        (1000, [], Form.GAPS, 0),
        (1000, [3, 7], Form.GAPS, 2 * (2 + 2)),
        (100_000, [99_999], Form.PLACES, 4 + 2),  # farther than two bytes can say
        (800, [*range(0, 800, 10)], Form.BITS, 100 + 2 * 80),
        (800, [*range(800)], Form.WHOLE, 1600),
        (800, [*range(750)], Form.WHOLE, 1600),  # bits and values: 100 + 1500, which is no less
        (800, [*range(749)], Form.BITS, 100 + 1498),
    ],
)
def test_the_form_with_the_fewest_bytes_is_taken(num_values, places, form, num_bytes):
    mask = torch.zeros(num_values, dtype=torch.bool)
    mask[places] = True
    made = build_patch(torch.ones(num_values, dtype=torch.bfloat16), mask)
    assert (made.form, made.num_bytes, made.num_changed) == (form, num_bytes, len(places))


def test_patch_holds_the_longest_gap_that_fits_in_two_bytes():
    before, after = torch.zeros(200_000), torch.zeros(200_000)
    after[[65_535, 131_070]] = 1.0
    made = build_patch(after, changed(after, before))
    assert made.form is Form.GAPS
    assert same_bits(patched(before, made), after)
    before, after = torch.zeros(4, 6), torch.arange(24.0).view(6, 4).T
    for made in (build_patch(after, changed(after, before)), whole_patch(after)):
        assert same_bits(patched(before, made), after.contiguous())


def digest_by_the_formula(tensor: torch.Tensor) -> str:
    """By numpy, whose unsigned integers wrap by themselves; the weights are splitmix64 of 0, 1, 2, …"""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(raw + bytes(-len(raw) % 8), dtype=np.int64)
    row, k = np.divmod(np.arange(len(words), dtype=np.uint64), np.uint64(digest.ROW))
    z = (k + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27)) * np.uint64(0x94D049BB133111EB)
    weights = (z ^ (z >> 31)) | 1
    total = int(((words ^ (words >> 29)).astype(np.uint64) * weights * (2 * row + 1)).sum())
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} {total}".encode()).hexdigest()[:32]


def test_tensor_digest_is_independent_of_chunks_and_memory_layout(monkeypatch):
    tensor = random_bits([4 * digest.ROW + 5], torch.float32, 0)
    expected = digest_by_the_formula(tensor)
    assert tensor_digest(tensor) == expected
    monkeypatch.setattr(digest, "_ROWS_AT_ONCE", {"cpu": 3})
    assert tensor_digest(tensor) == expected
    tensor = random_bits([8, 6], torch.float32, 0)
    strided = tensor.t().contiguous().t()
    assert not strided.is_contiguous()
    assert tensor_digest(strided) == tensor_digest(tensor) == tensor_digest(tensor.clone().requires_grad_())
    for start in range(1, 5):
        part = random_bits([21], torch.bfloat16, 0)[start : start + 16]
        assert tensor_digest(part) == tensor_digest(part.clone())


def test_model_digest_depends_on_names_but_not_on_their_order():
    digests = {"a": "1", "b": "2"}
    assert model_digest(digests) == model_digest({"b": "2", "a": "1"})
    assert len({model_digest(d) for d in [digests, {"a": "2", "b": "1"}, {"a": "1"}, {"a": "1", "c": "2"}]}) == 4
    assert first_difference(digests, dict(digests)) is None
    assert first_difference(digests, {"b": "2"}) == "a is missing"


def test_zeros_stay_zeros_and_nothing_else_becomes_one():
    """The square of a gradient of 1e-19 is about the smallest that float32 has."""
    mean, square = torch.zeros(1, 64), torch.zeros(1, 64)
    assert not any(decoded.any() for decoded in decode(*encode(mean, square, 2)))
    square[0, :3] = torch.tensor([1.0, 1e-38, 1e-20])
    found = decode(*encode(mean, square, 2, 0.0))[1]
    assert torch.equal(found > 0, square > 0)
    assert float(found[0, 1].sqrt()) == pytest.approx(math.exp(-SPAN), rel=1e-4)  # raised to what has a code of its own
