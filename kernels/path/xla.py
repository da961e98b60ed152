"""PaTH attention in plain XLA: O(T) memory in both passes, every platform, own backward.

The row is cut into superblocks (`plan.Plan`). Inside one, `transport.span` gives the scores, the queries q̂ at its left
edge, the keys k̂ at its right edge and its product m. Scores between superblocks a > c are then plain products

    q̂_a (k̂_c r_ac)ᵀ,     r_ac = m_{c+1} m_{c+2} … m_{a−1},

one D × D product per S keys and key head. r_a· for all c follows from r_{a−1}· by one product each (r_{a,c} =
r_{a−1,c} m_{a−1}, half the work of a new scan per a), so neither pass keeps more than one row of it.

Forward: online softmax (Milakov & Gimelshein, arXiv 1805.02867) over the superblocks left of a. Backward, with the
probabilities recomputed from lse:
  1. k̂, q̂ and m of all superblocks again;
  2. for a from left to right, for c < a: dq̂_a, dk̂_c, dv_c and dr_ac = k̂_cᵀ dκ (κ = k̂ r). The gradient of the products is
     collected in the same sweep: with Γ = 0 before the first c,
         dm_c += Γ r_acᵀ,   Γ ← m_cᵀ Γ + dr_ac     (Γ = Σ_{c' ≤ c} r_{c+1,c'}ᵀ dr_ac');
  3. each superblock alone: the tile on the diagonal, then dq, dk, dw, dbeta by `jax.vjp` of `transport.span`, a function
     of linear cost.
Nothing divides by a transition, no sum depends on the order of threads: two runs give the same bits.

Memory besides inputs, outputs and their gradients, in units of T·D float32 per key head (G query heads per key head, N
superblocks of S): forward 3 + 2 G (the laid-out rows and k̂), backward 9 + 6 G; plus N D² for each of r, m, dm and a few
tiles S². None grows faster than T. The prior is a table over the T distances of the row, T float32 per head.

Shape names: N superblocks, B batch, H query heads, K key heads, S tokens of a superblock.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from kernels.path.call import PathCall
from kernels.path import tiles
from kernels.path.plan import Plan, check_plan, choose_plan
from kernels.path.transport import Span, matmul, span, span_scores, transpose

Array = jax.Array
QUERY_PAD, KEY_PAD = -1, -2  # ids of padding: seen by nobody, seeing nobody


def supports(call: PathCall) -> str | None:
    """Everything."""
    return None


class Rows(NamedTuple):
    """The call in float32, one leading entry per superblock (absent inside a loop over them)."""

    q: Array  # [N, B, H, S, D], times scale and sharpness
    k: Array  # [N, B, K, S, D]
    v: Array  # [N, B, K, S, Dv]
    w: Array  # [N, B, K, S, D], zero past the end of the row
    beta: Array  # [N, B, K, S]
    hi: Array | None  # [N, B, H, S] gate sums
    lo: Array | None
    rho: Array | None  # [N, B, H, S]: factor of prior and gates, if sharpened
    q_ids: Array | None  # [N, B, S]
    k_ids: Array | None

    @property
    def transported(self) -> tuple[Array, ...]:
        return self.q, self.k, self.w, self.beta


class Saved(NamedTuple):
    """What the backward pass knows of a superblock's rows, [N, B, H, S, Dv or 1]."""

    do: Array
    delta: Array  # Σ do·o
    lse: Array
    dlse: Array


class Extras(NamedTuple):
    """Gradients of what is added to the scores, rows as [B, H, S]; None where the call has none."""

    row_hi: Array | None
    col_hi: Array | None
    rho: Array | None
    table: Array | None  # [H, 2 S − 1]


# ---- Layout ----


def _cut(x: Array, plan: Plan) -> Array:
    """[B, T, ...] -> [N, B, S, ...]."""
    x = jnp.pad(x, [(0, 0), (0, plan.length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], plan.count, plan.size, *x.shape[2:]), 1, 0)


def _cut_heads(x: Array, plan: Plan) -> Array:
    """[B, T, H, ...] -> [N, B, H, S, ...]."""
    return jnp.moveaxis(_cut(x, plan), 2, 3)


