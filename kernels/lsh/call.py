"""One checked, normalised description of an LSH attention call: all that a backend sees."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels.attention.checks import check_array, check_flag, check_scale
from kernels.lsh.grids import block_ends

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
    widths, offsets [H, s]: the grids. first, after [B, T] int32: first row of each token's document and the first row
    after it (T and 0 for padding), or both None for one document. starts, stops follow from these four (`block_rows`).
    A query that sees nothing has starts = T: o = 0, lse = −inf.
    """

    q: Array
    k: Array
    v: Array
    widths: Array
    offsets: Array
    first: Array | None
    after: Array | None
    causal: bool = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})

    @property
    def samples(self) -> int:
        return self.widths.shape[1]

    def sample(self, m: Any) -> "Call":
        """The call with the grids of one sample alone; m may be traced."""
        one = lambda x: lax.dynamic_slice_in_dim(x, m, 1, axis=1)
        return replace(self, widths=one(self.widths), offsets=one(self.offsets))

    def block_rows(self) -> tuple[Array, Array]:
        """(starts, stops) [B or 1, T, H, s] int32: the block that a sample puts a token in, cut at its document."""
        return self._blocks(lambda x: x[:, :, None, None], lambda x: x[None, None])

    def block_lines(self) -> tuple[Array, Array]:
        """The same as [B or 1, H, s, T]."""
        return self._blocks(lambda x: x[:, None, None, :], lambda x: x[None, :, :, None])

    def _blocks(self, of_token: Any, of_grid: Any) -> tuple[Array, Array]:
        length = self.q.shape[1]
        rows = jnp.arange(length, dtype=jnp.int32)[None]
        first = jnp.zeros_like(rows) if self.first is None else self.first
        after = jnp.full_like(rows, length) if self.after is None else self.after
        begin, end = block_ends(of_token(rows - first), of_grid(self.widths), of_grid(self.offsets))
        return of_token(first) + jnp.maximum(begin, 0), jnp.minimum(of_token(first) + end, of_token(after))

    def cotangent(self, dq: Array, dk: Array, dv: Array) -> "Call":
        """What a backward rule returns: these gradients, and none for the grids and documents."""

        def none(x: Array | None) -> Any:
            if x is None:
                return None
            floating = jnp.issubdtype(x.dtype, jnp.floating)
            return jnp.zeros_like(x) if floating else np.zeros(x.shape, jax.dtypes.float0)

        rest = {name: none(getattr(self, name)) for name in ("widths", "offsets", "first", "after")}
        return replace(self, q=dq, k=dk, v=dv, **rest)


def check_combine(combine: Any) -> Combine:
    """`combine` as it is given. ValueError unless it names a way to combine the samples."""
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


def plain(grid: Any) -> Array:
    """A grid as int32 or float32, in which all arithmetic on it is done; no gradient goes to it."""
    floating = jnp.issubdtype(grid.dtype, jnp.floating)
    return lax.stop_gradient(jnp.asarray(grid, jnp.float32 if floating else jnp.int32))


def documents_of(segments: Array) -> tuple[Array, Array]:
    """(first, after) of a `Call`; a document is a run of equal ids, and padding has negative ones."""
    length = segments.shape[1]
    rows = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], segments.shape)
    new = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = lax.cummax(jnp.where(new, rows, 0), axis=1)
    ends = jnp.pad(new[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    after = lax.cummin(jnp.where(ends, rows + 1, length), axis=1, reverse=True)
    return jnp.where(segments < 0, length, first), jnp.where(segments < 0, 0, after)


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
    first = after = None
    if segment_ids is not None:
        check_array("segment_ids", segment_ids, {"B": batch, "T": length}, "integer")
        first, after = documents_of(jnp.asarray(segment_ids, jnp.int32))
    dtype = jnp.result_type(q, k, v)
    return Call(
        q=jnp.asarray(q, dtype),
        k=jnp.asarray(k, dtype),
        v=jnp.asarray(v, dtype),
        widths=plain(widths),
        offsets=plain(offsets),
        first=first,
        after=after,
        causal=check_flag("causal", causal),
        scale=check_scale(scale, dim),
    )
