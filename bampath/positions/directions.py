"""PaTH's directions: unit vectors from what was projected, through a short convolution."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bampath.positions.conv import documents, short_conv
from bampath.positions.slots import Tokens
from bampath.sharding.attention import SPECS
from bampath.sharding.mesh import current
from kernels.attention.mosaic_gpu import machine_lacks

Array = jax.Array
Options = tuple[bool, float]  # SiLU after the convolution, eps


def directions(w: Array, kernel: Array | None, tokens: Tokens, carry: Any, silu: bool, eps: float) -> tuple[Array, Any]:
    """(w [B, T, Hkv, D] after convolution and SiLU as unit vectors, float32 or wider, state of the convolution).

    x / √(Σ x² + eps): a unit vector, or 0 where x is 0. kernel: [width, Hkv, D], or None for w as it is. carry: as in
    `short_conv`; without one it is differentiable.
    """
    if carry is None and kernel is not None and _fused(w, kernel, tokens.implementation):
        return _on_every_device((silu, eps), w, kernel, documents(tokens.segment_ids, tokens.positions)), None
    if carry is None:
        return _units((silu, eps), w, kernel, tokens.segment_ids, tokens.positions), None
    mixed, carry = _mix(w, kernel, tokens.segment_ids, tokens.positions, carry)
    x = _activation(silu, kernel)(mixed)
    return x * _over_norm(x, eps), carry


def _mix(w: Array, kernel: Array | None, segment_ids: Array, positions: Array, carry: Any = None) -> tuple[Array, Any]:
    wide = w.astype(jnp.promote_types(w.dtype, jnp.float32))
    if kernel is None:
        return wide, carry
    flat, taps = wide.reshape(*w.shape[:2], -1), kernel.reshape(kernel.shape[0], -1)
    flat, carry = short_conv(flat, taps, segment_ids, positions, carry)
    return flat.reshape(w.shape), carry


def _activation(silu: bool, kernel: Array | None) -> Callable[[Array], Array]:
    return jax.nn.silu if silu and kernel is not None else lambda x: x


def _over_norm(x: Array, eps: float) -> Array:
    return jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


# ---- Fused, on Hopper GPUs ----


def _fused(w: Array, kernel: Array, implementation: str | None) -> bool:
    """Does one kernel per pass serve this call? Where PaTH's own fused kernels may run, and rows are whole."""
    mesh, asked = current(), implementation in (None, "mosaic_gpu")
    if not asked or machine_lacks() or (mesh is not None and mesh.shape["context"] > 1):
        return False
    from kernels.path import gpu_directions

    return gpu_directions.refusal(w, kernel) is None


def _on_every_device(options: Options, w: Array, kernel: Array, document: Array) -> Array:
    """XLA cannot cut a fused kernel: each device of a mesh calls it on its own rows and heads."""
    from kernels.path import gpu_directions

    mesh, local = current(), partial(gpu_directions.units, gpu_directions.Options(*options))
    if mesh is None:
        return local(w, kernel, document)
    specs = (SPECS["w"], P(None, "tensor"), SPECS["segment_ids"])
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=SPECS["w"], check_vma=False)(w, kernel, document)


# ---- By XLA, everywhere ----

# All of this is a few operations on arrays that take long to read. So each pass makes what it needs once more from w,
# which is half as long in 16 bits, and hardly anything is kept for the backward pass. The barriers keep XLA from
# writing down what two passes share.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _units(options: Options, w: Array, kernel: Array | None, segment_ids: Array, positions: Array) -> Array:
    return _forward(options, w, kernel, segment_ids, positions)[0]


def _forward(options: Options, w: Array, kernel: Array | None, segment_ids: Array, positions: Array) -> Any:
    run = _activation(options[0], kernel)
    norm = _over_norm(run(_mix(w, kernel, segment_ids, positions)[0]), options[1])
    again, norm = jax.lax.optimization_barrier((w, norm))
    return run(_mix(again, kernel, segment_ids, positions)[0]) * norm, (w, kernel, segment_ids, positions, norm)


def _backward(options: Options, kept: Any, d: Array) -> Any:
    w, kernel, segment_ids, positions, norm = kept
    run, mix = _activation(options[0], kernel), lambda w, kernel: _mix(w, kernel, segment_ids, positions)[0]
    again, d = jax.lax.optimization_barrier((w, d))
    along = jnp.sum(d * run(mix(again, kernel)), axis=-1, keepdims=True) * norm * norm
    again, along = jax.lax.optimization_barrier((w, along))
    x, pull = jax.vjp(run, mix(again, kernel))
    (dmixed,) = pull(norm * (d - x * along))
    again, dmixed = jax.lax.optimization_barrier((w, dmixed.astype(w.dtype)))
    dw, dkernel = jax.vjp(mix, again, kernel)[1](dmixed.astype(d.dtype))
    return dw, dkernel, None, None


_units.defvjp(_forward, _backward)
