"""Chooses tile sizes on this machine's GPU and writes them to the tables that the backends read.

    python -m kernels.attention.tune [--backend pallas_triton | mosaic_gpu] [--out FILE]

Every candidate of a kernel is timed with the other kernels at their present tiles; what does not compile is left out.
The fastest of each row, by its least time, is written to triton_gpu_tiles.json or mosaic_gpu_tiles.json. Candidates for
the cutting of a decode call are timed as well and printed: their winner is the default of `triton_decode.make_plan`.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from kernels import triton
from kernels.attention import bench_parts, mosaic_gpu, triton_decode, triton_gpu
from kernels.attention.api import BACKENDS
from kernels.attention.bench_cases import function, inputs

KERNELS = ("forward", "queries", "keys")
# dtype -> head_dim -> kernel -> rows x step x warps x stages
TRITON: dict[str, dict[int, dict[str, tuple[str, ...]]]] = {
    "bfloat16": {
        64: {
            "forward": ("128x64x4x2", "128x64x4x3", "128x64x8x3", "128x32x4x3", "64x64x4x3"),
            "queries": ("64x64x4x2", "64x64x4x3", "128x64x8x2", "64x32x4x2", "128x32x8x2"),
            "keys": ("64x64x4x2", "64x64x4x3", "128x64x8x2", "64x32x4x3", "128x32x8x2"),
        },
        128: {
            "forward": ("128x64x8x2", "128x64x8x3", "128x64x4x2", "64x64x4x2", "128x32x8x3"),
            "queries": ("64x64x4x2", "64x64x8x2", "128x64x8x2", "64x32x4x2", "128x32x8x2"),
            "keys": ("64x64x4x2", "64x64x8x2", "128x64x8x2", "64x32x4x2", "128x32x8x2"),
        },
        256: {
            "forward": ("64x64x8x2", "64x32x4x2", "128x32x8x2"),
            "queries": ("64x32x8x2", "32x32x4x1", "64x32x8x1"),
            "keys": ("64x32x8x1", "64x64x8x1", "32x32x4x1"),
        },
    },
    "float32": {
        64: {
            "forward": ("64x32x4x2", "64x64x8x2", "128x32x8x2"),
            "queries": ("32x32x4x2", "64x32x8x2", "64x32x4x1"),
            "keys": ("32x32x4x2", "64x32x8x2", "64x32x4x1"),
        },
        128: {
            "forward": ("64x32x4x2", "64x32x8x2", "128x32x8x1"),
            "queries": ("32x32x4x1", "32x32x8x1", "64x32x8x1"),
            "keys": ("32x32x4x1", "32x32x8x1", "64x32x8x1"),
        },
        256: {
            "forward": ("32x32x8x1", "16x32x4x1", "64x16x8x1"),
            "queries": ("32x16x8x1", "16x16x4x1", "16x32x8x1"),
            "keys": ("32x16x8x1", "16x16x4x1", "16x32x8x1"),
        },
    },
}
# rows: case that stands for it, candidates (groups x step x stages, p: the table in pairs) of every kernel
MOSAIC: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("plain", ("2x128x2", "2x64x2", "2x64x3", "3x64x2")),
    "prior": ("bam+ssmax", ("2x128x2", "2x64x2", "2x64x2p", "3x64x2")),
    "gates": ("fox, nothing to skip", ("2x128x2", "2x64x2")),
    "gates and more": ("bam+ssmax+fox", ("2x128x2", "2x64x2")),
}
# splits per multiprocessor, keys per step, warps, stages
DECODE = ((4, 64, 4, 3), (4, 64, 4, 2), (8, 64, 4, 3), (2, 64, 4, 4), (4, 64, 2, 4), (4, 128, 4, 2), (8, 32, 2, 4))
DECODE_CASES = ("bam+ssmax, cache", "plain", "bam+ssmax, cache, 32 heads on 8", "bam+ssmax, cache, 131k")


def with_tiles(name: str, attend: Callable[[Any], Any]) -> str:
    """Register a backend for one candidate."""
    module: Any = type(triton_gpu)(name)
    module.supports, module.attend = lambda call: None, attend
    import sys

    sys.modules[name] = module
    BACKENDS[name] = name
    return name


def job(row: dict[str, Any], shape: Any, case: str, kernel: str, attend: Callable[[Any], Any]) -> Any:
    """Time of one kernel: the others' results are not asked for (the forward always runs)."""
    example = bench_parts.speed_case(case, shape, row["dtype"])
    x, other, (do, _) = inputs(example)
    run = function(example, other, with_tiles(f"tune {sorted(row.items())}", attend))
    wanted = ("k", "v") if kernel == "keys" else ("q", "sharpness", "params")

    def gradients(x: Any, do: Any) -> Any:
        grads = jax.vjp(lambda z: run(z)[0], x)[1](do)[0]
        return {n: g for n, g in grads.items() if n in wanted}

    f = (lambda x, _: run(x)[0]) if kernel == "forward" else gradients
    return row, f, (x, do), lambda executable, args: bench_parts.measure(executable, args, repeats=3), None


