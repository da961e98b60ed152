"""Blockwise attention in plain XLA: O(T) memory in both passes, every platform, own backward.

Forward: for each block of queries a running maximum, sum and output over the blocks of keys that it may see (online
softmax, Milakov & Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691). Backward: one sweep over the same
tiles recomputes the probabilities from lse and adds up all gradients, those of the prior's parameters by `jax.vjp` of
log_prior inside the tile. Sums run in a fixed order: two runs give the same bits.

Shape names: B batch, K key heads, G query heads per key head, R rows (queries) and C columns (keys) of a tile.
"""

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


def supports(call: Call) -> str | None:
    """Everything."""
    return None


class Row(NamedTuple):
    """A block of queries with what every tile of it needs; fields after `sharpness` exist in the backward pass only."""

    block: Block
    q: Array  # [B, K, G, R, D]
    sharpness: Array | None  # [B, K, G, R, 1] float32, as all below
    do: Array | None = None  # [B, K, G, R, Dv], the output's cotangent
    delta: Array | None = None  # Σ do·o
    lse: Array | None = None
    dlse: Array | None = None


class Scores(NamedTuple):
    """One tile: logits (−inf where unseen) and what the backward pass needs to take them apart."""

    k: Array  # [B, C, K, D], zero where no row of the tile sees the key, as v
    v: Array
    logits: Array  # [B, K, G, R, C]
    sharpened: Array | None  # the factor that multiplies the sharpness
    prior_vjp: Callable[[Array], Any] | None  # of a prior [prior_rows, K, G, R, C]
    prior_rows: int  # B, or 1 if it is the same in every batch row


def _accumulator(call: Call) -> Any:
    return jnp.promote_types(call.q.dtype, jnp.float32)


def _matmul(spec: str, x: Array, y: Array, low: Any) -> Array:
    """einsum with float32 sums; operands in bfloat16 only if the inputs are (float16 lacks the range of gradients)."""
    wide = jnp.promote_types(low, jnp.float32)
    narrow = low if low == jnp.bfloat16 else wide
    return jnp.einsum(spec, x.astype(narrow), y.astype(narrow), preferred_element_type=wide)


def _zeros(call: Call, shape: tuple[int, ...], dtype: Any = None, fill: float = 0) -> Array:
    # full_like and not zeros: under shard_map the array varies over the same mesh axes as q.
    return lax.full_like(call.q, fill, shape=shape, dtype=dtype or _accumulator(call))


def _scores(call: Call, grid: Grid, row: Row, j: Array | int) -> tuple[Block, Scores]:
    col = tiles.block(call, j, grid.cols, queries=False)
    k, v = (tiles.cut(x, col.start, grid.cols) for x in (call.k, call.v))
    seen = tiles.visible_tile(call, row.block, col, grid)
    gates = col.gates
    if seen is not None and not call.every_key_is_seen():
        used = seen.any(1)
        k, v = (jnp.where(used[:, :, None, None], x, 0) for x in (k, v))
        gates = None if gates is None else tuple(jnp.where(used[:, None, None, :], g, 0) for g in gates)
    content = call.scale * _matmul("bkgrd,bckd->bkgrc", row.q, k, call.q.dtype)
    bias, pullback, prior_rows = None, None, 1
    if call.prior is not None:
        bias, pullback = jax.vjp(tiles.prior_tile(call, row.block, col, seen, grid), call.prior.params)
        prior_rows = bias.shape[0]
    if gates is not None and row.block.gates is not None:
        (q_hi, q_lo), (k_hi, k_lo) = row.block.gates, gates
        gate = (q_hi[..., None] - k_hi[..., None, :]) + (q_lo[..., None] - k_lo[..., None, :])
        bias = gate if bias is None else bias + gate
    sharpened = None
    if row.sharpness is None:
        logits = content if bias is None else content + bias
    elif call.sharpen_prior or bias is None:
        sharpened = content if bias is None else content + bias
        logits = row.sharpness * sharpened
    else:
        sharpened = content
        logits = row.sharpness * content + bias
    if seen is not None:
        logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
    return col, Scores(k, v, logits, sharpened, pullback, prior_rows)


