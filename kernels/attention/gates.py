"""Running sums of log forget gates whose differences stay exact at any length.

A single float32 running sum loses the resolution of a difference as it grows (6e-3 at 65,536 tokens). Here each sum is
an unevaluated pair hi + lo (double-float arithmetic on Knuth's two-sum), and a kernel forms
(hi_i − hi_j) + (lo_i − lo_j): the error is relative to that difference, not to the sums.

A pair holds 48 bits of a sum, so a gate of −1e30 would wipe out what the gates around it say, and one of −inf makes
every later difference a NaN. Gates are therefore cut at SHUT, which a softmax cannot tell from −inf.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Pair = tuple[Array, Array]
SHUT = -(2.0**20)  # a log gate below this counts as this


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


RADIX = 16


def _running(high: Array, low: Array, started: Array) -> Pair:
    """Inclusive sums over axis 1 of pairs [B, S, H] that restart where `started` [B, S, 1].

    XLA's CPU compiler would do the last stage of the chunks over again for every pair of tokens, inside the logits, and
    takes barriers out; what leaves a loop is written down.
    """
    return lax.platform_dependent(high, low, started, cpu=_by_places, default=_by_chunks)


def _by_places(high: Array, low: Array, started: Array) -> Pair:
    """Chunks of RADIX by loops over the places in them: first what each chunk adds up to, then, with the sums of those
    done the same way, every place from the one before it. Two additions a token at any length."""
    length = high.shape[1]
    size = max(min(RADIX, length), 1)
    split = (high.shape[0], -(-length // size), size, high.shape[2])
    chunks = lambda x: jnp.pad(x, ((0, 0), (0, -length % size), (0, 0))).reshape(*split[:3], x.shape[2])
    high, low, started = chunks(high), chunks(low), chunks(started)
    at = lambda i, *arrays: tuple(lax.dynamic_index_in_dim(x, i, 2, keepdims=False) for x in arrays)
    first, before = 1, at(0, high, low)
    if length > size:
        add = lambda i, sums: _after(sums, at(i, high, low, started))
        ends = lax.fori_loop(1, size, add, at(0, high, low, started))
        first, before = 0, tuple(jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))) for x in _by_places(*ends))

    def body(i: Array, state: tuple[Pair, Pair]) -> tuple[Pair, Pair]:
        before, sums = state
        own = _after([*before, jnp.zeros((), bool)], at(i, *sums, started))[:2]
        write = lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 2)  # over the gate itself, read just now
        return own, (write(sums[0], own[0]), write(sums[1], own[1]))

    _, sums = lax.fori_loop(first, size, body, (before, (high, low)))
    high, low = (x.reshape(split[0], split[1] * size, split[3])[:, :length] for x in sums)
    return high, low


def _by_chunks(high: Array, low: Array, started: Array) -> Pair:
    """Chunks of RADIX by doubling strides, then, with their sums done the same way, what came before each: a handful of
    passes over memory at any length. Tokens are the last axis, so that no pass between two has to turn an array."""
    high, low = _chunked(*(jnp.swapaxes(x, 1, 2) for x in (high, low, started)))
    return jnp.swapaxes(high, 1, 2), jnp.swapaxes(low, 1, 2)


def _chunked(high: Array, low: Array, started: Array) -> Pair:
    """`_by_chunks` of pairs [B, H, S]."""
    length = high.shape[2]
    split = (-(-length // RADIX), RADIX)
    chunks = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, -length % RADIX))).reshape(*x.shape[:2], *split)
    state = chunks(high), chunks(low), chunks(started)
    stride = 1
    while stride < min(RADIX, length):
        state = _after([_shifted(x, stride) for x in state], state)
        stride *= 2
    if length > RADIX:
        sums = _chunked(*(x[..., -1] for x in state))
        before = [_shifted(x, 1)[..., None] for x in sums]
        state = _after([*before, jnp.zeros((), bool)], state)
    high, low = (x.reshape(*x.shape[:2], split[0] * RADIX)[..., :length] for x in state[:2])
    return high, low


def _shifted(x: Array, by: int) -> Array:
    """x moved `by` places up along the last axis, zeros in front."""
    return jnp.pad(x[..., : x.shape[-1] - by], [(0, 0)] * (x.ndim - 1) + [(by, 0)])


def _after(before: Sequence[Array], state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """`before` added in front of sums (hi, lo, have they restarted), where they have not."""
    high, low, started = state
    open_ = [jnp.where(started, 0, x) for x in before[:2]]
    high, low = _add((open_[0], open_[1]), (high, low))
    return high, low, started | before[2]


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
    return _running(x_BSH, jnp.zeros_like(x_BSH), starts_BS[:, :, None])


def _fwd(x_BSH: Array, starts_BS: Array) -> tuple[Pair, Array]:
    return _sums(x_BSH, starts_BS), starts_BS


def _bwd(starts_BS: Array, cotangents: Pair) -> tuple[Array, None]:
    ends = jnp.roll(starts_BS, -1, axis=1)
    high, low = _sums(jnp.flip(cotangents[0], 1), jnp.flip(ends, 1))
    return jnp.flip(high + low, 1), None


_sums.defvjp(_fwd, _bwd)


def cut_shut(log_gates: Array) -> Array:
    """Log gates, those below SHUT (−inf too) as SHUT, without a gradient: what lies behind them weighs nothing."""
    return jnp.where(log_gates < SHUT, jnp.asarray(SHUT, log_gates.dtype), log_gates)


def running_sums(x_BSH: Array, starts_BS: Array | None = None) -> Pair:
    """Inclusive sums over axis 1 of log gates as (hi, lo), restarting where `starts_BS` is True.

    Gates below SHUT count as SHUT. Gradients flow through hi; lo is its rounding error, a constant.
    """
    return _sums(cut_shut(x_BSH), jnp.zeros(x_BSH.shape[:2], bool) if starts_BS is None else starts_BS)


def document_sums(log_gates_BSH: Array, segments_BS: Array | None) -> Pair:
    """`running_sums` of rows of documents: padding forgets nothing, and sums restart where `starts_of` says so.

    segments_BS: int ids, negative for padding; None: one document per row.
    """
    if segments_BS is None:
        starts = jnp.broadcast_to(jnp.arange(log_gates_BSH.shape[1])[None] == 0, log_gates_BSH.shape[:2])
    else:
        log_gates_BSH = jnp.where((segments_BS >= 0)[:, :, None], log_gates_BSH, 0)
        starts = starts_of(segments_BS)
    # No pair of tokens has the first gate of a document between them: its gradient is 0, without a rounding error.
    log_gates_BSH = jnp.where(starts[:, :, None], lax.stop_gradient(log_gates_BSH), log_gates_BSH)
    return running_sums(log_gates_BSH, starts)
