"""Checks and times PaTH attention on this machine's GPU and writes results.json: one call, under 8 minutes.

    python -m kernels.path.bench [--out FILE] [--commit HASH] [--parts speed,checks]    measure
    python -m kernels.path.bench --table                         write the tables of docs/path.md

Errors are relative RMS against the blockwise backend in float64 (which the tests compare with the definition), on the
same inputs. FLA's kernels (flash-linear-attention) and our own attention without transport run in the same call; FLA is
skipped, and the table says so, where it is not installed. Times are medians of batches of runs on random inputs.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention.api import attention
from kernels.attention.bench import environment
from kernels.path import bench_cases as cases
from kernels.path.bench_cases import CHECKS, DECODE, Case
from kernels.path.bench_tables import DOCS, RESULTS, tables
from kernels.path.shapes import BENCHMARK

Row = dict[str, Any]
SHAPES = [(s.batch, s.length, s.heads, s.head_dim) for s in BENCHMARK.values()]
DECODE_LENGTHS = (32768, 65536)
FLA_SECONDS = 240  # that FLA may take to warm up
COMPILERS = 16
PARTS = ("speed", "checks")
# The kernels hold no product that XLA could tune; trying out all of those of the float64 programs takes minutes.
COMPILE: Any = {"xla_gpu_autotune_level": 0}


def relative_rms(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2) / max(np.mean(want**2), 1e-300)))


def flat(tree: Any) -> dict[str, Any]:
    """Gradients by name, those of the prior under their own."""
    return {f"d{jax.tree_util.keystr(path[-1:])[2:-2]}": x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def check(case: Case) -> Callable[[], Row]:
    """Compiles; the result runs it twice and compares with float64."""
    arrays, ids = cases.draw(case), cases.packed(case)
    do = jax.random.uniform(jax.random.key(1), case.shape)
    ours = cases.with_gradients(lambda a: cases.attend(a, ids, "mosaic_gpu", scale_gates=case.gates))
    exact = cases.with_gradients(lambda a: cases.attend(a, ids, "xla", scale_gates=case.gates))
    got = jax.jit(ours).lower(arrays, do).compile(COMPILE)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (arrays, do))
        want = jax.jit(exact).lower(*wide).compile(COMPILE)

    def run() -> Row:
        first, second = got(arrays, do), got(arrays, do)
        with jax.enable_x64(True):
            o, grads = jax.tree.map(np.asarray, want(*wide))
        same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
        error = {"o": relative_rms(first[0], o)}
        error |= {n: relative_rms(x, flat(grads)[n]) for n, x in flat(first[1]).items()}
        row: Row = {"case": case.name, "impl": "mosaic_gpu", "pass": "check", "dtype": case.dtype}
        return row | dict(zip("BTHD", case.shape, strict=True)) | {"error": error, "same_bits": same}

    return run


def timed(run: Callable[..., Any], *arrays: Any, repeats: int = 7, batch: int = 6) -> Row:
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


def speed(shape: tuple[int, int, int, int], name: str, which: str) -> Callable[[], Row]:
    """Compiles one pass of one case: path, path-fox (gates inside the scale, as FLA has them), or plain attention."""
    case = Case(name, shape, gates=name == "path-fox")
    batch, length, heads, dim = shape
    keys = jax.random.split(jax.random.key(0), 7)
    arrays: Any = {n: jax.random.normal(key, shape, jnp.bfloat16) for n, key in zip("qkv", keys, strict=False)}
    run: Any = lambda a: (attention(a["q"], a["k"], a["v"]),)
    if name != "plain":
        w = jax.random.normal(keys[3], shape)
        arrays["w"] = w / jnp.linalg.norm(w, axis=-1, keepdims=True)
        arrays["beta"] = jax.random.uniform(keys[4], shape[:3], jnp.float32, 1.5, 2)
        if case.gates:
            arrays["gates"] = jnp.log(jax.random.uniform(keys[5], shape[:3], jnp.float32, 0.95, 1))
        run = lambda a: cases.attend(a, None, "mosaic_gpu", scale_gates=case.gates)
    do = jax.random.normal(keys[6], shape, jnp.bfloat16)
    inputs = (arrays,) if which == "fwd" else (arrays, do)
    made = jax.jit(run if which == "fwd" else cases.with_gradients(run)).lower(*inputs).compile(COMPILE)
    memory: Any = made.memory_analysis()
    flops = 2 * batch * heads * length**2 * dim * (1 if which == "fwd" else 3.5)

    def measure() -> Row:
        row: Row = {"case": name, "impl": "mosaic_gpu", "pass": which, "B": batch, "T": length, "H": heads, "D": dim}
        row |= {"dtype": "bfloat16"} | timed(made, *inputs)
        row["tflops"] = flops / row["ms"] / 1e9
        row["memory_bytes"] = memory.temp_size_in_bytes + memory.output_size_in_bytes
        return row

    return measure


def decode(length: int, lazy: bool) -> Callable[[], Row]:
    cache, new = cases.decode_inputs(length)
    made = jax.jit(cases.decode(lazy, length)).lower(cache, new).compile(COMPILE)

    def measure() -> Row:
        first = made(cache, new)[0]
        row: Row = {"case": "lazy" if lazy else "rewritten", "impl": "xla" if lazy else "attention", "pass": "decode"}
        row |= {"B": DECODE["B"], "T": length, "H": DECODE["H"], "D": DECODE["D"], "dtype": "bfloat16"}
        row |= timed(made, cache, new, repeats=5, batch=1)
        row["tokens_per_s"] = DECODE["B"] * DECODE["steps"] / row["ms"] * 1e3
        return row | {"output_rms": float(jnp.sqrt(jnp.mean(first.astype(jnp.float32) ** 2)))}

    return measure


def start_fla() -> Any:
    shapes = [",".join(map(str, shape)) for shape in SHAPES]
    command = [sys.executable, "-m", "kernels.path.bench_fla", *shapes]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish_fla(process: Any, ready: "Future[list[str]]") -> list[Row]:
    """Rows of FLA's process, its times taken now."""
    lines = ready.result(timeout=FLA_SECONDS)
    if process.poll() is None:
        process.stdin.write("go\n")
        process.stdin.flush()
    rows = [json.loads(line) for line in [*lines, *process.stdout] if line.startswith("{")]
    for row in rows:
        if "shape" in row:
            row |= dict(zip("BTHD", row.pop("shape"), strict=True))
    return rows


