"""Grids: their law, their mean mask, and where blocks begin and end."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.lsh.grids import LAWS, blocks_at, floor_divide, sample_grids, width_quantile, width_tail
from tests.helpers import x64

DRAWS = 20_000


@pytest.mark.parametrize(
    ("sigma", "mean", "variance"),
    [(2.0, 4.082988, 7.835396), (16.0, 32.010416, 511.8334), (256.0, 512.000651, 131071.83)],
)
def test_integer_widths_follow_their_law(sigma: float, mean: float, variance: float) -> None:
    widths, offsets = sample_grids(jax.random.key(0), jnp.asarray([sigma]), DRAWS)
    b = np.asarray(widths[0], np.float64)
    assert abs(b.mean() - mean) < 4 * math.sqrt(variance / DRAWS)
    assert abs(b.var() / variance - 1) < 0.06
    assert (offsets >= 0).all()
    assert (offsets < widths).all()
    z = (np.asarray(offsets[0]) + 0.5) / b - 0.5  # uniform, apart from its discreteness
    assert abs(z.mean()) < 4 * math.sqrt(1 / 12 / DRAWS)


def test_the_law_of_small_widths() -> None:
    widths, _ = sample_grids(jax.random.key(1), jnp.asarray([2.0]), DRAWS)
    want = {1: 0.154818, 2: 0.187804, 3: 0.170863, 4: 0.138178, 5: 0.104762, 8: 0.037401, 16: 0.001370}
    for b, p in want.items():
        assert abs(float((widths[0] == b).mean()) - p) < 4 * math.sqrt(p * (1 - p) / DRAWS), b
        tail = width_tail(2.0, b - 1) - width_tail(2.0, b)
        assert float(tail) == pytest.approx(p, abs=2e-6)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.5, 300.0), st.floats(1e-5, 1.0))
def test_a_quantile_inverts_the_tail(sigma: float, tail: float) -> None:
    n = int(width_quantile(sigma, tail))
    assert float(width_tail(sigma, n)) <= tail or n == 1
    assert n == 1 or float(width_tail(sigma, n - 1)) > tail * (1 - 1e-5)


@pytest.mark.parametrize("law", [law for law in LAWS if law != "fixed"])
def test_the_mean_mask_is_alibi(law: Any) -> None:
    """P(one block) = exp(−k / sigma), at two places, so that no place is special."""
    sigma, n, repeats = jnp.asarray([3.0, 12.0]), 40, 500
    positions = jnp.arange(n, dtype=jnp.int32)

    def masks(key: jax.Array) -> jax.Array:
        first, _ = blocks_at(positions, *sample_grids(key, sigma, 8, law=law))  # [n, H, s]
        return jnp.stack([(first == first[at][None]).mean(-1) for at in (7, 25)])  # [2, n, H]

    drawn = jax.lax.map(masks, jax.random.split(jax.random.key(2), repeats))
    mean, error = drawn.mean(0), drawn.std(0) / math.sqrt(repeats)
    want = jnp.exp(-jnp.abs(positions[None, :] - jnp.asarray([7, 25])[:, None])[..., None] / sigma[None, None])
    if_independent = jnp.sqrt(want * (1 - want) / (8 * repeats))  # also where a rare event never happened
    z = (mean - want) / jnp.maximum(jnp.maximum(error, if_independent), 1e-4)
    assert float(jnp.abs(z).max()) < 5  # 4.7 is the largest of 200 keys and these laws
    assert float((z**2).mean()) < 4  # 3.3


@pytest.mark.parametrize("law", LAWS)
def test_double_precision_draws_the_same_grids(law: Any) -> None:
    draw = lambda: sample_grids(jax.random.key(6), jnp.asarray([0.7, 30.0]), 4, law=law)
    want = draw()
    with x64():
        got = draw()
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_stratified_widths_vary_less() -> None:
    sigma = jnp.asarray([16.0])
    keys = jax.random.split(jax.random.key(5), 40)
    means = lambda law: jax.lax.map(lambda key: sample_grids(key, sigma, 16, law=law)[0].mean(dtype=jnp.float32), keys)
    assert float(means("stratified").std()) < 0.3 * float(means("integer").std())


def test_antithetic_offsets_are_half_a_block_apart() -> None:
    widths, offsets = sample_grids(jax.random.key(3), jnp.asarray([20.0]), 10, law="antithetic")
    np.testing.assert_array_equal(widths[:, ::2], widths[:, 1::2])
    np.testing.assert_array_equal((offsets[:, ::2] + widths[:, ::2] // 2) % widths[:, ::2], offsets[:, 1::2])


def test_fixed_blocks_leave_nothing_to_chance() -> None:
    widths, offsets = sample_grids(jax.random.key(4), jnp.asarray([2.0, 0.3, 16.0]), 3, law="fixed")
    np.testing.assert_array_equal(widths[:, 0], [4, 1, 32])
    np.testing.assert_array_equal(offsets, 0)


def test_blocks_of_a_known_grid() -> None:
    first, after = blocks_at(jnp.arange(8), jnp.asarray([[3]]), jnp.asarray([[1]]))
    np.testing.assert_array_equal(first[:, 0, 0], [-1, -1, 2, 2, 2, 5, 5, 5])
    np.testing.assert_array_equal(after[:, 0, 0], [2, 2, 5, 5, 5, 8, 8, 8])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([law for law in LAWS if law != "antithetic"]))
def test_blocks_tile_the_line(seed: int, law: Any) -> None:
    """Each position lies in its block, all of a block name the same one, and the next begins where it ends."""
    sigma = jnp.asarray([0.4, 5.0, 250.0])
    widths, offsets = sample_grids(jax.random.key(seed), sigma, 2, law=law)
    start = seed % 100_000
    positions = start + jnp.arange(64, dtype=jnp.int32)
    first, after = (np.asarray(x) for x in blocks_at(positions, widths, offsets))
    at = np.asarray(positions)[:, None, None]
    assert (first <= at).all()
    assert (at < after).all()
    same = first[1:] == first[:-1]
    assert (after[1:][same] == after[:-1][same]).all()
    assert (first[1:][~same] == after[:-1][~same]).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 0}, "samples=0 must be at least 1"),
        ({"sigma": jnp.ones((2, 2))}, r"sigma has shape \(2, 2\), must be \[H\]"),
        ({"law": "gamma"}, "law='gamma' is not one of integer, continuous"),
        ({"law": "antithetic", "samples": 3}, "samples=3 must be even"),
    ],
)
def test_wrong_requests_are_refused(changes: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"sigma": jnp.ones(2), "samples": 2, **changes}
    with pytest.raises(ValueError, match=words):
        sample_grids(jax.random.key(0), **options)


def test_division_without_integers_is_exact() -> None:
    """All sizes of int32, and both sides of every multiple near the ends."""
    r = np.random.default_rng(0)
    widths = np.concatenate([np.arange(1, 40), (2.0 ** r.uniform(0, 30, 400)).astype(np.int64)])
    x = (2.0 ** r.uniform(0, 31, (300, 1)) - 1).astype(np.int64)
    near = np.clip(x // widths * widths + r.integers(-1, 2, (300, len(widths))), 0, 2**31 - 1)
    for numerator in (np.broadcast_to(x, near.shape), near, -near):
        got = floor_divide(jnp.asarray(numerator, jnp.int32), jnp.asarray(widths, jnp.int32)[None])
        np.testing.assert_array_equal(got, numerator // widths)
