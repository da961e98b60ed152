"""Backend "pallas_triton": fused attention for NVIDIA GPUs from Ampere on, output and every gradient, in Pallas Triton.

The portable route, and on Hopper what serves the calls that "mosaic_gpu" refuses: float32, explicit positions, head_dim
256. docs/kernels.md explains the algorithm; the kernels are in triton_gpu_kernels.py.

Explicit positions read the prior's table by their difference. The table holds `REACH` distances at least; a call whose
positions turn out to lie further apart runs the blockwise XLA path instead, decided by the data, with the same result.
"""

import functools
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree

from kernels import triton
from kernels.attention import xla
from kernels.attention.call import FAR, Call, DistancePrior
from kernels.attention.triton_gpu_kernels import Spec, forward, key_gradients, query_gradients
from kernels.triton import Chosen, Tiles, padded_head

Array = jax.Array
LN2 = 0.6931471805599453
REACH = 1 << 16
SLOPES_AT_ONCE = 8


def supports(call: Call) -> str | None:
    """None, or why these kernels cannot serve the call."""
    return triton.machine_lacks() or refusal(call, triton.capability())


def refusal(call: Call, device: str) -> str | None:
    """What `supports` says on a GPU of compute capability `device`."""
    return triton.refusal(call.q, call.v, device, choose_tiles)


@functools.cache
def _tile_table() -> dict[str, dict[str, dict[str, str]]]:
    """dtype size -> padded head_dim -> kernel -> Tiles as text; measured, see docs/kernels.md."""
    return json.loads((Path(__file__).parent / "triton_gpu_tiles.json").read_text())


def choose_tiles(head_dim: int, itemsize: int, room: int) -> Chosen:
    """The measured tiles, made smaller where they would need more than `room` bytes of shared memory."""
    row = _tile_table()[str(itemsize)][str(max(64, head_dim))]
    return Chosen(*(Tiles.parse(row[n]).fitted(head_dim, itemsize, room) for n in ("forward", "queries", "keys")))


# ---- Which tiles a block visits ----


class Extents(NamedTuple):
    """Of each chunk of a side, [1 or B, chunks]: least and greatest position and segment id of its real tokens."""

    first: Any
    last: Any
    low: Any
    high: Any
    some: Any  # is there any real token
    all: Any  # are all of them real


def extents(xp: Any, positions: Any, segments: Any, real: Any, size: int) -> Extents:
    """positions, segments (or None), real [1 or B, n] with n a multiple of `size`; xp: numpy or jax.numpy."""
    chunked = lambda x: x.reshape(x.shape[0], -1, size)
    valid = real if segments is None else real & (segments >= 0)
    ids = xp.zeros_like(positions) if segments is None else segments
    least = lambda x: chunked(xp.where(valid, x, 2 * FAR)).min(-1)
    most = lambda x: chunked(xp.where(valid, x, -2 * FAR)).max(-1)
    some, every = chunked(valid).any(-1), chunked(valid).all(-1)
    return Extents(least(positions), most(positions), least(ids), most(ids), some, every)


def walks(xp: Any, q: Extents, k: Extents, causal: bool, window: int | None, queries_are_blocks: bool) -> Any:
    """int32 [1 or B, blocks, 4]: a block visits tiles [0, 1) masked, [1, 2) without a mask, [2, 3) masked."""
    a, b = (q, k) if queries_are_blocks else (k, q)
    wide = lambda x: Extents(*(part[:, :, None] for part in x))
    tall = lambda x: Extents(*(part[:, None, :] for part in x))
    q, k = (wide(a), tall(b)) if queries_are_blocks else (tall(b), wide(a))
    touched = q.some & k.some & (q.low <= k.high) & (k.low <= q.high)
    whole = q.all & k.all & (q.low == q.high) & (k.low == k.high) & (q.low == k.low)
    if causal:
        touched, whole = touched & (q.last >= k.first), whole & (q.first >= k.last)
    if window is not None:
        touched, whole = touched & (q.first - k.last < window), whole & (q.last - k.first < window)
        if not causal:
            touched, whole = touched & (q.last - k.first > -window), whole & (q.first - k.last > -window)
    count = touched.shape[2]
    begin = lambda x: xp.where(x.any(-1), xp.argmax(x, axis=-1), 0)
    low, high = begin(touched), xp.where(touched.any(-1), count - xp.argmax(touched[:, :, ::-1], axis=-1), 0)
    index = xp.arange(count)[None, None]
    full = begin(whole)
    broken = ~whole & (index >= full[:, :, None])
    full_end = xp.where(broken.any(-1), xp.argmax(broken, axis=-1), count)
    none = ~whole.any(-1)
    full, full_end = xp.where(none, low, full), xp.where(none, low, full_end)
    return xp.stack([low, full, full_end, high], axis=-1).astype(xp.int32)


