"""Checks and times PaTH attention on this machine's GPU and writes results.json: one call, under 8 minutes.

    python -m kernels.path.bench [--out FILE] [--commit HASH] [--parts speed,fla,decode,checks]      measure
    python -m kernels.path.bench --table                              write the tables of docs/path.md

All parts compile side by side in processes of their own; then one after the other has the GPU for itself, the others
standing still where times are taken. Errors are relative RMS against the blockwise backend in float64 (which the tests
compare with the definition), on the same inputs. FLA's kernels (flash-linear-attention) and our own attention without
transport run in the same call; FLA is skipped, and the table says so, where it is not installed. Times are medians of
batches of runs on random inputs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from kernels.attention.bench import environment, need_gpu
from kernels.path.bench_parts import CHECK_PARTS
from kernels.path.bench_tables import DOCS, RESULTS, tables
from kernels.path.shapes import BENCHMARK

Row = dict[str, Any]
SHAPES = [(s.batch, s.length, s.heads, s.head_dim) for s in BENCHMARK.values()]
KINDS = ("speed", "fla", "decode", "checks")


def part_names(kinds: list[str]) -> list[str]:
    """The parts in the order of their turn on the GPU."""
    by_shape = lambda kind: [f"{kind}:{','.join(map(str, shape))}" for shape in SHAPES]
    theirs = [f"{name}:{case}" for name in by_shape("fla") for case in ("path", "path-fox")]
    names: list[str] = []
    names += by_shape("speed") if "speed" in kinds else []
    if "checks" in kinds:
        numbers = range(CHECK_PARTS)
        names += [f"oracle:{n}" for n in numbers] + [f"checks:{n}" for n in numbers]
    names += ["decode"] if "decode" in kinds else []
    names += theirs if "fla" in kinds else []
    return names + (["fla:checks"] if "fla" in kinds and "checks" in kinds else [])


class Part:
    """A process that prepares, says READY, waits for a line and then works on the GPU; its rows so far."""

    def __init__(self, name: str, folder: str) -> None:
        module = "bench_fla" if name.startswith("fla") else "bench_parts"
        command = [sys.executable, "-W", "ignore", "-m", f"kernels.path.{module}", name, folder]
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the processes share the GPU's memory
        if name.startswith("oracle"):
            env["JAX_PLATFORMS"] = "cpu"
            command = ["nice", *command]
        self.name, self.began = name, time.monotonic()
        self.rows: list[Row] = []
        self.ready, self.done = threading.Event(), threading.Event()
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=env, **pipes)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                print(line, end="", flush=True)
                row = json.loads(line)
                if "part" not in row:
                    self.rows.append(row)
            elif line.strip() == "READY":
                self.ready.set()
        self.done.set()
        self.ready.set()  # also when it died

    def run(self, until: float, others: "list[Part]") -> None:
        """Its turn, in which the others stand still; what is not ready, or not done, by the time `until` is stopped and
        says so in a row."""
        if self.ready.wait(max(0, until - time.monotonic())):
            for other in others:
                other.pause(True)
            time.sleep(0.2)  # what they have on the GPU ends
            if self._process.poll() is None and self._process.stdin is not None:
                try:
                    self._process.stdin.write("go\n")
                    self._process.stdin.flush()
                except BrokenPipeError:
                    pass  # it died since
            done = self.done.wait(max(0, until - time.monotonic())) and self._process.wait() == 0
            for other in others:
                other.pause(False)
            if done:
                return
        state = f"exit status {self._process.poll()}" if self.done.is_set() else "too late"
        self.stop()
        self.rows.append({"case": self.name, "failed": state})

    def pause(self, paused: bool) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def run_all(out: Path, commit: str | None, kinds: list[str], seconds: float, prepare: float) -> bool:
    """Everything within so many seconds, of which at most `prepare` until all parts are ready and the first is timed;
    all rows so far are written after each part. False: something failed."""
    began, rows = time.monotonic(), []
    until = began + seconds
    with tempfile.TemporaryDirectory() as folder:
        names = part_names(kinds)
        # FLA's processes start first: they take longest to compile.
        started = {name: Part(name, folder) for name in sorted(names, key=lambda name: not name.startswith("fla"))}
        parts = [started[name] for name in names]
        for part in parts:
            if not part.name.startswith("oracle"):
                part.ready.wait(max(0, began + prepare - time.monotonic()))
        print(json.dumps({"part": "all", "prepared_s": round(time.monotonic() - began, 1)}), flush=True)
        for part in parts:
            if not part.name.startswith("oracle"):
                timed = not part.name.startswith(("checks", "fla:checks"))
                part.run(until, [p for p in parts if p is not part] if timed else [])
                rows += part.rows
                add_ratios(rows)
                env = environment(commit) | {"seconds": round(time.monotonic() - began)}
                out.write_text(json.dumps({"env": env, "rows": rows}, indent=1) + "\n")
        for part in parts:
            part.stop()
    return not any("failed" in row for row in rows)


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
        rewritten = [t for (_, case, *rest), t in ms.items() if case == "rewritten" and tuple(rest) == key(row)]
        if row.get("case") == "lazy" and "ms" in row and rewritten:
            row["ratio"] = {"rewritten": rewritten[0] / row["ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--seconds", type=float, default=460, help="what is not done then is left out")
    parser.add_argument("--prepare", type=float, default=300, help="seconds until the first part is timed, at most")
    parser.add_argument("--parts", default=",".join(KINDS), help="some of " + ",".join(KINDS))
    parser.add_argument("--table", action="store_true", help="write the tables of docs/path.md from results.json")
    args = parser.parse_args()
    if args.table and not RESULTS.exists():
        parser.error(f"{RESULTS.name} is not there yet: run the benchmark on a GPU first")
    if not args.table:
        kinds = args.parts.split(",")
        if unknown := set(kinds) - set(KINDS):
            parser.error(f"--parts {args.parts}: {', '.join(sorted(unknown))} is not one of {', '.join(KINDS)}")
        need_gpu(parser)
        sys.exit(0 if run_all(args.out, args.commit, kinds, args.seconds, args.prepare) else 1)
    before, rest = DOCS.read_text().split("<!-- results -->\n")
    after = rest.split("\n<!-- end of results -->")[1]
    DOCS.write_text(f"{before}<!-- results -->\n{tables()}\n<!-- end of results -->{after}")


if __name__ == "__main__":
    main()
