"""One validated, normalised description of a PaTH attention call: all that a backend ever sees."""

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from kernels.attention.call import DistancePrior, check_prior
from kernels.attention.checks import check_array, check_flag, check_scale
from kernels.attention.gates import cut_shut, running_sums

Array = jax.Array
Maybe = TypeVar("Maybe", bound="Array | None")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PathCall:
    """What a backend computes; a pytree whose last two fields are static. Everything is already checked.

        logits[b,h,i,j] = r · (scale·a_ij + prior(j − i) + gates)      sharpen_prior
                        = r·scale·a_ij + prior(j − i) + gates           otherwise
        a_ij = q_iᵀ H_i H_{i−1} … H_{j+1} k_j,   H_t = I − beta_t w_t w_tᵀ,   j ≤ i in the row
        o = softmax over visible j of logits, times v;  lse = log Σ exp(logits)

    q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv] of one float dtype; query head h uses key head h // (H // Hkv).
    w [B,T,Hkv,D], beta [B,T,Hkv]: float32 (float64 when q is).
    prior: None or a DistancePrior, evaluated at d = j − i.
    gates: None or (hi, lo) [B,T,H] float32, running sums; adds (hi_i − hi_j) + (lo_i − lo_j), a factor `scale` included
      if it was asked for. Gradients are asked of hi only.
    sharpness r: None (1) or [B,T,H] float32.
    segments: None or [B,T] int32; j is visible from i if j ≤ i and both have the same id, not negative. At padding (a
      negative id) q, k, v, w, beta and the gates' steps are zero, so that the transition there is the identity.
      The product may run over the border of two segments: it does not matter what is carried there, nobody sees it.
    A query that sees no key has o = 0, lse = −inf and gradients exactly 0.
    """

    q: Array
    k: Array
    v: Array
    w: Array
    beta: Array
    prior: DistancePrior | None
    gates: tuple[Array, Array] | None
    sharpness: Array | None
    segments: Array | None
    scale: float = field(metadata={"static": True})
    sharpen_prior: bool = field(metadata={"static": True})

    @property
    def wide(self) -> Any:
        """The dtype of all arithmetic."""
        return jnp.promote_types(self.q.dtype, jnp.float32)

    @property
    def precision(self) -> lax.Precision:
        """Of products of tiles: full for float32 inputs, the platform's fast float32 for 16-bit ones."""
        return lax.Precision.DEFAULT if self.q.dtype.itemsize < 4 else lax.Precision.HIGHEST

    def sharpens(self, table: Array | None) -> bool:
        """Whether the sharpness multiplies anything besides the content: gates, or a prior given as a table."""
        return self.sharpness is not None and self.sharpen_prior and (table is not None or self.gates is not None)

    def without_prior(self) -> "PathCall":
        """The same call for a backend that has its prior in another form."""
        return replace(self, prior=None)


def check_rows(q: Any, k: Any, v: Any, w: Any, beta: Any) -> None:
    """Raise unless the five arrays have the shapes and dtypes of one PaTH call."""
    check_array("q", q, {"B": None, "T": None, "H": None, "D": None})
    batch, length, heads, dim = q.shape
    check_array("k", k, {"B": batch, "T": length, "Hkv": None, "D": dim})
    kv_heads = k.shape[2]
    check_array("v", v, {"B": batch, "T": length, "Hkv": kv_heads, "Dv": None})
    check_transitions(w, beta, k)
    for name, array in (("q", q), ("k", k), ("v", v)):
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, every dimension must be at least 1")
    if heads % kv_heads:
        raise ValueError(f"q has H={heads} heads, must be a multiple of the Hkv={kv_heads} heads of k and v")


def check_transitions(w: Any, beta: Any, k: Array) -> None:
    """Raise unless w and beta fit the keys k [B, T, Hkv, D] and have full precision."""
    batch, length, kv_heads, dim = k.shape
    check_array("w", w, {"B": batch, "T": length, "Hkv": kv_heads, "D": dim}, "float32")
    check_array("beta", beta, {"B": batch, "T": length, "Hkv": kv_heads}, "float32")


def check_segments(segment_ids: Any, batch: int, length: int) -> None:
    """Raise unless segment_ids is None or an integer [B, T]."""
    if isinstance(segment_ids, tuple | list):
        raise ValueError("segment_ids must be one array [B, T]: queries and keys are the same tokens here")
    if segment_ids is not None:
        check_array("segment_ids", segment_ids, {"B": batch, "T": length}, "integer")


def blank(segment_ids: Array | None, x: Maybe, value: float = 0) -> Maybe:
    """x [B, T, ...] (or None) with `value` at padding, so that nothing stored there matters, NaN included."""
    if x is None or segment_ids is None:
        return x
    real = (segment_ids >= 0).reshape(segment_ids.shape + (1,) * (x.ndim - 2))
    out: Any = jnp.where(real, x, jnp.asarray(value, x.dtype))
    return out


def make_call(
    q: Array,
    k: Array,
    v: Array,
    w: Array,
    beta: Array,
    *,
    log_gates: Array | None,
    scale_gates: bool,
    prior: DistancePrior | None,
    sharpness: Array | None,
    segment_ids: Array | None,
    sharpen_prior: bool,
    scale: float | None,
) -> PathCall:
    """Check every argument of `path_attention` and bring it into the one form of `PathCall`."""
    check_rows(q, k, v, w, beta)
    batch, length, heads, dim = q.shape
    check_prior(prior, heads)
    for name, array in (("sharpness", sharpness), ("log_gates", log_gates)):
        if array is not None:
            check_array(name, array, {"B": batch, "T": length, "H": heads}, "float32")
    check_segments(segment_ids, batch, length)
    factor = check_scale(scale, dim)
    if check_flag("scale_gates", scale_gates) and log_gates is None:
        raise ValueError("scale_gates=True needs log_gates: there is no gate to scale")
    dtype = jnp.result_type(q, k, v)
    wide = jnp.promote_types(dtype, jnp.float32)
    gates = None
    if log_gates is not None:
        steps = cut_shut(blank(segment_ids, log_gates.astype(wide)))
        gates = running_sums(steps * factor if scale_gates else steps)
    return PathCall(
        q=blank(segment_ids, q.astype(dtype)),
        k=blank(segment_ids, k.astype(dtype)),
        v=blank(segment_ids, v.astype(dtype)),
        w=blank(segment_ids, w.astype(wide)),
        beta=blank(segment_ids, beta.astype(wide)),
        prior=prior,
        gates=gates,
        sharpness=None if sharpness is None else blank(segment_ids, sharpness.astype(wide), 1),
        segments=segment_ids,
        scale=factor,
        sharpen_prior=check_flag("sharpen_prior", sharpen_prior),
    )
