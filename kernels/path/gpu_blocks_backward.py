"""Backward of `gpu_blocks.py`: the attention inside a block, then the UT transform. Derivation: docs/path.md.

Every product is one of a gradient with a value of the forward pass, both float16: the gradient is scaled by a power of
two per tile, so that its size does not matter. bfloat16 operands would be eight times coarser, which repeated tokens
with beta near 2 amplify. No atomics: what several query heads add to a key head is written per query head and summed
outside. The barriers divide a program into phases, which meet in global memory: registers would not hold it all.
"""

from collections.abc import Callable
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
    BlockOptions,
    Operand,
    Split,
    at_left,
    barrier,
    dot,
    dot3,
    joined,
    launch,
    other_half,
    own_half,
    own_update,
    query_inputs,
    split,
    triangle,
    weigh,
)
from kernels.path.gpu_keys import over_chunks

Array = jax.Array

WARPS = {64: 4, 128: 8}  # by head_dim: with 4, wide heads would spill a kilobyte per thread


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


class Exact(NamedTuple):
    """A gradient as two float16 parts, times a power of two: for sums in which large terms cancel."""

    high: Array
    low: Array
    size: Array

    @classmethod
    def of(cls, x: Array) -> "Exact":
        high, size = Scaled.of(x)
        return cls(high, (x * (1 / size) - high.astype(F32)).astype(F16), size)

    def under(self, value: Split, ta: bool = True) -> Array:
        """valueᵀ · gradient, without ta value · gradient, the value in two parts as well."""
        return dot3(value, (self.high, self.low), ta) * self.size

    def times(self, value: Split, tb: bool = False) -> Array:
        return dot3((self.high, self.low), value, tb=tb) * self.size


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


def _tile_gradients(options: BlockOptions, refs: dict[str, Any], rows: Any, cols: Any, content: Array) -> Scaled:
    """d(scaled content) of a tile; its part of the gradients of v, bias and factors is written, for the halves' own
    tiles (rows is cols) added."""
    p, dlogits, bias = _weights(options, refs, rows, cols, content)
    do = refs["do"][rows, :]

    def write(name: str, at: Any, value: Array) -> None:
        refs[name][at] = refs[name][at] + value if rows is cols else value

    write("dv", (cols, slice(None)), dot(p.astype(do.dtype), do, ta=True))
    sharp = options.sharpen_bias and "sharpness" in refs
    dbias = dlogits * refs["sharpness"][rows][:, None] if sharp else dlogits
    if "hi" in refs:
        write("columns", (cols,), jnp.sum(dbias, axis=0))
    if "dbias" in refs:
        refs["dbias"][rows, cols] = dbias
    if "sharpness" in refs:
        scaled = content if bias is None or not options.sharpen_bias else content + bias
        write("dsharpness", (rows,), jnp.sum(dlogits * scaled, axis=1))
        dlogits = dlogits * refs["sharpness"][rows][:, None]
    return Scaled.of(dlogits * F32(options.scale))


def _own_gradients(options: BlockOptions, refs: dict[str, Any], s: Any) -> None:
    """A half's own tile, given `dleft`, the gradient of its queries at its left edge; adds to dv, du and dw."""
    here = partial(barrier, options.interpret)
    e = own_update(refs, s)
    dcontent = _tile_gradients(options, refs, s, s, own_half(options, refs, s, e))
    here()
    dleft = Scaled.of(refs["dleft"][s, :])
    refs["dz"][s, :] = -dcontent.under(e)
    refs["du"][s, :] = refs["du"][s, :] - dleft.under(e)
    both = dcontent.times(refs["z16"][s, :], tb=True) + dleft.times(refs["u16"][s, :], tb=True)
    de = Scaled.of(jnp.where(triangle(HALF), -both, F32(0)))
    here()
    q = refs["q"][s, :].astype(F16)
    refs["dw"][s, :] = refs["dw"][s, :] + de.times(q, ta=True)
    refs["dk"][s, :] = dcontent.times(q, ta=True)
    here()
    dq = dcontent.times(refs["k"][s, :].astype(F16)) + de.times(refs["w16"][s, :]) + refs["dleft"][s, :]
    refs["dq"][s, :] = dq.astype(refs["dq"].dtype)
    here()


