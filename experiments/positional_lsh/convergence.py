"""How fast the mean of random block masks approaches ALiBi: in the masks, and in what attention puts out.

Everything is measured head by head, with the heads' own bandwidths, on dense matrices of moderate length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bampath.positions import lsh_theory as theory
from kernels.attention.api import DistancePrior, attention
from kernels.lsh.api import lsh_attention
from kernels.lsh.grids import blocks_at, sample_grids

Array = jax.Array
Row = dict[str, Any]
POWER_STEPS = 40


@dataclass(frozen=True)
class Plan:
    """length: tokens; sigmas: one head each; samples, laws, seeds: what is drawn; delta: of the bounds shown."""

    length: int = 1024
    sigmas: tuple[float, ...] = (2.0, 8.0, 32.0, 128.0)
    samples: tuple[int, ...] = (1, 5, 10, 20, 50, 100, 400)
    laws: tuple[str, ...] = ("integer", "continuous", "stratified", "fixed")
    seeds: int = 5
    delta: float = 0.1


@partial(jax.jit, static_argnums=(1, 3, 4))
def mean_mask(key: Array, length: int, sigma: Array, samples: int, law: Any) -> Array:
    """M̄ [length, length] of one head, both triangles."""
    widths, offsets = sample_grids(key, sigma[None], samples, law=law)
    first = blocks_at(jnp.arange(length, dtype=jnp.int32), widths, offsets)[0][:, 0]  # [length, samples]
    add = lambda total, start: (total + (start[:, None] == start[None, :]), None)
    total, _ = jax.lax.scan(add, jnp.zeros((length, length), jnp.int32), first.T)
    return total / samples


@jax.jit
def spectral_norm(matrix: Array) -> Array:
    """‖matrix‖₂ of a symmetric matrix by power iteration from a random vector."""
    start = jax.random.normal(jax.random.key(0), (matrix.shape[0],))

    def step(_: Any, x: Array) -> Array:
        y = jnp.matmul(matrix, x, precision="highest")
        return y / jnp.maximum(jnp.linalg.norm(y), 1e-30)

    return jnp.linalg.norm(jnp.matmul(matrix, jax.lax.fori_loop(0, POWER_STEPS, step, start), precision="highest"))


def mask_rows(plan: Plan) -> Iterator[Row]:
    """Errors of M̄ per bandwidth, law and number of samples, with the bounds that hold for it."""
    for sigma in plan.sigmas:
        want = jnp.asarray(theory.target(np.arange(plan.length), sigma), jnp.float32)
        norm = float(spectral_norm(want))
        for law in plan.laws:
            for samples in plan.samples if law != "fixed" else plan.samples[:1]:
                errors = [_mask_errors(plan, want, seed, sigma, samples, law) for seed in range(plan.seeds)]
                spectral, largest = np.array(errors).T
                yield {
                    "benchmark": "mask",
                    "case": law,
                    "sigma": sigma,
                    "samples": samples,
                    "length": plan.length,
                    "spectral": float(np.mean(spectral)),
                    "spectral_max": float(np.max(spectral)),
                    "spectral_relative": float(np.mean(spectral)) / norm,
                    "largest": float(np.mean(largest)),
                    "largest_max": float(np.max(largest)),
                    **bounds(plan, sigma, samples, norm),
                }


def _mask_errors(plan: Plan, want: Array, seed: int, sigma: float, samples: int, law: str) -> tuple[float, float]:
    mask = mean_mask(jax.random.key(seed), plan.length, jnp.float32(sigma), samples, law)
    error = mask - want
    return float(spectral_norm(error)), float(jnp.abs(jnp.tril(error)).max())


def bounds(plan: Plan, sigma: float, samples: int, norm: float) -> Row:
    """What theory allows: of the largest entry and of the spectral norm, each with probability 1 − delta."""
    longest = theory.longest_block(sigma, samples, plan.delta / 2)
    fails = lambda eps: theory.spectral_tail(plan.length, sigma, samples, eps, longest) > plan.delta / 2
    low, high = 0.0, 1.0
    while fails(high):
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if fails(middle) else (low, middle)
    return {
        "largest_bound": theory.max_error(plan.length, samples, plan.delta),
        "spectral_bound": high,
        "spectral_bound_relative": high / norm,
        "spectral_published": theory.expected_spectral_error(plan.length, sigma, samples),
        "longest_bound": longest,
    }


def block_rows(lengths: Sequence[int], sigma: float, samples: int, delta: float, seeds: int) -> Iterator[Row]:
    """The longest block of s grids against the length: b_max does not grow with n for fixed s, and as log log n for
    s = log² n."""
    for length in lengths:
        for name, count in (("fixed", samples), ("log² n", max(1, round(np.log(length) ** 2)))):
            keys = jax.random.split(jax.random.key(0), seeds)
            widths = jax.vmap(lambda key, s=count: sample_grids(key, jnp.asarray([sigma]), s)[0].max())(keys)
            yield {
                "benchmark": "blocks",
                "case": name,
                "sigma": sigma,
                "samples": count,
                "length": length,
                "longest": float(widths.mean()),
                "longest_bound": theory.longest_block(sigma, count, delta),
            }


def output_rows(q: Array, k: Array, v: Array, plan: Plan, layer: int, slopes: Sequence[float]) -> Iterator[Row]:
    """Relative Frobenius error of attention outputs against exact ALiBi, on given inputs [B, T, H, D] of one layer.

    Also exact ALiBi with a window of as many keys as the samples' longest block: the same work, no randomness.
    """
    exact = np.asarray(attention(q, k, v, prior=DistancePrior({"slope": jnp.asarray(slopes)}, alibi)), np.float64)
    sigma = 1 / jnp.asarray(slopes, jnp.float32)
    for samples in plan.samples:
        found: dict[str, list[np.ndarray]] = {"shared": [], "mean": [], "window": []}
        for seed in range(plan.seeds):
            widths, offsets = sample_grids(jax.random.key(seed), sigma, samples)
            for combine in ("shared", "mean"):
                o = lsh_attention(q, k, v, widths, offsets, combine=combine)
                found[combine].append(_by_head(o, exact))
            found["window"].append(_by_head(_windowed(q, k, v, slopes, np.asarray(widths).max(1)), exact))
        fixed = lsh_attention(q, k, v, *sample_grids(jax.random.key(0), sigma, 1, law="fixed"))
        cases = {case: np.mean(errors, axis=0) for case, errors in found.items()} | {"fixed": _by_head(fixed, exact)}
        for case, errors in cases.items():
            for head, error in enumerate(errors):
                yield {
                    "benchmark": "output",
                    "case": case,
                    "layer": layer,
                    "head": head,
                    "sigma": float(sigma[head]),
                    "samples": samples,
                    "length": int(q.shape[1]),
                    "error": float(error),
                }


def alibi(params: Any, d: Array) -> Array:
    return -params["slope"] * jnp.abs(d).astype(jnp.float32)


def _windowed(q: Array, k: Array, v: Array, slopes: Sequence[float], windows: np.ndarray) -> Array:
    """Exact ALiBi where each head sees its own number of keys."""
    heads = []
    for head, (slope, window) in enumerate(zip(slopes, windows.tolist(), strict=True)):
        prior, key_head = DistancePrior({"slope": jnp.asarray([slope])}, alibi), head * k.shape[2] // q.shape[2]
        one = lambda x, h: x[:, :, h : h + 1]
        heads.append(attention(one(q, head), one(k, key_head), one(v, key_head), prior=prior, window=int(window)))
    return jnp.concatenate(heads, axis=2)


def _by_head(o: Array, exact: np.ndarray) -> np.ndarray:
    """[H]: ‖o − exact‖ / ‖exact‖ over batch, rows and dimensions."""
    difference = np.asarray(o, np.float64) - exact
    return np.sqrt((difference**2).sum((0, 1, 3)) / (exact**2).sum((0, 1, 3)))
