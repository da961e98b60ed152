"""The train step of a configuration, compiled for devices that are not here, and what its program says of itself."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bampath.config import Config
from bampath.sharding import make_mesh
from bampath.sharding.rules import batch_sharding
from bampath.step import abstract_state, build_model, declare, make_train_step, optimizer_of
from kernels.attention.aot import prepare_environment
from launch.chips import DoesNotFit
from launch.hlo import Collective, collectives


@dataclass(frozen=True)
class Program:
    """A compiled train step. Bytes are per device: arguments (parameters, moments, batch), temporaries and the peak of
    all; kernels: names of the fused kernels and how often each occurs in the program; seconds: of this machine, and of
    all its cores together for cpu_seconds, which other work does not lengthen; quick: compiled with the least effort.
    """

    parameters: int
    argument_bytes: int
    temporary_bytes: int
    peak_bytes: int
    xla_flops: float
    kernels: dict[str, int]
    collectives: list[Collective]
    lower_seconds: float
    compile_seconds: float
    cpu_seconds: float = 0.0
    quick: bool = False


def topology_devices(topology: str) -> list[Any]:
    """The chips of a topology such as `v5e:16x16`. ValueError if libtpu does not know it or is not installed."""
    from jax.experimental import topologies

    prepare_environment()
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:  # several types, by version
        message = str(error).splitlines()[0]
        raise ValueError(
            f"no description of the topology {topology!r}: {message} (libtpu is in requirements-tpu.txt)"
        ) from None


@contextmanager
def kernels_of(platform: str) -> Iterator[None]:
    """Let the kernels choose as they do on `platform`: they ask `jax.default_backend()` while a program is traced."""
    real = jax.default_backend
    jax.default_backend = lambda: platform
    try:
        yield
    finally:
        jax.default_backend = real


def compile_step(config: Config, devices: list[Any], platform: str = "tpu", *, quick: bool = False) -> Program:
    """Compile the jitted train step of `config` for `devices`. DoesNotFit if it needs more memory than a device has.

    quick: let XLA take the first schedule that it finds instead of looking for the fastest, in a third of the time;
    kernels are the same, memory is some percent more (docs/scaling.md compares).
    """
    mesh = make_mesh(config.mesh, devices)
    assert mesh is not None
    model = build_model(config)
    declared = declare(model)
    optimizer = optimizer_of(config, declared)
    with kernels_of(platform):
        start, cpu = time.perf_counter(), time.process_time()
        step = make_train_step(config, model, declared, optimizer, mesh)
        lowered = step.lower(abstract_state(config, model, optimizer, mesh), abstract_batch(config, mesh))
        middle = time.perf_counter()
        compiled = _compile(lowered, quick)
        end, cpu = time.perf_counter(), time.process_time() - cpu
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return Program(
        parameters=declared.count,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        xla_flops=float((compiled.cost_analysis() or {}).get("flops", 0.0)),
        kernels=kernel_names(text),
        collectives=collectives(text, dict(mesh.shape)),
        lower_seconds=middle - start,
        compile_seconds=end - middle,
        cpu_seconds=cpu,
        quick=quick,
    )


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Shapes and placements of the arrays that `bampath.step.device_batch` gives."""
    shape = (config.data.batch_size, config.data.sequence_length)
    array = lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(mesh))
    batch = {"tokens": array(jnp.int32), "targets": array(jnp.int32), "weights": array(jnp.float32)}
    return batch | ({"segment_ids": array(jnp.int32)} if config.data.document_mask else {})


def kernel_names(text: str) -> dict[str, int]:
    """Fused kernels in a program's text and how many calls of each it has."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            name = re.search(r"^\s*(?:ROOT )?%?([a-zA-Z_]+)", line)
            key = name.group(1) if name else "unnamed"
            found[key] = found.get(key, 0) + 1
    return found


_LEAST_EFFORT = {"optimization_level": 9}  # EFFORT_O0 of XLA's ExecutionOptions


def _compile(lowered: Any, quick: bool) -> Any:
    try:
        return lowered.compile(_LEAST_EFFORT if quick else None)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFit(str(error).splitlines()[0], wanted_bytes(str(error))) from None


def wanted_bytes(message: str) -> float | None:
    """The bytes that a compiler's message says a program needs (`Used 17.03G of 15.75G hbm`); None if it does not."""
    match = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", message) or re.search(
        r"\(([\d.]+)([KMGT])\) exceeds available HBM", message
    )
    return float(match.group(1)) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[match.group(2)] if match else None