def _across(options: BlockOptions, refs: dict[str, Any]) -> None:
    """The right half's queries and the left half's keys, and those queries on their way to the block's left edge."""
    top, bottom = HALVES
    here = partial(barrier, options.interpret)
    left = at_left(refs, bottom, own_update(refs, bottom))
    here()
    dacross = _tile_gradients(options, refs, bottom, top, other_half(options, refs, left))
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
    for name in ("dv", "dw", "du"):
        refs[name][bottom, :] = jnp.zeros((HALF, refs[name].shape[1]), F32)
    for name, at in (("columns", bottom), ("dsharpness", top)):
        if name in refs:
            refs[name][at] = jnp.zeros((HALF,), F32)
    if "dbias" in refs:
        refs["dbias"][top, bottom] = jnp.zeros((HALF, HALF), F32)
    refs["dleft"][top, :] = refs["dq0"][top, :].astype(F32)
    _across(options, refs)

    def half(h: Array, carry: Array) -> Array:
        _own_gradients(options, refs, pl.ds(h * HALF, HALF))
        return carry

    lax.fori_loop(0, 2, half, jnp.int32(0))


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


def _scale(refs: dict[str, Any], name: str, s: Any) -> tuple[Array, Callable[[Any, Any], Array]]:
    """(a power of two, values of a gradient as float16 of at most 1 in size) for all of refs[name][s]."""
    most = lambda c, so_far: jnp.maximum(so_far, jnp.max(jnp.abs(refs[name][s, c].astype(F32))))
    most = over_chunks(refs[name].shape[1], most, F32(0))
    size = jnp.exp2(jnp.ceil(jnp.log2(jnp.where(most > 0, most, F32(1)))))
    return size, lambda rows, c: (refs[name][rows, c].astype(F32) * (1 / size)).astype(F16)


# Through P = P₁ P₀, each I − WᵀU: du_all and dw_out are du and dw and that. With G = W dP, V = U dPᵀ, S = U₁ W₀ᵀ:
#     dU₀ −= G₀ − Sᵀ G₁,  dU₁ −= G₁ − G₁ U₀ᵀ W₀,  dW₀ −= V₀ − V₀ W₁ᵀ U₁,  dW₁ −= V₁ − S V₀
# and through the left half's keys on their way over the right half: dk_left (of all keys, at the right edges of their
# halves), and more of du and dw. One scale for all that comes from dP, one for what comes from those keys' gradient y:
# rows of w and u are at most 1 and 2 long, so that nothing grows beyond 2¹⁰ times the largest entry.


def _blocks_du_body(interpret: bool, refs: dict[str, Any]) -> None:
    """du_all and dk_left."""
    top, bottom = HALVES
    dim, here = refs["w"].shape[1], partial(barrier, interpret)
    half = lambda name, s, c: refs[name][s, c].astype(F16)
    (size, dp), (y_size, y) = _scale(refs, "dp", slice(None)), _scale(refs, "dk0", top)
    g = lambda s, c: dot(half("w", s, slice(None)), dp(slice(None), c))

    def meet(c: Any, totals: Any) -> Any:
        dpassed = totals[0] + dot(y(top, c), half("w", bottom, c), tb=True)
        g_u = totals[1] + dot(g(bottom, c).astype(F16), refs["u16"][top, c], tb=True)
        return dpassed, g_u, totals[2] + dot(refs["u16"][bottom, c], half("w", top, c), tb=True)

    met = over_chunks(dim, meet, (jnp.zeros((HALF, HALF), F32),) * 3)
    here()

    def write(c: Any, parts: Any) -> Any:
        dpassed, g_u, across = parts
        dk = refs["dk_half"][:, c] + refs["dk0"][top, c].astype(F32) - dot(dpassed, refs["u16"][bottom, c]) * y_size
        refs["dk_left"][top, c], refs["dk_left"][bottom, c] = dk, refs["dk0"][bottom, c].astype(F32)
        here()
        g1 = g(bottom, c)
        du = (g1 - dot(g_u, half("w", top, c))) * size + dot(dpassed, refs["k_half"][top, c], ta=True) * y_size
        refs["du_all"][bottom, c] = refs["du"][bottom, c] - du
        here()
        refs["du_all"][top, c] = refs["du"][top, c] - (g(top, c) - dot(across, g1.astype(F16), ta=True)) * size
        return parts

    over_chunks(dim, write, tuple(x.astype(F16) for x in met))


