"""Backward of the attention inside a block (`gpu_blocks.py`), in three kernels. Derivation: docs/path.md.

The tile of the right half's queries and the left half's keys first, with those queries' way to the block's left edge;
then of each half its own tile, as 64 × 64 matrices, and the rows of all gradients from those. What does not fit the
registers of a program is written and read again, and small programs let more of them share a core. No atomics: what
several query heads add to a key head is written per query head and summed outside.
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
    barrier,
    dot,
    launch,
    query_inputs,
    triangle,
    weigh,
)
from kernels.path.gpu_gradients import Scaled, scale_of
from kernels.path.gpu_keys import CHUNK, over_chunks
from kernels.path.gpu_narrow import load_some

Array = jax.Array
BF16 = jnp.bfloat16
SIZES = ("dcontent_size", "de_size", "dleft_size")  # powers of two, one per half
LEFT = ("dv_left", "dw_left", "du_left")  # what the tile across a block adds to gradients of its left half


def _weights(
    options: BlockOptions, refs: dict[str, Any], rows: Any, cols: Any, content: Array
) -> tuple[Array, Array, Array | None]:
    """(p, d(logits), bias) of a tile."""
    bias, logits = weigh(options, refs, rows, cols, content)
    p = jnp.exp(logits - refs["lse"][rows][:, None])
    dp = dot(refs["do"][rows, :], refs["v"][cols, :], tb=True)
    return p, jnp.where(p > 0, p * (dp - refs["delta"][rows][:, None]), F32(0)), bias


def _tile_gradients(
    options: BlockOptions, refs: dict[str, Any], rows: Any, cols: Any, place: Any, content: Array
) -> tuple[Array, Scaled]:
    """(weights in the dtype of do, d(scaled content)) of a tile; its part of the gradients of bias and factors is
    written, dbias and the weights (where asked for) to the rows `place`."""
    p, dlogits, bias = _weights(options, refs, rows, cols, content)
    weights = p.astype(refs["do"].dtype)
    if "p" in refs:
        refs["p"][place, :] = weights
    sharp = options.sharpen_bias and "sharpness" in refs
    dbias = dlogits * refs["sharpness"][rows][:, None] if sharp else dlogits
    if "hi" in refs:
        refs["rows"][rows], refs["columns"][cols] = jnp.sum(dlogits, axis=1), jnp.sum(dbias, axis=0)
    if "dbias" in refs:
        refs["dbias"][place, :] = dbias
    if "sharpness" in refs:
        scaled = content if bias is None or not options.sharpen_bias else content + bias
        refs["dsharpness"][rows] = jnp.sum(dlogits * scaled, axis=1)
        dlogits = dlogits * refs["sharpness"][rows][:, None]
    return weights, Scaled.of(dlogits * F32(options.scale))


def _parts(refs: dict[str, Any], wide: bool) -> tuple[Any, Any, Any]:
    """(number of this program's half of the block, its rows, its slice of head_dim; all of it unless wide)."""
    count = refs["q"].shape[1] // CHUNK if wide else 1
    part = lax.rem(pl.program_id(2), jnp.int32(2 * count))
    half = lax.div(part, jnp.int32(count))
    return half, pl.ds(half * HALF, HALF), pl.ds(lax.rem(part, jnp.int32(count)) * CHUNK, CHUNK)


class Own(NamedTuple):
    """Matrices of a half's own tile: its weights, E, d(content) and dE; and the scale of dleft."""

    p: Array
    e: Array
    dcontent: Scaled
    de: Scaled
    size: Array


def _own_matrices(options: BlockOptions, refs: dict[str, Any], s: Any) -> Own:
    """dz is written."""

    def meet(c: Any, totals: Any) -> Any:
        q = refs["q"][s, c]
        return totals[0] + dot(q.astype(F16), refs["w16"][s, c], tb=True), totals[1] + dot(q, refs["k"][s, c], tb=True)

    zeros = jnp.zeros((HALF, HALF), F32)
    e, content = over_chunks(refs["q"].shape[1], meet, (zeros, zeros))
    e = jnp.where(triangle(HALF), e, F32(0)).astype(F16)
    content = (content - dot(e, refs["z16"][s, :])) * F32(options.scale)
    p, dcontent = _tile_gradients(options, refs, s, s, s, content)
    refs["dz"][s, :] = -dcontent.under(e)
    barrier(options.interpret)
    size, dleft = scale_of(refs, "dleft", s)
    meet_u = lambda c, total: total + dot(dleft(s, c), refs["u16"][s, c], tb=True)
    both = over_chunks(refs["q"].shape[1], meet_u, zeros) * size + dcontent.times(refs["z16"][s, :], tb=True)
    return Own(p, e, dcontent, Scaled.of(jnp.where(triangle(HALF), -both, F32(0))), size)


def _own_rows(refs: dict[str, Any], half: Array, s: Any, c: Any, own: Own) -> None:
    """Columns c of the gradients of a half's rows; those of the left half have a part from the other tile."""
    left = jnp.broadcast_to(half == 0, (HALF, CHUNK))
    more = lambda name: load_some(refs[f"{name}_left"], (slice(None), c), left)
    refs["dv"][s, c] = (dot(own.p, refs["do"][s, c], ta=True) + more("dv")).astype(refs["dv"].dtype)
    q, dleft = refs["q"][s, c].astype(F16), refs["dleft"][s, c]
    refs["dk"][s, c] = own.dcontent.times(q, ta=True).astype(refs["dk"].dtype)
    refs["dw"][s, c] = own.de.times(q, ta=True) + more("dw")
    refs["du"][s, c] = more("du") - Scaled.by(dleft, own.size).under(own.e)
    dq = own.dcontent.times(refs["k"][s, c].astype(F16)) + own.de.times(refs["w16"][s, c]) + dleft
    refs["dq"][s, c] = dq.astype(refs["dq"].dtype)


def _own_body(options: BlockOptions, refs: dict[str, Any]) -> None:
    """All of a half, for a head_dim of 64: what the two below do for wider ones."""
    half, s, c = _parts(refs, wide=False)
    own = _own_matrices(options, refs, s)
    barrier(options.interpret)
    _own_rows(refs, half, s, c, own)


def _own_matrices_body(options: BlockOptions, refs: dict[str, Any]) -> None:
    _, s, _ = _parts(refs, wide=False)
    own = _own_matrices(options, refs, s)
    refs["e"][s, :] = own.e
    refs["dcontent"][s, :], refs["de"][s, :] = own.dcontent.part, own.de.part
    for name, size in zip(SIZES, (own.dcontent.size, own.de.size, own.size), strict=True):
        refs[name][s] = jnp.broadcast_to(size, (HALF,))


def _own_rows_body(refs: dict[str, Any]) -> None:
    half, s, c = _parts(refs, wide=True)
    sizes = [jnp.max(refs[n][s]) for n in SIZES]
    dcontent, de = Scaled(refs["dcontent"][s, :], sizes[0]), Scaled(refs["de"][s, :], sizes[1])
    _own_rows(refs, half, s, c, Own(refs["p"][s, :], refs["e"][s, :], dcontent, de, sizes[2]))


def _across_body(options: BlockOptions, refs: dict[str, Any]) -> None:
    """The right half's queries and the left half's keys, and those queries on their way to the block's left edge.

    dleft is the gradient of all queries at the left edges of their halves.
    """
    top, bottom = HALVES
    here, dim = partial(barrier, options.interpret), refs["q"].shape[1]
    zeros = jnp.zeros((HALF, HALF), F32)
    for name, at in (("columns", bottom), ("dsharpness", top), ("rows", top)):
        if name in refs:
            refs[name][at] = jnp.zeros((HALF,), F32)
    meet_e = lambda c, total: total + dot(refs["q"][bottom, c].astype(F16), refs["w16"][bottom, c], tb=True)
    e = jnp.where(triangle(HALF), over_chunks(dim, meet_e, zeros), F32(0)).astype(F16)
    left = lambda c, e: (refs["q"][bottom, c].astype(F32) - dot(e, refs["u16"][bottom, c])).astype(F16)
    y_size, y = scale_of(refs, "dq0", bottom)

    def meet(c: Any, totals: Any) -> Any:
        content, passed, dpassed, e = totals
        x = left(c, e)
        content, passed = (
            content + dot(x, refs["k_half"][top, c], tb=True),
            passed + dot(x, refs["w16"][top, c], tb=True),
        )
        return content, passed, dpassed - dot(y(bottom, c), refs["u16"][top, c], tb=True), e

    content, passed, dpassed, _ = over_chunks(dim, meet, (zeros, zeros, zeros, e))
    passed, dpassed = passed.astype(F16), dpassed.astype(F16)
    here()
    _, dacross = _tile_gradients(options, refs, bottom, top, slice(None), content * F32(options.scale))
    here()

    def write(c: Any, parts: Any) -> Any:
        e, passed, dpassed, part, size = parts
        dacross = Scaled(part, size)
        dleft = dacross.times(refs["k_half"][top, c]) + dot(dpassed, refs["w16"][top, c]) * y_size
        refs["dleft"][bottom, c] = dleft + refs["dq0"][bottom, c].astype(F32)
        refs["dleft"][top, c] = refs["dq0"][top, c].astype(F32)
        here()
        x = left(c, e)
        refs["dk_half"][:, c] = dacross.times(x, ta=True)
        refs["dw_left"][:, c] = dot(dpassed, x, ta=True) * y_size
        here()
        refs["du_left"][:, c] = -dot(passed, y(bottom, c), ta=True) * y_size
        refs["dv_left"][:, c] = dot(refs["p"][...], refs["do"][bottom, c], ta=True)
        here()
        return parts

    over_chunks(dim, write, (e, passed, dpassed, *dacross))


def _backward_inputs(x: dict[str, Any], keys: dict[str, Array], back: dict[str, Array]) -> dict[str, Operand]:
    return query_inputs(x, keys) | {
        "do": ("tokens", back["do"], 1),
        "lse": ("line", back["lse"], 1),
        "delta": ("line", back["delta"], 1),
    }


def whole_tiles(own: Array, left: Array) -> Array:
    """[H, 128, 128], the sum over batch and blocks of own tiles [B, H, n, 2, 64, 64] and left ones [B, H, n, 1, 64, 64]
    (right half's queries, left half's keys)."""
    tiles, corner = own.sum((0, 2)), left.sum((0, 2, 3))
    above = jnp.concatenate([tiles[:, 0], jnp.zeros_like(corner)], 2)
    return jnp.concatenate([above, jnp.concatenate([corner, tiles[:, 1]], 2)], 1)


def block_queries_backward(
    options: BlockOptions, x: dict[str, Any], keys: dict[str, Array], back: dict[str, Array], bias_gradient: bool
) -> dict[str, Array]:
    """Gradients through the attention of each block to itself and through the queries at its left edge.

    back: do (tokens), lse (line; natural, of the whole row, +inf where nothing is seen), delta (line: Σ do·o − dlse),
    dq0 (tokens, bfloat16: gradient of the queries at the left edge).
    Returns, per query head: dq, bfloat16 dk and dv (tokens) and float32 dw, du (rows), dz (rows [.., T, 64]), dk_half
    [B, H, T / 2, D]; the weights of the tiles: p (rows) and p_left [B, H, T / 2, 64], of the right half's queries and
    the left half's keys; and, where asked for, dsharpness, rows and columns (lines: sums of d(logits), and minus the
    gradient of the gates' sums), dbias [H, 128, 128], the sum over all blocks.
    """
    batch, length, heads, dim = x["q"].shape
    place = lambda kind, *shape, dtype=F32: (kind, jax.ShapeDtypeStruct(shape, dtype), 1)
    tokens = partial(place, "tokens", batch, length, heads, dim)
    rows = partial(place, "rows", batch, heads, length)
    left = partial(place, "left half", batch, heads, length // 2)
    line = place("line", batch, heads, length)
    call = partial(launch, warps=WARPS, interpret=options.interpret)
    blocks, of = length // BLOCK, lambda made, *names: {n: ("rows", made[n], 1) for n in names}
    some: dict[str, Operand] = {"dsharpness": line} if x["sharpness"] is not None else {}
    some |= {"columns": line, "rows": line} if x["hi"] is not None else {}
    inputs = _backward_inputs(x, keys, back)
    outputs = some | {"dleft": rows(dim), "p": left(HALF, dtype=back["do"].dtype)}
    outputs |= {n: left(dim) for n in ("dk_half", *LEFT)} | ({"dbias": left(HALF)} if bias_gradient else {})
    given, grid = inputs | {"dq0": ("tokens", back["dq0"], 1)}, (batch, heads, blocks)
    body = partial(_across_body, options)
    across = call(body, grid, given, outputs, name="path_queries_across", stages=3 if dim > CHUNK else 1)
    wide, weights = dim > CHUNK, {"p": rows(HALF, dtype=back["do"].dtype)}
    small = some | {"dz": rows(HALF)} | ({"dbias": rows(HALF)} if bias_gradient else {})
    small |= weights if wide or x["hi"] is not None else {}
    tiles = {n: rows(HALF, dtype=F16) for n in ("e", "dcontent", "de")} | dict.fromkeys(SIZES, line)
    gradients = {"dq": tokens(dtype=x["q"].dtype), "dk": tokens(dtype=BF16), "dv": tokens(dtype=BF16)}
    gradients |= {"dw": rows(dim), "du": rows(dim)}
    given, grid = inputs | of(across, "dleft"), (batch, heads, 2 * blocks)
    left_parts = {n: ("left half", across[n], 1) for n in LEFT}
    if wide:
        body, name = partial(_own_matrices_body, options), "path_queries_matrices"
        own = call(body, grid, given, small | tiles, name=name, parts=2, stages=2)
        given = {n: inputs[n] for n in ("q", "k", "w16", "do")} | of(across, "dleft") | left_parts
        given |= {n: (kind, own[n], 1) for n, (kind, _, _) in (weights | tiles).items()}
        parts = 2 * dim // CHUNK
        made = call(
            _own_rows_body, (batch, heads, parts * blocks), given, gradients, name="path_queries_rows", parts=parts
        )
    else:
        body = partial(_own_body, options)
        own = call(body, grid, given | left_parts, small | gradients, name="path_queries_own", parts=2)
        made = {n: own[n] for n in gradients}
    made |= {n: across[n] + own[n] for n in some} | {"dk_half": across["dk_half"], "dz": own["dz"]}
    made |= {"p_left": across["p"]} | ({"p": own["p"]} if "p" in own else {})
    if bias_gradient:
        shape = (batch, heads, blocks, -1, HALF, HALF)
        made["dbias"] = whole_tiles(own["dbias"].reshape(shape), across["dbias"].reshape(shape))
    return made
