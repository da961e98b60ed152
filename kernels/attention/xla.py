"""Blockwise attention in plain XLA: O(T) memory in both passes, every platform, own backward.

Forward: for each block of queries a running maximum, sum and output over the blocks of keys that it may see (online
softmax, Milakov & Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691). Backward: one sweep over the same
tiles recomputes the probabilities from lse and adds up all gradients. That of the prior's parameters is `jax.vjp` of
log_prior, of the sums per diagonal (default positions) or in each tile. Sums run in a fixed order: two runs give the
same bits.

Shape names: B batch, H heads, K key heads, R rows (queries) and C columns (keys) of a tile.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from kernels.attention import tiles
from kernels.attention.call import Call, DistancePrior
from kernels.attention.tiles import Block, Grid

Array = jax.Array
FEW = 64  # query rows times heads up to which keys and values are read in storage order


def supports(call: Call) -> str | None:
    """Everything."""
    return None


class Saved(NamedTuple):
    """What the backward pass knows about a block of queries, [B, H, R, ·] float32."""

    do: Array  # the output's cotangent
    delta: Array  # Σ do·o
    lse: Array
    dlse: Array  # its cotangent


class Row(NamedTuple):
    """A block of queries with what every tile of it needs."""

    block: Block
    q: Array  # [B, H, R, D]
    sharpness: Array | None  # [B, H, R, 1] float32
    saved: Saved | None  # None in the forward pass


class Scores(NamedTuple):
    """One tile: logits (−inf where unseen) and what the backward pass needs to take them apart."""

    k: Array  # [B, C, K, D]; zero where no row of the tile sees the key, if the backward pass multiplies by it
    v: Array  # [B, C, K, Dv]; zero where no row of the tile sees the key
    logits: Array  # [B, H, R, C]
    sharpened: Array  # the part that the sharpness multiplies
    prior_vjp: Callable[[Array], Any] | None  # for explicit positions


def _accumulator(call: Call) -> Any:
    return jnp.promote_types(call.q.dtype, jnp.float32)


def _matmul(spec: str, x: Array, y: Array, low: Any) -> Array:
    """einsum with float32 sums; operands in bfloat16 only if the inputs are (float16 lacks the range of gradients)."""
    wide = jnp.promote_types(low, jnp.float32)
    narrow = low if low == jnp.bfloat16 else wide
    return jnp.einsum(spec, x.astype(narrow), y.astype(narrow), preferred_element_type=wide)


def _group(x: Array, kv_heads: int) -> Array:
    """[B, H, R, n] -> [B, K, (H/K)·R, n]: the query heads of one key head are more rows of the same matrix."""
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[3])


def _few(x: Array) -> bool:
    """Few query rows (decode): read the keys as stored, with a block-diagonal query, rather than transpose them."""
    return x.shape[1] * x.shape[2] <= FEW


def _rows_by_cols(x: Array, k: Array, low: Any) -> Array:
    """[B, H, R, D], [B, C, K, D] -> [B, H, R, C]."""
    batch, cols, kv_heads, dim = k.shape
    grouped = _group(x, kv_heads)
    if _few(x):
        blocks = jnp.einsum("bkrd,kl->bkrld", grouped, jnp.eye(kv_heads, dtype=x.dtype))
        out = _matmul("byx,bcx->byc", blocks.reshape(batch, -1, kv_heads * dim), k.reshape(batch, cols, -1), low)
    else:
        out = _matmul("bkrd,bckd->bkrc", grouped, k, low)
    return out.reshape(*x.shape[:3], cols)


def _to_rows(p: Array, v: Array, low: Any) -> Array:
    """[B, H, R, C], [B, C, K, D] -> [B, H, R, D]."""
    batch, cols, kv_heads, dim = v.shape
    if _few(p):
        every = _matmul("byc,bcx->byx", p.reshape(batch, -1, cols), v.reshape(batch, cols, -1), low)
        out = jnp.einsum("bkrkd->bkrd", every.reshape(batch, kv_heads, -1, kv_heads, dim))
    else:
        out = _matmul("bkrc,bckd->bkrd", _group(p, kv_heads), v, low)
    return out.reshape(*p.shape[:3], dim)


def _to_cols(p: Array, x: Array, kv_heads: int, low: Any) -> Array:
    """[B, H, R, C], [B, H, R, D] -> [B, C, K, D]."""
    return _matmul("bkrc,bkrd->bckd", _group(p, kv_heads), _group(x, kv_heads), low)


def _zeros(call: Call, shape: tuple[int, ...], dtype: Any = None, fill: float = 0) -> Array:
    # full_like and not zeros: under shard_map the array varies over the same mesh axes as q.
    return lax.full_like(call.q, fill, shape=shape, dtype=dtype or _accumulator(call))


def _scores(call: Call, grid: Grid, table: Array | None, row: Row, j: Array | int) -> tuple[Block, Scores]:
    col = tiles.block(call, j, grid.cols, queries=False)
    k, v = (tiles.cut(x, col.start, grid.cols) for x in (call.k, call.v))
    seen = tiles.visible_tile(call, row.block, col, grid)
    gates = col.gates
    if seen is not None and not call.every_key_is_seen():
        used = seen.any(1)
        v = jnp.where(used[:, :, None, None], v, 0)  # 0 · NaN
        if row.saved is not None:
            k = jnp.where(used[:, :, None, None], k, 0)
        if row.saved is not None and gates is not None:
            gates = jnp.where(used[:, None], gates[0], 0), jnp.where(used[:, None], gates[1], 0)
    content = call.scale * _rows_by_cols(row.q, k, call.q.dtype)
    biases, pullback = [], None
    if table is not None:
        biases += [tiles.lay_diagonals(call, table, row.block, col, grid)]
    elif call.prior is not None:
        d = tiles.distances(row.block, col, seen)
        prior = lambda params: tiles.dense_prior(call, params, d)
        values, pullback = jax.vjp(prior, tiles.copies(call.prior.params, len(d)))
        biases += [values]
    if gates is not None and row.block.gates is not None:
        (q_hi, q_lo), (k_hi, k_lo) = row.block.gates, gates
        biases += [(q_hi[..., None] - k_hi[:, :, None]) + (q_lo[..., None] - k_lo[:, :, None])]
    inside, outside = (biases, []) if call.sharpen_prior else ([], biases)
    sharpened = sum(inside, start=content)
    logits = sum(outside, start=sharpened if row.sharpness is None else row.sharpness * sharpened)
    if seen is not None:
        logits = jnp.where(seen[:, None], logits, -jnp.inf)
    return col, Scores(k, v, logits, sharpened, pullback)


def _table(call: Call, prior: DistancePrior | None) -> Array | None:
    """Values of the prior by diagonal, where positions are the default ones."""
    return None if prior is None or call.q_positions is not None else tiles.prior_table(call, prior.params)


def _row(call: Call, grid: Grid, i: Array | int, saved: Saved | None) -> Row:
    """Block i of the queries; `saved` in the layout of the call, [B, T, H, ·]."""
    block = tiles.block(call, i, grid.rows, queries=True)
    part = lambda x: tiles.heads_first(tiles.cut(x, block.start, grid.rows))
    sharpness = None if call.sharpness is None else part(call.sharpness)[..., None]
    return Row(block, part(call.q), sharpness, None if saved is None else Saved(*map(part, saved)))


# ---- Forward ----


@functools.partial(jax.jit, static_argnums=0)
def _forward(grid: Grid, call: Call) -> tuple[Array, Array]:
    batch, _, heads, _ = call.q.shape
    dim = call.v.shape[3]
    key_range = tiles.key_ranges(call, grid)
    table = _table(call, call.prior)

    def step(row: Row, j: Array | int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        _, s = _scores(call, grid, table, row, j)
        new_top = jnp.maximum(top, s.logits.max(-1))
        base = jnp.where(new_top == -jnp.inf, 0, new_top)
        p = jnp.exp(s.logits - base[..., None])
        shrink = jnp.exp(top - base)
        acc = shrink[..., None] * acc + _to_rows(p, s.v, call.q.dtype)
        return new_top, shrink * total + p.sum(-1), acc

    def one_row(i: Array | int, out: tuple[Array, Array]) -> tuple[Array, Array]:
        row = _row(call, grid, i, None)
        row = row._replace(block=row.block._replace(fresh=None))  # shared entries: written twice, the same values
        shape = (batch, heads, grid.rows)
        init = _zeros(call, shape, fill=-jnp.inf), _zeros(call, shape), _zeros(call, (*shape, dim))
        top, total, acc = tiles.loop(key_range(i), grid.col_blocks, lambda j, c: step(row, j, c), init)
        some = total > 0
        total = jnp.where(some, total, 1)
        o = tiles.heads_first(acc / total[..., None])
        lse = tiles.heads_first(jnp.where(some, top + jnp.log(total), -jnp.inf))
        return tiles.put(out[0], o, row.block.start), tiles.put(out[1], lse, row.block.start)

    out = _zeros(call, (*call.q.shape[:3], dim), call.q.dtype), _zeros(call, call.q.shape[:3])
    return tiles.loop((0, grid.row_blocks), grid.row_blocks, one_row, out)


# ---- Backward ----


def _tile_gradients(call: Call, row: Row, s: Scores) -> dict[str, Any]:
    """What a tile adds to the gradients: of q, sharpness, q_gates [B, H, R, ...], of k, v, k_gates [B, C, K or H, ...],
    of the prior's table [B, R + C - 1, H] or of its parameters per batch row.

    Sums of products are einsums: jaxlib 0.10 reduces a product over an array with an axis of length 1 about 30 times
    slower than its other reductions on CPU.
    """
    assert row.saved is not None
    do, delta, lse, dlse = row.saved
    low, kv_heads = call.q.dtype, call.k.shape[2]
    p = jnp.exp(s.logits - lse)
    dp = _rows_by_cols(do, s.v, low)
    # A saturated row (p = 1, such as a row with one key) has no gradient through its logits. do·v − Σ do·o would leave
    # a rounding error there, which a log-prior of −1e30 would blow up.
    ds = p * (jnp.where(p < 1, dp - delta, 0) + dlse)
    r = jnp.ones_like(lse) if row.sharpness is None else row.sharpness
    grads = {
        "v": _to_cols(p, do, kv_heads, low),
        "q": call.scale * r * _to_rows(ds, s.k, low),
        "k": call.scale * _to_cols(ds, r * row.q, kv_heads, low),
    }
    if row.sharpness is not None:
        grads["sharpness"] = jnp.einsum("bhrc,bhrc->bhr", ds, s.sharpened)
    r = r if call.sharpen_prior else jnp.ones_like(r)
    if call.gates is not None:
        grads["q_gates"] = jnp.einsum("bhrc,c->bhr", ds, jnp.ones_like(ds[0, 0, 0])) * r[..., 0]
        grads["k_gates"] = -jnp.einsum("bhrc,bhr->bch", ds, r[..., 0])
    if s.prior_vjp is not None:
        (grads["prior"],) = s.prior_vjp(r * ds)
    elif call.prior is not None:
        grads["table"] = tiles.sum_diagonals(ds, r[..., 0])
    return grads


ROWS = ("q", "sharpness", "q_gates")  # gradients of a block of queries
COLS = ("k", "v", "k_gates")  # of a block of keys


def _zero_gradients(call: Call, table: Array | None) -> dict[str, Any]:
    zeros: dict[str, Any] = {name: _zeros(call, getattr(call, name).shape) for name in ("q", "k", "v")}
    if call.sharpness is not None:
        zeros["sharpness"] = _zeros(call, call.sharpness.shape)
    if call.gates is not None:
        zeros |= {"q_gates": _zeros(call, call.gates[0].shape), "k_gates": _zeros(call, call.gates[2].shape)}
    if table is not None:
        zeros["table"] = _zeros(call, (call.q.shape[0], *table.shape[::-1]))
    elif call.prior is not None:
        copies = tiles.copies(call.prior.params, call.q.shape[0])
        zeros["prior"] = jax.tree.map(lambda x: _zeros(call, x.shape, x.dtype), copies)
    return zeros


@functools.partial(jax.jit, static_argnums=0)
def _backward(grid: Grid, call: Call, o: Array, lse: Array, do: Array, dlse: Array) -> Call:
    alive = lse > -jnp.inf
    clean = lambda x: jnp.where(alive if x.ndim == 3 else alive[..., None], x, 0)  # rows without a key: no 0 · NaN
    call = replace(call, q=clean(call.q), sharpness=None if call.sharpness is None else clean(call.sharpness))
    if call.gates is not None:
        call = replace(call, gates=(clean(call.gates[0]), clean(call.gates[1]), *call.gates[2:]))
    if call.q_positions is not None:  # tiles give gradients of the prior per batch row
        q_pos, k_pos = (jnp.broadcast_to(x, (len(call.q), x.shape[1])) for x in call.positions())
        call = replace(call, q_positions=q_pos, kv_positions=k_pos)
    do, wide = clean(do), _accumulator(call)
    delta = jnp.einsum("bthd,bthd->bth", do.astype(wide), o.astype(wide))
    saved = Saved(do, *(x[..., None] for x in (delta, clean(lse), clean(dlse))))
    key_range = tiles.key_ranges(call, grid)
    table, table_vjp = jax.vjp(lambda prior: _table(call, prior), call.prior)

    def step(row: Row, j: Array | int, grads: dict[str, Any]) -> dict[str, Any]:
        col, s = _scores(call, grid, table, row, j)
        new = _tile_gradients(call, row, s)
        out = {name: grads[name] + new[name] for name in ROWS if name in grads}
        out |= {name: tiles.accumulate(grads[name], new[name], col.start) for name in COLS if name in grads}
        if table is not None:
            first = tiles.corner(call, row.block, col) - grid.rows + 1
            out["table"] = tiles.accumulate(grads["table"], new["table"], first)
        if "prior" in grads:
            out["prior"] = jax.tree.map(jnp.add, grads["prior"], new["prior"])
        return out

    def one_row(i: Array | int, grads: dict[str, Any]) -> dict[str, Any]:
        row = _row(call, grid, i, saved)
        local = {"q": _zeros(call, row.q.shape)}
        local |= {name: _zeros(call, row.q.shape[:-1]) for name in ROWS[1:] if name in grads}
        done = tiles.loop(key_range(i), grid.col_blocks, lambda j, c: step(row, j, c), grads | local)
        put = tiles.put if row.block.fresh is None else tiles.accumulate
        return done | {name: put(grads[name], tiles.heads_first(done[name]), row.block.start) for name in local}

    grads = tiles.loop((0, grid.row_blocks), grid.row_blocks, one_row, _zero_gradients(call, table))
    if table is not None:
        total = jnp.einsum("bwh,b->hw", grads["table"], jnp.ones_like(lse[:, 0, 0]))
        grads["prior"] = table_vjp(total)[0].params
    elif call.prior is not None:
        grads["prior"] = jax.tree.map(lambda x: x.sum(0), grads["prior"])
    return as_call(call, grads)


def as_call(call: Call, grads: dict[str, Any]) -> Call:
    """The cotangents of a Call's float arrays; None stands for zero."""
    like = lambda name, x: None if x is None else grads[name].astype(x.dtype)
    gates: Any = None
    if call.gates is not None:
        gates = (like("q_gates", call.gates[0]), None, like("k_gates", call.gates[2]), None)
    cotangents: dict[str, Any] = {name: like(name, getattr(call, name)) for name in ("q", "k", "v", "sharpness")}
    integers: dict[str, Any] = dict.fromkeys(("q_positions", "kv_positions", "q_segments", "kv_segments"))
    prior = None if call.prior is None else DistancePrior(grads["prior"], call.prior.log_prior)
    return replace(call, **cotangents, **integers, prior=prior, gates=gates)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(grid: Grid, call: Call) -> tuple[Array, Array]:
    return _forward(grid, call)


