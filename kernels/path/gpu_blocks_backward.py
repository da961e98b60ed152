"""Backward of `gpu_blocks.py`: the attention inside a block, then the UT transform. Derivation: docs/path.md.

Every product is one of a gradient with a value of the forward pass, both float16: the gradient is scaled by a power of
two per tile, so that its size does not matter. bfloat16 operands would be eight times coarser, which repeated tokens
with beta near 2 amplify. No atomics: what several query heads add to a key head is written per query head and summed
outside. The barriers divide a program into phases, which meet in global memory: registers would not hold it all.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.path.gpu_blocks import (
    BLOCK,
    F16,
    F32,
    HALF,
    HALVES,
    WARPS,
    BlockOptions,
    Operand,
    at_left,
    barrier,
    dot,
    launch,
    other_half,
    own_half,
    own_update,
    query_inputs,
    triangle,
    weigh,
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


def _weights(
    options: BlockOptions, refs: dict[str, Any], rows: Any, cols: Any, content: Array
) -> tuple[Array, Array, Array | None]:
    """(p, d(logits), bias) of a tile."""
    bias, logits = weigh(options, refs, rows, cols, content)
    p = jnp.exp(logits - refs["lse"][rows][:, None])
    dp = dot(refs["do"][rows, :], refs["v"][cols, :], tb=True)
    return p, jnp.where(p > 0, p * (dp - refs["delta"][rows][:, None]), F32(0)), bias


def _rows_body(options: BlockOptions, refs: dict[str, Any]) -> None:
    top, bottom = HALVES
    for s in HALVES:
        e = own_update(refs, s)
        rows = jnp.sum(_weights(options, refs, s, s, own_half(options, refs, s, e))[1], axis=1)
        if s is bottom:
            content = other_half(options, refs, at_left(refs, s, e))
            rows += jnp.sum(_weights(options, refs, bottom, top, content)[1], axis=1)
        refs["rows"][s] = rows
        barrier(options.interpret)


def _tile_gradients(
    options: BlockOptions, refs: dict[str, Any], rows: Any, cols: Any, content: Array, first: bool
) -> Scaled:
    """d(scaled content) of a tile; writes its part of dv, and of the gradients of bias and factors.

    first: nothing has been added to the rows' (or, of dv and columns, the columns') sums before.
    """
    p, dlogits, bias = _weights(options, refs, rows, cols, content)
    do = refs["do"][rows, :]
    dv = dot(p.astype(do.dtype), do, ta=True)
    own = rows is cols
    refs["dv"][cols, :] = dv if not own or rows is HALVES[1] else refs["dv"][cols, :] + dv
    sharp = options.sharpen_bias and "sharpness" in refs
    dbias = dlogits * refs["sharpness"][rows][:, None] if sharp else dlogits
    if "hi" in refs:
        columns = jnp.sum(dbias, axis=0)
        refs["columns"][cols] = columns if not own or rows is HALVES[1] else refs["columns"][cols] + columns
    if "dbias" in refs:
        refs["dbias"][rows, cols] = dbias
    if "sharpness" in refs:
        scaled = content if bias is None or not options.sharpen_bias else content + bias
        total = jnp.sum(dlogits * scaled, axis=1)
        refs["dsharpness"][rows] = total if first else refs["dsharpness"][rows] + total
        dlogits = dlogits * refs["sharpness"][rows][:, None]
    return Scaled.of(dlogits * F32(options.scale))


def _own_gradients(options: BlockOptions, refs: dict[str, Any], s: Any, add: bool, dcontent: Scaled) -> None:
    """From d(content) of a half's own tile and `dleft`, the gradient of its queries at its left edge."""
    here = partial(barrier, options.interpret)
    e = own_update(refs, s)
    dleft = Scaled.of(refs["dleft"][s, :])
    refs["dz"][s, :] = -dcontent.under(e)
    du = -dleft.under(e)
    refs["du"][s, :] = refs["du"][s, :] + du if add else du
    both = dcontent.times(refs["z16"][s, :], tb=True) + dleft.times(refs["u16"][s, :], tb=True)
    de = Scaled.of(jnp.where(triangle(HALF), -both, F32(0)))
    here()
    q = refs["q"][s, :].astype(F16)
    dw = de.times(q, ta=True)
    refs["dw"][s, :] = refs["dw"][s, :] + dw if add else dw
    refs["dk"][s, :] = dcontent.times(q, ta=True)
    here()
    dq = dcontent.times(refs["k"][s, :].astype(F16)) + de.times(refs["w16"][s, :]) + refs["dleft"][s, :]
    refs["dq"][s, :] = dq.astype(refs["dq"].dtype)
    here()


