"""PaTH after the first token: chunked prefill and one-token decode against cached keys (arXiv 2505.16381, section 3.4).

A cached key is kept where the newest token left it: slot j holds H_t … H_{j+1} k_j, in float32, so that thousands of
small steps do not round it away. Attention over the cache is then plain attention. New tokens are one more span of the
row (`transport.Span`): their queries go to the span's left edge to meet the cached keys, the cached keys and their own
go on to its right edge. Gates between a cached key and a query are the gates after the key, summed from the end of the
cache, plus the gates of the new tokens up to the query: both sums have one sign, so nothing cancels.

`path_extend` serves any number of new tokens and rewrites the cache once per call. `lazy.lazy_token` serves one token
and rewrites the cache every few tokens.

Everything here is for inference: correct under jax.grad as well, but not made for it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels.attention.api import DistancePrior, attention
from kernels.attention.call import check_prior
from kernels.attention.checks import check_array, check_flag, check_scale
from kernels.attention.gates import cut_shut
from kernels.attention.union import Attended, union
from kernels.path.api import path_attention
from kernels.path.call import blank, check_rows, check_segments, check_transitions
from kernels.path.plan import choose_plan
from kernels.path.transport import matmul, span, transpose

Array = jax.Array


class Chunk(NamedTuple):
    """T tokens as the rest of the row sees them, float32 (float64 for float64 inputs).

    q [B, T, H, D]: queries at the left edge. k [B, T, Hkv, D]: keys at the right edge. m [B, Hkv, D, D]: moves a row of
    keys over the whole chunk, k m.
    """

    q: Array
    k: Array
    m: Array


def summarise(q: Array, k: Array, w: Array, beta: Array) -> Chunk:
    """The chunk of q [B, T, H, D], k, w [B, T, Hkv, D], beta [B, T, Hkv], in time and memory linear in T.

    Spans of a superblock each; what lies before and after each of them are running products of the spans' matrices, by
    `lax.associative_scan` (log N steps deep, and at N D³ cheap next to the spans themselves).
    """
    batch, length, heads, dim = q.shape
    kv_heads, wide = k.shape[2], w.dtype
    plan = choose_plan(length, dim)

    def cut(x: Array) -> Array:  # [B, T, n, ...] -> [N, B, n, S, ...]; what is added has beta = 0
        x = jnp.pad(x.astype(wide), [(0, 0), (0, plan.length - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, plan.superblocks, plan.size, *x.shape[2:]), (1, 3), (0, 2))

    def uncut(x: Array) -> Array:  # and back
        x = jnp.moveaxis(x, (0, 3), (1, 2))
        return x.reshape(batch, plan.length, *x.shape[3:])[:, :length]

    grouped = cut(q).reshape(plan.superblocks, batch, kv_heads, heads // kv_heads, plan.size, dim)
    q_left, k_right, m = lax.map(
        lambda x: span(x[0], x[1], x[2], x[3], plan.block)[1:], (grouped, cut(k), cut(w), cut(beta))
    )
    before, after, whole = _running_products(m)
    q_left = matmul(q_left, transpose(before)[:, :, :, None]).reshape(plan.superblocks, batch, heads, plan.size, dim)
    return Chunk(uncut(q_left), uncut(matmul(k_right, after)), whole)


def _running_products(m: Array) -> tuple[Array, Array, Array]:
    """Of m [N, …, D, D]: the products before each entry, those after each, and the product of all."""
    eye = jnp.broadcast_to(jnp.eye(m.shape[-1], dtype=m.dtype), (1, *m.shape[1:]))
    before = lax.associative_scan(matmul, jnp.concatenate([eye, m], 0))
    after = lax.associative_scan(lambda a, b: matmul(b, a), jnp.concatenate([m, eye], 0), reverse=True)
    return before[:-1], after[1:], before[-1]


def carry_keys(k: Array, w: Array, beta: Array, segment_ids: Array | None = None) -> Array:
    """Keys of a prefix at its right edge: H_last … H_{j+1} k_j for every j, in time and memory linear in T.

    k: [B, T, Hkv, D] floating. w: [B, T, Hkv, D], beta: [B, T, Hkv] float32. segment_ids: [B, T] int; the transitions
    of tokens with a negative id are ignored, and their own keys come back as 0. Returns [B, T, Hkv, D] in w's dtype.

    Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    check_array("k", k, {"B": None, "T": None, "Hkv": None, "D": None})
    check_transitions(w, beta, k)
    check_segments(segment_ids, *k.shape[:2])
    k, w, beta = (blank(segment_ids, x) for x in (k, w, beta))
    no_queries = jnp.zeros((*k.shape[:2], 0, k.shape[3]), w.dtype)
    return summarise(no_queries, k, w, beta).k


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

    The same numbers as `path_attention` over the whole row. Memory O(S + T): blocks of the cache are visited in turn.
    One token (T = 1) costs one rank-1 update of the cache and one pass over it.

    Args:
      q: [B, T, H, D]. k, w: [B, T, Hkv, D]. v: [B, T, Hkv, Dv]. beta: [B, T, Hkv]. log_gates, sharpness: [B, T, H] or
        None. As in `path_attention`, like the options.
      past_k: [B, S, Hkv, D] float32, carried to the token before the new ones (by this function or `carry_keys`).
      past_v: [B, S, Hkv, Dv]. past_log_gates: [B, S, H] float32, the gate of each cached token, in storage order.
      positions: [B, T] int, past_positions: [B, S] int. A query sees cached keys at or before its position.
      segment_ids: [B, T] int, past_segment_ids: [B, S] int. A query sees keys of its own id only. A negative id is
        padding or a slot not yet written: seen by nobody, its transition and gate ignored, its content irrelevant.
        Rows may be ragged, with padding anywhere. Positions of one document's tokens go up by one from token to token.

    Returns:
      o [B, T, H, Dv] in q's dtype (0 for padding); past_k carried over the new tokens [B, S, Hkv, D]; the new keys
      carried to the last new token [B, T, Hkv, D], in w's dtype.

    Raises:
      ValueError or TypeError that names the argument, its value and what would be right.
    """
    check_rows(q, k, v, w, beta)
    batch, length, heads, dim = q.shape
    check_past(past_k, past_v, past_positions, past_segment_ids, past_log_gates, k, v, heads)
    check_tokens(positions, segment_ids, log_gates, sharpness, batch, length, heads)
    check_both_gates(log_gates, past_log_gates)
    check_prior(prior, heads)
    factor = check_scale(scale, dim)
    options: dict[str, Any] = {
        "prior": prior,
        "sharpen_prior": check_flag("sharpen_prior", sharpen_prior),
        "scale": factor,
    }
    gate_factor = factor if check_flag("scale_gates", scale_gates) else 1.0
    w, beta, q, k, v = (blank(segment_ids, x) for x in (w, beta, q, k, v))
    gates, sharpness = blank(segment_ids, log_gates), blank(segment_ids, sharpness, 1)
    wide_q = q.astype(w.dtype)
    sums = None
    if gates is not None and past_log_gates is not None:
        past_gates = blank(past_segment_ids, past_log_gates)
        sums = (gate_factor * jnp.cumsum(cut_shut(gates), axis=1), -gate_factor * sums_after(past_gates))
    options |= {"sharpness": sharpness, "implementation": implementation, "return_lse": True}

    def past(queries: Array, keys: Array) -> Attended:
        return attention(
            queries,
            keys,
            past_v,
            log_gates=sums,
            segment_ids=(segment_ids, past_segment_ids),
            positions=positions,
            kv_positions=past_positions,
            **options,
        )

    if length == 1:
        past_k = reflect(past_k, w, beta)
        own = attend_self(wide_q, k, v, segment_ids, prior, sharpness, sharpen_prior, factor)
        return union(own, past(wide_q, past_k))[0].astype(q.dtype), past_k, k.astype(w.dtype)
    chunk = summarise(q, k, w, beta)
    own = attend_chunk(wide_q, k, v, w, beta, gates, segment_ids, scale_gates=scale_gates, **options)
    out = union(own, past(chunk.q, past_k))[0].astype(q.dtype)
    return out, move_keys(past_k, chunk.m), chunk.k


# ---- Checks ----


def check_past(
    past_k: Any, past_v: Any, positions: Any, segment_ids: Any, log_gates: Any, k: Array, v: Array, heads: int
) -> None:
    """Raise unless the cached arrays fit each other and the new keys and values."""
    batch, _, kv_heads, dim = k.shape
    check_array("past_k", past_k, {"B": batch, "S": None, "Hkv": kv_heads, "D": dim}, "float32")
    slots: dict[str, int | None] = {"B": batch, "S": past_k.shape[1]}
    check_array("past_v", past_v, slots | {"Hkv": kv_heads, "Dv": v.shape[3]})
    check_array("past_positions", positions, slots, "integer")
    check_array("past_segment_ids", segment_ids, slots, "integer")
    if log_gates is not None:
        check_array("past_log_gates", log_gates, slots | {"H": heads}, "float32")
    if past_k.shape[1] == 0:
        raise ValueError("past_k has shape S=0, must have at least one slot (an empty slot has a negative segment id)")


def check_tokens(
    positions: Any, segment_ids: Any, log_gates: Any, sharpness: Any, batch: int, length: int, heads: int
) -> None:
    """Raise unless the per-token arrays of the new tokens have the right shapes and dtypes."""
    tokens: dict[str, int | None] = {"B": batch, "T": length}
    check_array("positions", positions, tokens, "integer")
    check_array("segment_ids", segment_ids, tokens, "integer")
    for name, x in (("log_gates", log_gates), ("sharpness", sharpness)):
        if x is not None:
            check_array(name, x, tokens | {"H": heads}, "float32")


def check_both_gates(log_gates: Any, past_log_gates: Any) -> None:
    """Raise unless the new tokens and the cached ones have gates, or neither have."""
    if (log_gates is None) != (past_log_gates is None):
        given, missing = ("log_gates", "past_log_gates") if past_log_gates is None else ("past_log_gates", "log_gates")
        raise ValueError(f"{given} is given and {missing} is None: both or neither")


# ---- Parts ----


def reflect(k: Array, w: Array, beta: Array) -> Array:
    """H k for keys k [B, S, Hkv, D] and one token's w [B, 1, Hkv, D], beta [B, 1, Hkv]: one rank-1 update."""
    w = w.astype(k.dtype)
    along = (k * w).sum(-1) * beta.astype(k.dtype)
    return k - along[..., None] * w


