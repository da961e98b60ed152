"""The backward pass of the blockwise PaTH attention (notation and layout of `xla.py`).

Probabilities are recomputed from lse. In three steps:
  1. k̂, q̂ and m of all superblocks again, in one loop.
  2. For a from left to right, for c < a: dq̂_a, dk̂_c, dv_c and, with κ = k̂_c r_ac, dr_ac = k̂_cᵀ dκ. The gradient of the
     products is collected in the same sweep: with Γ = 0 before the first c,
         dm_c += Γ r_acᵀ,    Γ ← m_cᵀ Γ + dr_ac,
     so Γ at c is Σ_{c' < c} r_{c,c'}ᵀ dr_{ac'}. One row of the r is enough, as in the forward pass, and no transition
     is ever undone.
  3. Each superblock alone: the tile on the diagonal, then dq, dk, dw and dbeta by `jax.vjp` of `transport.span`, whose
     cost is linear in T.
No sum depends on the order of threads: two runs give the same bits.

Memory besides inputs and gradients, as measured at T = 65,536 in units of T D float32 for H query and K key heads:
7 H + 7 K (the rows, q̂ and k̂, their gradients, those of the rows, r, m and dm).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels.path import tiles
from kernels.path.call import PathCall
from kernels.path.plan import Plan
from kernels.path.rows import Rows, cut_heads, first_visible, lay_out, over_groups
from kernels.path.tiles import Tile
from kernels.path.transport import Span, matmul, transpose

Array = jax.Array
Maybe = Array | None


class Saved(NamedTuple):
    """What the softmax of a superblock's rows left behind, [N, B, H, S, Dv or 1]."""

    do: Array
    delta: Array  # Σ do·o
    lse: Array  # +inf past the end of the row and where no key is seen: probabilities are 0 there
    dlse: Array


class Bias(NamedTuple):
    """Gradients [B, H, S] of the rows' and the columns' gate sums and of the rows' sharpness, each or None."""

    row_hi: Maybe
    col_hi: Maybe
    rho: Maybe


class Edges(NamedTuple):
    """The spans of the superblocks without their scores."""

    q: Array  # [N, B, H, S, D]
    k: Array  # [N, B, K, S, D]
    m: Array  # [N, B, K, D, D]


class TileGradients(NamedTuple):
    """What one tile adds to the gradients of its scores, values, bias and prior."""

    scores: Array  # [B, H, S, S]
    v: Array  # [B, K, S, Dv]
    bias: Bias
    diagonals: Maybe  # [H, 2 S − 1], of the prior


def _plus(x: Any, y: Any) -> Any:
    """x + y, leaf by leaf; None + None = None."""
    return jax.tree.map(jnp.add, x, y)


def _add_diagonals(plan: Plan, table: Maybe, part: Maybe, steps: Array | int) -> Maybe:
    return None if table is None or part is None else tiles.add_diagonals(plan, table, part, steps)


def _tile_gradients(tile: Tile, row: Rows, kept: Saved, v: Array, precision: Any, prior: bool) -> TileGradients:
    p = jnp.exp(tile.logits - kept.lse)
    dp = tiles.times_keys(kept.do, transpose(v), precision)
    # A saturated row (p = 1, such as the first of a document) has no gradient through its logits. What rounding leaves
    # of do·v − Σ do·o there would be blown up by a log-prior of −1e30.
    ds = p * (jnp.where(p < 1, dp - kept.delta, 0) + kept.dlse)
    dbias, rho = ds, None
    if row.rho is not None and tile.bias is not None:
        rho = tiles.row_sum(ds * tile.bias)
        dbias = ds * row.rho[..., None]
    gated = row.hi is not None
    return TileGradients(
        scores=ds,
        v=tiles.to_keys(p, kept.do, v.shape[1], precision),
        bias=Bias(tiles.row_sum(dbias) if gated else None, -tiles.col_sum(dbias) if gated else None, rho),
        diagonals=tiles.toeplitz_sums(tiles.batch_sum(dbias)) if prior else None,
    )


# ---- Step 2: tiles left of the diagonal ----


