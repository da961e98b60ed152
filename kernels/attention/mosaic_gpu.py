"""Backend "mosaic_gpu": fused attention for Hopper GPUs with Pallas Mosaic GPU, output and every gradient.

docs/kernels.md explains the algorithm; the kernels are in mosaic_gpu_forward.py, mosaic_gpu_backward.py (queries) and
mosaic_gpu_backward_keys.py, their calculus around them in mosaic_gpu_fused.py.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels.attention import masks
from kernels.attention.call import Call

Array = jax.Array
LARGEST_HEAD = 128
SHARED_MEMORY = 227 * 1024  # bytes that a block on Hopper can have
KEYS_AT_ONCE = 256


def machine_lacks() -> str | None:
    """None, or what this machine lacks for Mosaic GPU kernels."""
    if jax.__version_info__ < (0, 11, 2):
        return f"needs jax >= 0.11.2, this is {jax.__version__}"
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA Hopper GPU, the default backend is {jax.default_backend()}"
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if not str(capability).startswith("9."):
        return f"needs an NVIDIA Hopper GPU (compute capability 9.x), this one has {capability}"
    return None


def supports(call: Call) -> str | None:
    """None, or why these kernels cannot serve the call."""
    return machine_lacks() or refusal(call)


def refusal(call: Call) -> str | None:
    """What `supports` says on a Hopper GPU."""
    if call.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q, k and v must be bfloat16 or float16, got {call.q.dtype}"
    head = max(call.q.shape[-1], call.v.shape[-1])
    if head > LARGEST_HEAD:
        return f"head_dim {head} is more than {LARGEST_HEAD}"
    if call.q_positions is not None:
        return "explicit positions are not served, only the default order (with segment_ids for packed rows)"
    return None


@functools.cache
def _tile_table() -> dict[str, dict[str, dict[str, str]]]:
    """head_dim -> what is added to the content -> kernel -> Tiles as text; measured, see docs/kernels.md."""
    return json.loads((Path(__file__).parent / "mosaic_gpu_tiles.json").read_text())


def _table_row(call: Call) -> str:
    """Which row of the table a call takes. Gates with more than gates need registers in every tile, not in some."""
    if call.gates is not None:
        return "gates" if call.prior is None and call.q_segments is None else "gates and more"
    return "plain" if call.prior is None else "prior"


def _padded_to(x: Array, axis: int, multiple: int) -> Array:
    extra = -x.shape[axis] % multiple
    widths = [(0, extra if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths) if extra else x


def _seen_keys(call: Call) -> Array | None:
    """[B or 1, S]: is there a query that sees the key; None if every key is known to be seen."""
    if call.every_key_is_seen():
        return None
    q_pos, k_pos = call.positions()
    if call.q_segments is None or call.kv_segments is None:
        assert call.window is not None
        return k_pos + call.window > q_pos[:, :1]
    q_seg, k_seg = call.q_segments, call.kv_segments
    if q_seg.shape != k_seg.shape:
        return _searched(call, q_seg, k_seg)
    # Rows packed alike see at least their own key; only then is a padding id the one reason to be unseen.
    return lax.cond((q_seg == k_seg).all(), lambda q, k: k >= 0, lambda q, k: _searched(call, q, k), q_seg, k_seg)


def _has_query(q_segments: Array, kv_segments: Array, q_positions: Array, k_positions: Array | None) -> Array:
    """[B, S]: is there a query of the key's segment, not before the key unless k_positions is None.

    q_positions [1, T] grow along the row, so the last query of a segment tells.
    """
    order = jnp.argsort(q_segments, axis=1, stable=True)
    ids = jnp.take_along_axis(q_segments, order, axis=1)
    place = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(ids, kv_segments) - 1
    place = jnp.maximum(place, 0)
    found = (jnp.take_along_axis(ids, place, axis=1) == kv_segments) & (kv_segments >= 0)
    if k_positions is None:
        return found
    last = jnp.take_along_axis(jnp.broadcast_to(q_positions, order.shape), order, axis=1)
    return found & (jnp.take_along_axis(last, place, axis=1) >= k_positions)


def _searched(call: Call, q_segments: Array, kv_segments: Array) -> Array:
    """The same from the definition."""
    q_pos, k_pos = call.positions()
    if call.window is None:
        return _has_query(q_segments, kv_segments, q_pos, k_pos if call.causal else None)
    keys = _padded_to(jnp.broadcast_to(k_pos, kv_segments.shape), 1, KEYS_AT_ONCE)
    segments = jnp.pad(kv_segments, ((0, 0), (0, keys.shape[1] - kv_segments.shape[1])), constant_values=-1)

    def block(part: tuple[Array, Array]) -> Array:
        k, s = (x[:, None, :] for x in part)
        rule = functools.partial(masks.visible, causal=call.causal, window=call.window)
        return rule(q_pos[:, :, None], k, q_segments[:, :, None], s).any(axis=1)

    split = lambda x: x.reshape(x.shape[0], -1, KEYS_AT_ONCE).swapaxes(0, 1)
    seen = lax.map(block, (split(keys), split(segments)))
    return seen.swapaxes(0, 1).reshape(keys.shape)[:, : kv_segments.shape[1]]


def stored_head(head_dim: int) -> int:
    """The head_dim that the kernels read: rows are whole numbers of 16 bytes, and tiles 64 or 128 wide. Past 64 columns
    the copy engine has no tiles that the end of a row cuts."""
    return -(-head_dim // 8) * 8 if head_dim <= 64 else LARGEST_HEAD


def _prepared(x: Array, head_dim: int, seen: Array | None = None) -> Array:
    """[B, length, heads, D] with D padded to `head_dim`, length to a multiple of 8, and zero where nobody looks."""
    if seen is not None:
        x = jnp.where(seen[:, :, None, None], x, jnp.zeros((), x.dtype))
    return _padded_to(_padded_to(x, 3, head_dim), 1, 8)


def _check_room(tiles: Any, head_dim: int, call: Call) -> None:
    """Raise ValueError if a kernel would ask for more shared memory than a block can have."""
    tables = 0 if call.prior is None else 1
    for name, t, stationary, slices in zip(
        ("forward", "queries", "keys"), tiles, (1, 2, 2), (tables, 9 * tables, tables), strict=True
    ):
        need = t.shared_memory(head_dim, call.q.dtype.itemsize, stationary, slices)
        if need > SHARED_MEMORY:
            raise ValueError(f"tiles {t} of the {name} kernel need about {need} bytes of {SHARED_MEMORY} shared memory")


def attend(call: Call, tiles: Any = None, skip: bool = True) -> tuple[Array, Array]:
    """(o [B, T, H, Dv], lse [B, T, H]). tiles: (forward, queries, keys) instead of the table's, for measurements.

    skip: leave out the tiles that forget gates prove to weigh nothing (mosaic_gpu_skip.py).
    """
    from kernels.attention.mosaic_gpu_fused import Options, fused
    from kernels.attention.mosaic_gpu_spec import Tiles

    head = stored_head(max(call.q.shape[-1], call.v.shape[-1]))
    wide = 64 if head <= 64 else 128
    row = _tile_table()[str(wide)][_table_row(call)]
    options = Options(
        log_prior=None if call.prior is None else call.prior.log_prior,
        scale=call.scale,
        causal=call.causal,
        window=call.window,
        sharpen_prior=call.sharpen_prior,
        lengths=(call.q.shape[1], call.k.shape[1]),
        tiles=tiles or tuple(Tiles.parse(row[n]) for n in ("forward", "queries", "keys")),
        skip=skip,
    )
    _check_room(options.tiles, wide, call)
    seen = _seen_keys(call)
    leaves = {
        "q": _prepared(call.q, head),
        "k": _prepared(call.k, head, seen),
        "v": _prepared(call.v, head, seen),
        "params": None if call.prior is None else call.prior.params,
        "sharpness": call.sharpness,
        "gates": call.gates,
        "q_segments": call.q_segments,
        "kv_segments": call.kv_segments,
    }
    o, lse = fused(options, leaves)
    return o[:, : call.q.shape[1], :, : call.v.shape[-1]], lse
