"""The attention layer: projections, then the four slots of the positional scheme, then one kernel call.

Nothing here knows a scheme by name. Training, prefill and decode run the same code: with a cache the new tokens attend
to the cached keys and to themselves, without one the row attends to itself.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from bampath import cache as caches
from bampath.cache import LayerCache, View
from bampath.config import ModelConfig
from bampath.params import tagged
from bampath.positions.module import PositionalEncoding
from bampath.positions.registry import Composition
from bampath.positions.slots import Geometry, Slots, Tokens
from bampath.sharding import weight
from bampath.sharding.attention import attend
from kernels.attention.api import attention
from kernels.attention.gates import Pair
from kernels.lsh.decode import lsh_extend
from kernels.path.decode import path_extend
from kernels.path.lazy import fold, lazy_token

Array = jax.Array


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """RMSNorm over the last axis, computed in float32, returned in x's dtype. scale broadcasts from the right."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)).astype(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm with a learned scale of `shape` (by default the last axis of the input)."""

    eps: float
    shape: tuple[int, ...] | None = None
    axes: tuple[str | None, ...] = ("embed",)

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = self.shape or (x.shape[-1],)
        return rms_norm(x, self.param("scale", tagged(nn.initializers.ones, self.axes, "norm"), shape), self.eps)


