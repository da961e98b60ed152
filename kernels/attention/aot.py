"""Compile the TPU attention kernels ahead of time, without a TPU, and record memory and compile time.

    python -m kernels.attention.aot [--topology v5e:2x2 ...] [--case l12 ...] [--output aot_results.json]

Needs `libtpu` (requirements-tpu.txt). Every case is compiled for four chips, the batch over one mesh axis and the heads
over the other, inside `shard_map`: once the forward pass, once forward and backward with gradients of q, k, v and of
every parameter. The compiler knows the chip: a kernel whose buffers do not fit in VMEM, or a layout that the chip
lacks, is an error here. It checks neither numbers nor speed.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.attention.api import DistancePrior, attention

Array = jax.Array
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
RESULTS = Path(__file__).with_name("aot_results.json")


@dataclass(frozen=True)
class Case:
    """One call, sizes of all four chips together. `schemes`: what fills the positional slots, as in a spec."""

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    schemes: str = "bam+ssmax"  # of bam, ssmax, fox, t5, segments, positions
    dtype: str = "bfloat16"
    window: int | None = None
    causal: bool = True


# The named configurations (bampath/named.py), at their training lengths.
CASES = (
    Case("l12", 8, 512, 16, 16, 48),
    Case("l14.0", 8, 512, 48, 48, 32),
    Case("l14.1", 8, 512, 32, 32, 48),
    Case("l14.2", 8, 512, 24, 24, 64),
    Case("l14.3", 8, 512, 16, 16, 96),
    Case("l14.4", 8, 512, 12, 12, 128),
    Case("l24", 8, 512, 64, 64, 32),
    Case("llama1b", 8, 512, 32, 8, 64, "bam+ssmax+segments"),
    Case("path-760m", 4, 4096, 24, 24, 64, "fox"),
)
# What they do not reach: every other option, and sizes at which the backward pass splits in two.
EXTRA = (
    Case("positions", 4, 2048, 8, 4, 64, "bam+ssmax+fox+segments+positions"),
    Case("odd-length-f32", 4, 1000, 4, 4, 80, "bam+ssmax", "float32"),
    Case("t5-window", 4, 4096, 8, 8, 64, "t5", window=1024, causal=False),
    Case("wide-heads", 4, 2048, 4, 4, 256),
    Case("wide-heads-f32", 4, 2048, 4, 4, 256, "bam+fox+segments", "float32"),
    Case("multi-query", 4, 8192, 16, 2, 64, "bam+ssmax+fox"),
    Case("long", 2, 131072, 2, 2, 64),
)


def ggd(params: Any, d: Array) -> Array:
    """−exp(a) · (|d| + 1e-5)^b, the prior of GGD-BAM (arXiv 2505.22842)."""
    distance = jnp.abs(d).astype(jnp.float32) + 1e-5
    return -jnp.exp(params["a"] + params["b"] * jnp.log(distance))


def bucketed(params: Any, d: Array) -> Array:
    """A learned table over log2 buckets of distance, as in T5."""
    bucket = jnp.log2(jnp.abs(d).astype(jnp.float32) + 1).astype(jnp.int32)
    return params["table"][jnp.clip(bucket, 0, params["table"].shape[0] - 1)]


def prepare_environment() -> None:
    """Tell libtpu that there is no TPU to ask; before its first use in the process."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


