"""Metrics as they are drawn: nothing that matters is smoothed, thinned or zoomed away."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.monitor.dashboard.columns import Columns
from trireme.monitor.dashboard.curves import Frame, curve, smoothed, thinned
from trireme.monitor.dashboard.groups import OTHERS, group_of, grouped, matching
from trireme.monitor.dashboard.pictures import Line, line_chart

METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"


def columns_of(values: list[float | None], *, every_s: float = 1800.0) -> Columns:
    columns = Columns()
    columns.add(
        {"step": step, "process": "trainer", "time_s": 1e9 + every_s * step, "loss": value}
        for step, value in enumerate(values)
    )
    return columns


def test_smoothing_is_the_weighted_mean_that_it_says_it_is() -> None:
    values = np.array([1.0, 2.0, 4.0])
    weight = 0.5
    expected = [
        sum((1 - weight) * weight ** (n - k) * values[k] for k in range(n + 1)) / (1 - weight ** (n + 1))
        for n in range(3)
    ]
    assert smoothed(values, weight) == pytest.approx(expected)
    assert expected == pytest.approx([1.0, 5 / 3, 3.0])


def test_smoothing_passes_over_what_is_not_finite() -> None:
    result = smoothed(np.array([1.0, math.nan, 1.0, math.inf]), 0.9)
    assert result[[0, 2]] == pytest.approx([1.0, 1.0])
    assert np.isnan(result[[1, 3]]).all()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=900), st.integers(4, 60))
def test_however_few_points_are_drawn_the_lowest_and_the_highest_are_among_them(values: list[float], most: int) -> None:
    x, y = thinned(np.arange(len(values), dtype=float), np.array(values), most)

    assert len(x) <= max(most, 4)
    assert y.min() == min(values)
    assert y.max() == max(values)
    assert (x[0], x[-1]) == (0, len(values) - 1)
    assert (np.diff(x) > 0).all()
    assert [values[int(at)] for at in x] == y.tolist()


def test_a_zoom_goes_on_to_the_edge_and_brings_back_what_was_thinned() -> None:
    columns = columns_of([math.sin(step) for step in range(5000)])
    whole, close = curve(columns, "loss", Frame()), curve(columns, "loss", Frame(begin=1000, end=1100))

    assert len(whole.points()) <= 500
    assert [x for x, _ in close.points()] == list(range(999, 1102))


def test_hours_are_counted_from_what_the_run_reported_first() -> None:
    columns = columns_of([1.0, 2.0, 3.0])
    columns.add([{"step": 0, "process": "orchestrator", "time_s": 1e9 - 3600, "reward/mean": 0.5}])
    assert [x for x, _ in curve(columns, "loss", Frame(axis="hours")).points()] == [1.0, 1.5, 2.0]


def test_a_picture_can_be_sent_whatever_was_measured() -> None:
    columns = columns_of([None, 1.0, None, 1e300, 0.0])
    lines = [Line("a", "#123456", curve(columns, "loss", Frame(smoothing=0.5)))]
    sent = json.dumps(line_chart(lines, Frame(), marks=[2, 2]), allow_nan=False)
    assert '"xAxis": 2' in sent
    assert curve(columns, "no such metric", Frame()).points() == []


def test_a_place_that_was_gone_back_to_is_marked_once() -> None:
    lines = [Line("a", "#123456", curve(columns_of([1.0, 2.0]), "loss", Frame()))]
    series = line_chart(lines, Frame(), marks=[7, 7, 9])["series"]
    assert series[0]["markLine"]["data"] == [{"xAxis": 7}, {"xAxis": 9}]


def documented() -> list[str]:
    """Names out of the first column of the tables of docs/metrics.md."""
    text = METRICS.read_text().split("## Warnings")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_documented_metric_has_a_place() -> None:
    names = documented()
    assert len(names) > 80
    assert [name for name in names if group_of(name) is OTHERS and not name.startswith("warnings/")] == []


def test_what_matters_most_comes_first() -> None:
    groups = grouped(["reward/max", "orchestrator/time/step", "time/step", "reward/mean", "zebra", "eval/x/reward"])
    assert [group.title for group in groups] == ["Reward", "Evaluation", "Time", "Other"]
    assert [names[0] for names in groups.values()] == ["reward/mean", "eval/x/reward", "time/step", "zebra"]


def test_a_metric_is_found_by_any_of_its_words() -> None:
    assert matching(["reward/mean", "time/step", "reward/std"], "STD rew") == ["reward/std"]
    assert matching(["a", "b"], "  ") == ["a", "b"]
