"""Confidence intervals of proportions: 20 samples can say less than they seem to."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution
# Two-sided 95 % of Student's t with 1, 2, … degrees of freedom; for more than there are, the last is on the safe side.
T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448)


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


def over_seeds(successes: Sequence[float], trials: Sequence[int]) -> Interval:
    """A 95 % interval of what training gives, from one (successes, trials) per seed: models are the units, not answers.

    Student's interval of the mean of the seeds' rates, m ± t s / √n with n - 1 degrees of freedom (t = 4.3 for three
    seeds), cut to [0, 1] and widened to Wilson's of all answers together where that reaches further: seeds that happen
    to agree do not make a measurement exact. One seed has Wilson's alone, which says nothing about another seed.
    """
    if not trials or len(successes) != len(trials):
        raise ValueError(f"{len(successes)} successes and {len(trials)} trials: one of each per seed, at least one")
    low, high = wilson(sum(successes), sum(trials))
    for own in zip(successes, trials, strict=True):
        wilson(*own)  # refuses impossible counts
    if len(trials) == 1:
        return Interval(low, high)
    rates = np.array(successes, float) / np.array(trials)
    t = T95[min(len(rates) - 1, len(T95)) - 1]
    half = t * float(rates.std(ddof=1)) / math.sqrt(len(rates))
    centre = float(rates.mean())
    return Interval(min(low, max(0.0, centre - half)), max(high, min(1.0, centre + half)))
