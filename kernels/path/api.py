"""PaTH and PaTH-FoX attention: the public entry point, its checks and the choice of a backend.

## Backends

A backend is a module with two functions, imported only when it is first considered:

    supports(call: PathCall) -> str | None     None if it can serve the call, else the reason in words
    attend(call: PathCall) -> (o, lse)         o [B,T,H,Dv] in q's dtype, lse [B,T,H] float32 (float64 for float64)

`call.PathCall` is a pytree whose docstring fixes the mathematics, shapes and dtypes; all checks are done, gates are
compensated sums, padding is blanked. A backend must be differentiable in q, k, v, w, beta, gates (hi), sharpness,
prior.params and through lse, deterministic, with O(T) memory. To add one: write the module, add a line to BACKENDS and
its place to PREFERENCE.
"""

from typing import Any

import jax

from kernels import backends
from kernels.attention.api import DistancePrior
from kernels.path.call import PathCall, make_call

__all__ = ["BACKENDS", "PREFERENCE", "DistancePrior", "PathCall", "choose", "path_attention"]

Array = jax.Array

BACKENDS: dict[str, str] = {
    "reference": "kernels.path.reference",
    "xla": "kernels.path.xla",
    "mosaic_gpu": "kernels.path.gpu",
    "pallas_tpu": "kernels.path.tpu",
}
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("xla",), "gpu": ("mosaic_gpu", "xla"), "tpu": ("pallas_tpu", "xla")}


def choose(call: PathCall, implementation: str | None = None) -> str:
    """The backend that serves `call`, see `kernels.backends.choose`."""
    return backends.choose(BACKENDS, PREFERENCE, implementation, call)


def path_attention(
    q: Array,
    k: Array,
    v: Array,
    w: Array,
    beta: Array,
    *,
    log_gates: Array | None = None,
    scale_gates: bool = False,
    prior: DistancePrior | None = None,
    sharpness: Array | None = None,
    segment_ids: Array | None = None,
    sharpen_prior: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Causal softmax attention whose keys are carried to the query by Householder-like transitions (PaTH).

        logits_ij = r_i (scale · q_iᵀ H_i H_{i−1} … H_{j+1} k_j + log_prior(j − i) + G_i − G_j),   j ≤ i
        H_t = I − beta_t w_t w_tᵀ

    (PaTH, arXiv 2505.16381, section 3; gates G of FoX, arXiv 2503.02130.) The query's own transition acts, the key's
    own does not: logits_ii = scale · q_iᵀ k_i + log_prior(0). With `sharpen_prior=False` the sharpness r multiplies the
    content term alone. No T × T array, except in "reference".

    Args:
      q: [B, T, H, D]. k: [B, T, Hkv, D]. v: [B, T, Hkv, Dv]. Floating; H a multiple of Hkv (head h reads key head
        h // (H // Hkv)). Different dtypes are promoted to a common one; the output has q's.
      w: [B, T, Hkv, D] float32 unit vectors. beta: [B, T, Hkv] float32 in [0, 2] (neither is checked: they are data).
        float64 next to a float64 q.
      log_gates: [B, T, H] float32 ≤ 0, one per query head: G is their inclusive running sum along the row. One below
        −2²⁰, −inf included, counts as −2²⁰, as in `attention`.
      scale_gates: multiply the gates by `scale` as well (the convention of the released PaTH-FoX code).
      prior: a `DistancePrior` for H heads. Distances are differences of row indices, which for whole documents in order
        are the differences of positions.
      sharpness: [B, T, H] float32, or None for 1.
      segment_ids: [B, T] int. A query sees keys of its own id only, so product, prior and gates restart with each
        document. A negative id is padding: such keys are seen by nobody, such queries see nothing, and the transition
        and gate of a padding token are ignored wherever it stands in the row.
      scale: static factor of the content term, default 1/√D.
      implementation: a name in BACKENDS, or None for the best one that supports the call. A named one never falls back.
      return_lse: also return lse [B, T, H] (natural log, float32; −inf for a padding query), which is differentiable.

    Returns:
      o [B, T, H, Dv] in q's dtype, or (o, lse). A padding query gives o = 0 and gradients exactly 0. What is stored at
      padding does not matter, NaN included. Differentiable once, in reverse mode; a second time with "reference".

    Raises:
      ValueError or TypeError that names the argument, its value and what would be right.
    """
    call = make_call(
        q,
        k,
        v,
        w,
        beta,
        log_gates=log_gates,
        scale_gates=scale_gates,
        prior=prior,
        sharpness=sharpness,
        segment_ids=segment_ids,
        sharpen_prior=sharpen_prior,
        scale=scale,
    )
    o, lse = backends.load(BACKENDS, choose(call, implementation)).attend(call)
    o = o.astype(q.dtype)
    return (o, lse) if return_lse else o
