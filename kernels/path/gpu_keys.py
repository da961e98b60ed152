"""What the keys of a block leave behind on GPUs, from w, beta and k alone: the UT transform (docs/path.md).

Three Pallas-Triton kernels: the half blocks (inverse, U, Z, keys), the keys and transitions of whole blocks, and their
products. The last two walk through head_dim in steps of 64: what a program holds must leave registers for three
programs per core, for these kernels are chains of small products and wait rather than work.
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
    barrier,
    dot,
    dot3,
    joined,
    launch,
    split,
    triangle,
)
from kernels.path.gpu_narrow import tile_width

Array = jax.Array
BASE, CHUNK = 16, 64


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


def over_chunks(dim: int, step: Any, start: Any) -> Any:
    """`step(slice of 64, carry)` over head_dim."""
    one = lambda n, carry: step(pl.ds(n * CHUNK, CHUNK), carry)
    return lax.fori_loop(0, dim // CHUNK, one, start) if dim > CHUNK else one(0, start)


def square_zeros() -> Array:
    """Where products of a half block with itself accumulate: [64, 64] float32."""
    return jnp.zeros((HALF, HALF), F32)


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
    inputs: dict[str, Operand] = {"w": ("tokens", w, 1), "beta": ("line", beta, 1), "k": ("tokens", k, 1)}
    outputs = rows(("w16", "u16", "u_low", "k_half"), dim) | rows(("z16", "x16", "x_low"), HALF)
    grid, body = (batch, heads, length // HALF), partial(_halves_body, interpret)
    made = call(body, grid, inputs, outputs, name="path_block_halves", size=HALF)
    given = lambda *names: {n: ("rows", made[n], 1) for n in names}
    outputs = {n: ("left half", like(dim, length // 2), 1) for n in ("m16", "m_low")}
    outputs["k16"] = ("tokens", jax.ShapeDtypeStruct(k.shape, F16), 1)
    grid = (batch, heads, length // BLOCK)
    inputs = {"w": inputs["w"]} | given("u16", "u_low", "k_half")
    made |= call(_blocks_body, grid, inputs, outputs, name="path_blocks")
    inputs = {"w": inputs["w"]} | given("u16", "u_low") | {n: ("left half", made[n], 1) for n in ("m16", "m_low")}
    side = tile_width(dim)
    square = jax.ShapeDtypeStruct((batch, heads, length // BLOCK, side, side), F16)
    outputs, parts = dict.fromkeys(("p16", "p_low"), ("square", square, 1)), (side // CHUNK) ** 2
    grid = (batch, heads, length // BLOCK * parts)
    made |= call(_products_body, grid, inputs, outputs, name="path_products", parts=parts)
    return {n: made[n] for n in ("w16", "u16", "z16", "x16", "x_low", "k_half", "k16", "p16", "p_low")}
