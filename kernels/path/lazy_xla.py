"""Attention of one token to cached keys: products and sums that XLA turns into one pass over keys, one over values.

Not `kernels.attention.xla`: keys are float32 and values of 16 bits, and bringing them to one type would copy the values
at every token. In the form of a backend of `lazy.lazy_token`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels.attention.call import Call

Array = jax.Array


def supports(call: Call) -> str | None:
    """None: it serves every call of one token."""
    return None if call.q.shape[1] == 1 else f"{call.q.shape[1]} queries are more than one"


def attend(call: Call) -> tuple[Array, Array]:
    """(o [B, 1, H, Dv] in q's dtype, lse [B, 1, H]); positions and segments are given."""
    q, k, v = call.q, call.k, call.v
    batch, slots, kv_heads, _ = k.shape
    heads = q.shape[2]
    assert call.kv_segments is not None
    own, positions = call.positions()
    grouped = q.reshape(batch, 1, kv_heads, heads // kv_heads, -1)
    z = call.scale * (grouped * k[:, :, :, None, :].astype(q.dtype)).sum(-1).reshape(batch, slots, heads)
    seen = (call.kv_segments == call.q_segments) & (call.kv_segments >= 0) & (positions <= own)
    z = jnp.where(seen[:, :, None], _offset(call, z, jnp.where(seen, positions - own, -1)), -jnp.inf)
    top = z.max(1, keepdims=True)
    p = jnp.exp(z - jnp.where(top == -jnp.inf, 0, top))
    total = p.sum(1)
    some = total > 0
    safe = jnp.where(some, total, 1)
    share = p.reshape(batch, slots, kv_heads, -1, 1)
    values = jnp.where(seen[:, :, None, None], v.astype(q.dtype), 0)[:, :, :, None, :]  # 0 · NaN of an empty slot
    o = (share * values).sum(1).reshape(batch, 1, heads, -1) / safe[:, None, :, None]
    return o, jnp.where(some, top[:, 0] + jnp.log(safe), -jnp.inf)[:, None]


def _offset(call: Call, z: Array, distance: Array) -> Array:
    """z [B, S, H] with prior, gates and sharpness at distances [B, S]."""
    bias: Any = jnp.zeros((), z.dtype)
    if call.prior is not None:
        value = jax.vmap(call.prior.log_prior, in_axes=(0, None))(call.prior.params, distance)
        bias = jnp.moveaxis(value, 0, 2).astype(z.dtype)
    if call.gates is not None:
        q_hi, q_lo, k_hi, k_lo = call.gates
        bias = bias + ((q_hi - k_hi) + (q_lo - k_lo)).astype(z.dtype)
    if call.sharpness is None:
        return z + bias
    return call.sharpness * (z + bias) if call.sharpen_prior else call.sharpness * z + bias
