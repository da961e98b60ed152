"""Confidence intervals of proportions: 20 samples can say less than they seem to."""

import math
from typing import NamedTuple

Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution


class Interval(NamedTuple):
    """Lower and upper bound of a proportion, both in [0, 1]."""

    lower: float
    upper: float


def wilson(successes: float, trials: int, z: float = Z95) -> Interval:
    """Wilson's score interval of successes / trials (E. B. Wilson, JASA 22, 1927).

    The bounds are the p for which |successes/trials - p| = z √(p (1 - p) / trials). Unlike the interval around the
    observed rate it never leaves [0, 1] and has a width at 0 of n and n of n: 20 of 20 gives [0.839, 1].
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"successes={successes} of trials={trials}: trials must be positive and hold the successes")
    if z <= 0:
        raise ValueError(f"z={z} must be positive")
    rate, square = successes / trials, z * z / trials
    centre = (rate + square / 2) / (1 + square)
    half = math.sqrt(rate * (1 - rate) * square + square * square / 4) / (1 + square)
    lower = 0.0 if successes == 0 else centre - half  # exact at the ends, where rounding would leave 1e-17
    upper = 1.0 if successes == trials else centre + half
    return Interval(lower, upper)
