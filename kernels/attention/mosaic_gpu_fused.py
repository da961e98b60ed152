"""The differentiable function over the Mosaic GPU kernels: tables and row factors before them, parameter sums after."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree

from kernels.attention.mosaic_gpu_backward import query_gradients
from kernels.attention.mosaic_gpu_backward_keys import key_gradients
from kernels.attention.mosaic_gpu_forward import forward
from kernels.attention.mosaic_gpu_skip import can_skip, keep_bounds
from kernels.attention.mosaic_gpu_slopes import own_slopes
from kernels.attention.mosaic_gpu_spec import LOG2E, Spec, Tiles, segment_bounds

Array = jax.Array
Leaves = dict[str, Any]
# Sharpened log-priors are kept within ±LARGEST: the kernels form s · factor − maximum with one rounding at the end,
# which is exact enough only while the product is far below 2^24. exp(−LARGEST) is 0 many times over.
LARGEST = 16384.0


@dataclass(frozen=True)
class Options:
    """The static part of a call."""

    log_prior: Any
    scale: float
    causal: bool
    window: int | None
    sharpen_prior: bool
    lengths: tuple[int, int]  # of queries and keys; the arrays may be longer
    tiles: tuple[Tiles, Tiles, Tiles]  # forward, query gradients, key gradients
    skip: bool = False  # leave out tiles that the gates prove to weigh less than mosaic_gpu_skip.LOST


def make_spec(options: Options, x: Leaves, slopes: int = 0) -> Spec:
    """What the kernels must know of a call when they are compiled. x: the leaves of `fused`; slopes: how many tables of
    d(log prior)/d(parameter) a backward kernel is to read."""
    batch, _, heads, d = x["q"].shape
    kv_heads = x["k"].shape[2]
    queries, keys = options.lengths
    return Spec(
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=d,
        dtype=x["q"].dtype,
        scale=options.scale,
        causal=options.causal,
        window=None if options.window is None else min(options.window, queries + keys),
        prior=x["params"] is not None,
        slopes=slopes,
        own_slope=False,
        sharpness=x["sharpness"] is not None,
        sharpen_prior=options.sharpen_prior,
        gates=x["gates"] is not None,
        segments=x["q_segments"] is not None,
        skip=options.skip and can_skip(x["gates"] is not None, options.causal, queries, keys),
    )


def gradient_spec(options: Options, x: Leaves) -> tuple[Spec, tuple[int, ...]]:
    """The spec of the backward kernels, and the places of the prior's parameters whose slope is the prior itself."""
    spec = make_spec(options, x, sum(leaf[0].size for leaf in jax.tree.leaves(x["params"])))
    if not (spec.folded and spec.prior) or spec.gates:
        return spec, ()
    own = own_slopes(options.log_prior, jax.tree.map(lambda leaf: leaf[0], x["params"]))
    return replace(spec, slopes=spec.slopes - len(own), own_slope=bool(own)), own


def distances(spec: Spec) -> Array:
    """Signed distance (key − query) of every table entry, kept inside what some query can see."""
    ahead = jnp.arange(spec.table_length, dtype=jnp.int32) - spec.origin
    reach = spec.keys - 1 if spec.window is None else min(spec.window, spec.keys) - 1
    return -jnp.clip(ahead, 0 if spec.causal else -reach, reach)


def lines(x_BTH: Array, length: int, value: float = 0.0) -> Array:
    """[B, T, H] -> [B, H, length]."""
    x = x_BTH.transpose(0, 2, 1)
    return jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2])), constant_values=value)


def copies_of(table: Array, tiles: Tiles) -> Array:
    """[..., L] -> [..., copies, L]: the second one entry ahead, see `table_chunks`."""
    return jnp.stack([table, jnp.roll(table, -1, -1)] if tiles.pairs else [table], axis=-2)


def _sharpness(options: Options, spec: Spec, x: Leaves) -> Array:
    """Sharpness [B, H, padded T], kept away from 0, where the kernels divide by it or multiply −inf."""
    r = lines(x["sharpness"], spec.padded_queries, 1.0)
    least = 1e-20 if options.sharpen_prior or not spec.offsets else 1e-6
    return jnp.where(jnp.abs(r) < least, jnp.where(r < 0, -least, least), r)


def inputs_of(options: Options, spec: Spec, x: Leaves) -> dict[str, Array]:
    """What all three kernels read, besides the prior's table."""
    arrays = {n: x[n] for n in ("q", "k", "v")}
    if spec.sharpness:
        r = _sharpness(options, spec, x)
        arrays["factor"] = r * (spec.scale * LOG2E)
        if spec.offsets and not spec.sharpen_prior:
            arrays["gain"] = 1 / r
    if spec.gates:
        lengths = (spec.padded_queries, spec.padded_queries, spec.padded_keys, spec.padded_keys)
        for n, g, length in zip(("q_gate_hi", "q_gate_lo", "k_gate_hi", "k_gate_lo"), x["gates"], lengths, strict=True):
            arrays[n] = lines(g, length)
    if spec.segments:
        for n, length in (("q_segments", spec.padded_queries), ("kv_segments", spec.padded_keys)):
            ids = jnp.where(x[n] < 0, -1 if n == "q_segments" else -2, x[n])
            arrays[n] = jnp.pad(ids, ((0, 0), (0, length - ids.shape[1])), constant_values=-1)
    return arrays


