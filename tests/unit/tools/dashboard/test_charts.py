"""Curves with few points keep the extremes of the run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.tools.dashboard.charts import CURVE_POINTS, Frame, curve, extremes
from trireme.tools.dashboard.history import Metrics


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=900), st.integers(4, 60))
def test_downsampled_series_keeps_its_lowest_and_highest_points(values, most):
    kept = extremes(np.array(values), most)
    assert len(kept) <= most
    assert {min(values), max(values)} <= {values[at] for at in kept}
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    assert (np.diff(kept) > 0).all()


def test_curve_of_a_long_run_has_few_points_with_its_spike():
    limit = 400
    metrics = Metrics()
    for step in range(20 * limit):
        loss = np.sin(step) + (100.0 if step == 37 else 0.0)
        metrics.add([{"step": step, "process": "trainer", "time_s": 10.0 * step, "loss": loss}])
    raw, smooth = curve(metrics, "loss", Frame("hours", smoothing=0.5))
    assert limit / 2 < len(raw) <= CURVE_POINTS
    assert len(smooth) <= CURVE_POINTS
    assert max(raw, key=lambda point: point[1] or 0.0) == pytest.approx([37 / 360, np.sin(37) + 100.0], abs=1e-3)
    assert [raw[0][0], raw[-1][0]] == pytest.approx([0.0, (20 * limit - 1) / 360], abs=1e-3)
