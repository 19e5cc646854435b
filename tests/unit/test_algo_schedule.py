"""The learning rate over steps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from trireme.algo.schedule import lr_factor


def factors(kind: str, *, warmup_steps: int = 0, max_steps: int = 10, floor: float = 0.0) -> list[float]:
    return [
        lr_factor(step, kind=kind, warmup_steps=warmup_steps, max_steps=max_steps, floor=floor)
        for step in range(max_steps + 1)
    ]


def test_the_warm_up_by_hand() -> None:
    assert factors("constant", warmup_steps=4, max_steps=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_the_line_by_hand() -> None:
    assert factors("linear", max_steps=4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert factors("linear", warmup_steps=2, max_steps=4, floor=0.5) == [0.5, 1.0, 1.0, 0.75, 0.5]


def test_the_half_cosine_by_hand() -> None:
    half = math.sqrt(0.5)
    assert factors("cosine", max_steps=4) == pytest.approx([1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0])
    assert factors("cosine", max_steps=2, floor=0.2) == pytest.approx([1.0, 0.6, 0.2])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 50, 1000])
def test_no_jump_and_never_outside_the_two_ends(kind: str, warmup_steps: int) -> None:
    found = factors(kind, warmup_steps=warmup_steps, max_steps=1000, floor=0.1)
    jumps = [abs(b - a) for a, b in pairwise(found)]
    assert max(jumps) <= max(0.002, 1 / max(1, warmup_steps) + 1e-9)
    assert min(found) > 0
    assert max(found) <= 1.0


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_beyond_the_last_step_it_stays_at_the_floor(kind: str) -> None:
    assert lr_factor(99, kind=kind, warmup_steps=0, max_steps=10, floor=0.3) == pytest.approx(0.3)


def test_a_run_that_is_all_warm_up_does_not_divide_by_zero() -> None:
    assert factors("cosine", warmup_steps=3, max_steps=3) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