def _blocks_dw_body(interpret: bool, refs: dict[str, Any]) -> None:
    """dw_out."""
    top, bottom = HALVES
    dim, here = refs["w"].shape[1], partial(barrier, interpret)
    half = lambda name, s, c: refs[name][s, c].astype(F16)
    (size, dp), (y_size, y) = _scale(refs, "dp", slice(None)), _scale(refs, "dk0", top)
    v = lambda s, c: dot(refs["u16"][s, :], dp(c, slice(None)), tb=True)

    def meet(c: Any, totals: Any) -> Any:
        passed = totals[0] + dot(refs["k_half"][top, c], refs["u16"][bottom, c], tb=True)
        v_w = totals[1] + dot(v(top, c).astype(F16), half("w", bottom, c), tb=True)
        return passed, v_w, totals[2] + dot(refs["u16"][bottom, c], half("w", top, c), tb=True)

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


def _halves_matrices_body(interpret: bool, refs: dict[str, Any]) -> None:
    """dF and dL D + (dL D)ᵀ as float16 times a power of two each, and dbeta."""
    here, strict = partial(barrier, interpret), triangle(HALF, 1)
    x = lambda: (refs["x16"][...], refs["x_low"][...])
    t = lambda: split(joined(x()) * refs["beta"][...][None, :])
    (du_size, du), (dk_size, dk) = _scale(refs, "du_all", slice(None)), _scale(refs, "dk_left", slice(None))

    def meet(c: Any, totals: Any) -> Any:
        w = refs["w"][:, c].astype(F16)
        dz, dt = totals[0] + dot(w, dk(slice(None), c), tb=True), totals[1] + dot(du(slice(None), c), w, tb=True)
        return dz, dt, totals[2] + dot(w, refs["k"][:, c].astype(F16), tb=True)

    dz, dt, f = over_chunks(refs["w"].shape[1], meet, (jnp.zeros((HALF, HALF), F32),) * 3)
    dz = Scaled.of(refs["dz"][...] - dz * dk_size)
    refs["df"][...] = jnp.where(strict, dot(t()[0], dz.part, ta=True), F32(0)).astype(F16)
    refs["df_size"][...] = jnp.broadcast_to(dz.size, (HALF,))
    f = jnp.where(strict, f, F32(0)).astype(F16)
    dt = Exact.of(dt * du_size + dz.times(f, tb=True))
    here()
    dx = dt.under(x())
    beta = refs["beta"][...]
    # Both ways that beta acts (X D and L = D W Wᵀ) in one sum; apart, they nearly cancel for repeated tokens.
    shares = dx * joined(x()) * beta[None, :]
    refs["dbeta"][...] = jnp.sum(jnp.where(triangle(HALF), shares, F32(0)), axis=1) / beta
    here()
    dl = jnp.where(strict, -Exact.of(dx).times(t(), tb=True), F32(0)) * beta[:, None]
    both = Scaled.of(dl + dl.T)
    refs["dl"][...] = both.part
    refs["dl_size"][...] = jnp.broadcast_to(both.size, (HALF,))


