"""A short causal convolution that knows documents, padding and what came before."""

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def short_conv(
    x_BTC: Array, kernel_WC: Array, segment_ids: Array, positions: Array, carry: Any = None
) -> tuple[Array, Any]:
    """y_t = Σ_{m < W} kernel[W - 1 - m] · x_{t - m}, per channel, over the tokens of t's own document only.

    t - m counts real tokens: padding (negative segment ids) is skipped, wherever it stands. A document ends where the
    segment id changes or the position does not increase. Tap W - 1 is the token itself, as in PyTorch's causal conv1d.

    x [B, T, C], kernel [W, C]; segment_ids, positions [B, T] int32. carry: None, or the state that `empty_conv` or the
    last call gave; then the state after these tokens comes back too. Without a carry, padding may stand before and
    after the documents of a row but not inside one. Outputs at padding mean nothing.
    """
    if carry is None:
        return _conv(x_BTC, kernel_WC, documents(segment_ids, positions)), None
    kept = kernel_WC.shape[0] - 1
    x = jnp.concatenate([carry["inputs"], x_BTC], axis=1)
    ids = jnp.concatenate([carry["segment_ids"], segment_ids], axis=1)
    at = jnp.concatenate([carry["positions"], positions], axis=1)
    order = jnp.argsort(ids >= 0, axis=1, stable=True)  # padding first, then the real tokens in their order
    x, ids, at = (
        jnp.take_along_axis(x, order[:, :, None], axis=1),
        jnp.take_along_axis(ids, order, axis=1),
        jnp.take_along_axis(at, order, axis=1),
    )
    y = _conv(x, kernel_WC, documents(ids, at))
    back = jnp.argsort(order, axis=1)[:, kept:]
    state = {"inputs": x[:, -kept:], "segment_ids": ids[:, -kept:], "positions": at[:, -kept:]} if kept else carry
    return jnp.take_along_axis(y, back[:, :, None], axis=1), state


def empty_conv(width: int, channels: int, batch: int) -> dict[str, Array]:
    """The state before the first token: the last width - 1 inputs, all of them padding. float32, so that decoding
    repeats the full forward whatever the compute dtype."""
    kept = width - 1
    return {
        "inputs": jnp.zeros((batch, kept, channels), jnp.float32),
        "segment_ids": jnp.full((batch, kept), -1, jnp.int32),
        "positions": jnp.zeros((batch, kept), jnp.int32),
    }


def documents(segment_ids: Array, positions: Array) -> Array:
    """A number per document of a row, [B, T] int32; -1 at padding."""
    starts = (segment_ids != _shift(segment_ids, 1, -1)) | (positions <= _shift(positions, 1, -1))
    return jnp.where(segment_ids < 0, -1, jnp.cumsum(starts, axis=1, dtype=jnp.int32))


def _conv(x_BTC: Array, kernel_WC: Array, document: Array) -> Array:
    y = x_BTC * kernel_WC[-1][None, None, :]
    for back in range(1, kernel_WC.shape[0]):
        same = document == _shift(document, back, -2)
        y = y + jnp.where(same[:, :, None], _shift(x_BTC, back, 0), 0) * kernel_WC[-1 - back][None, None, :]
    return y


def _shift(x: Array, back: int, fill: int) -> Array:
    """x[:, t - back] at t, `fill` where there is none."""
    padded = jnp.pad(x, ((0, 0), (back, 0)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
    return padded[:, : x.shape[1]]
