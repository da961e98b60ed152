"""A PaTH call laid out for loops over superblocks: [batch, length, head, …] as [superblock, batch, head, token, …].

Shape names: N superblocks, B batch, H query heads, K key heads, S tokens of a superblock.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.path.call import PathCall
from kernels.path.plan import Plan

Array = jax.Array
QUERY_PAD, KEY_PAD = -1, -2  # ids of padding: different, so that it neither sees nor is seen


class Rows(NamedTuple):
    """The call in float32 (float64), one leading entry per superblock (absent inside a loop over them)."""

    q: Array  # [N, B, H, S, D], times scale and sharpness
    k: Array  # [N, B, K, S, D]
    v: Array  # [N, B, K, S, Dv]
    w: Array  # [N, B, K, S, D], zero past the end of the row
    beta: Array  # [N, B, K, S]
    hi: Array | None  # [N, B, H, S] gate sums
    lo: Array | None
    rho: Array | None  # [N, B, H, S], the factor of prior and gates, if they are sharpened
    q_ids: Array | None  # [N, B, S]
    k_ids: Array | None

    @property
    def carried(self) -> tuple[Array, Array, Array, Array]:
        """What the transport needs."""
        return self.q, self.k, self.w, self.beta

    def carrying(self, x: Sequence[Array]) -> "Rows":
        """The same rows with another q, k, w and beta."""
        q, k, w, beta = x
        return self._replace(q=q, k=k, w=w, beta=beta)


def cut(x: Array, plan: Plan) -> Array:
    """[B, T, ...] -> [N, B, S, ...], zeros past the end of the row."""
    x = jnp.pad(x, [(0, 0), (0, plan.length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], plan.superblocks, plan.size, *x.shape[2:]), 1, 0)


def cut_heads(x: Array, plan: Plan) -> Array:
    """[B, T, H, ...] -> [N, B, H, S, ...]."""
    return jnp.moveaxis(cut(x, plan), 2, 3)


def uncut(x: Array, length: int) -> Array:
    """[N, B, H, S, ...] -> [B, T, H, ...]."""
    x = jnp.moveaxis(jnp.moveaxis(x, 3, 2), 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]


def lay_out(plan: Plan, call: PathCall, sharpen_bias: bool) -> Rows:
    """The rows of a call; `sharpen_bias`: there are a prior or gates, and the sharpness multiplies them."""
    heads = lambda x: cut_heads(x.astype(call.wide), plan)
    maybe = lambda x: None if x is None else heads(x)
    ids = lambda pad: None if call.segments is None else cut(jnp.where(call.segments < 0, pad, call.segments), plan)
    factor = call.scale if call.sharpness is None else call.scale * call.sharpness[..., None]
    hi, lo = (None, None) if call.gates is None else call.gates
    return Rows(
        q=heads(call.q.astype(call.wide) * factor),
        k=heads(call.k),
        v=heads(call.v),
        w=heads(call.w),
        beta=heads(call.beta),
        hi=maybe(hi),
        lo=maybe(lo),
        rho=maybe(call.sharpness) if sharpen_bias else None,
        q_ids=ids(QUERY_PAD),
        k_ids=ids(KEY_PAD),
    )


def prior_table(plan: Plan, call: PathCall) -> Array | None:
    """log_prior at d = 1 − N S … S − 1 as [H, N S + S − 1]; what no pair of the row needs is filled from d = −1.

    The distances of a row are those of its indices, so the prior of all pairs is this table, T values per head.
    """
    if call.prior is None:
        return None
    d = jnp.arange(1 - plan.length, plan.size, dtype=jnp.int32)
    d = jnp.where((d > 0) | (d <= -call.q.shape[1]), -1, d)
    return jax.vmap(call.prior.log_prior, in_axes=(0, None))(call.prior.params, d).astype(call.wide)


def first_visible(rows: Rows) -> Array | None:
    """For each superblock the first one that may hold a segment of its own, [N], by the extents of ids; or None."""
    if rows.q_ids is None:
        return None
    ids = jnp.moveaxis(rows.q_ids, 1, 0)
    least = jnp.where(ids >= 0, ids, jnp.iinfo(ids.dtype).max).min(-1)
    most = ids.max(-1)
    may = ((least[:, None, :] <= most[:, :, None]) & (least[:, :, None] <= most[:, None, :])).any(0)
    return jnp.argmax(may, axis=1)
