"""What the GPU benchmark does, in parts that prepare side by side, each in a process of its own (see bench.py).

A part is a list of items (row, finish): the row of results.json as far as it is known, and what completes it when the
GPU is this part's alone (None: complete). Checks are complete when they are prepared; times are taken in `finish`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention.api import DistancePrior, attention, choose
from kernels.attention.bench_cases import (
    CHECKS,
    DECODE_CHECKS,
    PORTABLE_CHECKS,
    Case,
    function,
    ggd,
    inputs,
    shape_cases,
)
from kernels.attention.call import make_call

Array = jax.Array
Shape = tuple[int, int, int, int]
Item = tuple[dict[str, Any], Callable[[], dict[str, Any]] | None]
SPEED_SHAPES: tuple[Shape, ...] = ((8, 4096, 16, 64), (4, 4096, 16, 128), (1, 32768, 16, 64), (1, 16384, 16, 128))
SPEED_CASES = ("plain", "alibi", "bam+ssmax")
SPARSE_CASES = (  # tiles are left out
    *("fox, nothing to skip", "fox, gates logsigmoid(N + 4)", "fox, gates logsigmoid(N + 2)"),
    "bam+ssmax, documents of 1024",
)
PORTABLE_CASES = ("plain", "bam+ssmax", "fox, nothing to skip")
LIMITS = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}  # largest relative RMS error that a check may show
FEW = 64  # tokens; in shorter rows a parameter's gradient is a sum of few terms that cancel: twice the limit
CHECKERS = 8  # processes that the checks are dealt out to


def with_gradients(f: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """(operands, cotangents) -> (outputs, gradients)."""

    def both(x: Any, cotangents: Any) -> Any:
        out, vjp = jax.vjp(f, x)
        return out, vjp(cotangents)[0]

    return both


# ---- Checks ----


def relative_rms(got: Any, want: Any) -> float:
    """√(Σ (got − want)² / Σ want²) in float64. What is −inf in both does not count; where one is, the error is inf."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.array_equal(np.isneginf(a), np.isneginf(b)):
        return float("inf")
    a, b = np.where(np.isneginf(a), 0, a), np.where(np.isneginf(b), 0, b)
    return float(np.sqrt(np.mean((a - b) ** 2)) / max(np.sqrt(np.mean(b**2)), 1e-12))


def check(case: Case, implementation: str | None) -> dict[str, Any]:
    """Errors of outputs and gradients against float64, and whether two runs give the same bits."""
    x, other, cotangents = inputs(case)
    compiled = jax.jit(with_gradients(function(case, other, implementation))).lower(x, cotangents).compile()
    got, again = jax.device_get(compiled(x, cotangents)), jax.device_get(compiled(x, cotangents))
    same = all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (got, again)), strict=True))
    with jax.enable_x64(True):
        wide = lambda a: jnp.asarray(np.asarray(a, np.float64))
        run = jax.jit(with_gradients(function(case, other, "reference")))
        want = jax.device_get(run(jax.tree.map(wide, x), jax.tree.map(wide, cotangents)))
    names = {"['q']": "dq", "['k']": "dk", "['v']": "dv", "['sharpness']": "dsharpness", "['log_gates']": "dlog_gates"}
    error = {"o": relative_rms(got[0][0], want[0][0]), "lse": relative_rms(got[0][1], want[0][1])}
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got[1]), jax.tree.leaves(want[1]), strict=True):
        key = jax.tree_util.keystr(path)
        error[names.get(key, "d" + key.split("'")[-2])] = relative_rms(a, b)
    return {"error": error, "deterministic": same, "passed": same and within(case, error)}


def within(case: Case, error: dict[str, float]) -> bool:
    """Are all errors below their limits."""
    arrays = ("o", "lse", "dq", "dk", "dv", "dsharpness", "dlog_gates")
    limit = lambda n: LIMITS[case.dtype] * (2 if n not in arrays and case.T < FEW else 1)
    return all(e < limit(n) for n, e in judged(case, error).items())


def judged(case: Case, error: dict[str, float]) -> dict[str, float]:
    """The errors that a check is judged by: relative ones only where there is something to be relative to.

    Where a query sees one key, its probability is 1 and the gradients through it are 0; priors below −16384 count as
    that in the Mosaic kernels, which shows in the lse of a row that sees nothing else.
    """
    keys = case.S or case.T
    if keys == case.T == 1 or case.documents == 1:
        return {n: error[n] for n in ("o", "dv")}
    return {n: e for n, e in error.items() if n != "lse" or case.prior != "ggd_extreme"}


