"""What the keys of a block leave behind on GPUs, from w, beta and k alone: the UT transform (docs/path.md).

Four Pallas-Triton kernels: the triangular inverse of each half block, its U, Z and keys, the keys and transitions of
whole blocks, and their products. All walk through head_dim in steps of 64: what a program holds must leave registers
for three or four programs per core, for these kernels are chains of small products and wait rather than work.
"""

from functools import partial
from typing import Any

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
    Operand,
    dot,
    dot3,
    joined,
    launch,
    split,
    triangle,
)

Array = jax.Array
BASE, JOINS, CHUNK = 4, 4, 64


def inverse(lower: Array) -> Array:
    """(I + L)⁻¹ of a strictly lower triangular 64 × 64 matrix.

    Its diagonal blocks of 4 as I − L + L² − L³ (L⁴ = 0, and no entry exceeds 27 for those of L up to 2); then four
    times inverse blocks are joined, [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]], as products of whole matrices.
    """
    row, col = (lax.broadcasted_iota(jnp.int32, (HALF, HALF), axis) for axis in (0, 1))
    zero, parts = F16(0), split(lower)
    near = row // BASE == col // BASE
    only = lambda seen: (jnp.where(seen, parts[0], zero), jnp.where(seen, parts[1], zero))
    base = only(near)
    square = dot3(base, base)
    x = jnp.where(row == col, F32(1), F32(0)) - joined(base) + square - dot3(square, base)

    def join(n: Array, x: Array) -> Array:
        size = jnp.left_shift(jnp.int32(BASE), n)
        above, left = lax.div(row, size), lax.div(col, size)
        corner = (above > left) & (lax.div(above, jnp.int32(2)) == lax.div(left, jnp.int32(2)))
        own = split(x)
        return x - dot3(own, dot3(only(corner), own))

    return lax.fori_loop(0, JOINS, join, x)


