"""What the GPU benchmark does, in parts that prepare side by side, each in a process of its own (see bench.py).

A part compiles, says READY, waits for a line on stdin, and then has the GPU for itself: JSON rows on stdout.

    python -m kernels.path.bench_parts PART FOLDER      PART: speed:B,T,H,D, decode, oracle:N or checks:N
"""

import gzip
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention.api import attention
from kernels.path import bench_cases as cases
from kernels.path.bench_cases import CHECKS, DECODE, Case

Row = dict[str, Any]
CASES = ("path", "path-fox", "plain")
DECODE_LENGTHS = (32768, 65536)
CHECK_PARTS = 3  # processes that the checks are dealt out to
PROFILED = 3  # runs


def relative_rms(got: Any, want: Any) -> float:
    """√(Σ (got − want)² / Σ want²) in float64."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2) / max(np.mean(want**2), 1e-300)))


def flat(tree: Any) -> dict[str, Any]:
    """Gradients by name, those of the prior under their own."""
    return {f"d{jax.tree_util.keystr(path[-1:])[2:-2]}": x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def sized(shape: tuple[int, ...]) -> Row:
    """A shape as fields of a row."""
    return dict(zip("BTHD", shape, strict=True))


def timed(run: Callable[..., Any], *arrays: Any, repeats: int = 7, batch: int = 6) -> Row:
    """Median, least and greatest time of a call in ms, over batches of calls."""
    jax.block_until_ready(run(*arrays))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(batch):
            out = run(*arrays)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / batch * 1e3)
    times.sort()
    return {"ms": times[repeats // 2], "ms_min": times[0], "ms_max": times[-1]}


# ---- Speed ----


def inputs(case: Case) -> tuple[Any, jax.Array]:
    """(arrays, do) for times."""
    keys = jax.random.split(jax.random.key(0), 7)
    shape = case.shape
    arrays: Any = {n: jax.random.normal(key, shape, jnp.bfloat16) for n, key in zip("qkv", keys, strict=False)}
    if case.name != "plain":
        w = jax.random.normal(keys[3], shape)
        arrays["w"] = w / jnp.linalg.norm(w, axis=-1, keepdims=True)
        arrays["beta"] = jax.random.uniform(keys[4], shape[:3], jnp.float32, 1.5, 2)
    if case.gates:
        arrays["gates"] = jnp.log(jax.random.uniform(keys[5], shape[:3], jnp.float32, 0.95, 1))
    return arrays, jax.random.normal(keys[6], shape, jnp.bfloat16)


def function(case: Case) -> Callable[[Any], Any]:
    if case.name == "plain":
        return lambda a: (attention(a["q"], a["k"], a["v"]),)
    return lambda a: cases.attend(a, None, "mosaic_gpu", scale_gates=case.gates)


def speed(case: Case, which: str, profiled: bool) -> Callable[[], list[Row]]:
    """Compiles one pass of path, path-fox (gates inside the scale, as FLA has them) or plain attention."""
    draw = jax.jit(lambda: inputs(case)[: 1 if which == "fwd" else 2])
    run = function(case)
    passed = run if which == "fwd" else cases.with_gradients(run)
    made = jax.jit(passed).lower(*jax.eval_shape(draw)).compile()
    drawn = draw.lower().compile()
    memory: Any = made.memory_analysis()
    batch, length, heads, dim = case.shape
    flops = 2 * batch * heads * length**2 * dim * (1 if which == "fwd" else 3.5)

    def measure() -> list[Row]:
        given = drawn()
        row: Row = {"case": case.name, "impl": "mosaic_gpu", "pass": which} | sized(case.shape)
        row |= {"dtype": "bfloat16"} | timed(made, *given)
        row["tflops"] = flops / row["ms"] / 1e9
        row["memory_bytes"] = memory.temp_size_in_bytes + memory.output_size_in_bytes
        if not profiled:
            return [row]
        spent = profile(lambda: jax.block_until_ready(made(*given)))
        return [row, {"case": case.name, "impl": "mosaic_gpu", "pass": f"{which} kernels"} | sized(case.shape) | spent]

    return measure


def profile(run: Callable[[], Any]) -> Row:
    """{"kernels": {name: [launches, ms]} per run, by XLA's names without their numbers}."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for _ in range(PROFILED):
                run()
        found = sorted(Path(folder).rglob("perfetto_trace.json.gz"))
        if not found:
            return {"kernels": {}}
        with gzip.open(found[0], "rt", encoding="utf-8") as file:
            trace = json.load(file)
    return {"kernels": kernels_of(trace["traceEvents"] if isinstance(trace, dict) else trace)}


def kernels_of(events: list[Row]) -> dict[str, list[float]]:
    """Launches and ms per run of every kernel in a Perfetto trace."""
    named = [e for e in events if e.get("ph") == "M" and e.get("name") == "thread_name"]
    streams = {(e.get("pid"), e.get("tid")) for e in named if "Stream" in e["args"]["name"]}
    total: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.get("ph") == "X" and (event.get("pid"), event.get("tid")) in streams:
            entry = total[event["name"].rstrip("0123456789_")]
            entry[0] += 1 / PROFILED
            entry[1] += event["dur"] / 1e3 / PROFILED
    return dict(sorted(total.items(), key=lambda item: -item[1][1]))


def side_by_side(jobs: list[Callable[[], Callable[[], list[Row]]]]) -> list[Callable[[], list[Row]]]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(attempt, jobs))