def until_ready(process: Any) -> list[str]:
    lines = []
    for line in process.stdout:
        if line.strip() == "ready":
            break
        lines.append(line)
    return lines


def measured(job: "Future[Callable[[], Row]]") -> Row:
    return job.result()()


def attempt(label: str, make: Callable[[], Row]) -> Row:
    try:
        row = make()
    except Exception as problem:
        row = {"case": label, "failed": f"{type(problem).__name__}: {problem}"[:300]}
    print(json.dumps(row), flush=True)
    return row


def speed_jobs() -> dict[str, Callable[[], Callable[[], Row]]]:
    """What is timed, by label: functions that compile."""
    jobs: dict[str, Callable[[], Callable[[], Row]]] = {}
    for name in ("path", "plain", "path-fox"):
        for shape in SHAPES:
            for which in ("fwd_bwd", "fwd"):
                jobs[f"{name} {which} {shape}"] = partial(speed, shape, name, which)
    for length in DECODE_LENGTHS:
        for lazy in (True, False):
            jobs[f"decode {length} {lazy}"] = partial(decode, length, lazy)
    return jobs


def run_all(out: Path, commit: str | None, parts: list[str], compile_seconds: float) -> bool:
    """Times first, ours and FLA's, then the checks; everything so far is written after each row. False: a failure."""
    began = time.perf_counter()
    rows: list[Row] = []

    def run(jobs: dict[str, Callable[[], Callable[[], Row]]]) -> None:
        """Compile side by side, then run one after the other."""
        pool = ThreadPoolExecutor(COMPILERS)
        made = {label: pool.submit(job) for label, job in jobs.items()}
        wait(made.values(), timeout=compile_seconds)
        print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
        for label, job in made.items():
            late = not job.done() and f"not compiled within {compile_seconds} s"
            rows.append({"case": label, "failed": late} if late else attempt(label, partial(measured, job)))
            write(out, commit, rows, time.perf_counter() - began)
        pool.shutdown(wait=False, cancel_futures=True)

    if "speed" in parts:
        fla = start_fla()
        with ThreadPoolExecutor(1) as waiting:
            ready = waiting.submit(until_ready, fla)
            run(speed_jobs())
            rows += finish_fla(fla, ready)
        add_ratios(rows)
        write(out, commit, rows, time.perf_counter() - began)
    if "checks" in parts:
        run({case.name: partial(check, case) for case in CHECKS})
    return not any("failed" in row for row in rows)


def write(out: Path, commit: str | None, rows: list[Row], seconds: float) -> None:
    env = environment(commit) | {"seconds": round(seconds)}
    out.write_text(json.dumps({"env": env, "rows": rows}, indent=1) + "\n")


def add_ratios(rows: list[Row]) -> None:
    """Ratios of the same shape and pass: FLA's time over ours, our plain attention's over ours, rewritten over lazy."""
    key = lambda row: tuple(row.get(n) for n in ("pass", "B", "T", "H", "D"))
    ms = {(row.get("impl"), row.get("case"), *key(row)): row["ms"] for row in rows if "ms" in row}
    for row in rows:
        if row.get("impl") == "mosaic_gpu" and row.get("case") in ("path", "path-fox") and "ms" in row:
            others: dict[str, tuple[str, Any]] = {"fla": ("fla", row["case"]), "plain": ("mosaic_gpu", "plain")}
            row["ratio"] = {
                n: ms[(*who, *key(row))] / row["ms"] for n, who in others.items() if (*who, *key(row)) in ms
            }
        if row.get("case") == "lazy" and "ms" in row and ("attention", "rewritten", *key(row)) in ms:
            row["ratio"] = {"rewritten": ms["attention", "rewritten", *key(row)] / row["ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--compile-seconds", type=float, default=200, help="what is not compiled then is left out")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    parser.add_argument("--table", action="store_true", help="write the tables of docs/path.md from results.json")
    args = parser.parse_args()
    if not args.table:
        parts = args.parts.split(",")
        if unknown := set(parts) - set(PARTS):
            parser.error(f"--parts {args.parts}: {', '.join(sorted(unknown))} is not one of {', '.join(PARTS)}")
        done = run_all(args.out, args.commit, parts, args.compile_seconds)
        sys.stdout.flush()
        os._exit(0 if done else 1)  # compilations that came too late are left behind
    before, rest = DOCS.read_text().split("<!-- results -->\n")
    after = rest.split("\n<!-- end of results -->")[1]
    DOCS.write_text(f"{before}<!-- results -->\n{tables()}\n<!-- end of results -->{after}")


if __name__ == "__main__":
    main()
