"""Cross-entropy of a large vocabulary, a few tokens at a time.

The logits of T = 65,536 tokens over 50,000 words are 13 GB in float32, so they never exist at once: rows are cut along
the length, and each piece's logits, loss and gradient are made together and dropped. What is kept for the backward pass
is the gradient itself (of the hidden states and of the head), which a scalar cotangent only has to scale. The work is
that of a dense loss: one product forward and two backward.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def cross_entropy(
    hidden_BTD: Array, kernel_DV: Array, targets_BT: Array, weights_BT: Array, *, chunk: int = 4096
) -> tuple[Array, Array]:
    """Summed cross-entropy of `softmax(hidden @ kernel)` and the sum of the weights, float32 (float64 for such input).

    hidden [B, T, D] in the compute dtype; kernel [D, V] is cast to it, products accumulate in float32; targets [B, T]
    integers below V (one that is no word has its log-sum-exp as loss); weights [B, T] float32, where tokens of weight 0
    contribute nothing, whatever their hidden state and target hold.
    `chunk` bounds the tokens whose logits exist at one time (at least one column of B). The mean loss is the quotient
    of the two numbers, taken after summing each over batches. Differentiable once, in hidden, kernel and weights
    (a weight of 0 gets gradient 0).
    """
    if hidden_BTD.ndim != 3 or kernel_DV.ndim != 2 or hidden_BTD.shape[2] != kernel_DV.shape[0]:
        raise ValueError(f"hidden {hidden_BTD.shape} must be [B, T, D] and kernel {kernel_DV.shape} [D, V]")
    if 0 in hidden_BTD.shape:
        raise ValueError(f"hidden has shape {hidden_BTD.shape}; every dimension must be at least 1")
    if not jnp.issubdtype(targets_BT.dtype, jnp.integer):
        raise TypeError(f"targets has dtype {targets_BT.dtype}; it must be int32")
    for name, array in (("targets", targets_BT), ("weights", weights_BT)):
        if array.shape != hidden_BTD.shape[:2]:
            raise ValueError(f"{name} has shape {array.shape}; it must be hidden's [B, T] = {hidden_BTD.shape[:2]}")
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    columns = chunk_columns(hidden_BTD.shape[0], hidden_BTD.shape[1], chunk)
    weights_BT = weights_BT.astype(jnp.float32)
    targets_BT = targets_BT.astype(jnp.int32)  # 8 bits cannot count the words that targets are compared with
    return _loss_sum(columns, hidden_BTD, kernel_DV, targets_BT, weights_BT), jnp.sum(weights_BT)


def chunk_columns(batch: int, length: int, chunk: int) -> int:
    """Columns of a [batch, length] block per piece: at most chunk / batch, evened out so that padding stays small."""
    most = max(1, min(length, chunk // batch))
    pieces = -(-length // most)
    return -(-length // pieces)


def _pieces(columns: int, array_BT: Array) -> Array:
    """[B, T, …] -> [pieces, B, columns, …], zero-padded at the end."""
    batch, length = array_BT.shape[:2]
    pieces = -(-length // columns)
    padding = [(0, 0), (0, pieces * columns - length)] + [(0, 0)] * (array_BT.ndim - 2)
    padded = jnp.pad(array_BT, padding) if pieces * columns > length else array_BT
    return jnp.moveaxis(padded.reshape(batch, pieces, columns, *array_BT.shape[2:]), 1, 0)


def _rows(pieces: Array, length: int) -> Array:
    """The inverse of `_pieces`."""
    joined = jnp.moveaxis(pieces, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :length]


def _wide(dtype: Any) -> Any:
    """The type that sums and logits are kept in: float32, or float64 where the input is."""
    return jnp.promote_types(dtype, jnp.float32)


def _piece(kernel_DV: Array, hidden: Array, targets: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Of one piece [B, C]: losses [B, C], 0 where the weight is; probabilities and one-hot targets [B, C, V]."""
    logits = jnp.einsum("bcd,dv->bcv", hidden, kernel_DV, preferred_element_type=_wide(hidden.dtype))
    words = jnp.arange(logits.shape[-1], dtype=targets.dtype)
    hit = targets[:, :, None] == words[None, None, :]
    lse = jax.nn.logsumexp(logits, axis=-1)
    losses = jnp.where(weights != 0, lse - jnp.sum(jnp.where(hit, logits, 0.0), axis=-1), 0.0)
    return losses, jnp.exp(logits - lse[:, :, None]), hit


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(columns: int, hidden_BTD: Array, kernel_DV: Array, targets_BT: Array, weights_BT: Array) -> Array:
    kernel = kernel_DV.astype(hidden_BTD.dtype)

    def add(total: Array, piece: tuple[Array, ...]) -> tuple[Array, None]:
        losses, _, _ = _piece(kernel, *piece)
        return total + jnp.sum(losses * piece[2]), None

    pieces = tuple(_pieces(columns, a) for a in (hidden_BTD, targets_BT, weights_BT))
    return jax.lax.scan(add, jnp.zeros((), _wide(hidden_BTD.dtype)), pieces)[0]


def _loss_sum_fwd(
    columns: int, hidden_BTD: Array, kernel_DV: Array, targets_BT: Array, weights_BT: Array
) -> tuple[Array, Any]:
    kernel, wide = kernel_DV.astype(hidden_BTD.dtype), _wide(hidden_BTD.dtype)
    product = partial(jnp.einsum, preferred_element_type=wide)

    def add(carry: tuple[Array, Array], piece: tuple[Array, ...]) -> tuple[tuple[Array, Array], Any]:
        total, d_kernel = carry
        hidden, _, weights = piece
        losses, probabilities, hit = _piece(kernel, *piece)
        scored = (weights != 0)[:, :, None]
        d_logits = jnp.where(scored, jnp.where(hit, probabilities - 1, probabilities) * weights[:, :, None], 0.0)
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden = product("bcv,dv->bcd", d_logits, kernel).astype(hidden.dtype)
        d_kernel += product("bcd,bcv->dv", jnp.where(scored, hidden, 0), d_logits)
        return (total + jnp.sum(losses * weights), d_kernel), (d_hidden, losses)

    pieces = tuple(_pieces(columns, a) for a in (hidden_BTD, targets_BT, weights_BT))
    start = (jnp.zeros((), wide), jnp.zeros(kernel_DV.shape, wide))
    (total, d_kernel), (d_hidden, losses) = jax.lax.scan(add, start, pieces)
    length = hidden_BTD.shape[1]
    return total, (_rows(d_hidden, length), d_kernel.astype(kernel_DV.dtype), _rows(losses, length))


def _loss_sum_bwd(columns: int, saved: Any, g: Array) -> tuple[Array, Array, None, Array]:
    d_hidden, d_kernel, losses = saved
    scaled = lambda a: (a.astype(g.dtype) * g).astype(a.dtype)  # a factor rounded to bfloat16 would bias the gradient
    return scaled(d_hidden), scaled(d_kernel), None, (losses * g).astype(jnp.float32)


_loss_sum.defvjp(_loss_sum_fwd, _loss_sum_bwd)
