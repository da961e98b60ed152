"""Rows of queries or keys times the D × D products of a level: Pallas-Triton kernels around one product each.

x and the matrices are float16 (both are at most as large as the query or key they come from), products accumulate in
float32 and are rounded once; gradients are bfloat16.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.path.gpu_blocks import BLOCK, F32, dot
from kernels.path.levels import Level, pair_of

Array = jax.Array
BF16 = jnp.bfloat16


def _call(body: Any, grid: Any, ins: Any, outs: Any, in_specs: Any, out_specs: Any, name: str, interpret: bool) -> Any:
    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=outs,
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name=name,
    )(*ins)


def _count(level: Level, packed: bool) -> int:
    return level.pairs if packed else level.radix


def move(
    x: Array, m: Array, level: Level, *, transposed: bool, packed: bool, dtypes: Any, interpret: bool, skip: int = 0
) -> Any:
    """Every row of x [B, T, H, D] float16 times the matrix of its child, one result per dtype.

    m [B, K, parents, n, D, D] float16, from number `skip` on, transposed on use if `transposed` (keys). packed: the
    matrices of the pairs, one result row per pair and key of its child c, [B, parents · stored, H, D]; else those of
    the children, results like x.
    """
    batch, _, heads, dim = x.shape
    group, parents, count = heads // m.shape[1], m.shape[2], _count(level, packed)
    tiles = level.size // BLOCK  # of a child
    rows = parents * count * level.size

    def child_block(i: Any) -> Any:
        if not packed:
            return i
        number, tile = i // tiles, i % tiles
        return (
            (number // count) * level.radix + pair_of(lax.rem(number, jnp.int32(count)), level.radix)[1]
        ) * tiles + tile

    def body(x_ref: Any, m_ref: Any, *out_refs: Any) -> None:
        y = dot(x_ref[...], m_ref[...], tb=transposed)
        for ref in out_refs:
            ref[...] = y.astype(ref.dtype)

    tokens = lambda where: pl.BlockSpec((None, BLOCK, None, dim), lambda b, h, i: (b, where(i), h, 0))
    at = lambda b, h, i: (b, h // group, i // tiles // count, skip + i // tiles % count, 0, 0)
    return _call(
        body,
        (batch, heads, rows // BLOCK),
        (x, m),
        [jax.ShapeDtypeStruct((batch, rows, heads, dim), dtype) for dtype in dtypes],
        [tokens(child_block), pl.BlockSpec((None, None, None, None, dim, dim), at)],
        [tokens(lambda i: i) for _ in dtypes],
        "path_move",
        interpret,
    )


def move_backward_rows(
    dy: Array,
    m: Array | None,
    level: Level,
    *,
    transposed: bool = True,
    packed: bool,
    dtype: Any,
    interpret: bool,
    plus: Array | None = None,
    joined: tuple[Array, int] | None = None,
) -> Array:
    """Gradient of `move` in x: dy, shaped as its result -> [B, parents · parent, H, D] of `dtype`.

    m None: the identity, so packed rows are summed. plus: is added, shaped as the result. joined (dy, skip): gradient
    of a second `move` of the same x that was not packed, by the matrices of the same m from number `skip` on.
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
        whole = (None, None, parents, m.shape[3], dim, dim)
        operands["m"] = (m, pl.BlockSpec(whole, lambda b, h, i: (b, h // group, 0, 0, 0, 0)))
    if plus is not None:
        operands["plus"] = (plus, tokens)
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

        total = jnp.zeros((BLOCK, dim), F32) if plus is None else given["plus"][...].astype(F32)
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
    """Gradient of `move` in m: x float16, dy bfloat16 -> [B, K, parents, n, D, D] float32, summed over query heads."""
    batch, length, heads, dim = x.shape
    group, parents = heads // kv_heads, length // level.parent
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

        out_ref[...] = lax.fori_loop(0, group * tiles, tile, jnp.zeros((dim, dim), F32))

    rows = lambda z: pl.BlockSpec((None, z.shape[1], group, dim), lambda b, h, i: (b, 0, h, 0))
    return _call(
        body,
        (batch, kv_heads, parents * count),
        (x, dy),
        [jax.ShapeDtypeStruct((batch, kv_heads, parents, count, dim, dim), F32)],
        [rows(x), rows(dy)],
        [pl.BlockSpec((None, None, None, None, dim, dim), lambda b, h, i: (b, h, i // count, i % count, 0, 0))],
        "path_move_backward_matrices",
        interpret,
    )[0]