# ---- Operands of the kernels ----


@dataclass(frozen=True)
class Options:
    """The static part of a call beyond what `Call` holds."""

    tiles: Chosen
    reach: int  # explicit positions: distances below it are in the table
    interpret: bool = False


def _up(length: int) -> int:
    return -(-length // 128) * 128


def _padded(x: Array, axis: int, length: int, value: Any = 0, edge: bool = False) -> Array:
    extra = length - x.shape[axis]
    widths = [(0, extra if a == axis else 0) for a in range(x.ndim)]
    if not extra:
        return x
    return jnp.pad(x, widths, mode="edge") if edge else jnp.pad(x, widths, constant_values=value)


def make_spec(options: Options, call: Call, slopes: int = 0) -> Spec:
    """What the kernels must know of a call when they are compiled. slopes: tables of d(log prior)/d(parameter)."""
    queries, keys = call.q.shape[1], call.k.shape[1]
    explicit = call.q_positions is not None
    back = 0 if call.causal else (options.reach if explicit else _up(keys) + max(queries - keys, 0))
    ahead = options.reach if explicit else _up(queries) + max(keys - queries, 0)
    return Spec(
        queries=queries,
        keys=keys,
        group=call.q.shape[2] // call.k.shape[2],
        scale=call.scale,
        causal=call.causal,
        window=call.window,
        prior=call.prior is not None,
        slopes=slopes,
        origin=back,
        entries=back + ahead,
        sharpness=call.sharpness is not None,
        sharpen_prior=call.sharpen_prior,
        gates=call.gates is not None,
        segments=call.q_segments is not None,
        positions=explicit,
        unseen=not call.every_key_is_seen(),
        exact=call.q.dtype == jnp.float32,
        interpret=options.interpret,
    )


def _lines(x_BTH: Array, length: int) -> Array:
    """[B, T, H] -> [B, H, length] float32."""
    return _padded(x_BTH.transpose(0, 2, 1), 2, length)


def _wide(x: Array) -> Array:
    """[B, length, heads, D] with D padded to a power of two and length to a multiple of 128."""
    return _padded(_padded(x, 3, padded_head(x.shape[3])), 1, _up(x.shape[1]))


def _sides(call: Call) -> tuple[Any, tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """(numpy or jax.numpy, (positions, segments, real) of the queries, of the keys), padded as the kernels see them."""
    queries, keys = call.q.shape[1], call.k.shape[1]
    real: Any = np.arange(_up(keys))[None] < keys
    if call.q_positions is None and call.q_segments is None:
        places = np.minimum(np.arange(_up(queries)), queries - 1)[None] + (keys - queries)
        return np, (places, None, np.ones_like(places, bool)), (np.arange(_up(keys))[None], None, real)
    q_pos, k_pos = call.positions()
    q_pos, k_pos = _padded(q_pos, 1, _up(queries), edge=True), _padded(k_pos, 1, _up(keys))
    if call.q_segments is None or call.kv_segments is None:
        return jnp, (q_pos, None, jnp.ones_like(q_pos, bool)), (k_pos, None, jnp.asarray(real))
    q_ids = _padded(jnp.where(call.q_segments < 0, -1, call.q_segments), 1, _up(queries), edge=True)
    k_ids = _padded(jnp.where(call.kv_segments < 0, -2, call.kv_segments), 1, _up(keys), -2)
    return jnp, (q_pos, q_ids, jnp.ones_like(q_ids, bool)), (k_pos, k_ids, jnp.asarray(real))


def _bounds(call: Call, tiles: Tiles, queries_are_blocks: bool) -> Array:
    xp, q, k = _sides(call)
    sizes = (tiles.rows, tiles.step) if queries_are_blocks else (tiles.step, tiles.rows)
    q_ends, k_ends = (extents(xp, *side, size) for side, size in zip((q, k), sizes, strict=True))
    return jnp.asarray(walks(xp, q_ends, k_ends, call.causal, call.window, queries_are_blocks))


def _inputs(spec: Spec, call: Call) -> dict[str, Array]:
    """What all three kernels read, besides tables and bounds."""
    arrays = {n: _wide(getattr(call, n)) for n in ("q", "k", "v")}
    length, keys = arrays["q"].shape[1], arrays["k"].shape[1]
    if call.prior is not None:
        d = distances(spec)
        values = jax.vmap(lambda p: call.prior.log_prior(p, d))(call.prior.params)  # type: ignore[union-attr]
        arrays["table"] = values.astype(jnp.float32)
    if call.sharpness is not None:
        arrays["sharpness"] = _lines(call.sharpness, length)
    if call.gates is not None:
        names = ("q_gate_hi", "q_gate_lo", "k_gate_hi", "k_gate_lo")
        for n, g, size in zip(names, call.gates, (length, length, keys, keys), strict=True):
            arrays[n] = _lines(g, size)
    if call.q_positions is not None or call.q_segments is not None:
        batch = call.q.shape[0]
        _, (q_pos, q_ids, _), (k_pos, k_ids, _) = _sides(call)
        whole = lambda x: jnp.broadcast_to(x, (batch, x.shape[1])).astype(jnp.int32)
        if spec.positions:
            arrays |= {"q_positions": whole(q_pos), "kv_positions": whole(k_pos)}
        if spec.segments:
            arrays |= {"q_segments": whole(q_ids), "kv_segments": whole(k_ids)}
    return arrays


def distances(spec: Spec) -> Array:
    """Signed distance (key − query) of every table entry; with default positions kept inside what a query can see."""
    ahead = jnp.arange(spec.entries, dtype=jnp.int32) - spec.origin
    if spec.positions:
        return -ahead
    return -jnp.clip(ahead, 0 if spec.causal else 1 - spec.keys, spec.keys - 1)


def _slopes(spec: Spec, prior: DistancePrior) -> Array:
    """d(log prior)/d(parameter) over distance, float32 [parameters of a head, H, entries]."""
    d = distances(spec)

    def of_head(p: Any) -> Array:
        flat, unravel = ravel_pytree(p)
        return jax.jacfwd(lambda t: prior.log_prior(unravel(t), d))(flat).T

    return jax.vmap(of_head)(prior.params).astype(jnp.float32).transpose(1, 0, 2)


# ---- Forward and backward ----


def _fused_forward(options: Options, call: Call) -> tuple[Array, Array]:
    spec = make_spec(options, call)
    out = forward(spec, options.tiles.forward, _inputs(spec, call) | {"bounds": _bounds(call, options.tiles[0], True)})
    queries = call.q.shape[1]
    lse = out["lse"][:, :, :queries].transpose(0, 2, 1) * LN2
    return out["o"][:, :queries, :, : call.v.shape[-1]], lse


def _fused_backward(options: Options, call: Call, o: Array, lse: Array, do: Array, dlse: Array) -> Call:
    alive = lse > -jnp.inf
    queries, keys, dim = call.q.shape[1], call.k.shape[1], call.q.shape[3]
    clean = lambda x: jnp.where(alive[..., None] if x.ndim == 4 else alive, x, jnp.zeros((), x.dtype))
    call = replace(call, q=clean(call.q), sharpness=None if call.sharpness is None else clean(call.sharpness))
    do, dlse = clean(do), clean(dlse)
    count = 0 if call.prior is None else sum(x[0].size for x in jax.tree.leaves(call.prior.params))
    spec = make_spec(options, call, count)
    arrays = _inputs(spec, call)
    length = arrays["q"].shape[1]
    delta = (o.astype(jnp.float32) * do.astype(jnp.float32)).sum(-1)
    base2 = jnp.where(alive, lse / LN2, jnp.inf).transpose(0, 2, 1)
    arrays |= {"do": _wide(do), "lse": _padded(base2, 2, length, jnp.inf), "dlse": _lines(dlse, length)}
    mine = arrays | {"delta": _lines(delta, length), "bounds": _bounds(call, options.tiles.queries, True)}
    sums = _query_sums(options, spec, call, mine)
    if spec.gates:
        # d(logits) sum to dlse over the keys of a row; what is left is the rounding of the output in delta. It would
        # add up in the running sum behind the gates, so the keys get a delta without it.
        delta = delta + sums["rows"][:, :, :queries].transpose(0, 2, 1) - dlse
    theirs = arrays | {"delta": _lines(delta, length), "bounds": _bounds(call, options.tiles.keys, False)}
    found = key_gradients(replace(spec, slopes=0), options.tiles.keys, theirs)
    grads: dict[str, Any] = {"q": sums["dq"][:, :queries, :, :dim]}
    grads |= {"k": found["dk"][:, :keys, :, :dim], "v": found["dv"][:, :keys, :, : call.v.shape[-1]]}
    rows = lambda x: x[:, :, :queries].transpose(0, 2, 1)
    if spec.sharpness:
        grads["sharpness"] = rows(sums["dsharpness"])
    if call.gates is not None:
        grads["q_gates"] = dlse * call.sharpness if spec.folded and call.sharpness is not None else dlse
        grads["k_gates"] = -found["gate_sums"][:, :, :keys].transpose(0, 2, 1)
    if call.prior is not None:
        total = sums["slope_sums"][..., :queries].sum(axis=(0, 3))
        unravel = ravel_pytree(jax.tree.map(lambda x: x[0], call.prior.params))[1]
        grads["prior"] = jax.vmap(unravel)(total)
    return xla.as_call(call, grads)


def _query_sums(options: Options, spec: Spec, call: Call, arrays: dict[str, Array]) -> dict[str, Array]:
    tiles = options.tiles.queries
    if call.prior is None:
        return query_gradients(spec, tiles, arrays)
    slopes = _slopes(spec, call.prior)
    parts = []
    for first in range(0, spec.slopes, SLOPES_AT_ONCE):
        some = slopes[first : first + SLOPES_AT_ONCE]
        parts.append(query_gradients(replace(spec, slopes=len(some)), tiles, arrays | {"slopes": some}))
    return parts[0] | {"slope_sums": jnp.concatenate([p["slope_sums"] for p in parts], axis=2)}


def in_reach(options: Options, call: Call) -> Array | None:
    """Are all distances that matter in the table; None if that is known beforehand."""
    if call.prior is None or call.q_positions is None or (call.window is not None and call.window <= options.reach):
        return None
    _, q, k = _sides(call)
    q_ends, k_ends = (extents(jnp, *side, side[0].shape[1]) for side in (q, k))
    far = q_ends.last - k_ends.first
    far = far if call.causal else jnp.maximum(far, k_ends.last - q_ends.first)
    return ((far < options.reach) | ~q_ends.some | ~k_ends.some).all()


def plain_forward(call: Call) -> tuple[Array, Array]:
    """The XLA path, with float32 products as the kernels have them: its default on a GPU is TF32."""
    with jax.default_matmul_precision("highest"):
        return xla.forward(call)


def _plain_backward(*args: Any) -> Call:
    with jax.default_matmul_precision("highest"):
        return xla.backward(*args)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, call: Call) -> tuple[Array, Array]:
    fits = in_reach(options, call)
    if fits is None:
        return _fused_forward(options, call)
    return lax.cond(fits, partial(_fused_forward, options), plain_forward, call)


def _attend_fwd(options: Options, call: Call) -> Any:
    o, lse = _attend(options, call)
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse), (call, o, lse)


