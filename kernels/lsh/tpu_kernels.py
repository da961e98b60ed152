"""The TPU kernels of LSH attention with one normaliser: forward, query gradients, key gradients.

A tile is [C keys, R queries], keys down the sublanes, as in `kernels.attention.pallas_tpu_kernels`. A block of one side
stays in VMEM; the other side streams from HBM through two buffers, over the tiles that the block's grids reach and no
others: how many is data, so the copies are the kernel's own. Counts take one compare per sample and score.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.attention.pallas_tpu_kernels import matmul

Array = jax.Array
Refs = dict[str, Any]
MOST_UNROLLED = 32  # samples


@dataclass(frozen=True)
class Spec:
    """Static description of a call; sizes are padded ones."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    length: int
    block: int  # rows of a tile, and columns
    samples: int
    shared_rows: bool  # block starts do not depend on the row of the batch
    scale: float
    dtype: Any

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def blocks(self) -> int:
        return self.length // self.block


def counts(spec: Spec, starts: Any, i: Array, j: Array) -> Array:
    """c [C, R] float32 of query tile i and key tile j; starts: a ref [s, R] int32."""
    shape = (spec.block, spec.block)
    key = lax.broadcasted_iota(jnp.int32, shape, 0) + j * spec.block
    add = lambda m, total: total + jnp.where(starts[pl.ds(m, 1), :] <= key, 1.0, 0.0)
    total = jnp.zeros(shape, jnp.float32)
    if spec.samples <= MOST_UNROLLED:
        for m in range(spec.samples):
            total = add(m, total)
    else:
        total = lax.fori_loop(0, spec.samples, add, total)
    query = lax.broadcasted_iota(jnp.int32, shape, 1) + i * spec.block
    return jnp.where(key <= query, total, 0.0)


def logits(spec: Spec, k: Array, q: Array, c: Array) -> Array:
    """[C, R], −inf where nothing is seen."""
    return jnp.where(c > 0, matmul(k, q, (0, 0)) * spec.scale, -jnp.inf)


def stream(
    spec: Spec, x: Refs, names: tuple[str, ...], source: Callable[[str], Any], first: Array, end: Array, body: Any
) -> None:
    """body(tile, {name: its part}) for tiles first … end − 1: the next one's arrays arrive while one is at work.

    source(name): the ref [rows, length] in HBM that buffer `name` [2, rows, block] is filled from.
    """

    def copies(tile: Array, slot: Array) -> list[Any]:
        place = pl.ds(pl.multiple_of(tile * spec.block, spec.block), spec.block)
        return [
            pltpu.make_async_copy(source(name).at[:, place], x[f"{name}_buffer"].at[slot], x["arrived"].at[slot, n])
            for n, name in enumerate(names)
        ]

    def start(tile: Array) -> None:
        for copy in copies(tile, lax.rem(tile - first, 2)):
            copy.start()

    def step(tile: Array, _: None) -> None:
        slot = lax.rem(tile - first, 2)
        pl.when(tile + 1 < end)(lambda: start(tile + 1))
        for copy in copies(tile, slot):
            copy.wait()
        body(tile, {name: x[f"{name}_buffer"].at[slot] for name in names})

    pl.when(first < end)(lambda: start(first))
    lax.fori_loop(first, end, step, None)


def _place(spec: Spec) -> tuple[Array, Array, Array, Array]:
    """(batch, query head, key head, block) of a program over queries; grid (heads, batch, blocks)."""
    head = pl.program_id(0)
    return pl.program_id(1), head, lax.div(head, jnp.int32(spec.group)), pl.program_id(2)


def _range(spec: Spec, ref: Any, batch: Array, head: Array, block: Array) -> Array:
    row = jnp.int32(0) if spec.shared_rows else batch
    return ref[(row * spec.heads + head) * spec.blocks + block]


