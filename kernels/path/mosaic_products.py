"""Products of the blocks of a level at head_dim 128, `gpu_products.runs` as a Pallas Mosaic GPU kernel.

One program per chain, a warpgroup per 64 of its rows: the running product stays in registers, whose two float16 parts
are operands as they are, and a third warpgroup brings the next matrix while the tensor cores work on this one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.path.levels import Level
from kernels.path.mosaic_keys import DIM, F16, F32, HALF, ROWS, _iotas, _load, _matrix, _product, _split, _three

Array = jax.Array
STAGES = 2


def runs(
    p: tuple[Array, Array], level: Level, top: bool, *, interpret: Any = None
) -> tuple[Array, Array, tuple[Array, Array]]:
    """As `gpu_products.runs`, at head_dim 128. interpret: parameters of the interpreter, for tests."""
    batch, heads, _, dim, _ = p[0].shape
    if dim != DIM:
        raise ValueError(f"head_dim {dim}: the Mosaic kernel of the products is made for {DIM}")
    r = level.radix
    grouped = [x.reshape(batch, heads, -1, r, dim, dim) for x in p]
    parents, chains = grouped[0].shape[2], r - 1 if top else r
    count = level.pairs if top else level.pairs + r
    shape = lambda *n: jax.ShapeDtypeStruct((batch, heads, parents, *n, dim, dim), F16)
    buffers = {"p": _matrix(STAGES, dim, dim), "p_low": _matrix(STAGES, dim, dim), "out": _matrix(2, *ROWS)}
    barriers = {
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    }

    def body(
        p_ref: Any, low_ref: Any, runs_ref: Any, left_ref: Any, high_ref: Any, whole_low_ref: Any, *rest: Any
    ) -> None:
        buf, bar = rest
        batch, head, number = (lax.axis_index(n) for n in ("batch", "heads", "chains"))
        wg = lax.axis_index("wg")
        parent = lax.div(number, jnp.int32(chains))
        a = chains - lax.rem(number, jnp.int32(chains))  # the longest chains first
        first = lax.div(a * (a - 1), jnp.int32(2))
        slot_of = lambda n: lax.rem(n, jnp.int32(STAGES))

        @pl.when(wg < 2)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            start = pl.multiple_of(wg * HALF, HALF)
            rows = pl.ds(start, HALF)
            here = buf["out"].at[wg]

            def give(x: Array, ref: Any) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                here[...] = x
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(here, ref)

            row, col = _iotas(ROWS)
            eye = jnp.where(row + start == col, F32(1), F32(0)).astype(F16)
            give(eye, runs_ref.at[batch, head, parent, first + a - 1, rows])
            plgpu.barrier_wait(bar["full"].at[0])
            run = _load(buf["p"].at[0, rows]) + _load(buf["p_low"].at[0, rows])
            plgpu.commit_smem()  # read before the next matrix arrives there
            plgpu.barrier_arrive(bar["free"].at[0])

            def step(n: Array, run: Array) -> Array:
                slot, parts = slot_of(n), _split(run)
                give(parts[0], runs_ref.at[batch, head, parent, first + a - 1 - n, rows])
                plgpu.barrier_wait(bar["full"].at[slot])
                run = _product(ROWS, *_three(parts, (buf["p"].at[slot], buf["p_low"].at[slot])))
                plgpu.barrier_arrive(bar["free"].at[slot])
                return run

            run = lax.fori_loop(1, a, step, run)
            if not top:
                parts = _split(run)

                @pl.when(a < r)
                def _left() -> None:
                    give(parts[0], left_ref.at[batch, head, parent, a, rows])

                @pl.when(a == r)
                def _whole() -> None:
                    give(eye, left_ref.at[batch, head, parent, 0, rows])
                    give(parts[0], high_ref.at[batch, head, parent, rows])
                    give(parts[1], whole_low_ref.at[batch, head, parent, rows])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(wg == 2)
        def _memory() -> None:
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, a)
            def _bring(n: Array) -> None:
                slot = slot_of(n)
                pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(bar["free"].at[slot]))
                for name, ref in (("p", p_ref), ("p_low", low_ref)):
                    source = ref.at[batch, head, parent, a - 1 - n]
                    plgpu.copy_gmem_to_smem(source, buf[name].at[slot], bar["full"].at[slot])

            @pl.loop(lax.max(a - STAGES, jnp.int32(0)), a)
            def _see_off(n: Array) -> None:
                plgpu.barrier_wait(bar["free"].at[slot_of(n)])

    body.__name__ = "path_runs"
    made, left, high, low = plgpu.kernel(
        body,
        out_type=(shape(count), shape(r), shape(), shape()),
        scratch_types=(buffers, barriers),
        grid=(heads, parents * chains, batch),
        grid_names=("heads", "chains", "batch"),
        num_threads=3,
        thread_name="wg",
        interpret=interpret,
    )(*grouped)
    return made, left, (high, low)
