"""Backend "pallas_triton": fused LSH attention for NVIDIA GPUs from Ampere on, output and gradients of q, k and v.

A block of queries visits the keys from its earliest block start to the diagonal, a block of keys the queries from the
diagonal to its latest block end, so time and memory grow linearly with the length. docs/lsh.md has the measurements;
the kernels are in gpu_kernels.py.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from kernels import triton
from kernels.attention.triton_gpu import LN2
from kernels.lsh.call import Call, Combine
from kernels.lsh.gpu_kernels import MOST_HELD, Spec, forward, key_gradients, query_gradients
from kernels.triton import Chosen, Tiles, padded_head

Array = jax.Array
LONGEST = 1 << 24  # rows are compared as float32
MULTIPLE = 128  # lengths are padded to it; every tile divides it


# Bytes of a number -> head_dim up to -> tiles; measured, see docs/lsh.md.
TILES = {
    2: {
        64: ("64x32x4x3", "64x32x4x3", "64x32x4x3"),
        128: ("64x64x4x2", "64x32x4x2", "64x32x4x2"),
        256: ("64x32x8x2", "32x32x4x1", "32x32x4x1"),
    },
    4: {
        64: ("64x32x4x2", "32x32x4x2", "32x32x4x2"),
        128: ("32x32x4x2", "32x32x4x1", "32x32x4x1"),
        256: ("32x16x4x1", "32x16x4x1", "32x16x4x1"),
    },
}


@dataclass(frozen=True)
class Options:
    """The static part of a call beyond what `Call` holds."""

    tiles: Chosen
    interpret: bool = False


def supports(call: Call, combine: Combine) -> str | None:
    """None, or why these kernels cannot serve the call; they serve both ways to combine."""
    return triton.machine_lacks() or refusal(call, triton.capability())


def refusal(call: Call, device: str) -> str | None:
    """What `supports` says on a GPU of compute capability `device`."""
    if call.q.shape[1] > LONGEST:
        return f"length {call.q.shape[1]} is more than {LONGEST}"
    return triton.refusal(call.q, call.v, device, choose_tiles)


def choose_tiles(head_dim: int, itemsize: int, room: int) -> Chosen:
    """The measured tiles, made smaller where they would need more than `room` bytes of shared memory."""
    row = TILES[itemsize][max(64, head_dim)]
    return Chosen(*(Tiles.parse(tiles).fitted(head_dim, itemsize, room) for tiles in row))


def make_spec(options: Options, call: Call) -> Spec:
    """What the kernels must know of a call when they are compiled."""
    integer = jnp.issubdtype(call.widths.dtype, jnp.integer)
    return Spec(
        length=call.q.shape[1],
        group=call.q.shape[2] // call.k.shape[2],
        samples=call.samples,
        scale=call.scale,
        causal=call.causal,
        documents=call.first is not None,
        drawn=not integer or call.samples > MOST_HELD,
        exact=call.q.dtype == jnp.float32,
        interpret=options.interpret,
    )


def _padded(x: Array, axis: int, value: Any = 0) -> Array:
    extra = -x.shape[axis] % MULTIPLE
    widths = [(0, extra if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if extra else x


def _wide(call: Call, x: Array) -> Array:
    """[B, padded T, heads, padded D]; zeros in padding, whose contents must not matter."""
    if call.first is not None:
        x = jnp.where((call.first < x.shape[1])[:, :, None, None], x, jnp.zeros((), x.dtype))
    extra = padded_head(x.shape[3]) - x.shape[3]
    return _padded(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, extra))) if extra else x, 1)


def _inputs(spec: Spec, call: Call) -> dict[str, Array]:
    """What all three kernels read."""
    arrays = {n: _wide(call, getattr(call, n)) for n in ("q", "k", "v")}
    length = spec.length
    if spec.drawn:
        starts, stops = call.block_lines()
        return arrays | {"starts": _padded(starts, 3, length), "stops": _padded(stops, 3)}
    arrays |= {"widths": call.widths.astype(jnp.int32), "offsets": call.offsets.astype(jnp.int32)}
    if call.first is not None and call.after is not None:
        arrays |= {"first": _padded(call.first, 1, length), "after": _padded(call.after, 1)}
    return arrays


def _fused_forward(options: Options, call: Call) -> tuple[Array, Array]:
    spec = make_spec(options, call)
    out = forward(spec, options.tiles.forward, _inputs(spec, call))
    lse = out["lse"][:, :, : spec.length].transpose(0, 2, 1) * LN2 - math.log(spec.samples)
    return out["o"][:, : spec.length, :, : call.v.shape[-1]], lse


def _lines(x: Array, value: float = 0.0) -> Array:
    """[B, T, H] -> [B, H, padded T]."""
    return _padded(x.transpose(0, 2, 1), 2, value)


def _fused_backward(options: Options, call: Call, o: Array, lse: Array, do: Array, dlse: Array) -> Call:
    spec = make_spec(options, call)
    alive = lse > -jnp.inf
    base2 = jnp.where(alive, (lse + math.log(spec.samples)) / LN2, jnp.inf)
    arrays = _inputs(spec, call) | {"do": _wide(call, do.astype(call.q.dtype)), "lse": _lines(base2, math.inf)}
    theirs = {"o": _wide(call, o), "dlse": _lines(jnp.where(alive, dlse, 0))}
    mine = query_gradients(spec, options.tiles.queries, arrays | theirs)
    found = key_gradients(spec, options.tiles.keys, arrays | {"delta": mine["delta"]})
    cut = lambda x, like: x[:, : spec.length, :, : like.shape[-1]]
    return call.cotangent(cut(mine["dq"], call.q), cut(found["dk"], call.k), cut(found["dv"], call.v))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, call: Call) -> tuple[Array, Array]:
    return _fused_forward(options, call)


def _attend_fwd(options: Options, call: Call) -> Any:
    o, lse = _fused_forward(options, call)
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse), (call, o, lse)


def _attend_bwd(options: Options, saved: tuple[Call, Array, Array], cotangents: tuple[Array, Array]) -> tuple[Call]:
    return (_fused_backward(options, *saved, *cotangents),)


_attend.defvjp(_attend_fwd, _attend_bwd)


def options_for(call: Call) -> Options:
    """The options of a call: the measured tiles, as large as this GPU takes them."""
    wide = padded_head(max(call.q.shape[-1], call.v.shape[-1]))
    return Options(choose_tiles(wide, call.q.dtype.itemsize, triton.room_on(triton.capability())))


def attend(call: Call, combine: Combine, options: Options | None = None) -> tuple[Array, Array | None]:
    """(o, lse) as in `reference.attend`, without lse for "mean": one call per sample, averaged.

    options: instead of the measured ones, for tests and measurements.
    """
    options = options or options_for(call)
    if combine == "shared":
        return _attend(options, call)
    wide = (*call.q.shape[:3], call.v.shape[-1])
    add = lambda total, m: (total + _attend(options, call.sample(m))[0].astype(jnp.float32), None)
    total, _ = lax.scan(add, jnp.zeros(wide, jnp.float32), jnp.arange(call.samples))
    return (total / call.samples).astype(call.q.dtype), None
