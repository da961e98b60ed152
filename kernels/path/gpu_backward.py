"""Backward pass of `gpu.py`, from its residuals to the gradients of everything.

First all that the queries meet: from the top level down their gradients at the edges of the children, then inside the
blocks. Then the keys, from the top level down, and the blocks' transitions. Between the two stands the correction that
gates need (`_without`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.path import gpu_levels
from kernels.path.gpu import (
    BLOCK,
    Climb,
    Leaves,
    PathOptions,
    betas,
    bias_inside,
    block_inputs,
    heads_first,
    level_inputs,
)
from kernels.path.gpu_blocks import HALF
from kernels.path.gpu_blocks_backward import block_queries_backward, whole_tiles
from kernels.path.gpu_keys_backward import block_keys_backward
from kernels.path.gpu_moves import move_backward_matrices, move_backward_rows
from kernels.path.gpu_narrow import tile_width
from kernels.path.gpu_products import runs_backward
from kernels.path.levels import Level

Array = jax.Array
BF16, F32 = jnp.bfloat16, jnp.float32


class Above(NamedTuple):
    """Gradients that the levels above leave behind: of keys at the edges of the children (bfloat16), of their products
    (float32) and how large those are (see `runs_backward`), and of the values so far (bfloat16; below the lowest level
    all of it, in their own dtype). None above the top."""

    k: Array | None
    p: Array | None
    most: Array | None
    v: Array | None


@partial(jax.jit, static_argnums=0)  # layers that are alike then share one lowering
def backward(options: PathOptions, residuals: Any, cotangents: tuple[Array, Array]) -> Leaves:
    """The cotangent of x in `gpu.path`, but for the segments, which have none."""
    x, keys, steps, o, lse = residuals
    do, dlse = cotangents
    alive = lse > -jnp.inf
    dlse = jnp.where(alive, dlse, 0)
    delta = jnp.where(alive, (o.astype(F32) * do.astype(F32)).sum(-1), 0) - dlse
    lse = jnp.where(alive, lse, jnp.inf)
    state = lambda level, step: gpu_levels.recompute(
        options.attention, level_inputs(x), level, step.q, step.carried, do, lse
    )
    pairs = list(zip(options.levels, steps, strict=True))[::-1]
    sides: list[dict[str, Any]] = []
    edges: list[Array | None] = []
    dq: Array | None = None
    for level, step in pairs:
        sides.append(gpu_levels.query_side(state(level, step), delta))
        edges.append(dq)
        dq = _queries_down(options, level, step, sides[-1]["dq"], dq)
    back = {"do": do, "lse": heads_first(lse), "delta": heads_first(delta)}
    back["dq0"] = jnp.zeros(x["q"].shape, BF16) if dq is None else dq  # a row of one block
    grads = block_queries_backward(options.block, block_inputs(options, x), keys, back, x["params"] is not None)
    if x["gates"] is not None:
        excess = jnp.where(alive, heads_first(grads["rows"]) + sum(s["rows"] for s in sides) - dlse, 0)
        grads |= _without(options, x, grads, excess)
        delta = delta + excess
    own = _per_key_head(grads["dv"], 2, x["v"].shape[2], dtype=F32)
    above, columns = Above(None, None, None, None), []
    for (level, step), edge in zip(pairs, edges, strict=True):
        step, above = jax.lax.optimization_barrier((step, above))  # one level's gradients of carried keys at a time
        side = gpu_levels.key_side(state(level, step), delta)
        columns.append(side.get("columns"))
        above = _keys_down(options, level, step, side, edge, above, own if level is pairs[-1][0] else None)
    grads |= _key_gradients(options, x, keys, grads, above) | {"dv": own if above.v is None else above.v}
    return _collect(options, x, grads, sides, columns, dlse)


def _without(options: PathOptions, x: Leaves, grads: dict[str, Array], excess: Array) -> dict[str, Array]:
    """The blocks' columns and dbias without what `excess` [B, T, H] in delta does to their own tiles.

    d(logits) of a row sum to dlse. What they sum to beyond that is the rounding of o in delta; it would add up in the
    running sum behind the gates. The levels' keys get a delta without it; the blocks' sums are mended here.
    """
    if x["sharpness"] is not None and options.sharpen_prior:
        excess = excess * x["sharpness"]
    batch, length, heads = excess.shape
    rows = heads_first(excess).reshape(batch, heads, -1, 2, HALF, 1)
    take = lambda p, rows: p.reshape(*rows.shape[:-1], HALF).astype(F32) * rows
    own, left = take(grads["p"], rows), take(grads["p_left"], rows[:, :, :, 1:])
    columns = own.sum(-2) + jnp.pad(left.sum(-2), ((0, 0), (0, 0), (0, 0), (0, 1), (0, 0)))
    out = {"columns": grads["columns"] - columns.reshape(batch, heads, length)}
    return out | ({"dbias": grads["dbias"] - whole_tiles(own, left)} if "dbias" in grads else {})


def _queries_down(options: PathOptions, level: Level, step: Climb, dq: Array, above: Array | None) -> Array:
    """Gradient of the queries at the edges of a level's children, from that of its attention and of those above."""
    dq = dq.astype(BF16)
    if above is None:
        return dq
    rows = partial(move_backward_rows, transposed=False, packed=False, dtype=BF16, interpret=options.interpret)
    return rows(above, step.left, level, plus=(dq,))


