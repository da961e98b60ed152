"""What the GPU benchmark of LSH attention does, in parts that prepare side by side (see bench.py)."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention.bench_parts import LIMITS, relative_rms, words
from kernels.lsh import bench_cases, gpu_kernels
from kernels.lsh.api import lsh_attention, sample_grids
from kernels.lsh.bench_cases import DIM, HEADS, SIGMAS, Row
from kernels.triton import Tiles

Item = tuple[Row, Callable[[], Row] | None]
Wanted = Callable[[Row], bool]
TIMERS, CHECKERS, TUNERS = 4, 6, 3  # processes
THREADS = 4  # compilations of a process at a time
# length, heads, key heads, head_dim, samples, law, causal, documents, combine, dtype
CHECKS = (
    *((712, 4, 4, 64, 10, "integer", True, False, "shared", dtype) for dtype in LIMITS),
    *((600, 8, 2, 64, 10, "integer", True, True, "shared", dtype) for dtype in LIMITS),
    (333, 4, 1, 128, 20, "integer", True, True, "shared", "bfloat16"),
    (400, 4, 2, 48, 7, "continuous", True, True, "shared", "bfloat16"),
    (400, 4, 2, 48, 7, "continuous", True, False, "shared", "float32"),
    (390, 2, 2, 256, 5, "integer", True, False, "shared", "bfloat16"),
    (390, 2, 2, 256, 5, "integer", True, False, "shared", "float32"),
    (300, 4, 2, 64, 10, "integer", False, True, "shared", "bfloat16"),
    (300, 4, 2, 64, 10, "stratified", False, False, "shared", "float32"),
    (300, 4, 2, 64, 40, "integer", True, True, "shared", "bfloat16"),
    (300, 4, 2, 64, 3, "integer", True, True, "mean", "bfloat16"),
    (130, 4, 4, 16, 1, "fixed", True, False, "shared", "float32"),
    (1, 2, 2, 32, 2, "integer", True, False, "shared", "float32"),
    (4096, 8, 8, 64, 10, "integer", True, False, "shared", "bfloat16"),
)  # fmt: skip
CANDIDATES = tuple(
    f"{rows}x{step}x{warps}x{stages}"
    for rows, step, warps, stages in ((64, 64, 4, 2), (64, 32, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 4, 2),
                                      (128, 32, 8, 2), (64, 32, 4, 3), (64, 128, 4, 2))
)  # fmt: skip


class Compiling:
    """Jobs (row, what compiles and gives what completes the row) that are being compiled side by side.

    Iterating gives (row, what completes it), or a row that says why not, as they are ready.
    """

    def __init__(self, jobs: list[tuple[Row, Callable[[], Callable[[], Row]]]]) -> None:
        pool = ThreadPoolExecutor(THREADS)
        self.started = {pool.submit(prepare): row for row, prepare in jobs}

    def wait(self) -> None:
        wait(self.started)

    def __iter__(self) -> Iterator[Item]:
        for future in as_completed(self.started):
            try:
                yield self.started[future], future.result()
            except Exception as problem:
                yield self.started[future] | {"failed": words(problem)}, None


# ---- Times ----


def time_items(part: int, wanted: Wanted) -> Compiling:
    def prepare(case: bench_cases.Case) -> Callable[[], Row]:
        return partial(bench_cases.timed, case, *bench_cases.prepare(case))

    cases = [case for case in bench_cases.cases() if wanted(case.row)]
    return Compiling([(case.row, partial(prepare, case)) for case in cases[part::TIMERS]])


# ---- Tiles ----


def tune_items(part: int, wanted: Wanted) -> Compiling:
    """Each kernel alone at T = 65,536 with every candidate."""
    kernels = ("forward", "queries", "keys")
    every = list(product(kernels, CANDIDATES))[part::TUNERS]
    jobs: list[Any] = []
    for kernel, tiles in every:
        row = {"case": "tiles", "impl": kernel, "tiles": tiles, "pass": "tune"}
        jobs.append((row, partial(_tune, kernel, tiles)))
    return Compiling([job for job in jobs if wanted(job[0])])


def _tune(kernel: str, tiles: str) -> Callable[[], Row]:
    length, samples, times = 65_536, 10, 10
    run = {"forward": gpu_kernels.forward, "queries": gpu_kernels.query_gradients, "keys": gpu_kernels.key_gradients}
    array, grid = (
        jax.ShapeDtypeStruct((1, length, HEADS, DIM), jnp.bfloat16),
        jax.ShapeDtypeStruct((HEADS, samples), jnp.int32),
    )
    line = jax.ShapeDtypeStruct((1, HEADS, length), jnp.float32)
    shapes = dict.fromkeys(("q", "k", "v"), array) | {"widths": grid, "offsets": grid}
    if kernel != "forward":
        shapes |= {"do": array, "lse": line}
    if kernel == "queries":
        shapes |= {"o": array, "dlse": line}
    if kernel == "keys":
        shapes |= {"delta": line}
    spec = gpu_kernels.Spec(
        length=length,
        group=1,
        samples=samples,
        scale=DIM**-0.5,
        causal=True,
        documents=False,
        drawn=False,
        exact=False,
        interpret=False,
    )
    once = partial(run[kernel], spec, Tiles.parse(tiles))

    def program(x: dict[str, Any]) -> Any:
        def body(_: Any, carry: Any) -> Any:
            q, found = carry
            q = jax.lax.optimization_barrier((q, found))[0]
            return jax.lax.optimization_barrier((q, once(x | {"q": q})))

        empty = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(once, x))
        return jax.lax.fori_loop(0, times, body, (x["q"], empty))[1]

    compiled = jax.jit(program).lower(shapes).compile()

    def finish() -> Row:
        keys = iter(jax.random.split(jax.random.key(0), 20))
        x = {
            n: jax.random.normal(next(keys), s.shape, s.dtype)
            for n, s in shapes.items()
            if n not in ("widths", "offsets")
        }
        found = []
        for seed in range(3):
            w, o = sample_grids(jax.random.key(seed), jnp.asarray(SIGMAS), samples)
            found += [ms / times for ms in bench_cases.clock(compiled, (x | {"widths": w, "offsets": o},))]
        return {"ms": float(np.median(found)), "ms_min": min(found), "ms_max": max(found)}

    return finish


# ---- Checks ----


def check_items(part: int, wanted: Wanted) -> Iterator[Item]:
    for check in CHECKS[part::CHECKERS]:
        length, heads, kv_heads, dim, samples, law, causal, documents, combine, dtype = check
        row: Row = {"case": f"s = {samples}, {law}, {combine}", "impl": "pallas_triton", "pass": "check", "T": length}
        row |= {"H": heads, "Hkv": kv_heads, "D": dim, "causal": causal, "documents": documents, "dtype": dtype}
        try:
            row |= run_check(*check)
        except Exception as problem:
            row |= {"failed": words(problem), "passed": False}
        yield row, None


def run_check(
    length: int, heads: int, kv_heads: int, dim: int, samples: int, law: Any, causal: bool, documents: bool,
    combine: Any, dtype: str,
) -> Row:  # fmt: skip
    """Errors of o, lse and gradients against the dense form in float64; NaN in padding; the same bits twice."""
    r = np.random.default_rng(length + samples)
    batch = 1 if length > 2000 else 2
    normal = lambda n: jnp.asarray(r.standard_normal((batch, length, n, dim), np.float32), dtype)
    x = {"q": normal(heads), "k": normal(kv_heads), "v": normal(kv_heads)}
    do, dlse = normal(heads), jnp.asarray(r.standard_normal((batch, length, heads)), jnp.float32)
    sigma = jnp.asarray(SIGMAS[:: max(1, len(SIGMAS) // heads)][:heads])
    widths, offsets = sample_grids(jax.random.key(samples), sigma, samples, law=law)
    other: Row = {"widths": widths, "offsets": offsets, "combine": combine, "causal": causal}
    if documents:
        cuts = np.sort(r.choice(np.arange(1, length), (batch, 4)), axis=1)
        ids = np.stack([np.searchsorted(row, np.arange(length), side="right") for row in cuts])
        other["segment_ids"] = jnp.asarray(np.where(ids == 2, -1, ids), jnp.int32)
        for n in ("k", "v"):
            x[n] = jnp.where((other["segment_ids"] < 0)[:, :, None, None], jnp.nan, x[n])

    def both(implementation: str, x: Row, do: Any, dlse: Any) -> Any:
        shared = combine == "shared"
        f = lambda x: lsh_attention(**x, **other, implementation=implementation, return_lse=shared)
        out, pull = jax.vjp(f, x)
        return out, pull((do, dlse) if shared else do)[0]

    compiled = jax.jit(partial(both, "pallas_triton"))
    got, again = jax.device_get(compiled(x, do, dlse)), jax.device_get(compiled(x, do, dlse))
    same = all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (got, again)), strict=True))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.nan_to_num(np.asarray(a, np.float64))), (x, do, dlse))
        want = jax.device_get(jax.jit(partial(both, "reference"))(*wide))
    error = (
        {"o": (got[0], want[0])}
        if combine == "mean"
        else {"o": (got[0][0], want[0][0]), "lse": (got[0][1], want[0][1])}
    )
    error |= {f"d{n}": (got[1][n], want[1][n]) for n in x}
    found = {n: relative_rms(*pair) for n, pair in error.items()}
    judged = found if length > 1 else {n: found[n] for n in ("o", "dv")}
    passed = same and all(e < LIMITS[dtype] for e in judged.values())
    return {"error": judged, "deterministic": same, "passed": passed}


def far_rows(length: int = 65_536, rows: int = 24) -> Row:
    """Rows of a long call against their definition in float64 numpy, from the same bfloat16 inputs."""
    case = bench_cases.Case("lsh", length, "pallas_triton")
    q, k, v, _ = bench_cases.inputs(case)
    widths, offsets = bench_cases.grids(case, 0)
    o = np.asarray(jax.jit(bench_cases.function(case))(q, k, v, widths, offsets)[0], np.float64)
    wide_q, wide_k, wide_v = (np.asarray(x[0], np.float64) for x in (q, k, v))
    b, f = np.asarray(widths), np.asarray(offsets)  # [H, s]
    chosen = np.random.default_rng(0).choice(length, rows, replace=False)
    got, want = [], []
    for i, h in product(chosen.tolist(), range(HEADS)):
        keys = np.arange(max(0, i - b[h].max()), i + 1)
        counts = ((keys[None] + f[h][:, None]) // b[h][:, None] == (i + f[h][:, None]) // b[h][:, None]).sum(0)
        weights = counts * np.exp(wide_k[keys, h] @ wide_q[i, h] / np.sqrt(DIM))
        want.append(weights @ wide_v[keys, h] / weights.sum())
        got.append(o[i, h])
    error = relative_rms(np.stack(got), np.stack(want))
    return {"error": {"o": error}, "passed": error < LIMITS["bfloat16"]}


def far_items(wanted: Wanted) -> Iterator[Item]:
    row: Row = {"case": "s = 10, rows of a long call", "impl": "pallas_triton", "pass": "check", "T": 65_536}
    row |= {"H": HEADS, "Hkv": HEADS, "D": DIM, "causal": True, "documents": False, "dtype": "bfloat16"}
    try:
        row |= far_rows()
    except Exception as problem:
        row |= {"failed": words(problem), "passed": False}
    yield row, None


PARTS: dict[str, Callable[[Wanted], Iterable[Item]]] = {
    **{f"times {n}": partial(time_items, n) for n in range(TIMERS)},
    **{f"checks {n}": partial(check_items, n) for n in range(CHECKERS)},
    "far": far_items,
    **{f"tune {n}": partial(tune_items, n) for n in range(TUNERS)},
}
