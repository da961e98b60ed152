"""The order of rows: bijections, exact shares, and numbers that must never change."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bampath.data.order import Draws, hash64, interleave, mix64, permute, shuffled_rows


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_bijection_and_elementwise(size: int, key: int):
    everything = permute(np.arange(size), size, key)
    assert sorted(everything.tolist()) == list(range(size))
    some = np.arange(size)[:: max(1, size // 7)]
    np.testing.assert_array_equal(permute(some, size, key), everything[some])


def test_permutations_differ_between_keys_and_look_random():
    size = 10_000
    a, b = permute(np.arange(size), size, 1), permute(np.arange(size), size, 2)
    assert (a == b).sum() < 10
    assert abs(np.corrcoef(a, np.arange(size))[0, 1]) < 0.05
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.05
    fixed = [int((permute(np.arange(500), 500, key) == np.arange(500)).sum()) for key in range(200)]
    assert 0.6 < np.mean(fixed) < 1.5  # a random permutation has one fixed point on average


def test_permute_at_a_size_that_no_table_could_hold():
    size = 10**15 + 37
    index = np.array([0, 1, size // 2, size - 1])
    out = permute(index, size, 9)
    assert ((out >= 0) & (out < size)).all()
    assert len(set(out.tolist())) == 4


def test_hashes_never_change():
    """A resumed run must find the same order under every version of Python and numpy: these are constants."""
    assert hash64(0) == 0x910A2DEC89025CC1
    assert (
        int(mix64(np.array([0], np.uint64))[0]) == 0xE220A8397B1DCDAF
    )  # SplitMix64's published first output of seed 0
    assert permute(np.arange(8), 8, 42).tolist() == [5, 4, 2, 7, 1, 0, 6, 3]
    assert [Draws(7).below(10) for _ in range(3)] == [Draws(7).below(10)] * 3


@given(
    share=st.one_of(st.sampled_from([0.0, 1.0, 0.5, 0.25, 0.1]), st.integers(1, 999).map(lambda n: n / 1000)),
    start=st.integers(0, 10**15),
    count=st.integers(1, 300),
)
@settings(max_examples=60, deadline=None)
def test_interleave_has_exactly_the_share_and_skips_nothing(share: float, start: int, count: int):
    places = start + np.arange(count)
    second, index = interleave(places, share)
    ratio = Fraction(share).limit_denominator(1000)
    for place, is_second, i in zip(places.tolist(), second.tolist(), index.tolist(), strict=True):
        before = ratio.numerator * place // ratio.denominator
        after = ratio.numerator * (place + 1) // ratio.denominator
        assert is_second == (after > before)
        assert i == (before if is_second else place - before)


def test_shuffled_rows_has_each_row_once_per_epoch_and_a_new_order_each_time():
    epochs, rows = shuffled_rows(np.arange(3 * 50), 50, seed=3, shuffle=True)
    assert epochs.tolist() == [e for e in range(3) for _ in range(50)]
    orders = [rows[50 * e : 50 * (e + 1)].tolist() for e in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert shuffled_rows(np.arange(60), 50, 3, shuffle=False)[1].tolist() == [*range(50), *range(10)]


def test_draws_are_uniform_and_checked():
    draws = Draws(5)
    counts = np.bincount([draws.below(10) for _ in range(5000)], minlength=10)
    assert counts.min() > 400
    assert counts.max() < 600
    assert {draws.between(3, 5) for _ in range(100)} == {3, 4, 5}
    assert len(draws.digits(15)) == 15
    with pytest.raises(ValueError, match=r"size=0"):
        draws.below(0)
