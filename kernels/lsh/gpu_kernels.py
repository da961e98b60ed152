"""Pallas-Triton kernels of LSH attention with one normaliser: forward, query gradients, key gradients.

The s samples are one softmax that counts a key c_ij = #{m : i and j share a block of grid m} times. There is no
logarithm and no table: a probability is c_ij exp2(z_ij − lse_i). Causal counts need one compare per sample and score:
seen from a query, with the first row of its block; seen from a key, with the row after its block. One owner for every
sum, no atomics: two runs agree bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.triton import Tiles, launch, product

Array = jax.Array
Refs = dict[str, Any]
End = Literal["starts", "stops"]
LOG2E = 1.4426950408889634
MOST_HELD = 32  # samples whose block ends a program keeps in registers


@dataclass(frozen=True)
class Spec:
    """Static description of a call; `length` is the real one, the arrays are padded to multiples of the tiles."""

    length: int
    group: int  # query heads per key head
    samples: int
    scale: float
    causal: bool
    documents: bool
    drawn: bool  # block ends come as arrays; otherwise they follow from int32 widths and offsets
    exact: bool  # float32 operands: products in full float32
    interpret: bool


def _dot(spec: Spec, a: Array, b: Array, contract: tuple[int, int]) -> Array:
    return product(a, b, contract, spec.exact, spec.interpret)


def _block_end(spec: Spec, x: Refs, which: End, batch: Array, head: Array, start: Array, size: int, m: Any) -> Array:
    """First row of the block that sample m puts each of `size` rows in, or the row after it: int32 [size]."""
    where = pl.ds(start, size)
    if spec.drawn:
        return x[which][lax.rem(batch, jnp.int32(x[which].shape[0])), head, m, where]
    index = start + lax.iota(jnp.int32, size)
    first = x["first"][batch, where] if spec.documents else jnp.zeros_like(index)
    width, offset = x["widths"][head, m], x["offsets"][head, m]
    # A division that rounds towards zero: padding has negative places, but its block is cut to nothing all the same.
    begin = lax.div(index - first + offset, jnp.full((size,), width)) * width - offset
    if which == "starts":
        return first + jnp.maximum(begin, 0)
    after = x["after"][batch, where] if spec.documents else jnp.full_like(index, spec.length)
    return jnp.minimum(first + begin + width, after)


class Edges:
    """Where the blocks of a tile's rows begin, or end, relative to the first row: float32 [rows] per sample.

    Differences below 2²⁴ are exact, and a float compare that gives 0 or 1 is one instruction, an integer one two.
    """

    def __init__(self, spec: Spec, x: Refs, which: End, batch: Array, head: Array, start: Array, size: int) -> None:
        end = partial(_block_end, spec, x, which, batch, head, start, size)
        self.samples, self.start, self.size = spec.samples, start, size
        self.row: Callable[[Any], Array] = lambda m: (end(m) - start).astype(jnp.float32)
        self.held = [self.row(m) for m in range(spec.samples)] if spec.samples <= MOST_HELD else None

    def extreme(self, of: Callable[[Array, Array], Array]) -> Array:
        """Least (jnp.minimum) or greatest row number, int32."""
        if self.held:
            rows = reduce(of, self.held)
        else:
            rows = lax.fori_loop(1, self.samples, lambda m, t: of(t, self.row(m)), self.row(0))
        return self.start + (rows.min() if of is jnp.minimum else rows.max()).astype(jnp.int32)

    def below(self, columns: Array) -> Array:
        """#{m: edge ≤ column}, float32 [rows, n], of columns [1, n] that are relative as edges are."""
        add = lambda row, total: total + jnp.where(row[:, None] <= columns, 1.0, 0.0)
        total = jnp.zeros((self.size, columns.shape[1]), jnp.float32)
        if self.held:
            return reduce(lambda total, row: add(row, total), self.held, total)
        return lax.fori_loop(0, self.samples, lambda m, total: add(self.row(m), total), total)


def _columns(start: Array, begin: Array, size: int) -> Array:
    """Columns from `begin` on relative to `start`: float32 [1, size]."""
    return (lax.broadcasted_iota(jnp.int32, (1, size), 1) + (begin - start)).astype(jnp.float32)


def _rows(size: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (size, 1), 0).astype(jnp.float32)


