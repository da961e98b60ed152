"""Attention alone, forward and forward + backward, over a row that is spread over the GPUs of a context axis."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from bampath.positions import parse
from bampath.sharding import mesh_of, replicated, use
from bampath.sharding.attention import SPECS, attend
from experiments.multi_gpu.cells import Cell
from experiments.multi_gpu.work import PROFILED, SLOW, memory, profiled, program, timed
from kernels.attention.api import DistancePrior

Array = jax.Array


def ggd(p: dict[str, Array], d: Array) -> Array:
    """BAM's generalised Gaussian prior without location."""
    return -jnp.exp(p["alpha"]) * (jnp.abs(d).astype(jnp.float32) + 1e-5) ** p["beta"]


def arrays_of(scheme: str, length: int, heads: int, dim: int, dtype: Any) -> dict[str, Any]:
    """Random inputs of one row as the scheme has them; traced inside jit. PaTH's vectors have length 1."""
    key = lambda n: jax.random.fold_in(jax.random.key(0), n)
    normal = lambda n, *shape: jax.random.normal(key(n), (1, length, heads, *shape), jnp.float32)
    x: dict[str, Any] = {name: normal(n, dim).astype(dtype) for n, name in enumerate("qkv")}
    composition = parse(scheme).single
    names = {part.NAME for part in composition.parts}
    if "bam" in names:
        x["prior"] = DistancePrior({"alpha": jnp.full(heads, -3.0), "beta": jnp.full(heads, 0.5)}, ggd)
    if "ssmax" in names:
        x["sharpness"] = 1 + jax.random.uniform(key(3), (1, length, heads))
    if composition.carries_keys:
        w = normal(4, dim)
        x |= {"w": w / jnp.linalg.norm(w, axis=-1, keepdims=True), "beta": 2 * jax.nn.sigmoid(normal(5))}
    if composition.has_gates:
        x |= {"log_gates": jax.nn.log_sigmoid(normal(6) + 12.0)}  # nothing is forgotten: no tile can be left out
    return x


def prepare(cell: Cell) -> "Runner":
    return Runner(cell)


class Runner:
    """Both programs of a cell and the one that makes their inputs; no input exists before `measure`."""

    def __init__(self, cell: Cell) -> None:
        self.cell, config = cell, cell.config()
        self.mesh = mesh_of(config)
        self.model, self.length = config.model, config.data.sequence_length
        dtype = jnp.dtype(config.model.dtype)
        shape = self.length, config.model.heads, config.model.head_dim
        make = lambda: arrays_of(cell.scheme, *shape, dtype)
        x = {n: jax.tree.map(partial(self._placed, n), leaf) for n, leaf in jax.eval_shape(make).items()}
        options: dict[str, Any] = {"sharpen_prior": True, "implementation": config.model.attention_impl}
        options |= {"scale_gates": False} if cell.carries_keys else {"window": None}

        def forward(x: dict[str, Any]) -> Array:
            with use(self.mesh):
                return attend(x, **options)

        def both(x: dict[str, Any]) -> Any:
            out, vjp = jax.vjp(forward, x)
            return out, vjp(x["v"])[0]  # v has the output's shape and is as random as any cotangent

        place = jax.tree.map(lambda leaf: leaf.sharding, x)
        programs = [jax.jit(make, out_shardings=place).lower(), jax.jit(forward).lower(x), jax.jit(both).lower(x)]
        begin = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            self._make, *passes = pool.map(lambda one: one.compile(), programs)
        self._passes = dict(zip(("fwd", "fwd_bwd"), passes, strict=True))
        self.compile_seconds = time.monotonic() - begin

    def _placed(self, name: str, leaf: Any) -> Any:
        where = replicated(None) if self.mesh is None else NamedSharding(self.mesh, SPECS[name])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    def measure(self) -> list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
        x = self._make()
        jax.block_until_ready(x)
        return [self._measure(name, compiled, x) for name, compiled in self._passes.items()]

    def _measure(self, name: str, compiled: Any, x: Any) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
        def run(count: int) -> None:
            for _ in range(count):
                out = compiled(x)
            jax.block_until_ready(out)

        run(1)
        begin = time.perf_counter()
        run(1)
        first = time.perf_counter() - begin
        model, gpus = self.model, self.cell.gpus
        row: dict[str, Any] = {
            "case": self.cell.scheme,
            "pass": name,
            "shape": self.cell.shape,
            "strategy": "context" if gpus > 1 else "one",
            "scaling": "strong",
            "variant": self.cell.variant,
            "gpus": gpus,
            **dict(zip("BTHD", (1, self.length, model.heads, model.head_dim), strict=True)),
            "dtype": model.dtype,
            "program": program(compiled, self.mesh) | {"compile_seconds": self.compile_seconds},
            **timed(run, first),
        }
        flops = 2.0 * model.heads * self.length**2 * model.head_dim * (1 if name == "fwd" else 3.5)
        row |= {"tflops_per_gpu": flops / row["ms"] / 1e9 / gpus, "memory_bytes": memory()}
        return row, profiled(run, 1 if first > SLOW else PROFILED)
