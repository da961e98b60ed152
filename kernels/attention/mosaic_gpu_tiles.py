"""Tiles of a Toeplitz matrix held as a slice of its table: the prior inside the Mosaic GPU kernels.

A prior over distance is a table per head, and a score tile needs table[row − column + base]. In the accumulator layout
of `wgmma` a thread owns two rows 8 apart and pairs of columns 8 apart, so its n/2 scores of a (64, n) tile touch only
n/4 + 2 different distances: that many 4-byte loads from shared memory, free of bank conflicts, no special function.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

Array = jax.Array
ROWS = 64  # rows of a warpgroup's tile


def table_buffer(entries: int, pairs: bool) -> int:
    """Floats of shared memory for a slice of `entries` (a multiple of 32); with pairs a second copy follows it."""
    return entries + (entries + 32 if pairs else 0)


def table_chunks(entries: int, pairs: bool) -> list[tuple[int, int, int, int]]:
    """(copy, table offset, shared memory offset, size) of the bulk copies that fill `table_buffer`.

    A bulk copy moves at most 256 entries. Copy 1 is the table moved by one entry, so that an odd pair of entries is
    aligned to 8 bytes there; it starts 16 entries early, so that it lies 16 banks away from copy 0.
    """
    chunks = [(0, o, o, min(256, entries - o)) for o in range(0, entries, 256)]
    if pairs:
        chunks += [(1, o - 16, entries + o, min(256, entries + 32 - o)) for o in range(0, entries + 32, 256)]
    return chunks


def _loader(table: ir.Value, base: ir.Value, sign: int, entries: int, pairs: bool) -> Callable[[int, int], ir.Value]:
    """load(block, parity): the table entry of this thread's column pair `block` blocks of 8 away from its first row."""
    i32 = ir.IntegerType.get_signless(32)
    f32 = ir.F32Type.get()
    const = lambda x: utils.c(x, i32)
    tid = utils.thread_idx()
    lane = arith.remui(tid, const(32))
    warp = arith.remui(arith.divui(tid, const(32)), const(4))
    row = arith.addi(arith.muli(warp, const(16)), arith.divui(lane, const(4)))
    col = arith.muli(arith.remui(lane, const(4)), const(2))
    offset = arith.addi(base, arith.subi(row, col) if sign < 0 else arith.subi(col, row))
    pair_type = ir.VectorType.get((2,), f32)
    if pairs:
        # The lower entry of a pair of columns; an odd one is read from the copy, where it is even.
        lower = arith.subi(offset, const(1)) if sign < 0 else offset
        odd = arith.remui(lower, const(2))
        offset = arith.addi(lower, arith.muli(odd, const(entries + 15)))
    start = utils.getelementptr(utils.memref_ptr(table), [offset], f32)
    cache: dict[int, Any] = {}

    def load(block: int, parity: int) -> ir.Value:
        if not pairs:
            step = sign * (8 * block + parity)
            if step not in cache:
                cache[step] = llvm.load(f32, utils.getelementptr(start, [step], f32))
            return cache[step]
        step = sign * 8 * block
        if step not in cache:
            both = llvm.load(pair_type, utils.getelementptr(start, [step], f32), alignment=8)
            take = lambda n: vector.extract(both, [], ir.DenseI64ArrayAttr.get([n]))
            cache[step] = (take(1), take(0)) if sign < 0 else (take(0), take(1))
        return cache[step][parity]

    return load


def _registers(shape: tuple[int, int]) -> list[tuple[tuple[int, ...], int, int]]:
    """(register index, column block, row half) for every register of the accumulator layout."""
    full = fa.WGMMA_LAYOUT.registers_shape(shape)
    return [(idx, idx[1], idx[4]) for idx in np.ndindex(full)]


