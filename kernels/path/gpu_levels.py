"""Attention across the children of a level with the Mosaic GPU attention kernels: queries of child a, keys of c < a.

To those kernels a parent is a batch row whose keys are stored once per pair of children, as the queries of a need them;
what they index otherwise (values, gates, segments, prior) they read by the key's own place. No tile needs a mask but
for segments.
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels.attention import mosaic_gpu_fused as fused
from kernels.attention.mosaic_gpu_forward import forward
from kernels.attention.mosaic_gpu_fused import Leaves, Options
from kernels.attention.mosaic_gpu_spec import LOG2E, Spec, Tiles
from kernels.path.levels import Level, fold

Array = jax.Array


@dataclass(frozen=True)
class LevelSpec(Spec):
    """A Spec whose queries see exactly the keys of the children before their own."""

    level: Level = field(kw_only=True)

    def key_range(self, first: Array, tiles: Tiles) -> tuple[Array, Array, Array, Array]:
        child = lax.div(first, jnp.int32(self.level.size))
        zero = first * 0
        stop = child * (self.level.size // tiles.step)
        return zero, zero, stop, stop

    def key_offset(self, first: Array) -> Array:
        child = lax.div(first, jnp.int32(self.level.size))
        return lax.div(child * (child - 1), jnp.int32(2)) * self.level.size

    def key_blocks(self, tiles: Tiles) -> int:
        return sum(self._blocks_of(a, tiles) for a in range(1, self.level.radix))

    def _blocks_of(self, a: int, tiles: Tiles) -> int:
        """Blocks of the keys of child a, which lie in one piece; the last one ends where they end."""
        return -(-a * self.level.size // tiles.rows)

    def key_block(self, block: Array, tiles: Tiles) -> tuple[Array, Array, tuple[Array, Array, Array, Array]]:
        size, zero = self.level.size, block * 0
        a, number, before = zero + 1, block, 0
        for child in range(2, self.level.radix):
            count = self._blocks_of(child - 1, tiles)
            before += count
            later = (block >= before).astype(jnp.int32)
            a, number = a + later, number - later * count
        first = lax.min(number * tiles.rows, a * size - tiles.rows)
        stored = lax.div(a * (a - 1), jnp.int32(2)) * size + first
        per_child = size // tiles.step
        start, stop = a * per_child, (a + 1) * per_child
        return first, stored, (start, start, stop, stop)

    @property
    def padded_stored(self) -> int:
        return -(-self.level.stored // 384) * 384


def level_spec(spec: Spec, level: Level) -> LevelSpec:
    """The spec of a call over parents, turned into that of the level."""
    return LevelSpec(**{f.name: getattr(spec, f.name) for f in fields(Spec)}, level=level)


def _parents(x: Array | None, level: Level) -> Any:
    """[B, T, …] -> [B · parents, parent, …]."""
    return None if x is None else x.reshape(-1, level.parent, *x.shape[2:])


def _leaves(x: Leaves, level: Level, q: Array, keys: Array) -> Leaves:
    """Inputs of the kernels: q [B, T, H, D] at the left edges of the children, keys [B, parents · stored, K, D]."""
    return {
        "q": _parents(q, level),
        "k": keys.reshape(-1, level.stored, *keys.shape[2:]),
        "v": _parents(x["v"], level),
        "params": x["params"],
        "sharpness": _parents(x["sharpness"], level),
        "gates": None if x["gates"] is None else tuple(_parents(g, level) for g in x["gates"]),
        "q_segments": _parents(x["segments"], level),
        "kv_segments": _parents(x["segments"], level),
    }


def _options(options: Options, level: Level) -> Options:
    forward, queries, keys = options.tiles
    if keys.rows > level.size:
        keys = replace(keys, groups=level.size // 64)
    return replace(options, lengths=(level.parent, level.parent), tiles=(forward, queries, keys))


def level_forward(
    options: Options, x: Leaves, level: Level, q: Array, keys: Array, before: tuple[Array, Array]
) -> tuple[Array, Array]:
    """(o [B, T, H, Dv], natural lse [B, T, H]) of the keys of this level and of those before, of which `before` is the
    same.

    x: v, params, sharpness, gates (hi, lo of queries and of keys) and segments of whole rows, as in `call.PathCall`.
    """
    options, tiles = _options(options, level), options.tiles[0]
    leaves = _leaves(x, level, q, keys)
    spec = level_spec(fused.make_spec(options, leaves), level)
    arrays = fused.inputs_of(options, spec, leaves)
    if spec.sharpness:
        arrays["negative"] = (arrays["factor"] < 0).any()[None].astype(jnp.int32)
    arrays |= fused.bounds_of(spec, leaves, "q_segments", "kv_segments", tiles)
    table = fused.prior_table(options, spec, leaves)
    if table is not None:
        arrays["table"] = fused.copies_of(table, tiles).transpose(1, 0, 2)
    o, lse = (_parents(part, level) for part in before)
    arrays |= {"o_before": o, "lse_before": fused.lines(lse * LOG2E, spec.padded_queries, -jnp.inf)}
    out, lse = forward(spec, tiles, arrays)
    natural = lse[:, :, : level.parent].transpose(0, 2, 1) * math.log(2.0)
    return out.reshape(x["v"].shape[0], -1, *out.shape[2:]), natural.reshape(x["v"].shape[0], -1, spec.heads)


@dataclass(frozen=True)
class Recomputed:
    """What both backward kernels of a level need."""

    options: Options
    spec: LevelSpec
    own: tuple[int, ...]
    leaves: Leaves
    arrays: dict[str, Array]
    table: Array | None


def recompute(options: Options, x: Leaves, level: Level, q: Array, keys: Array, do: Array, lse: Array) -> Recomputed:
    """lse: [B, T, H], natural, of whole rows, +inf where nothing is seen."""
    options = _options(options, level)
    leaves = _leaves(x, level, q, keys)
    spec, own = fused.gradient_spec(options, leaves)
    spec = level_spec(spec, level)
    arrays = fused.inputs_of(options, spec, leaves)
    lines = fused.lines(_parents(lse, level) * LOG2E, spec.padded_queries, jnp.inf)
    arrays |= {"do": _parents(do, level), "lse": lines}
    return Recomputed(options, spec, own, leaves, arrays, fused.prior_table(options, spec, leaves))


def _delta(state: Recomputed, delta: Array) -> Array:
    return fused.lines(_parents(delta, state.spec.level), state.spec.padded_queries)


def _tokens(state: Recomputed, lines: Array, batch: int) -> Array:
    """[B · parents, H, padded parent] -> [B, T, H]."""
    rows = lines[:, :, : state.spec.level.parent].transpose(0, 2, 1)
    return rows.reshape(batch, -1, rows.shape[2])


def query_side(state: Recomputed, delta: Array) -> dict[str, Any]:
    """dq [B, T, H, D] (of the queries at their children's left edge) and, where asked for, params, sharpness and rows
    (Σ_j d(logits)) [B, T, H]. delta [B, T, H]: Σ do·o − dlse of whole rows."""
    spec, batch = state.spec, delta.shape[0]
    sums = fused.query_sums(
        state.options, spec, state.leaves, state.arrays, _delta(state, delta), state.table, state.own
    )
    out: dict[str, Any] = {"dq": sums["dq"].reshape(batch, -1, *sums["dq"].shape[2:])}
    if spec.prior:
        tiles = state.options.tiles[1]
        out["params"] = fused.parameter_gradients(spec, tiles.rows, state.leaves["params"], sums, state.own)
    if spec.sharpness:
        out["sharpness"] = _tokens(state, sums["sharpness"], batch) * spec.scale
    if spec.gates:
        out["rows"] = _tokens(state, sums["rows"], batch)
    return out


def key_side(state: Recomputed, delta: Array) -> dict[str, Array]:
    """keys, v [B, parents · stored, K, ·] (gradients of the carried keys and of the values beside them) and, for gates,
    columns [B, T, H] (Σ_i of the gradient of the gate term)."""
    spec, batch = state.spec, delta.shape[0]
    sums = fused.key_sums(spec, state.options.tiles[2], state.leaves, state.arrays, _delta(state, delta), state.table)
    out = {name: sums[n].reshape(batch, -1, *sums[n].shape[2:]) for name, n in (("keys", "dk"), ("v", "dv"))}
    if spec.gates:
        columns = fold(sums["gates"][:, :, : spec.level.stored].transpose(0, 2, 1), spec.level)
        if spec.sharpness:
            columns = columns / (spec.scale * LOG2E)
        out["columns"] = columns.reshape(batch, -1, spec.heads)
    return out
