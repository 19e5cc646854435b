"""pass@k against counting every choice of k answers, in fractions."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product
from math import comb

import numpy as np
import pytest

from trireme.algo.pass_at_k import mean_pass_at_k, pass_at_k, powers_of_two


def test_it_is_the_share_of_all_choices_of_k_answers_that_hold_one_that_passed() -> None:
    """The first c of n answers passed."""
    for n in range(1, 9):
        for c, k in product(range(n + 1), range(1, n + 1)):
            choices = list(combinations(range(n), k))
            share = Fraction(sum(min(choice) < c for choice in choices), len(choices))
            assert pass_at_k(n, c, k) == pytest.approx(float(share), abs=1e-14)
    # it neither overflows nor loses digits where the binomials are huge
    for n, c, k in ((200, 1, 100), (1000, 3, 64), (100_000, 7, 5000)):
        assert pass_at_k(n, c, k) == pytest.approx(float(1 - Fraction(comb(n - c, k), comb(n, k))), rel=1e-11)


def test_the_mean_is_over_examples_and_powers_of_two_stop_at_the_number_of_answers() -> None:
    assert mean_pass_at_k(4, [0, 1, 4], 2) == pytest.approx(np.mean([0.0, 0.5, 1.0]))
    assert [powers_of_two(most) for most in (1, 2, 3, 8, 9)] == [(1,), (1, 2), (1, 2), (1, 2, 4, 8), (1, 2, 4, 8)]
