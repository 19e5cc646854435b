"""Curves with few points keep the extremes of the run."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trireme.tools.dashboard.charts import extremes


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=900), st.integers(4, 60))
def test_downsampled_series_keeps_its_lowest_and_highest_points(values: list[float], most: int) -> None:
    kept = extremes(np.array(values), most)
    assert len(kept) <= most
    assert {min(values), max(values)} <= {values[at] for at in kept}
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    assert (np.diff(kept) > 0).all()
