"""Who sees whom, from absolute positions, segments, causality and a window: the one rule that every backend uses."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
_PAIRS = 2**20  # of queries and keys that are looked at together: bounds the memory of `last_visible`


def default_positions(length: int, kv_length: int) -> tuple[Array, Array]:
    """Positions [1, T] of the queries and [1, S] of the keys when none are given: queries align with the last keys."""
    keys = jnp.arange(kv_length, dtype=jnp.int32)[None]
    return jnp.arange(length, dtype=jnp.int32)[None] + (kv_length - length), keys


def visible(
    q_positions: Array,
    kv_positions: Array,
    q_segments: Array | None,
    kv_segments: Array | None,
    *,
    causal: bool,
    window: int | None,
) -> Array:
    """True where the query sees the key. Elementwise: pass queries as [..., T, 1] and keys as [..., 1, S].

    causal: the key's position is at most the query's. window w: the query is less than w positions past the key (and,
    when not causal, less than w before it). segments: equal and not negative; a negative id marks padding.
    """
    ahead = q_positions - kv_positions
    seen = ahead >= 0 if causal else jnp.full_like(ahead, True, dtype=bool)
    if window is not None:
        seen &= (ahead if causal else jnp.abs(ahead)) < window
    if q_segments is not None and kv_segments is not None:
        seen &= (q_segments == kv_segments) & (kv_segments >= 0)
    return seen


def last_visible(q_positions: Array, kv_positions: Array, segments: tuple[Array, Array] | None) -> Array:
    """Index in storage order of the last key at or before each query's position in its segment; −1 without one.

    q_positions [B, T], kv_positions [B, S] and segments ([B, T], [B, S]) int32 -> int32 [B, T], in O(T + S) memory.
    """
    keys = kv_positions.shape[1]
    block = min(keys, max(1, _PAIRS // q_positions.shape[1]))
    q_seg, k_seg = (None, None) if segments is None else (segments[0][:, :, None], segments[1])

    def seen_from(start: Any, size: int) -> Array:
        part = lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=1)[:, None, :]
        keys = None if k_seg is None else part(k_seg)
        return visible(q_positions[:, :, None], part(kv_positions), q_seg, keys, causal=True, window=None)

    def body(i: Any, latest: Array) -> Array:
        start = jnp.minimum(i * block, keys - block)
        index = start + jnp.arange(block, dtype=jnp.int32)
        return jnp.maximum(latest, jnp.where(seen_from(start, block), index[None, None], -1).max(-1))

    latest = jnp.full_like(seen_from(0, 1)[:, :, 0], -1, dtype=jnp.int32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(-(-keys // block)), body, latest)
