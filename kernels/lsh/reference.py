"""The dense definition, T × T arrays and all: the oracle of the other backends."""

from functools import partial

import jax
import jax.numpy as jnp

from kernels.lsh.call import Call, Combine

Array = jax.Array


def masks(call: Call) -> Array:
    """[B or 1, H, s, T, T] bool: sample m puts query and key in one block, and the query may see the key."""
    keys = jnp.arange(call.k.shape[1], dtype=jnp.int32)[None, None, None, None, :]
    bounds = lambda x: jnp.transpose(x, (0, 2, 3, 1))[..., None]
    starts, stops = call.block_rows()
    inside = (keys >= bounds(starts)) & (keys < bounds(stops))
    if call.causal:
        inside &= jnp.tri(call.k.shape[1], dtype=bool)[None, None, None]
    return inside


def supports(call: Call, combine: Combine) -> None:
    """Everything."""
    return None


def _softmax(logits: Array, weights: Array) -> tuple[Array, Array]:
    """Probabilities ∝ weights · exp(logits) over the last axis, and log Σ of that; 0 and −inf where all weights are."""
    seen = weights > 0
    top = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    e = weights * jnp.exp(jnp.where(seen, logits - top, -jnp.inf))
    total = e.sum(-1, keepdims=True)
    safe = jnp.where(total > 0, total, 1)
    return e / safe, jnp.where(total > 0, jnp.log(safe) + top, -jnp.inf)[..., 0]


@partial(jax.jit, static_argnums=1)
def attend(call: Call, combine: Combine) -> tuple[Array, Array]:
    """(o [B, T, H, Dv] in q's dtype, lse [B, T, H] float32 or float64; with "mean" the lse of "shared")."""
    wide = jnp.promote_types(call.q.dtype, jnp.float32)
    group = call.q.shape[2] // call.k.shape[2]
    k, v = (jnp.repeat(x.astype(wide), group, axis=2) for x in (call.k, call.v))
    logits = call.scale * jnp.einsum("bihd,bjhd->bhij", call.q.astype(wide), k, precision="highest")
    seen = masks(call).astype(wide)
    probabilities, lse = _softmax(logits, seen.mean(2))
    if combine == "mean":
        probabilities = _softmax(logits[:, :, None], seen)[0].mean(2)
    o = jnp.einsum("bhij,bjhd->bihd", probabilities, v, precision="highest")
    return o.astype(call.q.dtype), jnp.swapaxes(lse, 1, 2)