def _of_queries(spec: Spec, x: Refs, batch: Array, head: Array, start: Array, tiles: Tiles) -> Any:
    """(key tile -> c [rows, step], first tile, end tile) of a block of queries; c ≤ 0 where nothing is seen."""
    edges = partial(Edges, spec, x, batch=batch, head=head, start=start, size=tiles.rows)
    starts = edges("starts")
    stops = None if spec.causal else edges("stops")
    end = start + tiles.rows if stops is None else stops.extreme(jnp.maximum)

    def counts(tile: Array) -> Array:
        columns = _columns(start, tile * tiles.step, tiles.step)
        begun = starts.below(columns)
        if stops is None:
            return jnp.where(columns <= _rows(tiles.rows), begun, 0.0)
        return begun - stops.below(columns)

    step = jnp.int32(tiles.step)
    return counts, lax.div(starts.extreme(jnp.minimum), step), lax.div(end + (step - 1), step)


def _of_keys(spec: Spec, x: Refs, batch: Array, head: Array, start: Array, tiles: Tiles) -> Any:
    """(query tile -> c [rows, step], first tile, end tile) of a block of keys; c ≤ 0 where nothing is seen."""
    edges = partial(Edges, spec, x, batch=batch, head=head, start=start, size=tiles.rows)
    stops = edges("stops")
    starts = None if spec.causal else edges("starts")
    first_query = start if starts is None else starts.extreme(jnp.minimum)

    def counts(tile: Array) -> Array:
        columns = _columns(start, tile * tiles.step, tiles.step)
        ended = stops.below(columns)
        if starts is None:
            return jnp.where(columns >= _rows(tiles.rows), jnp.float32(spec.samples) - ended, 0.0)
        return starts.below(columns) - ended

    step = jnp.int32(tiles.step)
    end = lax.div(stops.extreme(jnp.maximum) + (step - 1), step)
    return counts, lax.div(first_query, step), end


def _logits(spec: Spec, a: Array, b: Array, counts: Array) -> Array:
    """Base-2 logits of a tile, −inf where nothing is seen."""
    return jnp.where(counts > 0, _dot(spec, a, b, (1, 1)) * (spec.scale * LOG2E), -jnp.inf)


def _place(spec: Spec, tiles: Tiles) -> tuple[Array, Array, Array, Array]:
    """(batch, query head, its key head, first row) of a program; the heads with the longest blocks are mostly last."""
    head = pl.num_programs(1) - 1 - pl.program_id(1)
    return pl.program_id(2), head, lax.div(head, jnp.int32(spec.group)), pl.program_id(0) * tiles.rows


def _forward_body(spec: Spec, tiles: Tiles, names: tuple[str, ...], *refs: Any) -> None:
    x = dict(zip(names, refs, strict=True))
    batch, head, kv_head, start = _place(spec, tiles)
    here = pl.ds(start, tiles.rows)
    q = x["q"][batch, here, head, :]
    counts, first, end = _of_queries(spec, x, batch, head, start, tiles)

    def body(tile: Array, carry: Any) -> Any:
        acc, top, total = carry
        there = pl.ds(tile * tiles.step, tiles.step)
        c = counts(tile)
        z = _logits(spec, q, x["k"][batch, there, kv_head, :], c)
        new_top = jnp.maximum(top, z.max(axis=1))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        shrink, p = jnp.exp2(top - base), c * jnp.exp2(z - base[:, None])
        v = x["v"][batch, there, kv_head, :]
        acc = acc * shrink[:, None] + _dot(spec, p.astype(v.dtype), v, (1, 0))
        return acc, new_top, total * shrink + p.sum(axis=1)

    none = jnp.full((tiles.rows,), -jnp.inf, jnp.float32)
    carry = (jnp.zeros((tiles.rows, x["v"].shape[-1]), jnp.float32), none, jnp.zeros_like(none))
    acc, top, total = lax.fori_loop(first, end, body, carry)
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    x["o"][batch, here, head, :] = (acc / safe[:, None]).astype(x["o"].dtype)
    x["lse"][batch, head, here] = jnp.where(some, top + jnp.log2(safe), -jnp.inf)


def _query_body(spec: Spec, tiles: Tiles, names: tuple[str, ...], *refs: Any) -> None:
    x = dict(zip(names, refs, strict=True))
    batch, head, kv_head, start = _place(spec, tiles)
    here = pl.ds(start, tiles.rows)
    q, o, do = (x[n][batch, here, head, :] for n in ("q", "o", "do"))
    lse, dlse = (x[n][batch, head, here] for n in ("lse", "dlse"))
    delta = (o.astype(jnp.float32) * do.astype(jnp.float32)).sum(axis=1) - dlse
    counts, first, end = _of_queries(spec, x, batch, head, start, tiles)

    def body(tile: Array, dq: Array) -> Array:
        there = pl.ds(tile * tiles.step, tiles.step)
        k, v = (x[n][batch, there, kv_head, :] for n in ("k", "v"))
        c = counts(tile)
        p = c * jnp.exp2(_logits(spec, q, k, c) - lse[:, None])
        ds = p * (_dot(spec, do, v, (1, 1)) - delta[:, None])
        return dq + _dot(spec, ds.astype(k.dtype), k, (1, 0))

    dq = lax.fori_loop(first, end, body, jnp.zeros(q.shape, jnp.float32))
    x["dq"][batch, here, head, :] = (dq * spec.scale).astype(x["dq"].dtype)
    x["delta"][batch, head, here] = delta


