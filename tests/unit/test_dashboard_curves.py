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


def columns_of(values: list[float | None]) -> Columns:
    columns = Columns()
    columns.add(
        {"step": step, "process": "trainer", "time_s": 1e9 + 1800 * step, "loss": value}
        for step, value in enumerate(values)
    )
    return columns


def test_smoothing_is_the_weighted_mean_that_it_says_it_is_of_what_is_finite() -> None:
    assert smoothed(np.array([1.0, 2.0, 4.0]), 0.5) == pytest.approx([1.0, (1 / 4 + 2 / 2) / (3 / 4), 3.0])
    result = smoothed(np.array([1.0, math.nan, 1.0, math.inf]), 0.9)
    assert result[[0, 2]] == pytest.approx([1.0, 1.0])
    assert np.isnan(result[[1, 3]]).all()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=900), st.integers(4, 60))
def test_however_few_points_are_drawn_the_lowest_and_the_highest_are_among_them(values: list[float], most: int) -> None:
    x, y = thinned(np.arange(len(values), dtype=float), np.array(values), most)
    assert len(x) <= max(most, 4)
    assert (y.min(), y.max()) == (min(values), max(values))
    assert (x[0], x[-1]) == (0, len(values) - 1)
    assert (np.diff(x) > 0).all()
    assert [values[int(at)] for at in x] == y.tolist()


def test_a_zoom_goes_on_to_the_edge_and_hours_are_counted_from_the_first_report() -> None:
    columns = columns_of([math.sin(step) for step in range(5000)])
    assert len(curve(columns, "loss", Frame()).points()) <= 500
    zoomed = curve(columns, "loss", Frame(begin=1000, end=1100))
    assert [x for x, _ in zoomed.points()] == list(range(999, 1102)), "nothing is thinned"
    columns = columns_of([1.0, 2.0, 3.0])
    columns.add([{"step": 0, "process": "orchestrator", "time_s": 1e9 - 3600, "reward/mean": 0.5}])
    assert [x for x, _ in curve(columns, "loss", Frame(axis="hours")).points()] == [1.0, 1.5, 2.0]


def test_a_picture_can_be_sent_whatever_was_measured_and_marks_where_a_run_went_back_once() -> None:
    columns = columns_of([None, 1.0, None, 1e300, 0.0])
    lines = [Line("a", "#123456", curve(columns, "loss", Frame(smoothing=0.5)))]
    chart = line_chart(lines, Frame(), marks=[7, 7, 9])
    json.dumps(chart, allow_nan=False)
    assert chart["series"][0]["markLine"]["data"] == [{"xAxis": 7}, {"xAxis": 9}]
    assert curve(columns, "no such metric", Frame()).points() == []


def test_every_documented_metric_has_a_place_and_what_matters_most_comes_first() -> None:
    table = METRICS.read_text().split("## Warnings")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(names) > 80
    assert [name for name in names if group_of(name) is OTHERS and not name.startswith("warnings/")] == []
    groups = grouped(["reward/max", "orchestrator/time/step", "time/step", "reward/mean", "zebra", "eval/x/reward"])
    assert {group.title: names[0] for group, names in groups.items()} == {
        "Reward": "reward/mean", "Evaluation": "eval/x/reward", "Time": "time/step", "Other": "zebra"
    }  # fmt: skip
    assert matching(["reward/mean", "time/step", "reward/std"], "STD rew") == ["reward/std"]
    assert matching(["a", "b"], "  ") == ["a", "b"]