def _row(call: Call, grid: Grid, i: Array | int, **backward: Array) -> Row:
    block = tiles.block(call, i, grid.rows, queries=True)
    kv_heads = call.k.shape[2]
    part = lambda x: tiles.heads_first(tiles.cut(x, block.start, grid.rows), kv_heads)
    scalar = lambda x: part(x)[..., None]
    return Row(
        block,
        part(call.q),
        None if call.sharpness is None else scalar(call.sharpness),
        **{name: part(x) if name == "do" else scalar(x) for name, x in backward.items()},
    )


# ---- Forward ----


@jax.jit
def _forward(call: Call) -> tuple[Array, Array]:
    grid = tiles.choose_grid(call)
    batch, _, heads, _ = call.q.shape
    kv_heads, dim = call.v.shape[2:]
    key_range = tiles.key_ranges(call, grid)

    def step(row: Row, j: Array | int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        _, s = _scores(call, grid, row, j)
        new_top = jnp.maximum(top, s.logits.max(-1))
        base = jnp.where(new_top == -jnp.inf, 0, new_top)
        p = jnp.exp(s.logits - base[..., None])
        shrink = jnp.exp(top - base)
        acc = shrink[..., None] * acc + _matmul("bkgrc,bckd->bkgrd", p, s.v, call.v.dtype)
        return new_top, shrink * total + p.sum(-1), acc

    def one_row(i: Array | int, out: tuple[Array, Array]) -> tuple[Array, Array]:
        row = _row(call, grid, i)
        row = row._replace(
            block=row.block._replace(fresh=None)
        )  # computed twice and written twice, with the same values
        shape = (batch, kv_heads, heads // kv_heads, grid.rows)
        init = _zeros(call, shape, fill=-jnp.inf), _zeros(call, shape), _zeros(call, (*shape, dim))
        top, total, acc = tiles.loop(key_range(i), grid.col_blocks, lambda j, c: step(row, j, c), init)
        some = total > 0
        total = jnp.where(some, total, 1)
        o = tiles.heads_last(acc / total[..., None])
        lse = tiles.heads_last(jnp.where(some, top + jnp.log(total), -jnp.inf))
        return tiles.put(out[0], o, row.block.start), tiles.put(out[1], lse, row.block.start)

    out = _zeros(call, (*call.q.shape[:3], dim), call.q.dtype), _zeros(call, call.q.shape[:3])
    return tiles.loop((0, grid.row_blocks), grid.row_blocks, one_row, out)


# ---- Backward ----


def _tile_gradients(call: Call, row: Row, s: Scores) -> dict[str, Any]:
    """Gradients that one tile contributes: rows as [B,K,G,R,·], columns as [B,C,K,·] or [B,K,G,C]."""
    low = call.q.dtype
    p = jnp.exp(s.logits - row.lse)
    dp = _matmul("bkgrd,bckd->bkgrc", row.do, s.v, low)
    # A saturated row (p = 1, such as a row with one key) has no gradient through its logits. do·v − Σ do·o would leave a
    # rounding error there, which a log-prior of −1e30 would blow up.
    ds = p * (jnp.where(p < 1, dp - row.delta, 0) + row.dlse)
    grads: dict[str, Any] = {"v": _matmul("bkgrc,bkgrd->bckd", p, row.do, low)}
    dbias = dcontent = ds
    if row.sharpness is not None and s.sharpened is not None:
        grads["sharpness"] = (ds * s.sharpened).sum(-1)
        dcontent = ds * row.sharpness
        dbias = dcontent if call.sharpen_prior else ds
    if call.gates is not None:
        grads["q_gates"], grads["k_gates"] = dbias.sum(-1), -dbias.sum(-2)
    if s.prior_vjp is not None:
        (grads["prior"],) = s.prior_vjp(dbias if dbias.shape[0] == s.prior_rows else tiles.batch_sum(dbias))
    dcontent = dcontent * call.scale
    grads["q"] = _matmul("bkgrc,bckd->bkgrd", dcontent, s.k, low)
    grads["k"] = _matmul("bkgrc,bkgrd->bckd", dcontent, row.q, low)
    return grads


ROWS = ("q", "sharpness", "q_gates")  # gradients that live on a block of queries; the others add up over all tiles


@jax.jit
def _backward(call: Call, o: Array, lse: Array, do: Array, dlse: Array) -> Call:
    grid = tiles.choose_grid(call)
    wide = _accumulator(call)
    alive = lse > -jnp.inf
    clean = lambda x: jnp.where(alive if x.ndim == 3 else alive[..., None], x, 0)  # rows without a key: no 0 · NaN
    call = replace(call, q=clean(call.q))
    do = clean(do)
    delta = (do.astype(wide) * o.astype(wide)).sum(-1)
    saved = {"do": do, "delta": delta, "lse": clean(lse), "dlse": clean(dlse)}
    key_range = tiles.key_ranges(call, grid)

    def step(row: Row, j: Array | int, grads: dict[str, Any]) -> dict[str, Any]:
        col, s = _scores(call, grid, row, j)
        new = _tile_gradients(call, row, s)
        out = {name: grads[name] + new[name] for name in ROWS if name in grads}
        out |= {name: tiles.accumulate(grads[name], new[name], col.start) for name in ("k", "v")}
        if "prior" in grads:
            out["prior"] = jax.tree.map(jnp.add, grads["prior"], new["prior"])
        if "k_gates" in grads:
            out["k_gates"] = tiles.accumulate(grads["k_gates"], tiles.heads_last(new["k_gates"]), col.start)
        return out

    def one_row(i: Array | int, grads: dict[str, Any]) -> dict[str, Any]:
        row = _row(call, grid, i, **saved)
        local = {"q": _zeros(call, row.q.shape)}
        local |= {name: _zeros(call, row.q.shape[:-1]) for name in ROWS[1:] if name in grads}
        carry = {name: local.get(name, grad) for name, grad in grads.items()}
        carry = tiles.loop(key_range(i), grid.col_blocks, lambda j, c: step(row, j, c), carry)
        for name in local:
            part = tiles.heads_last(carry[name])
            put = tiles.put if row.block.fresh is None else tiles.accumulate
            carry[name] = put(grads[name], part, row.block.start)
        return carry

    zeros: dict[str, Any] = {
        "q": _zeros(call, call.q.shape),
        "k": _zeros(call, call.k.shape),
        "v": _zeros(call, call.v.shape),
    }
    if call.sharpness is not None:
        zeros["sharpness"] = _zeros(call, call.sharpness.shape)
    if call.gates is not None:
        zeros |= {"q_gates": _zeros(call, call.gates[0].shape), "k_gates": _zeros(call, call.gates[2].shape)}
    if call.prior is not None:
        zeros["prior"] = jax.tree.map(lambda x: _zeros(call, x.shape, x.dtype), call.prior.params)
    grads = tiles.loop((0, grid.row_blocks), grid.row_blocks, one_row, zeros)
    return _as_call(call, grads)


def _as_call(call: Call, grads: dict[str, Any]) -> Call:
    """The cotangents of a Call's float arrays; None stands for zero."""
    like = lambda name, x: None if x is None else grads[name].astype(x.dtype)
    gates = None
    if call.gates is not None:
        gates = (like("q_gates", call.gates[0]), None, like("k_gates", call.gates[2]), None)
    return replace(
        call,
        q=like("q", call.q),
        k=like("k", call.k),
        v=like("v", call.v),
        prior=None if call.prior is None else DistancePrior(grads["prior"], call.prior.log_prior),
        gates=gates,
        sharpness=like("sharpness", call.sharpness),
        q_positions=None,
        kv_positions=None,
        q_segments=None,
        kv_segments=None,
    )


@jax.custom_vjp
def _attend(call: Call) -> tuple[Array, Array]:
    return _forward(call)


def _attend_fwd(call: Call) -> tuple[tuple[Array, Array], tuple[Call, Array, Array]]:
    o, lse = _forward(call)
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse), (call, o, lse)


def _attend_bwd(saved: tuple[Call, Array, Array], cotangents: tuple[Array, Array]) -> tuple[Call]:
    return (_backward(*saved, *cotangents),)


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


def attend(call: Call) -> tuple[Array, Array]:
    """(o [B, T, H, Dv] in q's dtype, lse [B, T, H] float32, float64 for float64 inputs)."""
    return _attend(_vary_together(call))