def all_checks() -> list[tuple[Case, str | None]]:
    """(case, implementation); None: what the library chooses itself."""
    wide = lambda cases: [replace(case, dtype="float32") for case in cases]
    checks: list[tuple[Case, str | None]] = [(case, "mosaic_gpu") for case in CHECKS]
    checks += [(case, "pallas_triton") for case in (*CHECKS[2:4], *wide(CHECKS[2::2]))]
    own = [*PORTABLE_CHECKS, *DECODE_CHECKS, *wide(PORTABLE_CHECKS[:4]), *wide(DECODE_CHECKS[1:4])]
    own += [*shape_cases("bfloat16"), *wide(c for c in shape_cases("float32") if c.D in (32, 80, 128, 256))]
    return checks + [(case, None) for case in own]


def chosen(case: Case) -> str:
    """The backend that `implementation=None` takes."""
    x, other, _ = inputs(case)
    prior = DistancePrior({"slope": jnp.ones(case.H)}, lambda p, d: -p["slope"] * abs(d)) if case.prior else None
    absent = ("segment_ids", "positions", "kv_positions", "window", "scale", "log_gates", "sharpness")
    options: dict[str, Any] = {**dict.fromkeys(absent), "sharpen_prior": True, "causal": True}
    options |= {n: x[n] for n in ("log_gates", "sharpness") if n in x}
    return choose(make_call(x["q"], x["k"], x["v"], prior=prior, **{**options, **other}))


def check_items(part: int) -> Iterator[Item]:
    for case, implementation in all_checks()[part::CHECKERS]:
        row: dict[str, Any] = {"case": case.name, "pass": "check", "B": case.B, "T": case.T, "S": case.S or case.T}
        row |= {"H": case.H, "D": case.D, "dtype": case.dtype}
        try:
            row |= {"impl": implementation or chosen(case), **check(case, implementation)}
        except Exception as problem:
            row |= {"impl": implementation, "failed": words(problem), "passed": False}
        yield row, None


def words(problem: Exception) -> str:
    """What a row says of a case that failed."""
    return f"{type(problem).__name__}: {problem}"[:300]


# ---- Times ----


