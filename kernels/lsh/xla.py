"""Blockwise LSH attention in plain JAX: work and memory near linear in T, its own backward pass, no T × T array.

Sharing one normaliser, the s samples are one softmax whose keys are counted c_ij times ("counts": every score is
computed once, over the keys between the earliest block start and the latest block end). A block of queries visits the
blocks of keys in that range, head by head, since heads differ in reach by two orders of magnitude.

The same result from s separate attentions over one block each, merged by their log-sum-exps, is `attend_samples`; their
outputs averaged instead is combine="mean". Both call the "counts" form with one sample at a time.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels.lsh.call import Call, Combine

Array = jax.Array
ROWS = 128  # of a tile; its columns are as many


class Spec(NamedTuple):
    """Static facts: rows (and columns) of a tile, number of tiles along T, length, and the call's options."""

    rows: int
    tiles: int
    length: int
    causal: bool
    scale: float
    precision: Any


class Head(NamedTuple):
    """One query head: q [B, T', D], k, v [B, T', ·]; starts, stops [B or 1, T', s]; first, end [tiles] int32: the range
    of key tiles that each block of queries looks at. T' = rows · tiles."""

    q: Array
    k: Array
    v: Array
    starts: Array
    stops: Array | None
    first: Array
    end: Array


def supports(call: Call, combine: Combine) -> None:
    """Everything."""
    return None


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _ranges(spec: Spec, starts: Array, stops: Array | None) -> tuple[Array, Array]:
    """[H, tiles] each: first and end key tile of every block of queries, from [B, T', H, s]."""
    cut = lambda x: x.reshape(x.shape[0], spec.tiles, spec.rows, *x.shape[2:])
    first = cut(starts).min((0, 2, 4)) // spec.rows
    if stops is None:
        end = jnp.broadcast_to(jnp.arange(1, spec.tiles + 1, dtype=jnp.int32)[:, None], first.shape)
    else:
        end = -(-cut(stops).max((0, 2, 4)) // spec.rows)
        if spec.causal:
            end = jnp.minimum(end, jnp.arange(1, spec.tiles + 1, dtype=jnp.int32)[:, None])
    return first.T, end.T


def _counts(spec: Spec, head: Head, i: Array, j: Array) -> Array:
    """c_ij / s of a tile: float32 [B or 1, rows, cols]."""
    rows = lambda x: lax.dynamic_slice_in_dim(x, i * spec.rows, spec.rows, axis=1)
    keys = j * spec.rows + jnp.arange(spec.rows, dtype=jnp.int32)
    inside = keys[None, None, :, None] >= rows(head.starts)[:, :, None, :]
    if head.stops is not None:
        inside &= keys[None, None, :, None] < rows(head.stops)[:, :, None, :]
    if spec.causal:
        queries = i * spec.rows + jnp.arange(spec.rows, dtype=jnp.int32)
        inside &= (keys[None, :] <= queries[:, None])[None, :, :, None]
    return inside.mean(-1, dtype=_wide(head.q.dtype))


def _scores(spec: Spec, q: Array, k: Array) -> Array:
    return spec.scale * jnp.einsum(
        "bid,bjd->bij", q, k, precision=spec.precision, preferred_element_type=_wide(q.dtype)
    )


def _part(spec: Spec, x: Array, i: Array) -> Array:
    return lax.dynamic_slice_in_dim(x, i * spec.rows, spec.rows, axis=1)


def _forward_head(spec: Spec, head: Head) -> tuple[Array, Array]:
    """o [B, T', Dv] and lse [B, T'] of a head, in float32 (float64)."""
    wide = _wide(head.q.dtype)
    batch = head.q.shape[0]

    def block(i: Array) -> tuple[Array, Array]:
        q = _part(spec, head.q, i)

        def tile(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, acc = state
            counts = _counts(spec, head, i, j)
            scores = jnp.where(counts > 0, _scores(spec, q, _part(spec, head.k, j)), -jnp.inf)
            new = jnp.maximum(top, scores.max(-1))
            base = jnp.where(jnp.isfinite(new), new, 0)
            p = counts * jnp.exp(scores - base[:, :, None])
            fade = jnp.exp(top - base)
            # Values of keys that nobody in the tile sees may be anything.
            v = jnp.where((counts > 0).any(1)[:, :, None], _part(spec, head.v, j), 0)
            add = jnp.einsum(
                "bij,bjd->bid", p.astype(v.dtype), v, precision=spec.precision, preferred_element_type=wide
            )
            return new, total * fade + p.sum(-1), acc * fade[:, :, None] + add

        start = (
            jnp.full((batch, spec.rows), -jnp.inf, wide),
            jnp.zeros((batch, spec.rows), wide),
            jnp.zeros((batch, spec.rows, head.v.shape[-1]), wide),
        )
        top, total, acc = lax.fori_loop(head.first[i], head.end[i], tile, start)
        safe = jnp.where(total > 0, total, 1)
        return acc / safe[:, :, None], jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)

    o, lse = lax.map(block, jnp.arange(spec.tiles, dtype=jnp.int32))
    return _joined(o), _joined(lse)


def _joined(blocks: Array) -> Array:
    """[tiles, B, rows, …] -> [B, tiles · rows, …]."""
    x = jnp.moveaxis(blocks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _backward_head(spec: Spec, head: Head, lse: Array, delta: Array, do: Array) -> tuple[Array, Array, Array]:
    """dq, dk, dv of a head. delta [B, T'] = Σ do · o − dlse: p (do · v − delta) is the gradient of a logit."""
    wide = _wide(head.q.dtype)
    product = partial(jnp.einsum, precision=spec.precision, preferred_element_type=wide)
    finite = jnp.where(jnp.isfinite(lse), lse, jnp.inf)

    def block(carry: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        q, dout = _part(spec, head.q, i), _part(spec, do, i)
        row_lse, row_delta = _part(spec, finite, i), _part(spec, delta, i)

        def tile(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dk, dv, dq = state
            counts = _counts(spec, head, i, j)
            seen = (counts > 0).any(1)[:, :, None]
            k, v = (jnp.where(seen, _part(spec, x, j), 0) for x in (head.k, head.v))
            p = counts * jnp.exp(jnp.where(counts > 0, _scores(spec, q, k) - row_lse[:, :, None], -jnp.inf))
            ds = p * (product("bid,bjd->bij", dout, v) - row_delta[:, :, None]) * spec.scale
            dv = _added(spec, dv, j, product("bij,bid->bjd", p.astype(dout.dtype), dout))
            dk = _added(spec, dk, j, product("bij,bid->bjd", ds.astype(q.dtype), q))
            return dk, dv, dq + product("bij,bjd->bid", ds.astype(k.dtype), k)

        dk, dv, dq = lax.fori_loop(head.first[i], head.end[i], tile, (*carry, jnp.zeros(q.shape, wide)))
        return (dk, dv), dq

    start = jnp.zeros(head.k.shape, wide), jnp.zeros(head.v.shape, wide)
    (dk, dv), dq = lax.scan(block, start, jnp.arange(spec.tiles, dtype=jnp.int32))
    return _joined(dq), dk, dv


def _added(spec: Spec, x: Array, j: Array, part: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(x, _part(spec, x, j) + part, j * spec.rows, axis=1)


def _heads(spec: Spec, call: Call) -> tuple[Any, Any]:
    """(function h -> Head, number of heads) of a call padded to whole tiles."""
    extra = spec.rows * spec.tiles - spec.length
    first = lambda x: jnp.moveaxis(jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))), 2, 0)
    rows = lambda x, value: jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0)), constant_values=value)
    starts, ends = call.block_rows()
    starts = rows(starts, spec.rows * spec.tiles)  # rows past the end see nothing
    stops = None if call.causal else rows(ends, 0)
    begin, end = _ranges(spec, starts, stops)
    q, k, v, starts = first(call.q), first(call.k), first(call.v), jnp.moveaxis(starts, 2, 0)
    stops = None if stops is None else jnp.moveaxis(stops, 2, 0)
    group = q.shape[0] // k.shape[0]

    def head(h: Array) -> Head:
        key_head = h // group
        return Head(q[h], k[key_head], v[key_head], starts[h], None if stops is None else stops[h], begin[h], end[h])

    return head, jnp.arange(q.shape[0], dtype=jnp.int32)


