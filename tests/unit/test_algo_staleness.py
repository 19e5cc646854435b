"""How old tokens may be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trireme.algo.staleness import groups_allowed, is_too_old, lags


def test_lag_is_batch_minus_version_of_sampled_tokens_only() -> None:
    assert lags(5, np.array([-1, -1, 5, 4, 2])).tolist() == [0, 1, 3]


def test_the_bound_itself_is_allowed() -> None:
    assert not is_too_old(5, oldest_version=3, max_off_policy_steps=2)
    assert is_too_old(5, oldest_version=2, max_off_policy_steps=2)


@given(
    version=st.integers(0, 50),
    next_batch=st.integers(0, 50),
    level=st.integers(0, 8),
    groups=st.integers(1, 16),
)
def test_groups_are_allowed_for_exactly_the_batches_that_are_near_enough(version, next_batch, level, groups) -> None:
    """Batch by batch: batch n may be begun once version n - level is live."""
    batches = [batch for batch in range(next_batch, next_batch + 100) if version >= batch - level]
    allowed = groups_allowed(version=version, next_batch=next_batch, max_async_level=level, groups_per_batch=groups)
    assert allowed == len(batches) * groups