def move_keys(k: Array, m: Array) -> Array:
    """Keys k [B, S, Hkv, D] over a span with m [B, Hkv, D, D]."""
    return jnp.einsum("bshd,bhde->bshe", k, m.astype(k.dtype), precision=lax.Precision.HIGHEST)


def sums_after(log_gates: Array) -> Array:
    """For each slot of [B, S, H], the sum over the slots after it."""
    log_gates = cut_shut(log_gates)
    shifted = jnp.concatenate([log_gates[:, 1:], jnp.zeros_like(log_gates[:, :1])], axis=1)
    return lax.cumsum(shifted, axis=1, reverse=True)


def attend_self(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    prior: DistancePrior | None,
    sharpness: Array | None,
    sharpen_prior: bool,
    scale: float,
) -> Attended:
    """A single token's attention to itself: o = v with lse its own logit, q [B, 1, H, D], k, v [B, 1, Hkv, ·]."""
    groups = q.shape[2] // k.shape[2]
    logit = scale * (q * jnp.repeat(k.astype(q.dtype), groups, axis=2)).sum(-1)
    r = jnp.ones_like(logit) if sharpness is None else sharpness
    here = jnp.zeros((1, 1, 1), logit.dtype)
    if prior is not None:
        own = lambda params: prior.log_prior(params, jnp.zeros((), jnp.int32))
        here = jax.vmap(own)(prior.params).astype(logit.dtype)[None, None, :]
    logit = r * (logit + here) if sharpen_prior else r * logit + here
    real = (segment_ids >= 0)[..., None]
    o = jnp.where(real[..., None], jnp.repeat(v.astype(q.dtype), groups, axis=2), 0)
    return o, jnp.where(real, logit, -jnp.inf)


def attend_chunk(
    q: Array,
    k: Array,
    v: Array,
    w: Array,
    beta: Array,
    log_gates: Array | None,
    segment_ids: Array,
    *,
    sharpness: Array | None,
    **options: Any,
) -> Attended:
    """The new tokens' attention to themselves. A prior counts tokens, so padding must not stand between them."""
    if options["prior"] is None:
        return path_attention(
            q, k, v, w, beta, log_gates=log_gates, sharpness=sharpness, segment_ids=segment_ids, **options
        )
    order = jnp.argsort(segment_ids < 0, axis=1, stable=True)

    def take(x: Any, index: Array) -> Any:
        return x if x is None else jnp.take_along_axis(x, jnp.expand_dims(index, range(2, x.ndim)), axis=1)

    o, lse = path_attention(
        *(take(x, order) for x in (q, k, v, w, beta)),
        log_gates=take(log_gates, order),
        sharpness=take(sharpness, order),
        segment_ids=take(segment_ids, order),
        **options,
    )
    back = jnp.argsort(order, axis=1)
    return take(o, back), take(lse, back)
