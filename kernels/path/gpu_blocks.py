"""Blocks of 128 tokens on GPUs: PaTH's UT transform, the attention inside a block, and what the rest of the row needs.

Pallas-Triton kernels; derivation and notation in docs/path.md. Per half block of 64 tokens and key head, with Q, K, W
its rows, D = diag(beta), "tril" with its diagonal and "stril" without:

    X = (I + stril(D W Wᵀ))⁻¹,  T = X D,  U = T W,  Z = T stril(W Kᵀ),  E = tril(Q Wᵀ)
    keys at the right edge K − Zᵀ W,  queries at the left edge Q − E U,  logits Q Kᵀ − E Z,  product P = I − Wᵀ U

Queries of the right half at its left edge meet the keys of the left half at its right edge as they are. The solve, U, Z
and P use three float16 products per float32 product (2⁻²²): P is multiplied up along the row, and a solve in 16 bits
diverges for repeated tokens. What happens once per query and key runs on float16 operands (2⁻¹²). Every tile is 64 rows
high, and halves are worked on in turn: larger tiles spill registers.

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
BLOCK, HALF, BASE, CHUNK = 128, 64, 16, 32
HALVES = (pl.ds(0, HALF), pl.ds(HALF, HALF))
F16, F32 = jnp.float16, jnp.float32
WARPS = 4


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
    if kind == "left half":
        return pl.BlockSpec((None, None, size // 2, shape[3]), lambda b, h, i: (b, at(h), i, 0))
    if kind == "line":
        return pl.BlockSpec((None, None, size), lambda b, h, i: (b, at(h), i))
    if kind == "ids":
        return pl.BlockSpec((None, size), lambda b, h, i: (b, i))
    if kind == "bias":
        return pl.BlockSpec((None, *shape[1:]), lambda b, h, i: (h, 0, 0))
    kind, _, blocks = kind.partition(" of ")  # of so many blocks, of one without
    assert kind == "square"
    each = int(blocks or 1)
    return pl.BlockSpec((None, None, None, *shape[3:]), lambda b, h, i: (b, at(h), i // each, 0, 0))


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


def barrier(interpret: bool) -> None:
    """What a program has written can be read by all of its threads."""
    if not interpret:
        pltriton.debug_barrier()


# ---- Products ----


def dot(a: Array, b: Array, ta: bool = False, tb: bool = False) -> Array:
    """a b, with either transposed, accumulated in float32."""
    dims = (((0 if ta else 1,), (1 if tb else 0,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=F32)


Split = tuple[Array, Array]  # float32 values as the sum of two float16 arrays


def split(x: Array) -> Split:
    high = x.astype(F16)
    return high, (x - high.astype(F32)).astype(F16)


def joined(x: Split) -> Array:
    return x[0].astype(F32) + x[1].astype(F32)


def dot3(a: Array | Split, b: Array | Split, ta: bool = False, tb: bool = False) -> Array:
    """The product of float32 arrays as three of float16 ones (two if b is float16): error about 2⁻²².

    What is multiplied so is at most 4 in size (w, L, X, T, U) or a product of those with keys.
    """
    high, low = a if isinstance(a, tuple) else split(a)
    if not isinstance(b, tuple) and b.dtype == F16:
        return dot(low, b, ta, tb) + dot(high, b, ta, tb)
    b_high, b_low = b if isinstance(b, tuple) else split(b)
    return dot(low, b_high, ta, tb) + dot(high, b_low, ta, tb) + dot(high, b_high, ta, tb)


def triangle(size: int, offset: int = 0) -> Array:
    """Mask [size, size]: row ≥ column + offset."""
    row, col = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return row >= col + offset


def identity(size: int) -> Array:
    row, col = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return jnp.where(row == col, F32(1), F32(0))


def inverse(lower: Array) -> Array:
    """(I + L)⁻¹ of a strictly lower triangular 64 × 64 matrix.

    Its four diagonal blocks of 16 by substitution, all at once; then twice inverse blocks are joined,
    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]], as products of whole matrices.
    """
    row, col = (lax.broadcasted_iota(jnp.int32, (HALF, HALF), axis) for axis in (0, 1))
    same = row // BASE == col // BASE
    count = HALF // BASE
    blocks = jnp.where(same, lower, F32(0)).reshape(count, BASE, count, BASE).sum(2)
    row_in, col_in = (lax.broadcasted_iota(jnp.int32, (count, BASE, BASE), axis) for axis in (1, 2))

    def substitute(i: Array, x: Array) -> Array:
        factor = jnp.sum(jnp.where(col_in == i, blocks, F32(0)), axis=2)
        done = jnp.sum(jnp.where(row_in == i, x, F32(0)), axis=1)
        return x - jnp.where(row_in > i, factor[:, :, None] * done[:, None, :], F32(0))

    x = lax.fori_loop(0, BASE - 1, substitute, jnp.where(row_in == col_in, F32(1), F32(0)))
    spread = jnp.broadcast_to(x[:, :, None, :], (count, BASE, count, BASE)).reshape(HALF, HALF)
    x = jnp.where(same, spread, F32(0))
    size = BASE
    while size < HALF:
        corner = (row // (2 * size) == col // (2 * size)) & (row // size > col // size)
        parts = split(x)
        x = x - dot3(parts, dot3(jnp.where(corner, lower, F32(0)), parts))
        size *= 2
    return x


# ---- Keys ----


def _halves_body(interpret: bool, refs: dict[str, Any]) -> None:
    strict = triangle(HALF, 1)
    w, beta = split(refs["w"][...]), refs["beta"][...]
    x = inverse(jnp.where(strict, beta[:, None] * dot3(w, w, tb=True), F32(0)))
    refs["x16"][...], refs["x_low"][...] = split(x)
    barrier(interpret)
    w, k = split(refs["w"][...]), refs["k"][...].astype(F16)
    t = split(joined((refs["x16"][...], refs["x_low"][...])) * refs["beta"][...][None, :])
    z = dot3(t, jnp.where(strict, dot3(w, k, tb=True), F32(0))).astype(F16)
    refs["z16"][...], refs["w16"][...] = z, w[0]
    refs["k_half"][...] = (k.astype(F32) - dot(z, w[0], ta=True)).astype(F16)
    refs["u16"][...], refs["u_low"][...] = split(dot3(t, w))


def _blocks_body(interpret: bool, refs: dict[str, Any]) -> None:
    top, bottom = HALVES
    u0, u1 = ((refs["u16"][s, :], refs["u_low"][s, :]) for s in HALVES)
    across = split(dot3(u1, split(refs["w"][top, :]), tb=True))
    barrier(interpret)
    ahead = joined((refs["u16"][bottom, :], refs["u_low"][bottom, :])) - dot3(across, u0)
    refs["m16"][...], refs["m_low"][...] = split(ahead)
    barrier(interpret)
    k = refs["k_half"][top, :]
    passed = dot(k, refs["u16"][bottom, :], tb=True).astype(F16)
    refs["k16"][top, :] = (k.astype(F32) - dot(passed, refs["w"][bottom, :].astype(F16))).astype(F16)
    refs["k16"][bottom, :] = refs["k_half"][bottom, :]
    barrier(interpret)

    def chunk(i: Array, total: Array, first: int, name: str, low: str) -> Array:
        here, w = pl.ds(i * CHUNK, CHUNK), split(refs["w"][pl.ds(first + i * CHUNK, CHUNK), :])
        return total - dot3(w, (refs[name][here, :], refs[low][here, :]), ta=True)

    p = identity(refs["w"].shape[1])
    p = lax.fori_loop(0, HALF // CHUNK, lambda i, p: chunk(i, p, 0, "u16", "u_low"), p)
    p = lax.fori_loop(0, HALF // CHUNK, lambda i, p: chunk(i, p, HALF, "m16", "m_low"), p)
    refs["p16"][...], refs["p_low"][...] = split(p)


def block_keys(k: Array, w: Array, beta: Array, *, interpret: bool) -> dict[str, Array]:
    """What a block's keys leave behind: w16, u16 [B, K, T, D], z16, x16 [B, K, T, 64] of its halves and k_half
    [B, K, T, D], their keys at their own right edges, float16; k16 [B, T, K, D] float16, the keys at the block's right
    edge; p16 + p_low [B, K, T / 128, D, D] float16.

    k: tokens; w: tokens, float32; beta: line, float32.
    """
    batch, length, heads, dim = k.shape
    rows = lambda width, of=length: jax.ShapeDtypeStruct((batch, heads, of, width), F16)
    inputs: dict[str, Operand] = {"w": ("tokens", w, 1), "beta": ("line", beta, 1), "k": ("tokens", k, 1)}
    outputs: dict[str, Operand] = {n: ("rows", rows(dim), 1) for n in ("w16", "u16", "u_low", "k_half")}
    outputs |= {n: ("rows", rows(HALF), 1) for n in ("z16", "x16", "x_low")}
    grid, call = (batch, heads, length // HALF), partial(launch, warps=WARPS, interpret=interpret)
    body = partial(_halves_body, interpret)
    made = call(body, grid, inputs, outputs, name="path_block_halves", size=HALF)
    grid = (batch, heads, length // BLOCK)
    inputs = {"w": inputs["w"]} | {n: ("rows", made[n], 1) for n in ("u16", "u_low", "k_half")}
    square = jax.ShapeDtypeStruct((batch, heads, length // BLOCK, dim, dim), F16)
    outputs = {
        "k16": ("tokens", jax.ShapeDtypeStruct(k.shape, F16), 1),
        "p16": ("square", square, 1),
        "p_low": ("square", square, 1),
        **{n: ("left half", rows(dim, length // 2), 1) for n in ("m16", "m_low")},
    }
    made |= call(partial(_blocks_body, interpret), grid, inputs, outputs, name="path_blocks")
    return {n: made[n] for n in ("w16", "u16", "z16", "x16", "x_low", "k_half", "k16", "p16", "p_low")}


# ---- Queries ----


def weigh(options: BlockOptions, refs: dict[str, Any], rows: Any, cols: Any, content: Array) -> tuple[Any, Array]:
    """(bias of a tile or None, its logits with −inf where unseen) from its scaled content logits."""
    bias = refs["bias"][rows, cols] if "bias" in refs else None
    if "hi" in refs:
        hi, lo = refs["hi"], refs["lo"]
        gates = (hi[rows][:, None] - hi[cols][None, :]) + (lo[rows][:, None] - lo[cols][None, :])
        bias = gates if bias is None else bias + gates
    logits = content
    if "sharpness" in refs:
        logits = logits * refs["sharpness"][rows][:, None]
    if bias is not None:
        sharp = options.sharpen_bias and "sharpness" in refs
        logits = logits + (bias * refs["sharpness"][rows][:, None] if sharp else bias)
    if rows is cols:
        logits = jnp.where(triangle(HALF), logits, F32(-jnp.inf))
    if "q_ids" in refs:
        seen = refs["q_ids"][rows][:, None] == refs["k_ids"][cols][None, :]
        logits = jnp.where(seen, logits, F32(-jnp.inf))
    return bias, logits


def own_update(refs: dict[str, Any], s: Any) -> Array:
    """E of a half's queries and its own tokens, float16."""
    return jnp.where(triangle(HALF), dot(refs["q"][s, :].astype(F16), refs["w16"][s, :], tb=True), F32(0)).astype(F16)


