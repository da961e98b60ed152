"""Pallas-Triton attention kernels for any NVIDIA GPU from Ampere on: forward, query gradients, key gradients.

FlashAttention-2 (arXiv 2307.08691) with one owner for every sum: the scores are recomputed in two backward kernels, so
there are no atomics and two runs agree bit for bit. The log-prior and its derivatives are tables over distance in
global memory, [H, L], of which a tile reads table[query position − key position + origin]; neighbouring scores share
entries, so the first-level cache serves them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels.triton import Tiles, launch, product

Array = jax.Array
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Spec:
    """Static description of a call; lengths are the real ones, the arrays are padded to multiples of the tiles."""

    queries: int
    keys: int
    group: int  # query heads per key head
    scale: float
    causal: bool
    window: int | None
    prior: bool
    slopes: int  # tables of d(log prior)/d(parameter)
    origin: int  # entry of distance 0 in a table
    entries: int  # of a table
    sharpness: bool
    sharpen_prior: bool
    gates: bool
    segments: bool
    positions: bool  # given as arrays; otherwise queries end where the keys end
    unseen: bool  # there may be keys that nobody sees, whose contents must not matter
    exact: bool  # float32 operands: products in full float32
    interpret: bool

    @property
    def offsets(self) -> bool:
        return self.prior or self.gates

    @property
    def folded(self) -> bool:
        return self.sharpness and self.sharpen_prior


Refs = dict[str, Any]


def _dot(spec: Spec, a: Array, b: Array, contract: tuple[int, int]) -> Array:
    return product(a, b, contract, spec.exact, spec.interpret)


@dataclass(frozen=True)
class Side:
    """A block of queries or of keys: where it starts, and its axis in the score tile."""

    start: Array
    size: int
    axis: int

    def line(self, x: Array) -> Array:
        """[size] along this side's axis of a tile."""
        return x[:, None] if self.axis == 0 else x[None, :]

    def index(self, shape: tuple[int, ...]) -> Array:
        return lax.broadcasted_iota(jnp.int32, shape, self.axis) + self.start

    @property
    def where(self) -> Any:
        return pl.ds(self.start, self.size)


def _ahead(spec: Spec, refs: Refs, batch: Array, q: Side, k: Side, shape: tuple[int, int]) -> Array:
    """Query position − key position of a tile."""
    if spec.positions:
        q_pos, k_pos = refs["q_positions"][batch, q.where], refs["kv_positions"][batch, k.where]
        return q.line(q_pos) - k.line(k_pos)
    return q.index(shape) - k.index(shape) + (spec.keys - spec.queries)


def _seen(spec: Spec, refs: Refs, batch: Array, q: Side, k: Side, ahead: Array) -> Array:
    seen = k.index(ahead.shape) < spec.keys
    if spec.causal:
        seen &= ahead >= 0
    if spec.window is not None:
        seen &= ahead < spec.window
        if not spec.causal:
            seen &= ahead > -spec.window
    if spec.segments:
        q_ids, k_ids = refs["q_segments"][batch, q.where], refs["kv_segments"][batch, k.where]
        seen &= q.line(q_ids) == k.line(k_ids)
    return seen


def _entry(spec: Spec, ahead: Array) -> Array:
    return jnp.clip(ahead + spec.origin, 0, spec.entries - 1)


def _offsets(spec: Spec, refs: Refs, batch: Array, head: Array, q: Side, k: Side, ahead: Array, seen: Any) -> Array:
    """Prior plus gates of a tile."""
    total: Any = 0.0
    if spec.prior:
        total = plgpu.load(refs["table"].at[head, _entry(spec, ahead)])
    if spec.gates:
        parts = []
        for n in ("hi", "lo"):
            row, column = refs[f"q_gate_{n}"][batch, head, q.where], refs[f"k_gate_{n}"][batch, head, k.where]
            parts.append(q.line(row) - k.line(column))
        gates = parts[0] + parts[1]
        total = total + (gates if seen is None else jnp.where(seen, gates, 0.0))
    return total


