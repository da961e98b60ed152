"""Tiles of the blockwise attention: blocks of queries and keys, which tiles to visit, and the scores of one tile.

Blocks never pad. The last block of an axis starts early enough to end with the axis, and the entries that it shares
with the block before are visible in one of the two only.

With default positions the prior depends on the diagonal of a tile alone. It is evaluated once per diagonal of the whole
call, [H, T + S - 1], tiles lay slices of that table along their diagonals, and the backward pass adds up gradients per
diagonal: O(T) special functions, not O(T S). With explicit positions it is evaluated in each tile.

Shape names: B batch, H heads, K key heads, R rows (queries) and C columns (keys) of a tile. Tiles are [B, H, R, C].
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels.attention.call import FAR, Call
from kernels.attention.masks import visible

Array = jax.Array
TILE = {"cpu": 2**19}  # scores of one tile, all batch rows and heads together, that a loop step aims at
ACCELERATOR_TILE = 2**24
LARGEST, SMALLEST = 512, 64  # bounds of a block of queries


class Grid(NamedTuple):
    """Lengths and numbers of the blocks of queries and of keys."""

    rows: int
    cols: int
    row_blocks: int
    col_blocks: int


def make_grid(length: int, kv_length: int, rows: int, cols: int) -> Grid:
    """Blocks of at most `rows` queries and `cols` keys, all of nearly that length and of one length per axis."""
    row_blocks, col_blocks = -(-length // min(rows, length)), -(-kv_length // min(cols, kv_length))
    return Grid(-(-length // row_blocks), -(-kv_length // col_blocks), row_blocks, col_blocks)


def choose_grid(call: Call) -> Grid:
    """Near square tiles of about TILE scores; a short sequence is one tile, a few queries get long blocks of keys."""
    batch, length, heads, _ = call.q.shape
    pairs = max(1, TILE.get(jax.default_backend(), ACCELERATOR_TILE) // (batch * heads))
    power = lambda n: 1 << (max(1, n).bit_length() - 1)
    rows = max(SMALLEST, min(LARGEST, power(math.isqrt(pairs))))
    return make_grid(length, call.k.shape[1], rows, max(SMALLEST, power(pairs // min(rows, length))))


# ---- One block of queries or keys ----


def cut(x: Array, start: Array | int, size: int) -> Array:
    """x[:, start : start + size]."""
    return x if x.shape[1] == size else lax.dynamic_slice_in_dim(x, start, size, axis=1)


def put(x: Array, part: Array, start: Array | int) -> Array:
    """x with `part` written at `start` of axis 1."""
    part = part.astype(x.dtype)
    return part if x.shape == part.shape else lax.dynamic_update_slice_in_dim(x, part, start, axis=1)


def accumulate(x: Array, part: Array, start: Array | int) -> Array:
    """x with `part` added at `start` of axis 1."""
    return put(x, cut(x, start, part.shape[1]) + part, start)


def heads_first(x: Array) -> Array:
    """[B, n, H, ...] -> [B, H, n, ...], and back."""
    return jnp.swapaxes(x, 1, 2)


def loop(bounds: tuple[Array | int, Array | int], most: int, body: Callable[..., Any], init: Any) -> Any:
    """fori_loop over the bounds; no loop where there is one block at most."""
    return body(0, init) if most == 1 else lax.fori_loop(*bounds, body, init)


class Block(NamedTuple):
    """What a tile knows about its queries or its keys besides q, k and v."""

    start: Array | int
    fresh: Array | None  # [n]: False where the block before has covered the entry; None if it never has
    positions: Array | None  # [1 or B, n]; None for the default
    segments: Array | None  # [B, n]
    gates: tuple[Array, Array] | None  # hi, lo [B, H, n]


def block(call: Call, index: Array | int, size: int, queries: bool) -> Block:
    """Block `index` of the queries or of the keys; the last one ends with the axis."""
    length = (call.q if queries else call.k).shape[1]
    start = 0 if size == length else jnp.minimum(index * size, length - size)
    part = lambda x: None if x is None else cut(x, start, size)
    gates = None
    if call.gates is not None:
        high, low = call.gates[:2] if queries else call.gates[2:]
        gates = heads_first(cut(high, start, size)), heads_first(cut(low, start, size))
    return Block(
        start=start,
        fresh=None if length % size == 0 else start + jnp.arange(size) >= index * size,
        positions=part(call.q_positions if queries else call.kv_positions),
        segments=part(call.q_segments if queries else call.kv_segments),
        gates=gates,
    )


# ---- Which tiles to visit ----


def _extent(positions: Array, segments: Array | None, size: int, count: int) -> tuple[Array, ...]:
    """Per block, [B or 1, blocks] each: smallest and largest position and segment id, padding left out."""
    starts = jnp.minimum(jnp.arange(count) * size, positions.shape[1] - size)
    index = starts[:, None] + jnp.arange(size)[None, :]
    if segments is None:
        return positions[:, index].min(-1), positions[:, index].max(-1)
    least = lambda x: jnp.where(segments >= 0, x, FAR)[:, index].min(-1)
    most = lambda x: jnp.where(segments >= 0, x, -FAR)[:, index].max(-1)
    return least(positions), most(positions), least(segments), most(segments)


def key_ranges(call: Call, grid: Grid) -> Callable[[Array | int], tuple[Any, Any]]:
    """For a block of queries, the first and the end block of keys that one of them may see in some batch row.

    From the extents of positions and segments of each block, so packed documents and windows skip what they cannot see.
    """
    if not call.causal and call.window is None and call.q_segments is None:
        return lambda i: (0, grid.col_blocks)
    q_pos, k_pos = call.positions()
    queries = _extent(q_pos, call.q_segments, grid.rows, grid.row_blocks)
    keys = _extent(k_pos, call.kv_segments, grid.cols, grid.col_blocks)

    def bounds(i: Array | int) -> tuple[Any, Any]:
        rows = [lax.dynamic_slice_in_dim(x, i, 1, axis=1) for x in queries]
        may = keys[0] <= rows[1] if call.causal else jnp.ones_like(keys[0], dtype=bool)
        if call.window is not None:
            may &= rows[0] - keys[1] < call.window
            if not call.causal:
                may &= keys[0] - rows[1] < call.window
        if call.q_segments is not None:
            may &= (keys[2] <= rows[3]) & (rows[2] <= keys[3])
        may = may.any(0)
        end = grid.col_blocks - jnp.argmax(may[::-1])
        return jnp.argmax(may), jnp.where(may.any(), end, 0)

    return bounds


# ---- The scores of one tile ----


def visible_tile(call: Call, row: Block, col: Block, grid: Grid) -> Array | None:
    """[1 or B, R, C], or None where the whole tile is known to be visible."""
    open_ = not call.causal and call.window is None and call.q_segments is None
    if open_ and row.fresh is None and col.fresh is None:
        return None
    q_pos, k_pos = _tile_positions(call, row, col, grid)
    q_seg = None if row.segments is None else row.segments[:, :, None]
    k_seg = None if col.segments is None else col.segments[:, None]
    rule: dict[str, Any] = {"causal": call.causal, "window": call.window}
    seen = visible(q_pos[:, :, None], k_pos[:, None], q_seg, k_seg, **rule)
    if row.fresh is not None:
        seen &= row.fresh[None, :, None]
    if col.fresh is not None:
        seen &= col.fresh[None, None, :]
    return seen


def _tile_positions(call: Call, row: Block, col: Block, grid: Grid) -> tuple[Array, Array]:
    if row.positions is not None and col.positions is not None:
        return row.positions, col.positions
    first = row.start + call.k.shape[1] - call.q.shape[1]
    queries = first + jnp.arange(grid.rows, dtype=jnp.int32)
    return queries[None], (col.start + jnp.arange(grid.cols, dtype=jnp.int32))[None]


# ---- The prior ----


def _wide(call: Call, x: Array) -> Array:
    return x.astype(jnp.promote_types(call.q.dtype, jnp.float32))


def prior_table(call: Call, params: Any) -> Array:
    """The prior of every diagonal, [H, T + S - 1], the bottom left corner first; for default positions."""
    assert call.prior is not None
    log_prior = call.prior.log_prior
    length, kv_length = call.q.shape[1], call.k.shape[1]
    d = jnp.arange(1 - kv_length, length, dtype=jnp.int32)
    seen = visible(-d, jnp.zeros_like(d), None, None, causal=call.causal, window=call.window)
    d = jnp.where(seen, d, -1)
    # A loop over heads makes XLA store the table; fused into the gather below, it would evaluate each entry R times.
    return _wide(call, lax.map(lambda head: log_prior(head, d), params))


def corner(call: Call, row: Block, col: Block) -> Array | int:
    """Index in a table of the top left entry of a tile."""
    return col.start - row.start + call.q.shape[1] - 1


def lay_diagonals(call: Call, table: Array, row: Block, col: Block, grid: Grid) -> Array:
    """The slice of a table [H, T + S - 1] that belongs to a tile, along its diagonals: [1, H, R, C]."""
    first = corner(call, row, col)
    line = lambda r: lax.dynamic_slice_in_dim(table, first - r, grid.cols, axis=1)
    return jax.vmap(line, out_axes=1)(jnp.arange(grid.rows, dtype=jnp.int32))[None]


def _diagonals_by_rows(tile: Array, factor: Array) -> Array:
    """Sums along the diagonals of [B, H, R, C], rows times factor [B, H, R] -> [B, H, R + C - 1]: one add per row."""
    batch, heads, rows, cols = tile.shape

    def body(r: Array, sums: Array) -> Array:
        line = lax.dynamic_slice_in_dim(tile, r, 1, axis=2) * lax.dynamic_slice_in_dim(factor, r, 1, axis=2)[..., None]
        start = (0, 0, rows - 1 - r)
        part = lax.dynamic_slice(sums, start, (batch, heads, cols)) + line[:, :, 0]
        return lax.dynamic_update_slice(sums, part, start)

    return lax.fori_loop(0, rows, body, lax.full_like(tile, 0, shape=(batch, heads, rows + cols - 1)))


def _diagonals_by_cutting(tile: Array, factor: Array) -> Array:
    """The same without a loop: pad each row by R - 1, cut the flat array into rows one longer, and add those up."""
    batch, heads, rows, cols = tile.shape
    width = rows + cols
    flat = jnp.pad(tile, ((0, 0), (0, 0), (0, 0), (0, rows - 1))).reshape(batch, heads, rows * (width - 1))
    lines = jnp.pad(flat, ((0, 0), (0, 0), (rows - 1, 1))).reshape(batch, heads, rows, width)
    return jnp.einsum("bhrw,bhr->bhw", lines, factor)[..., : width - 1]


def sum_diagonals(tile: Array, factor: Array) -> Array:
    """The transpose of `lay_diagonals` for a tile [B, H, R, C] with rows times a factor [B, H, R] -> [B, R + C - 1, H].

    Each batch row keeps its own sums, so that rows on different devices do not meet inside the loops.
    """
    # A loop of tiny steps is 20 times faster on CPU, and hopeless where each step is a kernel launch.
    sums = lax.platform_dependent(tile, factor, cpu=_diagonals_by_rows, default=_diagonals_by_cutting)
    return jnp.swapaxes(sums, 1, 2)


def distances(row: Block, col: Block, seen: Array | None) -> Array:
    """Of a tile with explicit positions, [1 or B, R, C]; −1 where unseen."""
    assert row.positions is not None
    assert col.positions is not None
    d = col.positions[:, None, :] - row.positions[:, :, None]
    return d if seen is None else jnp.where(seen, d, -1)


def dense_prior(call: Call, params: Any, d: Array) -> Array:
    """The prior at distances d [n, R, C] -> [n, H, R, C], n being 1 or B.

    The parameters have that leading axis too (copies): batch rows on different devices do not meet inside the loops.
    """
    assert call.prior is not None
    return _wide(call, jax.vmap(jax.vmap(call.prior.log_prior, in_axes=(0, None)))(params, d))


def copies(params: Any, n: int) -> Any:
    """Every leaf n times along a new leading axis."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (n, *x.shape)), params)