def own_half(options: BlockOptions, refs: dict[str, Any], s: Any, e: Array) -> Array:
    """Scaled content logits of a half's queries and its own keys."""
    return (dot(refs["q"][s, :], refs["k"][s, :], tb=True) - dot(e, refs["z16"][s, :])) * F32(options.scale)


def at_left(refs: dict[str, Any], s: Any, e: Array) -> Array:
    """Queries at the left edge of their half, float16."""
    return (refs["q"][s, :].astype(F32) - dot(e, refs["u16"][s, :])).astype(F16)


def other_half(options: BlockOptions, refs: dict[str, Any], left: Array) -> Array:
    """Scaled content logits of the right half's queries `left` and the left half's keys."""
    return dot(left, refs["k_half"][HALVES[0], :], tb=True) * F32(options.scale)


def _queries_body(options: BlockOptions, moves: int, refs: dict[str, Any]) -> None:
    top, bottom = HALVES

    def write(s: Any, q: Array) -> None:
        refs["q0"][s, :] = q.astype(refs["q0"].dtype)
        for n in range(moves):
            q = dot(q, refs[f"left{n}"][...]).astype(F16)
            refs[f"q{n + 1}"][s, :] = q.astype(refs["q0"].dtype)
        barrier(options.interpret)

    def finish(s: Any, parts: list[tuple[Any, Array]]) -> None:
        most = jnp.max(parts[0][1], axis=1)
        for _, logits in parts[1:]:
            most = jnp.maximum(most, jnp.max(logits, axis=1))
        most = jnp.where(most == -jnp.inf, F32(0), most)
        total, o = jnp.zeros((HALF,), F32), jnp.zeros((HALF, refs["v"].shape[1]), F32)
        for cols, logits in parts:
            p = jnp.exp(logits - most[:, None])
            v = refs["v"][cols, :]
            total, o = total + jnp.sum(p, axis=1), o + dot(p.astype(v.dtype), v)
        some = total > 0
        safe = jnp.where(some, total, F32(1))
        refs["o"][s, :] = (o / safe[:, None]).astype(refs["o"].dtype)
        refs["lse"][s] = jnp.where(some, most + jnp.log(safe), F32(-jnp.inf))
        barrier(options.interpret)

    e = own_update(refs, top)
    write(top, at_left(refs, top, e))
    finish(top, [(top, weigh(options, refs, top, top, own_half(options, refs, top, e))[1])])
    e = own_update(refs, bottom)
    left = at_left(refs, bottom, e)
    passed = dot(left, refs["w16"][top, :], tb=True).astype(F16)
    write(bottom, (left.astype(F32) - dot(passed, refs["u16"][top, :])).astype(F16))
    own = weigh(options, refs, bottom, bottom, own_half(options, refs, bottom, e))[1]
    barrier(options.interpret)
    across = weigh(options, refs, bottom, top, other_half(options, refs, left))[1]
    barrier(options.interpret)
    finish(bottom, [(bottom, own), (top, across)])


