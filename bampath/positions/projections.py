"""Projections of the layer's input that end in a positional quantity."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bampath.sharding.mesh import current

Array = jax.Array


def project(x: Array, kernel: Array, rounded: bool = False) -> Array:
    """x [..., n] times kernel [n, *out] -> [..., *out] float32 (or x's wider type); rounded: in x's dtype.

    Operands in x's dtype, so that bfloat16 models use their fast units; products are summed in float32 and not rounded
    back: what follows (gates, reflections' sizes) is positional and stays in float32. Backward, the gradient of the
    result is rounded to x's dtype, as those of the model's other projections are.
    """
    wide = x.dtype if rounded else jnp.promote_types(x.dtype, jnp.float32)
    flat = _matmul(wide, x, kernel.reshape(kernel.shape[0], -1).astype(x.dtype))
    return flat.reshape(*x.shape[:-1], *kernel.shape[1:])


def project_together(x: Array, kernels: Any) -> Any:
    """x times every matrix [dim, n] of a tree, as `project` does, in a tree of the same form.

    They are narrow: what they cost is reading x, and writing its gradient, so one device makes them one product. Heads
    that are spread over a mesh have their columns where they are, and joined to others those would be moved.
    """
    flat, form = jax.tree.flatten(kernels)
    mesh = current()
    if len(flat) < 2 or (mesh is not None and mesh.shape["tensor"] > 1):
        return jax.tree.map(partial(project, x), kernels)
    ends = np.cumsum([kernel.shape[1] for kernel in flat])
    return jax.tree.unflatten(form, jnp.split(project(x, jnp.concatenate(flat, axis=1)), ends[:-1].tolist(), axis=-1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(dtype: Any, x: Array, kernel: Array) -> Array:
    return jnp.matmul(x, kernel, preferred_element_type=dtype)


def _forward(dtype: Any, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _matmul(dtype, x, kernel), (x, kernel)


def _backward(dtype: Any, kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    """Left to JAX, both products would be of float32 operands, and x's gradient a float32 array per projection."""
    x, kernel = kept
    dy, rows = dy.astype(x.dtype), lambda a: a.reshape(-1, a.shape[-1])
    return jnp.matmul(dy, kernel.T), jnp.matmul(rows(x).T, rows(dy))


_matmul.defvjp(_forward, _backward)
