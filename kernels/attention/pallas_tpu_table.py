"""A log-prior as a table over distance, for functions that a tile cannot afford: buckets, sums of cosines, networks.

With default positions a tile of the prior is constant along its diagonals: C + R values, sheared into C × R by one
strided roll. The table holds T + S values per head, computed outside the kernel by any JAX code; the kernel sums the
gradient of the scores along diagonals, and the parameters' gradient follows by `jax.vjp`. O(T + S) memory per head.

The table runs over u = query position − key position, upwards from −(S − 1 − shift), S padded.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.attention.masks import visible
from kernels.attention.pallas_tpu_plan import Plan

Array = jax.Array
SUMS = 8  # rows of the diagonal sums: one sublane tile, added up outside
LONGEST = 2**18  # of T + S times query heads per key head: the gradient of the table stays in VMEM


def length(plan: Plan) -> int:
    """Distances of a table: those of all padded queries to all padded keys."""
    return plan.padded_queries + plan.padded_keys


def piece(plan: Plan) -> int:
    """A tile's stretch of the table starts at a multiple of this; it is read in pieces of this size."""
    return math.gcd(plan.block_q, plan.block_k)


def pieces(plan: Plan) -> int:
    """How many pieces a tile's stretch of the table has."""
    return (plan.block_q + plan.block_k) // piece(plan)


def first_piece(plan: Plan, i: Any, j: Any) -> Any:
    """Index of the first piece of the tile of query block i and key block j."""
    size = piece(plan)
    return i * (plan.block_q // size) + plan.padded_keys // size - (j + 1) * (plan.block_k // size)


def values(plan: Plan, params: Any) -> Array:
    """The table, float32 [H, 1, length]; distances that no query may see hold the value at −1."""
    d = plan.padded_keys - 1 - plan.shift - jnp.arange(length(plan), dtype=jnp.int32)
    seen = visible(-d, jnp.zeros_like(d), None, None, causal=plan.causal, window=plan.window)
    seen &= (-plan.keys < d) & (d < plan.queries)
    table = jax.vmap(plan.prior, in_axes=(0, None))(params, jnp.where(seen, d, -1))
    return table.astype(jnp.float32)[:, None, :]


def shear(plan: Plan, stretch: Array) -> Array:
    """[1, C + R] -> [C, R]: entry (c, r) is stretch[r − c + C − 1]."""
    width = plan.block_q + plan.block_k
    shift = width - plan.block_k + 1
    rows = pltpu.roll(jnp.broadcast_to(stretch, (SUMS, width)), shift, 1, stride=1, stride_axis=0)
    while rows.shape[0] < plan.block_k:  # the next rows are those rolled on by as many places
        more = min(rows.shape[0], plan.block_k - rows.shape[0])
        rows = jnp.concatenate([rows, pltpu.roll(rows[:more], rows.shape[0], 1)], axis=0)
    return rows[:, : plan.block_q]


def diagonal_sums(plan: Plan, x: Array) -> Array:
    """[C, R] -> [8, C + R]; row s holds sums of diagonals that still have to move right by 7 − s.

    Halves of the rows are added, one of them rolled, until one sublane tile is left: about one pass over the tile.
    """
    x = jnp.concatenate([x, jnp.zeros((plan.block_k, plan.block_k), x.dtype)], axis=1)
    while x.shape[0] > SUMS:
        half = x.shape[0] // 2
        if half % SUMS:
            half = SUMS
        upper = x[half:]
        lower = (
            x[:half] if upper.shape[0] == half else jnp.concatenate([x[:half], jnp.zeros_like(upper[half:])], axis=0)
        )
        x = pltpu.roll(lower, half, 1) + upper
    return x


def collect(sums: Array) -> Array:
    """Diagonal sums [H, 8, length] -> gradient of the table [H, 1, length]."""
    rows = [jnp.pad(sums[:, s], ((0, 0), (SUMS - 1 - s, 0)))[:, : sums.shape[2]] for s in range(SUMS)]
    return sum(rows[1:], rows[0])[:, None, :]
