"""Attention straight from its formula: dense, T × S in memory, float32 or float64. The oracle, not for training."""

import jax
import jax.numpy as jnp

from kernels.attention.call import Call
from kernels.attention.masks import visible

Array = jax.Array


def supports(call: Call) -> str | None:
    """Everything."""
    return None


def log_prior(call: Call, seen_BTS: Array) -> Array:
    """The prior [B or 1, H, T, S]; unseen pairs are evaluated at distance −1, so that they cannot make a NaN."""
    assert call.prior is not None
    q_pos, k_pos = call.positions()
    d_BTS = jnp.where(seen_BTS, k_pos[:, None, :] - q_pos[:, :, None], -1)
    return jax.vmap(call.prior.log_prior, in_axes=(0, None), out_axes=1)(call.prior.params, d_BTS)


def visibility(call: Call) -> Array:
    """Who sees whom, [B, T, S]."""
    q_pos, k_pos = call.positions()
    q_seg = None if call.q_segments is None else call.q_segments[:, :, None]
    k_seg = None if call.kv_segments is None else call.kv_segments[:, None, :]
    seen = visible(q_pos[:, :, None], k_pos[:, None, :], q_seg, k_seg, causal=call.causal, window=call.window)
    return jnp.broadcast_to(seen, (call.q.shape[0], *seen.shape[1:]))


def logits(call: Call) -> tuple[Array, Array]:
    """(logits [B, H, T, S], visible [B, T, S]); logits of unseen pairs are finite and meaningless."""
    seen = visibility(call)
    dtype = jnp.promote_types(call.q.dtype, jnp.float32)
    q = jnp.where(seen.any(2)[:, :, None, None], call.q.astype(dtype), 0)
    k = jnp.where(seen.any(1)[:, :, None, None], call.k.astype(dtype), 0)
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    content = call.scale * jnp.einsum("bthd,bshd->bhts", q, k)
    bias = jnp.zeros((1, 1, 1, 1), dtype)
    if call.prior is not None:
        bias = bias + log_prior(call, seen)
    if call.gates is not None:
        q_hi, q_lo, k_hi, k_lo = (jnp.swapaxes(g, 1, 2) for g in call.gates)
        gate = (q_hi[:, :, :, None] - k_hi[:, :, None, :]) + (q_lo[:, :, :, None] - k_lo[:, :, None, :])
        bias = bias + jnp.where(seen[:, None], gate, 0)
    if call.sharpness is None:
        return content + bias, seen
    r = jnp.where(seen.any(2)[:, None, :, None], jnp.swapaxes(call.sharpness, 1, 2)[:, :, :, None], 0)
    return (r * (content + bias) if call.sharpen_prior else r * content + bias), seen


def softmax_over(z: Array, seen: Array) -> tuple[Array, Array]:
    """Softmax of logits z [B, H, T, S] over the keys that are seen, and lse [B, T, H]; 0 and −inf where none is."""
    top = jax.lax.stop_gradient(jnp.max(z, axis=-1, where=seen, initial=-jnp.inf, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, z, top) - top), 0)
    total = weights.sum(-1, keepdims=True)
    some = total > 0
    total = jnp.where(some, total, 1)
    lse = jnp.where(some, top + jnp.log(total), -jnp.inf)[..., 0]
    return weights / total, jnp.swapaxes(lse, 1, 2)


def attend(call: Call) -> tuple[Array, Array]:
    """(o [B, T, H, Dv], lse [B, T, H])."""
    z, seen_BTS = logits(call)
    weights, lse = softmax_over(z, seen_BTS[:, None])
    v = jnp.where(seen_BTS.any(1)[:, :, None, None], call.v.astype(z.dtype), 0)
    v = jnp.repeat(v, call.q.shape[2] // v.shape[2], axis=2)
    o = jnp.einsum("bhts,bshd->bthd", weights, v)
    return o.astype(call.q.dtype), lse
