"""Wilson's interval against published values and its own definition."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bampath.evaluation.intervals import Z95, wilson


# R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (score without continuity correction).
@pytest.mark.parametrize(
    ("successes", "trials", "lower", "upper"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_published_values(successes, trials, lower, upper):
    assert wilson(successes, trials) == pytest.approx((lower, upper), abs=5e-5)


def test_all_of_twenty_is_the_mirror_of_none():
    low, high = wilson(20, 20)
    assert high == 1
    assert low == pytest.approx(1 - wilson(0, 20).upper, abs=1e-12)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_bounds_solve_the_score_equation(case):
    successes, trials = case
    rate, interval = successes / trials, wilson(successes, trials)
    assert 0 <= interval.lower <= rate <= interval.upper <= 1
    for p in interval:
        assert abs(rate - p) == pytest.approx(Z95 * math.sqrt(p * (1 - p) / trials), abs=1e-7)


@pytest.mark.parametrize("case", [(1, 0), (-1, 5), (6, 5)])
def test_impossible_counts_are_refused(case):
    with pytest.raises(ValueError, match="successes"):
        wilson(*case)