@cache
def make_mesh(topology: str) -> Mesh:
    """Four chips as data × model = 2 × 2. Raises if libtpu is not installed."""
    prepare_environment()
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    if len(devices) != 4:
        raise ValueError(f"topology {topology!r} has {len(devices)} devices, must have 4 (2 × 2)")
    return Mesh(np.array(devices).reshape(2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def inputs(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shapes, partition specs) of a case's arrays."""
    heads, rows = P("data", None, "model"), P("data")
    token = (case.batch, case.length)
    shape = lambda *size, dtype="float32": jax.ShapeDtypeStruct(size, jnp.dtype(dtype))
    arrays: dict[str, Any] = {"q": shape(*token, case.heads, case.head_dim, dtype=case.dtype)}
    arrays |= {n: shape(*token, case.kv_heads, case.head_dim, dtype=case.dtype) for n in "kv"}
    specs: dict[str, Any] = dict.fromkeys(arrays, heads)
    for scheme in case.schemes.split("+"):
        if scheme in ("ssmax", "fox"):
            name = {"ssmax": "sharpness", "fox": "log_gates"}[scheme]
            arrays[name], specs[name] = shape(*token, case.heads), heads
        elif scheme in ("segments", "positions"):
            arrays[scheme], specs[scheme] = shape(*token, dtype="int32"), rows
        elif scheme == "bam":
            arrays["bam"] = {"a": shape(case.heads), "b": shape(case.heads)}
            specs["bam"] = {"a": P("model"), "b": P("model")}
        elif scheme == "t5":
            arrays["t5"], specs["t5"] = {"table": shape(case.heads, 32)}, {"table": P("model")}
        else:
            raise ValueError(f"case {case.name}: unknown scheme {scheme!r}")
    return arrays, specs


def call(case: Case, x: dict[str, Any]) -> Array:
    """The attention of a case on one chip."""
    prior = DistancePrior(x["bam"], ggd) if "bam" in x else DistancePrior(x["t5"], bucketed) if "t5" in x else None
    return attention(
        x["q"],
        x["k"],
        x["v"],
        prior=prior,
        log_gates=x.get("log_gates"),
        sharpness=x.get("sharpness"),
        segment_ids=x.get("segments"),
        positions=x.get("positions"),
        kv_positions=x.get("positions"),
        window=case.window,
        causal=case.causal,
        implementation="pallas_tpu",
    )


def compile_case(case: Case, topology: str, backward: bool) -> tuple[Any, dict[str, Any]]:
    """(the executable, a row of results). A compile failure raises."""
    mesh = make_mesh(topology)
    arrays, specs = inputs(case)
    place = lambda spec: NamedSharding(mesh, spec)
    arrays = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place(s)), arrays, specs)
    fixed = {n: arrays.pop(n) for n in ("segments", "positions") if n in arrays}
    in_specs = ({n: specs[n] for n in arrays}, {n: specs[n] for n in fixed})
    one_chip = lambda x, fixed: call(case, {**x, **fixed})
    over_mesh = jax.shard_map(
        one_chip, mesh=mesh, in_specs=in_specs, out_specs=P("data", None, "model"), check_vma=False
    )

    def both(x: dict[str, Any], fixed: dict[str, Any], do: Array) -> Any:
        o, pullback = jax.vjp(lambda x: over_mesh(x, fixed), x)
        return o, pullback(do)

    start = time.perf_counter()
    if backward:
        lowered = jax.jit(both).lower(arrays, fixed, arrays["q"])
    else:
        lowered = jax.jit(over_mesh).lower(arrays, fixed)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    return compiled, row(case, topology, backward, compiled, (middle - start, end - middle))


def bytes_per_chip(case: Case, backward: bool) -> int:
    """Bytes of a case's inputs on one chip (and of the output's cotangent), without any padding."""
    arrays, specs = inputs(case)
    size = lambda a, s: math.prod(a.shape) * a.dtype.itemsize // 2 ** sum(axis is not None for axis in s)
    total = sum(jax.tree.leaves(jax.tree.map(size, arrays, specs)))
    return total + (size(arrays["q"], specs["q"]) if backward else 0)


def row(case: Case, topology: str, backward: bool, compiled: Any, seconds: tuple[float, float]) -> dict[str, Any]:
    """One row of the results file; memory is per chip."""
    memory = compiled.memory_analysis()
    peak = memory.peak_memory_in_bytes
    return {
        "case": case.name,
        "impl": "pallas_tpu",
        "pass": "fwd_bwd" if backward else "fwd",
        "topology": topology,
        "B": case.batch,
        "T": case.length,
        "H": case.heads,
        "Hkv": case.kv_heads,
        "D": case.head_dim,
        "dtype": case.dtype,
        "schemes": case.schemes,
        "window": case.window,
        "causal": case.causal,
        "memory_bytes": peak,
        "argument_bytes": memory.argument_size_in_bytes,
        "unpadded_input_bytes": bytes_per_chip(case, backward),
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
        "lower_s": round(seconds[0], 2),
        "compile_s": round(seconds[1], 2),
    }


def environment() -> dict[str, Any]:
    """Versions and date, for the results file."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "none: compiled ahead of time",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
        "commit": git.stdout.strip() or None,
    }


def run(cases: list[Case], names: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of every case for every topology; stops at the first failure."""
    for topology in names:
        for case in cases:
            for backward in (False, True):
                _, result = compile_case(case, topology, backward)
                print(
                    f"{topology:10} {case.name:16} {result['pass']:8} {result['compile_s']:6.1f} s "
                    f"{result['memory_bytes'] / 2**20:8.1f} MiB",
                    flush=True,
                )
                yield result


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    every = {case.name: case for case in CASES + EXTRA}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topology", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--case", nargs="+", choices=list(every), default=list(every))
    parser.add_argument("--output", type=Path, help="results file to write")
    options = parser.parse_args(arguments)
    rows = []
    for result in run([every[name] for name in options.case], options.topology):
        rows.append(result)
        if options.output:
            options.output.write_text(json.dumps({"env": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
