"""Compile PaTH for TPUs ahead of time, without a TPU, and record memory and compile time.

    python -m kernels.path.aot [--topology v5e:2x2 ...] [--output aot_results.json]

Needs `libtpu` (requirements-tpu.txt). As `kernels.attention.aot`: four chips, the batch over one mesh axis and the
heads over the other, inside `shard_map`; forward, and forward with all gradients. Checks neither numbers nor speed.
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
from kernels.path.api import path_attention


@dataclass(frozen=True)
class Case:
    """One call, sizes of all four chips together."""

    name: str
    batch: int
    length: int
    heads: int
    head_dim: int
    gates: bool = False
    dtype: str = "bfloat16"


# A layer of the named configuration path-760m at its training length, and with the gates of PaTH-FoX.
CASES = (Case("path-760m", 4, 4096, 24, 64), Case("path-760m+fox", 4, 4096, 24, 64, gates=True))


def compile_case(case: Case, topology: str, backward: bool) -> tuple[Any, dict[str, Any]]:
    """(the executable, a row of results). A compile failure raises."""
    mesh, spec = make_mesh(topology), P("data", None, "model")
    tokens = (case.batch, case.length, case.heads)
    shape = lambda *size, dtype="float32": jax.ShapeDtypeStruct(
        size, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec)
    )
    arrays = {n: shape(*tokens, case.head_dim, dtype=case.dtype) for n in ("q", "k", "v")}
    arrays |= {"w": shape(*tokens, case.head_dim), "beta": shape(*tokens)}
    if case.gates:
        arrays["log_gates"] = shape(*tokens)
    one_chip = lambda x: path_attention(**x, implementation="pallas_tpu")
    over_mesh = jax.shard_map(one_chip, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False)

    def both(x: dict[str, Any], do: Any) -> Any:
        o, pull = jax.vjp(over_mesh, x)
        return o, pull(do)

    start = time.perf_counter()
    lowered: Any = jax.jit(both).lower(arrays, arrays["q"]) if backward else jax.jit(over_mesh).lower(arrays)
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    row: dict[str, Any] = {
        "case": case.name,
        "impl": "pallas_tpu",
        "pass": "fwd_bwd" if backward else "fwd",
        "topology": topology,
    }
    row |= {"B": case.batch, "T": case.length, "H": case.heads, "D": case.head_dim, "dtype": case.dtype}
    return compiled, row | {
        "memory_bytes": memory.peak_memory_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topology", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--output", type=Path, help="results file to write")
    options = parser.parse_args()
    rows = []
    for topology in options.topology:
        for case in CASES:
            for backward in (False, True):
                rows.append(compile_case(case, topology, backward)[1])
                print(json.dumps(rows[-1]), flush=True)
                if options.output:
                    options.output.write_text(json.dumps({"env": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