def _uncut(x: Array, length: int) -> Array:
    """[N, B, H, S, ...] -> [B, T, H, ...]."""
    x = jnp.moveaxis(jnp.moveaxis(x, 3, 2), 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]


def _lay_out(plan: Plan, call: PathCall, table: Array | None) -> Rows:
    heads = lambda x: None if x is None else _cut_heads(x.astype(call.wide), plan)
    ids = lambda pad: None if call.segments is None else _cut(jnp.where(call.segments < 0, pad, call.segments), plan)
    factor = call.scale if call.sharpness is None else call.scale * call.sharpness[..., None]
    hi, lo = (None, None) if call.gates is None else call.gates
    biased = table is not None or call.gates is not None  # the call itself has handed its prior over as a table
    return Rows(
        q=heads(call.q.astype(call.wide) * factor),
        k=heads(call.k),
        v=heads(call.v),
        w=heads(call.w),
        beta=heads(call.beta),
        hi=heads(hi),
        lo=heads(lo),
        rho=heads(call.sharpness) if call.sharpen_prior and biased else None,
        q_ids=ids(QUERY_PAD),
        k_ids=ids(KEY_PAD),
    )


def _prior_table(plan: Plan, call: PathCall) -> Array | None:
    """log_prior at d = 1 − N S … S − 1 as [H, N S + S − 1]; what no pair of the row needs is filled from d = −1."""
    if call.prior is None:
        return None
    length = call.q.shape[1]
    d = jnp.arange(1 - plan.length, plan.size, dtype=jnp.int32)
    d = jnp.where((d > 0) | (d <= -length), -1, d)
    return jax.vmap(call.prior.log_prior, in_axes=(0, None))(call.prior.params, d).astype(call.wide)


# ---- One tile: rows of superblock a, columns of superblock c ----


class Bias(NamedTuple):
    """What is added to the scores of a tile."""

    total: Array | None  # [B or 1, H, S, S]
    plain: Array | None  # the same without the sharpness


def _diagonals(plan: Plan, table: Array | None, steps: Array | int) -> Array | None:
    """The prior of the diagonals of a tile that is `steps` superblocks left of the main diagonal, [H, 2 S − 1]."""
    if table is None:
        return None
    return lax.dynamic_slice_in_dim(table, (plan.count - 1 - steps) * plan.size, 2 * plan.size - 1, axis=-1)


def _bias(diagonals: Array | None, row: Rows, col: Rows) -> Bias:
    plain = None
    if diagonals is not None:
        plain = lax.optimization_barrier(tiles.toeplitz(diagonals)[None])  # once, not in every batch row
    if row.hi is not None and row.lo is not None and col.hi is not None and col.lo is not None:
        gate = (row.hi[..., :, None] - col.hi[..., None, :]) + (row.lo[..., :, None] - col.lo[..., None, :])
        plain = gate if plain is None else plain + gate
    if plain is None or row.rho is None:
        return Bias(plain, plain)
    return Bias(plain * row.rho[..., None], plain)


def _seen(row: Rows, col: Rows, own: bool) -> Array | None:
    """Who sees whom, [B or 1, 1, S, S]; None if everybody sees everybody. `own`: the tile on the diagonal."""
    seen = None
    if row.q_ids is not None and col.k_ids is not None:
        seen = (row.q_ids[:, :, None] == col.k_ids[:, None, :])[:, None]
    if own:
        index = jnp.arange(row.q.shape[-2])
        causal = (index[:, None] >= index[None, :])[None, None]
        seen = causal if seen is None else seen & causal
    return seen


def _logits(scores: Array, bias: Bias, seen: Array | None) -> Array:
    logits = scores if bias.total is None else scores + bias.total
    return logits if seen is None else jnp.where(seen, logits, -jnp.inf)


def _dot(x: Array, y: Array, precision: Any) -> Array:
    """x [B, H, S, a] times y [B, K, a, b] of its key head -> [B, H, S, b]."""
    rows = x.reshape(*y.shape[:2], -1, x.shape[-1])
    return jnp.matmul(rows, y, precision=precision).reshape(*x.shape[:-1], y.shape[-1])


