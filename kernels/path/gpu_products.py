"""Products of the blocks of a level, one chain of D × D matrices per child, in Pallas-Triton kernels.

For child a of a parent of r children, R = I; for c = a − 1 … 0: R_ac = R, R ← R P_c. Numbers of runs: (a, c) has the
number a (a − 1) / 2 + c, also for a = r, whose R_rc carry keys of child c to the parent's right edge. What is left at
the end moves the queries of child a to the parent's left edge; for a = r it is the parent's own product.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.path.gpu_blocks import F16, F32, Split, dot3, joined, split
from kernels.path.gpu_gradients import Scaled
from kernels.path.levels import Level

Array = jax.Array
ROWS = 64  # of a chain, in one program: its rows do not meet


def _specs(kinds: list[int | None], chains: int, dim: int) -> list[pl.BlockSpec]:
    """Per array [B, K, parents, (n,) D, D]: a program sees all matrices of its parent; n None: there is one."""
    out = []
    for n in kinds:
        lead, zeros = ((), (0, 0)) if n is None else ((n,), (0, 0, 0))
        index = lambda b, h, i, zeros=zeros: (b, h, i // chains, *zeros)
        out.append(pl.BlockSpec((None, None, None, *lead, dim, dim), index))
    return out


def runs(p: Split, level: Level, top: bool, interpret: bool) -> tuple[Array, Array, Split]:
    """(runs float16 [B, K, parents, n, D, D], left float16 [B, K, parents, radix, D, D], whole like p).

    p [B, K, parents · radix, D, D] in two float16 parts. n counts the runs of children 1 … radix; at the top level the
    last radix of them, left and whole are not written.
    """
    batch, heads, _, dim, _ = p[0].shape
    r = level.radix
    grouped = [x.reshape(batch, heads, -1, r, dim, dim) for x in p]
    parents, chains = grouped[0].shape[2], r - 1 if top else r
    count, parts = level.pairs if top else level.pairs + r, dim // ROWS

    def body(p_ref: Any, low_ref: Any, runs_ref: Any, left_ref: Any, whole_ref: Any, whole_low_ref: Any) -> None:
        a = lax.rem(lax.div(pl.program_id(2), jnp.int32(parts)), jnp.int32(chains)) + 1
        first, start = lax.div(a * (a - 1), jnp.int32(2)), lax.rem(pl.program_id(2), jnp.int32(parts)) * ROWS
        rows = pl.ds(start, ROWS)
        row, col = (lax.broadcasted_iota(jnp.int32, (ROWS, dim), axis) for axis in (0, 1))
        eye = jnp.where(row + start == col, F32(1), F32(0)).astype(F16)

        def step(n: Array, run: Array) -> Array:
            c = a - 2 - n
            runs_ref[first + c, rows, :] = run.astype(F16)
            return dot3(run, (p_ref[c], low_ref[c]))

        runs_ref[first + a - 1, rows, :] = eye
        run = lax.fori_loop(0, a - 1, step, joined((p_ref[a - 1, rows, :], low_ref[a - 1, rows, :])))
        if not top:

            @pl.when(a < r)
            def _left() -> None:
                left_ref[a, rows, :] = run.astype(F16)

            @pl.when(a == r)
            def _whole() -> None:
                left_ref[0, rows, :] = eye
                whole_ref[rows, :], whole_low_ref[rows, :] = split(run)

    shape = lambda n, dtype: jax.ShapeDtypeStruct((batch, heads, parents, *n, dim, dim), dtype)
    made, left, high, low = pl.pallas_call(
        body,
        grid=(batch, heads, parents * chains * parts),
        in_specs=_specs([r, r], chains * parts, dim),
        out_specs=_specs([count, r, None, None], chains * parts, dim),
        out_shape=(shape((count,), F16), shape((r,), F16), shape((), F16), shape((), F16)),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="path_runs",
    )(*grouped)
    return made, left, (high, low)


def runs_backward(
    p: Array, made: Array, druns: Array, above: tuple[Array, Array, Array] | None, level: Level, interpret: bool
) -> tuple[Array, Array]:
    """Gradient in p, shaped like it, from those of `runs`: druns of the pairs; above, None at the top level: of the
    last radix runs, of left and of whole. p: the first of its two parts. And the largest size in it, [B, K, n, 1, D]:
    of 64 rows each, so that the maximum of a line is that of a matrix.

    Chain a hands Γ back from its end: dP_c += R_acᵀ Γ, Γ ← Γ P_cᵀ + dR_ac for c = 0 … a − 1. One kernel walks the
    chains and leaves every Γ, float16 times a power of two per 64 rows; the other adds for every child.
    """
    batch, heads, _, dim, _ = p.shape
    r, parts = level.radix, dim // ROWS
    grouped = p.reshape(batch, heads, -1, r, dim, dim)
    parents, top = grouped.shape[2], above is None
    chains, count = (r - 1 if top else r), made.shape[3]
    shape = lambda *last, dtype=F32: jax.ShapeDtypeStruct((batch, heads, parents, *last), dtype)
    params = lambda stages: pltriton.CompilerParams(num_warps=4, num_stages=stages if dim > ROWS else 1)

    def walk(p_ref: Any, druns_ref: Any, *refs: Any) -> None:
        gamma_ref, size_ref = refs[-2:]
        a = lax.rem(lax.div(pl.program_id(2), jnp.int32(parts)), jnp.int32(chains)) + 1
        first = lax.div(a * (a - 1), jnp.int32(2))
        rows = pl.ds(lax.rem(pl.program_id(2), jnp.int32(parts)) * ROWS, ROWS)
        if top:
            start = jnp.zeros((ROWS, dim), F32)
        else:
            start = jnp.where(a < r, refs[1][jnp.minimum(a, r - 1), rows, :], refs[2][rows, :])

        def step(c: Array, gamma: Array) -> Array:
            scaled = Scaled.of(gamma)
            gamma_ref[first + c, rows, :] = scaled.part
            size_ref[first + c, rows] = jnp.broadcast_to(scaled.size, (ROWS,))
            own = druns_ref[jnp.minimum(first + c, level.pairs - 1), rows, :]
            if not top:
                own = jnp.where(a < r, own, refs[0][c, rows, :])
            return scaled.times(p_ref[c], tb=True) + own

        lax.fori_loop(0, a, step, start)

    arrays: list[Array] = [grouped, druns]
    kinds: list[int | None] = [r, level.pairs]
    if above is not None:
        arrays, kinds = [*arrays, *above], [*kinds, r, r, None]
    each = chains * parts
    line = pl.BlockSpec((None, None, None, count, dim), lambda b, h, i: (b, h, i // each, 0, 0))
    gammas, sizes = pl.pallas_call(
        walk,
        grid=(batch, heads, parents * each),
        in_specs=_specs(kinds, each, dim),
        out_specs=[*_specs([count], each, dim), line],
        out_shape=(shape(count, dim, dim, dtype=F16), shape(count, dim)),
        compiler_params=params(2),
        interpret=interpret,
        name="path_runs_walk",
    )(*arrays)

    def add(runs_ref: Any, gamma_ref: Any, size_ref: Any, out_ref: Any, most_ref: Any) -> None:
        child = lax.rem(lax.div(pl.program_id(2), jnp.int32(parts)), jnp.int32(r))
        rows = pl.ds(lax.rem(pl.program_id(2), jnp.int32(parts)) * ROWS, ROWS)

        def one(n: Array, total: Array) -> Array:
            a, here = child + 1 + lax.div(n, jnp.int32(parts)), pl.ds(lax.rem(n, jnp.int32(parts)) * ROWS, ROWS)
            pair = lax.div(a * (a - 1), jnp.int32(2)) + child
            scaled = Scaled(gamma_ref[pair, here, :], jnp.max(size_ref[pair, here]))
            return total + scaled.under(runs_ref[pair, here, rows])

        zeros = jnp.zeros((ROWS, dim), F32)
        total = lax.fori_loop(0, (chains - child) * parts, one, zeros)
        out_ref[child, rows, :] = total
        most_ref[child, 0, rows] = jnp.broadcast_to(jnp.max(jnp.abs(total)), (ROWS,))

    each = r * parts
    line = pl.BlockSpec((None, None, None, count, dim), lambda b, h, i: (b, h, i // each, 0, 0))
    most = pl.BlockSpec((None, None, None, r, 1, dim), lambda b, h, i: (b, h, i // each, 0, 0, 0))
    dp, sizes = pl.pallas_call(
        add,
        grid=(batch, heads, parents * each),
        in_specs=[*_specs([count, count], each, dim), line],
        out_specs=[*_specs([r], each, dim), most],
        out_shape=(shape(r, dim, dim), shape(r, 1, dim)),
        compiler_params=params(3),
        interpret=interpret,
        name="path_runs_add",
    )(made, gammas, sizes)
    return dp.reshape(p.shape), sizes.reshape(*p.shape[:3], 1, dim)
