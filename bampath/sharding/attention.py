"""The attention kernels on a mesh. XLA cannot cut a fused kernel, so each device calls it on its own rows and heads.

Inside `shard_map` batch and heads are independent and nothing is communicated for them; parameters of priors come in
whole per head, and the sum of their gradients over rows is one small all-reduce that JAX adds. With a context axis the
tokens of a row are spread as well, see `context`.
"""

from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from bampath.sharding import context
from bampath.sharding.mesh import BATCH, current
from kernels.attention import api as attention_api
from kernels.lsh import api as lsh_api
from kernels.path import api as path_api

Array = jax.Array

_ROWS = P(BATCH, "context")
_HEADS = P(BATCH, "context", "tensor")
SPECS: dict[str, P] = {
    **dict.fromkeys(("q", "k", "v", "w", "beta", "log_gates", "sharpness"), _HEADS),
    **dict.fromkeys(("segment_ids", "positions"), _ROWS),
    **dict.fromkeys(("prior", "widths", "offsets"), P("tensor")),
}


def attend(arrays: dict[str, Any], **options: Any) -> Array:
    """Attention of whole rows -> o [B, T, H, Dv], on the mesh in use if there is one.

    arrays: those of q, k, v, w, beta, log_gates, sharpness, segment_ids, positions, prior, widths, offsets that the
    call has (None counts as absent). w and beta make it PaTH's, widths and offsets positional LSH's. positions serve
    queries and keys. options: the kernel's static ones.
    """
    arrays = {name: value for name, value in arrays.items() if value is not None}
    mesh = current()
    if mesh is None:
        return _local(arrays, **options)
    if mesh.shape["context"] > 1:
        if "widths" in arrays:
            raise ValueError(
                f"lsh cannot be spread over mesh.context={mesh.shape['context']}: use a mesh with context=1"
            )
        if "positions" in arrays:
            raise ValueError(
                f"explicit positions cannot be spread over mesh.context={mesh.shape['context']}: leave them out (rows "
                "of whole documents in order need none), or use a mesh with context=1"
            )
        options |= {"size": mesh.shape["context"]}
        local = partial(context.path_attention if "w" in arrays else context.attention, **options)
    else:
        local = partial(_local, **options)
    specs = {name: SPECS[name] for name in arrays}
    return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=_HEADS, check_vma=False)(arrays)


def _local(arrays: dict[str, Any], **options: Any) -> Array:
    call = dict(arrays)
    q, k, v = (call.pop(name) for name in "qkv")
    if "w" in call:
        return path_api.path_attention(q, k, v, call.pop("w"), call.pop("beta"), **call, **options)
    if "widths" in call:
        return lsh_api.lsh_attention(q, k, v, call.pop("widths"), call.pop("offsets"), **call, **options)
    positions = call.pop("positions", None)
    return attention_api.attention(q, k, v, positions=positions, kv_positions=positions, **call, **options)
