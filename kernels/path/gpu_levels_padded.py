"""`gpu_levels.py` for head_dims below 64, which the attention kernels between blocks do not take: pads what goes in."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.path import gpu_levels
from kernels.path.gpu_narrow import tile_width
from kernels.path.levels import Level

Array = jax.Array
Leaves = dict[str, Any]


def _wide(x: Array) -> Array:
    """[…, D] -> […, 64 at least]."""
    missing = tile_width(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _wide_leaves(x: Leaves) -> Leaves:
    return x | {"v": _wide(x["v"])}


class State(NamedTuple):
    """`gpu_levels.Recomputed` of padded arrays, and their own head_dim."""

    wide: gpu_levels.Recomputed
    dim: int


def level_forward(
    options: Any, x: Leaves, level: Level, q: Array, keys: Array, before: tuple[Array, Array]
) -> tuple[Array, Array]:
    below = (_wide(before[0]), before[1])
    o, lse = gpu_levels.level_forward(options, _wide_leaves(x), level, _wide(q), _wide(keys), below)
    return o[..., : q.shape[-1]], lse


def recompute(options: Any, x: Leaves, level: Level, q: Array, keys: Array, do: Array, lse: Array) -> State:
    wide = gpu_levels.recompute(options, _wide_leaves(x), level, _wide(q), _wide(keys), _wide(do), lse)
    return State(wide, q.shape[-1])


def query_side(state: State, delta: Array) -> dict[str, Any]:
    out = gpu_levels.query_side(state.wide, delta)
    return out | {"dq": out["dq"][..., : state.dim]}


def key_side(state: State, delta: Array) -> dict[str, Array]:
    out = gpu_levels.key_side(state.wide, delta)
    return out | {n: out[n][..., : state.dim] for n in ("keys", "v")}