def _cols(x: Array, y: Array, kv_heads: int, precision: Any) -> Array:
    """xᵀ y summed over rows and the query heads of a key head: x [B, H, S, a], y [B, H, S, b] -> [B, K, a, b]."""
    rows = lambda z: z.reshape(z.shape[0], kv_heads, -1, z.shape[-1])
    return jnp.matmul(transpose(rows(x)), rows(y), precision=precision)


def _span(rows: Sequence[Array], block: int, scores_only: bool) -> Any:
    """`transport.span` of (q [B, H, S, D], k, w [B, K, S, D], beta [B, K, S]), its scores and q as [B, H, S, ·]."""
    q, k, w, beta = rows
    heads_of = lambda x: x.reshape(*q.shape[:2], *x.shape[3:])
    grouped = q.reshape(*k.shape[:2], -1, *q.shape[2:])
    if scores_only:
        return heads_of(span_scores(grouped, k, w, beta, block))
    out = span(grouped, k, w, beta, block)
    return out._replace(scores=heads_of(out.scores), q=heads_of(out.q))


def _precision(call: PathCall) -> Any:
    """Of the tile products: full for float32 inputs, the platform's fast float32 for 16-bit ones."""
    return lax.Precision.HIGHEST if call.q.dtype.itemsize >= 4 else lax.Precision.DEFAULT


# ---- Which superblocks to visit ----


def _first_visible(rows: Rows) -> Array | None:
    """For each superblock the first one with a segment in common (extents of ids, padding left out), [N]; or None."""
    if rows.q_ids is None:
        return None
    ids = jnp.moveaxis(rows.q_ids, 1, 0)
    least = jnp.where(ids >= 0, ids, jnp.iinfo(ids.dtype).max).min(-1)
    most = ids.max(-1)
    may = ((least[:, None, :] <= most[:, :, None]) & (least[:, :, None] <= most[:, None, :])).any(0)
    return jnp.argmax(may, axis=1)


# ---- Forward ----


