"""Pallas-Triton kernels of decode: the visible span of a cache, attention over a share of its keys, and the merge."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels.attention.triton_gpu_kernels import LOG2E, cleaned
from kernels.triton import padded_head, product

Array = jax.Array
SPANS = 64  # partial results of the search for the visible span


@dataclass(frozen=True)
class Plan:
    """How the keys are cut: programs per key head, keys per step, warps and stages of a program."""

    splits: int
    step: int = 64
    warps: int = 4
    stages: int = 3
    interpret: bool = False


@dataclass(frozen=True)
class Spec:
    """Static description of a call."""

    queries: int
    keys: int
    heads: int
    group: int
    dim: int
    value_dim: int
    scale: float
    causal: bool
    window: int | None
    log_prior: Any  # None: no prior, or one read from a table
    sharpen_prior: bool
    unseen: bool
    exact: bool
    interpret: bool

    @property
    def rows(self) -> int:
        """Real rows of a program: tokens × query heads of a key head."""
        return self.queries * self.group

    @property
    def padding(self) -> tuple[int, int]:
        """(rows up to a power of two, how often each is repeated to make the 16 that a matrix product needs)."""
        count = 1 << (self.rows - 1).bit_length()
        return count, max(1, 16 // count)


def _rows(spec: Spec, kv_head: Array, count: int, copies: int = 1) -> tuple[Array, Array]:
    """(token, head) [count · copies, 1] of `count` rows, each repeated `copies` times."""
    row = lax.div(lax.broadcasted_iota(jnp.int32, (count * copies, 1), 0), jnp.int32(copies))
    token = jnp.minimum(lax.div(row, jnp.int32(spec.group)), spec.queries - 1)
    return token, kv_head * spec.group + lax.rem(row, jnp.int32(spec.group))


def _repeat(x: Array, copies: int) -> Array:
    """[n, m] -> [n · copies, m], each row repeated; one row is left to broadcasting."""
    if copies == 1 or x.shape[0] == 1:
        return x
    wide = lax.broadcast_in_dim(x, (x.shape[0], copies, x.shape[1]), (0, 2))
    return wide.reshape(-1, x.shape[1])


def span_body(spec: Spec, names: tuple[str, ...], *refs: Any) -> None:
    """First key that somebody sees, and one past the last, in one part of the keys."""
    x = dict(zip(names, refs, strict=True))
    part, batch = pl.program_id(0), pl.program_id(1)
    size = 1024
    share = -(-spec.keys // (SPANS * size)) * size

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = carry
        index = part * share + i * size + lax.broadcasted_iota(jnp.int32, (size,), 0)
        inside = index < spec.keys
        seen = inside & False
        for t in range(spec.queries):
            seen = seen | _seen(spec, x, batch, jnp.int32(t), index, inside)
        return jnp.minimum(low, jnp.where(seen, index, spec.keys).min()), jnp.maximum(high, (seen * (index + 1)).max())

    low, high = lax.fori_loop(0, share // size, body, (jnp.int32(spec.keys), jnp.int32(0)))
    x["low"][batch, part] = low
    x["high"][batch, part] = high


def _seen(spec: Spec, x: dict[str, Any], batch: Array, token: Array, index: Array, inside: Array) -> Array:
    """Does the query `token` see key `index`; both broadcast against each other."""
    seen = inside
    ahead = _ahead(spec, x, batch, token, index, inside)
    if spec.causal:
        seen = seen & (ahead >= 0)
    if spec.window is not None:
        seen = seen & (ahead < spec.window)
        if not spec.causal:
            seen = seen & (ahead > -spec.window)
    if "q_segments" in x:
        mine = x["q_segments"][batch, token]
        seen = seen & (mine == plgpu.load(x["kv_segments"].at[batch, index], mask=inside, other=-1)) & (mine >= 0)
    return seen


def _ahead(spec: Spec, x: dict[str, Any], batch: Array, token: Array, index: Array, inside: Array) -> Array:
    if "q_positions" in x:
        keys = plgpu.load(x["kv_positions"].at[batch, index], mask=inside, other=0)
        return x["q_positions"][batch, token] - keys
    return token + (spec.keys - spec.queries) - index


def _offsets(spec: Spec, x: dict[str, Any], batch: Array, token: Array, head: Array, cols: Any, ahead: Array) -> Any:
    """Prior plus gates, natural; token, head [rows, 1], cols = (index, inside), [1, step]."""
    total: Any = 0.0
    if "table" in x:
        entry = jnp.clip(ahead + x["origin"][0], 0, x["table"].shape[1] - 1)
        total = plgpu.load(x["table"].at[head, entry])
    elif spec.log_prior is not None:
        total = _inline(spec, x, head, ahead)
    if "q_gate_hi" in x:
        index, inside = cols
        for n in (n for n in ("hi", "lo") if f"q_gate_{n}" in x):
            keys = plgpu.load(x[f"k_gate_{n}"].at[batch, index, head], mask=inside & (head >= 0), other=0.0)
            total = total + (x[f"q_gate_{n}"][batch, token, head] - keys)
    return total


def _inline(spec: Spec, x: dict[str, Any], head: Array, ahead: Array) -> Array:
    log_prior, treedef = spec.log_prior
    count = sum(n.startswith("param") for n in x)
    leaves = [x[f"param{n}"][head[:, 0]] for n in range(count)]
    of_row = lambda params, d: log_prior(treedef.unflatten(params), d)
    distance = jnp.minimum(-ahead, 0) if spec.causal else -ahead
    return jax.vmap(of_row)(leaves, distance)


def split_body(spec: Spec, plan: Plan, names: tuple[str, ...], *refs: Any) -> None:
    """The kernel body: output and base-2 lse of one share of the keys, for all rows of a key head."""
    x = dict(zip(names, refs, strict=True))
    kv_head, split, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    # A matrix product has 16 rows at least. Rows are repeated to fill it, so that what is elementwise in them (prior,
    # gates, masks) is worked out once per row and not for padding.
    count, copies = spec.padding
    padded = count * copies
    token, head = _rows(spec, kv_head, count, copies)
    d = lax.broadcasted_iota(jnp.int32, (1, padded_head(spec.dim)), 1)
    dv = lax.broadcasted_iota(jnp.int32, (1, padded_head(spec.value_dim)), 1)
    q = plgpu.load(x["q"].at[batch, token, head, d], mask=(token >= 0) & (d < spec.dim), other=0)
    r = x["sharpness"][batch, token, head] if "sharpness" in x else None
    token, head = _rows(spec, kv_head, count)
    low, high = jnp.int32(0), jnp.int32(spec.keys)
    if "low" in x:
        spans = pl.ds(0, SPANS)
        low, high = x["low"][batch, spans].min(), x["high"][batch, spans].max()
        low = lax.div(low, jnp.int32(plan.step)) * plan.step
    elif spec.window is not None:
        low = jnp.int32(max(0, (spec.keys - spec.queries + 1 - spec.window) // plan.step * plan.step))
    steps = lax.div(jnp.maximum(high - low, 0) + (plan.step - 1), jnp.int32(plan.step))
    share = lax.div(steps + (plan.splits - 1), jnp.int32(plan.splits))
    first = split * share

    def body(i: Array, carry: Any) -> Any:
        acc, top, total = carry
        index = low + i * plan.step + lax.broadcasted_iota(jnp.int32, (1, plan.step), 1)
        column = low + i * plan.step + lax.broadcasted_iota(jnp.int32, (plan.step, 1), 0)
        inside = index < high
        k = _stream(x["k"], batch, column, kv_head, d, spec.dim, high)
        v = _stream(x["v"], batch, column, kv_head, dv, spec.value_dim, high)
        ahead = _ahead(spec, x, batch, token, index, inside)
        seen = _seen(spec, x, batch, token, index, inside)
        z = product(q, k, (1, 1), spec.exact, spec.interpret) * spec.scale
        offsets = _offsets(spec, x, batch, token, head, (index, inside), ahead)
        offsets = _repeat(jnp.where(seen, offsets, -jnp.inf), copies)  # carries the mask, so that one array is repeated
        seen = offsets > -jnp.inf
        if r is None:
            z = z + offsets
        else:
            z = (z + offsets) * r if spec.sharpen_prior else z * r + offsets
        z = jnp.where(seen, z * LOG2E, -jnp.inf)
        new_top = jnp.maximum(top, z.max(axis=1))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        shrink, p = jnp.exp2(top - base), jnp.exp2(z - base[:, None])
        if spec.unseen:
            v = cleaned(v, jnp.broadcast_to(seen, z.shape))
        exact = spec.exact and v.dtype == jnp.float32
        acc = acc * shrink[:, None] + product(p.astype(v.dtype), v, (1, 0), exact, spec.interpret)
        return acc, new_top, total * shrink + p.sum(axis=1)

    start = jnp.full((padded,), -jnp.inf, jnp.float32)
    init = (jnp.zeros((padded, dv.shape[1]), jnp.float32), start, jnp.zeros_like(start))
    acc, top, total = lax.fori_loop(jnp.minimum(first, steps), jnp.minimum(first + share, steps), body, init)
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    place = lax.broadcasted_iota(jnp.int32, (padded, 1), 0)
    row = lax.div(place, jnp.int32(copies))
    first_copy = (row * copies == place) & (row < spec.rows)
    plgpu.store(x["parts"].at[batch, kv_head, place, split, dv], acc / safe[:, None], mask=first_copy & (dv >= 0))
    lse = jnp.where(some, top + jnp.log2(safe), -jnp.inf)
    plgpu.store(x["part_lse"].at[batch, kv_head, place[:, 0], split], lse, mask=first_copy[:, 0])


def _stream(ref: Any, batch: Array, column: Array, kv_head: Array, d: Array, dim: int, high: Array) -> Array:
    """Keys or values [step, D] of one head, zero past the end and past the real head_dim."""
    return plgpu.load(ref.at[batch, column, kv_head, d], mask=(column < high) & (d < dim), other=0)


def merge_body(spec: Spec, names: tuple[str, ...], *refs: Any) -> None:
    """The kernel body: one row's output and natural lse, from those of all shares."""
    x = dict(zip(names, refs, strict=True))
    row, kv_head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    splits, place = x["part_lse"].shape[3], row * spec.padding[1]
    index = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(splits), 1), 0)
    inside = index < splits
    lse = plgpu.load(x["part_lse"].at[batch, kv_head, place, index[:, 0]], mask=inside[:, 0], other=-jnp.inf)
    d = lax.broadcasted_iota(jnp.int32, (1, x["parts"].shape[4]), 1)
    parts = plgpu.load(x["parts"].at[batch, kv_head, place, index, d], mask=inside & (d >= 0), other=0.0)
    top = lse.max()
    base = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp2(lse - base)
    total = weight.sum()
    safe = jnp.where(total > 0, total, 1.0)
    o = (parts * (weight / safe)[:, None]).sum(axis=0)
    token, head = lax.div(row, jnp.int32(spec.group)), kv_head * spec.group + lax.rem(row, jnp.int32(spec.group))
    plgpu.store(x["o"].at[batch, token, head, d[0]], o.astype(x["o"].dtype), mask=d[0] < spec.value_dim)
    x["lse"][batch, token, head] = jnp.where(total > 0, (base + jnp.log2(safe)) / LOG2E, -jnp.inf)
