"""One-token PaTH decode that rewrites the cache every few tokens instead of at each one.

The keys of all tokens up to the last fold stay where that fold left them. The transitions since then are kept as one
product m = H_first … H_newest per key head (D × D, one rank-1 update per token); a query meets the old keys as q mᵀ.
The keys of the tokens since the fold live in a small window that is moved eagerly. When the window is full, it and m
are folded into the cache: k ← k m, and m starts again from the identity. Exactly the definition, at 1/F of the cache
writes, and each cached key is rounded once in F tokens.

    state = lazy_state(k_end, v, positions=…, segment_ids=…, log_gates=…, capacity=…, window=32)
    out, state = lazy_step(state, q, k, v, w, beta, positions=…, segment_ids=…, log_gates=…)      # T = 1, repeated

Steps may run inside `lax.scan`; donate the state. The fold is a `lax.cond` whose other branch returns the cache as it
is, which XLA does without a copy.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels.attention.api import DistancePrior, attention
from kernels.attention.call import check_prior
from kernels.attention.checks import check_flag, check_scale
from kernels.path.call import blank, check_rows
from kernels.path.decode import check_past, check_tokens, merge, move_keys, reflect, sums_after

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Cached tokens.

    k [B, S, Hkv, D] float32, v [B, S, Hkv, Dv], positions, segment_ids [B, S] int32 (negative: padding or empty),
    gates [B, S, H]: the sum of the log gates after each token, or None.
    """

    k: Array
    v: Array
    positions: Array
    segment_ids: Array
    gates: Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LazyState:
    """What one layer remembers.

    old: tokens up to the last fold, keys and gate sums as of then; `used` (int32 scalar) of its slots are taken.
    window: the tokens since, up to date; `fill` (int32 scalar) of its F slots are taken.
    m [B, Hkv, D, D]: product of the transitions since the fold. gates [B, 1, H]: sum of the log gates since, or None.
    """

    old: Slots
    window: Slots
    m: Array
    gates: Array | None
    used: Array
    fill: Array


def lazy_state(
    k: Array,
    v: Array,
    *,
    positions: Array,
    segment_ids: Array,
    log_gates: Array | None = None,
    capacity: int | None = None,
    window: int = 32,
) -> LazyState:
    """The state after a prefix of T tokens.

    k: [B, T, Hkv, D] float32, keys carried to the prefix's right edge (by `carry_keys` or `path_extend`).
    v: [B, T, Hkv, Dv]. positions, segment_ids: [B, T] int; a negative id is padding. log_gates: [B, T, H] float32 or
    None. capacity: slots of the cache for the prefix, what is to be generated and one window (default: the prefix and a
    window). window: tokens between two folds.

    Raises ValueError or TypeError that names the argument, its value and what would be right.
    """
    heads = k.shape[2] if log_gates is None else log_gates.shape[-1]
    check_past(k, v, positions, segment_ids, log_gates, k[:, :1], v[:, :1], heads)
    batch, length, kv_heads, dim = k.shape
    if window < 1:
        raise ValueError(f"window={window} must be at least 1")
    capacity = length + window if capacity is None else capacity
    if capacity < length + window:
        raise ValueError(f"capacity={capacity} must be at least the prefix and one window, {length} + {window}")
    extra = capacity - length

    def extend(x: Array, value: int = 0) -> Array:
        return jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2), constant_values=value)

    sums = None if log_gates is None else sums_after(jnp.where((segment_ids >= 0)[..., None], log_gates, 0))
    old = Slots(
        extend(k),
        extend(v),
        extend(positions.astype(jnp.int32)),
        extend(segment_ids.astype(jnp.int32), -1),
        None if sums is None else extend(sums),
    )
    m = jnp.broadcast_to(jnp.eye(dim, dtype=k.dtype), (batch, kv_heads, dim, dim))
    gates = None if log_gates is None else jnp.zeros((batch, 1, heads), log_gates.dtype)
    return LazyState(old, _empty_window(old, window), m, gates, jnp.int32(length), jnp.int32(0))


def _empty_window(like: Slots, size: int) -> Slots:
    blank_of = lambda x, value: jnp.full((x.shape[0], size, *x.shape[2:]), value, x.dtype)
    empty = jax.tree.map(lambda x: blank_of(x, 0), like)
    return replace(empty, segment_ids=blank_of(like.segment_ids, -1))


def _write(slots: Slots, new: Slots, start: Array) -> Slots:
    return jax.tree.map(
        lambda x, part: lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, axis=1), slots, new
    )


