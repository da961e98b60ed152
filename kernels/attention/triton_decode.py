"""Backend "triton_decode": one or a few new tokens against a long cache, split over the keys, in Pallas Triton.

Flash-decoding: each of `splits` programs per key head streams its share of the keys once and leaves an output and a
log-sum-exp, which a second kernel merges. With explicit positions or segments a first kernel finds the span of keys
that anybody sees, so that an almost empty cache costs what its contents cost. The rows of a program are all query heads
and tokens that share a key head. Priors made of arithmetic are evaluated in place, others (tables) read by distance.
The backward pass is that of "pallas_triton".
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from kernels import triton
from kernels.attention import triton_gpu
from kernels.attention.call import Call, DistancePrior
from kernels.attention.triton_decode_kernels import SPANS, Plan, Spec, merge_body, span_body, split_body
from kernels.triton import launch

Array = jax.Array
MOST_QUERIES = 8
MOST_ROWS = 64
FEWEST_KEYS = 256
# What a prior may consist of to be evaluated inside the kernel.
# fmt: off
ARITHMETIC = frozenset((
    "abs", "add", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "cos", "custom_jvp_call",
    "div", "eq", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "jit", "le", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pjit", "pow", "rem", "reshape",
    "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh",
))
# fmt: on


def supports(call: Call) -> str | None:
    """None, or why this kernel cannot serve the call."""
    return triton.machine_lacks() or refusal(call, triton.capability())


def refusal(call: Call, device: str) -> str | None:
    """What `supports` says on a GPU of compute capability `device`."""
    queries, keys = call.q.shape[1], call.k.shape[1]
    if queries > MOST_QUERIES:
        return f"{queries} queries are more than {MOST_QUERIES}"
    if keys < FEWEST_KEYS:
        return f"{keys} keys are fewer than {FEWEST_KEYS}: nothing to split"
    rows = queries * (call.q.shape[2] // call.k.shape[2])
    if rows > MOST_ROWS:
        return f"{queries} queries times the heads of a key head are {rows} rows, more than {MOST_ROWS}"
    return triton_gpu.refusal(call, device)


def one_head(prior: DistancePrior) -> Any:
    """The shapes of the parameters of one head."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), prior.params)


def is_arithmetic(log_prior: Any, params: Any) -> bool:
    """Can the prior be traced into a kernel: scalar parameters per head, elementwise arithmetic, no look-ups.

    params: the parameters of one head, arrays or their shapes.
    """
    if any(leaf.shape for leaf in jax.tree.leaves(params)):
        return False

    def allowed(jaxpr: Any) -> bool:
        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.primitive.name not in ARITHMETIC or (inner is not None and not allowed(inner.jaxpr)):
                return False
        return True

    closed = jax.make_jaxpr(log_prior)(params, jax.ShapeDtypeStruct((8,), jnp.int32))
    return not closed.consts and allowed(closed.jaxpr)