def _finish(state: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    top, total, acc = state
    some = total > 0
    total = jnp.where(some, total, 1)
    return acc / total[..., None], jnp.where(some, top + jnp.log(total), -jnp.inf)


def _absorb(state: Any, logits: Array, v: Array, precision: Any) -> tuple[Array, Array, Array]:
    """Online softmax over one more tile; `state` is None before the first."""
    top = tiles.row_max(logits)
    if state is not None:
        top = jnp.maximum(state[0], top)
    base = jnp.where(top == -jnp.inf, 0, top)
    p = jnp.exp(logits - base[..., None])
    total, acc = tiles.row_sum(p), _dot(p, v, precision)
    if state is not None:
        shrink = jnp.exp(state[0] - base)
        total, acc = shrink * state[1] + total, shrink[..., None] * state[2] + acc
    return top, total, acc


def _past_logits(
    plan: Plan, precision: Any, table: Array | None, row: Rows, col: Rows, moved: Array, keys: Array, steps: Any
) -> tuple[Array, Bias]:
    """Logits of the tile between `moved` queries and `keys`, both at the left edge of the queries' superblock."""
    bias = _bias(_diagonals(plan, table, steps), row, col)
    scores = _dot(moved, transpose(keys), precision)
    return _logits(scores, bias, _seen(row, col, own=False)), bias


def _next_products(r: Array, m: Array, index: Array) -> Array:
    """r_{a+1,·} of r_{a,·} [N, B, K, D, D]: one more factor m_a for c < a, and the identity for c = a."""
    eye = jnp.broadcast_to(jnp.eye(m.shape[-1], dtype=m.dtype), m.shape)
    return lax.dynamic_update_index_in_dim(matmul(r, m[None]), eye, index, 0)


@partial(jax.jit, static_argnums=0)
def _forward(plan: Plan, call: PathCall, table: Array | None) -> tuple[Array, Array]:
    rows, precision = _lay_out(plan, call, table), _precision(call)
    first = _first_visible(rows)

    def alone(row: Rows) -> tuple[Array, Array]:
        scores = _span(row.transported, plan.block, True)
        bias = _bias(_diagonals(plan, table, 0), row, row)
        return _finish(_absorb(None, _logits(scores, bias, _seen(row, row, own=True)), row.v, precision))

    def step(carry: tuple[Array, Array], x: tuple[Array, Rows]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        (keys, r), (a, row) = carry, x
        own = _span(row.transported, plan.block, False)
        bias = _bias(_diagonals(plan, table, 0), row, row)
        state = _absorb(None, _logits(own.scores, bias, _seen(row, row, own=True)), row.v, precision)

        def past(c: Array, state: Any) -> Any:
            col = tiles.at(rows, c)
            here = matmul(tiles.at(keys, c), tiles.at(r, c))
            logits, _ = _past_logits(plan, precision, table, row, col, own.q, here, a - c)
            return _absorb(state, logits, col.v, precision)

        state = lax.fori_loop(0 if first is None else first[a], a, past, state)
        keys = lax.dynamic_update_index_in_dim(keys, own.k, a, 0)
        return (keys, _next_products(r, own.m, a)), _finish(state)

    if plan.count == 1:
        o, lse = jax.tree.map(lambda x: x[None], alone(jax.tree.map(lambda x: x[0], rows)))
    else:
        dim = rows.k.shape[-1]
        init = tiles.zeros(rows.k, rows.k.shape), tiles.zeros(rows.k, (*rows.k.shape[:-2], dim, dim))
        _, (o, lse) = lax.scan(step, init, (jnp.arange(plan.count), rows))
    return _uncut(o, call.q.shape[1]).astype(call.q.dtype), _uncut(lse, call.q.shape[1])


# ---- Backward ----


class Tile(NamedTuple):
    """Gradients of one tile."""

    scores: Array  # [B, H, S, S]
    v: Array  # [B, K, S, Dv]
    extras: Extras


def _tile_gradients(
    logits: Array, bias: Bias, row: Rows, saved: Saved, col: Rows, precision: Any, with_prior: bool
) -> Tile:
    p = jnp.exp(logits - saved.lse)
    dp = _dot(saved.do, transpose(col.v), precision)
    # A saturated row (p = 1, such as the first of a document) has no gradient through its logits: leave no rounding error.
    ds = p * (jnp.where(p < 1, dp - saved.delta, 0) + saved.dlse)
    kv_heads = col.v.shape[1]
    dv = _cols(p, saved.do, kv_heads, precision)
    dbias, rho = ds, None
    if row.rho is not None:
        rho = tiles.row_sum(ds * bias.plain)
        dbias = ds * row.rho[..., None]
    gated = row.hi is not None
    table = None
    if with_prior:
        table = tiles.toeplitz_sums(tiles.batch_sum(dbias))
    return Tile(
        ds, dv, Extras(tiles.row_sum(dbias) if gated else None, -tiles.col_sum(dbias) if gated else None, rho, table)
    )


class Sweep(NamedTuple):
    """What the sweep over pairs of superblocks adds up; the first four have a leading axis over superblocks."""

    keys: Array  # [N, B, K, S, D], gradient of k̂
    v: Array  # [N, B, K, S, Dv]
    m: Array  # [N, B, K, D, D]
    col_hi: Array | None  # [N, B, H, S]
    table: Array | None  # as the table


def _plus(x: Array | None, y: Array | None) -> Array | None:
    return x if y is None else y if x is None else x + y


def _add_table(plan: Plan, table: Array | None, part: Array | None, steps: Array | int) -> Array | None:
    if table is None or part is None:
        return table
    start = (plan.count - 1 - steps) * plan.size
    old = lax.dynamic_slice_in_dim(table, start, part.shape[-1], axis=-1)
    return lax.dynamic_update_slice_in_dim(table, old + part, start, axis=-1)


def _pairs_backward(
    plan: Plan, precision: Any, rows: Rows, saved: Saved, table: Array | None, edges: Span, first: Array | None
) -> tuple[Sweep, Array, Extras]:
    """Steps 2 of the backward pass: all tiles left of the diagonal -> (sums, dq̂, extras of the rows)."""

    def tile(a: Array, row: Rows, kept: Saved, moved: Array, r_row: Array, c: Array, state: Any) -> Any:
        sums, gamma, dq, own = state
        col, r = tiles.at(rows, c), tiles.at(r_row, c)
        key, m = tiles.at(edges.k, c), tiles.at(edges.m, c)
        here = matmul(key, r)
        logits, bias = _past_logits(plan, precision, table, row, col, moved, here, a - c)
        new = _tile_gradients(logits, bias, row, kept, col, precision, table is not None)
        dhere = _cols(new.scores, moved, key.shape[1], precision)
        sums = Sweep(
            keys=tiles.add_at(sums.keys, c, matmul(dhere, transpose(r))),
            v=tiles.add_at(sums.v, c, new.v),
            m=tiles.add_at(sums.m, c, matmul(gamma, transpose(r))),
            col_hi=None if sums.col_hi is None else tiles.add_at(sums.col_hi, c, new.extras.col_hi),
            table=_add_table(plan, sums.table, new.extras.table, a - c),
        )
        gamma = matmul(transpose(m), gamma) + matmul(transpose(key), dhere)
        own = Extras(_plus(own.row_hi, new.extras.row_hi), None, _plus(own.rho, new.extras.rho), None)
        return sums, gamma, dq + _dot(new.scores, here, precision), own

    def step(carry: tuple[Array, Sweep], x: Any) -> tuple[tuple[Array, Sweep], tuple[Array, Extras]]:
        (r, sums), (a, row, kept, moved, m) = carry, x
        line = lambda wanted: tiles.zeros(moved, moved.shape[:-1]) if wanted else None
        init = (
            sums,
            tiles.zeros(m, m.shape),
            tiles.zeros(moved, moved.shape),
            Extras(line(gated), None, line(sharp), None),
        )
        body = partial(tile, a, row, kept, moved, r)
        sums, _, dq, own = lax.fori_loop(0 if first is None else first[a], a, body, init)
        return (_next_products(r, m, a), sums), (dq, own)

    gated, sharp = rows.hi is not None, rows.rho is not None
    sums = Sweep(
        keys=tiles.zeros(rows.k, rows.k.shape),
        v=tiles.zeros(rows.v, rows.v.shape),
        m=tiles.zeros(rows.k, edges.m.shape),
        col_hi=None if rows.hi is None else tiles.zeros(rows.hi, rows.hi.shape),
        table=None if table is None else tiles.zeros(rows.k, table.shape),
    )
    init = tiles.zeros(rows.k, edges.m.shape), sums
    (_, sums), (dq, own) = lax.scan(step, init, (jnp.arange(plan.count), rows, saved, edges.q, edges.m))
    return sums, dq, own


def _own_backward(
    plan: Plan, precision: Any, table: Array | None, row: Rows, kept: Saved, edge: Callable[[Array], Span] | None
) -> tuple[dict[str, Array], Tile]:
    """Step 3: the tile on the diagonal of one superblock and all that led to it. `edge(dscores)` completes the cotangent."""
    own, pull = jax.vjp(lambda *x: _span(x, plan.block, edge is None), *row.transported)
    scores = own if edge is None else own.scores
    bias = _bias(_diagonals(plan, table, 0), row, row)
    logits = _logits(scores, bias, _seen(row, row, own=True))
    new = _tile_gradients(logits, bias, row, kept, row, precision, table is not None)
    grads = pull(new.scores if edge is None else edge(new.scores))
    return dict(zip(("q", "k", "w", "beta"), grads, strict=True)), new


@partial(jax.jit, static_argnums=0)
def _backward(
    plan: Plan, call: PathCall, table: Array | None, o: Array, lse: Array, do: Array, dlse: Array
) -> tuple[PathCall, Array | None]:
    precision = _precision(call)
    alive = lse > -jnp.inf  # rows without a key: no 0 · NaN
    do = jnp.where(alive[..., None], do.astype(call.wide), 0)
    delta = (do * o.astype(call.wide)).sum(-1)
    cut = lambda x: _cut_heads(jnp.where(alive, x, 0), plan)[..., None]
    saved = Saved(_cut_heads(do, plan), cut(delta), cut(lse), cut(dlse))
    rows = _lay_out(plan, call, table)
    grads = (_one_superblock if plan.count == 1 else _many_superblocks)(plan, precision, rows, saved, table)
    return _to_call(plan, call, grads), grads.table


class Gradients(NamedTuple):
    """Of the fields of Rows that have one, and of the table."""

    q: Array
    k: Array
    v: Array
    w: Array
    beta: Array
    hi: Array | None
    rho: Array | None
    table: Array | None


def _one_superblock(plan: Plan, precision: Any, rows: Rows, saved: Saved, table: Array | None) -> Gradients:
    row, kept = jax.tree.map(lambda x: x[0], (rows, saved))
    grads, new = _own_backward(plan, precision, table, row, kept, None)
    one = lambda x: None if x is None else x[None]
    dtable = None if table is None else _add_table(plan, tiles.zeros(rows.k, table.shape), new.extras.table, 0)
    hi = _plus(new.extras.row_hi, new.extras.col_hi)
    return Gradients(v=one(new.v), hi=one(hi), rho=one(new.extras.rho), table=dtable, **jax.tree.map(one, grads))


def _many_superblocks(plan: Plan, precision: Any, rows: Rows, saved: Saved, table: Array | None) -> Gradients:
    edges = lax.map(lambda row: _span(row.transported, plan.block, False)._replace(scores=None), rows)
    sums, dq, past = _pairs_backward(plan, precision, rows, saved, table, edges, _first_visible(rows))

    def own(dtable: Array | None, x: Any) -> tuple[Array | None, Any]:
        row, kept, dq, dk, dm = x
        edge = lambda dscores: Span(dscores, dq, dk, dm)
        grads, new = _own_backward(plan, precision, table, row, kept, edge)
        return _add_table(plan, dtable, new.extras.table, 0), (grads, new.v, new.extras._replace(table=None))

    dtable, (grads, dv, extras) = lax.scan(own, sums.table, (rows, saved, dq, sums.keys, sums.m))
    hi = None if rows.hi is None else past.row_hi + sums.col_hi + extras.row_hi + extras.col_hi
    return Gradients(v=dv + sums.v, hi=hi, rho=_plus(past.rho, extras.rho), table=dtable, **grads)


def _to_call(plan: Plan, call: PathCall, grads: Gradients) -> PathCall:
    """Gradients of the rows -> cotangent of the call (None stands for zero)."""
    names = ("q", "k", "v", "w", "beta", "sharpness")
    floats = {name: getattr(call, name) for name in names} | {"hi": None if call.gates is None else call.gates[0]}

    def rows(x: dict[str, Any]) -> tuple[Any, ...]:
        gates = None if call.gates is None else (x["hi"], call.gates[1])
        changed = replace(call, gates=gates, segments=None, **{name: x[name] for name in names})
        out = _lay_out(plan, changed, grads.table)
        return out.q, out.k, out.v, out.w, out.beta, out.hi, out.rho

    (back,) = jax.vjp(rows, floats)[1](tuple(grads[:7]))
    hi = back.pop("hi")
    return replace(call, gates=None if hi is None else (hi, None), segments=None, **back)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, call: PathCall, table: Array | None) -> tuple[Array, Array]:
    return _forward(plan, call, table)


def _attend_fwd(plan: Plan, call: PathCall, table: Array | None) -> tuple[tuple[Array, Array], Any]:
    o, lse = _forward(plan, call, table)
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse), (call, table, o, lse)


def _attend_bwd(plan: Plan, saved: Any, cotangents: tuple[Array, Array]) -> tuple[PathCall, Array | None]:
    return _backward(plan, *saved, *cotangents)


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(call: PathCall, plan: Plan | None = None) -> tuple[Array, Array]:
    """(o [B, T, H, Dv] in q's dtype, lse [B, T, H] float32, float64 for float64 inputs)."""
    if plan is None:
        plan = choose_plan(call.q.shape[1], call.q.shape[-1])
    check_plan(plan, call.q.shape[1])
    table = _prior_table(plan, call)
    return _attend(plan, *tiles.vary_together((replace(call, prior=None), table)))
