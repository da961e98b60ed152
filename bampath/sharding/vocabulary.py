"""The two ends of the model on a mesh, embedding and loss: tables are gathered, used, their gradients scattered once.

Left to XLA, the head's gradient would be summed over all devices once per chunk of the loss, and the embedding's would
be made from hidden states that are moved across the mesh first.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from bampath import loss
from bampath.sharding.mesh import AXES, BATCH, current
from bampath.sharding.rules import TABLE

Array = jax.Array
SHARED_OUT = P(BATCH, ("context", "tensor"))  # hidden states are copies over tensor, so it can share the tokens out


def lookup(table_VD: Array, tokens_BT: Array) -> Array:
    """Rows of an embedding [V, D], cut by rows, at tokens [B, T] of the mesh in use -> [B, T, D]."""
    mesh = current()
    if mesh is None:
        return jnp.take(table_VD, tokens_BT, axis=0)
    specs = (P(TABLE, None), P(BATCH, "context"))
    out = P(BATCH, "context", None)
    return jax.shard_map(_lookup, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(table_VD, tokens_BT)


def _lookup(table: Array, tokens: Array) -> Array:
    return jnp.take(lax.all_gather(table, TABLE, axis=0, tiled=True), tokens, axis=0)


def cross_entropy(
    hidden_BTD: Array, kernel_DV: Array, targets_BT: Array, weights_BT: Array, *, chunk: int = 4096
) -> tuple[Array, Array]:
    """`bampath.loss.cross_entropy` of arrays on the mesh in use. chunk: tokens per device whose logits exist at a time.

    kernel [D, V] is cut by columns; it is gathered in its own type and its gradient scattered again.
    """
    mesh = current()
    if mesh is None:
        return loss.cross_entropy(hidden_BTD, kernel_DV, targets_BT, weights_BT, chunk=chunk)
    specs = (P(*SHARED_OUT, None), P(None, TABLE), SHARED_OUT, SHARED_OUT)
    local = jax.shard_map(
        partial(_local, chunk), mesh=mesh, in_specs=specs, out_specs=(P(AXES), P(AXES)), check_vma=False
    )
    totals, weights = local(hidden_BTD, kernel_DV, targets_BT, weights_BT)
    return jnp.sum(totals), jnp.sum(weights)


def _local(chunk: int, hidden: Array, kernel: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """One device's sums, [1] each, so that adding them up is left to the caller."""
    kernel = lax.all_gather(kernel, TABLE, axis=1, tiled=True)
    total, weight = loss.cross_entropy(hidden, kernel, targets, weights, chunk=chunk)
    return total[None], weight[None]