def make_plan(call: Call, interpret: bool = False, per_core: int | None = None) -> Plan:
    """`per_core` programs for each multiprocessor, none with less than two steps; the numbers are tune.py's (H200)."""
    batch, keys, kv_heads, _ = call.k.shape
    cores = 132 if interpret else int(getattr(jax.devices()[0], "core_count", 132))
    wide = max(call.k.shape[3], call.v.shape[3]) * call.k.dtype.itemsize
    narrow, step = wide <= 128, 64 if wide <= 256 else 32
    wanted = (per_core or (4 if narrow else 2)) * cores // (batch * kv_heads)
    splits = max(1, min(wanted, keys // (2 * step), 256))
    return Plan(
        splits, step, warps=2 if narrow else 4, stages=3 if narrow else 4 if wide <= 256 else 2, interpret=interpret
    )


def _operands(call: Call) -> dict[str, Array]:
    arrays = {"q": call.q, "k": call.k, "v": call.v}
    whole = lambda x: jnp.broadcast_to(x, (call.q.shape[0], x.shape[1]))
    if call.q_positions is not None and call.kv_positions is not None:
        arrays |= {"q_positions": whole(call.q_positions), "kv_positions": whole(call.kv_positions)}
    if call.q_segments is not None and call.kv_segments is not None:
        arrays |= {"q_segments": call.q_segments, "kv_segments": call.kv_segments}
    if call.sharpness is not None:
        arrays["sharpness"] = call.sharpness
    if call.gates is not None:
        names = ("q_gate_hi", "q_gate_lo", "k_gate_hi", "k_gate_lo")
        arrays |= {n: g for n, g in zip(names, call.gates, strict=True) if not (call.zero_lows and n.endswith("lo"))}
    return arrays


def _forward(plan: Plan, call: Call) -> tuple[Array, Array]:
    batch, queries, heads, dim = call.q.shape
    keys, kv_heads = call.k.shape[1:3]
    spec = Spec(
        queries=queries,
        keys=keys,
        heads=heads,
        group=heads // kv_heads,
        dim=dim,
        value_dim=call.v.shape[3],
        scale=call.scale,
        causal=call.causal,
        window=call.window,
        log_prior=None,
        sharpen_prior=call.sharpen_prior,
        unseen=not call.every_key_is_seen(),
        exact=call.q.dtype == jnp.float32,
        interpret=plan.interpret,
    )
    arrays = _operands(call)
    run = partial(launch, warps=plan.warps, stages=plan.stages, interpret=plan.interpret)
    line = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct((batch, *shape), dtype)
    if "q_positions" in arrays or "q_segments" in arrays:
        names = ("q_positions", "kv_positions", "q_segments", "kv_segments")
        ends = {"low": line(SPANS, dtype=jnp.int32), "high": line(SPANS, dtype=jnp.int32)}
        some = {n: arrays[n] for n in names if n in arrays}
        arrays |= run(partial(span_body, spec), "attention_decode_span", (SPANS, batch), some, ends)
    if call.prior is not None:
        leaves, treedef = jax.tree.flatten(call.prior.params)
        if is_arithmetic(call.prior.log_prior, one_head(call.prior)):
            spec = replace(spec, log_prior=(call.prior.log_prior, treedef))
            arrays |= {f"param{n}": leaf for n, leaf in enumerate(leaves)}
        else:
            arrays |= _table(call)
    wide = triton_gpu.padded_head(call.v.shape[3])
    cut = (kv_heads, spec.padding[0] * spec.padding[1], plan.splits)
    outputs = {
        "parts": line(*cut, wide),
        "part_lse": line(*cut),
    }
    grid = (kv_heads, plan.splits, batch)  # heads first: what they share (gates, positions) is then in the L2
    parts = run(partial(split_body, spec, plan), "attention_decode", grid, arrays, outputs)
    results = {"o": line(queries, heads, call.v.shape[3], dtype=call.q.dtype), "lse": line(queries, heads)}
    grid = (spec.rows, kv_heads, batch)
    merged = run(partial(merge_body, spec), "attention_decode_merge", grid, parts, results)
    return merged["o"], merged["lse"]


def _table(call: Call) -> dict[str, Array]:
    """The prior of every head over distance, and the entry of distance 0."""
    assert call.prior is not None
    spec = triton_gpu.make_spec(triton_gpu.options_for(call), call)
    d = triton_gpu.distances(spec)
    values = jax.vmap(call.prior.log_prior, in_axes=(0, None))(call.prior.params, d).astype(jnp.float32)
    return {"table": values, "origin": jnp.full((1,), spec.origin, jnp.int32)}


def _in_reach(call: Call) -> Array | None:
    """As `triton_gpu.in_reach`, where a table is used at all."""
    if call.prior is None or is_arithmetic(call.prior.log_prior, one_head(call.prior)):
        return None
    return triton_gpu.in_reach(triton_gpu.options_for(call), call)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, call: Call) -> tuple[Array, Array]:
    fits = _in_reach(call)
    return (
        _forward(plan, call)
        if fits is None
        else lax.cond(fits, partial(_forward, plan), triton_gpu.plain_forward, call)
    )


def _attend_fwd(plan: Plan, call: Call) -> Any:
    o, lse = _attend(plan, call)
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse), (call, o, lse)


def _attend_bwd(plan: Plan, saved: tuple[Call, Array, Array], cotangents: tuple[Array, Array]) -> tuple[Call]:
    options = triton_gpu.options_for(saved[0], interpret=plan.interpret)
    return triton_gpu.attend_backward(options, saved, cotangents)


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(call: Call, plan: Plan | None = None) -> tuple[Array, Array]:
    """(o [B, T, H, Dv], lse [B, T, H] float32). plan: instead of `make_plan`'s, for tests and measurements."""
    return _attend(plan or make_plan(call), call)
