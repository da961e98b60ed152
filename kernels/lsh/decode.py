"""LSH attention of new tokens to a bounded memory of old ones.

No query looks further back than its longest block, so a ring of that many keys per row is all that decoding needs,
however long the text has grown. A token at position p lives in place p mod R; rows may be ragged and padded anywhere.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from kernels.attention.checks import check_array, check_scale
from kernels.lsh.call import Combine, check_combine, check_grids, plain
from kernels.lsh.grids import blocks_at

Array = jax.Array
QUERIES = 128  # looked at together: bounds the array of scores


@struct.dataclass
class Ring:
    """The last R positions of each row: k [B, R, Hkv, D], v [B, R, Hkv, Dv], positions [B, R] int32 (−1: empty)."""

    k: Array
    v: Array
    positions: Array


def empty_ring(batch: int, reach: int, kv_heads: int, head_dim: int, value_dim: int, dtype: Any) -> Ring:
    """A ring before the first token; reach: the longest block, see `lsh_extend`."""
    shape = (batch, reach, kv_heads)
    return Ring(
        jnp.zeros((*shape, head_dim), dtype), jnp.zeros((*shape, value_dim), dtype), jnp.full(shape[:2], -1, jnp.int32)
    )


def lsh_extend(
    q: Array,
    k: Array,
    v: Array,
    widths: Array,
    offsets: Array,
    ring: Ring,
    *,
    positions: Array,
    mask: Array,
    combine: Combine = "shared",
    scale: float | None = None,
) -> tuple[Array, Ring]:
    """Causal attention of T new tokens to the ring and to themselves: (o [B, T, H, Dv], the ring with them in it).

    The same numbers as `lsh_attention` over the whole row. q [B, T, H, D]; k [B, T, Hkv, D]; v [B, T, Hkv, Dv];
    positions [B, T] int32, growing along each row where mask [B, T] is true; false marks padding, which sees nothing
    and is not kept. The ring must hold R ≥ max(widths) positions: that is the caller's duty, as widths are data.
    """
    check_combine(combine)
    check_array("q", q, {"B": None, "T": None, "H": None, "D": None})
    batch, length, heads, dim = q.shape
    check_grids(widths, offsets, heads)
    widths, offsets = plain(widths), plain(offsets)
    check_array("positions", positions, {"B": batch, "T": length}, "integer")
    keys, values = jnp.concatenate([ring.k, k], 1), jnp.concatenate([ring.v, v], 1)
    at_key = jnp.concatenate([ring.positions, jnp.where(mask, positions, -1)], 1)
    attend = partial(_rows, check_scale(scale, dim), combine, widths, offsets, keys, values, at_key)
    at_query = jnp.where(mask, positions, -1)
    pieces = -(-length // QUERIES)
    if pieces == 1:
        return attend(q, at_query), _keep(ring, k, v, positions, mask)
    extra = pieces * QUERIES - length
    cut = lambda x, value: jnp.moveaxis(
        jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2), constant_values=value).reshape(
            batch, pieces, QUERIES, *x.shape[2:]
        ),
        1,
        0,
    )
    o = jnp.moveaxis(lax.map(lambda x: attend(*x), (cut(q, 0), cut(at_query, -1))), 0, 1)
    return o.reshape(batch, -1, *o.shape[3:])[:, :length], _keep(ring, k, v, positions, mask)


def _rows(
    scale: float,
    combine: Combine,
    widths: Array,
    offsets: Array,
    k: Array,
    v: Array,
    at_key: Array,
    q: Array,
    at_query: Array,
) -> Array:
    wide = jnp.promote_types(q.dtype, jnp.float32)
    group = q.shape[2] // k.shape[2]
    grouped = q.reshape(*q.shape[:2], k.shape[2], group, q.shape[3])
    logits = scale * jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=wide)
    logits = logits.reshape(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    first = jnp.moveaxis(blocks_at(at_query, widths, offsets)[0], 1, 3)  # [B, H, s, T]
    in_order = (at_key[:, None, :] <= at_query[:, :, None]) & (at_key[:, None, :] >= 0)
    sees = lambda m: in_order[:, None] & (at_key[:, None, None, :] >= first[:, :, m, :, None])
    samples = range(widths.shape[1])
    if combine == "shared":
        p = _softmax(logits, sum((sees(m).astype(wide) for m in samples), jnp.zeros_like(logits)))
    else:
        p = sum((_softmax(logits, sees(m).astype(wide)) for m in samples), jnp.zeros_like(logits)) / len(samples)
    p = p.reshape(q.shape[0], k.shape[2], group, q.shape[1], k.shape[1]).astype(v.dtype)
    v = jnp.where((at_key >= 0)[:, :, None, None], v, 0)
    o = jnp.einsum("bkgts,bskd->btkgd", p, v, preferred_element_type=wide)
    return o.reshape(*q.shape[:3], v.shape[-1]).astype(q.dtype)


def _softmax(logits: Array, weights: Array) -> Array:
    seen = weights > 0
    top = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, keepdims=True)
    e = weights * jnp.exp(jnp.where(seen, logits - jnp.where(jnp.isfinite(top), top, 0), -jnp.inf))
    total = e.sum(-1, keepdims=True)
    return e / jnp.where(total > 0, total, 1)


def _keep(ring: Ring, k: Array, v: Array, positions: Array, mask: Array) -> Ring:
    """The ring after the new tokens; of more than R of them the last R stay."""
    reach = ring.positions.shape[1]
    last = jnp.max(jnp.where(mask, positions, -1), axis=1, keepdims=True)
    place = jnp.where(mask & (positions > last - reach), positions % reach, reach)  # R: dropped
    put = lambda old, new: jax.vmap(lambda o, n, at: o.at[at].set(n.astype(o.dtype), mode="drop"))(old, new, place)
    return Ring(put(ring.k, k), put(ring.v, v), put(ring.positions, positions))
