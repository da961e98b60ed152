"""Blocks of 128 tokens on GPUs: how their kernels are launched and multiply, and the attention inside a block.

Pallas-Triton kernels; derivation and notation in docs/path.md, PaTH's UT transform in `gpu_keys.py`. Per half block of
64 tokens and key head, with Q, K, W its rows, D = diag(beta), "tril" with its diagonal and "stril" without:

    X = (I + stril(D W Wᵀ))⁻¹,  T = X D,  U = T W,  Z = T stril(W Kᵀ),  E = tril(Q Wᵀ)
    keys at the right edge K − Zᵀ W,  queries at the left edge Q − E U,  logits Q Kᵀ − E Z,  product P = I − Wᵀ U

Queries of the right half at its left edge meet the keys of the left half at its right edge as they are. The solve, U, Z
and P use three float16 products per float32 product (2⁻²²): P is multiplied up along the row, and a solve in 16 bits
diverges for repeated tokens. What happens once per query and key runs on float16 operands (2⁻¹²). Every tile is 64 rows
high, and halves are worked on in turn: larger tiles spill registers.

Layouts: "tokens" [B, T, H, D], "rows" [B, H, T, C], "line" [B, H, T]; T a multiple of 128, D 128 or a multiple of 8 to
64. Below 64 the kernels work as for 64 (`gpu_narrow.py`), and products of blocks are [.., 64, 64].
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

from kernels.path.gpu_narrow import tiled

Array = jax.Array
BLOCK, HALF = 128, 64
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


def _spec(kind: str, shape: tuple[int, ...], group: int, size: int, parts: int) -> pl.BlockSpec:
    """The part of an array that program (batch, head, block, part of it) sees; group: heads that share one of this
    array."""
    kind, _, blocks = kind.partition(" of ")  # a square of so many blocks, of one without
    sizes, at = {
        "tokens": ((None, size, None, *shape[3:]), lambda b, h, i: (b, i, h, 0)),
        "rows": ((None, None, size, *shape[3:]), lambda b, h, i: (b, h, i, 0)),
        "left half": ((None, None, size // 2, *shape[3:]), lambda b, h, i: (b, h, i, 0)),
        "line": ((None, None, size), lambda b, h, i: (b, h, i)),
        "ids": ((None, size), lambda b, h, i: (b, i)),
        "bias": ((None, *shape[1:]), lambda b, h, i: (h, 0, 0)),
        "square": ((None, None, None, *shape[3:]), lambda b, h, i: (b, h, i // int(blocks or 1), 0, 0)),
    }[kind]
    return pl.BlockSpec(sizes, lambda b, h, i: at(b, h // group, i // parts))


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
    parts: int = 1,
    stages: int = 1,
) -> dict[str, Array]:
    """Run `body(refs by name)` for every (batch, head, block of `size` tokens), `parts` times each.

    Returns the outputs by name.
    """
    names = [*inputs, *outputs]
    specs = lambda operands: [_spec(kind, x.shape, group, size, parts) for kind, x, group in operands.values()]
    results = pl.pallas_call(
        lambda *refs: body(dict(zip(names, map(tiled, refs), strict=True))),
        out_shape=[x for _, x, _ in outputs.values()],
        grid=grid,
        in_specs=specs(inputs),
        out_specs=specs(outputs),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
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
    """Float32 x as two float16 parts, which hold 22 bits of it."""
    high = x.astype(F16)
    return high, (x - high.astype(F32)).astype(F16)


def joined(x: Split) -> Array:
    """The float32 values of both parts."""
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


def _queries_body(options: BlockOptions, moves: int, refs: dict[str, Any]) -> None:
    top, bottom = HALVES

    wide = refs["q"].shape[1] > 64  # then registers do not hold what could be loaded early; measured both ways

    def here() -> None:
        if wide:
            barrier(options.interpret)

    def write(s: Any, q: Array) -> None:
        refs["q0"][s, :] = q.astype(refs["q0"].dtype)
        for n in range(moves):
            q = dot(q, refs[f"left{n}"][...]).astype(F16)
            refs[f"q{n + 1}"][s, :] = q.astype(refs["q0"].dtype)
        here()

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
        here()

    def own(s: Any, first: Callable[[Array], None]) -> tuple[Array, Array]:
        """(the half's queries at its left edge, logits of its own tile); calls `first` on those queries."""
        tiles = {} if wide else {n: refs[n][s, :] for n in ("q", "w16", "k", "z16", "u16")}
        of = lambda name: tiles[name] if tiles else refs[name][s, :]
        e = jnp.where(triangle(HALF), dot(of("q").astype(F16), of("w16"), tb=True), F32(0)).astype(F16)
        left = (of("q").astype(F32) - dot(e, of("u16"))).astype(F16)
        if wide:
            first(left)
        content = dot(of("q"), of("k"), tb=True) - dot(e, of("z16"))
        if not wide:
            first(left)
        return left, weigh(options, refs, s, s, content * F32(options.scale))[1]

    def to_block(left: Array) -> None:
        passed = dot(left, refs["w16"][top, :], tb=True).astype(F16)
        write(bottom, (left.astype(F32) - dot(passed, refs["u16"][top, :])).astype(F16))

    _, logits = own(top, lambda left: write(top, left))
    finish(top, [(top, logits)])
    left, logits = own(bottom, to_block)
    here()
    content = dot(left, refs["k_half"][top, :], tb=True) * F32(options.scale)
    across = weigh(options, refs, bottom, top, content)[1]
    here()
    finish(bottom, [(bottom, logits), (top, across)])


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