def query_inputs(x: dict[str, Any], keys: dict[str, Array]) -> dict[str, Operand]:
    """Operands that both passes over a block's queries read; x: q, k, v and, or None, bias, hi, lo, sharpness, ids."""
    group = x["q"].shape[2] // x["k"].shape[2]
    operands: dict[str, Operand] = {
        "q": ("tokens", x["q"], 1),
        "k": ("tokens", x["k"], group),
        "v": ("tokens", x["v"], group),
        **{n: ("rows", keys[n], group) for n in ("w16", "u16", "z16", "k_half")},
    }
    kinds = {"bias": "bias", "hi": "line", "lo": "line", "sharpness": "line", "q_ids": "ids", "k_ids": "ids"}
    return operands | {n: (kind, x[n], 1) for n, kind in kinds.items() if x[n] is not None}


def block_queries(
    options: BlockOptions, x: dict[str, Any], keys: dict[str, Array], moves: list[tuple[int, Array]]
) -> dict[str, Any]:
    """Attention of each block to itself: o (tokens, in v's dtype), lse (line, natural); and `queries`, in q's dtype
    (tokens): at the left edge of their block, then of that after each of the moves.

    moves: (blocks that share a matrix, matrices [B, K, n, D, D] float16).
    """
    batch, length, heads, _ = x["q"].shape
    group = heads // x["k"].shape[2]
    outputs: dict[str, Operand] = {
        "o": ("tokens", jax.ShapeDtypeStruct((batch, length, heads, x["v"].shape[3]), x["v"].dtype), 1),
        "lse": ("line", jax.ShapeDtypeStruct((batch, heads, length), F32), 1),
        **{f"q{n}": ("tokens", x["q"], 1) for n in range(len(moves) + 1)},
    }
    lefts: dict[str, Operand] = {f"left{n}": (f"square of {size}", m, group) for n, (size, m) in enumerate(moves)}
    grid, body = (batch, heads, length // BLOCK), partial(_queries_body, options, len(moves))
    inputs, name = query_inputs(x, keys) | lefts, "path_block_queries"
    outputs = {n: (kind, jax.ShapeDtypeStruct(a.shape, a.dtype), 1) for n, (kind, a, _) in outputs.items()}
    made = launch(body, grid, inputs, outputs, name=name, warps=WARPS, interpret=options.interpret)
    return {n: made[n] for n in ("o", "lse")} | {"queries": [made[f"q{n}"] for n in range(len(moves) + 1)]}
