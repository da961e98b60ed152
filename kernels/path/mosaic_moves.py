"""Keys carried for the queries of every level at head_dim 128, `gpu_moves.carry` as a Pallas Mosaic GPU kernel.

One program per block of 128 tokens, a warpgroup per 64 of them. The keys stay in registers; the matrices of all levels
come one after the other into two places of shared memory, the next one while the tensor cores work on this one. For the
next child keys are needed as they are: that matrix is the identity, and is not read.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.path.levels import Level
from kernels.path.mosaic_keys import BLOCK, DIM, F16, F32, HALF, ROWS, WGMMA, _matrix, _product

Array = jax.Array
STAGES = 2


def carry(
    k: Array, runs: list[Array], levels: tuple[Level, ...], dtype: Any, *, edges: bool, interpret: Any = None
) -> tuple[list[Array], list[Array]]:
    """As `gpu_moves.carry`, at head_dim 128. interpret: parameters of the interpreter, for tests."""
    batch, length, heads, dim = k.shape
    if dim != DIM:
        raise ValueError(f"head_dim {dim}: the Mosaic kernel of carried keys is made for {DIM}")
    count = len(levels)
    shape = lambda level: (batch, length // level.parent * level.stored, heads, dim)
    outs = [jax.ShapeDtypeStruct(shape(level), dtype) for level in levels]
    outs += [jax.ShapeDtypeStruct(k.shape, F16)] * (count - 1 if edges else 0)
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    buffers = {"runs": _matrix(STAGES, dim, dim), "out": plgpu.SMEM((2, *ROWS), dtype, transforms=tiled)}
    if edges and count > 1:
        buffers["edge"] = _matrix(2, *ROWS)
    barriers = {
        "full": plgpu.Barrier(num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    }

    def body(k_ref: Any, *refs: Any) -> None:
        run_refs, out_refs, edge_refs = refs[:count], refs[count : 2 * count], refs[2 * count : -2]
        buf, bar = refs[-2:]
        batch, head, block = (lax.axis_index(n) for n in ("batch", "heads", "blocks"))
        wg = lax.axis_index("wg")
        here = pl.ds(block * BLOCK + wg * HALF, HALF)
        places, begin = [], block * 0  # of each level: parent, child, block of the child, number of its first matrix
        for level in levels:
            tiles = jnp.int32(level.size // BLOCK)
            child, tile = lax.div(block, tiles), lax.rem(block, tiles)
            parent, child = lax.div(child, jnp.int32(level.radix)), lax.rem(child, jnp.int32(level.radix))
            places.append((parent, child, tile, begin))
            begin = begin + lax.max(level.radix - (level is levels[-1]) - child - 1, jnp.int32(0))
        total = begin
        pair = lambda child, a: lax.div(a * (a - 1), jnp.int32(2)) + child
        slot_of = lambda n: lax.rem(n, jnp.int32(STAGES))

        def bring(n: Array) -> None:
            """Start to load matrix number n of all levels."""
            slot = slot_of(n)
            for i, (run_ref, (parent, child, _, first)) in enumerate(zip(run_refs, places, strict=True)):
                last = places[i + 1][3] if i + 1 < count else total

                @pl.when((n >= first) & (n < last))
                def _start(run_ref: Any = run_ref, at: Any = (parent, child, first)) -> None:
                    number = pair(at[1], at[1] + 2 + n - at[2])
                    source = run_ref.at[batch, head, at[0], number]
                    plgpu.copy_gmem_to_smem(source, buf["runs"].at[slot], bar["full"].at[slot])

        def times(x: Array, n: Array) -> Array:
            """x Rᵀ of matrix number n."""

            @pl.when(wg == 0)
            def _next() -> None:
                pl.when((n >= 1) & (n + 1 < total))(lambda: plgpu.barrier_wait(bar["free"].at[slot_of(n + 1)]))
                bring(n + 1)

            slot = slot_of(n)
            plgpu.barrier_wait(bar["full"].at[slot])
            y = _product(ROWS, (x, buf["runs"].at[slot].transpose((1, 0))))
            plgpu.barrier_arrive(bar["free"].at[slot])
            return y

        def give(x: Array, name: str, ref: Any) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            stage = buf[name].at[wg]
            stage[...] = x.astype(F32).astype(stage.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, ref)

        pl.when(wg == 0)(lambda: bring(block * 0))
        load: Any = plgpu.load
        x = load(k_ref.at[batch, here, head], layout=WGMMA, optimized=False)
        for n, (level, place, out_ref) in enumerate(zip(levels, places, out_refs, strict=True)):
            parent, child, tile, first = place

            def rows(a: Array, place: Any = place, level: Level = level, out_ref: Any = out_ref) -> Any:
                parent, child, tile, _ = place
                number = parent * level.pairs + pair(child, a)
                start = (number * (level.size // BLOCK) + tile) * BLOCK + wg * HALF
                return out_ref.at[batch, pl.ds(start, HALF), head]

            def one(a: Array, x: Array, rows: Any = rows, before: Array = child + 2 - first) -> Array:
                give(times(x, a - before), "out", rows(a))
                return x

            pl.when(child + 1 < level.radix)(partial(give, x, "out", rows(child + 1)))
            x = lax.fori_loop(child + 2, level.radix, one, x)
            if n + 1 < count:
                number = first + level.radix - child - 2
                # The keys of the last child stand at the right edge.
                last = lax.div(child, jnp.int32(level.radix - 1))
                x = lax.fori_loop(last, 1, lambda _, x, number=number: times(x, number).astype(F16), x)
                if edges:
                    give(x, "edge", edge_refs[n].at[batch, here, head])

        @pl.when(wg == 0)
        def _see_off() -> None:
            @pl.loop(lax.max(total - STAGES, jnp.int32(0)), total)
            def _wait(n: Array) -> None:
                plgpu.barrier_wait(bar["free"].at[slot_of(n)])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    body.__name__ = "path_carry"
    made = plgpu.kernel(
        body,
        out_type=tuple(outs),
        scratch_types=(buffers, barriers),
        grid=(heads, length // BLOCK, batch),
        grid_names=("heads", "blocks", "batch"),
        num_threads=2,
        thread_name="wg",
        interpret=interpret,
    )(k, *runs)
    return list(made[:count]), [k, *made[count:]] if edges else []