def _halves_rows_body(refs: dict[str, Any]) -> None:
    """64 columns of dk and dw."""
    dim = refs["w"].shape[1]
    c = pl.ds(lax.rem(pl.program_id(2), jnp.int32(dim // HALF)) * HALF, HALF)
    w, k = refs["w"][:, c].astype(F16), refs["k"][:, c].astype(F16)
    df, df_size = refs["df"][...], refs["df_size"][...][:, None]
    dk0, du = refs["dk_left"][:, c], Scaled.of(refs["du_all"][:, c])
    dk = refs["dk_in"][:, c] + dk0 + dot(df, w, ta=True) * df_size
    refs["dk"][:, c] = dk.astype(refs["dk"].dtype)
    t = (joined((refs["x16"][...], refs["x_low"][...])) * refs["beta"][...][None, :]).astype(F16)
    dw = refs["dw_out"][:, c] + du.under(t) - Scaled.of(dk0).under(refs["z16"][...], ta=False)
    refs["dw_sum"][:, c] = dw + dot(df, k) * df_size + dot(refs["dl"][...], w) * refs["dl_size"][...][:, None]


def block_keys_backward(
    k: Array, w: Array, beta: Array, keys: dict[str, Array], back: dict[str, Array], *, interpret: bool
) -> dict[str, Array]:
    """Gradients of `block_keys`: dk (tokens, k's dtype), dw_sum (tokens), dbeta (line).

    keys: its results. back, summed over query heads: dk_in (tokens), dw, du, dz (rows), dk_half from
    `block_queries_backward`; dk0 (tokens): of the keys at the right edge; dp: of the products.
    """
    batch, length, heads, dim = k.shape
    rows = lambda names, arrays: {n: ("rows", arrays[n], 1) for n in names}
    wide = jax.ShapeDtypeStruct((batch, heads, length, dim), F32)
    own: dict[str, Operand] = {"w": ("tokens", w, 1)}
    shared = own | rows(("u16", "k_half"), keys) | {"dk0": ("tokens", back["dk0"], 1), "dp": ("square", back["dp"], 1)}
    grid, blocks = (batch, heads, length // BLOCK), partial(launch, warps=4, interpret=interpret)
    inputs = shared | rows(("du",), back) | {"dk_half": ("left half", back["dk_half"], 1)}
    outputs: dict[str, Operand] = dict.fromkeys(("du_all", "dk_left"), ("rows", wide, 1))
    made = blocks(partial(_blocks_du_body, interpret), grid, inputs, outputs, name="path_blocks_du")
    inputs, outputs = shared | rows(("dw",), back), {"dw_out": ("rows", wide, 1)}
    made |= blocks(partial(_blocks_dw_body, interpret), grid, inputs, outputs, name="path_blocks_dw")
    halves = partial(launch, warps=4, interpret=interpret, size=HALF)
    inputs = own | {"k": ("tokens", k, 1), "beta": ("line", beta, 1)} | rows(("x16", "x_low"), keys)
    inputs |= rows(("du_all", "dk_left"), made)
    small: dict[str, Operand] = {n: ("rows", jax.ShapeDtypeStruct(keys["x16"].shape, F16), 1) for n in ("df", "dl")}
    small |= {n: ("line", jax.ShapeDtypeStruct(beta.shape, F32), 1) for n in ("df_size", "dl_size", "dbeta")}
    grid, body = (batch, heads, length // HALF), partial(_halves_matrices_body, interpret)
    found = halves(body, grid, inputs | rows(("dz",), back), small, name="path_halves_matrices")
    inputs |= rows(("z16",), keys) | rows(("dw_out",), made) | {"dk_in": ("tokens", back["dk_in"], 1)}
    inputs |= {n: (small[n][0], found[n], 1) for n in ("df", "dl", "df_size", "dl_size")}
    outputs = {
        "dk": ("tokens", jax.ShapeDtypeStruct(k.shape, k.dtype), 1),
        "dw_sum": ("tokens", jax.ShapeDtypeStruct(w.shape, F32), 1),
    }
    parts = dim // HALF
    grid = (batch, heads, length // HALF * parts)
    done = halves(_halves_rows_body, grid, inputs, outputs, name="path_halves_rows", parts=parts)
    return done | {"dbeta": found["dbeta"]}