def forward(spec: Spec, names: tuple[str, ...], *arguments: Any) -> None:
    """The kernel body: o [Dv, block] and lse of a block of queries, from the keys that its longest blocks reach."""
    x = dict(zip(names, arguments, strict=True))
    batch, head, kv_head, i = _place(spec)
    top, total, acc = x["top"], x["total"], x["acc"]
    top[...] = jnp.full(top.shape, -jnp.inf, jnp.float32)
    total[...] = jnp.zeros(total.shape, jnp.float32)
    acc[...] = jnp.zeros(acc.shape, jnp.float32)

    def body(j: Array, tile: Refs) -> None:
        c = counts(spec, x["starts"].at[0, 0], i, j)
        z = logits(spec, tile["k"][...], x["q"][0, 0], c)
        old = top[...]
        new = jnp.maximum(old, jnp.max(z, axis=0, keepdims=True))
        base = jnp.where(new == -jnp.inf, 0.0, new)
        p, shrink = c * jnp.exp(z - base), jnp.exp(old - base)
        top[...] = new
        total[...] = shrink * total[...] + jnp.sum(p, axis=0, keepdims=True)
        v = tile["v"][...]
        acc[...] = shrink * acc[...] + matmul(v, p.astype(v.dtype), (1, 0))

    source = lambda name: x[name].at[batch, kv_head]
    stream(spec, x, ("k", "v"), source, _range(spec, x["first_key"], batch, head, i), i + 1, body)
    some = total[...] > 0
    safe = jnp.where(some, total[...], 1.0)
    x["o"][0, 0] = (acc[...] / safe).astype(x["o"].dtype)
    x["lse"][0, 0] = jnp.where(some, top[...] + jnp.log(safe), -jnp.inf)


def _gradients(spec: Spec, c: Array, k: Array, v: Array, q: Array, do: Array, rows: Array) -> tuple[Array, Array]:
    """(p, ds) [C, R]; rows [2, R]: lse (+inf where nothing is seen) and delta."""
    p = c * jnp.exp(logits(spec, k, q, c) - rows[0:1])
    return p, p * (matmul(v, do, (0, 0)) - rows[1:2])


def query_gradients(spec: Spec, names: tuple[str, ...], *arguments: Any) -> None:
    """The kernel body: dq [D, block] of a block of queries."""
    x = dict(zip(names, arguments, strict=True))
    batch, head, kv_head, i = _place(spec)
    dq = x["dq"]
    dq[0, 0] = jnp.zeros(dq.shape[2:], jnp.float32)

    def body(j: Array, tile: Refs) -> None:
        k, v = tile["k"][...], tile["v"][...]
        c = counts(spec, x["starts"].at[0, 0], i, j)
        _, ds = _gradients(spec, c, k, v, x["q"][0, 0], x["do"][0, 0], x["rows"][0, 0])
        dq[0, 0] += matmul(k, ds.astype(k.dtype), (1, 0))

    source = lambda name: x[name].at[batch, kv_head]
    stream(spec, x, ("k", "v"), source, _range(spec, x["first_key"], batch, head, i), i + 1, body)


def key_gradients(spec: Spec, names: tuple[str, ...], *arguments: Any) -> None:
    """The kernel body: dk and dv [D, block] of a block of keys, summed over the query heads of its key head."""
    x = dict(zip(names, arguments, strict=True))
    kv_head, batch, j = (pl.program_id(n) for n in range(3))
    dk, dv = x["dk"], x["dv"]
    dk[0, 0] = jnp.zeros(dk.shape[2:], jnp.float32)
    dv[0, 0] = jnp.zeros(dv.shape[2:], jnp.float32)
    k, v = x["k"][0, 0], x["v"][0, 0]

    def of_head(member: Array, _: None) -> None:
        head = kv_head * spec.group + member

        def source(name: str) -> Any:
            row = jnp.int32(0) if name == "starts" and spec.shared_rows else batch
            return x[name].at[row, head]

        def body(i: Array, tile: Refs) -> None:
            q, do = tile["q"][...], tile["do"][...]
            p, ds = _gradients(spec, counts(spec, tile["starts"], i, j), k, v, q, do, tile["rows"][...])
            dv[0, 0] += matmul(do, p.astype(do.dtype), (1, 1))
            dk[0, 0] += matmul(q, ds.astype(q.dtype), (1, 1))

        end = _range(spec, x["end_query"], batch, head, j)
        stream(spec, x, ("q", "do", "starts", "rows"), source, j, end, body)

    lax.fori_loop(0, spec.group, of_head, None)
