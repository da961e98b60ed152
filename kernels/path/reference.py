"""PaTH attention from its definition, one transition at a time, T × T in memory: the oracle, not for training."""

import jax
import jax.numpy as jnp

from kernels.attention.reference import softmax_over
from kernels.path.call import PathCall

Array = jax.Array


def supports(call: PathCall) -> str | None:
    """Everything."""
    return None


def carried_scores(q_TGD: Array, k_TD: Array, w_TD: Array, beta_T: Array) -> Array:
    """a_ij = q_iᵀ H_i … H_{j+1} k_j for one key head and its G query heads -> [T, G, T], zero for j > i.

    A token carries all keys before it by its own transition, then its own key joins them as it is.
    """

    def token(keys: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        i, q_GD, k_D, w_D, beta = x
        keys = keys - beta * jnp.outer(keys @ w_D, w_D)
        keys = keys.at[i].set(k_D)
        return keys, q_GD @ keys.T

    index = jnp.arange(k_TD.shape[0])
    return jax.lax.scan(token, jnp.zeros_like(k_TD), (index, q_TGD, k_TD, w_TD, beta_T))[1]


def visibility(call: PathCall) -> Array:
    """Who sees whom, [B or 1, 1, T, T]."""
    index = jnp.arange(call.q.shape[1])
    seen = (index[:, None] >= index[None, :])[None, None]
    if call.segments is None:
        return seen
    ids = call.segments
    return seen & ((ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, None, :])[:, None]


def logits(call: PathCall) -> Array:
    """logits [B, H, T, T]; those of unseen pairs are finite and meaningless."""
    batch, length, heads, dim = call.q.shape
    kv_heads = call.k.shape[2]
    with jax.default_matmul_precision("highest"):
        q = call.q.astype(call.wide).reshape(batch, length, kv_heads, heads // kv_heads, dim)
        over_heads = jax.vmap(carried_scores, in_axes=(1, 1, 1, 1), out_axes=1)
        scores = jax.vmap(over_heads)(q, call.k.astype(call.wide), call.w, call.beta)
    content = call.scale * jnp.moveaxis(scores.reshape(batch, length, heads, length), 1, 2)
    bias = jnp.zeros((1, 1, 1, 1), call.wide)
    if call.prior is not None:
        index = jnp.arange(length, dtype=jnp.int32)
        distance = index[None, :] - index[:, None]
        distance = jnp.where(distance > 0, -1, distance)  # unseen
        bias = bias + jax.vmap(call.prior.log_prior, in_axes=(0, None))(call.prior.params, distance)[None]
    if call.gates is not None:
        hi, lo = (jnp.swapaxes(x, 1, 2) for x in call.gates)
        bias = bias + (hi[:, :, :, None] - hi[:, :, None, :]) + (lo[:, :, :, None] - lo[:, :, None, :])
    if call.sharpness is None:
        return content + bias
    r = jnp.swapaxes(call.sharpness, 1, 2)[:, :, :, None]
    return r * (content + bias) if call.sharpen_prior else r * content + bias


def attend(call: PathCall) -> tuple[Array, Array]:
    """(o [B, T, H, Dv], lse [B, T, H])."""
    weights, lse = softmax_over(logits(call), visibility(call))
    groups = call.q.shape[2] // call.v.shape[2]
    v = jnp.repeat(call.v.astype(call.wide), groups, axis=2)
    o = jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")
    return o.astype(call.q.dtype), lse
