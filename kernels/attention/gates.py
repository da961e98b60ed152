"""Running sums of log forget gates whose differences stay exact at any length.

A single float32 running sum loses the resolution of a difference as it grows (6e-3 at 65,536 tokens). Here each sum is
an unevaluated pair hi + lo (double-float arithmetic on Knuth's two-sum), and a kernel forms
(hi_i − hi_j) + (lo_i − lo_j): the error is relative to that difference, not to the sums.
"""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Pair = tuple[Array, Array]


def _two_sum(a: Array, b: Array) -> Pair:
    """a + b as a rounded sum and its exact rounding error (Knuth, TAOCP vol. 2, theorem B in 4.2.2)."""
    total = a + b
    shadow = total - a
    return total, (a - (total - shadow)) + (b - shadow)


def _add(x: Pair, y: Pair) -> Pair:
    high, error = _two_sum(x[0], y[0])
    error = error + (x[1] + y[1])
    total = high + error
    return total, error - (total - high)


def _running(x_BSH: Array) -> Pair:
    """Inclusive running sum over axis 1 by doubling strides: log2(S) elementwise passes, one traced body."""
    length = x_BSH.shape[1]
    index = jnp.arange(length)[None, :, None]

    def body(i: Array, sums: Pair) -> Pair:
        stride = 1 << i
        shift = lambda s: jnp.where(index >= stride, jnp.roll(s, stride, axis=1), 0)
        return _add(sums, (shift(sums[0]), shift(sums[1])))

    return lax.fori_loop(0, (length - 1).bit_length(), body, (x_BSH, jnp.zeros_like(x_BSH)))


@jax.custom_vjp
def running_sums(x_BSH: Array) -> Pair:
    """Inclusive sums over axis 1 as (hi, lo). Gradients flow through hi; lo is its rounding error, a constant."""
    return _running(x_BSH)


def _fwd(x_BSH: Array) -> tuple[Pair, None]:
    return _running(x_BSH), None


def _bwd(_: None, cotangents: Pair) -> tuple[Array]:
    high, low = _running(jnp.flip(cotangents[0], 1))
    return (jnp.flip(high + low, 1),)


running_sums.defvjp(_fwd, _bwd)
