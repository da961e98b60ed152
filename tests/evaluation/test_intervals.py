"""Wilson's interval against published values and its own definition; intervals over seeds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bampath.intervals import T95, Z95, over_seeds, wilson


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


def test_seeds_that_differ_make_the_interval_of_their_mean():
    # three rates 0.2, 0.3, 0.4: s = 0.1, and Student's t of two degrees of freedom is 4.3027 (any table)
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert over_seeds([2000, 3000, 4000], [10_000] * 3) == pytest.approx((0.3 - half, 0.3 + half), abs=1e-6)
    low, high = over_seeds([0, 0, 9000], [10_000] * 3)
    assert (low, high) == (0.0, 1.0)  # cut, and next to no knowledge


def test_seeds_that_agree_are_still_a_measurement():
    assert over_seeds([0, 0, 0], [20] * 3) == wilson(0, 60)
    assert over_seeds([7, 7], [10, 10]) == wilson(14, 20)
    assert over_seeds([5], [20]) == wilson(5, 20)


def test_the_interval_holds_the_mean_of_seeds():
    """95 % of the intervals of four seeds whose rates are normal hold the mean, however many answers each has."""
    draws = np.random.default_rng(0)
    rates = np.clip(draws.normal(0.5, 0.08, (2000, 4)), 0, 1)
    right = draws.binomial(1000, rates)
    inside = [low <= 0.5 <= high for low, high in (over_seeds(own.tolist(), [1000] * 4) for own in right)]
    assert 0.93 < np.mean(inside) < 0.97


def test_students_t_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    assert pytest.approx([stats.t.ppf(0.975, df) for df in range(1, len(T95) + 1)], abs=6e-5) == list(T95)


@pytest.mark.parametrize("case", [([], []), ([1], [2, 3]), ([3, 1], [2, 2])])
def test_impossible_seeds_are_refused(case):
    with pytest.raises(ValueError, match="successes"):
        over_seeds(*case)
