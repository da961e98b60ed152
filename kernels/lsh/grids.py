"""Random grids of blocks: how they are drawn, and where the blocks of a row of tokens begin and end.

One grid is a width b and an offset o. Positions i and j share a block if (i + o) // b = (j + o) // b. With the widths
and offsets of `sample_grids` that happens with probability exp(−|i − j| / sigma): the weight that ALiBi with the slope
1 / sigma gives to a key (Wolfson and Wagner, arXiv 2605.09472; random binning of Rahimi and Recht, NIPS 2007).
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

Array = jax.Array
Law = Literal["integer", "continuous", "stratified", "antithetic", "fixed"]
LAWS: tuple[str, ...] = get_args(Law)
BISECTIONS = 31


def sample_grids(key: Array, sigma: Any, samples: int, *, law: Law = "integer") -> tuple[Array, Array]:
    """Draw `samples` independent grids per head: (widths [H, samples], offsets [H, samples]).

    key: a JAX random key; sigma [H] > 0, in tokens: the reciprocal of ALiBi's slope. Laws:

      integer      b = G1 + G2 − 1 with G ~ Geometric(1 − e^(−1/sigma)), o uniform on 0 … b − 1; int32. The exact law
                   for integer positions: P(b) = b q^(b−1) (1 − q)² with q = e^(−1/sigma).
      continuous   b ~ Gamma(2, sigma), blocks cut at xi + k b with xi uniform on [0, b): float32, as published.
                   (float32 offsets are −xi, so that (i + o) / b has the same meaning in all laws.)
      stratified   integer, one width from each of `samples` quantile ranges of the law: unbiased, smaller variance.
      antithetic   integer, widths in pairs with offsets half a block apart; needs an even number.
      fixed        b = round(2 sigma), o = 0 in every sample: plain block-local attention, the baseline without chance.

    ValueError for samples < 1, an odd number for "antithetic", an unknown law or a sigma that is not [H].
    """
    sigma = jnp.asarray(sigma, jnp.float32)
    if sigma.ndim != 1:
        raise ValueError(f"sigma has shape {sigma.shape}, must be [H]")
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    if law not in LAWS:
        raise ValueError(f"law={law!r} is not one of {', '.join(LAWS)}")
    if law == "antithetic" and samples % 2:
        raise ValueError(f"samples={samples} must be even for law='antithetic', which draws pairs")
    shape = (sigma.shape[0], samples)
    for_width, for_offset = jax.random.split(key)
    if law == "fixed":
        widths = jnp.maximum(1, jnp.round(2 * sigma)).astype(jnp.int32)
        return jnp.broadcast_to(widths[:, None], shape), jnp.zeros(shape, jnp.int32)
    if law == "continuous":
        # No block is shorter than a token: any width up to 1 means the same mask, and would overflow a hash.
        widths = jnp.maximum(1.0, sigma[:, None] * jax.random.gamma(for_width, 2.0, shape, jnp.float32))
        return widths, -jax.random.uniform(for_offset, shape, jnp.float32) * widths
    if law == "stratified":
        place = (jnp.arange(samples)[None, :] + jax.random.uniform(for_width, shape, jnp.float32)) / samples
        widths = width_quantile(sigma[:, None], 1 - place)
    else:
        pairs = 2 if law == "antithetic" else 1
        drawn = jax.random.exponential(for_width, (2, shape[0], samples // pairs), jnp.float32)
        geometric = 1 + jnp.floor(sigma[None, :, None] * drawn).astype(jnp.int32)
        widths = jnp.repeat(geometric.sum(0, dtype=jnp.int32) - 1, pairs, axis=1)
    if law == "antithetic":
        first = jax.random.randint(for_offset, (shape[0], samples // 2), 0, widths[:, ::2], jnp.int32)
        shifted = (first + widths[:, ::2] // 2) % widths[:, ::2]
        return widths, jnp.stack([first, shifted], axis=2).reshape(shape)
    return widths, jax.random.randint(for_offset, shape, 0, widths, jnp.int32)


def width_tail(sigma: Any, n: Any) -> Array:
    """P(b > n) = q^n (1 + n (1 − q)), q = e^(−1/sigma): how often a block of the integer law is longer than n."""
    sigma, n = jnp.asarray(sigma, jnp.float32), jnp.asarray(n, jnp.float32)
    return jnp.exp(-n / sigma) * (1 - n * jnp.expm1(-1 / sigma))


def width_quantile(sigma: Any, tail: Any) -> Array:
    """The least n with P(b > n) ≤ tail: int32, of the broadcast shape of sigma > 0 and 0 < tail ≤ 1."""
    sigma, tail = jnp.broadcast_arrays(jnp.asarray(sigma, jnp.float32), jnp.asarray(tail, jnp.float32))
    low, high = jnp.zeros(sigma.shape, jnp.int32), jnp.full(sigma.shape, 2**30, jnp.int32)

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = width_tail(sigma, middle) <= tail
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    return jnp.maximum(1, jax.lax.fori_loop(0, BISECTIONS, halve, (low, high))[1])


def blocks_at(positions: Array, widths: Array, offsets: Array) -> tuple[Array, Array]:
    """First position of the block that holds each position, and of the block after it: int32 [*positions, H, samples].

    positions: int32 of any shape, at least 0; a first position may be negative. Grids as `sample_grids` gives them.
    """
    lead = (1,) * positions.ndim
    return block_ends(
        positions[..., None, None], widths.reshape(lead + widths.shape), offsets.reshape(lead + widths.shape)
    )


def floor_divide(x: Array, width: Array) -> Array:
    """x // width for int32 x and width ≥ 1, exactly, by two float32 divisions and a correction.

    The compiler for TPUs unrolls an integer division over the whole array: minutes for a long row.
    """
    estimate = lambda x: jnp.floor(x.astype(jnp.float32) / width.astype(jnp.float32)).astype(jnp.int32)
    k = estimate(x)
    k += estimate(x - k * width)  # the first is off by up to 2⁻²² of k, this one by one
    rest = x - k * width
    return jnp.where(rest < 0, k - 1, jnp.where(rest >= width, k + 1, k))


def block_ends(i: Array, widths: Array, offsets: Array) -> tuple[Array, Array]:
    """The same for arrays of one rank that broadcast."""
    if jnp.issubdtype(widths.dtype, jnp.integer):
        first = floor_divide(i + offsets, widths) * widths - offsets
        return first, first + widths
    # The cuts are ceil(k b − o): one function of k, so that all positions of a block agree whatever rounding does.
    cut = lambda k: jnp.ceil(k * widths - offsets).astype(jnp.int32)
    k = jnp.floor((i.astype(jnp.float32) + offsets) / widths)
    k = jnp.where(cut(k) > i, k - 1, jnp.where(cut(k + 1) <= i, k + 1, k))
    return cut(k), cut(k + 1)
