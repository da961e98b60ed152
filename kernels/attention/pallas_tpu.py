"""Fused attention for TPUs in Pallas: output and every gradient, priors, gates and sharpness included.

Without a TPU the same kernels run in Pallas' interpreter, for tests. `pallas_tpu_plan` fixes layout and blocks,
`pallas_tpu_prior` and `pallas_tpu_table` prepare log_prior, `pallas_tpu_kernels` holds the kernels; here the arrays of
a `Call` are brought into that layout and back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.attention import pallas_tpu_kernels as kernels
from kernels.attention import pallas_tpu_table as table
from kernels.attention.call import Call, DistancePrior
from kernels.attention.pallas_tpu_kernels import Wanted
from kernels.attention.pallas_tpu_plan import LANES, MAX_DIM, VMEM_LIMIT, Plan, make_plan
from kernels.attention.pallas_tpu_prior import Program, Refused, inline

Array = jax.Array
DTYPES = (jnp.bfloat16, jnp.float32)


def supports(call: Call) -> str | None:
    """None, or why not: dtypes other than bfloat16 and float32, head_dim over 256, a prior that no route can take."""
    if call.q.dtype not in DTYPES:
        return f"dtype {call.q.dtype} is neither bfloat16 nor float32"
    dim = max(call.q.shape[3], call.v.shape[3])
    if dim > MAX_DIM:
        return f"head_dim {dim} is over {MAX_DIM}"
    if jax.default_backend() == "gpu":
        return "the kernels are for TPUs (and for the interpreter on a CPU)"
    try:
        _plan(call, True)
    except Refused as reason:
        return str(reason)
    return None


def _plan(call: Call, backward: bool) -> Plan:
    """The plan of a pass. Raises Refused.

    A prior comes as a table over distance where positions are the default ones and the gradient of the table fits in
    VMEM: by the compiler's schedules that costs fewer cycles than two special functions per score. Otherwise it is
    computed in the tile.
    """
    plan = make_plan(call, backward)
    if call.prior is None:
        return plan
    entries = plan.group * table.length(make_plan(call, True))
    if not plan.positions and entries <= table.LONGEST:
        return replace(plan, table=True)
    try:
        _program(make_plan(call, True), call.prior, True)
    except Refused as reason:
        why = "needs default positions" if plan.positions else f"has {entries} > {table.LONGEST} entries"
        raise Refused(
            f"prior {call.prior.log_prior!r} cannot be computed in a TPU tile, since {reason}, and its table {why}"
        ) from None
    return plan


# ---- A kernel's operands ----


@dataclass
class Operands:
    """Arrays and block specs by name: what goes in, what comes out, what is scratch."""

    inputs: dict[str, tuple[Array, Any]] = field(default_factory=dict)
    outputs: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.inputs, *self.outputs, *self.scratch)


def _run(operands: Operands, grid: tuple[int, ...], body: Any, name: str) -> dict[str, Array]:
    """Call a kernel; compiled for a TPU, interpreted elsewhere. The choice is made where the program is lowered."""

    def call(interpret: bool) -> Callable[..., Any]:
        return pl.pallas_call(
            partial(body, operands.names),
            out_shape=[shape for shape, _ in operands.outputs.values()],
            grid=grid,
            in_specs=[spec for _, spec in operands.inputs.values()],
            out_specs=[spec for _, spec in operands.outputs.values()],
            scratch_shapes=list(operands.scratch.values()),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
            ),
            interpret=interpret,
            name=name,
        )

    arrays = [array for array, _ in operands.inputs.values()]
    results = lax.platform_dependent(*arrays, tpu=call(False), default=call(True))
    return dict(zip(operands.outputs, results, strict=True))


def _program(plan: Plan, prior: DistancePrior | None, derivatives: bool) -> Program | None:
    if prior is None or plan.table:
        return None
    one_head = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), prior.params)
    avals, tree = jax.tree.flatten(one_head)
    return inline(
        prior.log_prior, tree, tuple((a.shape, a.dtype) for a in avals), (plan.block_k, plan.block_q), derivatives
    )


def _lengths_last(x: Array, dim: int, length: int) -> Array:
    """[B, n, H, D] -> [B, H, padded D, padded n]."""
    x = jnp.transpose(x, (0, 2, 3, 1))
    return jnp.pad(x, ((0, 0), (0, 0), (0, dim - x.shape[2]), (0, length - x.shape[3])))


def _rows(rows: list[Array], length: int, fill: dict[int, float] | None = None) -> Array:
    """Arrays [B, n, H] -> float32 [B, H, rows, padded n]; `fill` is the padding of a row (0)."""
    out = []
    for n, x in enumerate(rows):
        x = jnp.swapaxes(x.astype(jnp.float32), 1, 2)
        out.append(jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2])), constant_values=(fill or {}).get(n, 0)))
    return jnp.stack(out, axis=2)


def _integers(positions: Array | None, segments: Array | None, length: int, batch: int) -> Array:
    """Explicit positions and segments, int32 [B, 1 or 2, padded length]; padding repeats a position, segment −1."""
    rows = []
    if positions is not None:
        rows.append(jnp.pad(positions, ((0, 0), (0, length - positions.shape[1])), mode="edge"))
    if segments is not None:
        rows.append(jnp.pad(segments, ((0, 0), (0, length - segments.shape[1])), constant_values=-1))
    return jnp.stack([jnp.broadcast_to(x.astype(jnp.int32), (batch, length)) for x in rows], axis=1)


def _bounds(plan: Plan, integers: Array, block: int, default_first: int) -> Array:
    """Least and greatest position, least and greatest segment of every block; int32, flat [B · blocks · 4].

    Positions of padding are left out where segments tell; the least segment keeps negative ids.
    """
    batch, _, length = integers.shape
    blocked = lambda x: x.reshape(batch, length // block, block)
    position = default_first + jnp.arange(length, dtype=jnp.int32)
    position = integers[:, 0] if plan.positions else jnp.broadcast_to(position[None], (batch, length))
    segment = integers[:, -1] if plan.segments else jnp.zeros_like(position)
    far = jnp.int32(2**30)
    low, high = blocked(jnp.where(segment < 0, far, position)), blocked(jnp.where(segment < 0, -far, position))
    segment = blocked(segment)
    parts = [low.min(-1), high.max(-1), segment.min(-1), segment.max(-1)]
    return jnp.stack(parts, axis=-1).reshape(-1)


Index = Callable[
    ..., tuple[Any, Any, Any, Any]
]  # grid indices, heads first -> (batch, head, block of queries, block of keys)


def _operands(plan: Plan, call: Call, program: Program | None, at: Index, saved: dict[str, Array]) -> Operands:
    """The inputs that both passes share, and what `saved` adds in the backward pass (do, lse, excess, dlse)."""
    operands, batch = Operands(), plan.batch
    q_side = lambda rows: pl.BlockSpec((1, 1, rows, plan.block_q), lambda *g: (at(*g)[0], at(*g)[1], 0, at(*g)[2]))
    k_side = lambda rows, group: pl.BlockSpec(
        (1, 1, rows, plan.block_k), lambda *g: (at(*g)[0], lax.div(at(*g)[1], jnp.int32(group)), 0, at(*g)[3])
    )
    whole = pl.BlockSpec(memory_space=pltpu.SMEM)
    operands.inputs |= {
        "q": (_lengths_last(call.q, plan.padded_dim, plan.padded_queries), q_side(plan.padded_dim)),
        "k": (_lengths_last(call.k, plan.padded_dim, plan.padded_keys), k_side(plan.padded_dim, plan.group)),
        "v": (_lengths_last(call.v, plan.padded_v_dim, plan.padded_keys), k_side(plan.padded_v_dim, plan.group)),
    }
    rows = [] if call.sharpness is None else [call.sharpness]
    rows += list(call.gates[:2]) if call.gates is not None else []
    if saved:
        do = _lengths_last(saved["do"].astype(plan.dtype), plan.padded_v_dim, plan.padded_queries)
        operands.inputs["do"] = (do, q_side(plan.padded_v_dim))
        rows += [saved["lse"], saved["excess"], saved["dlse"]]
    if rows:
        fill = {len(rows) - 3: jnp.inf} if saved else {}
        operands.inputs["q_rows"] = (_rows(rows, plan.padded_queries, fill), q_side(len(rows)))
    if call.gates is not None:
        sums = [jnp.where(jnp.isfinite(x), x, 0) for x in call.gates[2:]]  # of padding
        operands.inputs["k_rows"] = (_rows(sums, plan.padded_keys), k_side(2, 1))
    if plan.bounded:
        queries = _integers(call.q_positions, call.q_segments, plan.padded_queries, batch)
        keys = _integers(call.kv_positions, call.kv_segments, plan.padded_keys, batch)
        n = queries.shape[1]
        operands.inputs |= {
            "q_integers": (queries, pl.BlockSpec((1, n, plan.block_q), lambda *g: (at(*g)[0], 0, at(*g)[2]))),
            "k_integers": (keys, pl.BlockSpec((1, n, plan.block_k), lambda *g: (at(*g)[0], 0, at(*g)[3]))),
            "q_bounds": (_bounds(plan, queries, plan.block_q, plan.shift), whole),
            "k_bounds": (_bounds(plan, keys, plan.block_k, 0), whole),
        }
    if call.prior is not None and program is not None:
        scalars = jax.vmap(lambda p: program.scalars(jax.tree.leaves(p)))(call.prior.params)
        operands.inputs["scalars"] = (scalars.reshape(-1), whole)
    if call.prior is not None and plan.table:
        entries = table.values(plan, call.prior.params)
        for n in range(table.pieces(plan)):

            def place(*g: Any, n: int = n) -> tuple[Any, Any, Any]:
                _, head, i, j = at(*g)
                return head, 0, table.first_piece(plan, i, j) + n

            operands.inputs[f"table_{n}"] = (entries, pl.BlockSpec((1, 1, table.piece(plan)), place))
    return operands


# ---- Forward ----


@partial(jax.jit, static_argnums=0)
def _forward(plan: Plan, call: Call) -> tuple[Array, Array]:
    program = _program(plan, call.prior, derivatives=False)
    at: Index = lambda h, b, i, step: (b, h, i, plan.key_block(i, step))
    operands = _operands(plan, call, program, at, {})
    spec = lambda rows: pl.BlockSpec((1, 1, rows, plan.block_q), lambda h, b, i, step: (b, h, 0, i))
    shape = lambda rows, dtype: jax.ShapeDtypeStruct((plan.batch, plan.heads, rows, plan.padded_queries), dtype)
    operands.outputs = {
        "o": (shape(plan.padded_v_dim, plan.dtype), spec(plan.padded_v_dim)),
        "lse_out": (shape(1, jnp.float32), spec(1)),
    }
    operands.scratch = {
        "top": pltpu.VMEM((1, plan.block_q), jnp.float32),
        "total": pltpu.VMEM((1, plan.block_q), jnp.float32),
        "acc": pltpu.VMEM((plan.padded_v_dim, plan.block_q), jnp.float32),
    }
    grid = (plan.heads, plan.batch, plan.q_blocks, plan.key_steps)
    out = _run(operands, grid, partial(kernels.forward, plan, program), "attention_forward")
    o = jnp.transpose(out["o"][:, :, : plan.v_dim, : plan.queries], (0, 3, 1, 2))
    return o, jnp.swapaxes(out["lse_out"][:, :, 0, : plan.queries], 1, 2)


# ---- Backward ----


def _gradient_outputs(plan: Plan, wanted: Wanted, program: Program | None, operands: Operands) -> None:
    float32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    b, h, bk = plan.batch, plan.heads, plan.block_k
    if wanted.queries:
        heads, length = (plan.group, plan.padded_queries) if wanted.keys else (1, plan.block_q)
        place = (lambda k, b, j, s: (b, k, 0, 0)) if wanted.keys else (lambda h, b, i, s: (b, h, 0, i))
        scalars = {"dsharpness": plan.sharpness, "dq_gates": plan.gates}
        for name, rows in {"dq": plan.padded_dim, **{n: 1 for n, used in scalars.items() if used}}.items():
            shape = float32(b, h, rows, plan.padded_queries)
            operands.outputs[name] = (shape, pl.BlockSpec((1, heads, rows, length), place))
    if not wanted.keys:
        return
    for name, rows in (("dk", plan.padded_dim), ("dv", plan.padded_v_dim)):
        spec = pl.BlockSpec((1, 1, rows, bk), lambda k, b, j, s: (b, k, 0, j))
        operands.outputs[name] = (float32(b, plan.kv_heads, rows, plan.padded_keys), spec)
    head = lambda k, s: k * plan.group + lax.div(s, jnp.int32(plan.query_steps))
    if program is not None and len(program.outputs) > 1:
        sums = (len(program.outputs) - 1, 8, LANES)
        spec = pl.BlockSpec((plan.group, *sums), lambda k, b, j, s: (k, 0, 0, 0))
        operands.outputs["dprior"] = (float32(h, *sums), spec)
    if plan.table:
        diagonals = (table.SUMS, table.length(plan))
        spec = pl.BlockSpec((plan.group, *diagonals), lambda k, b, j, s: (k, 0, 0))
        operands.outputs["dtable"] = (float32(h, *diagonals), spec)
    if plan.gates:
        spec = pl.BlockSpec((1, 1, 1, bk), lambda k, b, j, s: (b, head(k, s), 0, j))
        operands.outputs["dk_gates"] = (float32(b, h, 1, plan.padded_keys), spec)
        operands.scratch["gate_sums"] = pltpu.VMEM((bk, LANES), jnp.float32)


def _backward_kernel(plan: Plan, call: Call, wanted: Wanted, saved: dict[str, Array]) -> dict[str, Array]:
    program = _program(plan, call.prior, derivatives=wanted.keys)
    if wanted.keys:

        def at(k: Any, b: Any, j: Any, s: Any) -> tuple[Any, Any, Any, Any]:
            steps = jnp.int32(plan.query_steps)
            return b, k * plan.group + lax.div(s, steps), plan.query_block(j, lax.rem(s, steps)), j

        grid = (plan.kv_heads, plan.batch, plan.k_blocks, plan.group * plan.query_steps)
    else:

        def at(k: Any, b: Any, j: Any, s: Any) -> tuple[Any, Any, Any, Any]:
            return b, k, j, plan.key_block(j, s)

        grid = (plan.heads, plan.batch, plan.q_blocks, plan.key_steps)
    operands = _operands(plan, call, program, at, saved)
    _gradient_outputs(plan, wanted, program, operands)
    name = "attention_backward" + ("_keys" if wanted.keys else "") + ("_queries" if wanted.queries else "")
    return _run(operands, grid, partial(kernels.backward, plan, program, wanted), name)


@partial(jax.jit, static_argnums=0)
def _backward(plan: Plan, call: Call, o: Array, lse: Array, do: Array, dlse: Array) -> Call:
    dead = jnp.isneginf(lse)
    dlse = jnp.where(dead, 0, dlse.astype(jnp.float32))
    delta = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1)
    excess = jnp.where(dead, 0, delta - dlse)
    saved = {"do": do, "lse": jnp.where(dead, jnp.inf, lse), "excess": excess, "dlse": dlse}
    passes = [Wanted(True, True)] if plan.fused_backward else [Wanted(True, False), Wanted(False, True)]
    out: dict[str, Array] = {}
    for wanted in passes:
        out |= _backward_kernel(plan, call, wanted, saved)
    return _cotangents(plan, call, out)


def _cotangents(plan: Plan, call: Call, out: dict[str, Array]) -> Call:
    """Back to the shapes of the call; None stands for zero."""
    lengths_first = lambda x, length, dim: jnp.transpose(x, (0, 3, 1, 2))[:, :length, :, :dim]
    dsharpness = None
    if call.sharpness is not None:
        dsharpness = lengths_first(out["dsharpness"], plan.queries, 1)[..., 0].astype(call.sharpness.dtype)
    prior, gates = None, None  # type: Any, Any
    if call.prior is not None and plan.table:
        _, pullback = jax.vjp(partial(table.values, plan), call.prior.params)
        (params,) = pullback(table.collect(out["dtable"]))
        prior = DistancePrior(params, call.prior.log_prior)
    elif call.prior is not None:
        leaves, tree = jax.tree.flatten(call.prior.params)
        total = out["dprior"].sum((2, 3)) if leaves else None  # [H, parameters]
        grads = [total[:, n].astype(leaf.dtype) for n, leaf in enumerate(leaves)] if total is not None else []
        prior = DistancePrior(jax.tree.unflatten(tree, grads), call.prior.log_prior)
    if call.gates is not None:
        dq_gates = lengths_first(out["dq_gates"], plan.queries, 1)[..., 0].astype(call.gates[0].dtype)
        dk_gates = jnp.swapaxes(out["dk_gates"][:, :, 0, : plan.keys], 1, 2).astype(call.gates[2].dtype)
        gates = (dq_gates, None, dk_gates, None)
    return replace(
        call,
        q=(call.scale * lengths_first(out["dq"], plan.queries, plan.dim)).astype(call.q.dtype),
        k=(call.scale * lengths_first(out["dk"], plan.keys, plan.dim)).astype(call.k.dtype),
        v=lengths_first(out["dv"], plan.keys, plan.v_dim).astype(call.v.dtype),
        prior=prior,
        gates=gates,
        sharpness=dsharpness,
        q_positions=None,
        kv_positions=None,
        q_segments=None,
        kv_segments=None,
    )


@jax.custom_vjp
def attend(call: Call) -> tuple[Array, Array]:
    """(o [B, T, H, Dv] in q's dtype, lse [B, T, H] float32)."""
    return _forward(_plan(call, False), call)


def _attend_fwd(call: Call) -> tuple[tuple[Array, Array], tuple[Call, Array, Array]]:
    o, lse = attend(call)
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse), (call, o, lse)


def _attend_bwd(saved: tuple[Call, Array, Array], cotangents: tuple[Array, Array]) -> tuple[Call]:
    return (_backward(_plan(saved[0], True), *saved, *cotangents),)


attend.defvjp(_attend_fwd, _attend_bwd)
