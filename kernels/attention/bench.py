"""Checks and times the fused attention of this machine's GPU and writes results.json: one call, under 8 minutes.

    python -m kernels.attention.bench [--out FILE] [--commit HASH]     measure
    python -m kernels.attention.bench --table                          write the tables of docs/kernels.md

Errors are relative RMS against the dense reference in float64. Times are medians of repeated runs on random inputs;
`ratio` is the time of cuDNN's causal attention without any prior (`jax.nn.dot_product_attention`) in the same run,
over ours.
FLOPs are counted as 4·B·H·T²·D/2 forward and 3.5 times that forward + backward, in every row.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention.bench_cases import CHECKS, Case, function, ggd, inputs

Array = jax.Array
RESULTS = Path(__file__).with_name("results.json")
DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
SPEED_SHAPES = ((8, 4096, 16, 64), (4, 4096, 16, 128), (1, 32768, 16, 64), (1, 16384, 16, 128))
SPEED_CASES = ("plain", "alibi", "bam+ssmax", "fox", "bam+ssmax, documents of 1024")
LIMIT = 2e-2  # largest relative RMS error that a bfloat16 check may show
PEERS = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cuda-runtime", "numpy")


def with_gradients(f: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """(operands, cotangents) -> (outputs, gradients)."""

    def both(x: Any, cotangents: Any) -> Any:
        out, vjp = jax.vjp(f, x)
        return out, vjp(cotangents)[0]

    return both


def relative_rms(got: Any, want: Any) -> float:
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.array_equal(np.isneginf(a), np.isneginf(b)):
        return float("inf")
    a, b = np.where(np.isneginf(a), 0, a), np.where(np.isneginf(b), 0, b)
    return float(np.sqrt(np.mean((a - b) ** 2)) / max(np.sqrt(np.mean(b**2)), 1e-12))


def check(case: Case, implementation: str) -> dict[str, Any]:
    """Errors of outputs and gradients against float64, and whether two runs give the same bits."""
    x, other, cotangents = inputs(case)
    compiled = jax.jit(with_gradients(function(case, other, implementation))).lower(x, cotangents).compile()
    got, again = compiled(x, cotangents), compiled(x, cotangents)
    same = all(
        np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (got, again)), strict=True)
    )
    with jax.enable_x64(True):
        wide = lambda a: jnp.asarray(np.asarray(a, np.float64))
        run = jax.jit(with_gradients(function(case, other, "reference")))
        want = jax.device_get(run(jax.tree.map(wide, x), jax.tree.map(wide, cotangents)))
    names = {"['q']": "dq", "['k']": "dk", "['v']": "dv", "['sharpness']": "dsharpness", "['log_gates']": "dlog_gates"}
    error = {"o": relative_rms(got[0][0], want[0][0]), "lse": relative_rms(got[0][1], want[0][1])}
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got[1]), jax.tree.leaves(want[1]), strict=True):
        key = jax.tree_util.keystr(path)
        error[names.get(key, "d" + key.split("'")[-2])] = relative_rms(a, b)
    passed = same and all(e < LIMIT for e in judged(case.name, error).values())
    return {"error": error, "deterministic": same, "passed": passed}


def judged(name: str, error: dict[str, float]) -> dict[str, float]:
    """The errors that a check is judged by: relative ones only where there is something to be relative to.

    A single token has probability 1 and gradients 0; priors below −16384 count as that, which shows in the lse of a row
    that sees nothing else.
    """
    if name.startswith("one token"):
        return {n: error[n] for n in ("o", "dv")}
    return {n: e for n, e in error.items() if n != "lse" or "extreme" not in name}


def cudnn(x: dict[str, Any]) -> Array:
    return jax.nn.dot_product_attention(x["q"], x["k"], x["v"], is_causal=True, implementation="cudnn")


def measure(compiled: Any, args: Sequence[Any], repeats: int = 7) -> dict[str, float]:
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


def speed_case(name: str, shape: tuple[int, int, int, int]) -> Case:
    bam = name.startswith("bam")
    prior = "ggd" if bam else "alibi" if name == "alibi" else None
    return Case(name, *shape, prior, 3.0 * bam, name == "fox", documents=1024 * name.endswith("1024"))


@dataclass(frozen=True)
class Job:
    """One function to time at one shape."""

    case: str
    impl: str
    which: str
    shape: tuple[int, int, int, int]
    run: Callable[..., Any]
    args: tuple[Any, ...]

    def compile(self) -> Any:
        return jax.jit(self.run).lower(*self.args).compile()


def speed_jobs(shape: tuple[int, int, int, int], implementation: str) -> list[Job]:
    """cuDNN without a prior and every case of ours, forward and forward + backward."""
    jobs = []
    for name in SPEED_CASES:
        case = speed_case(name, shape)
        x, other, (do, _) = inputs(case)
        run = function(case, other, implementation)
        output = lambda z, run=run: run(z)[0]
        jobs.append(Job(name, implementation, "fwd", shape, output, (x,)))
        jobs.append(Job(name, implementation, "fwd_bwd", shape, with_gradients(output), (x, do)))
        if name == "plain":
            jobs.append(Job(name, "cudnn", "fwd", shape, cudnn, (x,)))
            jobs.append(Job(name, "cudnn", "fwd_bwd", shape, with_gradients(cudnn), (x, do)))
    return jobs


def speed_rows(jobs: list[Job], compiled: list[Any], log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Times of the jobs of one shape; `compiled` holds executables or the exceptions that compiling them raised."""
    rows = []
    for job, executable in zip(jobs, compiled, strict=True):
        batch, length, heads, dim = job.shape
        row: dict[str, Any] = {"case": job.case, "impl": job.impl, "pass": job.which}
        row |= {"B": batch, "T": length, "H": heads, "D": dim, "dtype": "bfloat16"}
        try:
            if isinstance(executable, Exception):
                raise executable
            row |= measure(executable, job.args)
            flops = 2 * batch * heads * length**2 * dim * (1 if job.which == "fwd" else 3.5)
            row |= {"tflops": flops / row["ms"] / 1e9, "memory_bytes": memory(executable)}
        except Exception as problem:
            row["failed"] = f"{type(problem).__name__}: {problem}"[:300]
        rows.append(row)
    for row in rows:
        peer = next((r for r in rows if r["impl"] == "cudnn" and r["pass"] == row["pass"] and "ms" in r), None)
        if peer and "ms" in row:
            row["ratio"] = {"cudnn": peer["ms"] / row["ms"]}
        shown = row.get("ratio", row.get("failed"))
        log(f"{row['case']} {row['impl']} {row['pass']} {row['T']}x{row['D']} {row.get('ms')} {shown}")
    return rows


