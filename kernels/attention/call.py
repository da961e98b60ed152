"""One validated, normalised description of an attention call: all that a backend ever sees."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels.attention import masks
from kernels.attention.checks import check_array, check_flag, check_scale, check_window
from kernels.attention.gates import document_sums

Array = jax.Array
LogPrior = Callable[[Any, Array], Array]
FAR = 2**30 - 1  # positions are clipped to ±FAR, so that a distance fits in int32 even between padding slots


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DistancePrior:
    """A log-prior over distance, one set of parameters per head; never stored as a T × S array.

    params: any pytree of float32 arrays with leading axis H.
    log_prior(params of one head, d) -> float32 of d's shape, elementwise, where d = key position − query position is an
    int32 array of any shape. Plain JAX, traced inside the kernels; finite for every distance that a query may see.
    Kernels evaluate pairs that are not visible at d = −1, or at their distance, and use neither value nor gradient.
    It is static: a hashable value that compares equal between calls (a module-level function or a frozen dataclass with
    `__call__`; a fresh lambda or closure per call would recompile every time).
    """

    params: Any
    log_prior: LogPrior = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Call:
    """What a backend computes; a pytree whose last five fields are static. Everything is already checked.

        logits[b,h,i,j] = r · (scale·⟨q,k⟩ + prior + gates)      sharpen_prior
                        = r·scale·⟨q,k⟩ + prior + gates           otherwise
        o = softmax over visible j (masks.visible) of logits, times v;  lse = log Σ exp(logits)

    q [B,T,H,D], k [B,S,Hkv,D], v [B,S,Hkv,Dv] of one float dtype; query head h reads key head h // (H // Hkv).
    prior: None or a DistancePrior, evaluated at d = kv_position − q_position.
    gates: None or (q_hi, q_lo [B,T,H], k_hi, k_lo [B,S,H]) float32; adds (q_hi_i − k_hi_j) + (q_lo_i − k_lo_j).
      Gradients are asked of q_hi and k_hi only; the lo terms are rounding errors of the sums. zero_lows: they are known
      to be 0, because single sums were given, so a backend need not read them.
    sharpness r: None (1) or [B,T,H] float32.
    q_positions [B or 1, T], kv_positions [B or 1, S]: int32, both None for the default (keys 0..S−1, queries S−T..S−1).
    q_segments [B,T], kv_segments [B,S]: int32 or both None; negative ids are padding.
    A query that sees no key has o = 0, lse = −inf and gradients exactly 0.
    """

    q: Array
    k: Array
    v: Array
    prior: DistancePrior | None
    gates: tuple[Array, Array, Array, Array] | None
    sharpness: Array | None
    q_positions: Array | None
    kv_positions: Array | None
    q_segments: Array | None
    kv_segments: Array | None
    causal: bool = field(metadata={"static": True})
    window: int | None = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})
    sharpen_prior: bool = field(metadata={"static": True})
    zero_lows: bool = field(default=False, metadata={"static": True})

    def positions(self) -> tuple[Array, Array]:
        """(q_positions [B or 1, T], kv_positions [B or 1, S]), the default ones if none were given."""
        if self.q_positions is None or self.kv_positions is None:
            return masks.default_positions(self.q.shape[1], self.k.shape[1])
        return self.q_positions, self.kv_positions

    def every_key_is_seen(self) -> bool:
        """True when it is known without looking at the data that some query of the row sees each key."""
        return self.q_positions is None and self.q_segments is None and self.window is None


def _check_qkv(q: Array, k: Array, v: Array) -> None:
    check_array("q", q, {"B": None, "T": None, "H": None, "D": None})
    batch, _, heads, dim = q.shape
    check_array("k", k, {"B": batch, "S": None, "Hkv": None, "D": dim})
    check_array("v", v, {"B": batch, "S": k.shape[1], "Hkv": k.shape[2], "Dv": None})
    for name, array in (("q", q), ("k", k), ("v", v)):
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}, every dimension must be at least 1")
    if heads % k.shape[2]:
        raise ValueError(f"q has H={heads} heads, must be a multiple of the Hkv={k.shape[2]} heads of k and v")


def check_prior(prior: Any, heads: int) -> None:
    """Raise unless `prior` is None or a DistancePrior for `heads` heads whose log_prior is elementwise and static."""
    if prior is None:
        return
    if not isinstance(prior, DistancePrior):
        raise TypeError(f"prior must be a DistancePrior, got {type(prior).__name__}")
    try:
        hash(prior.log_prior)
    except TypeError:
        raise TypeError(
            f"prior.log_prior must be hashable (it is a static argument), got {prior.log_prior!r}"
        ) from None
    if not jax.tree.leaves(prior.params):
        raise ValueError(f"prior.params={prior.params!r} holds no array, must hold one with leading axis H={heads}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(prior.params):
        name = "prior.params" + jax.tree_util.keystr(path)
        if jnp.ndim(leaf) < 1:
            raise ValueError(f"{name} has shape (), must have the leading axis H={heads}")
        rest = {f"dim{i}": None for i in range(1, jnp.ndim(leaf))}
        check_array(name, leaf, {"H": heads, **rest}, "float32")
    one_head = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), prior.params)
    got = jax.eval_shape(prior.log_prior, one_head, jax.ShapeDtypeStruct((2, 3), jnp.int32))
    if getattr(got, "shape", None) != (2, 3):
        raise ValueError(f"prior.log_prior maps distances of shape (2, 3) to {got}, must keep their shape")
    if not jnp.issubdtype(got.dtype, jnp.floating) or got.dtype.itemsize < 4:
        raise TypeError(f"prior.log_prior returns dtype {got.dtype}, must be float32")


def _positions(positions: Any, kv_positions: Any, batch: int, length: int, kv_length: int) -> tuple[Any, Any]:
    """Both positions as [B or 1, ·] int32, or (None, None) for the default."""
    if positions is None and kv_positions is None:
        return None, None
    default = masks.default_positions(length, kv_length)
    out = []
    for name, given, fallback in (("positions", positions, default[0]), ("kv_positions", kv_positions, default[1])):
        if given is None:
            out.append(fallback)
            continue
        size: dict[str, int | None] = {"T" if name == "positions" else "S": fallback.shape[1]}
        check_array(name, given, size if len(getattr(given, "shape", ())) == 1 else {"B": batch, **size}, "integer")
        given = jnp.atleast_2d(given)
        if given.dtype.itemsize < 4:  # before the bounds, which such a type cannot hold
            given = given.astype(jnp.int32)
        out.append(jnp.clip(given, -FAR, FAR).astype(jnp.int32))
    return out[0], out[1]


def _segments(segment_ids: Any, batch: int, length: int, kv_length: int) -> tuple[Any, Any]:
    if segment_ids is None:
        return None, None
    if not isinstance(segment_ids, tuple | list):
        if length != kv_length:
            raise ValueError(
                f"segment_ids is one array, but q has T={length} and k has S={kv_length}: pass a pair "
                "(q_segment_ids [B, T], kv_segment_ids [B, S])"
            )
        segment_ids = (segment_ids, segment_ids)
    if len(segment_ids) != 2:
        raise ValueError(f"segment_ids has {len(segment_ids)} parts, must be an array [B, T] or a pair for (q, kv)")
    name = "segment_ids" if segment_ids[0] is segment_ids[1] else "segment_ids[0]"
    check_array(name, segment_ids[0], {"B": batch, "T": length}, "integer")
    check_array("segment_ids[1]", segment_ids[1], {"B": batch, "S": kv_length}, "integer")
    return jnp.asarray(segment_ids[0], jnp.int32), jnp.asarray(segment_ids[1], jnp.int32)


def _given_sums(name: str, sums: Any, shape: dict[str, int | None]) -> tuple[Array, Array]:
    """Sums that the caller formed as (hi, lo): an array, or that pair of arrays."""
    if not isinstance(sums, tuple | list):
        check_array(name, sums, shape, "float32")
        return sums, jnp.zeros_like(sums)
    if len(sums) != 2:
        raise ValueError(f"{name} has {len(sums)} parts, must be an array or a pair (hi, lo)")
    for part, array in enumerate(sums):
        check_array(f"{name}[{part}]", array, shape, "float32")
    return sums[0], lax.stop_gradient(sums[1])


def _gates(log_gates: Any, call: Call) -> tuple[Array, Array, Array, Array] | None:
    """Gate sums of the queries and the keys as (q_hi, q_lo, k_hi, k_lo)."""
    if log_gates is None:
        return None
    batch, length, heads, _ = call.q.shape
    if not call.causal:
        raise ValueError("log_gates needs causal=True: a gate forgets the past, it has no meaning for later keys")
    if isinstance(log_gates, tuple | list):
        if len(log_gates) != 2:
            raise ValueError(f"log_gates has {len(log_gates)} parts, must be [B, S, H] or a pair of sums (c_q, c_k)")
        c_q = _given_sums("log_gates[0]", log_gates[0], {"B": batch, "T": length, "H": heads})
        return *c_q, *_given_sums("log_gates[1]", log_gates[1], {"B": batch, "S": call.k.shape[1], "H": heads})
    check_array("log_gates", log_gates, {"B": batch, "S": call.k.shape[1], "H": heads}, "float32")
    high, low = document_sums(log_gates, call.kv_segments)
    if length == call.k.shape[1]:
        return high, low, high, low
    segments = None
    if call.q_segments is not None and call.kv_segments is not None:
        segments = call.q_segments, call.kv_segments
    place = jnp.maximum(masks.last_visible(*call.positions(), segments), 0)
    place = jnp.broadcast_to(place[:, :, None], (batch, length, 1))
    at_query = lambda sums: jnp.take_along_axis(sums, place, axis=1)
    return at_query(high), at_query(low), high, low


def make_call(
    q: Array,
    k: Array,
    v: Array,
    *,
    prior: DistancePrior | None,
    log_gates: Any,
    sharpness: Array | None,
    sharpen_prior: bool,
    segment_ids: Any,
    positions: Array | None,
    kv_positions: Array | None,
    window: int | None,
    causal: bool,
    scale: float | None,
) -> Call:
    """Check every argument of `attention` and bring it into the one form of `Call`. Raises ValueError or TypeError."""
    _check_qkv(q, k, v)
    batch, length, heads, dim = q.shape
    check_prior(prior, heads)
    if sharpness is not None:
        check_array("sharpness", sharpness, {"B": batch, "T": length, "H": heads}, "float32")
    q_positions, kv_positions = _positions(positions, kv_positions, batch, length, k.shape[1])
    q_segments, kv_segments = _segments(segment_ids, batch, length, k.shape[1])
    dtype = jnp.result_type(q, k, v)
    wide = jnp.promote_types(dtype, jnp.float32)
    call = Call(
        q=jnp.asarray(q, dtype),
        k=jnp.asarray(k, dtype),
        v=jnp.asarray(v, dtype),
        prior=prior,
        gates=None,
        sharpness=None if sharpness is None else jnp.asarray(sharpness, wide),
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_segments=q_segments,
        kv_segments=kv_segments,
        causal=check_flag("causal", causal),
        window=check_window(window),
        scale=check_scale(scale, dim),
        sharpen_prior=check_flag("sharpen_prior", sharpen_prior),
    )
    gates = _gates(log_gates, call)
    if gates is None:
        return call
    gates = jax.tree.map(lambda x: jnp.asarray(x, wide), gates)
    pair = isinstance(log_gates, tuple | list)
    return replace(call, gates=gates, zero_lows=pair and not any(isinstance(c, tuple | list) for c in log_gates))
