"""Checks and times the fused attention of this machine's GPU and writes results.json: one call, under 8 minutes.

    python -m kernels.attention.bench [--out FILE] [--commit HASH] [--parts decode,long]    measure
    python -m kernels.attention.bench --table                          write the tables of docs/kernels.md

Parts (bench_parts.py, bench_peers.py) run in processes of their own: they compile and check side by side, wait, and
take their times one after the other, so that nothing runs beside a timing. Errors are relative RMS against the dense
reference in float64. Times are medians of repeated runs on random inputs; `ratio` is the time of a peer in the same run
over ours, and is there for cuDNN's causal attention without any prior (`jax.nn.dot_product_attention`) in every row.
FLOPs are counted as 4·B·H·T²·D/2 forward and 3.5 times that forward + backward, in every row.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kernels.attention.bench_peers import SHAPES
from kernels.attention.bench_tables import DOCS, RESULTS, tables

PEER_PARTS = ("torch", *(f"fla-{n}" for n in range(len(SHAPES))), "jax")
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cuda-runtime", "numpy", "torch", "triton"),
    *("fla-core", "flash-linear-attention", "tokamax", "flash-attn3-jax"),
)
# What a row of ours is compared with: (case starts with, implementation and case of the peer, name of the ratio).
RIVALS = (
    ("", "cudnn", "plain", "cudnn"),
    ("", "FlashAttention-2 (torch)", "plain", "flash_attention_2"),
    ("", "FlashAttention-3 (flash-attn3-jax)", "plain", "flash_attention_3"),
    ("", "tokamax", "plain", "tokamax"),
    ("alibi", "FlexAttention", "alibi, fixed", "flex_alibi"),
    ("bam", "FlexAttention", "ggd, trained", "flex_trained"),
    ("fox", "FLA forgetting attention", "fox", "fla"),
)
OURS = ("mosaic_gpu", "pallas_triton")
SETTLE = 2.0  # seconds in which work that is still queued on the GPU ends before anything is timed


def environment(commit: str | None) -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    env: dict[str, Any] = {"date": datetime.date.today().isoformat()}
    if shutil.which("nvidia-smi"):
        name, driver = (
            subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].split(",")
        )
        env |= {"device": name.strip(), "driver": driver.strip()}
    env |= {"python": platform.python_version(), "commit": commit}
    for name in PACKAGES:
        try:
            env[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            env[name] = "not installed"
    return env


class Part:
    """A process that prepares, says READY, waits for a line and takes its times; its rows so far."""

    def __init__(self, name: str, module: str) -> None:
        what = [module, "--part", name]
        if name in PEER_PARTS:
            peer, _, shape = name.partition("-")
            what = ["bench_peers", peer, *([",".join(map(str, SHAPES[int(shape)]))] if shape else [])]
        command = [sys.executable, "-W", "ignore", "-m", f"kernels.attention.{what[0]}", *what[1:]]
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the processes share the GPU's memory
        if name.startswith("checks"):  # nothing there is timed
            env["XLA_FLAGS"] = env.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
        self.rows: list[dict[str, Any]] = []
        self.ready, self.done = threading.Event(), threading.Event()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.rows.append(json.loads(line))
            elif line.strip() in ("READY", "DONE"):
                (self.ready if line.strip() == "READY" else self.done).set()
        self.ready.set()  # also when it died

    def drop_if_late(self) -> None:
        if not self.ready.is_set():
            self._process.kill()
            self._process.wait()

    def finish(self, seconds: float) -> list[dict[str, Any]]:
        """Let it take its times; its rows, and one that says so if it did not get to the end."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            if not self.done.wait(seconds):
                raise TimeoutError(f"not done in {seconds} s, or died")
        except OSError as problem:
            self._process.kill()
            self.rows.append({"case": "part", "impl": "bench", "pass": "part", "failed": str(problem)})
        return self.rows


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Peer ms over our ms, for the same run, shape, pass and dtype."""
    key = lambda r: (r.get("run"), *(r.get(n) for n in "BTHD"), r["pass"], r.get("dtype"))
    timed = [r for r in rows if "ms" in r and r["pass"] in ("fwd", "fwd_bwd")]
    for row in (r for r in timed if r["impl"] in OURS):
        for begins, impl, case, name in RIVALS:
            match = [r for r in timed if r["impl"] == impl and r["case"] == case and key(r) == key(row)]
            if match and row["case"].startswith(begins):
                row.setdefault("ratio", {})[name] = match[0]["ms"] / row["ms"]


def run_parts(names: list[str], module: str, limit: float) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(part, its rows) of every part, once all have prepared or `limit` seconds are over."""
    begin = time.time()
    log = lambda text: print(f"{time.time() - begin:6.1f}s {text}", flush=True)
    parts = {name: Part(name, module) for name in names}
    for name, part in parts.items():
        part.ready.wait(max(0.0, begin + limit - time.time()))
        log(f"{name} {'prepared' if part.ready.is_set() else 'is late'}")
    for part in parts.values():
        part.drop_if_late()  # it would go on using the GPU beside the timings
    time.sleep(SETTLE)
    for name, part in parts.items():
        found = part.finish(60)
        log(f"{name} done, {len(found)} rows")
        yield name, found


