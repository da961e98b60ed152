"""Rows of queries or keys times the D × D products of a level: Pallas-Triton kernels around one product each.

Keys and matrices are float16 (both are at most as large as the key they come from), products accumulate in float32 and
are rounded once per level; gradients are bfloat16. Queries are moved where they are made (`gpu_blocks.block_queries`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.path.gpu_blocks import BLOCK, F16, F32, WARPS, dot
from kernels.path.gpu_narrow import tile_width, tiled
from kernels.path.levels import Level, pair_of

Array = jax.Array
BF16 = jnp.bfloat16


def _call(
    body: Any, grid: Any, ins: Any, outs: Any, ins_at: Any, outs_at: Any, name: str, interpret: bool, stages: int = 1
) -> Any:
    return pl.pallas_call(
        lambda *refs: body(*map(tiled, refs)),
        grid=grid,
        out_shape=outs,
        in_specs=ins_at,
        out_specs=outs_at,
        compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*ins)


def _count(level: Level, packed: bool) -> int:
    return level.pairs if packed else level.radix


def _whole(x: Any, per_parent: int, level: Level, group: int = 1) -> pl.BlockSpec:
    """What the parent of a program's block has of x: [B, K, parents, n, D, D], or [B, parents · per_parent, H, D]."""
    blocks = level.parent // BLOCK
    if x.ndim == 6:
        return pl.BlockSpec((None, None, None, *x.shape[3:]), lambda b, h, i: (b, h // group, i // blocks, 0, 0, 0))
    return pl.BlockSpec((None, per_parent, None, x.shape[3]), lambda b, h, i: (b, i // blocks, h, 0))


def _place(i: Any, level: Level) -> tuple[Any, Any]:
    """(child, block in it) of block number i of the row."""
    tiles = level.size // BLOCK
    i = lax.rem(i, jnp.int32(level.radix * tiles))
    return lax.div(i, jnp.int32(tiles)), lax.rem(i, jnp.int32(tiles))


def _pair(c: Any, a: Any) -> Any:
    return lax.div(a * (a - 1), jnp.int32(2)) + c


def _to_pairs(x: Array, child: Any, tile: Any, level: Level, runs: Any, out: Any) -> None:
    """Rows x of block `tile` of a child, times the matrices of its pairs (a, child), to their places."""

    def one(a: Array, x: Array) -> Array:
        rows = pl.ds((_pair(child, a) * (level.size // BLOCK) + tile) * BLOCK, BLOCK)
        out[rows, :] = dot(x, runs[_pair(child, a)], tb=True).astype(out.dtype)
        return x

    lax.fori_loop(child + 1, level.radix, one, x)


def carry(
    k: Array, runs: list[Array], levels: tuple[Level, ...], dtype: Any, *, edges: bool, interpret: bool
) -> tuple[list[Array], list[Array]]:
    """Keys k [B, T, K, D] float16 at the right edges of their blocks, for the queries of every level: one array
    [B, parents · stored, K, D] of `dtype` per level, the keys of a level's child c times R_ac for every a > c. And,
    with `edges`, the keys at the right edges of every level's children, float16, shaped as k.

    runs [B, K, parents, n, D, D] float16 of each level (`gpu_products.runs`).
    """
    batch, length, heads, dim = k.shape
    shape = lambda level: (batch, length // level.parent * level.stored, heads, dim)
    outs = [jax.ShapeDtypeStruct(shape(level), dtype) for level in levels]
    outs += [jax.ShapeDtypeStruct(k.shape, F16)] * (len(levels) - 1 if edges else 0)
    tokens = pl.BlockSpec((None, BLOCK, None, dim), lambda b, h, i: (b, i, h, 0))

    def body(k_ref: Any, *refs: Any) -> None:
        run_refs, refs = refs[: len(levels)], refs[len(levels) :]
        x = k_ref[...]
        for n, (level, run_ref) in enumerate(zip(levels, run_refs, strict=True)):
            child, tile = _place(pl.program_id(2), level)
            if edges and n > 0:
                refs[len(levels) + n - 1][...] = x
            _to_pairs(x, child, tile, level, run_ref, refs[n])
            if n + 1 < len(levels):
                x = dot(x, run_ref[_pair(child, jnp.int32(level.radix))], tb=True).astype(F16)

    specs = [tokens, *(_whole(r, 0, level) for r, level in zip(runs, levels, strict=True))]
    out_specs = [_whole(out, level.stored, level) for level, out in zip(levels, outs, strict=False)]
    out_specs += [tokens] * (len(outs) - len(levels))
    grid = (batch, heads, length // BLOCK)
    made: list[Array] = _call(body, grid, (k, *runs), outs, specs, out_specs, "path_carry", interpret)
    return made[: len(levels)], [k, *made[len(levels) :]] if edges else []


def move_backward_rows(
    dy: Array,
    m: Array | None,
    level: Level,
    *,
    transposed: bool = True,
    packed: bool,
    dtype: Any,
    interpret: bool,
    plus: tuple[Array, ...] = (),
    joined: tuple[Array, int] | None = None,
) -> Array:
    """Gradient in x [B, parents · parent, H, D], of `dtype`, of rows x times the matrix of their child, y = x m.

    m [B, K, parents, n, D, D] float16, transposed on use if `transposed` (keys); None: the identity, so that packed
    rows are summed. packed: the matrices of the pairs, one result row per pair and row of its child c, dy
    [B, parents · stored, H, D]; else those of the children, dy shaped like x. plus: are added, shaped as the result.
    joined (dy, skip): gradient of a second product of the same x that was not packed, by the matrices of the same m
    from number `skip` on.
    """
    batch, _, heads, dim = dy.shape
    parents = dy.shape[1] // (level.stored if packed else level.parent)
    count, tiles = _count(level, packed), level.size // BLOCK
    tokens = pl.BlockSpec((None, BLOCK, None, dim), lambda b, h, i: (b, i, h, 0))
    operands: dict[str, tuple[Array, pl.BlockSpec]] = {
        "dy": (dy, pl.BlockSpec((None, dy.shape[1], None, dim), lambda b, h, i: (b, 0, h, 0)))
    }
    if m is not None:
        group = heads // m.shape[1]
        whole = (None, None, parents, *m.shape[3:])
        operands["m"] = (m, pl.BlockSpec(whole, lambda b, h, i: (b, h // group, 0, 0, 0, 0)))
    operands |= {f"plus{n}": (x, tokens) for n, x in enumerate(plus)}
    if joined is not None:
        operands["joined"] = (joined[0], tokens)

    def body(*refs: Any) -> None:
        given, out_ref = dict(zip(operands, refs, strict=False)), refs[-1]
        i = pl.program_id(2)
        child, tile = lax.div(i, jnp.int32(tiles)), lax.rem(i, jnp.int32(tiles))
        parent, c = lax.div(child, jnp.int32(level.radix)), lax.rem(child, jnp.int32(level.radix))

        def times(rows: Array, n: Array) -> Array:
            if m is None:
                return rows.astype(F32)
            return dot(rows.astype(BF16), given["m"][parent, n].astype(BF16), tb=not transposed)

        def one(n: Array, total: Array) -> Array:
            rows = pl.ds(((parent * count + n) * tiles + tile) * BLOCK, BLOCK)
            return total + times(given["dy"][rows, :], n)

        zeros = jnp.zeros((BLOCK, tile_width(dim)), F32)
        total = sum((given[f"plus{n}"][...].astype(F32) for n in range(len(plus))), zeros)
        if joined is not None:
            total += times(given["joined"][...], joined[1] + c)
        if packed:
            pair = lambda a, total: one(lax.div(a * (a - 1), jnp.int32(2)) + c, total)
            total = lax.fori_loop(c + 1, level.radix, pair, total)
        else:
            total = one(c, total)
        out_ref[...] = total.astype(dtype)

    return _call(
        body,
        (batch, heads, parents * level.parent // BLOCK),
        [x for x, _ in operands.values()],
        [jax.ShapeDtypeStruct((batch, parents * level.parent, heads, dim), dtype)],
        [spec for _, spec in operands.values()],
        [tokens],
        "path_move_backward_rows",
        interpret,
    )[0]


def move_backward_matrices(
    x: Array, dy: Array, level: Level, kv_heads: int, *, transposed: bool, packed: bool, interpret: bool
) -> Array:
    """Gradient in m [B, K, parents, n, D, D] of the products in `move_backward_rows`, float32, summed over query heads.

    x of 16 bits, dy bfloat16.
    """
    batch, length, heads, dim = x.shape
    side, group, parents = tile_width(dim), heads // kv_heads, length // level.parent
    count = _count(level, packed)
    tiles = level.size // BLOCK

    def body(x_ref: Any, dy_ref: Any, out_ref: Any) -> None:
        i = pl.program_id(2)
        parent, n = lax.div(i, jnp.int32(count)), lax.rem(i, jnp.int32(count))
        child = pair_of(n, level.radix)[1] if packed else n
        first = (parent * level.radix + child) * level.size

        def tile(t: Any, total: Array) -> Array:
            member, t = lax.div(t, jnp.int32(tiles)), lax.rem(t, jnp.int32(tiles))
            a = x_ref[pl.ds(first + t * BLOCK, BLOCK), member, :].astype(BF16)
            b = dy_ref[pl.ds((i * tiles + t) * BLOCK, BLOCK), member, :]
            return total + (dot(b, a, ta=True) if transposed else dot(a, b, ta=True))

        out_ref[...] = lax.fori_loop(0, group * tiles, tile, jnp.zeros((side, side), F32))

    rows = lambda z: pl.BlockSpec((None, z.shape[1], group, dim), lambda b, h, i: (b, 0, h, 0))
    return _call(
        body,
        (batch, kv_heads, parents * count),
        (x, dy),
        [jax.ShapeDtypeStruct((batch, kv_heads, parents, count, side, side), F32)],
        [rows(x), rows(dy)],
        [pl.BlockSpec((None, None, None, None, side, side), lambda b, h, i: (b, h, i // count, i % count, 0, 0))],
        "path_move_backward_matrices",
        interpret,
        stages=3 if dim > 64 else 1,
    )[0]