def _key_body(spec: Spec, tiles: Tiles, names: tuple[str, ...], *refs: Any) -> None:
    x = dict(zip(names, refs, strict=True))
    batch, kv_head = pl.program_id(2), pl.num_programs(1) - 1 - pl.program_id(1)
    start = pl.program_id(0) * tiles.rows
    here = pl.ds(start, tiles.rows)
    k, v = (x[n][batch, here, kv_head, :] for n in ("k", "v"))

    def of_head(head: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        counts, first, end = _of_keys(spec, x, batch, head, start, tiles)

        def body(tile: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk, dv = carry
            there = pl.ds(tile * tiles.step, tiles.step)
            q, do = (x[n][batch, there, head, :] for n in ("q", "do"))
            lse, delta = (x[n][batch, head, there] for n in ("lse", "delta"))
            c = counts(tile)
            p = c * jnp.exp2(_logits(spec, k, q, c) - lse[None, :])
            dv = dv + _dot(spec, p.astype(do.dtype), do, (1, 0))
            ds = p * (_dot(spec, v, do, (1, 1)) - delta[None, :])
            return dk + _dot(spec, ds.astype(q.dtype), q, (1, 0)), dv

        return lax.fori_loop(first, end, body, carry)

    head = kv_head * spec.group
    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = of_head(head, zeros) if spec.group == 1 else lax.fori_loop(head, head + spec.group, of_head, zeros)
    x["dk"][batch, here, kv_head, :] = (dk * spec.scale).astype(x["dk"].dtype)
    x["dv"][batch, here, kv_head, :] = dv.astype(x["dv"].dtype)


def _call(
    body: Callable[..., None], spec: Spec, tiles: Tiles, arrays: dict[str, Array], outputs: dict[str, Any], grid: Any
) -> dict[str, Array]:
    name = f"lsh{body.__name__.removesuffix('_body')}_{tiles}"
    more: Any = {"warps": tiles.warps, "stages": tiles.stages, "interpret": spec.interpret}
    return launch(partial(body, spec, tiles), name, grid, arrays, outputs, **more)


def _line(arrays: dict[str, Array]) -> Any:
    batch, length, heads, _ = arrays["q"].shape
    return jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)


def forward(spec: Spec, tiles: Tiles, arrays: dict[str, Array]) -> dict[str, Array]:
    """o [B, T, H, Dv] in the inputs' dtype and base-2 lse [B, H, T] float32 of whole counts (−inf: nothing seen).

    arrays: q, k, v [B, padded T, heads, D]; grids: widths, offsets [H, s] int32 and with documents first, after [B, T]
    int32, or, if the spec says `drawn`, starts, stops [B or 1, H, s, T] int32.
    """
    batch, length, heads, _ = arrays["q"].shape
    out = jax.ShapeDtypeStruct((batch, length, heads, arrays["v"].shape[-1]), arrays["q"].dtype)
    grid = (length // tiles.rows, heads, batch)
    return _call(_forward_body, spec, tiles, arrays, {"o": out, "lse": _line(arrays)}, grid)


def query_gradients(spec: Spec, tiles: Tiles, arrays: dict[str, Array]) -> dict[str, Array]:
    """dq [B, T, H, D] and delta = Σ do · o − dlse [B, H, T].

    arrays: those of `forward`, o, do, and lse (base 2, +inf where nothing is seen), dlse [B, H, T].
    """
    batch, length, heads, _ = arrays["q"].shape
    outputs = {"dq": jax.ShapeDtypeStruct(arrays["q"].shape, arrays["q"].dtype), "delta": _line(arrays)}
    return _call(_query_body, spec, tiles, arrays, outputs, (length // tiles.rows, heads, batch))


def key_gradients(spec: Spec, tiles: Tiles, arrays: dict[str, Array]) -> dict[str, Array]:
    """dk, dv [B, T, Hkv, ·], summed over the query heads of a key head; arrays also: do, lse, delta."""
    batch, length, kv_heads, _ = arrays["k"].shape
    outputs = {f"d{n}": jax.ShapeDtypeStruct(arrays[n].shape, arrays[n].dtype) for n in ("k", "v")}
    return _call(_key_body, spec, tiles, arrays, outputs, (length // tiles.rows, kv_heads, batch))
