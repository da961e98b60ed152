"""What is known of random block masks: block sizes, errors of their mean, and how many samples an error needs.

L*_ij = q^|i − j| with q = e^(−1/sigma) is ALiBi with the slope 1/sigma as a factor; M̄ is the mean of s masks of
`kernels.lsh.grids.sample_grids` over n positions. "published" marks what the authors' validation script evaluates
(Wolfson and Wagner, arXiv 2605.09472); the rest is derived here, as said. Everything is float64 numpy.
"""

import math
from typing import Any

import numpy as np

Array = np.ndarray


def factor(sigma: float) -> float:
    """q, the weight that one step of distance costs."""
    _check_sigma(sigma)
    return math.exp(-1 / sigma)


def target(positions: Array, sigma: float) -> Array:
    """L* [n, n]: e^(−|i − j| / sigma)."""
    positions = np.asarray(positions, np.float64)
    return np.exp(-np.abs(positions[:, None] - positions[None, :]) / sigma)


def width_probability(sigma: float, b: Any) -> Array:
    """P(b) = b q^(b−1) (1 − q)², b = 1, 2, …: the one law for which Σ_{b>k} P(b) (1 − k/b) = q^k."""
    q, b = factor(sigma), np.asarray(b, np.float64)
    return b * q ** (b - 1) * (1 - q) ** 2


def width_mean(sigma: float) -> float:
    """E[b] = (1 + q)/(1 − q) = coth(1 / (2 sigma)), near 2 sigma."""
    return 1 / math.tanh(1 / (2 * sigma))


def row_sum_bound(sigma: float) -> float:
    """The largest row sum of L*, which bounds its spectral norm: the same number as E[b]."""
    return width_mean(sigma)


def longest_block(sigma: float, samples: int, delta: float) -> int:
    """b_max: no block of `samples` draws is longer with probability 1 − delta, whatever n (union bound over samples).

    P(b > m) = q^m (1 + m (1 − q)), so b_max ≈ sigma (ln(s/delta) + ln ln(s/delta)).
    """
    q, tail = factor(sigma), _probability("delta", delta) / _samples(samples)
    low, high = 0, 1
    over = lambda m: q**m * (1 + m * (1 - q)) > tail
    while over(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if over(middle) else (low, middle)
    return high


def psi(sigma: float) -> float:
    """Ψ = 1 + sigma + coth(1 / (2 sigma)) of the published bounds, about 1 + 3 sigma."""
    return 1 + sigma + width_mean(sigma)


def expected_spectral_error(n: int, sigma: float, samples: int) -> float:
    """Published: E‖M̄ − L*‖₂ is at most a constant times Ψ (√(log n / s) + log n / s); returned with the constant 1."""
    rate = math.log(n) / _samples(samples)
    return psi(sigma) * (math.sqrt(rate) + rate)


def spectral_tail_published(n: int, sigma: float, samples: int, eps: float) -> float:
    """Published: P(‖M̄ − L*‖₂ ≥ eps) ≤ n exp(−s eps² / (4Ψ (4Ψ + eps)))."""
    scale = 4 * psi(sigma)
    return min(1.0, n * math.exp(-_samples(samples) * eps**2 / (scale * (scale + eps))))


def variance_norm(sigma: float) -> float:
    """‖E[(M − L*)²]‖₂ = 2q/(1 − q)², near 2 sigma²: (E[M²])_ij = q^k (E[b] + k) for all contiguous blocks."""
    q = factor(sigma)
    return 2 * q / (1 - q) ** 2


def spectral_tail(n: int, sigma: float, samples: int, eps: float, longest: float) -> float:
    """P(‖M̄ − L*‖₂ ≥ eps) ≤ 2n exp(−(s eps²/2) / (2q/(1 − q)² + longest · eps/3)) for blocks of at most `longest`.

    Matrix Bernstein (Tropp, arXiv 1004.4389, theorem 1.4) with the exact variance of blocks.
    """
    spread = variance_norm(sigma) + longest * eps / 3
    return min(1.0, 2 * n * math.exp(-_samples(samples) * eps**2 / 2 / spread))


def samples_for_spectral_error(n: int, sigma: float, eps: float, delta: float) -> int:
    """The least s for which `spectral_tail` and the length of the longest block together fail with probability ≤ delta.

    Half of delta is spent on each.
    """
    half = _probability("delta", delta) / 2
    low, high = 0, 1
    fails = lambda s: spectral_tail(n, sigma, s, eps, longest_block(sigma, s, half)) > half
    while fails(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fails(middle) else (low, middle)
    return high


def max_error(n: int, samples: int, delta: float, causal: bool = True) -> float:
    """max |M̄ − L*| is below this with probability 1 − delta: √(ln(2n/delta) / (2s)), 4n instead of 2n if not causal.

    A causal row of M̄ is the empirical survival function of s independent lookbacks, so the Dvoretzky–Kiefer–Wolfowitz
    inequality holds for it, and a union bound over rows (and both directions) for all.
    """
    rows = (2 if causal else 4) * n
    return math.sqrt(math.log(rows / _probability("delta", delta)) / (2 * _samples(samples)))


def samples_for_max_error(n: int, eps: float, delta: float, causal: bool = True) -> int:
    """The least s for which `max_error` is at most eps."""
    rows = (2 if causal else 4) * n
    return math.ceil(math.log(rows / _probability("delta", delta)) / (2 * eps**2))


def unreached(sigma: float, samples: int, distance: float) -> float:
    """(1 − q^k)^s: how often no sample reaches a key at distance k, whose weight is then 0 and not q^k."""
    return (1 - factor(sigma) ** distance) ** _samples(samples)


def mean_combination(sigma: float, distances: Any, longest: int | None = None) -> Array:
    """What combine="mean" tends to for uniform causal logits: E_b[(H_b − H_k)/b; b > k], H the harmonic numbers.

    Not ALiBi: the lookback is half as long and a token weighs itself more. distances: integers ≥ 0.
    """
    k = np.asarray(distances)
    last = longest or int(k.max()) + math.ceil(60 * sigma) + 2
    b = np.arange(1, last + 1)
    harmonic = np.concatenate([[0.0], np.cumsum(1 / b)])
    each = width_probability(sigma, b) / b
    return np.array([np.sum(each[b > d] * (harmonic[b[b > d]] - harmonic[d])) for d in k.ravel()]).reshape(k.shape)


def _samples(samples: int) -> int:
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    return samples


def _probability(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise ValueError(f"{name}={value} must be between 0 and 1")
    return value


def _check_sigma(sigma: float) -> None:
    if not 0 < sigma < math.inf:
        raise ValueError(f"sigma={sigma} must be greater than 0")