def _across(options: BlockOptions, refs: dict[str, Any], left: Array) -> None:
    """The right half's queries and the left half's keys, and those queries on their way to the block's left edge."""
    top, bottom = HALVES
    here = partial(barrier, options.interpret)
    dacross = _tile_gradients(options, refs, bottom, top, other_half(options, refs, left), first=False)
    here()
    refs["dk_half"][...] = dacross.times(left, ta=True)
    dleft = dacross.times(refs["k_half"][top, :]) + refs["dq0"][bottom, :].astype(F32)
    here()
    y = Scaled.of(refs["dq0"][bottom, :].astype(F32))
    dpassed = Scaled.of(-y.times(refs["u16"][top, :], tb=True))
    refs["dleft"][bottom, :] = dleft + dpassed.times(refs["w16"][top, :])
    here()
    refs["dw"][top, :] = dpassed.times(left, ta=True)
    passed = dot(left, refs["w16"][top, :], tb=True).astype(F16)
    refs["du"][top, :] = -y.under(passed)
    here()


def _backward_body(options: BlockOptions, refs: dict[str, Any]) -> None:
    top, bottom = HALVES
    here = partial(barrier, options.interpret)
    if "dbias" in refs:
        refs["dbias"][top, bottom] = jnp.zeros((HALF, HALF), F32)
    e = own_update(refs, bottom)
    left = at_left(refs, bottom, e)
    dcontent = _tile_gradients(options, refs, bottom, bottom, own_half(options, refs, bottom, e), first=True)
    here()
    _across(options, refs, left)
    _own_gradients(options, refs, bottom, False, dcontent)
    e = own_update(refs, top)
    refs["dleft"][top, :] = refs["dq0"][top, :].astype(F32)
    dcontent = _tile_gradients(options, refs, top, top, own_half(options, refs, top, e), first=True)
    here()
    _own_gradients(options, refs, top, True, dcontent)


def _backward_inputs(x: dict[str, Any], keys: dict[str, Array], back: dict[str, Array]) -> dict[str, Operand]:
    return query_inputs(x, keys) | {
        "do": ("tokens", back["do"], 1),
        "lse": ("line", back["lse"], 1),
        "delta": ("line", back["delta"], 1),
    }


