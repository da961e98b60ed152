"""Mosaic GPU attention backward over blocks of queries: dq, and the sums behind the prior's and sharpness' gradients.

The scores are recomputed from the saved log-sum-exp (FlashAttention-2, arXiv 2307.08691). Keys get their gradients from
a second kernel (mosaic_gpu_backward_keys.py), so every sum has one owner and a fixed order: two runs agree bit for bit.
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
from kernels.attention.mosaic_gpu_tiles import partial_dot, partial_sum, toeplitz_totals

Array = jax.Array
ROW_INPUTS = ("lse", "delta", "factor", "gain", "q_gate_hi", "q_gate_lo", "q_segments")
COLUMN_INPUTS = ("k_gate_hi", "k_gate_lo", "k_near", "kv_segments")


@partial(jax.jit, static_argnums=(0, 1))  # layers that are alike then share one compilation
def query_gradients(spec: Spec, tiles: Tiles, arrays: dict[str, Array]) -> dict[str, Array]:
    """Gradients that are sums over keys, from blocks of queries.

    arrays: those of `forward` (factor and gain signed), do, `lse` (base 2; +inf where nothing is seen) and `delta` =
    Σ do·o − dlse [B, H, padded T]; `slopes` [n, copies, H, L], the derivatives of the log-prior.
    Returns dq [B, T, H, D] and, [B, H, padded T] each: `slopes` (with n before the last axis; to be summed over B and
    rows): Σ_j dlogits · slope, times scale · sharpness · log2 e if folded; `prior`: the same for the table itself
    (own_slope); with sharpness `sharpness`: Σ_j dlogits · (what it multiplies) / scale; with gates `rows`: Σ_j dlogits.
    """
    near = near_gates(spec, tiles, arrays, "k", -1)
    if near is not None:
        arrays = arrays | {"k_near": -near}
    names = list(arrays)
    d, step, stages, groups = spec.columns, tiles.step, tiles.stages, tiles.groups
    dtype, shape, n_slopes = spec.dtype, (64, tiles.step), spec.slopes
    row_names = [n for n in ROW_INPUTS if n in arrays]
    column_names = [n for n in COLUMN_INPUTS if n in arrays]
    sharp_offsets = spec.folded and spec.offsets

    line = jax.ShapeDtypeStruct((spec.batch, spec.heads, spec.padded_queries), jnp.float32)
    outputs: dict[str, Any] = {"dq": jax.ShapeDtypeStruct(arrays["q"].shape, dtype)}
    buffers: dict[str, Any] = {
        "q": matrix(spec, groups, 64),
        "do": matrix(spec, groups, 64),
        "k": matrix(spec, stages, step),
        "v": matrix(spec, stages, step),
        **{n: vector(n, groups, 64) for n in row_names},
        **{n: vector(n, stages, step) for n in column_names},
        **{f"slope{i}": table(tiles) for i in range(n_slopes)},
    }
    if spec.prior:
        buffers["table"] = table(tiles)
    if n_slopes:
        outputs["slopes"] = jax.ShapeDtypeStruct((spec.batch, spec.heads, n_slopes, spec.padded_queries), jnp.float32)
        buffers["slope_sums"] = vector("slope_sums", groups, n_slopes, 64)
    if spec.sharpness:
        outputs["sharpness"] = line
        buffers["sharpness_sums"] = vector("sharpness_sums", groups, 64)
    if spec.own_slope:
        assert sharp_offsets
        assert not spec.gates
        outputs["prior"] = line
        buffers["prior_sums"] = vector("prior_sums", groups, 64)
    if spec.gates:
        outputs["rows"] = line
        buffers["row_sums"] = vector("row_sums", groups, 64)
    out_names = list(outputs)
    copies = 1 + len(column_names) + copies_of_table(tiles) * (spec.prior + n_slopes)
    barriers = {
        "q": plgpu.Barrier(num_arrivals=2 + len(row_names), num_barriers=groups),
        "k": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "v": plgpu.Barrier(num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    }

    def body(*refs: Any) -> None:
        inputs = dict(zip(names, refs[: len(names)], strict=True))
        outs = dict(zip(out_names, refs[len(names) : len(names) + len(out_names)], strict=True))
        buf, bar = refs[len(names) + len(out_names) :]
        batch, head, wg = lax.axis_index("batch"), lax.axis_index("heads"), lax.axis_index("wg")
        block = -(-spec.queries // tiles.rows) - 1 - lax.axis_index("blocks")
        first = block * tiles.rows
        walk_range = spec.within(inputs.get("bounds"), batch, head, block, spec.key_range(first, tiles))
        start, full_start, full_stop, stop = walk_range

        def slot_of(tile: Array) -> Array:
            return lax.rem(tile - start, jnp.int32(stages))

        @pl.when(wg < groups)
        def _compute() -> None:
            plgpu.set_max_registers(240 if groups == 2 else 160, action="increase")
            base = first + wg * 64
            here = pl.ds(base, 64)
            for n in ("q", "do"):
                plgpu.copy_gmem_to_smem(rows_of(spec, inputs[n], batch, here, head), buf[n].at[wg], bar["q"].at[wg])
            for n in row_names:
                copy_vector(inputs[n], n, batch, head, here, buf[n].at[wg], bar["q"].at[wg])
            plgpu.barrier_wait(bar["q"].at[wg])
            row = {n: read(buf[n].at[wg], ROW) for n in row_names}
            factor = row.get("factor")
            if factor is None:
                factor = plgpu.layout_cast(jnp.full((64,), spec.scale * LOG2E, jnp.float32), ROW)
            delta = row["delta"] * factor if spec.folded else row["delta"]
            gain = (row["gain"], 0) if "gain" in row else None
            row_gates = (row["q_gate_hi"], row["q_gate_lo"]) if spec.gates else None
            entry = step + wg * 64

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
                return offset_tile(spec, tiles, table_ref, entry, gates, gain, -1)

            def row_lift(slot: Array) -> Array | None:
                """What gates add to the rows of a tile without a mask."""
                if row_gates is None:
                    return None
                up = lift(spec, row_gates, (buf["k_gate_hi"], buf["k_gate_lo"]), slot, step - 1)
                return up if gain is None else up * gain[0]

            def tile_step(tile: Array, dots: Any, masked: bool, dq_ref: Any) -> Any:
                slot = slot_of(tile)

                def scores(s_ref: Any, dp_ref: Any) -> Any:
                    plgpu.barrier_wait(bar["k"].at[slot])
                    plgpu.wgmma(s_ref, buf["q"].at[wg], buf["k"].at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(bar["v"].at[slot])
                    plgpu.wgmma(dp_ref, buf["do"].at[wg], buf["v"].at[slot].transpose((1, 0)))
                    bias = offsets(slot, masked) if spec.offsets else None  # read while the tensor cores are busy
                    up = None if masked else row_lift(slot)
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                    s = s if bias is None else s + bias
                    lse = row["lse"] if up is None else row["lse"] - up * factor
                    p = jnp.exp2(s * spread(factor, shape) - spread(lse, shape))
                    return s, up, p, plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)

                s, up, p, dp = pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
                plgpu.barrier_arrive(bar["v_free"].at[slot])
                dp = dp * spread(factor, shape) if spec.folded else dp
                ds = p * (dp - spread(delta, shape))
                if masked:
                    segments = (row["q_segments"], column("kv_segments", slot)) if spec.segments else None
                    ds = jnp.where(visible(spec, base, tile * step, shape, segments), ds, jnp.float32(0))
                plgpu.wgmma(dq_ref, ds.astype(dtype), buf["k"].at[slot])
                sums = []  # while the tensor cores are busy
                if n_slopes:
                    slope_refs = [buf[f"slope{i}"].at[slot] for i in range(n_slopes)]
                    sums += toeplitz_totals(ds, slope_refs, entry, -1, tiles.slice, tiles.pairs)
                total = partial_sum(ds) if spec.gates else None
                if sharp_offsets:
                    dot = partial_dot(ds, s)
                    sums.append(dot if total is None or up is None else dot + total * spread(up, (64, 8)))
                if total is not None:
                    sums.append(total)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(bar["k_free"].at[slot])
                return tuple(a + b for a, b in zip(dots, sums, strict=True))

            def walk(refs: Any) -> None:
                dq_ref, *dot_refs = refs

                def run(low: Array, high: Array, dots: Any, masked: bool) -> Any:
                    return lax.fori_loop(low, high, lambda i, c: tile_step(i, c, masked, dq_ref), dots)

                dots: Any = tuple(ref[...] for ref in dot_refs)
                if spec.window is not None or spec.segments:
                    dots = run(start, full_start, dots, True)
                dots = run(full_start, full_stop, dots, False)
                if spec.segments or spec.causal or spec.window is not None or spec.keys % step:
                    dots = run(full_stop, stop, dots, True)
                for ref, value in zip(dot_refs, dots, strict=True):
                    ref[...] = value

            begin = [zeros(64, 8)] * (n_slopes + sharp_offsets + spec.gates)
            dq, *dots = pl.run_state(walk)((plgpu.ACC.init(zeros(64, d)), *begin))
            if spec.gates:
                rows = dots.pop().sum(axis=1)
                buf["row_sums"].at[wg][...] = rows / factor if spec.folded else rows
            for i in range(n_slopes):
                buf["slope_sums"].at[wg, i][...] = dots[i].sum(axis=1)
            if spec.sharpness:
                q = read(buf["q"].at[wg], plgpu.Layout.WGMMA).astype(jnp.float32)
                content = (q * dq).sum(axis=1)
                total = dots[-1].sum(axis=1) if sharp_offsets else content
                if spec.own_slope:
                    buf["prior_sums"].at[wg][...] = total - content
                buf["sharpness_sums"].at[wg][...] = total / factor if spec.folded else total
            if spec.sharpness and not spec.folded:
                dq = dq * spread(factor * (1 / LOG2E), (64, d))
            else:
                dq = dq * (1 / LOG2E if spec.folded else spec.scale)
            buf["q"].at[wg][...] = dq.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buf["q"].at[wg], rows_of(spec, outs["dq"], batch, here, head))
            for i in range(n_slopes):
                plgpu.copy_smem_to_gmem(buf["slope_sums"].at[wg, i], outs["slopes"].at[batch, head, i, here])
            if spec.sharpness:
                plgpu.copy_smem_to_gmem(buf["sharpness_sums"].at[wg], outs["sharpness"].at[batch, head, here])
            if spec.own_slope:
                plgpu.copy_smem_to_gmem(buf["prior_sums"].at[wg], outs["prior"].at[batch, head, here])
            if spec.gates:
                plgpu.copy_smem_to_gmem(buf["row_sums"].at[wg], outs["rows"].at[batch, head, here])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == groups)
        def _memory() -> None:
            plgpu.set_max_registers(24, action="decrease")
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
                at = first + (spec.shift + spec.origin - step) - tile * step
                if spec.prior:
                    copy_table(inputs["table"].at[:, head], at, buf["table"].at[slot], k_bar, tiles)
                for i in range(n_slopes):
                    copy_table(inputs["slopes"].at[i, :, head], at, buf[f"slope{i}"].at[slot], k_bar, tiles)
                for n in column_names:
                    copy_vector(inputs[n], n, batch, head, where, buf[n].at[slot], k_bar)
                pl.when(reuse)(lambda: plgpu.barrier_wait(bar["v_free"].at[slot]))
                plgpu.copy_gmem_to_smem(
                    rows_of(spec, inputs["v"], batch, where, kv_head), buf["v"].at[slot], bar["v"].at[slot]
                )

    body.__name__ = "attention_dq_" + spec.name(tiles)
    results = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=(buffers, barriers),
        grid=(spec.heads, -(-spec.queries // tiles.rows), spec.batch),
        grid_names=("heads", "blocks", "batch"),
        num_threads=groups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arrays.values())
    return dict(zip(out_names, results, strict=True))
