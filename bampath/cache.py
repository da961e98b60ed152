"""Decode state, typed: what every layer remembers of the tokens before, and where those tokens stand.

One layout serves every case. New tokens go to the next free slots of all rows at once; a padding token takes a slot as
well but carries a negative segment id, so nobody sees it. Rows may therefore be ragged and padded on either side,
prompts may come in chunks, and positions always follow the mask, never the padded width.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from bampath.positions.slots import Carry, Geometry
from kernels.attention.gates import Pair, extended_sums
from kernels.lsh.decode import Ring, empty_ring
from kernels.path.lazy import Pending, no_pending

Array = jax.Array
FOLD = 32  # tokens between two rewrites of carried keys
# What is known of where tokens stand before any is seen. "any": nothing. "begin": the cache is empty, and the real
# tokens of each row are one run without a gap, so slots are as far apart as positions. "continue": the same is true of
# each row from the first slot on, the new tokens included. A kernel can then go by the slots' order, which is faster.
Order = Literal["any", "begin", "continue"]


@struct.dataclass
class LayerCache:
    """One layer's memory of S slots.

    k, v [B, S, Hkv, D]: keys in the form that the scheme needs at the newest token (rotated for RoPE; for PaTH carried
    to the last token and kept in float32, so that rounding does not build up); log_gates [B, S, H] float32 or None:
    for PaTH the gates themselves, which move with its keys; gate_sums: elsewhere their running sums as a pair (hi, lo)
    (`kernels.attention.gates`), to which a new token adds without reading the old ones;
    carry: state of the scheme's parts, such as the last inputs of a short convolution; ring: instead of k and v (which
    then have no slots) where no query looks further back than a fixed number of keys; pending: for PaTH,
    transitions that old keys still lack (`kernels.path.lazy`), folded into them every FOLD single tokens.
    """

    k: Array
    v: Array
    log_gates: Array | None
    gate_sums: Pair | None
    carry: Carry
    ring: Ring | None = None
    pending: Pending | None = None


@struct.dataclass
class Cache:
    """The memory of a model.

    layers: one LayerCache each; positions, segment_ids [B, S] int32 of the slots (id -1: empty or padding);
    used: int32 scalar, slots written so far; next_position [B] int32, tokens (without padding) seen by each row.
    """

    layers: tuple[LayerCache, ...]
    positions: Array
    segment_ids: Array
    used: Array
    next_position: Array

    @property
    def capacity(self) -> int:
        return self.positions.shape[1]


@struct.dataclass
class View:
    """What one call sees of the cache: its own T tokens, and the S slots before (`past_*`) and after it is written.

    start: int32 scalar, first slot to write; positions, ids [B, T]; slot_positions, slot_ids, past_ids [B, S].
    order: see `Order`; padded: there may be padding among the new tokens.
    """

    start: Array
    positions: Array
    ids: Array
    slot_positions: Array
    slot_ids: Array
    past_ids: Array
    order: Order = struct.field(pytree_node=False, default="any")
    padded: bool = struct.field(pytree_node=False, default=True)


def look(cache: Cache, mask: Array, order: Order = "any", padded: bool = True) -> View:
    """Place new tokens in the cache. mask [B, T] bool: True for a real token, False for padding (none if not `padded`).

    `order` is a promise that nothing checks here: `bampath.generate.prefill` makes it where it knows.
    """
    steps = jnp.cumsum(mask, axis=1, dtype=jnp.int32)
    positions = jnp.where(mask, cache.next_position[:, None] + steps - 1, 0)
    ids = jnp.where(mask, 0, -1).astype(jnp.int32)
    return View(
        start=cache.used,
        positions=positions,
        ids=ids,
        slot_positions=write(cache.positions, positions, cache.used),
        slot_ids=write(cache.segment_ids, ids, cache.used),
        past_ids=cache.segment_ids,
        order=order,
        padded=padded,
    )


def advance(cache: Cache, view: View, layers: tuple[LayerCache, ...]) -> Cache:
    """The cache after a call: the layers' new memories and the books that say where everything stands."""
    return Cache(
        layers=layers,
        positions=view.slot_positions,
        segment_ids=view.slot_ids,
        used=cache.used + view.ids.shape[1],
        next_position=cache.next_position + (view.ids >= 0).sum(axis=1, dtype=jnp.int32),
    )


def write(slots: Array, new: Array, start: Array) -> Array:
    """Put new [B, T, …] into slots [B, S, …] at slot `start` (S >= start + T is the caller's duty)."""
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), start, axis=1)


def to_the_end(slots: Array, view: View) -> Array:
    """slots [B, S, …] turned until the newest token stands in the last slot; the empty ones are then in front."""
    return jnp.roll(slots, slots.shape[1] - view.start - view.ids.shape[1], axis=1)


def append_gates(sums: Pair, log_gates: Array, view: View) -> tuple[Pair, Pair]:
    """Sums [B, T, H] of the new tokens, which go on from the slot before them, and of all slots with them in it."""
    log_gates = jnp.where((view.ids >= 0)[:, :, None], log_gates, 0.0)  # padding forgets nothing
    last = lambda x: jnp.where(view.start > 0, jnp.take(x, jnp.maximum(view.start - 1, 0), axis=1), 0.0)
    new = extended_sums((last(sums[0]), last(sums[1])), log_gates)
    return new, (write(sums[0], new[0], view.start), write(sums[1], new[1], view.start))


def empty_layer(
    geometry: Geometry,
    batch: int,
    capacity: int,
    dtype: Any,
    *,
    carried_keys: bool,
    gates: bool,
    carry: Carry,
    reach: int | None,
) -> LayerCache:
    """A layer's memory before the first token. `carried_keys`: PaTH; `gates`: a forget gate is remembered too; `reach`:
    how many keys are enough, if not all are needed."""
    ring = None
    if reach is not None:
        ring = empty_ring(batch, min(reach, capacity), geometry.kv_heads, geometry.head_dim, geometry.head_dim, dtype)
        capacity = 0
    shape = (batch, capacity, geometry.kv_heads, geometry.head_dim)
    sums = lambda: jnp.zeros((batch, capacity, geometry.heads), jnp.float32)
    return LayerCache(
        k=jnp.zeros(shape, jnp.float32 if carried_keys else dtype),
        v=jnp.zeros(shape, dtype),
        log_gates=sums() if gates and carried_keys else None,
        gate_sums=(sums(), sums()) if gates and not carried_keys else None,
        carry=carry,
        ring=ring,
        pending=no_pending(batch, geometry.kv_heads, geometry.head_dim, 0) if carried_keys else None,
    )


def empty(layers: tuple[LayerCache, ...], batch: int, capacity: int) -> Cache:
    """A cache before the first token."""
    return Cache(
        layers=layers,
        positions=jnp.zeros((batch, capacity), jnp.int32),
        segment_ids=jnp.full((batch, capacity), -1, jnp.int32),
        used=jnp.zeros((), jnp.int32),
        next_position=jnp.zeros((batch,), jnp.int32),
    )