def lazy_fold(state: LazyState) -> LazyState:
    """The same state with the window empty: old keys and gates brought up to date, the window's tokens behind them."""
    old = replace(state.old, k=move_keys(state.old.k, state.m))
    if old.gates is not None and state.gates is not None:
        old = replace(old, gates=old.gates + state.gates)
    eye = jnp.broadcast_to(jnp.eye(state.m.shape[-1], dtype=state.m.dtype), state.m.shape)
    return LazyState(
        old=_write(old, state.window, state.used),
        window=_empty_window(state.window, state.window.k.shape[1]),
        m=eye,
        gates=None if state.gates is None else jnp.zeros_like(state.gates),
        used=state.used + state.fill,
        fill=jnp.zeros_like(state.fill),
    )


def _append(
    state: LazyState, k: Array, v: Array, w: Array, beta: Array, gates: Array | None, positions: Array, ids: Array
) -> LazyState:
    """One token more: the window and m move by its transition, then its own key joins the window as it is."""
    window = replace(state.window, k=reflect(state.window.k, w, beta))
    sums = state.gates
    if gates is not None and sums is not None and window.gates is not None:
        window, sums = replace(window, gates=window.gates + gates), sums + gates
    token = Slots(k, v, positions, ids, None if gates is None else jnp.zeros_like(gates))
    w = w[:, 0, :, :].astype(state.m.dtype)
    along = (state.m * w[:, :, None, :]).sum(-1) * beta[:, 0, :, None].astype(state.m.dtype)
    m = state.m - along[..., None] * w[:, :, None, :]
    return replace(state, window=_write(window, token, state.fill), m=m, gates=sums, fill=state.fill + 1)


def lazy_step(
    state: LazyState,
    q: Array,
    k: Array,
    v: Array,
    w: Array,
    beta: Array,
    *,
    positions: Array,
    segment_ids: Array,
    log_gates: Array | None = None,
    scale_gates: bool = False,
    prior: DistancePrior | None = None,
    sharpness: Array | None = None,
    sharpen_prior: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Array, LazyState]:
    """Attend with one new token per row to all tokens before and to itself; fold first if the window is full.

    q [B, 1, H, D], k, w [B, 1, Hkv, D], v [B, 1, Hkv, Dv], beta [B, 1, Hkv], log_gates, sharpness [B, 1, H], positions,
    segment_ids [B, 1] and the options as in `path_extend`. The caller sees to it that the cache has room for the fold.

    Returns (o [B, 1, H, Dv] in q's dtype, the state with the token in it). Raises ValueError or TypeError.
    """
    check_rows(q, k, v, w, beta)
    batch, length, heads, dim = q.shape
    if length != 1:
        raise ValueError(f"q has T={length} tokens, must be 1: prefill with path_extend, then build a lazy_state")
    check_past(state.old.k, state.old.v, state.old.positions, state.old.segment_ids, state.old.gates, k, v, heads)
    check_tokens(positions, segment_ids, log_gates, sharpness, batch, length, heads)
    if (log_gates is None) != (state.gates is None):
        raise ValueError(
            f"log_gates is {'None' if log_gates is None else 'given'}, but not so when the state was built"
        )
    check_prior(prior, heads)
    factor = check_scale(scale, dim)
    gate_factor = factor if check_flag("scale_gates", scale_gates) else 1.0
    w, beta, q, k, v = (blank(segment_ids, x) for x in (w, beta, q, k, v))
    gates, sharpness = blank(segment_ids, log_gates), blank(segment_ids, sharpness, 1)
    state = lax.cond(state.fill == state.window.k.shape[1], lazy_fold, lambda s: s, state)
    state = _append(state, k, v, w, beta, gates, positions, segment_ids)
    wide_q = q.astype(w.dtype)
    groups = heads // k.shape[2]
    old_q = jnp.einsum(
        "bhgd,bhed->bhge",
        wide_q[:, 0].reshape(batch, -1, groups, dim),
        state.m.astype(w.dtype),
        precision=lax.Precision.HIGHEST,
    ).reshape(q.shape)

    def over(queries: Array, slots: Slots, so_far: Array | None) -> Any:
        sums = None
        if so_far is not None and slots.gates is not None:
            sums = (gate_factor * so_far, -gate_factor * slots.gates)
        return attention(
            queries,
            slots.k,
            slots.v,
            log_gates=sums,
            segment_ids=(segment_ids, slots.segment_ids),
            positions=positions,
            kv_positions=slots.positions,
            prior=prior,
            sharpness=sharpness,
            sharpen_prior=sharpen_prior,
            scale=factor,
            implementation=implementation,
            return_lse=True,
        )

    nothing = None if state.gates is None else jnp.zeros_like(state.gates)
    out = merge(over(old_q, state.old, state.gates), over(wide_q, state.window, nothing))
    return out.astype(q.dtype), state
