"""One checked, normalised description of an LSH attention call: all that a backend sees."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from kernels.attention.checks import check_array, check_flag, check_scale
from kernels.lsh.grids import blocks_at

Array = jax.Array
Combine = Literal["shared", "mean"]
COMBINE: tuple[str, ...] = get_args(Combine)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Call:
    """What a backend computes; a pytree whose last two fields are static.

        c_ij = #{m : starts_im ≤ j < stops_im},  with `causal` only j ≤ i
        o_i = Σ_j p_ij v_j,  p_ij ∝ c_ij exp(scale ⟨q_i, k_j⟩);  lse_i = log Σ_j c_ij/s exp(scale ⟨q_i, k_j⟩)

    q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv] of one float dtype; query head h reads key head h // (H // Hkv).
    starts, stops [B or 1, T, H, s] int32: rows of the block that a sample puts the query in, cut at its document;
    stops is None where it could not matter (`causal`). A query that sees nothing has starts = T: o = 0, lse = −inf.
    """

    q: Array
    k: Array
    v: Array
    starts: Array
    stops: Array | None
    causal: bool = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})

    @property
    def samples(self) -> int:
        return self.starts.shape[3]

    def sample(self, m: Any) -> "Call":
        """The call with the grids of one sample alone; m may be traced."""
        one = lambda x: lax.dynamic_slice_in_dim(x, m, 1, axis=3)
        return replace(self, starts=one(self.starts), stops=None if self.stops is None else one(self.stops))


def check_combine(combine: Any) -> Combine:
    if combine not in COMBINE:
        raise ValueError(f"combine={combine!r} is not one of {', '.join(map(repr, COMBINE))}")
    return combine


def check_grids(widths: Any, offsets: Any, heads: int) -> None:
    """Raise unless widths and offsets are [H, samples], both int32 or both float32."""
    for name, grid in (("widths", widths), ("offsets", offsets)):
        kind: Any = "float32" if jnp.issubdtype(getattr(grid, "dtype", jnp.int32), jnp.floating) else "integer"
        check_array(name, grid, {"H": heads, "samples": None}, kind)
    if widths.shape != offsets.shape or widths.dtype != offsets.dtype:
        raise ValueError(
            f"offsets is {offsets.dtype} {offsets.shape}, must be like widths: {widths.dtype} {widths.shape}"
        )
    if widths.shape[1] < 1:
        raise ValueError(f"widths has shape {widths.shape}: there must be at least one sample")


def documents_of(segments: Array) -> tuple[Array, Array]:
    """First row of each token's document and the first row after it, [B, T] int32; a document is a run of equal ids."""
    length = segments.shape[1]
    rows = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], segments.shape)
    new = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = lax.cummax(jnp.where(new, rows, 0), axis=1)
    after = jnp.pad(new[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    return first, lax.cummin(jnp.where(after, rows + 1, length), axis=1, reverse=True)


def block_rows(
    length: int, widths: Array, offsets: Array, segments: Array | None, causal: bool
) -> tuple[Array, Array | None]:
    """(starts, stops) of a `Call`. Positions count from the beginning of each document."""
    rows = jnp.arange(length, dtype=jnp.int32)[None]
    if segments is None:
        first, after = jnp.zeros_like(rows), jnp.full_like(rows, length)
    else:
        first, after = documents_of(segments)
    wide = lambda x: x[:, :, None, None]
    begin, end = blocks_at(rows - first, widths, offsets)
    starts = wide(first) + jnp.maximum(begin, 0)
    stops = None if causal else jnp.minimum(wide(first) + end, wide(after))
    if segments is not None:  # padding sees nothing, and no document's rows reach into it
        starts = jnp.where(wide(segments) < 0, length, starts)
    return starts, stops


def make_call(
    q: Array,
    k: Array,
    v: Array,
    widths: Array,
    offsets: Array,
    *,
    segment_ids: Array | None,
    causal: bool,
    scale: float | None,
) -> Call:
    """Check every argument of `lsh_attention` and bring it into the form of `Call`. Raises ValueError or TypeError."""
    check_array("q", q, {"B": None, "T": None, "H": None, "D": None})
    batch, length, heads, dim = q.shape
    check_array("k", k, {"B": batch, "T": length, "Hkv": None, "D": dim})
    check_array("v", v, {"B": batch, "T": length, "Hkv": k.shape[2], "Dv": None})
    for name, array in (("q", q), ("k", k), ("v", v)):
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}, every dimension must be at least 1")
    if heads % k.shape[2]:
        raise ValueError(f"q has H={heads} heads, must be a multiple of the Hkv={k.shape[2]} heads of k and v")
    check_grids(widths, offsets, heads)
    if segment_ids is not None:
        check_array("segment_ids", segment_ids, {"B": batch, "T": length}, "integer")
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
    causal = check_flag("causal", causal)
    dtype = jnp.result_type(q, k, v)
    starts, stops = block_rows(length, jnp.asarray(widths), jnp.asarray(offsets), segment_ids, causal)
    return Call(
        q=jnp.asarray(q, dtype),
        k=jnp.asarray(k, dtype),
        v=jnp.asarray(v, dtype),
        starts=starts,
        stops=stops,
        causal=causal,
        scale=check_scale(scale, dim),
    )