def _keys_down(
    options: PathOptions,
    level: Level,
    step: Climb,
    side: dict[str, Array],
    edge: Array | None,
    above: Above,
    own: Array | None,
) -> Above:
    """What a level hands down. side: results of `key_side`; edge: gradient of the queries at the parents' edges; own:
    for the lowest level, the gradient of the values from inside the blocks."""
    assert step.k is not None
    rows = partial(move_backward_rows, level=level, packed=True, interpret=options.interpret)
    kv_heads = step.p.shape[1]
    matrices = partial(move_backward_matrices, level=level, kv_heads=kv_heads, interpret=options.interpret)
    dkeys = side["keys"].astype(BF16)
    druns, handed, joined = matrices(step.k, dkeys, transposed=True, packed=True), None, None
    if edge is not None and above.k is not None and above.p is not None:
        dleft = matrices(step.q, edge, transposed=False, packed=False)
        dright = matrices(step.k, above.k, transposed=True, packed=False)
        handed, joined = (dright, dleft, above.p.reshape(dleft[:, :, :, 0].shape)), (above.k, level.pairs)
    dp, most = runs_backward(step.p, step.runs, druns, handed, level, options.interpret)
    dk = rows(dkeys, step.runs, joined=joined, dtype=BF16)
    values = tuple(dv for dv in (above.v, own) if dv is not None)
    dv = rows(side["v"], None, plus=values, dtype=BF16 if own is None else step.q.dtype)
    return Above(dk, dp, most, dv)


def _per_key_head(g: Array, axis: int, kv_heads: int, dtype: Any = None) -> Array:
    """The sum over the query heads, on `axis`, of each key head; dtype: of sums."""
    heads = g.shape[axis]
    if heads == kv_heads:
        return g
    return g.reshape(*g.shape[:axis], kv_heads, heads // kv_heads, *g.shape[axis + 1 :]).sum(axis + 1, dtype=dtype)


def _key_gradients(
    options: PathOptions, x: Leaves, keys: Any, grads: dict[str, Array], above: Above
) -> dict[str, Array]:
    batch, length, kv_heads, dim = x["k"].shape
    through: dict[str, Any] = {n: _per_key_head(grads[n], 1, kv_heads) for n in ("dw", "du", "dz", "dk_half")}
    through |= {"dk_in": _per_key_head(grads["dk"], 2, kv_heads)}
    through |= {"dk0": above.k, "dp": above.p, "dp_most": above.most}
    if above.k is None:  # a row of one block
        through["dk0"] = jnp.zeros(x["k"].shape, BF16)
        side = tile_width(dim)
        through["dp"] = jnp.zeros((batch, kv_heads, length // BLOCK, side, side), F32)
        through["dp_most"] = through["dp"][..., :1, :]
    return block_keys_backward(x["k"], betas(x), keys, through, interpret=options.interpret)


def _collect(options: PathOptions, x: Leaves, grads: dict[str, Array], sides: Any, columns: Any, dlse: Array) -> Leaves:
    """The cotangent of x. sides, columns: of the levels' queries and keys."""
    out: Leaves = dict.fromkeys(x)
    out |= {"q": grads["dq"], "k": grads["dk"], "w": grads["dw_sum"], "beta": heads_first(grads["dbeta"])}
    out["v"] = grads["dv"].astype(x["v"].dtype)
    if x["params"] is not None:
        pull = jax.vjp(lambda params: bias_inside(options, params, x["sharpness"]), x["params"])[1]
        (own,) = pull(grads["dbias"])
        out["params"] = jax.tree.map(lambda *parts: sum(parts), own, *[s["params"] for s in sides])
    if x["sharpness"] is not None:
        out["sharpness"] = heads_first(grads["dsharpness"]) + sum(s["sharpness"] for s in sides)
    if x["gates"] is not None:
        # The sum of d(logits) over a row is the cotangent of its log-sum-exp, exactly.
        rows = dlse * x["sharpness"] if x["sharpness"] is not None and options.sharpen_prior else dlse
        columns = heads_first(grads["columns"]) + sum(columns)
        out["gates"] = (rows - columns, jnp.zeros_like(rows))
    return out
