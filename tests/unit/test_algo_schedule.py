"""The learning rate over steps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from trireme.algo.schedule import lr_factor
from trireme.config.trainer import Scheduler


def factors(
    kind: str, *, warmup_steps: int = 0, max_steps: int = 10, floor: float = 0.0, decay_steps: int = 1
) -> list[float]:
    return [
        lr_factor(step, kind=kind, warmup_steps=warmup_steps, max_steps=max_steps, floor=floor, decay_steps=decay_steps)
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


def test_warm_up_plateau_and_decay_by_hand() -> None:
    found = factors("wsd", warmup_steps=2, max_steps=8, floor=0.2, decay_steps=4)
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert factors("wsd", max_steps=3, decay_steps=1) == [1.0, 1.0, 1.0, 0.0]


def test_a_tenth_of_the_run_is_decay_where_nothing_is_said() -> None:
    assert [Scheduler(type="wsd").decay_of(steps) for steps in (5, 10, 99, 200)] == [1, 1, 9, 20]
    assert Scheduler(type="wsd", decay_steps=3).decay_of(200) == 3


@pytest.mark.parametrize("floor", [0.0, 0.25])
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_after_the_warm_up_it_is_transformers_schedule(kind: str, floor: float) -> None:
    """Theirs starts the warm-up at 0 and knows a floor for two of the four."""
    warmup_steps, max_steps, decay_steps = 5, 40, 12
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = {
        "constant": lambda: get_constant_schedule_with_warmup(optimizer, warmup_steps),
        "linear": lambda: get_linear_schedule_with_warmup(optimizer, warmup_steps, max_steps),
        "cosine": lambda: get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup_steps, max_steps, min_lr_rate=floor
        ),
        "wsd": lambda: get_wsd_schedule(
            optimizer,
            warmup_steps,
            decay_steps,
            num_stable_steps=max_steps - decay_steps - warmup_steps,
            decay_type="linear",
            min_lr_ratio=floor,
        ),
    }[kind]()
    floor = 0.0 if kind == "linear" else floor
    ours = factors(kind, warmup_steps=warmup_steps, max_steps=max_steps, floor=floor, decay_steps=decay_steps)
    for step in range(max_steps + 1):
        if step >= warmup_steps:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(ours[step], abs=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 50, 1000])
def test_no_jump_and_never_outside_the_two_ends(kind: str, warmup_steps: int) -> None:
    found = factors(kind, warmup_steps=warmup_steps, max_steps=1000, floor=0.1, decay_steps=500)
    jumps = [abs(b - a) for a, b in pairwise(found)]
    assert max(jumps) <= max(0.002, 1 / max(1, warmup_steps) + 1e-9)
    assert min(found) > 0
    assert max(found) <= 1.0


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_beyond_the_last_step_it_stays_at_the_floor(kind: str) -> None:
    assert lr_factor(99, kind=kind, warmup_steps=0, max_steps=10, floor=0.3) == pytest.approx(0.3)


def test_a_run_that_is_all_warm_up_does_not_divide_by_zero() -> None:
    assert factors("cosine", warmup_steps=3, max_steps=3) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
