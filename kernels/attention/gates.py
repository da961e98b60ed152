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


def _running(x_BSH: Array, starts_BS: Array) -> Pair:
    """Inclusive sums over axis 1 that restart where `starts`: log2(S) elementwise passes over doubling strides."""
    length = x_BSH.shape[1]
    index = jnp.arange(length)[None, :, None]

    def body(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        high, low, started = state
        stride = 1 << i
        before = lambda x: jnp.roll(x, stride, axis=1)
        add = (index >= stride) & ~started
        high, low = _add((high, low), (jnp.where(add, before(high), 0), jnp.where(add, before(low), 0)))
        return high, low, started | (before(started) & (index >= stride))

    started = starts_BS[:, :, None] | jnp.zeros_like(x_BSH[:, :, :1], bool)
    high, low, _ = lax.fori_loop(0, (length - 1).bit_length(), body, (x_BSH, jnp.zeros_like(x_BSH), started))
    return high, low


def starts_of(segments_BS: Array) -> Array:
    """True [B, S] at the first key and where no document reaches across from the key before (for ids that grow).

    Sums may restart there, so that a document's sums and gradients do not depend on its neighbours by even a rounding
    error. With ids in another order there are fewer such places, and differences of sums are the same.
    """
    real = segments_BS >= 0
    before = lax.cummax(jnp.where(real, segments_BS, -1), axis=1)
    after = lax.cummin(jnp.where(real, segments_BS, jnp.iinfo(jnp.int32).max), axis=1, reverse=True)
    return jnp.pad(before[:, :-1] < after[:, 1:], ((0, 0), (1, 0)), constant_values=True)


def extended_sums(before_BH: Pair, x_BTH: Array) -> Pair:
    """Sums (hi, lo) [B, T, H] that go on from the last ones `before_BH`, as if all had been summed at once."""
    new = running_sums(x_BTH)
    return _add((before_BH[0][:, None], before_BH[1][:, None]), new)


@jax.custom_vjp
def _sums(x_BSH: Array, starts_BS: Array) -> Pair:
    return _running(x_BSH, starts_BS)


def _fwd(x_BSH: Array, starts_BS: Array) -> tuple[Pair, Array]:
    return _running(x_BSH, starts_BS), starts_BS


def _bwd(starts_BS: Array, cotangents: Pair) -> tuple[Array, None]:
    ends = jnp.roll(starts_BS, -1, axis=1)
    high, low = _running(jnp.flip(cotangents[0], 1), jnp.flip(ends, 1))
    return jnp.flip(high + low, 1), None


_sums.defvjp(_fwd, _bwd)


def running_sums(x_BSH: Array, starts_BS: Array | None = None) -> Pair:
    """Inclusive sums over axis 1 as (hi, lo), restarting where `starts_BS` is True.

    Gradients flow through hi; lo is its rounding error, a constant.
    """
    return _sums(x_BSH, jnp.zeros(x_BSH.shape[:2], bool) if starts_BS is None else starts_BS)
