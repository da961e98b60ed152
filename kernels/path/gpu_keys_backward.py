"""Backward of `gpu_keys.py`: through the products and the keys of a block, then the UT transform of its halves.

Derivation: docs/path.md. Two kernels for the block (gradients of U, and of w), two for the halves: their 64 × 64
matrices, then the rows of the gradients from those.
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
    joined,
    launch,
    split,
    triangle,
)
from kernels.path.gpu_gradients import Exact, Scaled, power, scale_of, scaled_by
from kernels.path.gpu_keys import over_chunks
from kernels.path.gpu_narrow import tile_width

Array = jax.Array
SIZES = ("df_size", "dl_size", "du_size", "dk_size")  # powers of two, one per half


# Through P = P₁ P₀, each I − WᵀU: du_all and dw_out are du and dw and that. With G = W dP, V = U dPᵀ, S = U₁ W₀ᵀ:
#     dU₀ −= G₀ − Sᵀ G₁,  dU₁ −= G₁ − G₁ U₀ᵀ W₀,  dW₀ −= V₀ − V₀ W₁ᵀ U₁,  dW₁ −= V₁ − S V₀
# and through the left half's keys on their way over the right half: dk_left (of all keys, at the right edges of their
# halves), and more of du and dw. One scale for all that comes from dP, one for what comes from those keys' gradient y:
# rows of w and u are at most 1 and 2 long, so that nothing grows beyond 2¹⁰ times the largest entry.


def _blocks_du_body(interpret: bool, refs: dict[str, Any]) -> None:
    """du_all and dk_left."""
    top, bottom = HALVES
    dim, here = refs["w16"].shape[1], partial(barrier, interpret)
    size, (y_size, y) = power(jnp.max(refs["dp_most"][0, :])), scale_of(refs, "dk0", top)
    dp = scaled_by(refs, "dp", size)
    g = lambda s, c: dot(refs["w16"][s, :], dp(slice(None), c))

    def meet(c: Any, totals: Any) -> Any:
        dpassed = totals[0] + dot(y(top, c), refs["w16"][bottom, c], tb=True)
        g_u = totals[1] + dot(g(bottom, c).astype(F16), refs["u16"][top, c], tb=True)
        return dpassed, g_u, totals[2] + dot(refs["u16"][bottom, c], refs["w16"][top, c], tb=True)

    met = over_chunks(dim, meet, (jnp.zeros((HALF, HALF), F32),) * 3)
    here()

    def write(c: Any, parts: Any) -> Any:
        dpassed, g_u, across = parts
        dk = refs["dk_half"][:, c] + refs["dk0"][top, c].astype(F32) - dot(dpassed, refs["u16"][bottom, c]) * y_size
        refs["dk_left"][top, c], refs["dk_left"][bottom, c] = dk, refs["dk0"][bottom, c].astype(F32)
        here()
        g1 = g(bottom, c)
        du = (g1 - dot(g_u, refs["w16"][top, c])) * size + dot(dpassed, refs["k_half"][top, c], ta=True) * y_size
        refs["du_all"][bottom, c] = refs["du"][bottom, c] - du
        here()
        refs["du_all"][top, c] = refs["du"][top, c] - (g(top, c) - dot(across, g1.astype(F16), ta=True)) * size
        return parts

    over_chunks(dim, write, tuple(x.astype(F16) for x in met))


def _blocks_dw_body(interpret: bool, refs: dict[str, Any]) -> None:
    """dw_out."""
    top, bottom = HALVES
    dim, here = refs["w16"].shape[1], partial(barrier, interpret)
    size, (y_size, y) = power(jnp.max(refs["dp_most"][0, :])), scale_of(refs, "dk0", top)
    dp = scaled_by(refs, "dp", size)
    v = lambda s, c: dot(refs["u16"][s, :], dp(c, slice(None)), tb=True)

    def meet(c: Any, totals: Any) -> Any:
        passed = totals[0] + dot(refs["k_half"][top, c], refs["u16"][bottom, c], tb=True)
        v_w = totals[1] + dot(v(top, c).astype(F16), refs["w16"][bottom, c], tb=True)
        return passed, v_w, totals[2] + dot(refs["u16"][bottom, c], refs["w16"][top, c], tb=True)

    met = over_chunks(dim, meet, (jnp.zeros((HALF, HALF), F32),) * 3)
    here()

    def write(c: Any, parts: Any) -> Any:
        passed, v_w, across = parts
        v0 = v(top, c)
        refs["dw_out"][top, c] = refs["dw"][top, c] - (v0 - dot(v_w, refs["u16"][bottom, c])) * size
        here()
        dw = (v(bottom, c) - dot(across, v0.astype(F16))) * size + dot(passed, y(top, c), ta=True) * y_size
        refs["dw_out"][bottom, c] = refs["dw"][bottom, c] - dw
        return parts

    over_chunks(dim, write, tuple(x.astype(F16) for x in met))


def _halves_matrices(interpret: bool, refs: dict[str, Any]) -> tuple[Scaled, Scaled, Array, Array]:
    """dF, dL D + (dL D)ᵀ and the scales of du_all and dk_left; dbeta is written."""
    here, strict = partial(barrier, interpret), triangle(HALF, 1)
    x = lambda: (refs["x16"][...], refs["x_low"][...])
    t = lambda: split(joined(x()) * refs["beta"][...][None, :])
    (du_size, du), (dk_size, dk) = scale_of(refs, "du_all", slice(None)), scale_of(refs, "dk_left", slice(None))

    def meet(c: Any, totals: Any) -> Any:
        w = refs["w16"][:, c]
        dz, dt = totals[0] + dot(w, dk(slice(None), c), tb=True), totals[1] + dot(du(slice(None), c), w, tb=True)
        return dz, dt, totals[2] + dot(w, refs["k"][:, c].astype(F16), tb=True)

    dz, dt, f = over_chunks(refs["w16"].shape[1], meet, (jnp.zeros((HALF, HALF), F32),) * 3)
    dz = Scaled.of(refs["dz"][...] - dz * dk_size)
    df = Scaled(jnp.where(strict, dot(t()[0], dz.part, ta=True), F32(0)).astype(F16), dz.size)
    f = jnp.where(strict, f, F32(0)).astype(F16)
    dt = Exact.of(dt * du_size + dz.times(f, tb=True))
    here()
    dx = dt.under(x())
    beta = refs["beta"][...]
    # Both ways that beta acts (X D and L = D W Wᵀ) in one sum; apart, they nearly cancel for repeated tokens.
    shares = dx * joined(x()) * beta[None, :]
    refs["dbeta"][...] = jnp.sum(jnp.where(triangle(HALF), shares, F32(0)), axis=1) / beta
    here()
    exact = Exact.by(dx, dt.size)  # entries of X are at most 2: 2⁷ times those of dT
    dl = jnp.where(strict, -exact.times(t(), tb=True), F32(0)) * beta[:, None]
    return df, Scaled.of(dl + dl.T), du_size, dk_size


def _halves_rows(refs: dict[str, Any], c: Any, df: Scaled, dl: Scaled, du_size: Array, dk_size: Array) -> None:
    """Columns c of dk and dw."""
    w, k = refs["w16"][:, c], refs["k"][:, c].astype(F16)
    dk0, du = refs["dk_left"][:, c], Scaled.by(refs["du_all"][:, c], du_size)
    dk = refs["dk_in"][:, c].astype(F32) + dk0 + df.times(w, ta=True)
    refs["dk"][:, c] = dk.astype(refs["dk"].dtype)
    t = (joined((refs["x16"][...], refs["x_low"][...])) * refs["beta"][...][None, :]).astype(F16)
    dw = refs["dw_out"][:, c] + du.under(t) - Scaled.by(dk0, dk_size).under(refs["z16"][...], ta=False)
    refs["dw_sum"][:, c] = dw + df.times(k) + dl.times(w)


def _halves_backward_body(interpret: bool, refs: dict[str, Any]) -> None:
    """All of a half, for a head_dim of 64: what the two below do for wider ones."""
    made = _halves_matrices(interpret, refs)
    barrier(interpret)
    _halves_rows(refs, pl.ds(0, HALF), *made)


def _halves_matrices_body(interpret: bool, refs: dict[str, Any]) -> None:
    df, dl, *sizes = _halves_matrices(interpret, refs)
    refs["df"][...], refs["dl"][...] = df.part, dl.part
    for name, size in zip(SIZES, (df.size, dl.size, *sizes), strict=True):
        refs[name][...] = jnp.broadcast_to(size, (HALF,))


def _halves_rows_body(refs: dict[str, Any]) -> None:
    """64 columns of dk and dw."""
    c = pl.ds(lax.rem(pl.program_id(2), jnp.int32(refs["w16"].shape[1] // HALF)) * HALF, HALF)
    df_size, dl_size, *sizes = (jnp.max(refs[n][...]) for n in SIZES)
    _halves_rows(refs, c, Scaled(refs["df"][...], df_size), Scaled(refs["dl"][...], dl_size), *sizes)


def block_keys_backward(
    k: Array, beta: Array, keys: dict[str, Array], back: dict[str, Array], *, interpret: bool
) -> dict[str, Array]:
    """Gradients of `block_keys`: dk (tokens, k's dtype), float32 dw_sum (tokens), dbeta (line).

    keys: its results. back, summed over query heads: dk_in (tokens), dw, du, dz (rows), dk_half from
    `block_queries_backward`; dk0 (tokens): of the keys at the right edge; dp: of the products,
    and dp_most [B, K, T / 128, 1, D], the largest size in some rows of each (its maximum is that of all).
    """
    batch, length, heads, dim = k.shape
    rows = lambda names, arrays: {n: ("rows", arrays[n], 1) for n in names}
    wide = jax.ShapeDtypeStruct((batch, heads, length, dim), F32)
    shared = rows(("w16", "u16", "k_half"), keys)
    shared |= {"dk0": ("tokens", back["dk0"], 1)} | {n: ("square", back[n], 1) for n in ("dp", "dp_most")}
    grid, blocks = (batch, heads, length // BLOCK), partial(launch, warps=WARPS, interpret=interpret)
    inputs = shared | rows(("du",), back) | {"dk_half": ("left half", back["dk_half"], 1)}
    outputs: dict[str, Operand] = dict.fromkeys(("du_all", "dk_left"), ("rows", wide, 1))
    made = blocks(partial(_blocks_du_body, interpret), grid, inputs, outputs, name="path_blocks_du")
    inputs, outputs = shared | rows(("dw",), back), {"dw_out": ("rows", wide, 1)}
    made |= blocks(partial(_blocks_dw_body, interpret), grid, inputs, outputs, name="path_blocks_dw")
    halves = partial(launch, warps=WARPS, interpret=interpret, size=HALF)
    first = {"k": ("tokens", k, 1), "beta": ("line", beta, 1)} | rows(("w16", "x16", "x_low"), keys)
    first |= rows(("du_all", "dk_left"), made)
    second = first | rows(("z16",), keys) | rows(("dw_out",), made) | {"dk_in": ("tokens", back["dk_in"], 1)}
    first |= rows(("dz",), back)
    line: Operand = ("line", jax.ShapeDtypeStruct(beta.shape, F32), 1)
    outputs = {
        "dk": ("tokens", jax.ShapeDtypeStruct(k.shape, k.dtype), 1),
        "dw_sum": ("tokens", jax.ShapeDtypeStruct(k.shape, F32), 1),
    }
    parts, grid = tile_width(dim) // HALF, (batch, heads, length // HALF)
    if parts == 1:
        body = partial(_halves_backward_body, interpret)
        return halves(body, grid, first | second, outputs | {"dbeta": line}, name="path_halves_backward")
    small = {n: ("rows", jax.ShapeDtypeStruct(keys["x16"].shape, F16), 1) for n in ("df", "dl")}
    small |= dict.fromkeys((*SIZES, "dbeta"), line)
    found = halves(partial(_halves_matrices_body, interpret), grid, first, small, name="path_halves_matrices")
    second |= {n: (kind, found[n], 1) for n, (kind, _, _) in small.items() if n != "dbeta"}
    grid = (batch, heads, length // HALF * parts)
    done = halves(_halves_rows_body, grid, second, outputs, name="path_halves_rows", parts=parts)
    return done | {"dbeta": found["dbeta"]}
