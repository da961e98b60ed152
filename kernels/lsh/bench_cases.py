"""Calls that the GPU measurements of LSH attention share: what is compared, at which lengths, and how it is timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels.attention.api import DistancePrior, attention
from kernels.lsh.api import lsh_attention, sample_grids
from kernels.lsh.grids import Law

Array = jax.Array
Row = dict[str, Any]
HEADS, DIM = 8, 64
SIGMAS = tuple(2.0**n for n in range(1, HEADS + 1))  # ALiBi's slopes for 8 heads are their reciprocals
DRAWS = 5
MIDDLE = 65_536
SHORT, LONG = (1024, 2048, 4096, 8192), (16_384, 65_536, 262_144)


@dataclass(frozen=True)
class Case:
    """One way to attend: `kind` lsh, fixed (blocks of 2 sigma), alibi, window (the longest block of all heads' grids)
    or windows (each head its own longest block, one call per head)."""

    kind: str
    length: int
    backend: str
    samples: int = 10
    backward: bool = False

    @property
    def row(self) -> Row:
        name = f"{self.kind}, s = {self.samples}" if self.kind in ("lsh", "window", "windows") else self.kind
        return {
            "case": name,
            "impl": self.backend,
            "pass": "fwd_bwd" if self.backward else "fwd",
            "T": self.length,
        }

    @property
    def work(self) -> float:
        """A guess in ms that says how often to repeat."""
        full = 10.8 * (self.length / 65_536) ** 2 if self.kind == "alibi" else 0.4 * self.length / 65_536
        return full * (4 if self.backward else 1)


def cases() -> list[Case]:
    found = []
    for backward in (False, True):
        for length in (*LONG, *SHORT):
            found += [
                Case(kind, length, backend, backward=backward)
                for kind, backend in (("lsh", "pallas_triton"), ("alibi", "mosaic_gpu"), ("window", "mosaic_gpu"))
            ]
        for length in LONG:
            found += [Case("lsh", length, "pallas_triton", samples, backward) for samples in (5, 20)]
            found += [Case("fixed", length, "pallas_triton", 1, backward)]
            if length < LONG[-1]:  # two seconds a call
                found += [Case("alibi", length, "pallas_triton", backward=backward)]
        found += [Case("windows", MIDDLE, "mosaic_gpu", backward=backward)]  # eight times as much to compile
    return found


def grids(case: Case, seed: int) -> tuple[Array, Array]:
    law: Law = "fixed" if case.kind == "fixed" else "integer"
    return sample_grids(jax.random.key(seed), jnp.asarray(SIGMAS), case.samples, law=law)


def reach(case: Case) -> list[int]:
    """Longest block of each head, the largest of the draws that are timed."""
    return np.max([grids(case, seed)[0].max(1) for seed in range(DRAWS)], axis=0).tolist()


def alibi(params: Any, d: Array) -> Array:
    return -params["slope"] * jnp.abs(d).astype(jnp.float32)


def function(case: Case) -> Callable[..., Array]:
    """(q, k, v, widths, offsets) -> o."""
    if case.kind in ("lsh", "fixed"):
        return lambda q, k, v, w, o: lsh_attention(q, k, v, w, o, implementation=case.backend)
    slopes = 1 / jnp.asarray(SIGMAS)
    call = lambda q, k, v, slope, window: attention(
        q, k, v, prior=DistancePrior({"slope": slope}, alibi), window=window, implementation=case.backend
    )
    if case.kind == "windows":
        windows = reach(case)
        own = lambda x, h: x[:, :, h : h + 1]
        each = lambda q, k, v: [
            call(own(q, h), own(k, h), own(v, h), slopes[h : h + 1], window) for h, window in enumerate(windows)
        ]
        return lambda q, k, v, w, o: jnp.concatenate(each(q, k, v), axis=2)
    window = max(reach(case)) if case.kind == "window" else None
    return lambda q, k, v, w, o: call(q, k, v, slopes, window)


def repeated(case: Case, times: int) -> Callable[..., Any]:
    """A program that attends `times` times, each waiting for the one before: no launch from Python in between."""
    run = function(case)

    def once(q: Array, k: Array, v: Array, do: Array, w: Array, o: Array) -> Any:
        if not case.backward:
            return run(q, k, v, w, o)
        out, pull = jax.vjp(lambda q, k, v: run(q, k, v, w, o), q, k, v)
        return out, *pull(do)

    def program(q: Array, *rest: Array) -> Any:
        def body(_: Any, carry: Any) -> Any:
            q, found = carry
            return lax.optimization_barrier((q, once(lax.optimization_barrier((q, found))[0], *rest)))

        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(once, q, *rest))
        return lax.fori_loop(0, times, body, (q, empty))[1]

    return program


def shapes(case: Case) -> tuple[Any, ...]:
    array = jax.ShapeDtypeStruct((1, case.length, HEADS, DIM), jnp.bfloat16)
    grid = jax.ShapeDtypeStruct((HEADS, case.samples), jnp.int32)
    return array, array, array, array, grid, grid


def inputs(case: Case) -> tuple[Array, ...]:
    """q, k, v, do."""
    keys = jax.random.split(jax.random.key(case.length), 4)
    return tuple(jax.random.normal(key, (1, case.length, HEADS, DIM), jnp.bfloat16) for key in keys)


def prepare(case: Case) -> tuple[Any, int]:
    """(compiled program, how often it attends)."""
    times = int(np.clip(20 / case.work, 1, 50))
    return jax.jit(repeated(case, times)).lower(*shapes(case)).compile(), times


def clock(program: Any, args: tuple[Any, ...], runs: int = 3) -> list[float]:
    """ms of each run, after one that is not counted."""
    jax.block_until_ready((args, program(*args)))
    found = []
    for _ in range(runs):
        begin = time.perf_counter()
        jax.block_until_ready(program(*args))
        found.append((time.perf_counter() - begin) * 1e3)
    return found


def timed(case: Case, program: Any, times: int) -> Row:
    """Median, least and greatest ms of one attention over draws of the grids; memory beside inputs and outputs."""
    arrays = inputs(case)
    draws = DRAWS if case.kind == "lsh" else 1
    found = [ms / times for seed in range(draws) for ms in clock(program, (*arrays, *grids(case, seed)))]
    found.sort()
    memory = program.memory_analysis()
    row = case.row | {"ms": found[len(found) // 2], "ms_min": found[0], "ms_max": found[-1], "times": times}
    row |= {"temp_bytes": int(memory.temp_size_in_bytes), "output_bytes": int(memory.output_size_in_bytes)}
    if case.kind in ("window", "windows"):
        row["reach"] = max(reach(case)) if case.kind == "window" else reach(case)
    return row
