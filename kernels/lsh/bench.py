"""Checks and times LSH attention on this machine's GPU and writes results.json: one call, under 3 minutes.

    python -m kernels.lsh.bench [--out FILE] [--commit HASH]     measure
    python -m kernels.lsh.bench --parts tune --out FILE          times of candidate tiles, each kernel alone
    python -m kernels.lsh.bench --table                          write the tables of docs/lsh.md

Compared with exact ALiBi of kernels.attention over all keys, and within a window that reaches as far as the grids do:
one window for all heads, the longest block of any, or one per head in a call of its own. bfloat16, one row of 8 heads
with ALiBi's slopes 1/2 … 1/256. Parts run in processes of their own: they compile and check side by side, then take
their times, one at a time. A time is that of one attention in a program that repeats it, median over draws of
the grids. Errors are relative RMS against the dense definition in float64.
"""

import argparse
import datetime
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels.attention.bench import environment, need_gpu

RESULTS = Path(__file__).with_name("results.json")
DOCS = Path(__file__).parents[2] / "docs" / "lsh.md"
TIMED = ("times", "tune")  # parts that do


class Part:
    """A process of one part, which prints its rows as JSON; one that times says READY first, and waits for a line."""

    def __init__(self, name: str, folder: Path, done: Path | None, record: Callable[[dict[str, Any]], None]) -> None:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "kernels.lsh.bench",
            "--part",
            name,
            "--lock",
            str(folder / "lock"),
        ]
        command += ["--except", str(done)] if done else []
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the processes share the GPU's memory
        env["XLA_FLAGS"] = env.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
        self.name, self.record = name, record
        self.ready, self.done = threading.Event(), threading.Event()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.record(json.loads(line))
                print(line[:300].rstrip(), flush=True)
            elif line.strip() == "READY":
                self.ready.set()
        self.ready.set()  # also when it died
        self.done.set()

    def go(self) -> None:
        assert self.process.stdin is not None
        if not self.done.is_set():
            self.process.stdin.write("go\n")
            self.process.stdin.flush()


def run_all(out: Path, commit: str | None, names: list[str], limit: float, missing: bool) -> int:
    """Every part: checks while the timings compile, then the timings, one at a time; the number of failures.

    A row takes the place of the one that `out` has of the same call; `missing`: such calls are not made.
    """
    begin = time.time()
    env = environment(commit)
    run = f"{env['date']} {datetime.datetime.now():%H:%M}"
    before = json.loads(out.read_text()) if out.exists() else {"runs": {}, "rows": []}
    mine: list[dict[str, Any]] = []
    turn = threading.Lock()

    def record(row: dict[str, Any]) -> None:  # at once: a run that is stopped keeps what it has
        with turn:
            mine.append(row | {"run": run})
            write_whole(out, merged(before, mine, run, env))

    left = lambda share: max(0.0, begin + share * limit - time.time())
    with tempfile.TemporaryDirectory() as folder:
        done = Path(shutil.copy(out, Path(folder) / "done.json")) if missing and out.exists() else None
        parts = [Part(name, Path(folder), done, record) for name in names]
        for part in parts:  # compiling beside a timing would delay its launches
            (part.ready if part.name.startswith(TIMED) else part.done).wait(left(0.75))
        print(
            f"{time.time() - begin:6.1f}s compiled: {[part.name for part in parts if part.ready.is_set()]}", flush=True
        )
        for part in parts:
            part.go()
        for part in parts:
            part.done.wait(left(1.0))
        late = [part.name for part in parts if not part.done.is_set()]
        for part in parts:
            part.process.kill()
            part.process.wait()
    failures = sum("failed" in row or not row.get("passed", True) for row in mine)
    print(f"{time.time() - begin:6.1f}s done, {len(mine)} rows, {failures} failures, out of time: {late}")
    return failures + len(late)


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Which call a row is of."""
    return tuple(
        row.get(n) for n in ("case", "impl", "pass", "T", "tiles", "H", "Hkv", "D", "dtype", "causal", "documents")
    )


def merged(before: dict[str, Any], rows: list[dict[str, Any]], run: str, env: dict[str, Any]) -> dict[str, Any]:
    """The report with `rows` in place of older ones of the same calls; every row names its run."""
    again = {key_of(row) for row in rows}
    kept = [row for row in before["rows"] if key_of(row) not in again]
    runs = {name: of for name, of in before["runs"].items() if any(row["run"] == name for row in kept)}
    return {"runs": runs | {run: env}, "rows": kept + rows}


def write_whole(out: Path, report: dict[str, Any]) -> None:
    """Never half a file."""
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(partial, out)


def run_part(name: str, lock: Path, done: Path | None) -> None:
    """The process of one part. What takes times holds the lock meanwhile."""
    from kernels.lsh.bench_parts import PARTS, Compiling, words

    have = {key_of(row) for row in json.loads(done.read_text())["rows"]} if done and done.exists() else set()
    items = PARTS[name](lambda row: key_of(row) not in have)
    if isinstance(items, Compiling):
        threading.Thread(target=_announce, args=(items,), daemon=True).start()
        sys.stdin.readline()
    for row, finish in items:
        if finish is not None:
            with lock.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                try:
                    row |= finish()
                except Exception as problem:
                    row |= {"failed": words(problem)}
        print(json.dumps(row), flush=True)


def _announce(items: Any) -> None:
    items.wait()
    print("READY", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--commit", help="recorded in the results")
    parser.add_argument("--limit", type=float, default=170, help="seconds for everything")
    parser.add_argument("--parts", default="checks,far,times", help="which, by how their names begin")
    parser.add_argument("--table", action="store_true", help="put the committed results into docs/lsh.md and stop")
    parser.add_argument("--missing", action="store_true", help="only what the results do not have yet")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--except", type=Path, dest="done", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args.part, args.lock, args.done)
    elif args.table:
        from kernels.lsh.bench_tables import write_tables

        write_tables(DOCS)
    else:
        from kernels.lsh.bench_parts import PARTS

        need_gpu(parser)
        names = [name for name in PARTS if name.split()[0] in args.parts.split(",")]
        raise SystemExit(1 if run_all(args.out, args.commit, names, args.limit, args.missing) else 0)


if __name__ == "__main__":
    main()
