"""Projections of the layer's input that end in a positional quantity."""

import jax
import jax.numpy as jnp

Array = jax.Array


def project(x: Array, kernel: Array) -> Array:
    """x [..., n] times kernel [n, *out] -> [..., *out] float32 (or x's wider type).

    Operands in x's dtype, so that bfloat16 models use their fast units; products are summed in float32 and not rounded
    back: what follows (gates, unit vectors) is positional and stays in float32.
    """
    flat = kernel.reshape(kernel.shape[0], -1).astype(x.dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.matmul(x, flat, preferred_element_type=wide).reshape(*x.shape[:-1], *kernel.shape[1:])
