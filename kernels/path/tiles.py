"""Tiles of the blockwise PaTH attention: logits between the queries of one superblock and the keys of another.

Tiles are [B, H, S, S], rows are queries and columns keys. Reductions flatten their input first: with axes of length 1
among those of the array, XLA's CPU loops are up to a hundred times slower, and so is a sum over the leading axis.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels.path.plan import Plan
from kernels.path.rows import Rows
from kernels.path.transport import Span, matmul, span, span_scores, transpose

Array = jax.Array


class Tile(NamedTuple):
    """logits [B, H, S, S] (−inf where unseen) and the bias in them before the sharpness [B or 1, H, S, S], or None."""

    logits: Array
    bias: Array | None


def row_sum(x: Array) -> Array:
    """[B, H, S, C] -> [B, H, S]."""
    return x.reshape(-1, x.shape[-1]).sum(-1).reshape(x.shape[:-1])


def row_max(x: Array) -> Array:
    """[B, H, S, C] -> [B, H, S]."""
    return x.reshape(-1, x.shape[-1]).max(-1).reshape(x.shape[:-1])


def col_sum(x: Array) -> Array:
    """[B, H, S, C] -> [B, H, C]."""
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


# ---- Products over heads ----


def times_keys(x: Array, y: Array, precision: Any) -> Array:
    """x [B, H, S, a] times y [B, K, a, b] of its key head -> [B, H, S, b]."""
    grouped = x.reshape(*y.shape[:2], -1, x.shape[-1])
    return jnp.matmul(grouped, y, precision=precision).reshape(*x.shape[:-1], y.shape[-1])


def to_keys(x: Array, y: Array, kv_heads: int, precision: Any) -> Array:
    """xᵀ y summed over rows and the query heads of a key head: x [B, H, S, a], y [B, H, S, b] -> [B, K, a, b]."""
    grouped = lambda z: z.reshape(z.shape[0], kv_heads, -1, z.shape[-1])
    return jnp.matmul(transpose(grouped(x)), grouped(y), precision=precision)


def next_products(r: Array, m: Array, a: Array) -> Array:
    """r_{a+1,·} from r_{a,·} [N, B, K, D, D]: the factor m_a for c < a, the identity for c = a."""
    eye = jnp.broadcast_to(jnp.eye(m.shape[-1], dtype=m.dtype), m.shape)
    return lax.dynamic_update_index_in_dim(matmul(r, m[None]), eye, a, 0)


def _grouped(row: Rows) -> Array:
    return row.q.reshape(*row.k.shape[:2], -1, *row.q.shape[2:])


def _ungrouped(x: Array) -> Array:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def row_span(row: Rows, block: int) -> Span:
    """The span of a superblock, with scores and q as [B, H, S, ·]."""
    out = span(_grouped(row), row.k, row.w, row.beta, block)
    return out._replace(scores=_ungrouped(out.scores), q=_ungrouped(out.q))


def row_scores(row: Rows, block: int) -> Array:
    """Only the scores of a superblock's span, [B, H, S, S]."""
    return _ungrouped(span_scores(_grouped(row), row.k, row.w, row.beta, block))


# ---- Logits ----


def diagonals(plan: Plan, table: Array, steps: Array | int) -> Array:
    """Of the prior's table, the diagonals of a tile whose keys are `steps` superblocks before its queries."""
    return lax.dynamic_slice_in_dim(table, (plan.superblocks - 1 - steps) * plan.size, 2 * plan.size - 1, axis=-1)


def add_diagonals(plan: Plan, table: Array, part: Array, steps: Array | int) -> Array:
    """The table with `part` added to the diagonals of such a tile."""
    start = (plan.superblocks - 1 - steps) * plan.size
    return lax.dynamic_update_slice_in_dim(table, diagonals(plan, table, steps) + part, start, axis=-1)


def _bias(plan: Plan, table: Array | None, row: Rows, col: Rows, steps: Array | int) -> Array | None:
    bias = None
    if table is not None:  # once, not in every batch row
        bias = lax.optimization_barrier(toeplitz(diagonals(plan, table, steps))[None])
    if row.hi is not None and row.lo is not None and col.neg_hi is not None and col.neg_lo is not None:
        gate = (row.hi[..., :, None] + col.neg_hi[..., None, :]) + (row.lo[..., :, None] + col.neg_lo[..., None, :])
        bias = gate if bias is None else bias + gate
    return bias


def _seen(row: Rows, col: Rows, own: bool) -> Array | None:
    """Who sees whom, [B or 1, 1, S, S]; None if everybody sees everybody."""
    seen = None
    if row.q_ids is not None and col.k_ids is not None:
        seen = (row.q_ids[:, :, None] == col.k_ids[:, None, :])[:, None]
    if own:
        index = jnp.arange(row.q.shape[-2])
        causal = (index[:, None] >= index[None, :])[None, None]
        seen = causal if seen is None else seen & causal
    return seen


def _tile(scores: Array, bias: Array | None, row: Rows, seen: Array | None) -> Tile:
    logits = scores
    if bias is not None:
        logits = scores + (bias if row.rho is None else bias * row.rho[..., None])
    return Tile(logits if seen is None else jnp.where(seen, logits, -jnp.inf), bias)


def own_tile(plan: Plan, table: Array | None, row: Rows, scores: Array) -> Tile:
    """The tile on the diagonal."""
    return _tile(scores, _bias(plan, table, row, row, 0), row, _seen(row, row, own=True))


def past_tile(
    plan: Plan,
    table: Array | None,
    row: Rows,
    col: Rows,
    queries: Array,
    keys: Array,
    steps: Array | int,
    precision: Any,
) -> Tile:
    """A tile left of the diagonal, from queries [B, H, S, D] and keys [B, K, S, D], both at the row's left edge."""
    scores = times_keys(queries, transpose(keys), precision)
    return _tile(scores, _bias(plan, table, row, col, steps), row, _seen(row, col, own=False))
