"""The learning rate over steps."""

import math

import pytest

from trireme.config.trainer import Scheduler
from trireme.trainer.optim.optimizer import lr_factor

HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("constant", {"warmup_steps": 4, "floor": 0.5}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ("linear", {}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("linear", {"warmup_steps": 2, "floor": 0.5}, [0.5, 1.0, 1.0, 0.75, 0.5]),
        ("cosine", {}, [1.0, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0.0]),
        ("cosine", {"floor": 0.2}, [1.0, 0.6, 0.2]),
        ("cosine", {"warmup_steps": 3}, [1 / 3, 2 / 3, 1.0, 1.0]),  # all warm-up: nothing is divided by 0
        ("wsd", {"warmup_steps": 2, "floor": 0.2, "decay_steps": 4}, [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("wsd", {"warmup_steps": 2, "decay_steps": 4}, [0.5, 1.0, 1.0, 0.5, 0.0]),
        ("wsd", {}, [1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_schedules_by_hand(kind: str, settings: dict[str, float], expected: list[float]) -> None:
    last = len(expected) - 1
    options = {"warmup_steps": 0, "floor": 0.0} | settings
    found = [lr_factor(step, kind=kind, max_steps=last, **options) for step in range(last + 1)]
    assert found == pytest.approx(expected)


def test_beyond_the_last_step_the_rate_stays_at_the_floor_and_a_tenth_of_the_run_is_decay() -> None:
    for kind in ("linear", "cosine", "wsd"):
        assert lr_factor(99, kind=kind, warmup_steps=0, max_steps=10, floor=0.3) == pytest.approx(0.3)
    assert [Scheduler(type="wsd").decay_of(steps) for steps in (5, 10, 99, 200)] == [1, 1, 9, 20]
    assert Scheduler(type="wsd", decay_steps=3).decay_of(200) == 3
