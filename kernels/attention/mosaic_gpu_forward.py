"""Mosaic GPU attention forward: queries stay, keys and values stream by TMA, warpgroups take turns on the tensor cores.

The online softmax in base 2 (Milakov & Gimelshein, arXiv 1805.02867) in the warp-specialised arrangement of
FlashAttention-3 (arXiv 2407.08608). Prior and gates are where the score accumulator starts: they are read from shared
memory while the product with the values runs, and the tensor cores add them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.attention.mosaic_gpu_spec import (
    COLUMN,
    LOG2E,
    ROW,
    Spec,
    Tiles,
    copies_of_table,
    copy_table,
    copy_vector,
    gate_tile,
    lift,
    matrix,
    near_gates,
    offset_tile,
    read,
    rows_of,
    spread,
    table,
    vector,
    visible,
    zeros,
)
from kernels.attention.mosaic_gpu_tiles import with_zeros

Array = jax.Array
ROW_INPUTS = ("factor", "gain", "q_gate_hi", "q_gate_lo", "q_segments", "lse_before")
COLUMN_INPUTS = ("k_gate_hi", "k_gate_lo", "k_near", "kv_segments")


def _check_before(spec: Spec, tiles: Tiles, arrays: dict[str, Array]) -> None:
    if ("o_before" in arrays) != ("lse_before" in arrays):
        raise ValueError("o_before and lse_before must be given together: a softmax goes on from both")
    if "o_before" in arrays and spec.queries % tiles.rows:
        raise ValueError(
            f"o_before is of {spec.queries} queries: a multiple of {tiles.rows} is needed, the rows of tiles {tiles}"
        )


@partial(jax.jit, static_argnums=(0, 1))  # layers that are alike then share one compilation
def forward(spec: Spec, tiles: Tiles, arrays: dict[str, Array]) -> tuple[Array, Array]:
    """Output [B, T, H, D] in the inputs' type and base-2 log-sum-exp [B, H, padded T] float32 (−inf: nothing seen).

    arrays: q, k, v; with a prior `table` [copies, H, L], divided by the scale; with sharpness `factor` [B, H, padded T]
    (sharpness · scale · log2 e), `negative` int32 [1] (is any of it below 0) and, if it leaves the prior alone, `gain`
    (1 / sharpness), shaped alike; with gates `q_gate_hi`, `q_gate_lo` [B, H, padded T], `k_gate_hi`, `k_gate_lo` [B, H,
    padded S]; with segments `q_segments`, `kv_segments` [B, padded length] and `bounds` (`segment_bounds`); to go on
    from other keys `o_before` [B, T, H, D], T a multiple of the tiles' rows, and `lse_before` [B, H, padded T], as this
    function returns them. ValueError if these two are not both there, or T is no such multiple.
    """
    _check_before(spec, tiles, arrays)
    near = near_gates(spec, tiles, arrays, "k", -1)
    if near is not None:
        arrays = arrays | {"k_near": -near}
    names = list(arrays)
    d, step, stages, groups = spec.columns, tiles.step, tiles.stages, tiles.groups
    dtype, shape = spec.dtype, (64, tiles.step)
    row_names = [n for n in ROW_INPUTS if n in arrays]
    column_names = [n for n in COLUMN_INPUTS if n in arrays]

    buffers: dict[str, Any] = {
        "q": matrix(spec, groups, 64),
        "k": matrix(spec, stages, step),
        "v": matrix(spec, stages, step),
        "lse": vector("lse", groups, 64),
        **{n: vector(n, groups, 64) for n in row_names},
        **{n: vector(n, stages, step) for n in column_names},
    }
    copies = 1 + len(column_names)
    if spec.prior:
        buffers["table"] = table(tiles)
        copies += copies_of_table(tiles)
    barriers = {
        "q": plgpu.Barrier(num_arrivals=1 + len(row_names), num_barriers=groups),
        "k": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "v": plgpu.Barrier(num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        "turn": plgpu.Barrier(num_arrivals=2),
    }

    def body(*refs: Any) -> None:
        inputs = dict(zip(names, refs[: len(names)], strict=True))
        out_ref, lse_ref, buf, bar = refs[len(names) :]
        batch, head, wg = lax.axis_index("batch"), lax.axis_index("heads"), lax.axis_index("wg")
        # The longest rows of a causal call start first.
        block = -(-spec.queries // tiles.rows) - 1 - lax.axis_index("blocks")
        first = block * tiles.rows
        walk_range = spec.within(inputs.get("bounds"), batch, head, block, spec.key_range(first, tiles))
        start, full_start, full_stop, stop = walk_range

        def slot_of(tile: Array) -> Array:
            return lax.rem(tile - start, jnp.int32(stages))

        def arrive() -> None:
            if groups == 2:
                plgpu.barrier_arrive(bar["turn"])

        def wait() -> None:
            if groups == 2:
                plgpu.barrier_wait(bar["turn"])

        def take_turn() -> None:
            arrive()
            wait()

        @pl.when(wg < groups)
        def _compute() -> None:
            plgpu.set_max_registers(232 if groups == 2 else 160, action="increase")
            base = first + wg * 64
            here = pl.ds(base, 64)
            q_smem = buf["q"].at[wg]
            plgpu.copy_gmem_to_smem(rows_of(spec, inputs["q"], batch, here, head), q_smem, bar["q"].at[wg])
            for n in row_names:
                copy_vector(inputs[n], n, batch, head, here, buf[n].at[wg], bar["q"].at[wg])
            if "o_before" in inputs:
                # Straight to registers, while the first tiles are on their way: there is no room for it beside them.
                load: Any = plgpu.load
                before = load(inputs["o_before"].at[batch, here, head], layout=plgpu.Layout.WGMMA, optimized=False)
                before = with_zeros(before.astype(jnp.float32), d)
            plgpu.barrier_wait(bar["q"].at[wg])
            row = {n: read(buf[n].at[wg], ROW) for n in row_names}
            gain = (row["gain"], 0) if "gain" in row else None
            hidden: Any = -jnp.inf
            if spec.sharpness:
                factor = row["factor"]
                negative = inputs["negative"][0] > 0
                hidden = spread(jnp.where(factor < 0, jnp.float32(jnp.inf), jnp.float32(-jnp.inf)), shape)
            else:
                factor = plgpu.layout_cast(jnp.full((64,), spec.scale * LOG2E, jnp.float32), ROW)
            row_gates = (row["q_gate_hi"], row["q_gate_lo"]) if spec.gates else None

            def column(name: str, slot: Array) -> Array:
                return read(buf[name].at[slot], COLUMN)

            def offsets(slot: Array, masked: bool) -> Array:
                gates: Any = None
                if row_gates is not None and masked:
                    columns = column("k_gate_hi", slot), column("k_gate_lo", slot)
                    gates = gate_tile(spec, tiles, row_gates, columns, -1)
                elif row_gates is not None:
                    gates = spread(column("k_near", slot), shape, 1)
                table_ref = buf["table"].at[slot] if spec.prior else None
                return offset_tile(spec, tiles, table_ref, step + wg * 64, gates, gain, -1)

            def row_lift(slot: Array) -> Array | None:
                """What gates add to the rows of a tile without a mask, times the factor."""
                if row_gates is None:
                    return None
                up = lift(spec, row_gates, (buf["k_gate_hi"], buf["k_gate_lo"]), slot, step - 1)
                return (up if gain is None else up * gain[0]) * factor

            def begins(masked: bool) -> bool:
                """Do accumulators start with the offsets: with gates not where the tile before does not know which."""
                return spec.offsets and (not spec.gates or not masked)

            def tile_step(tile: Array, carry: Any, masked: bool) -> Any:
                acc, m, l, *begin = carry
                slot, next_slot, has_next = slot_of(tile), slot_of(tile + 1), tile + 1 < stop

                def content(ref: Any) -> Any:
                    plgpu.wgmma(ref, q_smem, buf["k"].at[slot].transpose((1, 0)))
                    take_turn()

                def content_alone(ref: Any) -> Array:
                    content(ref)
                    return ref[...]

                if begin:
                    s = pl.run_state(content)(plgpu.ACC.init(begin[0]))
                else:
                    s = pl.run_scoped(content_alone, plgpu.ACC(shape, jnp.float32))
                    s = s + offsets(slot, masked) if spec.offsets else s
                up = None if masked else row_lift(slot)
                if masked:
                    segments = (row["q_segments"], column("kv_segments", slot)) if spec.segments else None
                    s = jnp.where(visible(spec, base, tile * step, shape, segments), s, hidden)
                plgpu.barrier_arrive(bar["k_free"].at[slot])
                top = s.max(axis=1) * factor
                if spec.sharpness:
                    # A negative factor turns the order of a row round.
                    top = lax.cond(negative, lambda: jnp.maximum(top, s.min(axis=1) * factor), lambda: top)
                m_new = jnp.maximum(m, top if up is None else top + up)
                m_safe = jnp.where(m_new == -jnp.inf, jnp.float32(0), m_new)
                alpha = jnp.exp2(m - m_safe)
                p = jnp.exp2(s * spread(factor, shape) - spread(m_safe if up is None else m_safe - up, shape))
                acc = acc * spread(alpha, (64, d))
                l = l * alpha + p.sum(axis=1)
                p16 = p.astype(dtype)
                acc, l, m_new, p16 = lax.optimization_barrier((acc, l, m_new, p16))
                arrive()
                plgpu.barrier_wait(bar["v"].at[slot])
                wait()

                def values(ref: Any, next_ref: Any = None) -> None:
                    plgpu.wgmma(ref, p16, buf["v"].at[slot])
                    pl.when(has_next)(lambda: plgpu.barrier_wait(bar["k"].at[next_slot]))
                    if next_ref is not None:
                        next_ref[...] = offsets(next_slot, masked)

                if begin:
                    acc, *begin = pl.run_state(lambda refs: values(*refs))((plgpu.ACC.init(acc), begin[0]))
                    # Without the barrier ptxas finds no registers for the accumulator and serialises all products.
                    begin = [lax.optimization_barrier(begin[0])]
                else:
                    acc = pl.run_state(values)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(bar["v_free"].at[slot])
                return acc, m_new, l, *begin

            def run(low: Array, high: Array, carry: Any, masked: bool) -> Any:
                if begins(masked) and len(carry) == 3:
                    carry = (*carry, offsets(slot_of(low), masked))
                carry = carry if begins(masked) else carry[:3]
                return lax.fori_loop(low, high, lambda i, c: tile_step(i, c, masked), carry)

            pl.when(start < stop)(lambda: plgpu.barrier_wait(bar["k"].at[0]))
            pl.when(wg == 1)(take_turn)
            m0 = plgpu.layout_cast(jnp.full((64,), -jnp.inf, jnp.float32), ROW)
            carry: Any = (zeros(64, d), m0, zeros(64))
            if "o_before" in inputs:
                m0 = row["lse_before"]
                carry = (before, m0, jnp.where(m0 > -jnp.inf, jnp.float32(1), jnp.float32(0)))
            if spec.window is not None or spec.segments:
                carry = run(start, full_start, carry, True)
            carry = run(full_start, full_stop, carry, False)
            if spec.segments or spec.causal or spec.window is not None or spec.keys % step:
                carry = run(full_stop, stop, carry, True)
            acc, m, l = carry[:3]
            pl.when(wg == 0)(take_turn)
            seen = l > 0
            inverse = jnp.where(seen, 1.0 / jnp.where(seen, l, jnp.float32(1)), jnp.float32(0))
            q_smem[...] = (acc * spread(inverse, (64, d))).astype(dtype)
            buf["lse"].at[wg][...] = jnp.where(seen, m + jnp.log(jnp.where(seen, l, jnp.float32(1))) * LOG2E, -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem, rows_of(spec, out_ref, batch, here, head))
            plgpu.copy_smem_to_gmem(buf["lse"].at[wg], lse_ref.at[batch, head, here])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == groups)
        def _memory() -> None:
            plgpu.set_max_registers(40 if groups == 2 else 24, action="decrease")
            kv_head = lax.div(head, jnp.int32(spec.group))

            @pl.loop(start, stop)
            def _load(tile: Array) -> None:
                slot = slot_of(tile)
                reuse = tile - start >= stages
                where = pl.ds(tile * step, step)
                k_bar = bar["k"].at[slot]
                pl.when(reuse)(lambda: plgpu.barrier_wait(bar["k_free"].at[slot]))
                stored = pl.ds(tile * step + spec.key_offset(first), step)
                plgpu.copy_gmem_to_smem(rows_of(spec, inputs["k"], batch, stored, kv_head), buf["k"].at[slot], k_bar)
                if spec.prior:
                    entry = first + (spec.shift + spec.origin - step) - tile * step
                    copy_table(inputs["table"].at[:, head], entry, buf["table"].at[slot], k_bar, tiles)
                for n in column_names:
                    copy_vector(inputs[n], n, batch, head, where, buf[n].at[slot], k_bar)
                pl.when(reuse)(lambda: plgpu.barrier_wait(bar["v_free"].at[slot]))
                plgpu.copy_gmem_to_smem(
                    rows_of(spec, inputs["v"], batch, where, kv_head), buf["v"].at[slot], bar["v"].at[slot]
                )

    body.__name__ = "attention_forward_" + spec.name(tiles)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(arrays["q"].shape, dtype),
            jax.ShapeDtypeStruct((spec.batch, spec.heads, spec.padded_queries), jnp.float32),
        ),
        scratch_types=(buffers, barriers),
        grid=(spec.heads, -(-spec.queries // tiles.rows), spec.batch),
        grid_names=("heads", "blocks", "batch"),
        num_threads=groups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arrays.values())