def toeplitz_tile(table_ref: Any, base: Array, columns: int, sign: int, entries: int, pairs: bool) -> Array:
    """tile[r, c] = table[base + r − c] (sign −1) or table[base + c − r] (sign +1); float32 [64, columns].

    table_ref: float32 [table_buffer(entries, pairs)] in shared memory, read in place; base: int32 scalar.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def build(_: Any, table: ir.Value, start: Any) -> Any:
        load = _loader(table, start.registers.item(), sign, entries, pairs)
        shape = fa.WGMMA_LAYOUT.registers_shape((ROWS, columns))
        registers = np.empty(shape, dtype=object)
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        for idx, block, half in _registers((ROWS, columns)):
            registers[idx] = vector.from_elements(pair, [load(block - half, 0), load(block - half, 1)])
        return mgpu.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return build(table_ref, base)


def toeplitz_totals(
    tile: Array, table_refs: list[Any], base: Array, sign: int, entries: int, pairs: bool
) -> list[Array]:
    """For each table the sum of tile * its toeplitz_tile over rows and columns, spread over a float32 [64, 8] array.

    Scores of one thread that lie on one diagonal are added first, once for all tables.
    """
    columns = tile.shape[1]
    part = plgpu.ShapeDtypeStruct((ROWS, 8), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT(()), *[plgpu.RefType()] * len(table_refs)),
        return_type=[part] * len(table_refs),
    )
    def build(_: Any, values: Any, start: Any, *tables: ir.Value) -> Any:
        diagonals: dict[int, ir.Value] = {}
        for idx, block, half in _registers((ROWS, columns)):
            x = values.registers[idx]
            old = diagonals.get(block - half)
            diagonals[block - half] = x if old is None else fa.addf(old, x)
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        out = []
        for table in tables:
            load = _loader(table, start.registers.item(), sign, entries, pairs)
            sums: dict[int, ir.Value] = {}
            for block, x in diagonals.items():
                term = fa.mulf(x, vector.from_elements(pair, [load(block, 0), load(block, 1)]))
                sums[block % 2] = term if block % 2 not in sums else fa.addf(sums[block % 2], term)
            out.append(_from_halves(sums))
        return out

    return list(build(tile, base, *table_refs))


def with_zeros(tile: Array, columns: int) -> Array:
    """A float32 tile [64, n] and zeros after it, up to `columns`."""
    present = tile.shape[1]
    if present == columns:
        return tile

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def build(_: Any, values: Any) -> Any:
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape((ROWS, columns)), dtype=object)
        zero = utils.c(0.0, ir.F32Type.get())
        none = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), [zero, zero])
        for idx, block, _half in _registers((ROWS, columns)):
            registers[idx] = values.registers[idx] if 8 * block < present else none
        return mgpu.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return build(tile)


def partial_dot(a: Array, b: Array) -> Array:
    """Row sums of a * b, left as float32 [64, 8] partial sums."""
    return _partial(fa.mulf, a, b)


def partial_sum(a: Array) -> Array:
    """Row sums, left as float32 [64, 8] partial sums."""
    return _partial(lambda x: x, a)


def _partial(term_of: Callable[..., ir.Value], *tiles: Array) -> Array:
    columns = tiles[0].shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,) * len(tiles),
        return_type=plgpu.ShapeDtypeStruct((ROWS, 8), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def build(_: Any, *arrays: Any) -> Any:
        sums: dict[int, ir.Value] = {}
        for idx, _block, half in _registers((ROWS, columns)):
            term = term_of(*(x.registers[idx] for x in arrays))
            sums[half] = term if half not in sums else fa.addf(sums[half], term)
        return _from_halves(sums)

    return build(*tiles)


def _from_halves(sums: dict[int, ir.Value]) -> Any:
    """A [64, 8] array from one register pair for each of the thread's two rows."""
    registers = np.empty(fa.WGMMA_LAYOUT.registers_shape((ROWS, 8)), dtype=object)
    for idx, _block, half in _registers((ROWS, 8)):
        registers[idx] = sums[half]
    return mgpu.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)