def _prior(options: Options, spec: Spec, x: Leaves) -> tuple[Array, Array]:
    """The prior of every head over distance, float32 [H, table length], and how far from 0 the kernels take it."""
    d = distances(spec)
    values = jax.vmap(lambda p: options.log_prior(p, d))(x["params"]).astype(jnp.float32)
    limit = jnp.float32(LARGEST)
    return values, limit / jnp.maximum(1, jnp.abs(x["sharpness"]).max()) if spec.folded else limit


def prior_table(options: Options, spec: Spec, x: Leaves) -> Array | None:
    """The prior of every head over distance, divided by the scale: float32 [H, table length]."""
    if not spec.prior:
        return None
    values, limit = _prior(options, spec, x)
    return jnp.clip(values, -limit, limit) / spec.scale


def bounds_of(
    spec: Spec, x: Leaves, mine: str, others: str, tiles: Tiles, table: Array | None = None
) -> dict[str, Array]:
    """The tiles that a block visits by segments and by gates, where there are any: {"bounds": [B, H or 1, blocks,
    2 or 4]}.

    mine, others: names of the segments of the blocks' side and of the other; table: `prior_table`, for the gates.
    """
    parts = []
    if spec.segments:
        parts.append(segment_bounds(x[mine], x[others], tiles.rows, tiles.step))
    if spec.skip:
        prior = None if table is None else table * spec.scale
        parts.append(keep_bounds(spec, x, prior, tiles, mine == "q_segments"))
    if len(parts) == 2:
        start, stop = (f(*(p[..., n] for p in parts)) for n, f in enumerate((jnp.maximum, jnp.minimum)))
        inside = jnp.broadcast_to(parts[0][..., 2:], (*start.shape, 2))
        parts = [jnp.concatenate([start[..., None], stop[..., None], inside], axis=-1)]
    return {"bounds": parts[0]} if parts else {}


