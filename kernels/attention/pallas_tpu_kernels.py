"""The bodies of the TPU attention kernels: one tile of scores, the forward pass, the backward pass.

A tile is [C keys, R queries]: keys down the sublanes, queries along the lanes. Online softmax over the blocks of keys
(Milakov & Gimelshein, arXiv 1805.02867); the backward pass recomputes probabilities from lse (FlashAttention-2,
arXiv 2307.08691). The sharpness and a scale that is no power of two multiply float32 scores, not q: rounding q·scale to
bfloat16 would cost digits that gate gradients need. Grid steps of one core run in order, so sums over tiles
collect in VMEM, always in the same order: two runs give the same bits.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.attention import pallas_tpu_table as table
from kernels.attention.pallas_tpu_plan import LANES, Plan
from kernels.attention.pallas_tpu_prior import Program

Array = jax.Array
Refs = dict[str, Any]


def q_rows(plan: Plan, backward: bool) -> tuple[str, ...]:
    """Names of the float32 rows that come with a block of queries."""
    rows: tuple[str, ...] = ("sharpness",) if plan.sharpness else ()
    rows += ("q_hi", "q_lo") if plan.gates else ()
    return rows + (("lse", "excess", "dlse") if backward else ())


def matmul(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Contract dimension contract[0] of a with contract[1] of b, float32 sums; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def column(rows: Array) -> Array:
    """[n ≤ 8, C] -> [C, n], by a transpose of whole (8, 128) tiles."""
    rows = jnp.concatenate([rows, jnp.broadcast_to(rows[:1], (8 - rows.shape[0], rows.shape[1]))], axis=0)
    return jnp.swapaxes(rows, 0, 1)


def fold_lanes(x: Array) -> Array:
    """[C, R] -> [C, 128]: sums of whole registers, no movement across lanes."""
    return sum((x[:, n : n + LANES] for n in range(LANES, x.shape[1], LANES)), x[:, :LANES])


def fold(x: Array) -> Array:
    """[C, R] -> [8, 128], as above."""
    x = fold_lanes(x)
    return jnp.sum(x.reshape(x.shape[0] // 8, 8, LANES), axis=0)


@dataclass(frozen=True, eq=False)
class Tile:
    """Where a kernel stands: head and blocks, and what it reads there."""

    plan: Plan
    program: Program | None
    refs: Refs
    batch: Any
    head: Any
    i: Any  # block of queries
    j: Any  # block of keys
    backward: bool

    def row(self, name: str) -> Array:
        """[1, R] float32 of a query quantity."""
        n = q_rows(self.plan, self.backward).index(name)
        return self.refs["q_rows"][0, 0, n : n + 1, :]

    def state(self, active: Any) -> tuple[Any, Any]:
        """(some pair of the tile may be visible, every pair is), as scalars."""
        plan = self.plan
        some, every = active, active
        q, k = self.extents()
        if plan.causal:
            some, every = some & (k[0] <= q[1]), every & (k[1] <= q[0])
        if plan.window is not None:
            some, every = some & (q[0] - k[1] < plan.window), every & (q[1] - k[0] < plan.window)
            if not plan.causal:
                some, every = some & (k[0] - q[1] < plan.window), every & (k[1] - q[0] < plan.window)
        if plan.segments:  # a negative id lowers the least one, so padding counts against `every`
            some &= (jnp.maximum(q[2], 0) <= k[3]) & (jnp.maximum(k[2], 0) <= q[3])
            every &= (q[2] == q[3]) & (k[2] == k[3]) & (q[2] == k[2]) & (q[2] >= 0)
        if plan.ragged:
            every &= (self.j + 1) * plan.block_k <= plan.keys
        return some, every

    def extents(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Least and greatest position of the block of queries and of the block of keys, then of their segment ids."""
        plan = self.plan
        if plan.bounded:
            i, j = jnp.minimum(self.i, plan.q_blocks - 1), jnp.minimum(self.j, plan.k_blocks - 1)
            q0, k0 = (self.batch * plan.q_blocks + i) * 4, (self.batch * plan.k_blocks + j) * 4
            bounds = self.refs["q_bounds"], self.refs["k_bounds"]
            return tuple(bounds[0][q0 + n] for n in range(4)), tuple(bounds[1][k0 + n] for n in range(4))
        q0, k0 = self.i * plan.block_q + plan.shift, self.j * plan.block_k
        return (q0, q0 + plan.block_q - 1), (k0, k0 + plan.block_k - 1)

    def integers(self) -> tuple[Array | None, Array | None]:
        """[C, 8] of the keys and [n, R] of the queries: position and segment, those that are explicit."""
        if not self.plan.bounded:
            return None, None
        return column(self.refs["k_integers"][0]), self.refs["q_integers"][0]

    def distance(self, keys: Array | None, queries: Array | None) -> Array:
        """Key position − query position, int32 [C, R]."""
        plan = self.plan
        if plan.positions:
            assert keys is not None
            assert queries is not None
            return keys[:, :1] - queries[:1]
        shape = (plan.block_k, plan.block_q)
        local = lax.broadcasted_iota(jnp.int32, shape, 0) - lax.broadcasted_iota(jnp.int32, shape, 1)
        return local + (self.j * plan.block_k - self.i * plan.block_q - plan.shift)

    def visible(self, d: Array, keys: Array | None, queries: Array | None) -> Array:
        plan = self.plan
        conditions = [d <= 0] if plan.causal else []
        if plan.window is not None:
            conditions.append((-d if plan.causal else jnp.abs(d)) < plan.window)
        if plan.segments:
            assert keys is not None
            assert queries is not None
            n = int(plan.positions)
            mine, theirs = queries[n : n + 1], keys[:, n : n + 1]
            conditions.append((theirs == mine) & (theirs >= 0))
        if plan.ragged:
            index = lax.broadcasted_iota(jnp.int32, (plan.block_k, 1), 0)
            conditions.append(jnp.broadcast_to(index < plan.keys - self.j * plan.block_k, d.shape))
        seen = conditions[0]
        for condition in conditions[1:]:
            seen &= condition
        return seen

    def bias(self, d: Array | None) -> tuple[Array | None, list[Array]]:
        """Prior plus gates before any sharpness [C, R] (None: 0), and the derivatives of the prior."""
        total: Array | None = None
        slopes: list[Array] = []
        if self.plan.table:
            parts = [self.refs[f"table_{n}"][0] for n in range(table.pieces(self.plan))]
            total = table.shear(self.plan, jnp.concatenate(parts, axis=1))
        elif self.program is not None:
            assert d is not None
            stride = max(1, len(self.program.passed))
            total, *slopes = self.program.tile(lambda n: self.refs["scalars"][self.head * stride + n], d)
        if self.plan.gates:
            k = self.refs["k_rows"][0, 0]
            # Sums relative to the first key of the block: a difference keeps its digits however long the row is.
            mine = (self.row("q_hi") - k[0:1, 0:1]) + (self.row("q_lo") - k[1:2, 0:1])
            theirs = (k[0:1] - k[0:1, 0:1]) + (k[1:2] - k[1:2, 0:1])
            gate = mine - column(theirs)[:, :1]
            total = gate if total is None else total + gate
        return total, slopes

    def operands(self, masked: bool, *names: str) -> list[Array]:
        """Blocks of q, k, v or do, from which nothing can leak that no pair of the tile should see.

        Only where the tile has hidden pairs: NaN and Inf in v become NaN in k, whose logits are then masked unless the
        key is seen; in the backward pass q and do of queries without a key (lse = +inf here) are 0.
        """
        blocks: dict[str, Array] = {name: self.refs[name][0, 0] for name in ("q", "k", "v", "do") if name in self.refs}
        if masked and self.plan.unseen_keys:
            fine = jnp.abs(blocks["v"].astype(jnp.float32)) < jnp.inf
            bad = jnp.min(fine.astype(jnp.float32), axis=0, keepdims=True) == 0
            k = blocks["k"].astype(jnp.float32)
            blocks["k"] = jnp.where(bad | (jnp.abs(k) == jnp.inf), jnp.nan, k).astype(blocks["k"].dtype)
            blocks["v"] = jnp.where(fine, blocks["v"].astype(jnp.float32), 0).astype(blocks["v"].dtype)
        if masked and self.backward and self.plan.dead_queries:
            alive = self.row("lse") < jnp.inf
            for name in ("q", "do"):
                x = blocks[name].astype(jnp.float32)
                blocks[name] = jnp.where(alive, x, 0).astype(blocks[name].dtype)
        return [blocks[name] for name in names]

    def scores(self, k: Array, q: Array, masked: bool) -> tuple[Array, Array, list[Array]]:
        """Logits [C, R] (−inf where unseen), what the sharpness multiplies, and the derivatives of the prior."""
        plan, d, seen = self.plan, None, None
        if masked or self.program is not None:
            keys, queries = self.integers()
            d = self.distance(keys, queries)
            if masked:
                seen = self.visible(d, keys, queries)
                d = jnp.where(seen, d, -1)
        if plan.exact_scale:
            content = matmul(k, q * jnp.asarray(plan.scale, q.dtype), (0, 0))
        else:
            content = matmul(k, q, (0, 0)) * plan.scale
        bias, slopes = self.bias(d)
        if bias is None:
            logits = content * self.row("sharpness") if plan.sharpness else content
        elif plan.sharpness and not plan.sharpen_prior:
            logits = content * self.row("sharpness") + bias
        else:
            content = content + bias
            logits = content * self.row("sharpness") if plan.sharpness else content
        return (logits if seen is None else jnp.where(seen, logits, -jnp.inf)), content, slopes


