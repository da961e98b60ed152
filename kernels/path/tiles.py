"""Array work on tiles [B, H, R, C] (rows are queries, columns keys) in the forms that XLA compiles well.

Reductions flatten their input first: with axes of length 1 among the reduced array's axes XLA's CPU loops are up to a
hundred times slower, and a sum over the leading axis is slow in any case.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def row_sum(x: Array) -> Array:
    """[B, H, R, C] -> [B, H, R]."""
    return x.reshape(-1, x.shape[-1]).sum(-1).reshape(x.shape[:-1])


def row_max(x: Array) -> Array:
    """[B, H, R, C] -> [B, H, R]."""
    return x.reshape(-1, x.shape[-1]).max(-1).reshape(x.shape[:-1])


def col_sum(x: Array) -> Array:
    """[B, H, R, C] -> [B, H, C]."""
    return x.reshape(-1, *x.shape[-2:]).sum(1).reshape(*x.shape[:-2], x.shape[-1])


def batch_sum(x: Array) -> Array:
    """[B, ...] -> [...], in a fixed order: halves are added until one is left."""
    while x.shape[0] > 1:
        half, odd = divmod(x.shape[0], 2)
        top = x[:half] + x[half : 2 * half]
        x = jnp.concatenate([top, x[2 * half :]]) if odd else top
    return x[0]


def toeplitz(diagonals: Array) -> Array:
    """[H, 2 S − 1] values of the diagonals, the bottom left one first -> [H, S, S].

    Copies and reshapes only: rows of one value more than their stride shift by one place each.
    """
    heads, count = diagonals.shape
    size = (count + 1) // 2
    stack = jnp.broadcast_to(jnp.pad(diagonals, ((0, 0), (0, 1)))[:, None, :], (heads, size, 2 * size))
    flat = stack.reshape(heads, size * 2 * size)[:, size - 1 : size - 1 + size * count]
    return flat.reshape(heads, size, count)[:, :, :size]


def toeplitz_sums(x: Array) -> Array:
    """The transpose of `toeplitz`: [H, S, S] -> [H, 2 S − 1] sums along the diagonals, without a scatter."""
    heads, size, _ = x.shape
    flat = jnp.pad(x, ((0, 0), (0, 0), (0, size - 1))).reshape(heads, size * (2 * size - 1))
    return jnp.pad(flat, ((0, 0), (size - 1, 1))).reshape(heads, size, 2 * size).sum(1)[:, :-1]


def at(tree: Any, index: Array) -> Any:
    """Entry `index` of the leading axis of every array."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def add_at(x: Array, index: Array, part: Array) -> Array:
    """x with `part` added to entry `index` of the leading axis."""
    return lax.dynamic_update_index_in_dim(x, at(x, index) + part, index, 0)


def zeros(like: Array, shape: tuple[int, ...]) -> Array:
    """Zeros of `like`'s dtype that vary over the same mesh axes inside shard_map, as a loop's carry must."""
    return lax.full_like(like, 0, shape=shape)


def vary_together(tree: Any) -> Any:
    """Inside shard_map with check_vma: let all arrays vary over the union of their mesh axes, as loop carries must.

    The transpose of this cast sums the gradient of what was replicated (a prior's parameters) over the mesh.
    """
    varying = lambda x: frozenset(jax.typeof(x).manual_axis_type.varying)
    union = frozenset[Any]().union(*map(varying, jax.tree.leaves(tree)))

    def cast(x: Array) -> Array:
        missing = tuple(union - varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)
