"""Checks and times LSH attention on this machine's GPU and writes results.json: one call, under 3 minutes.

    python -m kernels.lsh.bench [--out FILE] [--commit HASH]     measure
    python -m kernels.lsh.bench --parts tune --out FILE          times of candidate tiles, each kernel alone
    python -m kernels.lsh.bench --table                          write the tables of docs/lsh.md

Compared with exact ALiBi of kernels.attention over all keys, and within a window that reaches as far as the grids do:
one window for all heads, the longest block of any, or one per head in a call of its own. bfloat16, one row of 8 heads
with ALiBi's slopes 1/2 … 1/256. Parts run in processes of their own: they compile and check side by side, wait, and
take their times one after the other. A time is that of one attention in a program that repeats it, median over draws of
the grids. Errors are relative RMS against the dense definition in float64.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kernels.attention.bench import environment

RESULTS = Path(__file__).with_name("results.json")
DOCS = Path(__file__).parents[2] / "docs" / "lsh.md"


class Part:
    """A process that prepares, says READY, waits for a line and takes its times; its rows so far."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "kernels.lsh.bench", "--part", name]
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the processes share the GPU's memory
        env["XLA_FLAGS"] = env.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
        self.rows: list[dict[str, Any]] = []
        self.ready, self.done = threading.Event(), threading.Event()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.rows.append(json.loads(line))
                print(line[:400], end="", flush=True)
            elif line.strip() in ("READY", "DONE"):
                (self.ready if line.strip() == "READY" else self.done).set()
        self.ready.set()  # also when it died
        self.done.set()

    def finish(self, seconds: float) -> None:
        """Let it take its times."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except OSError:
            return
        self.done.wait(seconds)


def run_all(out: Path, commit: str | None, names: list[str], limit: float) -> int:
    """Every part; the number of failures."""
    begin = time.time()
    parts = {name: Part(name) for name in names}
    report = {"env": environment(commit) | {"time": f"{datetime.datetime.now():%H:%M}"}, "rows": []}
    write = lambda: out.write_text(
        json.dumps(report | {"rows": [r for p in parts.values() for r in p.rows]}, indent=1) + "\n"
    )
    left = lambda share: max(0.0, begin + share * limit - time.time())
    for name, part in parts.items():
        part.ready.wait(left(0.7))
        print(f"{time.time() - begin:6.1f}s {name} {'prepared' if part.ready.is_set() else 'is late'}", flush=True)
    for part in sorted(parts.values(), key=lambda part: not part.ready.is_set()):  # the late ones last
        part.ready.wait(left(0.9))
        if part.ready.is_set():
            part.finish(left(1.0))
        part.process.kill()
        part.process.wait()
        write()
    write()
    rows = [row for part in parts.values() for row in part.rows]
    failures = sum("failed" in row or not row.get("passed", True) for row in rows)
    print(f"{time.time() - begin:6.1f}s done, {len(rows)} rows, {failures} failures")
    return failures


def run_part(name: str) -> None:
    """The process of one part: prepare, wait for a line, finish item by item."""
    from kernels.lsh.bench_parts import PARTS, words

    waiting = []
    for row, finish in PARTS[name]():
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--commit", help="recorded in the results")
    parser.add_argument("--limit", type=float, default=170, help="seconds for everything")
    parser.add_argument("--parts", default="checks,far,times", help="which, by how their names begin")
    parser.add_argument("--table", action="store_true", help="put the committed results into docs/lsh.md and stop")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args.part)
    elif args.table:
        from kernels.lsh.bench_tables import write_tables

        write_tables(RESULTS, DOCS)
    else:
        from kernels.lsh.bench_parts import PARTS

        names = [name for name in PARTS if name.split()[0] in args.parts.split(",")]
        raise SystemExit(1 if run_all(args.out, args.commit, names, args.limit) else 0)


if __name__ == "__main__":
    main()
