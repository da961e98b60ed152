"""A PaTH call laid out for loops over groups of batch rows and over superblocks.

[batch, length, head, …] becomes [group, superblock, batch row of the group, head, token of the superblock, …].

Shape names: B batch, g rows of a group, N superblocks, H query heads, K key heads, S tokens of a superblock. Inside the
loop over groups B stands for g.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels.path.call import PathCall
from kernels.path.plan import Plan

Array = jax.Array
QUERY_PAD, KEY_PAD = -1, -2  # ids of padding: different, so that it neither sees nor is seen


class Rows(NamedTuple):
    """The call in float32 (float64) inside the loop over groups; the loop over superblocks takes away N as well."""

    q: Array  # [N, B, H, S, D], times scale and sharpness
    k: Array  # [N, B, K, S, D]
    v: Array  # [N, B, K, S, Dv]
    w: Array  # [N, B, K, S, D], zero past the end of the row
    beta: Array  # [N, B, K, S]
    hi: Array | None  # [N, B, H, S], gate sums
    lo: Array | None
    neg_hi: (
        Array | None
    )  # the same with the other sign, for the columns: XLA's CPU loops over a tile that read one array
    neg_lo: Array | None  # both ways are not vectorised
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


def over_groups(compute: Callable[..., Any], *laid_out: Any) -> Any:
    """`compute` of each group of batch rows in turn, the results stacked along a new leading axis.

    The loop runs over arrays that are laid out already: XLA would otherwise compute their layout again inside the
    elementwise loops over tiles, one entry at a time.
    """
    if jax.tree.leaves(laid_out)[0].shape[0] == 1:
        return jax.tree.map(lambda x: x[None], compute(*jax.tree.map(lambda x: x[0], laid_out)))
    return lax.map(lambda x: compute(*x), laid_out)


def cut(x: Array, plan: Plan, value: float = 0) -> Array:
    """[B, T, ...] -> [B / g, N, g, S, ...], `value` past the end of the row."""
    widths = [(0, 0), (0, plan.length - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, widths, constant_values=value)
    group = plan.group or x.shape[0]
    x = x.reshape(x.shape[0] // group, group, plan.superblocks, plan.size, *x.shape[2:])
    return jnp.moveaxis(x, 2, 1)


def cut_heads(x: Array, plan: Plan, value: float = 0) -> Array:
    """[B, T, H, ...] -> [B / g, N, g, H, S, ...], `value` past the end of the row."""
    return jnp.moveaxis(cut(x, plan, value), 3, 4)


def uncut(x: Array, length: int) -> Array:
    """[B / g, N, g, H, S, ...] -> [B, T, H, ...]."""
    x = jnp.moveaxis(jnp.moveaxis(x, 4, 3), 1, 2)
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3], *x.shape[4:])[:, :length]


def lay_out(plan: Plan, call: PathCall, sharpen_bias: bool) -> Rows:
    """The rows of a call, for all groups; `sharpen_bias`: the sharpness multiplies a prior or gates as well."""
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
        neg_hi=None if hi is None else heads(-hi),
        neg_lo=None if lo is None else heads(-lo),
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
