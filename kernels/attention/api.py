"""Attention with log-priors, gates and sharpness: the public entry point, its checks and the choice of a backend.

## Backends

A backend is a module with two functions, imported only when it is first considered:

    supports(call: Call) -> str | None      None if it can serve the call, else the reason in words
    attend(call: Call) -> (o, lse)          o [B,T,H,Dv] in q's dtype, lse [B,T,H] float32 (float64 for float64 inputs)

`call.Call` is a pytree: arrays as its children, options as static data, so a backend may put `jax.custom_vjp` straight
on `attend(call)` and return a `Call` of cotangents (None for integer arrays). Its docstring fixes the mathematics,
shapes and dtypes; all checks are done, mixed dtypes are resolved, gates are compensated sums, positions are None for
the default order. `masks.visible` is the visibility rule. A backend must be differentiable in q, k, v, prior.params,
gates (hi), sharpness and through lse, deterministic, with O(T) memory, and should name its residuals with
`checkpoint_name(o, "attention_out")` and `checkpoint_name(lse, "attention_lse")`. To add one: write the module, add a
line to BACKENDS and its place to PREFERENCE.
"""

from typing import Any

import jax

from kernels import backends
from kernels.attention.call import Call, DistancePrior, make_call

__all__ = ["BACKENDS", "PREFERENCE", "Call", "DistancePrior", "attention", "choose"]

Array = jax.Array
Sums = Array | tuple[Array, Array]

BACKENDS: dict[str, str] = {
    "reference": "kernels.attention.reference",
    "xla": "kernels.attention.xla",
    "pallas_tpu": "kernels.attention.pallas_tpu",
    "mosaic_gpu": "kernels.attention.mosaic_gpu",
    "pallas_triton": "kernels.attention.triton_gpu",
    "triton_decode": "kernels.attention.triton_decode",
}
PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("xla",),
    "gpu": ("triton_decode", "mosaic_gpu", "pallas_triton", "xla"),
    "tpu": ("pallas_tpu", "xla"),
}


def choose(call: Call, implementation: str | None = None) -> str:
    """The backend that serves `call`, see `kernels.backends.choose`."""
    return backends.choose(BACKENDS, PREFERENCE, implementation, call)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    prior: DistancePrior | None = None,
    log_gates: Array | tuple[Sums, Sums] | None = None,
    sharpness: Array | None = None,
    sharpen_prior: bool = True,
    segment_ids: Array | tuple[Array, Array] | None = None,
    positions: Array | None = None,
    kv_positions: Array | None = None,
    window: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Softmax attention with a distance prior, forget gates and sharpness; no T × S array (except "reference").

        logits_ij = r_i (scale ⟨q_i, k_j⟩ + log_prior(d) + G_i − G_j)         d = kv_position_j − position_i
        o_i = Σ_j softmax_j(logits_ij) v_j                                     over the keys j that i sees

    With `sharpen_prior=False` the sharpness r multiplies the content term alone.

    Args:
      q: [B, T, H, D]. k: [B, S, Hkv, D]. v: [B, S, Hkv, Dv]. Floating; H a multiple of Hkv (head h reads key head
        h // (H // Hkv)). Different dtypes are promoted to a common one; the output has q's.
      prior: a `DistancePrior` for H heads, or None.
      log_gates: [B, S, H] float32 ≤ 0 (FoX, arXiv 2503.02130): G is their inclusive running sum over the keys in
        storage order (padding counts as 0). One below −2²⁰, −inf included, counts as −2²⁰: keys behind it weigh 0
        unless r is below 1e-4 or other logits differ by as much. A query's own place is key t when T = S, else the last
        key in storage order at or before its position in its segment. Or a pair (c_q [B, T, H], c_k [B, S, H]) of sums
        already formed, which adds c_q − c_k; each an array, or (hi, lo) as `gates.running_sums` gives them. Needs
        `causal`.
      sharpness: [B, T, H] float32, or None for 1.
      segment_ids: [B, T] int (then T = S), or a pair (q [B, T], kv [B, S]). A query sees keys of its own id only; a
        negative id is padding: such keys are seen by nobody, such queries see nothing.
      positions, kv_positions: [B, T] or [T], and [B, S] or [S] int, of size below 2³⁰ (beyond, they count as 2³⁰ − 1).
        Default: keys 0..S−1, queries S−T..S−1. They decide masks and distances, not the storage order. Rows that pack
        whole documents in order need no explicit positions: distances inside a document are the same, and the default
        is faster.
      window: a query sees keys less than `window` positions away (its own position counts as one).
      causal: a query sees keys at or before its position.
      scale: static factor of the content term, default 1/√D.
      implementation: a name in BACKENDS, or None for the best one that supports the call. A named one never falls back.
      return_lse: also return lse [B, T, H] (natural log, float32; −inf for a row that sees nothing), which is
        differentiable: results over two halves of the keys merge exactly.

    Returns:
      o [B, T, H, Dv] in q's dtype, or (o, lse). A query that sees nothing gives o = 0 and gradients exactly 0. Values
      of keys that nobody sees (padding, unused cache slots) do not matter, NaN included; queries must be finite in
      padding as well. Differentiable once, in reverse mode; a second time with "reference".

    Raises:
      ValueError or TypeError that names the argument, its value and what would be right.
    """
    call = make_call(
        q,
        k,
        v,
        prior=prior,
        log_gates=log_gates,
        sharpness=sharpness,
        sharpen_prior=sharpen_prior,
        segment_ids=segment_ids,
        positions=positions,
        kv_positions=kv_positions,
        window=window,
        causal=causal,
        scale=scale,
    )
    o, lse = backends.load(BACKENDS, choose(call, implementation)).attend(call)
    o = o.astype(q.dtype)
    return (o, lse) if return_lse else o
