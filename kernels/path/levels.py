"""Levels of the row above its blocks: which tokens are joined, the products between them, and what is moved by them.

A level joins `radix` neighbours, the children, of `size` tokens each, to parents (the words and a picture are in
docs/path.md). Queries stand at the left edge of their child, keys are needed there too: keys of child c for the queries
of child a > c are k R_acᵀ with

    R_ac = P_{a−1} … P_{c+1}        queries go the other way, to the left edge of the parent by q P_{a−1} … P_0

where P_c is the product of child c. `gpu_products` makes these products, `gpu_moves` moves rows by them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
RADIX = 8


class Level(NamedTuple):
    """`radix` children of `size` tokens each."""

    radix: int
    size: int

    @property
    def parent(self) -> int:
        return self.radix * self.size

    @property
    def pairs(self) -> int:
        """Children (a, c) with c < a; pair (a, c) has the number a (a − 1) / 2 + c."""
        return self.radix * (self.radix - 1) // 2

    @property
    def stored(self) -> int:
        """Carried keys per parent."""
        return self.pairs * self.size


def plan_levels(length: int, block: int) -> tuple[Level, ...]:
    """Levels from blocks of `block` tokens up to the whole row, with few tokens of padding.

    As few levels as RADIX allows, each of the least radix that covers the row, from the first one on: a level stores
    (radix − 1) / 2 times the keys, and the first one, whose children are blocks, is the least efficient.
    """
    count = -(-length // block)
    if count == 1:
        return ()
    depth = 1
    while RADIX**depth < count:
        depth += 1
    levels, size = [], block
    for above in reversed(range(depth)):
        radix = -(-count // RADIX**above)
        levels.append(Level(radix, size))
        count, size = -(-count // radix), size * radix
    return tuple(levels)


# ---- Packed keys ----


def pair_of(number: Array, radix: int) -> tuple[Array, Array]:
    """(a, c) of a pair's number, by comparisons (works inside kernels)."""
    a = number * 0 + 1
    for t in range(2, radix):
        a = a + (number >= t * (t - 1) // 2).astype(jnp.int32)
    return a, number - lax.div(a * (a - 1), jnp.int32(2))


def fold(x: Array, level: Level) -> Array:
    """Sum over the queries' children: x [N, stored, …] -> [N, parent, …] float32; child c gets Σ_{a > c} of (a, c)."""
    x = x.reshape(x.shape[0], level.pairs, level.size, *x.shape[2:])
    parts = []
    for c in range(level.radix):
        some = [x[:, a * (a - 1) // 2 + c].astype(jnp.float32) for a in range(c + 1, level.radix)]
        parts.append(sum(some) if some else jnp.zeros(x[:, 0].shape, jnp.float32))
    return jnp.concatenate(parts, axis=1)
