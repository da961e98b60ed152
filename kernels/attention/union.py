"""Attention over the union of two sets of keys, from the attention to each."""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Attended = tuple[Array, Array]  # o […, Dv] and its natural lse […]


def union(a: Attended, b: Attended) -> Attended:
    """(o […, Dv], lse […]) in the dtype of lse: each part weighted by its share of the sum of exponentials.

    A part without keys has lse = −inf and does not count; without any, o is 0. Differentiable also there. A NaN shows.
    """
    top = lax.stop_gradient(jnp.maximum(a[1], b[1]))
    top = jnp.where(top == -jnp.inf, 0, top)
    empty = [lse == -jnp.inf for _, lse in (a, b)]  # an exponential of −inf − top has no derivative
    exponents = [jnp.where(none, top, lse) - top for none, (_, lse) in zip(empty, (a, b), strict=True)]
    weights = [jnp.where(none, 0, jnp.exp(x)) for none, x in zip(empty, exponents, strict=True)]
    total = weights[0] + weights[1]
    neither = total == 0
    safe = jnp.where(neither, 1, total)
    share = lambda weight, o: (weight / safe)[..., None] * o.astype(weight.dtype)
    return share(weights[0], a[0]) + share(weights[1], b[0]), jnp.where(neither, -jnp.inf, top + jnp.log(safe))
