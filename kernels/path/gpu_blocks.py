"""Blocks of 128 tokens on GPUs: PaTH's UT transform, the attention inside a block, and what the rest of the row needs.

Pallas-Triton kernels; derivation and notation in docs/path.md. Per block and key head, with Q, K, W the rows of the
block, D = diag(beta), "tril" with its diagonal and "stril" without:

    X = (I + stril(D W Wᵀ))⁻¹,  T = X D,  U = T W,  Z = T stril(W Kᵀ),  E = tril(Q Wᵀ)
    keys at the right edge K − Zᵀ W,  queries at the left edge Q − E U,  logits Q Kᵀ − E Z,  product P = I − Wᵀ U

The solve, U, Z and P use three float16 products per float32 product (2⁻²²): P is multiplied up along the row, and a
solve in 16 bits diverges for repeated tokens. What happens once per query and key runs on float16 operands (2⁻¹²).

Layouts: "tokens" [B, T, H, D], "rows" [B, H, T, C], "line" [B, H, T]; T a multiple of 128, D 64 or 128.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

Array = jax.Array
BLOCK, HALF, BASE = 128, 64, 16
HALVES = (pl.ds(0, HALF), pl.ds(HALF, HALF))
F16, F32 = jnp.float16, jnp.float32
WARPS = {64: 4, 128: 8}  # of the kernels over keys, by head_dim


@dataclass(frozen=True)
class BlockOptions:
    """The static part of the kernels that attend inside a block."""

    scale: float
    sharpen_bias: bool  # the sharpness multiplies bias and gates, too
    interpret: bool


# ---- Calling ----


def _spec(kind: str, shape: tuple[int, ...], group: int, size: int) -> pl.BlockSpec:
    """The part of an array that program (batch, head, block) sees; group: heads that share one of this array."""
    at = lambda h: h // group
    if kind == "tokens":
        return pl.BlockSpec((None, size, None, shape[3]), lambda b, h, i: (b, i, at(h), 0))
    if kind == "rows":
        return pl.BlockSpec((None, None, size, shape[3]), lambda b, h, i: (b, at(h), i, 0))
    if kind == "line":
        return pl.BlockSpec((None, None, size), lambda b, h, i: (b, at(h), i))
    if kind == "ids":
        return pl.BlockSpec((None, size), lambda b, h, i: (b, i))
    if kind == "bias":
        return pl.BlockSpec((None, *shape[1:]), lambda b, h, i: (h, 0, 0))
    assert kind == "square"
    return pl.BlockSpec((None, None, None, *shape[3:]), lambda b, h, i: (b, at(h), i, 0, 0))


Operand = tuple[str, Any, int]  # kind, array or its shape and dtype, heads of the grid that share a head of it


def launch(
    body: Callable[..., None],
    grid: tuple[int, int, int],
    inputs: dict[str, Operand],
    outputs: dict[str, Operand],
    *,
    name: str,
    warps: int,
    interpret: bool,
    size: int = BLOCK,
) -> dict[str, Array]:
    """Run `body(refs by name)` for every (batch, head, block of `size` tokens); returns the outputs by name."""
    names = [*inputs, *outputs]
    specs = lambda operands: [_spec(kind, x.shape, group, size) for kind, x, group in operands.values()]
    results = pl.pallas_call(
        lambda *refs: body(dict(zip(names, refs, strict=True))),
        out_shape=[x for _, x, _ in outputs.values()],
        grid=grid,
        in_specs=specs(inputs),
        out_specs=specs(outputs),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*[x for _, x, _ in inputs.values()])
    return dict(zip(outputs, results, strict=True))


# ---- Products ----


def dot(a: Array, b: Array, ta: bool = False, tb: bool = False, precision: Any = None) -> Array:
    """a b, with either transposed, accumulated in float32."""
    dims = (((0 if ta else 1,), (1 if tb else 0,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=F32)


def dot3(a: Array, b: Array, ta: bool = False, tb: bool = False) -> Array:
    """The product of float32 arrays as three of float16 ones (two if b is float16): error about 2⁻²².

    What is multiplied so is at most 4 in size (w, L, X, T, U) or a product of those with keys.
    """
    a_hi, b_hi = a.astype(F16), b.astype(F16)
    small = dot((a - a_hi.astype(F32)).astype(F16), b_hi, ta, tb)
    if b.dtype != F16:
        small += dot(a_hi, (b - b_hi.astype(F32)).astype(F16), ta, tb)
    return small + dot(a_hi, b_hi, ta, tb)


def triangle(size: int, offset: int = 0) -> Array:
    """Mask [size, size]: row ≥ column + offset."""
    row, col = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return row >= col + offset


def inverse(lower: Array) -> Array:
    """(I + L)⁻¹ of a strictly lower triangular 64 × 64 matrix.

    Diagonal blocks of 16 by substitution, all at once (of a block-diagonal matrix, row i of every block is one masked
    column sum); then twice inverse blocks are joined, [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]], as products
    of whole matrices.
    """
    row, col = (lax.broadcasted_iota(jnp.int32, (HALF, HALF), axis) for axis in (0, 1))
    row_in, col_in = row % BASE, col % BASE
    same = row // BASE == col // BASE

    def substitute(i: Array, x: Array) -> Array:
        factor = jnp.sum(jnp.where(same & (col_in == i), lower, F32(0)), axis=1)
        done = jnp.sum(jnp.where(row_in == i, x, F32(0)), axis=0)
        return x - jnp.where(same & (row_in > i), factor[:, None] * done[None, :], F32(0))

    x = lax.fori_loop(0, BASE - 1, substitute, jnp.where(row == col, F32(1), F32(0)))
    size = BASE
    while size < HALF:
        corner = (row // (2 * size) == col // (2 * size)) & (row // size > col // size)
        x = x - dot3(x, dot3(jnp.where(corner, lower, F32(0)), x))
        size *= 2
    return x


# ---- Keys ----


def _solve_body(refs: dict[str, Any]) -> None:
    w, beta = refs["w"][...], refs["beta"][...]
    lower = jnp.where(triangle(HALF, 1), beta[:, None] * dot3(w, w, tb=True), F32(0))
    refs["x"][...] = inverse(lower)


def _updates_body(refs: dict[str, Any]) -> None:
    top, bottom = HALVES
    w = lambda s: refs["w"][s, :]
    t = lambda s: refs["x"][s, :] * refs["beta"][s][None, :]

    def write(s: Any, u: Array) -> None:
        high = u.astype(F16)
        refs["w16"][s, :] = w(s).astype(F16)
        refs["u16"][s, :] = high
        refs["u_low"][s, :] = (u - high.astype(F32)).astype(F16)

    u0 = dot3(t(top), w(top))
    write(top, u0)
    write(bottom, dot3(t(bottom), w(bottom) - dot3(dot3(w(bottom), w(top), tb=True), u0)))


def _product_body(refs: dict[str, Any]) -> None:
    dim = refs["w"].shape[1]

    def rows(i: Array, total: Array) -> Array:
        s = pl.ds(i * (HALF // 2), HALF // 2)
        w, high = refs["w"][s, :], refs["u16"][s, :]
        w16 = w.astype(F16)
        total -= dot((w - w16.astype(F32)).astype(F16), high, ta=True) + dot(w16, refs["u_low"][s, :], ta=True)
        return total - dot(w16, high, ta=True)

    row, col = (lax.broadcasted_iota(jnp.int32, (dim, dim), axis) for axis in (0, 1))
    refs["p"][...] = lax.fori_loop(0, 2 * BLOCK // HALF, rows, jnp.where(row == col, F32(1), F32(0)))


def _keys_body(inverted: bool, refs: dict[str, Any]) -> None:
    top, bottom = HALVES
    w = lambda s: refs["w"][s, :]
    t = lambda s: refs["x"][s, :] * refs["beta"][s][None, :]
    k = lambda s: refs["k"][s, :].astype(F16)
    strict = triangle(HALF, 1)
    z00 = dot3(t(top), jnp.where(strict, dot3(w(top), k(top), tb=True), F32(0)))
    refs["z16"][top, top] = z00.astype(F16)
    refs["z16"][top, bottom] = jnp.zeros((HALF, HALF), F16)
    cross = dot3(w(bottom), w(top), tb=True)
    z10 = dot3(t(bottom), dot3(w(bottom), k(top), tb=True) - dot3(cross, z00)).astype(F16)
    refs["z16"][bottom, top] = z10
    moved = k(top).astype(F32) - dot(z00.astype(F16), w(top).astype(F16), ta=True)
    refs["k16"][top, :] = (moved - dot(z10, w(bottom).astype(F16), ta=True)).astype(F16)
    if inverted:
        x0, x1 = (refs["x"][s, :].astype(F16) for s in HALVES)
        corner = dot(x1, dot((refs["beta"][bottom][:, None] * cross).astype(F16), x0).astype(F16))
        refs["x16"][top, top] = x0
        refs["x16"][top, bottom] = jnp.zeros((HALF, HALF), F16)
        refs["x16"][bottom, top] = (-corner).astype(F16)
        refs["x16"][bottom, bottom] = x1
    z11 = dot3(t(bottom), jnp.where(strict, dot3(w(bottom), k(bottom), tb=True), F32(0))).astype(F16)
    refs["z16"][bottom, bottom] = z11
    moved = k(bottom).astype(F32) - dot(z11, w(bottom).astype(F16), ta=True)
    refs["k16"][bottom, :] = moved.astype(F16)


def block_keys(k: Array, w: Array, beta: Array, *, inverted: bool, interpret: bool) -> dict[str, Array]:
    """What a block's keys leave behind: w16, u16 [B, K, T, D], z16 [B, K, T, 128] float16 for `block_queries`; k16
    [B, T, K, D] float16, the keys at the block's right edge; p [B, K, T / 128, D, D] float32. With `inverted` also x16
    [B, K, T, 128] for the backward pass.

    k: tokens; w: tokens, float32; beta: line, float32. The solve runs on halves of a block.
    """
    batch, length, heads, dim = k.shape
    rows = lambda width, dtype=F16: jax.ShapeDtypeStruct((batch, heads, length, width), dtype)
    inputs: dict[str, Operand] = {"w": ("tokens", w, 1), "beta": ("line", beta, 1)}
    outputs: dict[str, Operand] = {"x": ("rows", rows(HALF, F32), 1)}
    grid = (batch, heads, length // HALF)
    x = launch(_solve_body, grid, inputs, outputs, name="path_solve", warps=4, interpret=interpret, size=HALF)["x"]
    grid = (batch, heads, length // BLOCK)
    inputs["x"] = ("rows", x, 1)
    outputs = {n: ("rows", rows(dim), 1) for n in ("w16", "u16", "u_low")}
    call = partial(launch, grid=grid, warps=WARPS[dim], interpret=interpret)
    made = call(_updates_body, inputs=inputs, outputs=outputs, name="path_block_updates")
    p = jax.ShapeDtypeStruct((batch, heads, length // BLOCK, dim, dim), F32)
    halves: dict[str, Operand] = {"w": inputs["w"], **{n: ("rows", made[n], 1) for n in ("u16", "u_low")}}
    del made["u_low"]
    made |= call(_product_body, inputs=halves, outputs={"p": ("square", p, 1)}, name="path_block_product")
    inputs["k"] = ("tokens", k, 1)
    outputs = {
        "z16": ("rows", rows(BLOCK), 1),
        "k16": ("tokens", jax.ShapeDtypeStruct(k.shape, F16), 1),
    }
    if inverted:
        outputs["x16"] = ("rows", rows(BLOCK), 1)
    body = partial(_keys_body, inverted)
    return made | call(body, inputs=inputs, outputs=outputs, name="path_block_keys")


# ---- Queries ----


def _tile(options: BlockOptions, refs: dict[str, Any]) -> tuple[Array, Array, Array | None, Array]:
    """(E as float16, unscaled content logits, bias, logits with −inf where unseen)."""
    q = refs["q"][...]
    tril = triangle(BLOCK)
    e = jnp.where(tril, dot(q.astype(F16), refs["w16"][...], tb=True), F32(0)).astype(F16)
    content = (dot(q, refs["k"][...], tb=True) - dot(e, refs["z16"][...])) * F32(options.scale)
    bias = refs["bias"][...] if "bias" in refs else None
    if "hi" in refs:
        hi, lo = refs["hi"][...], refs["lo"][...]
        gates = (hi[:, None] - hi[None, :]) + (lo[:, None] - lo[None, :])
        bias = gates if bias is None else bias + gates
    logits = content
    if "sharpness" in refs:
        logits = logits * refs["sharpness"][...][:, None]
    if bias is not None:
        sharp = options.sharpen_bias and "sharpness" in refs
        logits = logits + (bias * refs["sharpness"][...][:, None] if sharp else bias)
    seen = tril
    if "q_ids" in refs:
        seen = seen & (refs["q_ids"][...][:, None] == refs["k_ids"][...][None, :])
    return e, content, bias, jnp.where(seen, logits, F32(-jnp.inf))


def _queries_body(options: BlockOptions, refs: dict[str, Any]) -> None:
    e, _, _, logits = _tile(options, refs)
    top = jnp.max(logits, axis=1)
    top = jnp.where(top == -jnp.inf, F32(0), top)
    p = jnp.exp(logits - top[:, None])
    total = jnp.sum(p, axis=1)
    some = total > 0
    safe = jnp.where(some, total, F32(1))
    v = refs["v"][...]
    refs["o"][...] = (dot(p.astype(v.dtype), v) / safe[:, None]).astype(refs["o"].dtype)
    refs["lse"][...] = jnp.where(some, top + jnp.log(safe), F32(-jnp.inf))
    refs["q16"][...] = (refs["q"][...].astype(F32) - dot(e, refs["u16"][...])).astype(F16)


def query_inputs(x: dict[str, Any], keys: dict[str, Array]) -> dict[str, Operand]:
    """Operands that both passes over a block's queries read; x: q, k, v and, or None, bias, hi, lo, sharpness, ids."""
    group = x["q"].shape[2] // x["k"].shape[2]
    operands: dict[str, Operand] = {
        "q": ("tokens", x["q"], 1),
        "k": ("tokens", x["k"], group),
        "v": ("tokens", x["v"], group),
        **{n: ("rows", keys[n], group) for n in ("w16", "u16", "z16")},
    }
    kinds = {"bias": "bias", "hi": "line", "lo": "line", "sharpness": "line", "q_ids": "ids", "k_ids": "ids"}
    return operands | {n: (kind, x[n], 1) for n, kind in kinds.items() if x[n] is not None}


def block_queries(options: BlockOptions, x: dict[str, Any], keys: dict[str, Array]) -> dict[str, Array]:
    """Attention of each block to itself: o (tokens, in v's dtype), lse (line, natural), q16 (tokens, float16): the
    queries at their block's left edge."""
    batch, length, heads, _ = x["q"].shape
    outputs: dict[str, Operand] = {
        "o": ("tokens", jax.ShapeDtypeStruct((batch, length, heads, x["v"].shape[3]), x["v"].dtype), 1),
        "lse": ("line", jax.ShapeDtypeStruct((batch, heads, length), F32), 1),
        "q16": ("tokens", jax.ShapeDtypeStruct(x["q"].shape, F16), 1),
    }
    grid = (batch, heads, length // BLOCK)
    body = partial(_queries_body, options)
    name, inputs = "path_block_queries", query_inputs(x, keys)
    return launch(body, grid, inputs, outputs, name=name, warps=8, interpret=options.interpret)
