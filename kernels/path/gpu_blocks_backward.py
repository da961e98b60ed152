"""Backward of the attention inside a block (`gpu_blocks.py`), in three kernels. Derivation: docs/path.md.

The tile of the right half's queries and the left half's keys first, with those queries' way to the block's left edge;
then of each half its own tile, as 64 × 64 matrices, and the rows of all gradients from those. What does not fit the
registers of a program is written and read again, and small programs let more of them share a core. No atomics: what
several query heads add to a key head is written per query head and summed outside.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

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
from kernels.path.gpu_gradients import Scaled, scale_of
from kernels.path.gpu_keys import CHUNK, over_chunks

Array = jax.Array
BF16 = jnp.bfloat16
LEFT = ("dv_left", "dw_left", "du_left")  # what the tile across a block adds to gradients of its left half


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
    options: BlockOptions, refs: dict[str, Any], rows: Any, cols: Any, place: Any, content: Array
) -> Scaled:
    """d(scaled content) of a tile; its weights and its part of the gradients of bias and factors are written,
    the tiles to the rows `place`."""
    p, dlogits, bias = _weights(options, refs, rows, cols, content)
    refs["p"][place, :] = p.astype(refs["p"].dtype)
    sharp = options.sharpen_bias and "sharpness" in refs
    dbias = dlogits * refs["sharpness"][rows][:, None] if sharp else dlogits
    if "hi" in refs:
        refs["columns"][cols] = jnp.sum(dbias, axis=0)
    if "dbias" in refs:
        refs["dbias"][place, :] = dbias
    if "sharpness" in refs:
        scaled = content if bias is None or not options.sharpen_bias else content + bias
        refs["dsharpness"][rows] = jnp.sum(dlogits * scaled, axis=1)
        dlogits = dlogits * refs["sharpness"][rows][:, None]
    return Scaled.of(dlogits * F32(options.scale))


def _parts(refs: dict[str, Any], wide: bool) -> tuple[Any, Any, Any]:
    """(number of this program's half of the block, its rows, its slice of head_dim; all of it unless wide)."""
    count = refs["q"].shape[1] // CHUNK if wide else 1
    part = lax.rem(pl.program_id(2), jnp.int32(2 * count))
    half = lax.div(part, jnp.int32(count))
    return half, pl.ds(half * HALF, HALF), pl.ds(lax.rem(part, jnp.int32(count)) * CHUNK, CHUNK)


def _put(refs: dict[str, Any], name: str, s: Any, x: Scaled) -> None:
    refs[name][s, :], refs[f"{name}_size"][s] = x.part, jnp.broadcast_to(x.size, (HALF,))


def _own_matrices_body(options: BlockOptions, refs: dict[str, Any]) -> None:
    """A half's own tile: its weights p, E, d(content), dE and dz."""
    _, s, _ = _parts(refs, wide=False)

    def meet(c: Any, totals: Any) -> Any:
        q = refs["q"][s, c]
        return totals[0] + dot(q.astype(F16), refs["w16"][s, c], tb=True), totals[1] + dot(q, refs["k"][s, c], tb=True)

    zeros = jnp.zeros((HALF, HALF), F32)
    e, content = over_chunks(refs["q"].shape[1], meet, (zeros, zeros))
    e = jnp.where(triangle(HALF), e, F32(0)).astype(F16)
    refs["e"][s, :] = e
    content = (content - dot(e, refs["z16"][s, :])) * F32(options.scale)
    dcontent = _tile_gradients(options, refs, s, s, s, content)
    _put(refs, "dcontent", s, dcontent)
    refs["dz"][s, :] = -dcontent.under(e)
    barrier(options.interpret)
    size, dleft = scale_of(refs, "dleft", s)
    meet_u = lambda c, total: total + dot(dleft(s, c), refs["u16"][s, c], tb=True)
    both = over_chunks(refs["q"].shape[1], meet_u, zeros) * size + dcontent.times(refs["z16"][s, :], tb=True)
    _put(refs, "de", s, Scaled.of(jnp.where(triangle(HALF), -both, F32(0))))


def _own_rows_body(refs: dict[str, Any]) -> None:
    """64 columns of the gradients of a half's rows; those of the left half have a part from the other tile."""
    half, s, c = _parts(refs, wide=True)
    left = jnp.broadcast_to(half == 0, (HALF, CHUNK))
    more = lambda name: pltriton.load(refs[f"{name}_left"].at[:, c], mask=left, other=0.0)
    scaled = lambda name: Scaled(refs[name][s, :], jnp.max(refs[f"{name}_size"][s]))
    dcontent, de, do = scaled("dcontent"), scaled("de"), refs["do"][s, c]
    refs["dv"][s, c] = (dot(refs["p"][s, :], do, ta=True) + more("dv")).astype(refs["dv"].dtype)
    q, dleft = refs["q"][s, c].astype(F16), refs["dleft"][s, c]
    refs["dk"][s, c] = dcontent.times(q, ta=True).astype(refs["dk"].dtype)
    refs["dw"][s, c] = de.times(q, ta=True) + more("dw")
    refs["du"][s, c] = more("du") - Scaled.of(dleft).under(refs["e"][s, :])
    dq = dcontent.times(refs["k"][s, c].astype(F16)) + de.times(refs["w16"][s, c]) + dleft
    refs["dq"][s, c] = dq.astype(refs["dq"].dtype)


def _across_body(options: BlockOptions, refs: dict[str, Any]) -> None:
    """The right half's queries and the left half's keys, and those queries on their way to the block's left edge.

    dleft is the gradient of all queries at the left edges of their halves.
    """
    top, bottom = HALVES
    here, dim = partial(barrier, options.interpret), refs["q"].shape[1]
    zeros = jnp.zeros((HALF, HALF), F32)
    for name, at in (("columns", bottom), ("dsharpness", top)):
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
    dacross = _tile_gradients(options, refs, bottom, top, slice(None), content * F32(options.scale))
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


def block_row_sums(options: BlockOptions, x: dict[str, Any], keys: dict[str, Array], back: dict[str, Array]) -> Array:
    """Σ_j d(logits) over the keys of the own block, line."""
    batch, length, heads, dim = x["q"].shape
    outputs: dict[str, Operand] = {"rows": ("line", jax.ShapeDtypeStruct((batch, heads, length), F32), 1)}
    grid, body = (batch, heads, length // BLOCK), partial(_rows_body, options)
    inputs, name = _backward_inputs(x, keys, back), "path_block_rows"
    return launch(body, grid, inputs, outputs, name=name, warps=8 if dim > 64 else 4, interpret=options.interpret)[
        "rows"
    ]


def block_queries_backward(
    options: BlockOptions, x: dict[str, Any], keys: dict[str, Array], back: dict[str, Array], bias_gradient: bool
) -> dict[str, Array]:
    """Gradients through the attention of each block to itself and through the queries at its left edge.

    back: do (tokens), lse (line; natural, of the whole row, +inf where nothing is seen), delta (line: Σ do·o − dlse),
    dq0 (tokens, bfloat16: gradient of the queries at the left edge).
    Returns, per query head: dq, bfloat16 dk and dv (tokens) and float32 dw, du (rows), dz (rows [.., T, 64]), dk_half
    [B, H, T / 2, D] and, where asked for, dsharpness, columns (line; minus the gradient of the gates' sums), dbias
    [H, 128, 128], the sum over all blocks.
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
    some |= {"columns": line} if x["hi"] is not None else {}
    inputs = _backward_inputs(x, keys, back)
    outputs = some | {"dleft": rows(dim), "p": left(HALF, dtype=back["do"].dtype)}
    outputs |= {n: left(dim) for n in ("dk_half", *LEFT)} | ({"dbias": left(HALF)} if bias_gradient else {})
    given, grid = inputs | {"dq0": ("tokens", back["dq0"], 1)}, (batch, heads, blocks)
    across = call(partial(_across_body, options), grid, given, outputs, name="path_queries_across")
    outputs = some | {n: rows(HALF, dtype=F16) for n in ("e", "dcontent", "de")} | {"dz": rows(HALF)}
    outputs |= {"p": rows(HALF, dtype=back["do"].dtype), "dcontent_size": line, "de_size": line}
    outputs |= {"dbias": rows(HALF)} if bias_gradient else {}
    given, grid = inputs | of(across, "dleft"), (batch, heads, 2 * blocks)
    own = call(partial(_own_matrices_body, options), grid, given, outputs, name="path_queries_matrices", parts=2)
    given = {n: inputs[n] for n in ("q", "k", "w16", "do")} | of(across, "dleft") | of(own, "p", "e", "dcontent", "de")
    given |= {n: ("left half", across[n], 1) for n in LEFT}
    given |= {n: ("line", own[n], 1) for n in ("dcontent_size", "de_size")}
    outputs = {
        "dq": tokens(dtype=x["q"].dtype),
        "dk": tokens(dtype=BF16),
        "dv": tokens(dtype=BF16),
        "dw": rows(dim),
        "du": rows(dim),
    }
    parts = 2 * dim // CHUNK
    grid = (batch, heads, parts * blocks)
    made = call(_own_rows_body, grid, given, outputs, name="path_queries_rows", parts=parts)
    made |= {n: across[n] + own[n] for n in some} | {"dk_half": across["dk_half"], "dz": own["dz"]}
    if bias_gradient:
        tiles = own["dbias"].reshape(batch, heads, blocks, 2, HALF, HALF).sum((0, 2))
        corner = across["dbias"].reshape(batch, heads, blocks, HALF, HALF).sum((0, 2))
        above = jnp.concatenate([tiles[:, 0], jnp.zeros_like(corner)], 2)
        made["dbias"] = jnp.concatenate([above, jnp.concatenate([corner, tiles[:, 1]], 2)], 1)
    return made