def run_tile(tile: Tile, active: Any, body: Any) -> None:
    """Run body(masked) on a tile that is not wholly hidden, with a mask only where one is needed."""
    some, every = tile.state(active)
    if tile.plan.masked:
        pl.when(jnp.logical_and(some, jnp.logical_not(every)))(lambda: body(True))
    pl.when(every)(lambda: body(False))


# ---- Forward: grid (heads, batch, blocks of queries, steps over keys) ----


def forward(plan: Plan, program: Program | None, names: tuple[str, ...], *arguments: Any) -> None:
    """The kernel body: o [Dv, block_q] and lse of a block of queries, from one step over the keys after the other."""
    refs = dict(zip(names, arguments, strict=True))
    head, batch, i, step = (pl.program_id(n) for n in range(4))
    first, last = plan.keys_of(i)
    tile = Tile(plan, program, refs, batch, head, i, first + step, backward=False)
    top, total, acc = refs["top"], refs["total"], refs["acc"]

    @pl.when(step == 0)
    def _start() -> None:
        top[...] = jnp.full(top.shape, -jnp.inf, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    def body(masked: bool) -> None:
        q, k, v = tile.operands(masked, "q", "k", "v")
        logits, _, _ = tile.scores(k, q, masked)
        old = top[...]
        new = jnp.maximum(old, jnp.max(logits, axis=0, keepdims=True))
        base = jnp.where(new == -jnp.inf, 0.0, new)
        p = jnp.exp(logits - base)
        shrink = jnp.exp(old - base)
        top[...] = new
        total[...] = shrink * total[...] + jnp.sum(p, axis=0, keepdims=True)
        acc[...] = shrink * acc[...] + matmul(v, p.astype(v.dtype), (1, 0))

    run_tile(tile, tile.j <= last, body)

    @pl.when(step == plan.key_steps - 1)
    def _finish() -> None:
        some = total[...] > 0
        safe = jnp.where(some, total[...], 1.0)
        refs["o"][0, 0] = (acc[...] / safe).astype(refs["o"].dtype)
        refs["lse_out"][0, 0] = jnp.where(some, top[...] + jnp.log(safe), -jnp.inf)


# ---- Backward ----
# By keys: grid (key heads, batch, blocks of keys, query heads of the group × steps over queries); dk, dv, gradients of
# prior and key gates, and, where dq of a whole row fits in VMEM, dq and the sharpness too. What a prior gets is summed
# over the batch as well, in buffers that stay for all of a key head.
# By queries: grid (heads, batch, blocks of queries, steps over keys); dq and the sharpness.


@dataclass(frozen=True)
class Wanted:
    """Which gradients a backward kernel computes."""

    keys: bool
    queries: bool


def backward(plan: Plan, program: Program | None, wanted: Wanted, names: tuple[str, ...], *arguments: Any) -> None:
    """The kernel body: the gradients in `wanted`, added up in their output blocks over the inner steps of the grid."""
    refs = dict(zip(names, arguments, strict=True))
    head, batch, outer, inner = (pl.program_id(n) for n in range(4))
    if wanted.keys:
        member, step = lax.div(inner, jnp.int32(plan.query_steps)), lax.rem(inner, jnp.int32(plan.query_steps))
        first, last = plan.queries_of(outer)
        i, j, head = first + step, outer, head * plan.group + member
        active = (i <= last) & (i < plan.q_blocks)
        start, finish = step == 0, step == plan.query_steps - 1
    else:
        first, last = plan.keys_of(outer)
        member, i, j = jnp.int32(0), outer, first + inner
        active, start, finish = j <= last, inner == 0, None
    tile = Tile(plan, program, refs, batch, head, i, j, backward=True)
    whole_row = (outer == 0) & (inner == 0) if wanted.keys else inner == 0
    begins = {("dq", "dsharpness", "dq_gates"): whole_row, ("dk", "dv"): inner == 0, ("gate_sums",): start}
    begins[("dprior", "dtable")] = whole_row & (batch == 0)
    for sums, condition in begins.items():
        if mine := [refs[name] for name in sums if name in refs]:
            pl.when(condition)(functools.partial(_zero, mine))
    place = pl.ds(pl.multiple_of(i * plan.block_q, LANES), plan.block_q) if wanted.keys else slice(None)
    run_tile(tile, active, lambda masked: _gradients(tile, wanted, (member, place), masked))
    if finish is not None and plan.gates:

        @pl.when(finish)
        def _finish() -> None:
            sums = jnp.swapaxes(refs["gate_sums"][...], 0, 1)
            refs["dk_gates"][0, 0] = -jnp.sum(sums, axis=0, keepdims=True)


def _zero(sums: list[Any]) -> None:
    for ref in sums:
        ref[...] = jnp.zeros(ref.shape, ref.dtype)


def _gradients(tile: Tile, wanted: Wanted, at: tuple[Any, Any], masked: bool) -> None:
    """Add what one tile contributes; `at` is the place of its queries in the buffers of dq."""
    refs, plan, (member, lanes) = tile.refs, tile.plan, at
    q, k, v, do = tile.operands(masked, "q", "k", "v", "do")
    logits, content, slopes = tile.scores(k, q, masked)
    p = jnp.exp(logits - tile.row("lse"))
    dp = matmul(v, do, (0, 0))
    # A saturated pair (p = 1) has no gradient through its logits: dp − Σ do·o would leave a rounding error there, which
    # the derivative of a huge log-prior would blow up.
    ds = p * jnp.where(p < 1, dp - tile.row("excess"), tile.row("dlse"))
    dcontent = ds * tile.row("sharpness") if plan.sharpness else ds
    low = dcontent.astype(q.dtype)
    if wanted.keys:
        refs["dv"][0, 0] += matmul(do, p.astype(do.dtype), (1, 1))
        refs["dk"][0, 0] += matmul(q, low, (1, 1))
    if wanted.queries:
        clean = jnp.where(k == k, k, jnp.zeros_like(k)) if masked and plan.unseen_keys else k
        refs["dq"][0, member, :, lanes] += matmul(clean, low, (1, 0))
        if plan.sharpness:
            seen = jnp.where(p > 0, content, 0) if masked else content
            refs["dsharpness"][0, member, :, lanes] += jnp.sum(ds * seen, axis=0, keepdims=True)
    dbias = dcontent if plan.sharpen_prior else ds
    if wanted.queries and plan.gates:
        # Nothing but the cotangent of lse in exact arithmetic. Yet a gate's gradient is a difference of this and of the
        # keys' sums, in which the rounding of p and dp cancels only if both are sums of the same scores.
        refs["dq_gates"][0, member, :, lanes] += jnp.sum(dbias, axis=0, keepdims=True)
    if wanted.keys:
        for n, slope in enumerate(slopes):
            refs["dprior"][member, n] += fold(dbias * slope)
        if plan.table:
            start = pl.multiple_of(table.first_piece(plan, tile.i, tile.j) * table.piece(plan), LANES)
            stretch = pl.ds(start, plan.block_q + plan.block_k)
            refs["dtable"][member, :, stretch] += table.diagonal_sums(plan, dbias)
        if plan.gates:
            refs["gate_sums"][...] += fold_lanes(dbias)