def over_chunks(dim: int, step: Any, start: Any) -> Any:
    """`step(slice of 64, carry)` over head_dim."""
    one = lambda n, carry: step(pl.ds(n * CHUNK, CHUNK), carry)
    return lax.fori_loop(0, dim // CHUNK, one, start) if dim > CHUNK else one(0, start)


def square_zeros() -> Array:
    return jnp.zeros((HALF, HALF), F32)


def _solve_body(refs: dict[str, Any]) -> None:
    def gram(c: Any, total: Array) -> Array:
        w = split(refs["w"][:, c])
        return total + dot3(w, w, tb=True)

    total = over_chunks(refs["w"].shape[1], gram, square_zeros())
    lower = jnp.where(triangle(HALF, 1), refs["beta"][...][:, None] * total, F32(0))
    refs["x16"][...], refs["x_low"][...] = split(inverse(lower))


def _halves_body(refs: dict[str, Any]) -> None:
    dim = refs["w"].shape[1]
    x_low, x, beta = refs["x_low"][...], refs["x16"][...], refs["beta"][...]

    def meet(c: Any, total: Array) -> Array:
        k, w = refs["k"][:, c].astype(F16), split(refs["w"][:, c])
        return total + dot3(w, k, tb=True)

    f = jnp.where(triangle(HALF, 1), over_chunks(dim, meet, square_zeros()), F32(0))
    t = split(joined((x, x_low)) * beta[None, :])
    z = dot3(t, f).astype(F16)
    refs["z16"][...] = z

    def write(c: Any, parts: Any) -> Any:
        *t, z = parts
        k, w = refs["k"][:, c].astype(F32), split(refs["w"][:, c])
        refs["u16"][:, c], refs["u_low"][:, c] = split(dot3(tuple(t), w))
        refs["w16"][:, c] = w[0]
        refs["k_half"][:, c] = (k - dot(z, w[0], ta=True)).astype(F16)
        return parts

    over_chunks(dim, write, (*t, z))


def _blocks_body(refs: dict[str, Any]) -> None:
    top, bottom = HALVES
    dim = refs["w"].shape[1]

    def meet(c: Any, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        u1 = refs["u16"][bottom, c], refs["u_low"][bottom, c]
        across = totals[0] + dot3(u1, split(refs["w"][top, c]), tb=True)
        return across, totals[1] + dot(refs["k_half"][top, c], u1[0], tb=True)

    across, passed = over_chunks(dim, meet, (square_zeros(), square_zeros()))
    parts = *split(across), passed.astype(F16)

    def write(c: Any, parts: Any) -> Any:
        high, low, passed = parts
        u0, u1 = ((refs["u16"][s, c], refs["u_low"][s, c]) for s in HALVES)
        refs["m16"][:, c], refs["m_low"][:, c] = split(joined(u1) - dot3((high, low), u0))
        k = refs["k_half"][top, c].astype(F32) - dot(passed, refs["w"][bottom, c].astype(F16))
        refs["k16"][top, c] = k.astype(F16)
        refs["k16"][bottom, c] = refs["k_half"][bottom, c]
        return parts

    over_chunks(dim, write, parts)


def _products_body(refs: dict[str, Any]) -> None:
    """64 rows and columns of P = I − W₀ᵀ U₀ − W₁ᵀ M."""
    dim = refs["w"].shape[1]
    part = lax.rem(pl.program_id(2), jnp.int32((dim // CHUNK) ** 2))
    first, start = lax.div(part, jnp.int32(dim // CHUNK)) * CHUNK, lax.rem(part, jnp.int32(dim // CHUNK)) * CHUNK
    rows, cols = pl.ds(first, CHUNK), pl.ds(start, CHUNK)
    row, col = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    p = jnp.where(row + first == col + start, F32(1), F32(0))
    for s, u, here in ((HALVES[0], "u", HALVES[0]), (HALVES[1], "m", slice(None))):
        p = p - dot3(split(refs["w"][s, rows]), (refs[f"{u}16"][here, cols], refs[f"{u}_low"][here, cols]), ta=True)
    refs["p16"][rows, cols], refs["p_low"][rows, cols] = split(p)


def block_keys(k: Array, w: Array, beta: Array, *, interpret: bool) -> dict[str, Array]:
    """What a block's keys leave behind: w16, u16 [B, K, T, D], z16, x16, x_low [B, K, T, 64] of its halves and k_half
    [B, K, T, D], their keys at their own right edges, float16; k16 [B, T, K, D] float16, the keys at the block's right
    edge; p16 + p_low [B, K, T / 128, D, D] float16.

    k: tokens; w: tokens, float32; beta: line, float32.
    """
    batch, length, heads, dim = k.shape
    like = lambda width, of=length: jax.ShapeDtypeStruct((batch, heads, of, width), F16)
    rows = lambda names, width: {n: ("rows", like(width), 1) for n in names}
    call = partial(launch, warps=WARPS, interpret=interpret)
    halves = partial(call, grid=(batch, heads, length // HALF), size=HALF)
    inputs: dict[str, Operand] = {"w": ("tokens", w, 1), "beta": ("line", beta, 1)}
    made = halves(_solve_body, inputs=inputs, outputs=rows(("x16", "x_low"), HALF), name="path_block_solve")
    given = lambda *names: {n: ("rows", made[n], 1) for n in names}
    inputs |= {"k": ("tokens", k, 1)} | given("x16", "x_low")
    outputs = rows(("w16", "u16", "u_low", "k_half"), dim) | rows(("z16",), HALF)
    made |= halves(_halves_body, inputs=inputs, outputs=outputs, name="path_block_halves")
    outputs = {n: ("left half", like(dim, length // 2), 1) for n in ("m16", "m_low")}
    outputs["k16"] = ("tokens", jax.ShapeDtypeStruct(k.shape, F16), 1)
    grid = (batch, heads, length // BLOCK)
    inputs = {"w": inputs["w"]} | given("u16", "u_low", "k_half")
    made |= call(_blocks_body, grid, inputs, outputs, name="path_blocks")
    inputs = {"w": inputs["w"]} | given("u16", "u_low") | {n: ("left half", made[n], 1) for n in ("m16", "m_low")}
    square = jax.ShapeDtypeStruct((batch, heads, length // BLOCK, dim, dim), F16)
    outputs, parts = dict.fromkeys(("p16", "p_low"), ("square", square, 1)), (dim // CHUNK) ** 2
    grid = (batch, heads, length // BLOCK * parts)
    made |= call(_products_body, grid, inputs, outputs, name="path_products", parts=parts)
    return {n: made[n] for n in ("w16", "u16", "z16", "x16", "x_low", "k_half", "k16", "p16", "p_low")}