@partial(jax.jit, static_argnums=0)
def _forward(spec: Spec, call: Call) -> tuple[Array, Array]:
    head, heads = _heads(spec, call)
    o, lse = lax.map(lambda h: _forward_head(spec, head(h)), heads)
    back = lambda x: jnp.moveaxis(x, 0, 2)[:, : spec.length]
    return back(o).astype(call.q.dtype), back(lse)


@partial(jax.jit, static_argnums=0)
def _backward(spec: Spec, call: Call, o: Array, lse: Array, do: Array, dlse: Array) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v."""
    wide = _wide(call.q.dtype)
    dlse = jnp.where(jnp.isfinite(lse), dlse, 0)
    delta = jnp.einsum("bthd,bthd->bth", do.astype(wide), o.astype(wide), precision="highest") - dlse
    extra = spec.rows * spec.tiles - spec.length
    lead = lambda x: jnp.moveaxis(jnp.pad(x, [(0, 0), (0, extra), (0, 0)] + [(0, 0)] * (x.ndim - 3)), 2, 0)
    head, heads = _heads(spec, call)
    rows = lead(lse), lead(delta), lead(do)
    dq, dk, dv = lax.map(lambda h: _backward_head(spec, head(h), *(x[h] for x in rows)), heads)
    back = lambda x, like: jnp.moveaxis(x, 0, 2)[:, : spec.length].astype(like.dtype)
    grouped = lambda x, like: back(x.reshape(like.shape[2], -1, *x.shape[1:]).sum(1), like)
    return back(dq, call.q), grouped(dk, call.k), grouped(dv, call.v)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: Spec, call: Call) -> tuple[Array, Array]:
    return _forward(spec, call)


def _attend_fwd(spec: Spec, call: Call) -> tuple[tuple[Array, Array], tuple[Call, Array, Array]]:
    o, lse = _forward(spec, call)
    return (o, lse), (call, o, lse)


def _attend_bwd(spec: Spec, saved: tuple[Call, Array, Array], cotangents: tuple[Array, Array]) -> tuple[Call]:
    call, o, lse = saved
    dq, dk, dv = _backward(spec, call, o, lse, *cotangents)
    return (call.cotangent(dq, dk, dv),)


_attend.defvjp(_attend_fwd, _attend_bwd)


def make_spec(call: Call, rows: int | None = None) -> Spec:
    """How a call is cut into tiles of `rows` queries (default: as many as are fast)."""
    length = call.q.shape[1]
    rows = rows or min(ROWS, length)
    precision = lax.Precision.HIGHEST if call.q.dtype in (jnp.float32, jnp.float64) else None
    return Spec(rows, -(-length // rows), length, call.causal, call.scale, precision)


def attend_counts(call: Call, rows: int | None = None) -> tuple[Array, Array]:
    """Shared normaliser in one pass: (o, lse). rows: of a tile, for tests and measurements."""
    return _attend(make_spec(call, rows), call)


def attend_samples(call: Call, rows: int | None = None) -> tuple[Array, Array]:
    """The same from one attention per sample: o = Σ_m exp(lse_m − lse) o_m, lse = log-mean-exp of the lse_m.

    The gradient goes through every lse_m; dropping it, as library attentions do, gives wrong dq and dk.
    """
    wide = _wide(call.q.dtype)
    spec = make_spec(call, rows)
    sees = jnp.isfinite

    def merge(state: tuple[Array, Array], m: Array) -> tuple[tuple[Array, Array], None]:
        acc, total = state
        o, lse = _attend(spec, call.sample(m))
        top = jnp.maximum(total, lse)
        base = jnp.where(sees(top), top, 0)
        old, new = (jnp.where(sees(x), jnp.exp(jnp.where(sees(x), x, 0) - base), 0) for x in (total, lse))
        both = jnp.where(old + new > 0, old + new, 1)
        acc = (acc * old[..., None] + o.astype(wide) * new[..., None]) / both[..., None]
        return (acc, jnp.where(sees(top), base + jnp.log(both), -jnp.inf)), None

    batch, length, heads, _ = call.q.shape
    start = jnp.zeros((batch, length, heads, call.v.shape[-1]), wide), jnp.full((batch, length, heads), -jnp.inf, wide)
    (o, lse), _ = lax.scan(merge, start, jnp.arange(call.samples))
    return o.astype(call.q.dtype), lse - jnp.log(jnp.asarray(call.samples, wide))


def attend_mean(call: Call, rows: int | None = None) -> Array:
    """The mean of the samples' own softmax attentions: o."""
    wide = _wide(call.q.dtype)
    spec = make_spec(call, rows)
    shape = (*call.q.shape[:3], call.v.shape[-1])
    add = lambda acc, m: (acc + _attend(spec, call.sample(m))[0].astype(wide), None)
    total, _ = lax.scan(add, jnp.zeros(shape, wide), jnp.arange(call.samples))
    return (total / call.samples).astype(call.q.dtype)


def attend(call: Call, combine: Combine) -> tuple[Array, Array]:
    """(o, lse) as in `reference.attend`."""
    o, lse = attend_counts(call)
    return (o if combine == "shared" else attend_mean(call)), lse