def _logits(
    spec: Spec, refs: Refs, batch: Array, head: Array, q: Side, k: Side, content: Array, seen: Any, ahead: Array
) -> tuple[Array, Array]:
    """Base-2 logits of a tile, and what the sharpness multiplies (natural)."""
    content = content * spec.scale
    offsets = _offsets(spec, refs, batch, head, q, k, ahead, seen) if spec.offsets else None
    r = q.line(refs["sharpness"][batch, head, q.where]) if spec.sharpness else None
    if spec.folded or r is None:
        inner = content if offsets is None else content + offsets
        total = inner if r is None else inner * r
    else:
        inner = content
        total = inner * r if offsets is None else inner * r + offsets
    total = total * LOG2E
    if seen is None:
        return total, inner
    return jnp.where(seen, total, -jnp.inf), jnp.where(seen, inner, 0.0)


def cleaned(x: Array, seen: Array) -> Array:
    """x [n, D] with zeros in rows that no row of `seen` [rows, n] sees: 0 · NaN would be NaN.

    With integers, because Triton cannot keep the booleans of a select in shared memory.
    """
    bits = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    used = -seen.astype(jnp.int32).max(axis=0)  # all ones, or all zeros
    kept = lax.bitcast_convert_type(x, bits) & used.astype(bits)[:, None]
    return lax.bitcast_convert_type(kept, x.dtype)


def _walk(bounds_ref: Any, batch: Array, block: Array, body: Callable[..., Any], carry: Any) -> Any:
    """Tiles of a block: masked ones, whole ones, masked ones (`triton_gpu.walks`)."""
    row = lax.rem(batch, jnp.int32(bounds_ref.shape[0]))
    low, whole, whole_end, high = (bounds_ref[row, block, n] for n in range(4))
    carry = lax.fori_loop(low, whole, partial(body, True), carry)
    carry = lax.fori_loop(whole, whole_end, partial(body, False), carry)
    return lax.fori_loop(whole_end, high, partial(body, True), carry)


def _forward_body(spec: Spec, tiles: Tiles, names: tuple[str, ...], *refs: Any) -> None:
    x = dict(zip(names, refs, strict=True))
    block, head, batch = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    kv_head = lax.div(head, jnp.int32(spec.group))
    q_side = Side(block * tiles.rows, tiles.rows, 0)
    q = x["q"][batch, q_side.where, head, :]

    def body(masked: bool, tile: Array, carry: Any) -> Any:
        acc, top, total = carry
        k_side = Side(tile * tiles.step, tiles.step, 1)
        k = x["k"][batch, k_side.where, kv_head, :]
        ahead = _ahead(spec, x, batch, q_side, k_side, (tiles.rows, tiles.step))
        seen = _seen(spec, x, batch, q_side, k_side, ahead) if masked else None
        z, _ = _logits(spec, x, batch, head, q_side, k_side, _dot(spec, q, k, (1, 1)), seen, ahead)
        new_top = jnp.maximum(top, z.max(axis=1))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
        shrink, p = jnp.exp2(top - base), jnp.exp2(z - base[:, None])
        v = x["v"][batch, k_side.where, kv_head, :]
        v = v if seen is None or not spec.unseen else cleaned(v, seen)
        acc = acc * shrink[:, None] + _dot(spec, p.astype(v.dtype), v, (1, 0))
        return acc, new_top, total * shrink + p.sum(axis=1)

    start = jnp.full((tiles.rows,), -jnp.inf, jnp.float32)
    carry = (jnp.zeros((tiles.rows, x["v"].shape[-1]), jnp.float32), start, jnp.zeros_like(start))
    acc, top, total = _walk(x["bounds"], batch, block, body, carry)
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    x["o"][batch, q_side.where, head, :] = (acc / safe[:, None]).astype(x["o"].dtype)
    x["lse"][batch, head, q_side.where] = jnp.where(some, top + jnp.log2(safe), -jnp.inf)


def _gradient_tile(
    spec: Spec, x: Refs, batch: Array, head: Array, q: Side, k: Side, content: Array, dp: Array, seen: Any, ahead: Array
) -> tuple[Array, Array, Array]:
    """(probabilities, their d(logits), what the sharpness multiplies) of a tile."""
    z, inner = _logits(spec, x, batch, head, q, k, content, seen, ahead)
    row = lambda n: q.line(x[n][batch, head, q.where])
    p = jnp.exp2(z - row("lse"))
    if seen is not None:
        dp = jnp.where(seen, dp, 0.0)
    # A saturated row (p = 1, as with one key) has no gradient through its logits but that of its log-sum-exp.
    return p, p * (jnp.where(p < 1, dp - row("delta"), 0.0) + row("dlse")), inner


