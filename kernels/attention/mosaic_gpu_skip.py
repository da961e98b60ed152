"""Forget gates: which tiles can be left out because all of them together weigh less than `LOST` in every row.

After the adaptive computation pruning of Lin et al. (arXiv 2504.06949), with the bound proved per block. Let row i see
its own key i (all calls that get here do). With the content c, u_i = scale ‖q_i‖ max ‖k‖ ≥ c_ij, the prior p and gate
sums G (G' is the own key's), for any j

    logit_ij − logit_ii  ≤  |r_i| u_i − r_i c_ii + r_i (max p − p(0)) + r_i (G_i − G_j − (G_i − G_i'))

and the softmax weight of all keys for which the right side is below −ln S − ln 1/LOST adds up to less than LOST. Gate
sums enter by their greatest value in a block of queries and their least in a tile of keys, so nothing depends on their
order, and documents that restart them only make the bound more careful.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels.attention.mosaic_gpu_spec import Spec, Tiles

Array = jax.Array
LOST = 2.0**-24
SLACK = 1.0  # nats for the rounding of sums far from 0


def can_skip(gates: bool, causal: bool, queries: int, keys: int) -> bool:
    """Is the bound defined: every query has a key of its own."""
    return gates and causal and keys >= queries


def _own_keys(x: dict[str, Any], shift: int) -> Array:
    """Does every query see its own key, as far as segments go: bool scalar."""
    if x["q_segments"] is None:
        return jnp.array(True)
    own = x["kv_segments"][:, shift:]
    return ((x["q_segments"] == own) | (x["q_segments"] < 0)).all()


def keep_bounds(spec: Spec, x: dict[str, Any], prior: Array | None, tiles: Tiles, queries_are_blocks: bool) -> Array:
    """First tile, and one past the last, that each block must visit: int32 [B, H or Hkv, blocks, 2].

    x: the leaves of `mosaic_gpu_fused.fused`; prior: log-prior over distance [H, table length] or None.
    """
    shift = spec.shift
    q_sum, k_sum = (x["gates"][n] + x["gates"][n + 1] for n in (0, 2))  # [B, T or S, H]
    own = q_sum - k_sum[:, shift:]
    norm = lambda y, length: jnp.sqrt(jnp.square(y[:, :length].astype(jnp.float32)).sum(-1))
    longest = jnp.repeat(norm(x["k"], spec.keys).max(1), spec.group, axis=1)[:, None]  # [B, 1, H]
    r = jnp.ones((1, 1, 1)) if x["sharpness"] is None else x["sharpness"]
    spread = jnp.zeros((1, 1, 1)) if prior is None else (prior.max(1) - prior[:, spec.origin])[None, None, :]
    outer = r if spec.sharpen_prior else jnp.ones_like(r)
    mine = jnp.repeat(x["k"][:, shift : spec.keys].astype(jnp.float32), spec.group, axis=2)
    content = (x["q"][:, : spec.queries].astype(jnp.float32) * mine).sum(-1)
    margin = spec.scale * (jnp.abs(r) * norm(x["q"], spec.queries) * longest - r * content) + jnp.abs(outer) * spread
    margin = margin + (math.log(spec.keys / LOST) + SLACK)
    q_size, k_size = (tiles.rows, tiles.step) if queries_are_blocks else (tiles.step, tiles.rows)
    greatest = lambda y, size: -_least(-y, size)
    span = greatest(q_sum, q_size)[:, :, None] - _least(k_sum, k_size)[:, None, :] - _least(own, q_size)[:, :, None]
    falls = _least(outer, q_size)[:, :, None] * span + greatest(margin, q_size)[:, :, None]
    keep = (falls >= 0) | (span >= 0) | (_least(outer, q_size) <= 0)[:, :, None] | ~_own_keys(x, shift)
    keep = keep.transpose(0, 3, 1, 2)  # [B, H, query chunks, key chunks]
    if not queries_are_blocks:
        keep = keep.swapaxes(2, 3)
        keep = keep.reshape(keep.shape[0], spec.kv_heads, spec.group, *keep.shape[2:]).any(2)
    last = keep.shape[3] - jnp.argmax(keep[..., ::-1], axis=3)
    some = keep.any(3)
    return jnp.stack([jnp.where(some, jnp.argmax(keep, axis=3), 0), jnp.where(some, last, 0)], -1).astype(jnp.int32)


def _least(y: Array, size: int) -> Array:
    """Least value in each chunk of axis 1: [B, n, H] -> [B, chunks, H]; what pads the last chunk does not count."""
    y = jnp.pad(y, ((0, 0), (0, -y.shape[1] % size), (0, 0)), constant_values=jnp.inf)
    return y.reshape(y.shape[0], -1, size, y.shape[2]).min(2)