def block_row_sums(options: BlockOptions, x: dict[str, Any], keys: dict[str, Array], back: dict[str, Array]) -> Array:
    """Σ_j d(logits) over the keys of the own block, line."""
    batch, length, heads, dim = x["q"].shape
    outputs: dict[str, Operand] = {"rows": ("line", jax.ShapeDtypeStruct((batch, heads, length), F32), 1)}
    grid, body = (batch, heads, length // BLOCK), partial(_rows_body, options)
    inputs, name = _backward_inputs(x, keys, back), "path_block_rows"
    return launch(body, grid, inputs, outputs, name=name, warps=WARPS[dim], interpret=options.interpret)["rows"]


def block_queries_backward(
    options: BlockOptions, x: dict[str, Any], keys: dict[str, Array], back: dict[str, Array], bias_gradient: bool
) -> dict[str, Array]:
    """Gradients through the attention of each block to itself and through the queries at its left edge.

    back: do (tokens), lse (line; natural, of the whole row, +inf where nothing is seen), delta (line: Σ do·o − dlse),
    dq0 (tokens, bfloat16: gradient of the queries at the left edge).
    Returns, per query head: dq (tokens) and float32 dk, dv (tokens), dw, du (rows), dz (rows [.., T, 64]), dk_half
    [B, H, T / 2, D] and, where asked for, dsharpness, columns (line; minus the gradient of the gates' sums), dbias
    [B, H, T / 128, 128, 128].
    """
    batch, length, heads, dim = x["q"].shape
    value_dim = x["v"].shape[3]
    tokens = lambda width, dtype: ("tokens", jax.ShapeDtypeStruct((batch, length, heads, width), dtype), 1)
    rows = lambda width, of=length: jax.ShapeDtypeStruct((batch, heads, of, width), F32)
    line = ("line", jax.ShapeDtypeStruct((batch, heads, length), F32), 1)
    outputs: dict[str, Operand] = {
        "dq": tokens(dim, x["q"].dtype),
        "dk": tokens(dim, F32),
        "dv": tokens(value_dim, F32),
        **{n: ("rows", rows(dim), 1) for n in ("dw", "du", "dleft")},
        "dz": ("rows", rows(HALF), 1),
        "dk_half": ("left half", rows(dim, length // 2), 1),
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
    made = launch(body, grid, inputs, outputs, name=name, warps=WARPS[dim], interpret=options.interpret)
    del made["dleft"]
    return made


# ---- Keys ----


def _products_backward(interpret: bool, refs: dict[str, Any]) -> None:
    """Through P = P₁ P₀, each I − WᵀU: adds to du and dw, which are written anew."""
    top, bottom = HALVES
    here = partial(barrier, interpret)
    half = lambda name, s: refs[name][s, :].astype(F16)
    most = jnp.max(jnp.abs(refs["dp"][...]))
    size = jnp.exp2(jnp.ceil(jnp.log2(jnp.where(most > 0, most, F32(1)))))
    dp = lambda: Scaled((refs["dp"][...] * (1 / size)).astype(F16), size)
    here()
    g1 = dp().under(half("w", bottom), ta=False)
    g1_16 = Scaled.of(g1)
    around = Scaled.of(g1_16.times(refs["u16"][top, :], tb=True))
    refs["du_all"][bottom, :] = refs["du"][bottom, :] - g1 + around.times(half("w", top))
    here()
    s = dot(refs["u16"][bottom, :], half("w", top), tb=True).astype(F16)
    g0 = dp().under(half("w", top), ta=False)
    refs["du_all"][top, :] = refs["du"][top, :] - g0 + g1_16.under(s)
    here()
    v0 = dp().under(refs["u16"][top, :], ta=False, tb=True)
    v0_16 = Scaled.of(v0)
    around = Scaled.of(v0_16.times(half("w", bottom), tb=True))
    refs["dw_out"][top, :] = refs["dw"][top, :] - v0 + around.times(refs["u16"][bottom, :])
    here()
    v1 = dp().under(refs["u16"][bottom, :], ta=False, tb=True)
    refs["dw_out"][bottom, :] = refs["dw"][bottom, :] - v1 + v0_16.under(s, ta=False)
    here()


def _passage_backward(interpret: bool, refs: dict[str, Any]) -> None:
    """Through the left half's keys on their way over the right half: dk_left (all keys, at the right edges of their
    halves), and more of du and dw."""
    top, bottom = HALVES
    here = partial(barrier, interpret)
    refs["dk_left"][bottom, :] = refs["dk0"][bottom, :].astype(F32)
    y = Scaled.of(refs["dk0"][top, :].astype(F32))
    w1 = refs["w"][bottom, :].astype(F16)
    dpassed = Scaled.of(-y.times(w1, tb=True))
    dk = refs["dk_half"][...] + refs["dk0"][top, :].astype(F32) + dpassed.times(refs["u16"][bottom, :])
    refs["dk_left"][top, :] = dk
    here()
    k = refs["k_half"][top, :]
    refs["du_all"][bottom, :] = refs["du_all"][bottom, :] + dpassed.times(k, ta=True)
    passed = dot(k, refs["u16"][bottom, :], tb=True).astype(F16)
    refs["dw_out"][bottom, :] = refs["dw_out"][bottom, :] - y.under(passed)
    here()


def _transform_backward(interpret: bool, refs: dict[str, Any], s: Any) -> None:
    here = partial(barrier, interpret)
    half = lambda name: refs[name][s, :].astype(F16)
    strict = triangle(HALF, 1)
    t = lambda: (refs["x16"][s, :].astype(F32) * refs["beta"][s][None, :]).astype(F16)
    du, dk0 = Scaled.of(refs["du_all"][s, :]), Scaled.of(refs["dk_left"][s, :])
    dw = refs["dw_out"][s, :] + du.under(t())
    refs["dw_out"][s, :] = dw - dk0.under(refs["z16"][s, :], ta=False)
    here()
    dz = Scaled.of(refs["dz"][s, :] - dk0.under(half("w"), ta=False, tb=True))
    df = Scaled.of(jnp.where(strict, dz.under(t()), F32(0)))
    dk = refs["dk_in"][s, :] + refs["dk_left"][s, :] + df.times(half("w"), ta=True)
    refs["dk"][s, :] = dk.astype(refs["dk"].dtype)
    here()
    refs["dw_out"][s, :] = refs["dw_out"][s, :] + df.times(half("k"))
    here()
    f = jnp.where(strict, dot(half("w"), half("k"), tb=True), F32(0)).astype(F16)
    dt = Scaled.of(du.times(half("w"), tb=True) + dz.times(f, tb=True))
    here()
    dx = dt.under(refs["x16"][s, :])
    beta = refs["beta"][s]
    # Both ways that beta acts (X D and L = D W Wᵀ) in one sum; apart, they nearly cancel for repeated tokens.
    shares = dx * refs["x16"][s, :].astype(F32) * beta[None, :]
    refs["dbeta"][s] = jnp.sum(jnp.where(triangle(HALF), shares, F32(0)), axis=1) / beta
    dl = jnp.where(strict, -Scaled.of(dx).times(t(), tb=True), F32(0))
    dl16 = Scaled.of(dl * beta[:, None])
    here()
    w = half("w")
    refs["dw_out"][s, :] = refs["dw_out"][s, :] + dl16.times(w) + dl16.times(w, ta=True)
    here()


def _keys_backward_body(interpret: bool, refs: dict[str, Any]) -> None:
    _products_backward(interpret, refs)
    _passage_backward(interpret, refs)

    def half(h: Array, carry: Array) -> Array:
        _transform_backward(interpret, refs, pl.ds(h * HALF, HALF))
        return carry

    lax.fori_loop(0, 2, half, jnp.int32(0))


def block_keys_backward(
    k: Array, w: Array, beta: Array, keys: dict[str, Array], back: dict[str, Array], *, interpret: bool
) -> dict[str, Array]:
    """Gradients of `block_keys`: dk (tokens, k's dtype), dw_out (tokens), dbeta (line).

    keys: its results. back, summed over query heads: dk_in (tokens), dw, du, dz (rows), dk_half from
    `block_queries_backward`; dk0 (tokens): of the keys at the right edge; dp, shaped as p.
    """
    batch, length, heads, dim = k.shape
    inputs: dict[str, Operand] = {
        "k": ("tokens", k, 1),
        "w": ("tokens", w, 1),
        "beta": ("line", beta, 1),
        **{n: ("rows", keys[n], 1) for n in ("u16", "z16", "x16", "k_half")},
        **{n: ("rows", back[n], 1) for n in ("dw", "du", "dz")},
        "dk_half": ("left half", back["dk_half"], 1),
        "dk_in": ("tokens", back["dk_in"], 1),
        "dk0": ("tokens", back["dk0"], 1),
        "dp": ("square", back["dp"], 1),
    }
    outputs: dict[str, Operand] = {
        "dk": ("tokens", jax.ShapeDtypeStruct(k.shape, k.dtype), 1),
        "dw_out": ("tokens", jax.ShapeDtypeStruct(w.shape, F32), 1),
        "dbeta": ("line", jax.ShapeDtypeStruct(beta.shape, F32), 1),
        **{n: ("rows", jax.ShapeDtypeStruct((batch, heads, length, dim), F32), 1) for n in ("du_all", "dk_left")},
    }
    grid, name = (batch, heads, length // BLOCK), "path_block_keys_backward"
    body = partial(_keys_backward_body, interpret)
    made = launch(body, grid, inputs, outputs, name=name, warps=WARPS[dim], interpret=interpret)
    return {n: made[n] for n in ("dk", "dw_out", "dbeta")}
