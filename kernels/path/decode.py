"""PaTH after the first token: chunked prefill and one-token decode against cached keys (arXiv 2505.16381, section 3.4).

A cached key is kept carried to the newest token: k_j holds H_t … H_{j+1} k_j, in float32, so that a thousand small
rotations do not round it away. A chunk of new tokens is one more span of the row: its queries go to the chunk's left
edge to meet the cached keys, and all keys go on to its right edge.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels.attention.api import DistancePrior, attention
from kernels.attention.gates import running_sums
from kernels.path.api import path_attention
from kernels.path.plan import choose_plan
from kernels.path.transport import matmul, span, transpose

Array = jax.Array


class Chunk(NamedTuple):
    """A chunk of T tokens as the rest of the row sees it, float32 (float64 for float64 inputs).

    q [B, T, H, D]: queries at the left edge. k [B, T, Hkv, D]: keys at the right edge. m [B, Hkv, D, D]: moves a row of
    keys over the whole chunk, k m.
    """

    q: Array
    k: Array
    m: Array


def summarise(q: Array, k: Array, w: Array, beta: Array) -> Chunk:
    """The chunk of q [B, T, H, D], k, w [B, T, Hkv, D], beta [B, T, Hkv] in time and memory linear in T."""
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    plan = choose_plan(length, dim)

    def cut(x: Array) -> Array:  # [B, T, n, …] -> [N, B, n, S, …]; what is added has beta = 0
        x = jnp.pad(x.astype(wide), [(0, 0), (0, plan.length - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, plan.count, plan.size, *x.shape[2:]), (1, 3), (0, 2))

    grouped = cut(q).reshape(plan.count, batch, kv_heads, heads // kv_heads, plan.size, dim)
    parts = lax.map(lambda x: span(*x, plan.block)[1:], (grouped, cut(k), cut(w), cut(beta)))
    to_left, to_right, whole = _products(parts[2])
    q_left = matmul(parts[0], transpose(to_left)[:, :, :, None]).reshape(plan.count, batch, heads, plan.size, dim)
    return Chunk(_uncut(q_left, length), _uncut(matmul(parts[1], to_right), length), whole)


def _products(m: Array) -> tuple[Array, Array, Array]:
    """Of m [N, …, D, D]: the products before each entry, those after each, and the product of all."""
    eye = jnp.broadcast_to(jnp.eye(m.shape[-1], dtype=m.dtype), (1, *m.shape[1:]))
    before = lax.associative_scan(matmul, jnp.concatenate([eye, m], 0))
    after = lax.associative_scan(lambda a, b: matmul(b, a), jnp.concatenate([m, eye], 0), reverse=True)
    return before[:-1], after[1:], before[-1]


def _uncut(x: Array, length: int) -> Array:
    """[N, B, n, S, D] -> [B, T, n, D]."""
    x = jnp.moveaxis(x, (0, 3), (1, 2))
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]


def carry_keys(k: Array, w: Array, beta: Array, segment_ids: Array | None = None) -> Array:
    """Keys of a prefix at its right edge: H_last … H_{j+1} k_j for every j, [B, T, Hkv, D] float32, in linear time.

    k, w [B, T, Hkv, D], beta [B, T, Hkv]; segment_ids [B, T]: the transitions of tokens with a negative id are ignored.
    """
    return summarise(k, k, w, _blank(beta, segment_ids)).k


def _blank(x: Array, segment_ids: Array | None) -> Array:
    return x if segment_ids is None else jnp.where((segment_ids >= 0)[:, :, None], x, 0)


def path_extend(
    q: Array,
    k: Array,
    v: Array,
    w: Array,
    beta: Array,
    *,
    past_k: Array,
    past_v: Array,
    past_positions: Array,
    past_segment_ids: Array,
    positions: Array,
    segment_ids: Array,
    past_log_gates: Array | None = None,
    log_gates: Array | None = None,
    scale_gates: bool = False,
    prior: DistancePrior | None = None,
    sharpness: Array | None = None,
    sharpen_prior: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array, Array]:
    """Attend with T new tokens to S cached ones and to themselves; carry all keys to the last new token.

    q [B, T, H, D], k, w [B, T, Hkv, D], v [B, T, Hkv, Dv], beta [B, T, Hkv], log_gates, sharpness [B, T, H], as in
    `path_attention`. past_k [B, S, Hkv, D] float32 at the edge before the new tokens, past_v [B, S, Hkv, Dv],
    past_log_gates [B, S, H] per token. positions [B, T], past_positions [B, S] int32 and segment_ids [B, T],
    past_segment_ids [B, S] int32 decide who sees whom; a negative id is padding or an empty slot. The real tokens of a
    row stand next to each other in the chunk.

    Returns (o [B, T, H, Dv] in q's dtype, past_k carried on [B, S, Hkv, D], the new keys carried [B, T, Hkv, D] float32).
    """
    beta = _blank(beta, segment_ids)
    gates = None if log_gates is None else _blank(log_gates, segment_ids)
    if past_k.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(f"past_k has dtype {past_k.dtype}; carried keys are kept in float32")
    if (log_gates is None) != (past_log_gates is None):
        raise ValueError("log_gates and past_log_gates must both be given or both be None")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    common: dict[str, Any] = {
        "prior": prior,
        "sharpness": sharpness,
        "sharpen_prior": sharpen_prior,
        "scale": scale,
        "implementation": implementation,
        "return_lse": True,
    }
    if q.shape[1] == 1:
        carried_q, carried_k = q, k.astype(past_k.dtype)
        past_k = _reflect(past_k, w, beta)
        own = attention(q, k, v, segment_ids=segment_ids, **common)
    else:
        chunk = summarise(q, k, w, beta)
        carried_q, carried_k = chunk.q, chunk.k
        own = path_attention(
            q, k, v, w, beta, log_gates=gates, scale_gates=scale_gates, segment_ids=segment_ids, **common
        )
    past = attention(
        carried_q,
        past_k,
        past_v,
        log_gates=_gate_sums(past_log_gates, gates, past_segment_ids, scale if scale_gates else 1.0),
        segment_ids=(segment_ids, past_segment_ids),
        positions=positions,
        kv_positions=past_positions,
        **common,
    )
    if q.shape[1] > 1:
        past_k = jnp.einsum("bshd,bhde->bshe", past_k, chunk.m, precision=lax.Precision.HIGHEST)
    return _merge(own, past).astype(q.dtype), past_k, carried_k


def _reflect(k: Array, w: Array, beta: Array) -> Array:
    """H k for cached keys k [B, S, Hkv, D] and one token's w [B, 1, Hkv, D], beta [B, 1, Hkv]."""
    w = w.astype(k.dtype)
    along = (k * w).sum(-1) * beta.astype(k.dtype)
    return k - along[..., None] * w


def _gate_sums(past: Array | None, new: Array | None, past_ids: Array, factor: float) -> Any:
    """(c_q, c_k): gates between a cached key and a query as c_q − c_k, both counted from the edge of the cache.

    Near keys have small sums, so a difference keeps its resolution where it matters, however long the cache is.
    """
    if past is None or new is None:
        return None
    past = jnp.where((past_ids >= 0)[:, :, None], past, 0)
    to_edge = jnp.flip(sum(running_sums(jnp.flip(past, 1))), 1) - past  # of the tokens after each key
    return factor * sum(running_sums(new)), -factor * to_edge


def _merge(a: tuple[Array, Array], b: tuple[Array, Array]) -> Array:
    """Attention over the union of two sets of keys from (o, lse) over each; o = 0 where both are empty."""
    top = jnp.maximum(a[1], b[1])
    top = jnp.where(top == -jnp.inf, 0, top)
    weight_a, weight_b = jnp.exp(a[1] - top), jnp.exp(b[1] - top)
    total = weight_a + weight_b
    total = jnp.where(total > 0, total, 1)
    share = lambda weight, o: (weight / total)[..., None] * o.astype(weight.dtype)
    return share(weight_a, a[0]) + share(weight_b, b[0])