class Sweep(NamedTuple):
    """Sums over tiles; all but the last have a leading axis over the superblocks of the keys."""

    keys: Array  # [N, B, K, S, D], gradient of k̂
    v: Array  # [N, B, K, S, Dv]
    m: Array  # [N, B, K, D, D]
    col_hi: Maybe  # [N, B, H, S]
    table: Maybe  # of the prior


def _empty_sweep(rows: Rows, m: Array, table: Maybe) -> Sweep:
    return jax.tree.map(lambda x: tiles.zeros(rows.k, x.shape), Sweep(rows.k, rows.v, m, rows.hi, table))


def _past_tiles(
    plan: Plan, precision: Any, rows: Rows, saved: Saved, table: Maybe, edges: Edges, first: Maybe
) -> tuple[Sweep, Array, Bias]:
    """All tiles left of the diagonal -> (sums, dq̂ [N, B, H, S, D], what they add to the bias of their rows)."""

    def tile(a: Array, row: Rows, kept: Saved, queries: Array, r_row: Array, c: Array, state: Any) -> Any:
        sums, gamma, dq, bias = state
        col, r = tiles.at(rows, c), tiles.at(r_row, c)
        key, m = tiles.at(edges.k, c), tiles.at(edges.m, c)
        here = matmul(key, r)
        logits = tiles.past_tile(plan, table, row, col, queries, here, a - c, precision)
        new = _tile_gradients(logits, row, kept, col.v, precision, table is not None)
        dhere = tiles.to_keys(new.scores, queries, key.shape[1], precision)
        sums = Sweep(
            keys=tiles.add_at(sums.keys, c, matmul(dhere, transpose(r))),
            v=tiles.add_at(sums.v, c, new.v),
            m=tiles.add_at(sums.m, c, matmul(gamma, transpose(r))),
            col_hi=None if new.bias.col_hi is None else tiles.add_at(sums.col_hi, c, new.bias.col_hi),
            table=_add_diagonals(plan, sums.table, new.diagonals, a - c),
        )
        gamma = matmul(transpose(m), gamma) + matmul(transpose(key), dhere)
        return (
            sums,
            gamma,
            dq + tiles.times_keys(new.scores, here, precision),
            _plus(bias, new.bias._replace(col_hi=None)),
        )

    def step(carry: tuple[Array, Sweep], x: Any) -> tuple[tuple[Array, Sweep], tuple[Array, Bias]]:
        (r, sums), (a, row, kept, queries, m) = carry, x
        none_yet = jax.tree.map(lambda x: tiles.zeros(queries, x.shape), Bias(row.hi, None, row.rho))
        init = sums, tiles.zeros(m, m.shape), tiles.zeros(queries, queries.shape), none_yet
        body = partial(tile, a, row, kept, queries, r)
        sums, _, dq, bias = lax.fori_loop(0 if first is None else first[a], a, body, init)
        return (tiles.next_products(r, m, a), sums), (dq, bias)

    init = tiles.zeros(rows.k, edges.m.shape), _empty_sweep(rows, edges.m, table)
    (_, sums), (dq, bias) = lax.scan(step, init, (jnp.arange(plan.superblocks), rows, saved, edges.q, edges.m))
    return sums, dq, bias


# ---- Step 3: the superblocks themselves ----


class Gradients(NamedTuple):
    """Of the fields of Rows that have one, under their names, and of the prior's table."""

    q: Array
    k: Array
    v: Array
    w: Array
    beta: Array
    hi: Maybe
    rho: Maybe
    table: Maybe  # of a superblock alone: [H, 2 S − 1], the diagonals of its tile


def _own_gradients(
    plan: Plan, precision: Any, table: Maybe, row: Rows, kept: Saved, pull: Callable[[Array], Any], scores: Array
) -> Gradients:
    """The tile on the diagonal; `pull` maps the gradient of the scores to that of the rows' q, k, w and beta."""
    tile = tiles.own_tile(plan, table, row, scores)
    new = _tile_gradients(tile, row, kept, row.v, precision, table is not None)
    q, k, w, beta = pull(new.scores)
    return Gradients(q, k, new.v, w, beta, _plus(new.bias.row_hi, new.bias.col_hi), new.bias.rho, new.diagonals)


