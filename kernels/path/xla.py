"""PaTH attention in plain XLA: O(T) memory in both passes, every platform, own backward (`backward.py`).

The row is cut into superblocks (`plan.Plan`). Inside one, `transport.span` gives the scores, the queries q̂ at its left
edge, the keys k̂ at its right edge and its product m. Scores between superblocks a > c are then plain products

    q̂_a (k̂_c r_ac)ᵀ,     r_ac = m_{c+1} m_{c+2} … m_{a−1},

one D × D product per S keys and key head, and what is left is flash attention: an online softmax (Milakov &
Gimelshein, arXiv 1805.02867) over the superblocks left of a. The r_a· of all c follow from those of a − 1 by one
factor each, which is half the work of a new scan of the m for every a; only one row of them is kept.

Memory besides inputs and outputs, as measured at T = 65,536 in units of T D float32 for H query and K key heads:
2 H + 5 K (the rows laid out, k̂, r). Nothing in it grows faster than T; a tile is S² scores per head. The prior is a
table of T values per head.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from kernels.path import tiles
from kernels.path.backward import backward
from kernels.path.call import PathCall
from kernels.path.plan import Plan, check_plan, choose_plan
from kernels.path.rows import Rows, first_visible, lay_out, over_groups, prior_table, uncut
from kernels.path.transport import matmul

Array = jax.Array
State = tuple[Array, Array, Array]  # running maximum, sum [B, H, S] and output [B, H, S, Dv]


def supports(call: PathCall) -> str | None:
    """Everything."""
    return None


def _absorb(state: State | None, logits: Array, v: Array, precision: Any) -> State:
    """Online softmax over one more tile."""
    top = tiles.row_max(logits)
    if state is not None:
        top = jnp.maximum(state[0], top)
    base = jnp.where(top == -jnp.inf, 0, top)
    p = jnp.exp(logits - base[..., None])
    total, acc = tiles.row_sum(p), tiles.times_keys(p, v, precision)
    if state is not None:
        shrink = jnp.exp(state[0] - base)
        total, acc = shrink * state[1] + total, shrink[..., None] * state[2] + acc
    return top, total, acc


def _finish(state: State) -> tuple[Array, Array]:
    top, total, acc = state
    some = total > 0
    total = jnp.where(some, total, 1)
    return acc / total[..., None], jnp.where(some, top + jnp.log(total), -jnp.inf)


def _forward_rows(plan: Plan, precision: Any, table: Array | None, rows: Rows) -> tuple[Array, Array]:
    """(o [N, B, H, S, Dv], lse [N, B, H, S])."""
    first = first_visible(rows)

    def alone(row: Rows) -> tuple[Array, Array]:
        logits = tiles.own_tile(plan, table, row, tiles.row_scores(row, plan.block)).logits
        return _finish(_absorb(None, logits, row.v, precision))

    def step(carry: tuple[Array, Array], x: tuple[Array, Rows]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        (keys, r), (a, row) = carry, x
        own = tiles.row_span(row, plan.block)
        state = _absorb(None, tiles.own_tile(plan, table, row, own.scores).logits, row.v, precision)

        def past(c: Array, state: State) -> State:
            col, here = tiles.at(rows, c), matmul(tiles.at(keys, c), tiles.at(r, c))
            return _absorb(
                state, tiles.past_tile(plan, table, row, col, own.q, here, a - c, precision).logits, col.v, precision
            )

        state = lax.fori_loop(0 if first is None else first[a], a, past, state)
        keys = lax.dynamic_update_index_in_dim(keys, own.k, a, 0)
        return (keys, tiles.next_products(r, own.m, a)), _finish(state)

    if plan.superblocks == 1:
        return jax.tree.map(lambda x: x[None], alone(jax.tree.map(lambda x: x[0], rows)))
    dim = rows.k.shape[-1]
    init = tiles.zeros(rows.k, rows.k.shape), tiles.zeros(rows.k, (*rows.k.shape[:-2], dim, dim))
    return lax.scan(step, init, (jnp.arange(plan.superblocks), rows))[1]


@partial(jax.jit, static_argnums=0)
def _forward(plan: Plan, call: PathCall, table: Array | None) -> tuple[Array, Array]:
    compute = partial(_forward_rows, plan, call.precision, table)
    o, lse = over_groups(compute, lay_out(plan, call, call.sharpens(table)))
    return uncut(o, call.q.shape[1]).astype(call.q.dtype), uncut(lse, call.q.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, call: PathCall, table: Array | None) -> tuple[Array, Array]:
    return _forward(plan, call, table)


def _attend_fwd(plan: Plan, call: PathCall, table: Array | None) -> tuple[tuple[Array, Array], Any]:
    o, lse = _forward(plan, call, table)
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse), (call, table, o, lse)


def _attend_bwd(plan: Plan, saved: Any, cotangents: tuple[Array, Array]) -> tuple[PathCall, Array | None]:
    return backward(plan, *saved, *cotangents)


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(call: PathCall, plan: Plan | None = None) -> tuple[Array, Array]:
    """(o [B, T, H, Dv] in q's dtype, lse [B, T, H] float32, float64 for float64 inputs)."""
    batch, length, heads, dim = call.q.shape
    if plan is None:
        plan = choose_plan(length, dim, batch, heads)
    check_plan(plan, length, batch)
    table = prior_table(plan, call)
    return _attend(plan, *tiles.vary_together((call.without_prior(), table)))