def long_row(implementation: str) -> dict[str, Any]:
    """Forward at T = 524,288: offsets beyond 2^31 bytes. The last 32 rows of head 5 are compared with plain JAX."""
    batch, length, heads, dim = shape = (1, 524288, 16, 64)
    x, other, _ = inputs(speed_case("bam+ssmax", shape))
    run = function(speed_case("bam+ssmax", shape), other, implementation)
    compiled = jax.jit(lambda z: run(z)[0]).lower(x).compile()
    row: dict[str, Any] = {
        "case": "bam+ssmax",
        "impl": implementation,
        "pass": "fwd",
        "B": batch,
        "T": length,
        "H": heads,
        "D": dim,
    }
    row |= {"dtype": "bfloat16", **measure(compiled, (x,), repeats=2), "memory_bytes": memory(compiled)}
    row["tflops"] = 2 * batch * heads * length**2 * dim / row["ms"] / 1e9
    tail, head = 32, 5
    q, k, v = (np.asarray(x[n][0, :, head].astype(jnp.float32), np.float64) for n in ("q", "k", "v"))
    rows = np.arange(length - tail, length)
    d = np.arange(length)[None, :] - rows[:, None]
    with jax.enable_x64(False):
        bias = ggd({n: p[head] for n, p in x["params"].items()}, jnp.asarray(d, jnp.int32))
    logits = (q[rows] @ k.T / np.sqrt(dim) + np.asarray(bias)) * np.asarray(x["sharpness"])[0, rows, head][:, None]
    weights = np.exp(
        np.where(d <= 0, logits - np.max(logits, axis=1, keepdims=True, where=d <= 0, initial=-np.inf), -np.inf)
    )
    want = weights / weights.sum(1, keepdims=True) @ v
    return row | {"error": {"o": relative_rms(compiled(x)[0, rows, head].astype(jnp.float32), want)}}


