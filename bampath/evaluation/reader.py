"""What an evaluation needs of a model: logits at chosen places of long rows, and the loss of every token.

Two implementations of the same two methods: rows up to `chunk` tokens go through the model in one forward, longer ones
in pieces through its cache. Neither ever holds logits of more than a few thousand tokens, nor any T × T array, so
memory grows with the length of a row and not with its square.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from bampath.generate import stream_features
from bampath.loss import chunk_columns
from bampath.model import LM, head_kernel

Array = jax.Array
CHUNK = 32_768  # tokens of a row in one forward
LOSS_CHUNK = 4096  # tokens whose logits exist at one time


class Reader(Protocol):
    """A model as evaluations see it. Rows are independent; what stands right of a place cannot influence it."""

    def logits_at(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Logits [B, n, V] float32 of the token after each of `places` [B, n], for rows `tokens` [B, T] int32."""
        ...

    def losses(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Cross-entropy [B, T] float32 of targets [B, T] after rows `tokens` [B, T] int32."""
        ...


class ModelReader:
    """A trained LM and its plain parameters as a `Reader`. chunk: rows longer than this are read through the cache."""

    def __init__(self, model: LM, params: Any, chunk: int = CHUNK) -> None:
        if chunk < 1:
            raise ValueError(f"chunk={chunk} must be at least 1")
        self.model, self.params, self.chunk = model, params, chunk

    def logits_at(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        """See `Reader.logits_at`. ValueError for places outside the rows."""
        if places.shape[0] != tokens.shape[0] or places.min() < 0 or places.max() >= tokens.shape[1]:
            raise ValueError(f"places {places.shape} must be [B, n] with values in tokens {tokens.shape}, here [B, T]")
        if tokens.shape[1] <= self.chunk:
            return np.asarray(_row_logits(self.model, self.params, tokens, places))
        found: Array | None = None
        for start, hidden_BTD in self._pieces(tokens):
            local = places - start
            taken_BND = _take(hidden_BTD, np.clip(local, 0, hidden_BTD.shape[1] - 1))
            here = (local >= 0) & (local < hidden_BTD.shape[1])
            found = taken_BND if found is None else jnp.where(here[:, :, None], taken_BND, found)
        return np.asarray(_logits(self.model, self.params, found))

    def losses(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """See `Reader.losses`."""
        if targets.shape != tokens.shape:
            raise ValueError(f"targets {targets.shape} must have the shape of tokens {tokens.shape}")
        if tokens.shape[1] <= self.chunk:
            return np.asarray(_row_losses(self.model, self.params, tokens, targets))
        kernel = head_kernel(self.params)
        pieces = [
            np.asarray(token_losses(hidden_BTD, kernel, targets[:, start : start + hidden_BTD.shape[1]]))
            for start, hidden_BTD in self._pieces(tokens)
        ]
        return np.concatenate(pieces, axis=1)

    def _pieces(self, tokens: np.ndarray) -> Iterator[tuple[int, Array]]:
        return stream_features(self.model, self.params, tokens, self.chunk)


def _features(model: LM, params: Any, tokens: Array) -> Any:
    return model.apply({"params": params}, tokens, method="features")


@jax.jit
def _take(hidden_BTD: Array, places: Array) -> Array:
    """Hidden states [B, n, D] at places [B, n]."""
    return jnp.take_along_axis(hidden_BTD, places[:, :, None], axis=1)


@partial(jax.jit, static_argnums=0)
def _logits(model: LM, params: Any, hidden: Array) -> Any:
    return model.apply({"params": params}, hidden, method="logits")


@partial(jax.jit, static_argnums=0)
def _row_logits(model: LM, params: Any, tokens: Array, places: Array) -> Array:
    return _logits(model, params, _take(_features(model, params, tokens), places))


@partial(jax.jit, static_argnums=0)
def _row_losses(model: LM, params: Any, tokens: Array, targets: Array) -> Array:
    return token_losses(_features(model, params, tokens), head_kernel(params), targets)


@jax.jit
def token_losses(hidden_BTD: Array, kernel_DV: Array, targets: Array) -> Array:
    """Cross-entropy of every token [B, T] float32, with the logits of a few thousand tokens in memory at a time."""
    batch, length, _ = hidden_BTD.shape
    columns = chunk_columns(batch, length, LOSS_CHUNK)
    pad = -length % columns
    kernel = kernel_DV.astype(hidden_BTD.dtype)
    cut = lambda x: jnp.moveaxis(
        jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)).reshape(batch, -1, columns, *x.shape[2:]), 1, 0
    )

    def piece(pair: tuple[Array, Array]) -> Array:
        logits = jnp.matmul(pair[0], kernel, preferred_element_type=jnp.float32)
        hit = jnp.take_along_axis(logits, pair[1][:, :, None], axis=-1)[:, :, 0]
        return jax.nn.logsumexp(logits, axis=-1) - hit

    losses = jax.lax.map(piece, (cut(hidden_BTD), cut(targets)))
    return jnp.moveaxis(losses, 0, 1).reshape(batch, -1)[:, :length]
