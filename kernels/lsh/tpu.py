"""Backend "pallas_tpu": LSH attention for TPUs in Pallas, causal, output and gradients of q, k and v.

A block of queries streams the keys from its earliest block start to the diagonal, a block of keys the queries up to its
latest block end. Arrays are [batch, heads, head_dim, length] for the reasons in `kernels.attention.pallas_tpu_plan`.
Without a TPU the same kernels run in Pallas' interpreter, for tests. The kernels are in tpu_kernels.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.attention.pallas_tpu_plan import LANES, MAX_DIM, VMEM_LIMIT
from kernels.lsh import tpu_kernels as kernels
from kernels.lsh.call import Call, Combine
from kernels.lsh.tpu_kernels import Spec

Array = jax.Array
DTYPES = (jnp.bfloat16, jnp.float32)
BLOCK = 256


def supports(call: Call, combine: Combine) -> str | None:
    """None, or why these kernels cannot serve the call."""
    if call.q.dtype not in DTYPES:
        return f"dtype {call.q.dtype} is neither bfloat16 nor float32"
    dim = max(call.q.shape[3], call.v.shape[3])
    if dim > MAX_DIM:
        return f"head_dim {dim} is over {MAX_DIM}"
    if not call.causal:
        return "the kernels are causal"
    if jax.default_backend() == "gpu":
        return "the kernels are for TPUs (and for the interpreter on a CPU)"
    return None


def _pad(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def make_spec(call: Call, block: int | None = None) -> Spec:
    """What the kernels must know of a call when they are compiled. block: tokens of a block, for tests."""
    batch, length, heads, dim = call.q.shape
    block = block or min(BLOCK, _pad(length, LANES))
    sublanes = 32 // call.q.dtype.itemsize
    return Spec(
        batch=batch,
        heads=heads,
        kv_heads=call.k.shape[2],
        dim=_pad(dim, sublanes),
        v_dim=_pad(call.v.shape[3], sublanes),
        length=_pad(length, block),
        block=block,
        samples=call.samples,
        shared_rows=call.first is None,
        scale=call.scale,
        dtype=jnp.dtype(call.q.dtype),
    )


@dataclass
class Operands:
    """Arrays and block specs by name: scalars, what goes in, what comes out, what is scratch."""

    scalars: dict[str, Array] = field(default_factory=dict)
    inputs: dict[str, tuple[Array, Any]] = field(default_factory=dict)
    outputs: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)


def _run(operands: Operands, grid: tuple[int, ...], body: Any, name: str) -> dict[str, Array]:
    """Call a kernel; compiled for a TPU, interpreted elsewhere. The choice is made where the program is lowered."""
    names = (*operands.scalars, *operands.inputs, *operands.outputs, *operands.scratch)

    def call(interpret: bool) -> Callable[..., Any]:
        return pl.pallas_call(
            partial(body, names),
            out_shape=[shape for shape, _ in operands.outputs.values()],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(operands.scalars),
                grid=grid,
                in_specs=[spec for _, spec in operands.inputs.values()],
                out_specs=[spec for _, spec in operands.outputs.values()],
                scratch_shapes=list(operands.scratch.values()),
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
            ),
            interpret=interpret,
            name=name,
        )

    arrays = [*operands.scalars.values(), *(array for array, _ in operands.inputs.values())]
    results = lax.platform_dependent(*arrays, tpu=call(False), default=call(True))
    return dict(zip(operands.outputs, results, strict=True))


def _lengths_last(spec: Spec, call: Call, x: Array, dim: int) -> Array:
    """[B, T, H, D] -> [B, H, padded D, padded T]; zeros in padding, whose contents must not matter."""
    if call.first is not None:
        x = jnp.where((call.first < x.shape[1])[:, :, None, None], x, jnp.zeros((), x.dtype))
    x = jnp.transpose(x, (0, 2, 3, 1))
    return jnp.pad(x, ((0, 0), (0, 0), (0, dim - x.shape[2]), (0, spec.length - x.shape[3])))


def _shared(spec: Spec, call: Call) -> dict[str, Array]:
    """What the kernels read: q, k, v, starts [B or 1, H, s, T], and the ranges of tiles, flat int32."""
    starts, stops = call.block_lines()
    extra = ((0, 0), (0, 0), (0, 0), (0, spec.length - starts.shape[3]))
    starts, stops = jnp.pad(starts, extra, constant_values=spec.length), jnp.pad(stops, extra)
    blocked = lambda x: x.reshape(*x.shape[:3], spec.blocks, spec.block)
    return {
        "q": _lengths_last(spec, call, call.q, spec.dim),
        "k": _lengths_last(spec, call, call.k, spec.dim),
        "v": _lengths_last(spec, call, call.v, spec.v_dim),
        "starts": starts,
        "first_key": (blocked(starts).min((2, 4)) // spec.block).reshape(-1),
        "end_query": -(-blocked(stops).max((2, 4)) // spec.block).reshape(-1),
    }


def _over_queries(spec: Spec, arrays: dict[str, Array], names: tuple[str, ...]) -> Operands:
    """Operands of a kernel whose blocks are queries; `names` come block by block, keys and values stay in HBM."""
    operands = Operands(scalars={"first_key": arrays["first_key"]})
    everywhere = pl.BlockSpec(memory_space=pl.ANY)
    for name in names:
        row = 0 if name == "starts" and spec.shared_rows else 1
        place = lambda h, b, i, *_, row=row: (b * row, h, 0, i)
        operands.inputs[name] = arrays[name], pl.BlockSpec((1, 1, arrays[name].shape[2], spec.block), place)
    operands.inputs |= {name: (arrays[name], everywhere) for name in ("k", "v")}
    operands.scratch = {
        "k_buffer": pltpu.VMEM((2, spec.dim, spec.block), spec.dtype),
        "v_buffer": pltpu.VMEM((2, spec.v_dim, spec.block), spec.dtype),
        "arrived": pltpu.SemaphoreType.DMA((2, 2)),
    }
    return operands


def _line(spec: Spec, heads: int, rows: int, dtype: Any) -> tuple[Any, Any]:
    """An output [B, heads, rows, T] that is written block by block."""
    shape = jax.ShapeDtypeStruct((spec.batch, heads, rows, spec.length), dtype)
    return shape, pl.BlockSpec((1, 1, rows, spec.block), lambda h, b, i, *_: (b, h, 0, i))


@partial(jax.jit, static_argnums=0)
def _forward(spec: Spec, call: Call) -> tuple[Array, Array]:
    operands = _over_queries(spec, _shared(spec, call), ("q", "starts"))
    operands.outputs = {
        "o": _line(spec, spec.heads, spec.v_dim, spec.dtype),
        "lse": _line(spec, spec.heads, 1, jnp.float32),
    }
    operands.scratch |= {name: pltpu.VMEM((1, spec.block), jnp.float32) for name in ("top", "total")}
    operands.scratch["acc"] = pltpu.VMEM((spec.v_dim, spec.block), jnp.float32)
    grid = (spec.heads, spec.batch, spec.blocks)
    out = _run(operands, grid, partial(kernels.forward, spec), "lsh_forward")
    length = call.q.shape[1]
    o = jnp.transpose(out["o"][:, :, : call.v.shape[3], :length], (0, 3, 1, 2))
    return o, jnp.swapaxes(out["lse"][:, :, 0, :length], 1, 2) - math.log(spec.samples)


@partial(jax.jit, static_argnums=0)
def _backward(spec: Spec, call: Call, o: Array, lse: Array, do: Array, dlse: Array) -> Call:
    alive = lse > -jnp.inf
    delta = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1) - jnp.where(alive, dlse, 0)
    row = lambda x, empty: jnp.pad(
        jnp.swapaxes(jnp.where(alive, x, empty), 1, 2),
        ((0, 0), (0, 0), (0, spec.length - x.shape[1])),
        constant_values=empty,
    )
    arrays = _shared(spec, call) | {
        "do": _lengths_last(spec, call, do.astype(call.q.dtype), spec.v_dim),
        "rows": jnp.stack([row(lse + math.log(spec.samples), jnp.inf), row(delta, 0.0)], axis=2),
    }
    operands = _over_queries(spec, arrays, ("q", "do", "starts", "rows"))
    operands.outputs = {"dq": _line(spec, spec.heads, spec.dim, jnp.float32)}
    grid = (spec.heads, spec.batch, spec.blocks)
    found = _run(operands, grid, partial(kernels.query_gradients, spec), "lsh_query_gradients")
    found |= _key_gradients(spec, arrays)
    back = lambda x, like: jnp.transpose(x, (0, 3, 1, 2))[:, : like.shape[1], :, : like.shape[3]]
    scaled = lambda x, like: (spec.scale * back(x, like)).astype(like.dtype)
    dv = back(found["dv"], call.v).astype(call.v.dtype)
    return call.cotangent(scaled(found["dq"], call.q), scaled(found["dk"], call.k), dv)


def _key_gradients(spec: Spec, arrays: dict[str, Array]) -> dict[str, Array]:
    operands = Operands(scalars={"end_query": arrays["end_query"]})
    for name in ("k", "v"):
        block = (1, 1, arrays[name].shape[2], spec.block)
        operands.inputs[name] = arrays[name], pl.BlockSpec(block, lambda h, b, j, *_: (b, h, 0, j))
    streamed = ("q", "do", "starts", "rows")
    for name in streamed:
        operands.inputs[name] = arrays[name], pl.BlockSpec(memory_space=pl.ANY)
        buffer = (2, arrays[name].shape[2], spec.block)
        operands.scratch[f"{name}_buffer"] = pltpu.VMEM(buffer, arrays[name].dtype)
    operands.scratch["arrived"] = pltpu.SemaphoreType.DMA((2, len(streamed)))
    operands.outputs = {
        "dk": _line(spec, spec.kv_heads, spec.dim, jnp.float32),
        "dv": _line(spec, spec.kv_heads, spec.v_dim, jnp.float32),
    }
    grid = (spec.kv_heads, spec.batch, spec.blocks)
    return _run(operands, grid, partial(kernels.key_gradients, spec), "lsh_key_gradients")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: Spec, call: Call) -> tuple[Array, Array]:
    return _forward(spec, call)


def _attend_fwd(spec: Spec, call: Call) -> Any:
    o, lse = _forward(spec, call)
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse), (call, o, lse)


def _attend_bwd(spec: Spec, saved: tuple[Call, Array, Array], cotangents: tuple[Array, Array]) -> tuple[Call]:
    return (_backward(spec, *saved, *cotangents),)


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(call: Call, combine: Combine) -> tuple[Array, Array | None]:
    """(o, lse) as in `reference.attend`, without lse for "mean": one call per sample, averaged."""
    if combine == "shared":
        return _attend(make_spec(call), call)
    each = lambda m: _attend(make_spec(call.sample(m)), call.sample(m))[0].astype(jnp.float32)
    start = jnp.zeros((*call.q.shape[:3], call.v.shape[-1]), jnp.float32)
    total, _ = lax.scan(lambda total, m: (total + each(m), None), start, jnp.arange(call.samples))
    return (total / call.samples).astype(call.q.dtype), None
