"""Attention inside a block and the block's queries at head_dim 128, without gates, prior, sharpness or segments:
`gpu_blocks.block_queries` as one Pallas Mosaic GPU kernel.

One warpgroup per half block of 64 tokens. Everything that the block's keys left behind comes to shared memory by TMA
and is an operand there; queries and weights are operands in registers. Outputs leave through the place of the half's
own keys, which nobody else reads.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.attention.mosaic_gpu_spec import LOG2E, spread
from kernels.path.gpu_blocks import BlockOptions
from kernels.path.mosaic_keys import BLOCK, DIM, F16, F32, HALF, ROWS, SQUARE, WGMMA, _iotas, _matrix, _product

Array = jax.Array
ABSENT = ("bias", "hi", "lo", "sharpness", "q_ids", "k_ids")
MOVES = 2  # matrices of more moves do not fit into shared memory beside the rest


def serves(x: dict[str, Any], moves: int) -> bool:
    """Is this a call for the kernel below: x as in `block_queries`, so many moves."""
    return x["q"].shape[3] == DIM and moves <= MOVES and all(x[n] is None for n in ABSENT)


def block_queries(
    options: BlockOptions,
    x: dict[str, Any],
    keys: dict[str, Array],
    moves: list[tuple[int, Array]],
    *,
    interpret: Any = None,
) -> dict[str, Any]:
    """As `gpu_blocks.block_queries`, of what it `serves`. interpret: parameters of the interpreter, for tests."""
    batch, length, heads, dim = x["q"].shape
    if not serves(x, len(moves)):
        raise ValueError(f"head_dim {dim}, {len(moves)} moves or an option of {ABSENT}: the Triton kernel serves this")
    group, dtype = heads // x["k"].shape[2], x["v"].dtype
    arrays = {n: x[n] for n in ("q", "k", "v")}
    arrays |= {n: keys[n] for n in ("w16", "u16", "z16", "k_half")}
    arrays |= {f"left{n}": m for n, (_, m) in enumerate(moves)}
    names = list(arrays)
    outputs = {"o": jax.ShapeDtypeStruct(x["q"].shape, dtype), "lse": jax.ShapeDtypeStruct((batch, heads, length), F32)}
    outputs |= {f"q{n}": jax.ShapeDtypeStruct(x["q"].shape, x["q"].dtype) for n in range(len(moves) + 1)}
    out_names = list(outputs)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    buffers: dict[str, Any] = {n: plgpu.SMEM((2, *ROWS), dtype, transforms=tiled) for n in ("k", "v")}
    buffers |= {
        "w16": _matrix(2, *ROWS),
        "u16": _matrix(2, *ROWS),
        "z16": _matrix(2, *SQUARE),
        "k_half": _matrix(*ROWS),
    }
    buffers |= {f"left{n}": _matrix(dim, dim) for n in range(len(moves))}
    buffers["lse"] = plgpu.SMEM((2, HALF), F32)
    barriers: dict[str, Any] = {
        "own": plgpu.Barrier(num_arrivals=4, num_barriers=2),
        "v": plgpu.Barrier(num_barriers=2),
        "k_half": plgpu.Barrier(),
    }
    if moves:
        barriers["left"] = plgpu.Barrier(num_arrivals=len(moves))

    def body(*refs: Any) -> None:
        given = dict(zip(names, refs[: len(names)], strict=True))
        out = dict(zip(out_names, refs[len(names) : len(names) + len(out_names)], strict=True))
        buf, bar = refs[-2:]
        b, head, block = (lax.axis_index(n) for n in ("batch", "heads", "blocks"))
        kv_head = lax.div(head, jnp.int32(group))
        row, col = _iotas(SQUARE)

        def bring(half: int) -> None:
            here = pl.ds(block * BLOCK + half * HALF, HALF)

            def copy(source: Any, name: str, barrier: str) -> None:
                plgpu.copy_gmem_to_smem(source, buf[name].at[half], bar[barrier].at[half])

            for n in ("w16", "u16", "z16"):
                copy(given[n].at[b, kv_head, here], n, "own")
            copy(given["k"].at[b, here, kv_head], "k", "own")
            if half == 1:
                plgpu.copy_gmem_to_smem(
                    given["k_half"].at[b, kv_head, pl.ds(block * BLOCK, HALF)], buf["k_half"], bar["k_half"]
                )
            elif moves:
                for i, (size, _) in enumerate(moves):
                    source = given[f"left{i}"].at[b, kv_head, lax.div(block, jnp.int32(size))]
                    plgpu.copy_gmem_to_smem(source, buf[f"left{i}"], bar["left"])
            copy(given["v"].at[b, here, kv_head], "v", "v")

        def half(g: int) -> None:
            here = pl.ds(block * BLOCK + g * HALF, HALF)
            bring(g)
            load: Any = plgpu.load
            q = load(given["q"].at[b, here, head], layout=WGMMA, optimized=False)
            wide = q.astype(F32)
            plgpu.barrier_wait(bar["own"].at[g])
            w, u, z, k = (buf[n].at[g] for n in ("w16", "u16", "z16", "k"))
            turned = lambda ref: ref.transpose((1, 0))
            e = jnp.where(row >= col, _product(SQUARE, (wide.astype(F16), turned(w))), F32(0)).astype(F16)
            left = (wide - _product(ROWS, (e, u))).astype(F16)
            content = _product(SQUARE, (q, turned(k))) - _product(SQUARE, (e, z))
            scale = F32(options.scale * LOG2E)
            tiles = [(g, jnp.where(row >= col, content * scale, F32(-jnp.inf)))]
            x = left
            if g == 1:
                plgpu.barrier_wait(bar["own"].at[0])
                plgpu.barrier_wait(bar["k_half"])
                tiles.append((0, _product(SQUARE, (left, turned(buf["k_half"]))) * scale))
                passed = _product(SQUARE, (left, turned(buf["w16"].at[0]))).astype(F16)
                x = (left.astype(F32) - _product(ROWS, (passed, buf["u16"].at[0]))).astype(F16)

            def give(values: Array, name: str) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                k[...] = values.astype(k.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(k, out[name].at[b, here, head])

            give(x, "q0")
            if moves:
                plgpu.barrier_wait(bar["left"])
            for n in range(len(moves)):
                x = _product(ROWS, (x, buf[f"left{n}"])).astype(F16)
                give(x, f"q{n + 1}")

            most = tiles[0][1].max(axis=1)
            for _, logits in tiles[1:]:
                most = jnp.maximum(most, logits.max(axis=1))
            weights = [jnp.exp2(logits - spread(most, SQUARE)) for _, logits in tiles]
            total = weights[0].sum(axis=1)
            for p in weights[1:]:
                total = total + p.sum(axis=1)
            for cols, _ in tiles:
                plgpu.barrier_wait(bar["v"].at[cols])
            terms = [(p.astype(dtype), buf["v"].at[cols]) for (cols, _), p in zip(tiles, weights, strict=True)]
            o = _product(ROWS, *terms)
            give(o * spread(F32(1) / total, ROWS), "o")  # a query sees itself: the sum is at least 1
            buf["lse"].at[g][...] = most * F32(math.log(2.0)) + jnp.log(total)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buf["lse"].at[g], out["lse"].at[b, head, here])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        for g in (0, 1):
            pl.when(lax.axis_index("wg") == g)(partial(half, g))

    body.__name__ = "path_block_queries"
    made = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=(buffers, barriers),
        grid=(heads, length // BLOCK, batch),
        grid_names=("heads", "blocks", "batch"),
        num_threads=2,
        thread_name="wg",
        # Rows are reduced inside four lanes, which takes no shared memory: with two moves there is none left.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(*arrays.values())
    named = dict(zip(out_names, made, strict=True))
    return {n: named[n] for n in ("o", "lse")} | {"queries": [named[f"q{n}"] for n in range(len(moves) + 1)]}