def _one_superblock(plan: Plan, precision: Any, table: Maybe, rows: Rows, saved: Saved) -> Gradients:
    row, kept = jax.tree.map(lambda x: x[0], (rows, saved))
    scores, pull = jax.vjp(lambda *x: tiles.row_scores(row.carrying(x), plan.block), *row.carried)
    grads = _own_gradients(plan, precision, table, row, kept, pull, scores)
    empty = None if table is None else tiles.zeros(rows.k, table.shape)
    full = _add_diagonals(plan, empty, grads.table, 0)
    return jax.tree.map(lambda x: x[None], grads._replace(table=None))._replace(table=full)


def _many_superblocks(plan: Plan, precision: Any, table: Maybe, rows: Rows, saved: Saved) -> Gradients:
    edges = lax.map(lambda row: Edges(*tiles.row_span(row, plan.block)[1:]), rows)
    sums, dq, past = _past_tiles(plan, precision, rows, saved, table, edges, first_visible(rows))

    def own(dtable: Maybe, x: Any) -> tuple[Maybe, Gradients]:
        row, kept, dq, dk, dm = x
        here, pull = jax.vjp(lambda *x: tiles.row_span(row.carrying(x), plan.block), *row.carried)
        grads = _own_gradients(
            plan, precision, table, row, kept, lambda dscores: pull(Span(dscores, dq, dk, dm)), here.scores
        )
        dtable = _add_diagonals(plan, dtable, grads.table, 0)
        return dtable, grads._replace(table=None)

    dtable, grads = lax.scan(own, sums.table, (rows, saved, dq, sums.keys, sums.m))
    return grads._replace(
        v=grads.v + sums.v,
        hi=_plus(grads.hi, _plus(past.row_hi, sums.col_hi)),
        rho=_plus(grads.rho, past.rho),
        table=dtable,
    )


# ---- All of it ----


def _to_call(plan: Plan, call: PathCall, grads: Gradients) -> PathCall:
    """Gradients of the rows -> cotangent of the call (None stands for zero)."""
    names = ("q", "k", "v", "w", "beta", "sharpness")
    floats = {name: getattr(call, name) for name in names} | {"hi": None if call.gates is None else call.gates[0]}

    def to_rows(x: dict[str, Any]) -> tuple[Maybe, ...]:
        gates = None if call.gates is None else (x["hi"], call.gates[1])
        changed = replace(call, gates=gates, segments=None, **{name: x[name] for name in names})
        out = lay_out(plan, changed, call.sharpens(grads.table))
        return out.q, out.k, out.v, out.w, out.beta, out.hi, out.rho

    (back,) = jax.vjp(to_rows, floats)[1](tuple(grads[:-1]))
    hi = back.pop("hi")
    gates: Any = None if hi is None else (hi, None)
    return replace(call, gates=gates, segments=None, **back)


@partial(jax.jit, static_argnums=0)
def backward(
    plan: Plan, call: PathCall, table: Maybe, o: Array, lse: Array, do: Array, dlse: Array
) -> tuple[PathCall, Maybe]:
    """Cotangents of the call and of the prior's table, from those of o [B, T, H, Dv] and lse [B, T, H]."""
    alive = lse > -jnp.inf  # rows without a key: no 0 · NaN
    do = jnp.where(alive[..., None], do.astype(call.wide), 0)
    delta = (do * o.astype(call.wide)).sum(-1)
    column = lambda x, value=0: cut_heads(jnp.where(alive, x, value), plan, value)[..., None]
    # Queries past the end see all gates of the row undone, exp(Σ −log f): without lse = inf that would overflow.
    saved = Saved(cut_heads(do, plan), column(delta), column(lse, jnp.inf), column(dlse))
    rows = lay_out(plan, call, call.sharpens(table))
    compute = partial(_one_superblock if plan.superblocks == 1 else _many_superblocks, plan, call.precision, table)
    grads = over_groups(compute, rows, saved)
    return _to_call(plan, call, grads), None if grads.table is None else grads.table.sum(0)
