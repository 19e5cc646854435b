"""Two moments in 8 bits each are as near to what they were as their codes allow."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.algo.codes import RANGES, SPAN, decode, encode


def moments(*, decades: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """[3, 128] each, of gradients whose sizes differ so much within a block."""
    generator = torch.Generator().manual_seed(0)
    root = 10 ** (-decades * torch.rand(3, 128, generator=generator))
    return root * torch.randn(3, 128, generator=generator), root.square()


@pytest.mark.parametrize("decades", [0.1, 3.0, 5.5])
def test_the_root_is_off_by_a_part_of_itself_and_the_step_by_a_part_of_the_largest(decades: float) -> None:
    mean, square = moments(decades=decades)
    *codes, ranges = encode(mean, square, 4)
    found_mean, found = decode(*codes, ranges)
    assert ranges.shape == (3, RANGES * 4)
    logs, steps = square.sqrt().log(), mean / found.sqrt()
    span = (logs.unflatten(-1, (4, -1)).amax(-1) - logs.unflatten(-1, (4, -1)).amin(-1)).clamp(max=SPAN)
    is_in_span = logs >= logs.unflatten(-1, (4, -1)).amax(-1).repeat_interleave(32, -1) - SPAN
    off = (found.sqrt().log() - logs).abs()
    assert (off <= span.repeat_interleave(32, -1) / 254 / 2 + 1e-5)[is_in_span].all()
    assert (found >= square)[~is_in_span].all()
    largest = steps.unflatten(-1, (4, -1)).abs().amax(-1).repeat_interleave(32, -1)
    assert ((found_mean / found.sqrt() - steps).abs() <= largest / 127 / 2 * (1 + 1e-4)).all()


def test_what_was_decoded_is_encoded_to_the_same_codes() -> None:
    first = encode(*moments(), 2)
    again = encode(*decode(*first), 2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    torch.testing.assert_close(first[2], again[2])


def test_zeros_stay_zeros_and_nothing_else_becomes_one() -> None:
    """The square of a gradient of 1e-19 is about the smallest that float32 has."""
    mean, square = torch.zeros(1, 64), torch.zeros(1, 64)
    assert not any(
        decoded.any()
        for decoded in decode(
            *encode(mean, square, 2),
        )
    )
    square[0, :3] = torch.tensor([1.0, 1e-38, 1e-20])
    found = decode(*encode(mean, square, 2, 0.0))[1]
    assert torch.equal(found > 0, square > 0)


def test_rounding_by_turns_gives_the_mean_that_the_nearest_code_misses() -> None:
    """Between two codes, with ten ways to round."""
    square = torch.ones(1, 32)
    square[0, 1] = math.exp(-2 * 2.54)  # 254 codes apart: 0.01 each, of the logarithm of the root
    square[0, 2] = math.exp(-2 * 1.003)
    roots = [decode(*encode(square, square, 1, (turn + 0.5) / 10))[1][0, 2].sqrt().log() for turn in range(10)]
    assert float(torch.stack(roots).mean()) == pytest.approx(-1.003, abs=1e-4)
