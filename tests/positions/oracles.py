"""Priors and rotations written a second time, in float64 numpy and in another form than the library's."""

import math

import numpy as np

Array = np.ndarray


def ggd(d: Array, alpha: float, beta: float, theta_mu: float = 0.0) -> Array:
    mu = math.exp(theta_mu) - math.exp(-theta_mu)
    return -math.exp(alpha) * (np.abs(np.asarray(d, np.float64) - mu) + 1e-5) ** beta


def ggd_inside(d: Array, alpha: float, beta: float) -> Array:
    return -((np.abs(np.asarray(d, np.float64)) * math.exp(alpha) + 1e-5) ** beta)


def alibi(d: Array, log_slope: float) -> Array:
    return -np.exp(log_slope) * np.abs(d)


def kerple_log(d: Array, log_r1: float, log_r2: float) -> Array:
    return -np.exp(log_r1) * np.log(1 + np.exp(log_r2) * np.abs(d))


def kerple_power(d: Array, log_r1: float, logit_p: float) -> Array:
    return -np.exp(log_r1) * np.abs(np.asarray(d, np.float64)) ** (2 / (1 + np.exp(-logit_p)))


def t5_bucket(d: Array, buckets: int, max_distance: int, bidirectional: bool) -> Array:
    """The bucket numbers by the published formula (floor of a logarithm), for distances off the exact borders."""
    offset = np.zeros_like(d)
    n = np.maximum(-d, 0)
    if bidirectional:
        buckets //= 2
        offset, n = (d > 0) * buckets, np.abs(d)
    exact = buckets // 2
    grown = np.log(np.maximum(n, 1) / exact) / np.log(max_distance / exact) * (buckets - exact)
    large = np.minimum(exact + np.floor(grown + 1e-12).astype(int), buckets - 1)
    return offset + np.where(n < exact, n, large)


def sandwich(d: Array, head: int, heads: int, dim: int) -> Array:
    """Inner product of sinusoidal vectors at 0 and d, compressed per head, shifted to 0 at d = 0."""

    def vector(position: Array) -> Array:
        phase = np.asarray(position, np.float64)[..., None] / 10000 ** (2 * np.arange(1, dim // 2 + 1) / dim)
        return np.concatenate([np.sin(phase), np.cos(phase)], axis=-1)

    product = np.sum(vector(np.zeros_like(d)) * vector(d), axis=-1)
    return (product - dim / 2) / (8 * head / heads)


def rope_matrix(position: int, frequencies: Array, layout: str) -> Array:
    """The rotation of a whole head as a D × D matrix."""
    pairs = len(frequencies)
    out = np.zeros((2 * pairs, 2 * pairs))
    for n, omega in enumerate(frequencies):
        a, b = (n, n + pairs) if layout == "half" else (2 * n, 2 * n + 1)
        c, s = math.cos(position * omega), math.sin(position * omega)
        out[a, a], out[a, b], out[b, a], out[b, b] = c, -s, s, c
    return out


def random_params(parts, geometry, seed: int = 0, spread: float = 1.0) -> dict:
    """{part name: {name: float32 array}} of the right shapes, far from any special start (and without compiling)."""
    rng = np.random.default_rng(seed)
    shapes = {part.NAME: {n: p.shape for n, p in part.parameters(geometry).items()} for part in parts}
    return {
        part: {name: (spread * rng.normal(size=shape)).astype(np.float32) for name, shape in names.items()}
        for part, names in shapes.items()
        if names
    }


def softmax(z: Array) -> Array:
    e = np.exp(z - np.max(z, axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