def attend_backward(options: Options, saved: tuple[Call, Array, Array], cotangents: tuple[Array, Array]) -> tuple[Call]:
    """The backward rule: saved (call, o, lse), cotangents (do, dlse) -> (cotangents of the call,)."""
    fits = in_reach(options, saved[0])
    if fits is None:
        return (_fused_backward(options, *saved, *cotangents),)
    return (lax.cond(fits, partial(_fused_backward, options), _plain_backward, *saved, *cotangents),)


_attend.defvjp(_attend_fwd, attend_backward)


def options_for(call: Call, tiles: Chosen | None = None, reach: int | None = None, interpret: bool = False) -> Options:
    """The options of a call: tiles as measured, unless they are given, and distances that the prior's table holds."""
    length = call.q.shape[1] + call.k.shape[1]
    wide = padded_head(max(call.q.shape[-1], call.v.shape[-1]))
    chosen = tiles or choose_tiles(wide, call.q.dtype.itemsize, triton.room_on(triton.capability()))
    return Options(chosen, reach or max(REACH, length), interpret)


def attend(call: Call, options: Options | None = None) -> tuple[Array, Array]:
    """(o [B, T, H, Dv], lse [B, T, H] float32). options: instead of the measured ones, for tests and measurements."""
    return _attend(options or options_for(call), call)