def _slopes(options: Options, spec: Spec, x: Leaves) -> Array:
    """d(log prior)/d(parameter) over distance, float32 [parameters of a head, H, table length]."""
    d = distances(spec)

    def of_head(p: Any) -> Array:
        flat, unravel = ravel_pytree(p)
        return jax.jacfwd(lambda t: options.log_prior(unravel(t), d))(flat).T

    slopes = jax.vmap(of_head)(x["params"]).astype(jnp.float32).transpose(1, 0, 2)
    values, limit = _prior(options, spec, x)
    return jnp.where((jnp.abs(values) < limit)[None], slopes, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(options: Options, x: Leaves) -> tuple[Array, Array]:
    """(o, natural log-sum-exp [B, T, H]).

    x: q, k, v with head_dim as `Spec` has it and lengths padded to multiples of 8; params, sharpness, gates (four
    sums), q_segments, kv_segments as in `call.Call`, unpadded, None where absent.
    """
    return _forward(options, x)[0]


def _forward(options: Options, x: Leaves) -> Any:
    spec, tiles = make_spec(options, x), options.tiles[0]
    arrays = inputs_of(options, spec, x)
    if spec.sharpness:
        arrays["negative"] = (arrays["factor"] < 0).any()[None].astype(jnp.int32)
    table = prior_table(options, spec, x)
    arrays |= bounds_of(spec, x, "q_segments", "kv_segments", tiles, table)
    if table is not None:
        arrays["table"] = copies_of(table, tiles).transpose(1, 0, 2)
    out, lse = forward(spec, tiles, arrays)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    natural = lse[:, :, : spec.queries].transpose(0, 2, 1) * math.log(2.0)
    return (out, natural), (x, out, lse)


def _backward(options: Options, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Leaves]:
    x, out, lse = residuals
    do, dlse = cotangents
    spec, own = gradient_spec(options, x)
    arrays = inputs_of(options, spec, x)
    dlse = jnp.where(lse[:, :, : spec.queries].transpose(0, 2, 1) == -jnp.inf, 0, dlse)
    delta = (out.astype(jnp.float32) * do.astype(jnp.float32)).sum(axis=-1)[:, : spec.queries] - dlse
    delta = lines(delta, spec.padded_queries)
    real = (jnp.arange(spec.padded_queries) < spec.queries)[None, None, :]
    arrays |= {"do": do, "lse": jnp.where(real & (lse > -jnp.inf), lse, jnp.inf)}
    table = prior_table(options, spec, x)
    queries = query_sums(options, spec, x, arrays, delta, table, own)
    if spec.gates:
        # d(logits) sum to dlse over the keys of a row; what is left is the rounding of the output in delta. It would
        # add up in the running sum behind the gates, so the keys get a delta without it.
        delta = delta + jnp.where(real, queries["rows"] - lines(dlse, spec.padded_queries), 0)
    keys = key_sums(spec, options.tiles[2], x, arrays, delta, table)
    grads: Leaves = dict.fromkeys(x)
    grads |= {"q": queries["dq"], "k": keys["dk"], "v": keys["dv"]}
    if spec.prior:
        grads["params"] = parameter_gradients(spec, options.tiles[1].rows, x["params"], queries, own)
    if spec.sharpness:
        grads["sharpness"] = queries["sharpness"][:, :, : spec.queries].transpose(0, 2, 1) * spec.scale
    if spec.gates:
        # The sum of dlogits over the keys of a row is the cotangent of its log-sum-exp, exactly.
        rows = dlse * x["sharpness"] if spec.folded else dlse
        columns = -keys["gates"][:, :, : spec.keys].transpose(0, 2, 1)
        if spec.sharpness:
            columns = columns / (spec.scale * LOG2E)
        grads["gates"] = (rows, jnp.zeros_like(rows), columns, jnp.zeros_like(columns))
    for n in ("q_segments", "kv_segments"):
        grads[n] = None if x[n] is None else np.zeros(x[n].shape, jax.dtypes.float0)
    return (grads,)


def parameter_gradients(spec: Spec, rows: int, params: Any, sums: dict[str, Array], own: tuple[int, ...]) -> Any:
    """The prior's gradients from its slopes' sums; `own`: places of the parameters whose slope is the prior itself."""
    size = spec.slopes + len(own)
    total = jnp.zeros((spec.heads, size), jnp.float32)
    others = np.array([n for n in range(size) if n not in own], np.int32)
    if spec.slopes:
        # Rows of the last block past the end add 0, but a row's sum may lie in its neighbour's place.
        written = -(-spec.queries // rows) * rows
        slopes = sums["slopes"][..., :written].sum(axis=(0, 3))
        total = total.at[:, others].set(slopes / (spec.scale * LOG2E) if spec.folded else slopes)
    if own:
        prior = sums["prior"][..., : spec.queries].sum(axis=(0, 2)) / LOG2E  # the table holds the prior over the scale
        total = total.at[:, np.array(own)].set(prior[:, None])
    unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], params))[1]
    return jax.vmap(unravel)(total)


def key_sums(
    spec: Spec, tiles: Tiles, x: Leaves, arrays: dict[str, Array], delta: Array, table: Array | None
) -> dict[str, Array]:
    """What the keys' backward kernel gives (`mosaic_gpu_backward_keys.key_gradients`). delta [B, H, padded T]: Σ do·o −
    dlse of the rows; table: the prior over distance, or None."""
    arrays = arrays | {"delta": delta * arrays["factor"] if spec.sharpness else delta}
    arrays |= bounds_of(spec, x, "kv_segments", "q_segments", tiles, table)
    if table is not None:
        arrays["table"] = copies_of(table, tiles).transpose(1, 0, 2)
    return key_gradients(spec, tiles, arrays)


SLOPES_AT_ONCE = 8


def query_sums(
    options: Options,
    spec: Spec,
    x: Leaves,
    arrays: dict[str, Array],
    delta: Array,
    table: Array | None,
    own: tuple[int, ...],
) -> dict[str, Array]:
    """What the queries' backward kernel gives (`mosaic_gpu_backward.query_gradients`), in as many calls as the prior's
    slopes need; own: places of the parameters whose slope is the prior itself, which need no table."""
    tiles = options.tiles[1]
    arrays = arrays | {"delta": delta} | bounds_of(spec, x, "q_segments", "kv_segments", tiles, table)
    if table is not None:
        arrays["table"] = copies_of(table, tiles).transpose(1, 0, 2)
    if not spec.slopes:
        return query_gradients(spec, tiles, arrays)
    slopes = jnp.delete(_slopes(options, spec, x), np.array(own, np.int32), axis=0)
    slopes = copies_of(slopes, tiles).transpose(0, 2, 1, 3)
    parts = []
    for first in range(0, spec.slopes, SLOPES_AT_ONCE):
        some = slopes[first : first + SLOPES_AT_ONCE]
        part = replace(spec, slopes=some.shape[0], own_slope=spec.own_slope and first == 0)
        parts.append(query_gradients(part, tiles, arrays | {"slopes": some}))
    return parts[0] | {"slopes": jnp.concatenate([p["slopes"] for p in parts], axis=2)}


fused.defvjp(_forward, _backward)