def measure(compiled: Any, args: Sequence[Any], repeats: int = 5) -> dict[str, float]:
    """Median, least and greatest time of a call in ms; each sample is a batch of calls of about 20 ms."""
    jax.block_until_ready(compiled(*args))
    begin = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    calls = max(1, min(20, int(0.02 / (time.perf_counter() - begin))))
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            out = compiled(*args)
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - begin) / calls * 1e3)
    samples.sort()
    return {"ms": samples[len(samples) // 2], "ms_min": samples[0], "ms_max": samples[-1]}


def memory(compiled: Any) -> int | None:
    """Bytes of outputs and temporaries."""
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.output_size_in_bytes + analysis.temp_size_in_bytes)


Job = tuple[dict[str, Any], Callable[..., Any], tuple[Any, ...], Callable[..., dict[str, Any]], Any]


def compiled_items(jobs: list[Job]) -> list[Item]:
    """jobs: (row, function, arguments, completion of (executable, arguments), what tells programs apart or None).

    Programs that are alike but for their data are compiled once, different ones side by side.
    """
    with ThreadPoolExecutor(4) as pool:
        started: dict[Any, Future[Any]] = {}
        for n, (_, run, args, _, program) in enumerate(jobs):
            key = n if program is None else program
            if key not in started:
                started[key] = pool.submit(_compile, run, args)
        items: list[Item] = []
        for n, (row, _, args, complete, program) in enumerate(jobs):
            try:
                executable = started[n if program is None else program].result()
            except Exception as problem:
                items.append((row | {"failed": words(problem)}, None))
                continue
            items.append((row, partial(complete, executable, args)))
    return items


def _compile(run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return jax.jit(run).lower(*args).compile()


def cudnn(x: dict[str, Any]) -> Array:
    return jax.nn.dot_product_attention(x["q"], x["k"], x["v"], is_causal=True, implementation="cudnn")


def speed_case(name: str, shape: Shape, dtype: str = "bfloat16") -> Case:
    bam = name.startswith("bam")
    prior = "ggd" if bam else "alibi" if name == "alibi" else None
    bias = float(name[-2]) if name.endswith(")") else 12.0
    documents = 1024 * name.endswith("1024")
    return Case(name, *shape, prior, 3.0 * bam, "fox" in name, documents=documents, gate_bias=bias, dtype=dtype)


def speed_jobs(shape: Shape, names: Sequence[str], implementation: str, dtype: str = "bfloat16") -> list[Any]:
    batch, length, heads, dim = shape

    def job(case: str, impl: str, which: str, run: Any, args: Any) -> Any:
        def complete(executable: Any, args: Any) -> dict[str, Any]:
            row = measure(executable, args)
            flops = 2 * batch * heads * length**2 * dim * (1 if which == "fwd" else 3.5)
            return row | {"tflops": flops / row["ms"] / 1e9, "memory_bytes": memory(executable)}

        row = {"case": case, "impl": impl, "pass": which, **dict(zip("BTHD", shape, strict=True)), "dtype": dtype}
        return (
            row,
            run,
            args,
            complete,
            (case.split(",")[0] if case.startswith("fox") else case, impl, which, shape, dtype),
        )

    jobs = []
    for n, name in enumerate(names):
        case = speed_case(name, shape, dtype)
        x, other, (do, _) = inputs(case)
        run = function(case, other, implementation)
        output = lambda z, run=run: run(z)[0]
        kinds: list[tuple[str, str, Callable[[Any], Any]]] = [(name, implementation, output)]
        if n == 0 and implementation == "mosaic_gpu":
            kinds.insert(0, ("plain", "cudnn", cudnn))
        for label, impl, f in kinds:
            operands = {m: x[m] for m in ("q", "k", "v")} if impl == "cudnn" else x
            both = with_gradients(f)
            jobs += [job(label, impl, "fwd", f, (operands,)), job(label, impl, "fwd_bwd", both, (operands, do))]
    return jobs


def speed_items(index: int, cases: Sequence[str] = SPEED_CASES) -> list[Item]:
    """cuDNN without a prior and cases of the Mosaic kernels, forward and forward + backward."""
    return compiled_items(speed_jobs(SPEED_SHAPES[index], cases, "mosaic_gpu"))


def portable_items() -> list[Item]:
    """The portable kernels at the shorter shapes, and what only they serve."""
    jobs = [job for shape in SPEED_SHAPES[:2] for job in speed_jobs(shape, PORTABLE_CASES, "pallas_triton")]
    jobs += speed_jobs((2, 4096, 16, 256), ("bam+ssmax",), "pallas_triton")
    jobs += speed_jobs((2, 4096, 16, 64), ("bam+ssmax",), "pallas_triton", "float32")
    return compiled_items(jobs)


def long_items() -> list[Item]:
    """Forward at T = 524,288: offsets beyond 2^31 bytes. The last 32 rows of head 5 are compared with plain NumPy."""
    shape = batch, length, heads, dim = (1, 524288, 16, 64)
    case = speed_case("bam+ssmax", shape)
    x, other, _ = inputs(case)
    run = function(case, other, "mosaic_gpu")

    def complete(compiled: Any, args: Any) -> dict[str, Any]:
        row: dict[str, Any] = {**measure(compiled, args, repeats=2), "memory_bytes": memory(compiled)}
        row["tflops"] = 2 * batch * heads * length**2 * dim / row["ms"] / 1e9
        tail, head = 32, 5
        q, k, v = (np.asarray(x[n][0, :, head].astype(jnp.float32), np.float64) for n in ("q", "k", "v"))
        rows = np.arange(length - tail, length)
        d = np.arange(length)[None, :] - rows[:, None]
        bias = ggd({n: p[head] for n, p in x["params"].items()}, jnp.asarray(d, jnp.int32))
        logits = (q[rows] @ k.T / np.sqrt(dim) + np.asarray(bias)) * np.asarray(x["sharpness"])[0, rows, head][:, None]
        weights = np.where(d <= 0, np.exp(logits - logits.max(1, keepdims=True, where=d <= 0, initial=-np.inf)), 0)
        want = weights / weights.sum(1, keepdims=True) @ v
        return row | {"error": {"o": relative_rms(compiled(x)[0, rows, head].astype(jnp.float32), want)}}

    row = {"case": "bam+ssmax", "impl": "mosaic_gpu", "pass": "fwd", **dict(zip("BTHD", shape, strict=True))}
    return compiled_items([(row | {"dtype": "bfloat16"}, lambda z: run(z)[0], (x,), complete, None)])


# ---- Decode ----

# name: (B, S, H, Hkv, D, tokens, what is added, share of the slots in use)
DECODE: dict[str, tuple[int, int, int, int, int, int, str, float]] = {
    "plain": (1, 32768, 16, 16, 64, 1, "", 1.0),
    "bam+ssmax, cache": (1, 32768, 16, 16, 64, 1, "bam cache", 1.0),
    "bam+ssmax+fox, cache": (1, 32768, 16, 16, 64, 1, "bam cache gates", 1.0),
    "bam+ssmax, cache, 4 tokens": (1, 32768, 16, 16, 64, 4, "bam cache", 1.0),
    "bam+ssmax, cache, 32 heads on 8": (1, 32768, 32, 8, 128, 1, "bam cache", 1.0),
    "bam+ssmax, cache, 4 rows, a quarter in use": (4, 131072, 16, 16, 64, 1, "bam cache", 0.25),
    "bam+ssmax, cache, 131k": (1, 131072, 16, 16, 64, 1, "bam cache", 1.0),
    "bam+ssmax, cache, 1M": (1, 1048576, 16, 16, 64, 1, "bam cache", 1.0),
}
CACHES = 2**30  # bytes of different caches that one measurement goes through, far beyond the L2


def decode_job(name: str, implementation: str | None = None) -> Job:
    """As many attention layers in a row, each with a cache of its own, as make up CACHES bytes."""
    batch, slots, heads, kv_heads, dim, tokens, added, share = DECODE[name]
    layers = max(1, CACHES // (4 * batch * slots * kv_heads * dim))
    key = lambda n: jax.random.fold_in(jax.random.key(0), n)
    normal = lambda n, *shape: jax.random.normal(key(n), shape, jnp.bfloat16)
    used = int(slots * share)
    x: dict[str, Any] = {"q": normal(0, batch, tokens, heads, dim)}
    x["kv"] = [normal(n + 1, batch, slots, kv_heads, dim) for n in range(2 * layers)]
    x["params"] = {"alpha": jnp.full(heads, -3.0), "beta": jnp.full(heads, 0.5)}
    x["sharpness"] = jnp.full((batch, tokens, heads), 1.5)
    slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
    x["ids"] = (jnp.zeros((batch, tokens), jnp.int32), jnp.where(slot < used, 0, -1))
    x["positions"] = (jnp.broadcast_to(jnp.arange(used - tokens, used, dtype=jnp.int32), (batch, tokens)), slot)
    x["gates"] = (jnp.full((batch, tokens, heads), -1e-4 * used), -1e-4 * jnp.ones((batch, slots, heads)).cumsum(1))

    def run(x: dict[str, Any]) -> Array:
        options: dict[str, Any] = {}
        if "bam" in added:
            options |= {"prior": DistancePrior(x["params"], ggd), "sharpness": x["sharpness"]}
        if "cache" in added:
            options |= {"segment_ids": x["ids"], "positions": x["positions"][0], "kv_positions": x["positions"][1]}
        if "gates" in added:
            options["log_gates"] = x["gates"]
        q = x["q"]
        for k, v in zip(x["kv"][::2], x["kv"][1::2], strict=True):
            q = attention(q, k, v, implementation=implementation, **options)
        return q

    def complete(executable: Any, args: Any) -> dict[str, Any]:
        times = {n: t / layers for n, t in measure(executable, args).items()}
        read = 4 * batch * used * kv_heads * dim
        return times | {"read_bytes": read, "bandwidth": read / times["ms"] * 1e3}

    row = {"case": name, "impl": implementation or "triton_decode", "pass": "decode", "B": batch, "T": tokens}
    row |= {"S": slots, "H": heads, "Hkv": kv_heads, "D": dim, "dtype": "bfloat16", "layers": layers}
    return row, run, (x,), complete, None


def copy_job() -> Job:
    x = jnp.arange(2**29, dtype=jnp.int32)

    def complete(executable: Any, args: Any) -> dict[str, Any]:
        times = measure(executable, args)
        return times | {"read_bytes": x.nbytes, "bandwidth": 2 * x.nbytes / times["ms"] * 1e3}

    return (
        {"case": "copy of 2 GiB", "impl": "xla", "pass": "copy", "dtype": "int32"},
        lambda x: x + 1,
        (x,),
        complete,
        None,
    )


def decode_items() -> list[Item]:
    return compiled_items([copy_job(), *map(decode_job, DECODE), decode_job("bam+ssmax, cache", "xla")])


PARTS: dict[str, Callable[[], Any]] = {
    **{f"speed-{n}": partial(speed_items, n) for n in range(len(SPEED_SHAPES))},
    **{f"sparse-{n}": partial(speed_items, n, SPARSE_CASES) for n in range(len(SPEED_SHAPES))},
    "portable": portable_items,
    "decode": decode_items,
    "long": long_items,
    **{f"checks-{n}": partial(check_items, n) for n in range(CHECKERS)},
}
