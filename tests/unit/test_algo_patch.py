"""A patch brings a tensor from what it was to what it is, to the bit, in no more bytes than the tensor has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trireme.algo.patch import (
    Form,
    Patch,
    apply_patch,
    build_patch,
    changed,
    pack_bits,
    sizes_of,
    to_bytes,
    to_integers,
    unpack_bits,
    whole_patch,
)

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool]


def random_bits(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits whatever: NaNs of all kinds, infinities, numbers below the smallest normal one."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).nbytes
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(to_bytes(one), to_bytes(other))


def patched(before: torch.Tensor, patch: Patch, times: int = 1) -> torch.Tensor:
    found = before.clone()
    for _ in range(times):
        apply_patch(patch, found)
    return found


@given(
    shape=st.sampled_from([[], [0], [0, 4], [1], [7], [8], [3, 5], [257], [40, 33]]),
    dtype=st.sampled_from(DTYPES),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.3, 0.95, 1.0]),
    seed=st.integers(0, 1000),
    times=st.sampled_from([1, 2]),
)
def test_a_patch_brings_every_bit(shape: list[int], dtype: torch.dtype, share: float, seed: int, times: int) -> None:
    before, fresh = random_bits(shape, dtype, seed), random_bits(shape, dtype, seed + 1)
    generator = torch.Generator().manual_seed(seed)
    is_fresh = (torch.rand(shape, generator=generator) < share).view(-1)
    after = torch.where(is_fresh, to_integers(fresh), to_integers(before)).view(dtype).view(shape)
    patch = build_patch(after, changed(after, before))
    assert same_bits(patched(before, patch, times), after)
    assert patch.num_bytes <= after.nbytes
    assert (patch.where.numel(), patch.values.numel()) == sizes_of(patch.form, patch.num_changed, after)
    assert patch.num_changed == int((to_integers(before) != to_integers(after)).sum())


def test_a_nan_that_stayed_is_unchanged_and_one_with_another_payload_is_not() -> None:
    before = torch.tensor([0x7FC0, 0x7FC0, 0x0000, 0x0000], dtype=torch.int16).view(torch.bfloat16)
    after = torch.tensor([0x7FC0, 0x7FC1, -0x8000, 0x0000], dtype=torch.int16).view(torch.bfloat16)
    assert changed(after, before).tolist() == [False, True, True, False]  # the third: 0.0 became -0.0
    assert same_bits(patched(before, build_patch(after, changed(after, before))), after)


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
def test_the_form_with_the_fewest_bytes_is_taken(num_values, places, form, num_bytes) -> None:
    mask = torch.zeros(num_values, dtype=torch.bool)
    mask[places] = True
    patch = build_patch(torch.ones(num_values, dtype=torch.bfloat16), mask)
    assert (patch.form, patch.num_bytes, patch.num_changed) == (form, num_bytes, len(places))


def test_the_longest_gap_that_two_bytes_hold_arrives_and_so_does_a_tensor_that_is_not_contiguous() -> None:
    before, after = torch.zeros(200_000), torch.zeros(200_000)
    after[[65_535, 131_070]] = 1.0
    patch = build_patch(after, changed(after, before))
    assert patch.form is Form.GAPS
    assert same_bits(patched(before, patch), after)
    before, after = torch.zeros(4, 6), torch.arange(24.0).view(6, 4).T
    for patch in (build_patch(after, changed(after, before)), whole_patch(after)):
        assert same_bits(patched(before, patch), after.contiguous())


@given(st.lists(st.booleans(), max_size=70))
def test_bits_unpack_to_what_was_packed(values: list[bool]) -> None:
    mask = torch.tensor(values, dtype=torch.bool)
    packed = pack_bits(mask)
    assert unpack_bits(packed, len(values)).tolist() == values
    by_hand = [sum(2**j for j, value in enumerate(values[i : i + 8]) if value) for i in range(0, len(values), 8)]
    assert packed.tolist() == by_hand
