"""Backend "pallas_tpu": PaTH whose pairs of superblocks run in the TPU attention kernels.

The row is cut into at most eight superblocks. Inside one, `xla.py` does everything. Between them scores are plain
products of carried queries and keys, so superblock a's queries at its left edge attend to all earlier keys, moved
there, by `kernels.attention`'s "pallas_tpu" kernels, 7/8 of a long row's work; the two parts of the softmax are joined
by their log-sum-exp. What is carried is computed in XLA in full float32 (`transport.py`), and gradients are those of
the parts. Carried keys are stored at most 3.5 times, at any length. Without a TPU the kernels are interpreted.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels.attention.api import attention
from kernels.attention.union import union
from kernels.path import xla
from kernels.path.call import PathCall
from kernels.path.plan import choose_plan
from kernels.path.transport import matmul, span

Array = jax.Array
SUPERBLOCKS = 8
LEAST = 512  # tokens of a superblock, fewer are not worth a kernel
DTYPES = (jnp.bfloat16, jnp.float32)
LARGEST_HEAD = 256


def supports(call: PathCall) -> str | None:
    """None, or why not: dtypes other than bfloat16 and float32, wide heads, rows of one superblock."""
    if call.q.dtype not in DTYPES:
        return f"dtype {call.q.dtype} is neither bfloat16 nor float32"
    if max(call.q.shape[-1], call.v.shape[-1]) > LARGEST_HEAD:
        return f"head_dim {max(call.q.shape[-1], call.v.shape[-1])} is over {LARGEST_HEAD}"
    if jax.default_backend() == "gpu":
        return "the kernels are for TPUs (and for the interpreter on a CPU)"
    if call.q.shape[1] <= LEAST:
        return f"T={call.q.shape[1]} tokens are one superblock: nothing to do for a kernel between superblocks"
    return None


def superblock(length: int) -> int:
    """Tokens of a superblock: a multiple of 128 that gives at most SUPERBLOCKS of them."""
    return max(LEAST, -(-length // (SUPERBLOCKS * 128)) * 128)


def _cut(x: Array, size: int, count: int, value: float = 0) -> Array:
    """[B, T, …] -> [B, count, size, …], with `value` past the end."""
    x = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2), constant_values=value)
    return x.reshape(x.shape[0], count, size, *x.shape[2:])


def _alone(call: PathCall, size: int, count: int) -> tuple[Array, Array]:
    """Attention of every superblock to itself: (o [B, count, size, H, Dv], lse [B, count, size, H])."""

    def rows(x: Array, value: float = 0) -> Array:
        return _cut(x, size, count, value).reshape(-1, size, *x.shape[2:])

    cut = replace(
        call,
        q=rows(call.q),
        k=rows(call.k),
        v=rows(call.v),
        w=rows(call.w),
        beta=rows(call.beta),
        gates=None if call.gates is None else (rows(call.gates[0]), rows(call.gates[1])),
        sharpness=None if call.sharpness is None else rows(call.sharpness, 1),
        segments=None if call.segments is None else rows(call.segments, -1),
    )
    back = lambda x: x.reshape(call.q.shape[0], count, *x.shape[1:])
    o, lse = xla.attend(cut)
    return back(o), back(lse)


def _edges(call: PathCall, size: int, count: int) -> tuple[Array, Array, Array]:
    """Queries at the left edge [B, count, K, G, size, D], keys at the right edge [B, count, K, size, D] and products
    [B, count, K, D, D] (keys times product: over the superblock) of all superblocks, float32."""
    batch, _, heads, dim = call.q.shape
    kv_heads, block = call.k.shape[2], choose_plan(size, dim).block
    while size % block or (size // block) & (size // block - 1):
        block -= 1
    first = lambda x: jnp.moveaxis(_cut(x.astype(call.wide), size, count), (1, 3), (0, 2))  # [count, B, heads, size, …]
    q = first(call.q).reshape(count, batch, kv_heads, heads // kv_heads, size, dim)
    arrays = (q, first(call.k), first(call.w), first(call.beta))
    q, k, m = lax.map(lambda x: span(x[0], x[1], x[2], x[3], block)[1:], arrays)
    return jnp.moveaxis(q, 0, 1), jnp.moveaxis(k, 0, 1), jnp.moveaxis(m, 0, 1)


def _past(call: PathCall, size: int, a: int, q: Array, k: Array, m: Array) -> tuple[Array, Array]:
    """Queries of superblock a against all before: (o [B, size, H, Dv], lse [B, size, H])."""
    batch, _, heads, dim = call.q.shape
    moved, product = [], None
    for c in reversed(range(a)):  # keys k_c m_{c+1} … m_{a−1}
        moved.append(k[:, c] if product is None else matmul(k[:, c], product))
        product = m[:, c] if product is None else matmul(m[:, c], product)
    tokens = lambda x: jnp.moveaxis(x, -2, 1)  # [B, …, size, D] -> [B, size, …, D]
    keys = jnp.concatenate([tokens(x) for x in reversed(moved)], 1).astype(call.q.dtype)
    queries = tokens(q[:, a]).reshape(batch, size, heads, dim).astype(call.q.dtype)
    here, before = slice(a * size, (a + 1) * size), slice(0, a * size)
    options: dict[str, Any] = {"causal": False}
    if call.prior is not None or call.gates is not None:
        index = jnp.arange((a + 1) * size, dtype=jnp.int32)
        options = {"causal": True, "positions": index[here], "kv_positions": index[before]}
    if call.gates is not None:
        hi, lo = call.gates
        edge = slice(a * size - 1, a * size)  # sums from there: small, so that one float32 holds them
        since = lambda where: (_cut_row(hi, where) - hi[:, edge]) + (_cut_row(lo, where) - lo[:, edge])
        options["log_gates"] = (since(here), since(before))
    if call.segments is not None:
        options["segment_ids"] = (_cut_row(call.segments, here, -1), call.segments[:, before])
    if call.sharpness is not None:
        options["sharpness"] = _cut_row(call.sharpness, here, 1)
    return attention(
        queries,
        keys,
        call.v[:, before],
        prior=call.prior,
        sharpen_prior=call.sharpen_prior,
        scale=call.scale,
        implementation="pallas_tpu",
        return_lse=True,
        **options,
    )


def _cut_row(x: Array, where: slice, value: float = 0) -> Array:
    """x[:, where], with `value` past the end of the row."""
    part = x[:, where]
    missing = where.stop - where.start - part.shape[1]
    return jnp.pad(part, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=value)


def attend(call: PathCall) -> tuple[Array, Array]:
    """(o [B, T, H, Dv] in q's dtype, lse [B, T, H] float32)."""
    length = call.q.shape[1]
    size = superblock(length)
    count = -(-length // size)
    own_o, own_lse = _alone(call, size, count)
    q, k, m = _edges(call, size, count)
    parts = [(own_o[:, 0].astype(call.wide), own_lse[:, 0])]
    for a in range(1, count):
        parts.append(union((own_o[:, a], own_lse[:, a]), _past(call, size, a, q, k, m)))
    o, lse = (jnp.concatenate(x, 1)[:, :length] for x in zip(*parts, strict=True))
    return o.astype(call.q.dtype), lse