def environment(commit: str | None) -> dict[str, Any]:
    env: dict[str, Any] = {"date": datetime.date.today().isoformat(), "device": str(jax.devices()[0].device_kind)}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        env["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    env |= {"python": platform.python_version(), "commit": commit}
    for name in PEERS:
        try:
            env[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return env


def attempt(f: Callable[..., Any], *args: Any) -> Any:
    """f(*args), or the exception that it raised."""
    try:
        return f(*args)
    except Exception as problem:
        traceback.print_exc()
        return problem


def run_all(out: Path, commit: str | None, implementation: str = "mosaic_gpu") -> int:
    """Everything, each part guarded so that one failure does not lose the rest. Returns the number of failures."""
    begin = time.time()
    log = lambda text: print(f"{time.time() - begin:6.1f}s {text}", flush=True)
    rows: list[dict[str, Any]] = []
    report = {"env": environment(commit), "rows": rows}
    jobs = [speed_jobs(shape, implementation) for shape in SPEED_SHAPES]
    with ThreadPoolExecutor(16) as pool:  # all compiling first, so that nothing else runs beside the timings
        checks = [pool.submit(attempt, check, case, implementation) for case in CHECKS]
        compiled = [[pool.submit(attempt, job.compile) for job in some] for some in jobs]
        for case, future in zip(CHECKS, checks, strict=True):
            row: dict[str, Any] = {"case": case.name, "impl": implementation, "pass": "check", "B": case.B, "T": case.T}
            row |= {"S": case.S or case.T, "H": case.H, "D": case.D, "dtype": case.dtype}
            result = future.result()
            row |= {"failed": str(result)[:300], "passed": False} if isinstance(result, Exception) else result
            log(f"check {'ok' if row['passed'] else 'BAD'} {case.name} {row.get('error', row.get('failed'))}")
            rows.append(row)
    for some, executables in zip(jobs, compiled, strict=True):
        rows += speed_rows(some, [e.result() for e in executables], log)
        out.write_text(json.dumps(report, indent=1) + "\n")
    last = attempt(long_row, implementation)
    rows.append({"case": "long", "pass": "fwd", "failed": str(last)[:300]} if isinstance(last, Exception) else last)
    log(f"long {rows[-1]}")
    out.write_text(json.dumps(report, indent=1) + "\n")
    failures = sum("failed" in row or not row.get("passed", True) for row in rows)
    log(f"done, {failures} failures")
    return failures


def tables(report: dict[str, Any]) -> str:
    """The measured tables of docs/kernels.md in Markdown."""
    env = report["env"]
    known = [f"{n} {env[n]}" for n in ("device", "driver", "python", "jax", "nvidia-cudnn-cu13", "date") if n in env]
    lines = [
        ", ".join(known) + ".",
        "",
        "| B, T, H, D | case | forward ms | TFLOP/s | ratio | fwd + bwd ms | TFLOP/s | ratio | memory MiB |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    speed = [r for r in report["rows"] if r["pass"] in ("fwd", "fwd_bwd") and "ms" in r]
    for key in dict.fromkeys((r["B"], r["T"], r["H"], r["D"], r["case"], r["impl"]) for r in speed):
        cells = []
        peak = None
        for which in ("fwd", "fwd_bwd"):
            match = [
                r for r in speed if (r["B"], r["T"], r["H"], r["D"], r["case"], r["impl"], r["pass"]) == (*key, which)
            ]
            if match:
                r = match[0]
                ratio = f"{r['ratio']['cudnn']:.2f}" if "ratio" in r else "–"
                cells += [f"{r['ms']:.3f} ({r['ms_min']:.3f}–{r['ms_max']:.3f})", f"{r['tflops']:.0f}", ratio]
                peak = r["memory_bytes"] or peak
            else:
                cells += ["–"] * 3
        label = key[4] if key[5] != "cudnn" else "cuDNN, no prior"
        size = f"{peak / 2**20:.0f}" if peak else "–"
        lines.append(f"| {', '.join(map(str, key[:4]))} | {label} | {' | '.join(cells)} | {size} |")
    lines += ["", "| check | shape | largest error (of) | same bits twice |", "|---|---|---|---|"]
    for r in report["rows"]:
        if r["pass"] == "check" and "error" in r:
            errors = judged(r["case"], r["error"])
            worst = max(errors, key=lambda n: errors[n])
            shape = f"{r['B']}, {r['T']}×{r['S']}, {r['H']}, {r['D']}"
            lines.append(
                f"| {r['case']} | {shape} | {errors[worst]:.1e} ({worst}) | {'yes' if r['deterministic'] else 'no'} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--commit", help="recorded in the results")
    parser.add_argument("--table", action="store_true", help="put the committed results into docs/kernels.md and stop")
    args = parser.parse_args()
    if args.table:
        before, rest = DOCS.read_text().split("<!-- results -->\n")
        after = rest.split("\n<!-- end of results -->")[1]
        block = tables(json.loads(RESULTS.read_text()))
        DOCS.write_text(f"{before}<!-- results -->\n{block}\n<!-- end of results -->{after}")
        return
    raise SystemExit(1 if run_all(args.out, args.commit) else 0)


if __name__ == "__main__":
    main()
