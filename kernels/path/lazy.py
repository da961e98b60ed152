"""One-token PaTH decode that rewrites the cache every few tokens instead of at each one.

The keys of all tokens up to the last fold stay where that fold left them. The transitions since then are kept as one
product m = H_first … H_newest per key head (D × D, one rank-1 update per token); a query meets the old keys as q mᵀ.
The keys of the tokens since the fold, at most `window`, are moved at every token. When the window is full, m is folded
into the old keys, k ← k m, and starts again from the identity. Exactly the definition, at 1 / window of the cache
writes, and each cached key is rounded once in so many tokens.

    pending = no_pending(...)                                          # with an empty cache, or after path_extend
    o, past_k, pending = lazy_token(q, k, v, w, beta, pending=pending, past_k=past_k, past_v=…, start=…, …)
    past_k, pending = fold(past_k, pending, start)                     # before several tokens at once: path_extend

Steps may run inside `lax.scan`; donate the cache. The fold is a `lax.cond` whose other branch returns the keys as they
are, which XLA does without a copy.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels import backends
from kernels.attention.api import DistancePrior
from kernels.attention.call import Call, check_prior
from kernels.attention.checks import check_flag, check_scale
from kernels.attention.union import union
from kernels.path import lazy_xla
from kernels.path.call import blank, check_rows
from kernels.path.decode import check_both_gates, check_past, check_tokens, move_keys, reflect, sums_after

Array = jax.Array
BACKENDS: dict[str, str] = {"xla": "kernels.path.lazy_xla", "triton_decode": "kernels.attention.triton_decode"}
# On an H200 "xla" is the faster one (docs/path.md): "triton_decode" is taken only when it is named.
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("xla",), "gpu": ("xla",), "tpu": ("xla",)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pending:
    """What the cached keys still lack.

    m [B, Hkv, D, D]: product of the transitions since the last fold, for the keys of slots before `folded` (int32
    scalar); the keys of the slots from there on are up to date.
    """

    m: Array
    folded: Array


def no_pending(batch: int, kv_heads: int, dim: int, used: Array | int, dtype: Any = jnp.float32) -> Pending:
    """Nothing pending, with `used` slots taken."""
    m = jnp.broadcast_to(jnp.eye(dim, dtype=dtype), (batch, kv_heads, dim, dim))
    return Pending(m, jnp.asarray(used, jnp.int32))


def fold(past_k: Array, pending: Pending, used: Array) -> tuple[Array, Pending]:
    """All keys [B, S, Hkv, D] up to date, and nothing pending; `used` slots (int32 scalar) are taken."""
    batch, slots, kv_heads, dim = past_k.shape
    old = (jnp.arange(slots) < pending.folded)[None, :, None, None]
    past_k = jnp.where(old, move_keys(past_k, pending.m), past_k)
    return past_k, no_pending(batch, kv_heads, dim, used, pending.m.dtype)


def _write(slots: Array, new: Array, start: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), start, axis=1)


def lazy_token(
    q: Array,
    k: Array,
    v: Array,
    w: Array,
    beta: Array,
    *,
    pending: Pending,
    past_k: Array,
    past_v: Array,
    past_positions: Array,
    past_segment_ids: Array,
    start: Array,
    positions: Array,
    segment_ids: Array,
    past_log_gates: Array | None = None,
    log_gates: Array | None = None,
    scale_gates: bool = False,
    prior: DistancePrior | None = None,
    sharpness: Array | None = None,
    sharpen_prior: bool = True,
    scale: float | None = None,
    window: int = 32,
    implementation: str | None = None,
) -> tuple[Array, Array, Pending]:
    """Attend with one new token per row to all tokens before and to itself, and put its key into the cache.

    The same numbers as `path_extend`, at one pass over the cache. q [B, 1, H, D], k, w [B, 1, Hkv, D], v
    [B, 1, Hkv, Dv], beta [B, 1, Hkv], log_gates, sharpness [B, 1, H], positions, segment_ids [B, 1] and the options as
    there. past_v, past_positions, past_segment_ids and past_log_gates [B, S, …] hold the new token already, at slot
    `start` (int32 scalar, less than S); past_k is as the last step left it. window: tokens between two folds.
    implementation: a name in BACKENDS for the attention to the cache, or None for the best one that supports the call
    ("triton_decode" splits long caches over the GPU in a kernel of its own); a named one never falls back.

    Returns (o [B, 1, H, Dv] in q's dtype, past_k with the token's key, what is pending). Raises ValueError or TypeError
    that names the argument, its value and what would be right.
    """
    check_rows(q, k, v, w, beta)
    batch, length, heads, dim = q.shape
    if length != 1:
        raise ValueError(f"q has T={length} tokens, must be 1: fold, then use path_extend")
    if window < 1:
        raise ValueError(f"window={window} must be at least 1")
    check_past(past_k, past_v, past_positions, past_segment_ids, past_log_gates, k, v, heads)
    check_tokens(positions, segment_ids, log_gates, sharpness, batch, length, heads)
    check_both_gates(log_gates, past_log_gates)
    check_prior(prior, heads)
    factor = check_scale(scale, dim)
    gate_factor = factor if check_flag("scale_gates", scale_gates) else 1.0
    w, beta, q, k = (blank(segment_ids, x) for x in (w, beta, q, k))
    sharpness = blank(segment_ids, sharpness, 1)
    full = start - pending.folded >= window
    past_k, pending = lax.cond(full, lambda: fold(past_k, pending, start), lambda: (past_k, pending))
    slots = past_k.shape[1]
    size = min(window, slots)
    first = jnp.minimum(pending.folded, slots - size)
    here = lambda x: lax.dynamic_slice_in_dim(x, first, size, axis=1)
    recent = (first + jnp.arange(size) >= pending.folded)[None, :, None, None]
    moved = jnp.where(recent, reflect(here(past_k), w, beta), here(past_k))
    past_k = _write(_write(past_k, moved, first), k, start)
    m = _transition(pending.m, w, beta)
    wide_q = q.astype(w.dtype)
    grouped = wide_q.reshape(batch, k.shape[2], heads // k.shape[2], dim)
    old_q = jnp.einsum("bhgd,bhed->bhge", grouped, m.astype(w.dtype), precision=lax.Precision.HIGHEST)
    after = None
    if past_log_gates is not None:
        after = gate_factor * sums_after(blank(past_segment_ids, past_log_gates))
    index = jnp.arange(slots)
    old = jnp.where((index < pending.folded)[None, :], past_segment_ids, -1)
    new = jnp.where(((first + jnp.arange(size)) >= pending.folded)[None, :], here(past_segment_ids), -1)
    options = (prior, sharpness, positions, segment_ids, factor, check_flag("sharpen_prior", sharpen_prior))
    call = _call(old_q.reshape(q.shape), past_k, past_v, past_positions, old, after, *options)
    before = backends.load(BACKENDS, backends.choose(BACKENDS, PREFERENCE, implementation, call)).attend(call)
    gates = None if after is None else here(after)
    recent_call = _call(wide_q, here(past_k), here(past_v), here(past_positions), new, gates, *options)
    return union(before, lazy_xla.attend(recent_call))[0].astype(q.dtype), past_k, replace(pending, m=m)


def _call(
    q: Array,
    k: Array,
    v: Array,
    kv_positions: Array,
    kv_segments: Array,
    after: Array | None,
    prior: DistancePrior | None,
    sharpness: Array | None,
    positions: Array,
    segment_ids: Array,
    scale: float,
    sharpen_prior: bool,
) -> Call:
    """One token against cached keys; after [B, S, H]: sums of the gates after each key, up to the token's own."""
    zeros = None if after is None else jnp.zeros_like(after)
    return Call(
        q=q,
        k=k,
        v=v,
        prior=prior,
        gates=None if after is None or zeros is None else (zeros[:, :1], zeros[:, :1], -after, zeros),
        sharpness=sharpness,
        q_positions=positions,
        kv_positions=kv_positions,
        q_segments=segment_ids,
        kv_segments=kv_segments,
        causal=True,
        window=None,
        scale=scale,
        sharpen_prior=sharpen_prior,
        zero_lows=True,
    )


def _transition(m: Array, w: Array, beta: Array) -> Array:
    """m times the transition of a token with w [B, 1, Hkv, D] and beta [B, 1, Hkv]."""
    w = w[:, 0, :, None, :].astype(m.dtype)
    along = (m * w).sum(-1) * beta[:, 0, :, None].astype(m.dtype)
    return m - along[..., None] * w
