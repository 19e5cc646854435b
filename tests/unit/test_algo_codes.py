"""Numbers in 8 bits are as near to what they were as their codes allow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trireme.algo.codes import code_values, decode, encode

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("signed", "lowest", "smallest"),  # the largest code below 1 is 1 - 0.9 / 64 / 2, by hand
    [(True, -0.99296875, 0.55), (False, 0, 0.325)],  # the middle of (0.1, 1), or of its lower half
)
def test_there_are_256_different_codes_from_the_smallest_decade_to_1(signed: bool, lowest, smallest) -> None:
    values = code_values(signed, CPU)
    assert len(values.unique()) == 256
    assert values.max() == 1
    assert values.min() == pytest.approx(lowest)
    assert values[values > 0].min() == pytest.approx(1e-6 * smallest)


@pytest.mark.parametrize("signed", [True, False])
def test_each_number_gets_the_nearest_code_of_its_block(signed: bool) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((3, 128)) * 10.0 ** rng.integers(-6, 3, (3, 128))
    numbers = numbers if signed else np.abs(numbers)
    values = code_values(signed, CPU)
    codes, scale = encode(torch.from_numpy(numbers).float(), 4, values)
    for row, block in np.ndindex(3, 4):
        part = numbers[row, 32 * block : 32 * block + 32]
        largest = np.abs(part).max()
        nearest = np.abs(values.double().numpy()[None] - (part / largest)[:, None]).min(1)
        found = values[codes[row, 32 * block : 32 * block + 32].int()].double().numpy()
        np.testing.assert_allclose(np.abs(found - part / largest), nearest, rtol=0, atol=1e-6)
        assert scale[row, block] == pytest.approx(largest)


@pytest.mark.parametrize("signed", [True, False])
def test_what_was_decoded_is_encoded_to_the_same_codes(signed: bool) -> None:
    values = code_values(signed, CPU)
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    codes[:, 0] = 255  # each block has its largest value
    codes[:, 64] = 255
    scale = torch.tensor([[1.0, 3.0], [0.5, 7.0]])
    again, same_scale = encode(decode(codes, scale, values), 2, values)
    assert torch.equal(again, codes)
    assert torch.equal(same_scale, scale)


def test_a_block_of_zeros_stays_one() -> None:
    values = code_values(True, CPU)
    assert not decode(*encode(torch.zeros(1, 64), 2, values), values).any()
