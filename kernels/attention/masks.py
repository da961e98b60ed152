"""Who sees whom, from absolute positions, segments, causality and a window: the one rule that every backend uses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


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


def _fold_keys(
    step: Callable[[Array, Array, Array], Array],
    init: int,
    q_positions: Array,
    kv_positions: Array,
    segments: tuple[Array, Array] | None,
    causal: bool,
    window: int | None,
) -> Array:
    """Fold `step(total [B, T], visible [B, T, block], key indices [block])` over blocks of keys, in O(T + S) memory."""
    keys = kv_positions.shape[1]
    block = min(keys, max(1, 2**20 // q_positions.shape[1]))
    q_seg, k_seg = (None, None) if segments is None else (segments[0][:, :, None], segments[1])

    def seen_from(start: Any, size: int) -> Array:
        part = lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=1)[:, None, :]
        keys = None if k_seg is None else part(k_seg)
        return visible(q_positions[:, :, None], part(kv_positions), q_seg, keys, causal=causal, window=window)

    def body(i: Any, total: Array) -> Array:
        start = jnp.minimum(i * block, keys - block)
        index = start + jnp.arange(block, dtype=jnp.int32)
        return step(total, seen_from(start, block) & (index >= i * block)[None, None], index)

    total = jnp.full_like(seen_from(0, 1)[:, :, 0], init, dtype=jnp.int32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(-(-keys // block)), body, total)


def visible_counts(
    length: int,
    kv_length: int | None = None,
    *,
    positions: Array | None = None,
    kv_positions: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Array:
    """How many keys each query sees, int32 [B, T] ([1, T] when nothing given depends on the batch).

    Arguments as in `attention`; `kv_length` is `length` unless given. In O(T + S) memory.
    """
    kv_length = length if kv_length is None else kv_length
    q_default, k_default = default_positions(length, kv_length)
    q_pos = q_default if positions is None else jnp.atleast_2d(positions)
    k_pos = k_default if kv_positions is None else jnp.atleast_2d(kv_positions)
    segments = segment_ids if segment_ids is None or isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if positions is None and kv_positions is None and segments is None:
        first, last = jnp.zeros_like(q_pos), q_pos if causal else jnp.full_like(q_pos, kv_length - 1)
        if window is not None:
            first, last = jnp.maximum(first, q_pos - (window - 1)), jnp.minimum(last, q_pos + (window - 1))
        return jnp.maximum(0, jnp.minimum(last, kv_length - 1) - first + 1)
    count = lambda total, seen, index: total + seen.sum(-1, dtype=jnp.int32)
    return _fold_keys(count, 0, q_pos, k_pos, segments, causal, window)


def last_visible(q_positions: Array, kv_positions: Array, segments: tuple[Array, Array] | None) -> Array:
    """Index in storage order of the last key at or before each query's position in its segment; −1 without one."""
    latest = lambda total, seen, index: jnp.maximum(total, jnp.where(seen, index[None, None], -1).max(-1))
    return _fold_keys(latest, -1, q_positions, kv_positions, segments, True, None)