def _slope_sum(ref: Any, ds: Array, seen: Any) -> Array:
    terms = ds * plgpu.load(ref)
    return (terms if seen is None else jnp.where(seen, terms, 0.0)).sum(axis=1)


def _query_body(spec: Spec, tiles: Tiles, names: tuple[str, ...], *refs: Any) -> None:
    x = dict(zip(names, refs, strict=True))
    block, head, batch = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    kv_head = lax.div(head, jnp.int32(spec.group))
    q_side = Side(block * tiles.rows, tiles.rows, 0)
    q, do = (x[n][batch, q_side.where, head, :] for n in ("q", "do"))

    def body(masked: bool, tile: Array, carry: Any) -> Any:
        dq, sums = carry
        k_side = Side(tile * tiles.step, tiles.step, 1)
        k, v = (x[n][batch, k_side.where, kv_head, :] for n in ("k", "v"))
        ahead = _ahead(spec, x, batch, q_side, k_side, (tiles.rows, tiles.step))
        seen = _seen(spec, x, batch, q_side, k_side, ahead) if masked else None
        k = k if seen is None or not spec.unseen else cleaned(k, seen)
        content, dp = _dot(spec, q, k, (1, 1)), _dot(spec, do, v, (1, 1))
        _, ds, inner = _gradient_tile(spec, x, batch, head, q_side, k_side, content, dp, seen, ahead)
        dq = dq + _dot(spec, ds.astype(k.dtype), k, (1, 0))
        new = [_slope_sum(x["slopes"].at[n, head, _entry(spec, ahead)], ds, seen) for n in range(spec.slopes)]
        if spec.sharpness:
            new.append((ds * inner).sum(axis=1))
        if spec.gates:
            new.append(ds.sum(axis=1))
        return dq, tuple(a + b for a, b in zip(sums, new, strict=True))

    zero = jnp.zeros((tiles.rows,), jnp.float32)
    init = (jnp.zeros(q.shape, jnp.float32), (zero,) * (spec.slopes + spec.sharpness + spec.gates))
    dq, found = _walk(x["bounds"], batch, block, body, init)
    sums = list(found)
    r = x["sharpness"][batch, head, q_side.where] if spec.sharpness else None
    dq = dq * spec.scale if r is None else dq * (r * spec.scale)[:, None]
    x["dq"][batch, q_side.where, head, :] = dq.astype(x["dq"].dtype)
    if spec.gates:
        x["rows"][batch, head, q_side.where] = sums.pop()
    if spec.sharpness:
        x["dsharpness"][batch, head, q_side.where] = sums.pop()
    for n, total in enumerate(sums):
        x["slope_sums"][batch, head, n, q_side.where] = total * r if spec.folded else total


