"""Bounds of positional LSH: oracle values, and that drawn masks respect them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bampath.positions import lsh_theory as theory
from kernels.lsh.grids import blocks_at, sample_grids


def mean_mask(seed: int, n: int, sigma: float, samples: int) -> np.ndarray:
    widths, offsets = sample_grids(jax.random.key(seed), jnp.asarray([sigma]), samples)
    first = np.asarray(blocks_at(jnp.arange(n), widths, offsets)[0])[:, 0]  # [n, s]
    return (first[:, None] == first[None]).mean(-1)


@pytest.mark.parametrize(
    ("sigma", "mean", "psi"), [(2, 4.082988, 7.082988), (16, 32.010416, 49.010416), (256, 512.000651, 769.000651)]
)
def test_means_of_widths(sigma: float, mean: float, psi: float) -> None:
    assert theory.width_mean(sigma) == pytest.approx(mean, abs=1e-6)
    assert theory.row_sum_bound(sigma) == theory.width_mean(sigma)
    assert theory.psi(sigma) == pytest.approx(psi, abs=1e-6)


def test_the_law_gives_back_the_exponential() -> None:
    for sigma in (0.7, 2.0, 30.0):
        b = np.arange(1, int(60 * sigma) + 60)
        p = theory.width_probability(sigma, b)
        assert p.sum() == pytest.approx(1, abs=1e-12)
        for k in (0, 1, 5, 20):
            assert np.sum(p[b > k] * (1 - k / b[b > k])) == pytest.approx(theory.factor(sigma) ** k, abs=1e-12)


def test_row_sums_and_norms_of_the_target() -> None:
    for sigma in (1.0, 8.0):
        dense = theory.target(np.arange(600), sigma)
        assert dense.sum(1).max() <= theory.row_sum_bound(sigma)
        assert np.linalg.norm(dense, 2) == pytest.approx(theory.row_sum_bound(sigma), rel=2e-2)


def test_longest_block_is_exceeded_as_rarely_as_it_says() -> None:
    sigma, samples, delta = 16.0, 10, 0.1
    longest = theory.longest_block(sigma, samples, delta)
    tail = 1 - theory.width_probability(sigma, np.arange(1, longest + 1)).sum()
    assert tail <= delta / samples
    assert tail + theory.width_probability(sigma, longest) > delta / samples
    widths, _ = sample_grids(jax.random.key(0), jnp.full(2000, sigma), samples)
    exceeded = float((widths.max(1) > longest).mean())
    assert 0.05 < exceeded < 0.14


def test_bounds_against_drawn_masks() -> None:
    """Spectral and max errors of 20 draws: none beyond the 1 % bounds, which are not ten times what is seen."""
    n, sigma, samples = 512, 16.0, 20
    want = theory.target(np.arange(n), sigma)
    errors = [mean_mask(seed, n, sigma, samples) - want for seed in range(20)]
    largest = max(np.abs(np.tril(e)).max() for e in errors)
    bound = theory.max_error(n, samples, 0.01)
    assert bound / 3 < largest < bound
    spectral = max(np.linalg.norm(e, 2) for e in errors)
    longest = theory.longest_block(sigma, samples, 0.005)
    eps = next(e for e in np.arange(1, 500, 0.5) if theory.spectral_tail(n, sigma, samples, e, longest) < 0.005)
    assert eps / 10 < spectral < eps
    assert theory.spectral_tail_published(n, sigma, samples, eps) > theory.spectral_tail(
        n, sigma, samples, eps, longest
    )
    assert spectral < theory.expected_spectral_error(n, sigma, samples)


def test_numbers_of_samples_reach_their_error() -> None:
    n, sigma = 8192, 256.0
    eps = 0.5 * theory.row_sum_bound(sigma)
    samples = theory.samples_for_spectral_error(n, sigma, eps, 0.1)
    assert 100 < samples < 250
    count = theory.samples_for_max_error(2048, 0.2, 0.1)
    assert theory.max_error(2048, count, 0.1) <= 0.2 < theory.max_error(2048, count - 1, 0.1)
    for s, limit in ((10, 0.729), (20, 0.515), (100, 0.230)):
        assert theory.max_error(2048, s, 0.1) == pytest.approx(limit, abs=1e-3)


def test_keys_that_no_sample_reaches() -> None:
    for s, p in ((10, 0.60), (20, 0.36), (100, 0.006)):
        assert theory.unreached(16, s, 48) == pytest.approx(p, abs=0.005)


def test_the_mean_of_outputs_has_its_own_kernel() -> None:
    k = np.array([0, 1, 2, 4, 8, 16, 32, 64])
    want = [0.18082, 0.12023, 0.09178, 0.06140, 0.03373, 0.01342, 0.00302, 0.00023]
    np.testing.assert_allclose(theory.mean_combination(16.0, k), want, atol=1e-5)
    all_k = np.arange(600)
    weights = theory.mean_combination(16.0, all_k)
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    assert (weights * all_k).sum() == pytest.approx(7.753, abs=1e-3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.factor(0), "sigma=0"),
        (lambda: theory.max_error(10, 0, 0.1), "samples=0"),
        (lambda: theory.longest_block(2, 3, 1.5), r"delta=1\.5"),
    ],
)
def test_wrong_arguments_are_refused(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