def _attend_fwd(grid: Grid, call: Call) -> tuple[tuple[Array, Array], tuple[Call, Array, Array]]:
    o, lse = _forward(grid, call)
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse), (call, o, lse)


def _attend_bwd(grid: Grid, saved: tuple[Call, Array, Array], cotangents: tuple[Array, Array]) -> tuple[Call]:
    return (_backward(grid, *saved, *cotangents),)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _vary_together(call: Call) -> Call:
    """Under shard_map with check_vma: let every array vary over the union of mesh axes, so that loop carries agree.

    The transpose of this cast sums the gradient of what was replicated (a prior's parameters) over the mesh.
    """
    axes = frozenset[Any]().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(call)))
    cast = lambda x: lax.pcast(x, tuple(axes - jax.typeof(x).manual_axis_type.varying), to="varying")
    return (
        jax.tree.map(lambda x: x if axes <= jax.typeof(x).manual_axis_type.varying else cast(x), call) if axes else call
    )


def forward(call: Call) -> tuple[Array, Array]:
    """(o, lse) as `attend` gives them, for backends with a differentiation rule of their own."""
    return _forward(tiles.choose_grid(call), call)


def backward(call: Call, o: Array, lse: Array, do: Array, dlse: Array) -> Call:
    """The cotangents of `forward`'s argument, from its results and their cotangents."""
    return _backward(tiles.choose_grid(call), call, o, lse, do, dlse)


def attend(call: Call, grid: Grid | None = None) -> tuple[Array, Array]:
    """(o [B, T, H, Dv] in q's dtype, lse [B, T, H] float32, float64 for float64 inputs)."""
    return _attend(grid or tiles.choose_grid(call), _vary_together(call))