def _key_body(spec: Spec, tiles: Tiles, names: tuple[str, ...], *refs: Any) -> None:
    x = dict(zip(names, refs, strict=True))
    block, kv_head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    k_side = Side(block * tiles.rows, tiles.rows, 0)
    k, v = (x[n][batch, k_side.where, kv_head, :] for n in ("k", "v"))
    shape = (tiles.rows, tiles.step)

    def of_head(head: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def body(masked: bool, tile: Array, carry: Any) -> Any:
            dk, dv, gates = carry
            q_side = Side(tile * tiles.step, tiles.step, 1)
            q, do = (x[n][batch, q_side.where, head, :] for n in ("q", "do"))
            ahead = _ahead(spec, x, batch, q_side, k_side, shape)
            seen = _seen(spec, x, batch, q_side, k_side, ahead) if masked else None
            content, dp = _dot(spec, k, q, (1, 1)), _dot(spec, v, do, (1, 1))
            p, ds, _ = _gradient_tile(spec, x, batch, head, q_side, k_side, content, dp, seen, ahead)
            dv = dv + _dot(spec, p.astype(do.dtype), do, (1, 0))
            r = x["sharpness"][batch, head, q_side.where] if spec.sharpness else None
            sharp = ds if r is None else ds * r[None, :]
            dk = dk + _dot(spec, sharp.astype(q.dtype), q, (1, 0))
            if spec.gates:
                gates = gates + (sharp if spec.folded else ds).sum(axis=1)
            return dk, dv, gates

        gates = jnp.zeros((tiles.rows,), jnp.float32)
        dk, dv, gates = _walk(x["bounds"], batch, block, body, (*carry, gates))
        if spec.gates:
            x["gate_sums"][batch, head, k_side.where] = gates
        return dk, dv

    first = kv_head * spec.group
    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = of_head(first, zeros) if spec.group == 1 else lax.fori_loop(first, first + spec.group, of_head, zeros)
    x["dk"][batch, k_side.where, kv_head, :] = (dk * spec.scale).astype(x["dk"].dtype)
    x["dv"][batch, k_side.where, kv_head, :] = dv.astype(x["dv"].dtype)


def _call(
    body: Callable[..., None], spec: Spec, tiles: Tiles, arrays: dict[str, Array], outputs: dict[str, Any], grid: Any
) -> dict[str, Array]:
    name = f"{body.__name__.strip('_')}_{tiles}"
    more: Any = {"warps": tiles.warps, "stages": tiles.stages, "interpret": spec.interpret}
    return launch(partial(body, spec, tiles), name, grid, arrays, outputs, **more)


def _line(arrays: dict[str, Array], *rest: int) -> Any:
    batch, length, heads, _ = arrays["q"].shape
    return jax.ShapeDtypeStruct((batch, heads, *rest, length), jnp.float32)


def forward(spec: Spec, tiles: Tiles, arrays: dict[str, Array]) -> dict[str, Array]:
    """o [B, T, H, Dv] in the inputs' dtype and base-2 lse [B, H, T] float32 (−inf: nothing seen), T padded.

    arrays: q, k, v [B, padded length, heads, D]; bounds (`triton_gpu.walks`); as the spec says: table [H, entries];
    sharpness, q_gate_hi, q_gate_lo [B, H, T], k_gate_hi, k_gate_lo [B, H, S] float32; q_segments, kv_segments,
    q_positions, kv_positions [B, length] int32.
    """
    batch, length, heads, _ = arrays["q"].shape
    out = jax.ShapeDtypeStruct((batch, length, heads, arrays["v"].shape[-1]), arrays["q"].dtype)
    grid = (length // tiles.rows, heads, batch)
    return _call(_forward_body, spec, tiles, arrays, {"o": out, "lse": _line(arrays)}, grid)


def query_gradients(spec: Spec, tiles: Tiles, arrays: dict[str, Array]) -> dict[str, Array]:
    """dq [B, T, H, D], and float32 row sums over keys.

    arrays: those of `forward`, do, lse (+inf where nothing is seen), delta, dlse [B, H, T]; slopes [n, H, entries].
    Sums: slope_sums [B, H, n, T] of d(log prior) · slope; dsharpness; rows: of d(logits), with gates.
    """
    batch, length, heads, _ = arrays["q"].shape
    outputs: dict[str, Any] = {"dq": jax.ShapeDtypeStruct(arrays["q"].shape, arrays["q"].dtype)}
    if spec.slopes:
        outputs["slope_sums"] = _line(arrays, spec.slopes)
    if spec.sharpness:
        outputs["dsharpness"] = _line(arrays)
    if spec.gates:
        outputs["rows"] = _line(arrays)
    return _call(_query_body, spec, tiles, arrays, outputs, (length // tiles.rows, heads, batch))


def key_gradients(spec: Spec, tiles: Tiles, arrays: dict[str, Array]) -> dict[str, Array]:
    """dk, dv [B, S, Hkv, ·], summed over the query heads of a key head; gate_sums [B, H, S]: of d(gate term)."""
    batch, length, kv_heads, _ = arrays["k"].shape
    outputs = {f"d{n}": jax.ShapeDtypeStruct(arrays[n].shape, arrays[n].dtype) for n in ("k", "v")}
    if spec.gates:
        outputs["gate_sums"] = jax.ShapeDtypeStruct((batch, arrays["q"].shape[2], length), jnp.float32)
    return _call(_key_body, spec, tiles, arrays, outputs, (length // tiles.rows, kv_heads, batch))
