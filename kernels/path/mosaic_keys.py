"""What the keys of a block leave behind, at head_dim 128: `gpu_keys.block_keys` as one Pallas Mosaic GPU kernel.

One warpgroup per half block of 64 tokens, both of a block in one program, whose operands stay in shared memory from w
to the block's product: what three Triton kernels hand on through global memory (m, U's low part, w twice) never leaves
the program. Algebra and notation in docs/path.md. Float32 products are three float16 ones on the tensor cores, as in
`gpu_blocks.dot3`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.attention.mosaic_gpu_spec import COLUMN, ROW, read, spread

Array = jax.Array
F16, F32 = jnp.float16, jnp.float32
HALF, BLOCK, DIM = 64, 128, 128
WGMMA = plgpu.Layout.WGMMA
SQUARE, ROWS = (HALF, HALF), (HALF, DIM)
OUTPUTS = ("w16", "u16", "z16", "x16", "x_low", "k_half", "k16", "p16", "p_low")
Pair = tuple[Any, Any]  # float32 values as two float16 parts: arrays in registers or references to shared memory


def _matrix(*shape: int) -> Any:
    """A shared buffer of float16 tiles, laid out for wgmma."""
    return plgpu.SMEM(shape, F16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def _product(shape: tuple[int, int], *terms: tuple[Any, Any]) -> Array:
    """The sum of a b over the terms (a, b), accumulated in float32 in their order."""

    def run(acc: Any) -> Array:
        for a, b in terms:
            plgpu.wgmma(acc, a, b)
        out: Array = acc[...]
        return out

    made: Array = pl.run_scoped(run, plgpu.ACC(shape, F32))
    return made


def _three(a: Pair, b: Pair) -> list[tuple[Any, Any]]:
    """The terms of a product of float32 values: error about 2⁻²²."""
    return [(a[1], b[0]), (a[0], b[1]), (a[0], b[0])]


def _split(x: Array) -> tuple[Array, Array]:
    high = x.astype(F16)
    return high, (x - high.astype(F32)).astype(F16)


def _load(ref: Any) -> Array:
    return read(ref, WGMMA).astype(F32)


def _turned(pair: Pair) -> Pair:
    return pair[0].transpose((1, 0)), pair[1].transpose((1, 0))


def _put(pair: Pair, values: tuple[Array, Array]) -> None:
    """Values in two parts to shared memory, where the tensor cores can read them."""
    for ref, value in zip(pair, values, strict=True):
        ref[...] = value
    plgpu.commit_smem()


def _iotas(shape: tuple[int, int]) -> tuple[Array, Array]:
    row, col = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA) for axis in (0, 1))
    return row, col


def _inverse(lower: Array, x_refs: Pair, y_refs: Pair) -> Array:
    """(I + L)⁻¹ of a strictly lower triangular 64 × 64 matrix, by joining inverse diagonal blocks of 1, 2, … 32:
    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]], exact, as products of whole matrices. C A⁻¹ is a part of L
    times all A⁻¹."""
    row, col = _iotas(SQUARE)
    apart = row ^ col  # its highest bit is the size of the blocks that join row and column
    x = jnp.where(row == col, F32(1), jnp.where(apart == 1, -lower, F32(0)))
    given, size = _split(lower), 2
    while size < HALF:
        parts = _split(x)
        _put(x_refs, parts)
        corner = (apart >= size) & (apart < 2 * size)
        _put(y_refs, _split(jnp.where(corner, _product(SQUARE, *_three(given, x_refs)), F32(0))))
        x = x - _product(SQUARE, *_three(parts, y_refs))
        size *= 2
    return x


def block_keys(k: Array, w: Array, beta: Array, *, keep: bool, interpret: Any = None) -> dict[str, Array]:
    """As `gpu_keys.block_keys`, at head_dim 128. keep: with x16 and x_low, of which only the backward pass has need.
    interpret: parameters of the interpreter, for tests."""
    batch, length, heads, dim = k.shape
    if dim != DIM:
        raise ValueError(f"head_dim {dim}: the Mosaic kernel of the blocks' keys is made for {DIM}")
    like = lambda *last: jax.ShapeDtypeStruct((batch, heads, *last), F16)
    square = like(length // BLOCK, DIM, DIM)
    shapes = {"w16": like(length, DIM), "u16": like(length, DIM), "k_half": like(length, DIM)}
    shapes |= {n: like(length, HALF) for n in ("z16", "x16", "x_low")}
    shapes |= {"k16": jax.ShapeDtypeStruct(k.shape, F16), "p16": square, "p_low": square}
    names = [n for n in OUTPUTS if keep or n not in ("x16", "x_low")]
    buffers: dict[str, Any] = {n: _matrix(2, *ROWS) for n in ("w", "w_low", "u", "u_low", "k")}
    buffers |= {n: _matrix(2, *SQUARE) for n in ("x", "x_low", "y", "y_low")}
    buffers["beta"] = plgpu.SMEM((2, HALF), F32)
    barriers = {
        "beta": plgpu.Barrier(num_barriers=2),
        "halves": plgpu.Barrier(num_arrivals=2),  # both halves are done
        "passed": plgpu.Barrier(),  # nobody reads U of the right half any more
        "m": plgpu.Barrier(),  # M stands where it was
        "done": plgpu.Barrier(num_arrivals=2),
    }

    def body(k_ref: Any, w_ref: Any, beta_ref: Any, *refs: Any) -> None:
        out = dict(zip(names, refs[:-2], strict=True))
        buf, bar = refs[-2:]
        batch, head, block = (lax.axis_index(n) for n in ("batch", "heads", "blocks"))
        wg = lax.axis_index("wg")
        here = pl.ds(block * BLOCK + wg * HALF, HALF)
        top = pl.ds(block * BLOCK, HALF)
        pair = lambda name, half: (buf[name].at[half], buf[f"{name}_low"].at[half])
        w, u, x, y = (pair(n, wg) for n in "wuxy")

        def give(ref: Any, name: str) -> None:
            plgpu.copy_smem_to_gmem(ref, out[name].at[batch, head, here])

        # ---- Half a block ----
        plgpu.copy_gmem_to_smem(beta_ref.at[batch, head, here], buf["beta"].at[wg], bar["beta"].at[wg])
        load: Any = plgpu.load
        given = load(k_ref.at[batch, here, head], layout=WGMMA, optimized=False).astype(F16)
        _put(w, _split(load(w_ref.at[batch, here, head], layout=WGMMA, optimized=False)))
        buf["k"].at[wg][...] = given
        plgpu.commit_smem()
        give(w[0], "w16")
        plgpu.barrier_wait(bar["beta"].at[wg])
        row, col = _iotas(SQUARE)
        strict = row > col
        lower = _product(SQUARE, *_three(w, _turned(w))) * spread(read(buf["beta"].at[wg], ROW), SQUARE)
        inverse = _inverse(jnp.where(strict, lower, F32(0)), x, y)
        if keep:
            _put(x, _split(inverse))
            give(x[0], "x16")
            give(x[1], "x_low")
        t = _split(inverse * spread(read(buf["beta"].at[wg], COLUMN), SQUARE, 1))
        keys = buf["k"].at[wg]
        turned = keys.transpose((1, 0))
        _put(y, _split(jnp.where(strict, _product(SQUARE, (w[1], turned), (w[0], turned)), F32(0))))
        z = _product(SQUARE, *_three(t, y)).astype(F16)
        plgpu.commit_smem()  # all warps have read what z takes the place of
        y[0][...] = z
        plgpu.commit_smem()
        give(y[0], "z16")
        _put(u, _split(_product(ROWS, *_three(t, w))))
        give(u[0], "u16")
        moved = _load(keys) - _product(ROWS, (y[0].transpose((1, 0)), w[0]))
        keys[...] = moved.astype(F16)
        plgpu.commit_smem()
        give(keys, "k_half")
        plgpu.barrier_arrive(bar["halves"])
        plgpu.barrier_wait(bar["halves"])

        # ---- Both together: keys at the right edge, M ----
        @pl.when(wg == 0)
        def _keys() -> None:
            passed = _product(SQUARE, (keys, buf["u"].at[1].transpose((1, 0)))).astype(F16)
            plgpu.barrier_arrive(bar["passed"])
            at_edge = _load(keys) - _product(ROWS, (passed, buf["w"].at[1]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            keys[...] = at_edge.astype(F16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(keys, out["k16"].at[batch, top, head])
            plgpu.barrier_wait(bar["m"])

        @pl.when(wg == 1)
        def _m() -> None:
            plgpu.copy_smem_to_gmem(keys, out["k16"].at[batch, here, head])
            across = _split(_product(SQUARE, *_three(u, _turned(pair("w", 0)))))
            m = _split(_load(u[0]) + _load(u[1]) - _product(ROWS, *_three(across, pair("u", 0))))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_wait(bar["passed"])
            _put(u, m)
            plgpu.barrier_arrive(bar["m"])

        # ---- 64 rows of P = I − W₀ᵀ U₀ − W₁ᵀ M ----
        first = pl.multiple_of(wg * HALF, HALF)
        columns = lambda half: _turned(tuple(r.at[:, pl.ds(first, HALF)] for r in pair("w", half)))
        terms = [term for half in (0, 1) for term in _three(columns(half), pair("u", half))]
        row, col = _iotas(ROWS)
        p = jnp.where(row + first == col, F32(1), F32(0)) - _product(ROWS, *terms)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(bar["done"])
        plgpu.barrier_wait(bar["done"])
        _put(u, _split(p))
        for ref, name in zip(u, ("p16", "p_low"), strict=True):
            plgpu.copy_smem_to_gmem(ref, out[name].at[batch, head, block, pl.ds(first, HALF)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    body.__name__ = "path_block_keys"
    made = plgpu.kernel(
        body,
        out_type=tuple(shapes[n] for n in names),
        scratch_types=(buffers, barriers),
        grid=(heads, length // BLOCK, batch),
        grid_names=("heads", "blocks", "batch"),
        num_threads=2,
        thread_name="wg",
        interpret=interpret,
    )(k, w, beta)
    return dict(zip(names, made, strict=True))
