"""Compile the TPU kernels of LSH attention ahead of time, without a TPU, and record memory and compile time.

    python -m kernels.lsh.aot [--topology v5e:2x2 ...] [--output kernels/lsh/aot_results.json]

Needs `libtpu` (requirements-tpu.txt). Every case is compiled for four chips, the batch over one mesh axis and heads and
grids over the other, inside `shard_map`, forward and backward. It checks neither numbers nor speed.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.attention.aot import TOPOLOGIES, environment, make_mesh
from kernels.lsh.api import lsh_attention

Array = jax.Array


@dataclass(frozen=True)
class Case:
    """One call, sizes of all four chips together."""

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    samples: int = 10
    dtype: str = "bfloat16"
    segments: bool = False


CASES = (
    Case("l12", 8, 512, 16, 16, 48),
    Case("llama1b", 8, 512, 32, 8, 64, segments=True),
    Case("odd-length-f32", 4, 1000, 4, 2, 80, samples=40, dtype="float32", segments=True),
    Case("wide-heads", 4, 2048, 4, 4, 256, samples=20),
    Case("long", 2, 131072, 2, 2, 64),
)


def compile_case(case: Case, topology: str) -> dict[str, Any]:
    """A row of results, memory per chip. A compile failure raises."""
    mesh = make_mesh(topology)
    heads, rows, of_head = P("data", None, "model"), P("data"), P("model")
    shape = lambda dtype, spec, *size: jax.ShapeDtypeStruct(size, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
    token = (case.batch, case.length)
    q, k = (shape(case.dtype, heads, *token, n, case.head_dim) for n in (case.heads, case.kv_heads))
    grid = shape("int32", of_head, case.heads, case.samples)
    ids = (shape("int32", rows, *token),) if case.segments else ()

    def one_chip(q: Array, k: Array, v: Array, widths: Array, offsets: Array, *ids: Array) -> Array:
        segments = ids[0] if ids else None
        return lsh_attention(q, k, v, widths, offsets, segment_ids=segments, implementation="pallas_tpu")

    specs = (heads,) * 3 + (of_head,) * 2 + (rows,) * len(ids)
    over_mesh = jax.shard_map(one_chip, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)

    def both(q: Array, k: Array, v: Array, do: Array, *rest: Array) -> Any:
        o, pullback = jax.vjp(lambda q, k, v: over_mesh(q, k, v, *rest), q, k, v)
        return o, pullback(do)

    start = time.perf_counter()
    compiled: Any = jax.jit(both).lower(q, k, k, q, grid, grid, *ids).compile()
    memory = compiled.memory_analysis()
    sizes = {"B": case.batch, "T": case.length, "H": case.heads, "Hkv": case.kv_heads, "D": case.head_dim}
    return {
        "case": case.name,
        "impl": "pallas_tpu",
        "pass": "fwd_bwd",
        "topology": topology,
        **sizes,
        "samples": case.samples,
        "dtype": case.dtype,
        "segments": case.segments,
        "memory_bytes": memory.peak_memory_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
        "compile_s": round(time.perf_counter() - start, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topology", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--output", type=Path, help="results file to write")
    options = parser.parse_args()
    rows = []
    for topology in options.topology:
        for case in CASES:
            rows.append(compile_case(case, topology))
            print(json.dumps(rows[-1]), flush=True)
            if options.output:
                options.output.write_text(json.dumps({"env": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
