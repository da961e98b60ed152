"""Mosaic GPU attention backward over blocks of keys: dk, dv and the gates' gradient. Scores are held transposed."""

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
from kernels.attention.mosaic_gpu_tiles import partial_sum

Array = jax.Array
ROW_INPUTS = ("k_gate_hi", "k_gate_lo", "kv_segments")
COLUMN_INPUTS = ("lse", "near_lse", "factor", "gain", "q_gate_hi", "q_gate_lo", "q_segments")


@partial(jax.jit, static_argnums=(0, 1))  # layers that are alike then share one compilation
def key_gradients(spec: Spec, tiles: Tiles, arrays: dict[str, Array]) -> dict[str, Array]:
    """Gradients that are sums over queries, from blocks of keys.

    arrays as in `query_gradients` without slopes; with sharpness, `delta` times `factor`.
    Returns dk, dv [B, S, Hkv, D], summed over the query heads that share a key head, and with gates `gates`
    [B, H, padded S]: Σ_i d(gate term), times log2 e · scale if there is a sharpness.
    """
    near = near_gates(spec, tiles, arrays, "q", 0)
    if near is not None:
        near = near * arrays.get("gain", 1.0) * arrays.get("factor", spec.scale * LOG2E)
        arrays = arrays | {"near_lse": arrays["lse"] - near}
    names = list(arrays)
    d, step, stages, groups = spec.columns, tiles.step, tiles.stages, tiles.groups
    dtype, shape = spec.dtype, (64, tiles.step)
    row_names = [n for n in ROW_INPUTS if n in arrays and n == "kv_segments"]
    gate_names = [n for n in ROW_INPUTS if n in arrays and n != "kv_segments"]
    column_names = [n for n in COLUMN_INPUTS if n in arrays]

    outputs: dict[str, Any] = {n: jax.ShapeDtypeStruct(arrays["k"].shape, dtype) for n in ("dk", "dv")}
    buffers: dict[str, Any] = {
        "k": matrix(spec, groups, 64),
        "v": matrix(spec, groups, 64),
        "q": matrix(spec, stages, step),
        "do": matrix(spec, stages, step),
        "delta": vector("delta", stages, step),
        **{n: vector(n, groups, 64) for n in (*row_names, *gate_names)},
        **{n: vector(n, stages, step) for n in column_names},
    }
    if spec.prior:
        buffers["table"] = table(tiles)
    if spec.gates:
        outputs["gates"] = jax.ShapeDtypeStruct((spec.batch, spec.heads, spec.padded_stored), jnp.float32)
        buffers["gate_sums"] = vector("gate_sums", groups, 64)
    out_names = list(outputs)
    copies = 1 + len(column_names) + copies_of_table(tiles) * spec.prior
    barriers = {
        "k": plgpu.Barrier(num_arrivals=2 + len(row_names), num_barriers=groups),
        "gate": plgpu.Barrier(num_arrivals=max(1, len(gate_names)), num_barriers=groups),
        "q": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "do": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "q_free": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    }

    def body(*refs: Any) -> None:
        inputs = dict(zip(names, refs[: len(names)], strict=True))
        outs = dict(zip(out_names, refs[len(names) : len(names) + len(out_names)], strict=True))
        buf, bar = refs[len(names) + len(out_names) :]
        batch, kv_head, wg = lax.axis_index("batch"), lax.axis_index("heads"), lax.axis_index("wg")
        block = lax.axis_index("blocks")
        first, stored, seen_by = spec.key_block(block, tiles)
        index = lax.div(first, jnp.int32(tiles.rows))
        walk_range = spec.within(inputs.get("bounds"), batch, kv_head, index, seen_by)
        start, full_start, full_stop, stop = walk_range
        width = stop - start
        total = width * spec.group

        def slot_of(count: Array) -> Array:
            return lax.rem(count, jnp.int32(stages))

        @pl.when(wg < groups)
        def _compute() -> None:
            plgpu.set_max_registers(240 if groups == 2 else 160, action="increase")
            base = first + wg * 64
            here, there = pl.ds(base, 64), pl.ds(stored + wg * 64, 64)
            plgpu.copy_gmem_to_smem(rows_of(spec, inputs["k"], batch, there, kv_head), buf["k"].at[wg], bar["k"].at[wg])
            plgpu.copy_gmem_to_smem(rows_of(spec, inputs["v"], batch, here, kv_head), buf["v"].at[wg], bar["k"].at[wg])
            for n in row_names:
                copy_vector(inputs[n], n, batch, kv_head, here, buf[n].at[wg], bar["k"].at[wg])
            plgpu.barrier_wait(bar["k"].at[wg])
            k_segments = read(buf["kv_segments"].at[wg], ROW) if spec.segments else None

            def column(name: str, slot: Array) -> Array:
                return read(buf[name].at[slot], COLUMN)

            def offsets(slot: Array, masked: bool) -> Array:
                gates = None
                if spec.gates:
                    high, low = (read(buf[n].at[wg], ROW) for n in gate_names)
                    refs = buf["q_gate_hi"], buf["q_gate_lo"]
                    if masked:
                        columns = (column("q_gate_hi", slot), column("q_gate_lo", slot))
                        gates = gate_tile(spec, tiles, (high, low), columns, 1)
                    else:
                        gates = spread(-lift(spec, (high, low), refs, slot, 0), shape)
                gain = (column("gain", slot), 1) if "gain" in column_names else None
                table_ref = buf["table"].at[slot] if spec.prior else None
                return offset_tile(spec, tiles, table_ref, tiles.rows - wg * 64, gates, gain, 1)

            def tile_step(tile: Array, gates: Any, masked: bool, skipped: Array, dk_ref: Any, dv_ref: Any) -> Any:
                count = skipped + (tile - start)
                slot = slot_of(count)

                def products(s_ref: Any, dp_ref: Any) -> Array:
                    plgpu.barrier_wait(bar["q"].at[slot])
                    plgpu.wgmma(s_ref, buf["k"].at[wg], buf["q"].at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(bar["do"].at[slot])
                    plgpu.wgmma(dp_ref, buf["v"].at[wg], buf["do"].at[slot].transpose((1, 0)))
                    bias = offsets(slot, masked) if spec.offsets else None  # read while the tensor cores are busy
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                    s = s if bias is None else s + bias
                    factor: Any = jnp.float32(spec.scale * LOG2E)
                    if spec.sharpness:
                        factor = spread(column("factor", slot), shape, 1)
                    lse = column("lse" if masked or not spec.gates else "near_lse", slot)
                    p = jnp.exp2(s * factor - spread(lse, shape, 1))
                    if masked:
                        segments = None if k_segments is None else (k_segments, column("q_segments", slot))
                        seen = visible(spec, tile * step, base, shape, segments, queries_are_rows=False)
                        p = jnp.where(seen, p, jnp.float32(0))
                    plgpu.wgmma(dv_ref, p.astype(dtype), buf["do"].at[slot])
                    dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=1)
                    if spec.sharpness:
                        dp = dp * spread(column("factor", slot), shape, 1)
                    return p * (dp - spread(column("delta", slot), shape, 1))

                ds = pl.run_scoped(products, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
                plgpu.wgmma(dk_ref, ds.astype(dtype), buf["q"].at[slot])
                if spec.gates:
                    # Back to d(logits) where the sharpness does not reach the gates.
                    plain = ds * spread(column("gain", slot), shape, 1) if "gain" in column_names else ds
                    gates = (gates[0] + partial_sum(plain),)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(bar["q_free"].at[slot])
                return gates

            def over_queries(member: Array, dk_ref: Any, dv_ref: Any) -> None:
                head = kv_head * spec.group + member
                if spec.gates:
                    for n in gate_names:
                        copy_vector(inputs[n], n, batch, head, here, buf[n].at[wg], bar["gate"].at[wg])
                    plgpu.barrier_wait(bar["gate"].at[wg])

                def run(low: Array, high: Array, gates: Any, masked: bool) -> Any:
                    step_at = lambda i, c: tile_step(i, c, masked, member * width, dk_ref, dv_ref)
                    return lax.fori_loop(low, high, step_at, gates)

                gates: Any = (zeros(64, 8),) if spec.gates else ()
                if spec.segments or spec.causal or spec.window is not None:
                    gates = run(start, full_start, gates, True)
                gates = run(full_start, full_stop, gates, False)
                if spec.segments or spec.window is not None:
                    gates = run(full_stop, stop, gates, True)
                if spec.gates:
                    buf["gate_sums"].at[wg][...] = gates[0].sum(axis=1)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(buf["gate_sums"].at[wg], outs["gates"].at[batch, head, there])
                    plgpu.wait_smem_to_gmem(0)

            def walk(refs: Any) -> None:
                if spec.group == 1:
                    over_queries(start * 0, *refs)
                else:
                    pl.loop(0, spec.group)(lambda member: over_queries(member, *refs))

            dk, dv = pl.run_state(walk)((plgpu.ACC.init(zeros(64, d)), plgpu.ACC.init(zeros(64, d))))
            buf["k"].at[wg][...] = (dk * (1 / LOG2E if spec.sharpness else spec.scale)).astype(dtype)
            buf["v"].at[wg][...] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buf["k"].at[wg], rows_of(spec, outs["dk"], batch, there, kv_head))
            plgpu.copy_smem_to_gmem(buf["v"].at[wg], rows_of(spec, outs["dv"], batch, there, kv_head))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == groups)
        def _memory() -> None:
            plgpu.set_max_registers(24, action="decrease")

            @pl.loop(0, total)
            def _load(count: Array) -> None:
                slot = slot_of(count)
                member = lax.div(count, width) if spec.group > 1 else jnp.int32(0)
                head = kv_head * spec.group + member
                tile = start + count - member * width
                where = pl.ds(tile * step, step)
                q_bar = bar["q"].at[slot]
                pl.when(count >= stages)(lambda: plgpu.barrier_wait(bar["q_free"].at[slot]))
                plgpu.copy_gmem_to_smem(rows_of(spec, inputs["q"], batch, where, head), buf["q"].at[slot], q_bar)
                for n in column_names:
                    copy_vector(inputs[n], n, batch, head, where, buf[n].at[slot], q_bar)
                if spec.prior:
                    at = tile * step + (spec.shift + spec.origin - tiles.rows) - first
                    copy_table(inputs["table"].at[:, head], at, buf["table"].at[slot], q_bar, tiles)
                plgpu.copy_gmem_to_smem(
                    rows_of(spec, inputs["do"], batch, where, head), buf["do"].at[slot], bar["do"].at[slot]
                )
                copy_vector(inputs["delta"], "delta", batch, head, where, buf["delta"].at[slot], bar["do"].at[slot])

    body.__name__ = "attention_dkv_" + spec.name(tiles)
    results = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=(buffers, barriers),
        grid=(spec.kv_heads, spec.key_blocks(tiles), spec.batch),
        grid_names=("heads", "blocks", "batch"),
        num_threads=groups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arrays.values())
    return dict(zip(out_names, results, strict=True))
