"""Backward of `gpu_blocks.py`: the attention inside a block, then the UT transform. Derivation: docs/path.md.

Every product is one of a gradient with a value of the forward pass, both float16: the gradient is scaled by a power of
two per tile, so that its size does not matter. bfloat16 operands would be eight times coarser, which repeated tokens
with beta near 2 amplify. No atomics: what several query heads add to a key head is written per query head and summed
outside.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.path.gpu_blocks import (
    BLOCK,
    F16,
    F32,
    BlockOptions,
    Operand,
    _tile,
    dot,
    launch,
    query_inputs,
    triangle,
)

Array = jax.Array


class Scaled(NamedTuple):
    """A gradient as float16 of at most 1 in size, times a power of two."""

    part: Array
    size: Array

    @classmethod
    def of(cls, x: Array) -> "Scaled":
        most = jnp.max(jnp.abs(x))
        size = jnp.exp2(jnp.ceil(jnp.log2(jnp.where(most > 0, most, F32(1)))))
        return cls((x * (1 / size)).astype(F16), size)

    def times(self, value: Array, ta: bool = False, tb: bool = False) -> Array:
        """gradient · value (float16), the gradient transposed with ta, the value with tb."""
        return dot(self.part, value, ta, tb) * self.size

    def under(self, value: Array, ta: bool = True, tb: bool = False) -> Array:
        """valueᵀ · gradient; without ta value · gradient."""
        return dot(value, self.part, ta, tb) * self.size


# ---- Queries ----


def _probabilities(options: BlockOptions, refs: dict[str, Any]) -> tuple[Array, Array, Array, Array | None, Array]:
    """(E, p, content logits, bias, d(logits))."""
    e, content, bias, logits = _tile(options, refs)
    p = jnp.exp(logits - refs["lse"][...][:, None])
    dp = dot(refs["do"][...], refs["v"][...], tb=True)
    return e, p, content, bias, jnp.where(p > 0, p * (dp - refs["delta"][...][:, None]), F32(0))


def _bias_gradient(options: BlockOptions, refs: dict[str, Any], dlogits: Array) -> Array:
    sharp = options.sharpen_bias and "sharpness" in refs
    return dlogits * refs["sharpness"][...][:, None] if sharp else dlogits


def _rows_body(options: BlockOptions, refs: dict[str, Any]) -> None:
    refs["rows"][...] = jnp.sum(_probabilities(options, refs)[-1], axis=1)


def _backward_body(options: BlockOptions, refs: dict[str, Any]) -> None:
    e, p, content, bias, dlogits = _probabilities(options, refs)
    do = refs["do"][...]
    refs["dv"][...] = dot(p.astype(do.dtype), do, ta=True)
    dbias = _bias_gradient(options, refs, dlogits)
    if "sharpness" in refs:
        scaled = content if bias is None or not options.sharpen_bias else content + bias
        refs["dsharpness"][...] = jnp.sum(dlogits * scaled, axis=1)
        dlogits = dlogits * refs["sharpness"][...][:, None]
    if "hi" in refs:
        refs["columns"][...] = jnp.sum(dbias, axis=0)
    if "dbias" in refs:
        refs["dbias"][...] = dbias
    dcontent = Scaled.of(dlogits * F32(options.scale))
    dleft = Scaled.of(refs["dq0"][...].astype(F32))
    refs["dz"][...] = -dcontent.under(e)
    refs["du"][...] = -dleft.under(e)
    both = dcontent.times(refs["z16"][...], tb=True) + dleft.times(refs["u16"][...], tb=True)
    de = Scaled.of(jnp.where(triangle(BLOCK), -both, F32(0)))
    q, k = refs["q"][...].astype(F16), refs["k"][...].astype(F16)
    refs["dw"][...] = de.times(q, ta=True)
    refs["dk"][...] = dcontent.times(q, ta=True)
    dq = dcontent.times(k) + de.times(refs["w16"][...]) + refs["dq0"][...].astype(F32)
    refs["dq"][...] = dq.astype(refs["dq"].dtype)


def _backward_inputs(x: dict[str, Any], keys: dict[str, Array], back: dict[str, Array]) -> dict[str, Operand]:
    return query_inputs(x, keys) | {
        "do": ("tokens", back["do"], 1),
        "lse": ("line", back["lse"], 1),
        "delta": ("line", back["delta"], 1),
    }


def block_row_sums(options: BlockOptions, x: dict[str, Any], keys: dict[str, Array], back: dict[str, Array]) -> Array:
    """Σ_j d(logits) over the keys of the own block, line."""
    batch, length, heads, _ = x["q"].shape
    outputs: dict[str, Operand] = {"rows": ("line", jax.ShapeDtypeStruct((batch, heads, length), F32), 1)}
    grid, body = (batch, heads, length // BLOCK), partial(_rows_body, options)
    inputs, name = _backward_inputs(x, keys, back), "path_block_rows"
    return launch(body, grid, inputs, outputs, name=name, warps=8, interpret=options.interpret)["rows"]


def block_queries_backward(
    options: BlockOptions, x: dict[str, Any], keys: dict[str, Array], back: dict[str, Array], bias_gradient: bool
) -> dict[str, Array]:
    """Gradients through the attention of each block to itself and through the queries at its left edge.

    back: do (tokens), lse (line; natural, of the whole row, +inf where nothing is seen), delta (line: Σ do·o − dlse),
    dq0 (tokens, bfloat16: gradient of the queries at the left edge).
    Returns, per query head: dq, dk, dv (tokens), dw, du (rows), dz (rows [.., T, 128]) float32 and, where asked for,
    dsharpness, columns (line; minus the gradient of the gates' sums), dbias [B, H, T / 128, 128, 128].
    """
    batch, length, heads, dim = x["q"].shape
    value_dim = x["v"].shape[3]
    tokens = lambda width, dtype: ("tokens", jax.ShapeDtypeStruct((batch, length, heads, width), dtype), 1)
    rows = lambda width: ("rows", jax.ShapeDtypeStruct((batch, heads, length, width), F32), 1)
    line = ("line", jax.ShapeDtypeStruct((batch, heads, length), F32), 1)
    outputs: dict[str, Operand] = {
        "dq": tokens(dim, x["q"].dtype),
        "dk": tokens(dim, F32),
        "dv": tokens(value_dim, F32),
        "dw": rows(dim),
        "du": rows(dim),
        "dz": rows(BLOCK),
    }
    if x["sharpness"] is not None:
        outputs["dsharpness"] = line
    if x["hi"] is not None:
        outputs["columns"] = line
    if bias_gradient:
        tile = (batch, heads, length // BLOCK, BLOCK, BLOCK)
        outputs["dbias"] = ("square", jax.ShapeDtypeStruct(tile, F32), 1)
    grid, body = (batch, heads, length // BLOCK), partial(_backward_body, options)
    inputs = _backward_inputs(x, keys, back) | {"dq0": ("tokens", back["dq0"], 1)}
    name = "path_block_queries_backward"
    return launch(body, grid, inputs, outputs, name=name, warps=8, interpret=options.interpret)


# ---- Keys ----


def _keys_backward_body(refs: dict[str, Any]) -> None:
    half = lambda name: refs[name][...].astype(F16)
    strict = triangle(BLOCK, 1)
    w = half("w")
    t = lambda: (refs["x16"][...].astype(F32) * refs["beta"][...][None, :]).astype(F16)
    dk0, dp = Scaled.of(refs["dk0"][...].astype(F32)), Scaled.of(refs["dp"][...])
    du = Scaled.of(refs["du"][...] - dp.under(w, ta=False))
    dw = refs["dw"][...] - dp.under(refs["u16"][...], ta=False, tb=True)
    dw += du.under(t()) - dk0.under(refs["z16"][...], ta=False)
    dz = Scaled.of(refs["dz"][...] - dk0.under(w, ta=False, tb=True))
    df = Scaled.of(jnp.where(strict, dz.under(t()), F32(0)))
    dw += df.times(half("k"))
    dk = refs["dk_in"][...] + refs["dk0"][...].astype(F32) + df.times(w, ta=True)
    refs["dk"][...] = dk.astype(refs["dk"].dtype)
    f = jnp.where(strict, dot(w, half("k"), tb=True), F32(0)).astype(F16)
    dt = Scaled.of(du.times(w, tb=True) + dz.times(f, tb=True))
    dx = dt.under(refs["x16"][...])
    beta = refs["beta"][...]
    # Both ways that beta acts (X D and L = D W Wᵀ) in one sum; apart, they nearly cancel for repeated tokens.
    shares = dx * refs["x16"][...].astype(F32) * beta[None, :]
    refs["dbeta"][...] = jnp.sum(jnp.where(triangle(BLOCK), shares, F32(0)), axis=1) / beta
    dl = jnp.where(strict, -Scaled.of(dx).times(t(), tb=True), F32(0))
    dl16 = Scaled.of(dl * beta[:, None])
    refs["dw_out"][...] = dw + dl16.times(w) + dl16.times(w, ta=True)


def block_keys_backward(
    k: Array, w: Array, beta: Array, keys: dict[str, Array], back: dict[str, Array], *, interpret: bool
) -> dict[str, Array]:
    """Gradients of `block_keys`: dk (tokens, k's dtype), dw_out (tokens), dbeta (line).

    keys: its results, with x16. back, summed over query heads: dk_in (tokens), dw, du, dz (rows) from
    `block_queries_backward`; dk0 (tokens): of the keys at the right edge; dp, shaped as p.
    """
    batch, length, heads, _ = k.shape
    inputs: dict[str, Operand] = {
        "k": ("tokens", k, 1),
        "w": ("tokens", w, 1),
        "beta": ("line", beta, 1),
        **{n: ("rows", keys[n], 1) for n in ("u16", "z16", "x16")},
        **{n: ("rows", back[n], 1) for n in ("dw", "du", "dz")},
        "dk_in": ("tokens", back["dk_in"], 1),
        "dk0": ("tokens", back["dk0"], 1),
        "dp": ("square", back["dp"], 1),
    }
    outputs: dict[str, Operand] = {
        "dk": ("tokens", jax.ShapeDtypeStruct(k.shape, k.dtype), 1),
        "dw_out": ("tokens", jax.ShapeDtypeStruct(w.shape, F32), 1),
        "dbeta": ("line", jax.ShapeDtypeStruct(beta.shape, F32), 1),
    }
    grid, name = (batch, heads, length // BLOCK), "path_block_keys_backward"
    return launch(_keys_backward_body, grid, inputs, outputs, name=name, warps=8, interpret=interpret)
