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

from kernels.path.gpu_blocks import F16, F32, Split, dot3, identity, joined, split
from kernels.path.gpu_blocks_backward import Scaled
from kernels.path.levels import Level

Array = jax.Array


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
    count = level.pairs if top else level.pairs + r

    def body(p_ref: Any, low_ref: Any, runs_ref: Any, left_ref: Any, whole_ref: Any, whole_low_ref: Any) -> None:
        a = lax.rem(pl.program_id(2), jnp.int32(chains)) + 1
        first = lax.div(a * (a - 1), jnp.int32(2))

        def step(n: Array, run: Array) -> Array:
            c = a - 2 - n
            runs_ref[first + c] = run.astype(F16)
            return dot3(run, (p_ref[c], low_ref[c]))

        runs_ref[first + a - 1] = identity(dim).astype(F16)
        run = lax.fori_loop(0, a - 1, step, joined((p_ref[a - 1], low_ref[a - 1])))
        if not top:

            @pl.when(a < r)
            def _left() -> None:
                left_ref[a] = run.astype(F16)

            @pl.when(a == r)
            def _whole() -> None:
                left_ref[0] = identity(dim).astype(F16)
                whole_ref[...], whole_low_ref[...] = split(run)

    shape = lambda n, dtype: jax.ShapeDtypeStruct((batch, heads, parents, *n, dim, dim), dtype)
    made, left, high, low = pl.pallas_call(
        body,
        grid=(batch, heads, parents * chains),
        in_specs=_specs([r, r], chains, dim),
        out_specs=_specs([count, r, None, None], chains, dim),
        out_shape=(shape((count,), F16), shape((r,), F16), shape((), F16), shape((), F16)),
        compiler_params=pltriton.CompilerParams(num_warps=dim // 16, num_stages=1),
        interpret=interpret,
        name="path_runs",
    )(*grouped)
    return made, left, (high, low)


def runs_backward(
    p: Array, made: Array, druns: Array, above: tuple[Array, Array, Array] | None, level: Level, interpret: bool
) -> Array:
    """Gradient in p, shaped like it, from those of `runs`: druns of the pairs; above, None at the top level: of the
    last radix runs, of left and of whole. p: the first of its two parts.

    Chain a hands Γ back from its end: dP_c += R_acᵀ Γ, Γ ← Γ P_cᵀ + dR_ac for c = 0 … a − 1. Chains write their parts
    apart, which are then added in a fixed order.
    """
    batch, heads, _, dim, _ = p.shape
    r = level.radix
    grouped = p.reshape(batch, heads, -1, r, dim, dim)
    parents, top = grouped.shape[2], above is None
    chains, count = (r - 1 if top else r), made.shape[3]

    def body(p_ref: Any, runs_ref: Any, druns_ref: Any, *refs: Any) -> None:
        out_ref = refs[-1]
        a = lax.rem(pl.program_id(2), jnp.int32(chains)) + 1
        first = lax.div(a * (a - 1), jnp.int32(2))
        if top:
            start = jnp.zeros((dim, dim), F32)
        else:
            _, dleft_ref, dwhole_ref = refs[:3]
            start = jnp.where(a < r, dleft_ref[jnp.minimum(a, r - 1)], dwhole_ref[...])

        def step(c: Array, gamma: Array) -> Array:
            scaled = Scaled.of(gamma)
            out_ref[first + c] = scaled.under(runs_ref[first + c])
            own = druns_ref[jnp.minimum(first + c, level.pairs - 1)]
            if not top:
                own = jnp.where(a < r, own, refs[0][c])
            return scaled.times(p_ref[c], tb=True) + own

        lax.fori_loop(0, a, step, start)

    arrays: list[Array] = [grouped, made, druns]
    kinds: list[int | None] = [r, count, level.pairs]
    if above is not None:
        arrays, kinds = [*arrays, *above], [*kinds, r, r, None]
    parts = pl.pallas_call(
        body,
        grid=(batch, heads, parents * chains),
        in_specs=_specs(kinds, chains, dim),
        out_specs=_specs([count], chains, dim)[0],
        out_shape=jax.ShapeDtypeStruct((batch, heads, parents, count, dim, dim), F32),
        compiler_params=pltriton.CompilerParams(num_warps=dim // 16, num_stages=1),
        interpret=interpret,
        name="path_runs_backward",
    )(*arrays)
    last = chains
    part = lambda a, c: parts[:, :, :, a * (a - 1) // 2 + c]
    sums = [sum(part(a, c) for a in range(c + 1, last + 1)) for c in range(last)]
    if top:
        sums.append(jnp.zeros_like(grouped[:, :, :, 0]))
    return jnp.stack(sums, axis=3).reshape(p.shape)