def speed_part(shape: tuple[int, int, int, int]) -> list[Callable[[], list[Row]]]:
    jobs: list[Any] = []
    for name in CASES:
        case = Case(name, shape, gates=name == "path-fox")
        jobs += [partial(speed, case, which, (name, which) == ("path", "fwd_bwd")) for which in ("fwd_bwd", "fwd")]
    return side_by_side(jobs)


# ---- Decode ----


def decode(length: int, lazy: bool, implementation: str | None = None) -> Callable[[], list[Row]]:
    """implementation: of the lazy steps' attention to the cache."""
    draw = jax.jit(partial(cases.decode_inputs, length))
    made = jax.jit(cases.decode(lazy, length, implementation)).lower(*jax.eval_shape(draw)).compile()
    drawn = draw.lower().compile()
    split = "__gpu$xla.gpu.triton" in str(made.as_text())  # the only kernels of ours that a step can have

    def measure() -> list[Row]:
        cache, new = drawn()
        first = made(cache, new)[0]
        row: Row = {"case": "lazy" if lazy else "rewritten", "impl": "triton_decode" if split else "xla"}
        row |= {"pass": "decode", "B": DECODE["B"], "T": length, "H": DECODE["H"], "D": DECODE["D"]}
        row |= {"dtype": "bfloat16"} | timed(made, cache, new, repeats=5, batch=1)
        row["tokens_per_s"] = DECODE["B"] * DECODE["steps"] / row["ms"] * 1e3
        return [row | {"output_rms": float(jnp.sqrt(jnp.mean(first.astype(jnp.float32) ** 2)))}]

    return measure


def decode_part() -> list[Callable[[], list[Row]]]:
    ways: tuple[tuple[Any, ...], ...] = ((True, "triton_decode"), (True, "xla"), (False,))
    return side_by_side([partial(decode, length, *way) for length in DECODE_LENGTHS for way in ways])


# ---- Checks ----


def file_of(folder: Path, case: Case) -> Path:
    return folder / f"{CHECKS.index(case)}.npz"


def cotangent(case: Case) -> jax.Array:
    """do, uniform, with the values that the case's dtype can hold."""
    return jnp.asarray(np.random.default_rng(1).uniform(size=case.shape), case.dtype).astype(jnp.float32)


def oracle(case: Case, folder: Path) -> None:
    """Writes o and all gradients in float64, computed on CPU by the blockwise backend."""
    arrays, ids, do = cases.draw(case), cases.packed(case), cotangent(case)
    exact = cases.with_gradients(lambda a: cases.attend(a, ids, "xla", scale_gates=case.gates))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (arrays, do))
        o, grads = jax.jit(exact)(*wide)
    path = file_of(folder, case)
    made: Any = {"o": o} | flat(grads)
    np.savez(path.with_suffix(".part.npz"), **made)
    path.with_suffix(".part.npz").rename(path)


def check(case: Case, folder: Path) -> Callable[[], list[Row]]:
    arrays, ids, do = cases.draw(case), cases.packed(case), cotangent(case)
    ours = cases.with_gradients(lambda a: cases.attend(a, ids, "mosaic_gpu", scale_gates=case.gates))
    got = jax.jit(ours).lower(arrays, do).compile()

    def run() -> list[Row]:
        first, second = got(arrays, do), got(arrays, do)
        same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
        want = wait_for(file_of(folder, case))
        error = {n: relative_rms(x, want[n]) for n, x in ({"o": first[0]} | flat(first[1])).items()}
        row: Row = {"case": case.name, "impl": "mosaic_gpu", "pass": "check", "dtype": case.dtype}
        return [row | sized(case.shape) | {"error": error, "same_bits": same}]

    return run


def wait_for(path: Path, seconds: float = 200) -> Any:
    """The arrays of an oracle's file."""
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no oracle after {seconds} s")
        time.sleep(0.2)
    return np.load(path)


def check_part(number: int, folder: Path) -> list[Callable[[], list[Row]]]:
    return side_by_side([partial(check, case, folder) for case in CHECKS[number::CHECK_PARTS]])


# ---- A part's process ----


def attempt(make: Callable[[], Callable[[], list[Row]]]) -> Callable[[], list[Row]]:
    """`make`, with a row that says what went wrong instead of an exception."""
    words = f"{getattr(make, 'func', make).__name__} {getattr(make, 'args', ())}"

    def failed(problem: Exception) -> list[Row]:
        return [{"case": words[:200], "failed": f"{type(problem).__name__}: {problem}"[:300]}]

    try:
        run = make()
    except Exception as problem:
        rows = failed(problem)
        return lambda: rows

    def guarded() -> list[Row]:
        try:
            return run()
        except Exception as problem:
            return failed(problem)

    return guarded


def main() -> None:
    part, folder = sys.argv[1], Path(sys.argv[2])
    kind, _, rest = part.partition(":")
    began = time.perf_counter()
    if kind == "oracle":
        for case in CHECKS[int(rest) :: CHECK_PARTS]:
            oracle(case, folder)
        return
    if kind == "speed":
        batch, length, heads, dim = map(int, rest.split(","))
        runs = speed_part((batch, length, heads, dim))
    else:
        runs = decode_part() if kind == "decode" else check_part(int(rest), folder)
    print(json.dumps({"part": part, "prepared_s": round(time.perf_counter() - began, 1)}), flush=True)
    print("READY", flush=True)
    sys.stdin.readline()
    for run in runs:
        for row in run():
            print(json.dumps(row), flush=True)
    sys.stdout.flush()
    os._exit(0)  # without waiting for what a profiler or a compiler still has running


if __name__ == "__main__":
    main()