def weight_init(config: ModelConfig, fan_in: int) -> Any:
    """Initialiser of a weight matrix: PyTorch's U(±1/√fan_in) as in BAM's code, or N(0, init_std) as in PaTH's."""
    if config.init == "normal":
        return nn.initializers.normal(config.init_std)
    bound = fan_in**-0.5

    def uniform(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return uniform


@struct.dataclass
class RowTokens:
    """Where the tokens of a batch of rows stand, built once per forward and handed to every layer.

    positions [B, T] int32, restarting per document; ids [B, T] int32 segment ids. `packed`: the kernel must look at the
    ids; `custom`: it must look at the positions too (otherwise the row's own order gives the same differences, and
    kernels can skip what causality hides without reading anything).
    """

    positions: Array
    ids: Array
    packed: bool = struct.field(pytree_node=False)
    custom: bool = struct.field(pytree_node=False)


class Attention(nn.Module):
    """Multi-head attention with grouped keys whose positional behaviour is all in `composition`.

    `shared` holds the modules of parts that keep one set of parameters for all layers.
    """

    config: ModelConfig
    composition: Composition
    geometry: Geometry
    shared: dict[str, nn.Module] | None = None

    def setup(self) -> None:
        c = self.config
        self.query = self._matrix("query", (c.dim, c.heads, c.head_dim), ("embed", "heads", None))
        self.key = self._matrix("key", (c.dim, c.kv_heads, c.head_dim), ("embed", "kv_heads", None))
        self.value = self._matrix("value", (c.dim, c.kv_heads, c.head_dim), ("embed", "kv_heads", None))
        if c.qkv_bias:
            self.query_bias = self._bias("query_bias", c.heads, "heads")
            self.key_bias = self._bias("key_bias", c.kv_heads, "kv_heads")
            self.value_bias = self._bias("value_bias", c.kv_heads, "kv_heads")
        self.out = self._matrix("out", (c.heads, c.head_dim, c.dim), ("heads", None, "embed"))
        if c.qk_norm:
            self.query_norm = RMSNorm(c.norm_eps, (c.heads, c.head_dim), ("heads", None))
            self.key_norm = RMSNorm(c.norm_eps, (c.kv_heads, c.head_dim), ("kv_heads", None))
        self.position = PositionalEncoding(self.composition, self.geometry, self.shared)

    def _matrix(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array:
        fan_in = shape[0] if axes[0] == "embed" else shape[0] * shape[1]
        return self.param(name, tagged(weight_init(self.config, fan_in), axes, "matrix"), shape)

    def _bias(self, name: str, heads: int, axis: str) -> Array:
        shape = (heads, self.config.head_dim)
        return self.param(name, tagged(nn.initializers.zeros, (axis, None), "bias"), shape)

    def __call__(
        self, x_BTD: Array, tokens: RowTokens, cache: LayerCache | None = None, view: View | None = None
    ) -> tuple[Array, LayerCache | None]:
        """Attend. With `cache`, the new tokens are appended at `view`'s slots and the updated cache comes back."""
        q, k, v = self._project(x_BTD)
        implementation = self.config.attention_impl
        seen = Tokens(x_BTD, tokens.positions, tokens.positions + 1, tokens.ids, implementation=implementation)
        slots, carry = self.position(q, k, seen, None if cache is None else cache.carry)
        if cache is None or view is None:
            o_BTHK = attend_row(slots, v, tokens, self.config.attention_impl)
        else:
            cache = replace(cache, carry=carry or {})
            o_BTHK, cache = attend_cache(slots, v, cache, view, self.config.attention_impl)
        out = weight(self.out.astype(x_BTD.dtype), ("heads", None, "embed"))
        return jnp.einsum("bthk,hkd->btd", o_BTHK.astype(x_BTD.dtype), out), cache

    def _project(self, x_BTD: Array) -> tuple[Array, Array, Array]:
        matrices = ((self.query, "heads"), (self.key, "kv_heads"), (self.value, "kv_heads"))
        weights = (weight(w.astype(x_BTD.dtype), ("embed", heads, None)) for w, heads in matrices)
        q, k, v = (jnp.einsum("btd,dhk->bthk", x_BTD, w) for w in weights)
        if self.config.qkv_bias:
            biases = (self.query_bias, self.key_bias, self.value_bias)
            q, k, v = (x + b.astype(x.dtype)[None, None] for x, b in zip((q, k, v), biases, strict=True))
        if self.config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        return q, k, v


def attend_row(slots: Slots, v: Array, tokens: RowTokens, implementation: str | None) -> Array:
    """Self-attention of whole rows (training and evaluation without a cache) -> [B, T, H, D]."""
    arrays: dict[str, Any] = {
        "q": slots.q,
        "k": slots.k,
        "v": v,
        "prior": slots.prior,
        "log_gates": slots.log_gates,
        "sharpness": slots.sharpness,
        "segment_ids": tokens.ids if tokens.packed else None,
    }
    options: dict[str, Any] = {"sharpen_prior": slots.sharpen_prior, "implementation": implementation}
    if slots.householder is not None:
        if tokens.custom or slots.window is not None:
            raise ValueError(
                "PaTH carries keys from token to token of a row: it takes neither explicit positions nor a window "
                f"(positions given: {tokens.custom}, window={slots.window})"
            )
        w, beta = slots.householder
        return attend(arrays | {"w": w, "beta": beta}, scale_gates=slots.scale_gates, **options)
    if slots.grids is not None:
        if tokens.custom:
            raise ValueError("lsh counts positions from the beginning of each document: it takes no explicit positions")
        arrays |= dict(zip(("widths", "offsets"), slots.grids, strict=True))
        return attend(arrays, combine=slots.combine, implementation=implementation)
    arrays["positions"] = tokens.positions if tokens.custom else None
    return attend(arrays, window=slots.window, **options)


def attend_cache(
    slots: Slots, v: Array, cache: LayerCache, view: View, implementation: str | None
) -> tuple[Array, LayerCache]:
    """Attention of T new tokens to the cached ones and to themselves -> [B, T, H, D] and the cache with them in it."""
    if slots.householder is not None:
        return _attend_carried(slots, v, cache, view, implementation)
    if slots.grids is not None:
        assert cache.ring is not None
        out, ring = lsh_extend(
            slots.q,
            slots.k,
            v,
            *slots.grids,
            cache.ring,
            positions=view.positions,
            mask=view.ids >= 0,
            combine=slots.combine,
        )
        return out, replace(cache, ring=ring)
    cache = replace(cache, k=caches.write(cache.k, slots.k, view.start), v=caches.write(cache.v, v, view.start))
    gates = None
    if cache.gate_sums is not None and slots.log_gates is not None:
        gates = caches.append_gates(cache.gate_sums, slots.log_gates, view)
        cache = replace(cache, gate_sums=gates[1])
    out = attention(
        slots.q,
        **_seen(cache, gates, view),
        prior=slots.prior,
        sharpness=slots.sharpness,
        sharpen_prior=slots.sharpen_prior,
        window=slots.window,
        implementation=implementation,
    )
    return out, cache


def _seen(cache: LayerCache, gates: tuple[Pair, Pair] | None, view: View) -> dict[str, Any]:
    """Keys, values, gates and where they stand, for `attention`, of a cache that holds the new tokens.

    Without explicit positions where the order of the slots says as much: queries are then the last keys of all, and the
    fused kernels serve the call.
    """
    k, v, ids, count = cache.k, cache.v, view.slot_ids, view.ids.shape[1]
    if view.order == "any":
        places = {"positions": view.positions, "kv_positions": view.slot_positions}
        return {"k": k, "v": v, "log_gates": gates, "segment_ids": (view.ids, ids), **places}
    begin = view.order == "begin"
    turn = (lambda x: x[:, :count]) if begin else (lambda x: caches.to_the_end(x, view))
    sums = None if gates is None else (gates[0], (turn(gates[1][0]), turn(gates[1][1])))
    segments = None if begin and not view.padded else (view.ids, turn(ids))
    return {"k": turn(k), "v": turn(v), "log_gates": sums, "segment_ids": segments}


def _attend_carried(
    slots: Slots, v: Array, cache: LayerCache, view: View, implementation: str | None
) -> tuple[Array, LayerCache]:
    """As `attend_cache`, for a scheme that carries keys: the cached keys move on to the last new token as well.

    Several tokens bring all keys up to date at once; single tokens leave that pending (`kernels.path.lazy`).
    """
    pending = cache.pending
    if slots.window is not None or slots.householder is None or pending is None:
        raise ValueError(f"PaTH takes no window, got window={slots.window}")
    arrays = (slots.q, slots.k, v, *slots.householder)
    options: dict[str, Any] = {
        "past_positions": view.slot_positions,
        "positions": view.positions,
        "segment_ids": view.ids,
        "log_gates": slots.log_gates,
        "scale_gates": slots.scale_gates,
        "prior": slots.prior,
        "sharpness": slots.sharpness,
        "sharpen_prior": slots.sharpen_prior,
    }
    before = cache
    cache = replace(cache, v=caches.write(cache.v, v, view.start), log_gates=_write_gates(cache, slots, view))
    if slots.q.shape[1] == 1:
        out, keys, pending = lazy_token(
            *arrays,
            pending=pending,
            past_k=before.k,
            past_v=cache.v,
            past_log_gates=cache.log_gates,
            past_segment_ids=view.slot_ids,
            start=view.start,
            window=caches.FOLD,
            **options,
        )
        return out, replace(cache, k=keys, pending=pending)
    past_k, pending = fold(before.k, pending, view.start + slots.q.shape[1])
    out, past_k, k = path_extend(
        *arrays,
        past_k=past_k,
        past_v=before.v,
        past_log_gates=before.log_gates,
        past_segment_ids=view.past_ids,
        implementation=implementation,
        **options,
    )
    return out, replace(cache, k=caches.write(past_k, k, view.start), pending=pending)


def _write_gates(cache: LayerCache, slots: Slots, view: View) -> Array | None:
    if cache.log_gates is None or slots.log_gates is None:
        return None
    gates = jnp.where((view.ids >= 0)[:, :, None], slots.log_gates, 0.0)  # padding forgets nothing
    return caches.write(cache.log_gates, gates, view.start)