def run_all(out: Path, commit: str | None, wanted: list[str] | None, limit: float) -> int:
    """Everything, or the parts that begin with one of `wanted` into the report there is. Returns the failures.

    The checks always run: no time is taken without them.
    """
    from kernels.attention.bench_parts import PARTS

    every = (*PARTS, *PEER_PARTS)
    names = [name for name in every if wanted is None or any(name.startswith(w) for w in (*wanted, "checks"))]
    env = environment(commit)
    run = f"{env['date']} {datetime.datetime.now():%H:%M}"
    fresh: list[dict[str, Any]] = []
    before = json.loads(out.read_text()) if wanted and out.exists() else {"runs": {}, "rows": []}
    for name, found in run_parts(names, "bench", limit):
        fresh += [row | {"part": name, "run": run} for row in found]
        add_ratios(fresh)
        out.write_text(json.dumps(merged(before, fresh, run, env), indent=1) + "\n")
    failures = sum("failed" in row or not row.get("passed", True) for row in fresh)
    print(f"done, {failures} failures")
    return failures


def merged(before: dict[str, Any], rows: list[dict[str, Any]], run: str, env: dict[str, Any]) -> dict[str, Any]:
    """The report with the rows of the parts that ran anew in place of the older ones; every row names its run."""
    again = {row["part"] for row in rows}
    kept = [row for row in before["rows"] if row["part"] not in again]
    runs = {name: of for name, of in before["runs"].items() if any(row["run"] == name for row in kept)}
    return {"env": env, "runs": {**runs, run: env}, "rows": kept + rows}


def run_part(parts: dict[str, Callable[[], Any]], name: str) -> None:
    """The process of one part: prepare, wait for a line, finish item by item."""
    from kernels.attention.bench_parts import words

    waiting = []
    for row, finish in parts[name]():
        if finish is None:
            print(json.dumps(row), flush=True)
        else:
            waiting.append((row, finish))
    print("READY", flush=True)
    sys.stdin.readline()
    for row, finish in waiting:
        try:
            row |= finish()
        except Exception as problem:
            row |= {"failed": words(problem)}
        print(json.dumps(row), flush=True)
    print("DONE", flush=True)


def need_gpu(parser: argparse.ArgumentParser) -> None:
    """End a benchmark where nothing can be timed, before it replaces results of a GPU. JAX is not asked: the process
    that starts the others must not hold a GPU's memory."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not shutil.which("nvidia-smi"):
        parser.error("times are those of an NVIDIA GPU, and here is none (neither /dev/nvidia0 nor nvidia-smi)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--commit", help="recorded in the results")
    parser.add_argument(
        "--parts", help="only the checks and the parts that begin with one of these, separated by commas"
    )
    parser.add_argument("--limit", type=float, default=360, help="seconds until the parts must have prepared")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help="put the committed results into docs/kernels.md and stop")
    args = parser.parse_args()
    if args.part:
        from kernels.attention.bench_parts import PARTS

        run_part(PARTS, args.part)
    elif args.table:
        before, rest = DOCS.read_text().split("<!-- results -->\n")
        after = rest.split("\n<!-- end of results -->")[1]
        block = tables(json.loads(RESULTS.read_text()))
        DOCS.write_text(f"{before}<!-- results -->\n{block}\n<!-- end of results -->{after}")
    else:
        need_gpu(parser)
        wanted = args.parts.split(",") if args.parts else None
        raise SystemExit(1 if run_all(args.out, args.commit, wanted, args.limit) else 0)


if __name__ == "__main__":
    main()
