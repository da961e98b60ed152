"""Attention through random block masks whose mean is ALiBi: the entry point, its checks and the choice of a backend.

A backend is a module with `supports(call, combine) -> None | reason` and `attend(call, combine) -> (o, lse)`,
differentiable in q, k, v (and through lse, which is for "shared" alone), imported only when it is first considered.
"""

from typing import Any

import jax

from kernels import backends
from kernels.lsh.call import Call, Combine, check_combine, make_call
from kernels.lsh.grids import sample_grids

__all__ = ["BACKENDS", "PREFERENCE", "choose", "lsh_attention", "sample_grids"]

Array = jax.Array
BACKENDS = {
    "reference": "kernels.lsh.reference",
    "xla": "kernels.lsh.xla",
    "pallas_tpu": "kernels.lsh.tpu",
    "pallas_triton": "kernels.lsh.gpu",
}
PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("xla",),
    "gpu": ("pallas_triton", "xla"),
    "tpu": ("pallas_tpu", "xla"),
}


def choose(call: Call, combine: Combine, implementation: str | None = None) -> str:
    """The backend that serves the call, see `kernels.backends.choose`."""
    return backends.choose(BACKENDS, PREFERENCE, implementation, call, combine)


def lsh_attention(
    q: Array,
    k: Array,
    v: Array,
    widths: Array,
    offsets: Array,
    *,
    combine: Combine = "shared",
    segment_ids: Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Softmax attention under s random block-diagonal masks M^m per head (positional LSH, arXiv 2605.09472).

        "shared"  o_i = Σ_j p_ij v_j,  p_ij ∝ (Σ_m M^m_ij / s) exp(scale ⟨q_i, k_j⟩)      what the theorems are about
        "mean"    o_i = 1/s Σ_m softmax_m(scale ⟨q_i, k_j⟩ where M^m_ij) v                  does not converge to ALiBi

    The mean mask of `sample_grids` has expectation exp(−|i − j| / sigma), so "shared" tends to ALiBi with the slope
    1 / sigma as s grows. Cost: T times the longest block, not T².

    Args:
      q: [B, T, H, D]. k: [B, T, Hkv, D]. v: [B, T, Hkv, Dv]. Floating; H a multiple of Hkv.
      widths, offsets: [H, samples], int32 or float32, from `sample_grids`; data, so new draws do not recompile, and no
        gradient goes to them.
      segment_ids: [B, T] int; a run of equal ids is a document: blocks are cut at its ends and its positions count from
        its beginning. Negative: padding, seen by nobody and seeing nothing.
      causal: a query sees keys at or before its own place.
      scale: static factor of the content term, default 1/√D.
      implementation: a name in BACKENDS, or None for the best that supports the call. A named one never falls back.
      return_lse: also return lse [B, T, H], log Σ_j (Σ_m M^m_ij / s) exp(scale ⟨q_i, k_j⟩), −inf for a row that sees
        nothing; differentiable. Only with combine="shared".

    Returns:
      o [B, T, H, Dv] in q's dtype, or (o, lse). A query that sees nothing gives 0, and gradients exactly 0.

    Raises:
      ValueError or TypeError that names the argument, its value and what would be right.
    """
    check_combine(combine)
    if return_lse and combine == "mean":
        raise ValueError("return_lse=True needs combine='shared': a mean of softmaxes has no common normaliser")
    call = make_call(q, k, v, widths, offsets, segment_ids=segment_ids, causal=causal, scale=scale)
    o, lse = backends.load(BACKENDS, choose(call, combine, implementation)).attend(call, combine)
    o = o.astype(q.dtype)
    return (o, lse) if return_lse else o