def triton_items(dtype: str, dim: int) -> list[bench_parts.Item]:
    shape = (2, 4096, 8, dim) if dtype == "bfloat16" else (1, 2048, 8, dim)
    room = triton.room_on(triton.capability())
    present = triton_gpu.choose_tiles(dim, 2 if dtype == "bfloat16" else 4, room)
    jobs = []
    for kernel in KERNELS:
        for text in TRITON[dtype][dim][kernel]:
            tiles = present._replace(**{kernel: triton.Tiles.parse(text)})
            attend = lambda call, tiles=tiles: triton_gpu.attend(call, triton_gpu.options_for(call, tiles))
            row = {"backend": "pallas_triton", "kernel": kernel, "tiles": text, "dtype": dtype, "head_dim": dim}
            jobs.append(job(row, shape, "bam+ssmax", kernel, attend))
    return bench_parts.compiled_items(jobs)


def mosaic_items(added: str, dim: int) -> list[bench_parts.Item]:
    from kernels.attention.mosaic_gpu_spec import Tiles

    case, candidates = MOSAIC[added]
    present = [Tiles.parse(mosaic_gpu._tile_table()[str(dim)][added][kernel]) for kernel in KERNELS]
    jobs = []
    for n, kernel in enumerate(KERNELS):
        for text in candidates:
            tiles = tuple(Tiles.parse(text) if i == n else t for i, t in enumerate(present))
            row = {"backend": "mosaic_gpu", "kernel": kernel, "tiles": text, "dtype": "bfloat16", "head_dim": dim}
            attend = partial(mosaic_gpu.attend, tiles=tiles)
            jobs.append(job(row | {"added": added}, (2, 4096, 16, dim), case, kernel, attend))
    return bench_parts.compiled_items(jobs)


def decode_items(case: str) -> list[bench_parts.Item]:
    jobs = []
    for per_core, step, warps, stages in DECODE:

        def attend(call: Any, given: Any = (per_core, step, warps, stages)) -> Any:
            base = triton_decode.make_plan(call, per_core=given[0])
            return triton_decode.attend(call, replace(base, step=given[1], warps=given[2], stages=given[3]))

        text = f"{per_core}x{step}x{warps}x{stages}"
        row, run, args, complete, _ = bench_parts.decode_job(case, with_tiles(f"decode {case} {text}", attend))
        jobs.append((row | {"backend": "triton_decode", "tiles": text, "kernel": "decode"}, run, args, complete, None))
    return bench_parts.compiled_items(jobs)


PARTS: dict[str, Callable[[], Any]] = {
    **{f"pallas_triton {t} {d}": partial(triton_items, t, d) for t, of_dim in TRITON.items() for d in of_dim},
    **{f"triton_decode {case}": partial(decode_items, case) for case in DECODE_CASES},
    **{f"mosaic_gpu {added} {dim}": partial(mosaic_items, added, dim) for added in MOSAIC for dim in (64, 128)},
}


def write_tables(rows: list[dict[str, Any]]) -> None:
    """Put the fastest candidate of every kernel into the tables."""
    for name in ("triton_gpu", "mosaic_gpu"):
        path = Path(__file__).with_name(f"{name}_tiles.json")
        table = json.loads(path.read_text())
        mine = [r for r in rows if "ms" in r and r["backend"] == ("pallas_triton" if name == "triton_gpu" else name)]
        for row in sorted(mine, key=lambda r: -r["ms_min"]):  # the fastest last
            if name == "triton_gpu":
                size = "2" if row["dtype"] == "bfloat16" else "4"
                table[size][str(row["head_dim"])][row["kernel"]] = row["tiles"]
            else:
                table[str(row["head_dim"])][row["added"]][row["kernel"]] = row["tiles"]
        path.write_text(_pretty(table))


def _pretty(table: Any) -> str:
    """Two levels of lines, the rest inline."""
    outer = []
    for first, rows in table.items():
        inner = ",\n".join(f'    "{key}": {json.dumps(value)}' for key, value in rows.items())
        outer.append(f'  "{first}": {{\n{inner}\n  }}')
    return "{\n" + ",\n".join(outer) + "\n}\n"


def main() -> None:
    from kernels.attention import bench

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="pallas_triton,triton_decode", help="which, separated by commas")
    parser.add_argument("--out", type=Path, help="also write all times there")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        bench.run_part(PARTS, args.part)
        return
    bench.need_gpu(parser)
    names = [name for name in PARTS if name.split()[0] in args.backend.split(",")]
    rows = [row for _, found in bench.run_parts(names, "tune", 360) for row in found]
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    write_tables(rows)


if __name__ == "__main__":
    main()
