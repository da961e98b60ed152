"""Scaling on the GPUs of one host: train steps and attention on 1, 2, 4, … of them, and losses against one.

    python -m experiments.multi_gpu.run                      every cell that this machine's GPUs allow
    python -m experiments.multi_gpu.run --dry-run --gpus 8   what that would be on a machine with 8
    python -m experiments.multi_gpu.run --cells "train 432m bam+ssmax" attention
    python -m experiments.multi_gpu.run --table              put results.json into docs/scaling.md and stop

All cells compile at once, each in a process of its own that has the GPUs it will need; then each is measured while no
other cell uses its GPUs. A cell that fails leaves a row that says why. Rows are written as they come.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully, file_to_write
from experiments.multi_gpu.cells import COUNTS, SMOKE, Cell, cells
from experiments.studies import read_kept

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
WORKER = (sys.executable, "-W", "ignore", "-m", "experiments.multi_gpu.work")
GAP = 0.3  # seconds between the starts of two processes
TURN = 90.0  # seconds after which a cell that has the GPUs is given up
QUIET_CORES = 16  # of a machine with at least four times as many: cells that are measured have them to themselves


@dataclass
class Job:
    """A cell's process: what it has said so far."""

    cell: Cell
    gpus: tuple[int, ...]
    process: subprocess.Popen[str]
    errors: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    ready: bool = False
    free: bool = False
    over: bool = False
    started: float | None = None

    def __post_init__(self) -> None:
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word = line.strip()
            if word.startswith("{"):
                self.rows.append(json.loads(word))
            elif word == "READY":
                self.ready = True
            elif word == "FREE":
                self.free = True
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                continue  # it died before it read what was written
        self.free = self.over = True

    @property
    def busy(self) -> bool:
        """Do its GPUs belong to it now."""
        return self.started is not None and not self.free

    @property
    def waits(self) -> bool:
        return self.ready and self.started is None and not self.over

    def go(self) -> None:
        self.started = time.monotonic()
        _move(self.process.pid, _cores()[1])
        try:
            assert self.process.stdin is not None
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except OSError:
            self.free = True  # it has died; its errors say why

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def results(self, why: str) -> list[dict[str, Any]]:
        """Its rows, or one that says why there are none."""
        if self.rows:
            return [row for line in self.rows for row in line.get("rows", [line])]
        tail = [line for line in self.errors.read_text(errors="replace").splitlines() if line.strip()][-6:]
        status = self.process.poll()
        said = why or f"exit status {status}: " + " | ".join(tail)[-1500:]
        cell = self.cell
        named = {"case": cell.scheme, "shape": cell.shape, "strategy": cell.strategy, "scaling": cell.scaling}
        return [{"cell": cell.name, "pass": cell.what, **named, "gpus": cell.gpus, "failed": said}]


def _cores() -> tuple[list[int], list[int]]:
    """Cores for cells that prepare, and for those that are measured."""
    every = sorted(os.sched_getaffinity(0))
    if len(every) < 4 * QUIET_CORES:
        return every, every
    return every[:-QUIET_CORES], every[-QUIET_CORES:]


def _move(process: int, cores: Sequence[int]) -> None:
    """Bind every thread of a process to these cores."""
    for task in Path(f"/proc/{process}/task").glob("*"):
        try:
            os.sched_setaffinity(int(task.name), cores)
        except OSError:
            continue  # the thread has ended


def start(cell: Cell, gpus: tuple[int, ...], folder: Path, platform: str) -> Job:
    """A cell's process, preparing."""
    devices = ",".join(map(str, gpus))
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": devices, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {cell.flags}".strip()
    if platform == "cpu":  # a rehearsal: as many CPU devices as GPUs
        env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(cell.gpus), "XLA_FLAGS": ""}
    errors = folder / f"{cell.name.replace(' ', '-')}.err"
    # What takes long to compile makes way for what does not.
    command = [*(("nice", "-n", "5") if cell.carries_keys else ()), *WORKER, cell.name]
    with errors.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=env,
            start_new_session=True,
        )
    _move(process.pid, _cores()[0])
    return Job(cell, gpus, process, errors)


def places(wanted: Sequence[Cell], gpus: int) -> list[tuple[int, ...]]:
    """Which GPUs each cell has: of the places for its size, the one with least to do so far."""
    loads: dict[int, list[float]] = {}
    found = []
    for cell in wanted:
        load = loads.setdefault(cell.gpus, [0.0] * (gpus // cell.gpus))
        place = load.index(min(load))
        load[place] += cell.cost
        found.append(tuple(range(place * cell.gpus, (place + 1) * cell.gpus)))
    return found


def startable(jobs: Sequence[Job]) -> list[Job]:
    """Those whose turn it is: first come the first in order, and nobody overtakes on the GPUs that one waits for."""
    taken = {gpu for job in jobs if job.busy for gpu in job.gpus}
    found = []
    for job in jobs:
        if job.waits:
            if not taken & set(job.gpus):
                found.append(job)
            taken |= set(job.gpus)
    return found


class Study:
    """Runs cells and keeps results.json up to date."""

    def __init__(self, wanted: Sequence[Cell], gpus: int, out: Path, seconds: float, platform: str) -> None:
        self.wanted, self.gpus, self.out, self.seconds, self.platform = wanted, gpus, out, seconds, platform
        self.begin = time.monotonic()
        self.jobs: list[Job] = []
        self.done: set[str] = set()
        kept = read_kept(out) if out.exists() else {"rows": []}
        names = {cell.name for cell in wanted}
        self.kept = [row for row in kept["rows"] if row["cell"] not in names]
        self.runs: dict[str, Any] = kept.get("runs", {})
        self.stamp = time.strftime("%Y-%m-%d %H:%M")
        self.env: dict[str, Any] = {}

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:6.1f} s  {text}", flush=True)

    def run(self, patience: float) -> int:
        """Measure everything; returns how many cells have failed. patience: seconds in which all may prepare before
        the first is measured."""
        threading.Thread(target=self._look, daemon=True).start()
        with tempfile.TemporaryDirectory() as folder, self._none_left():
            waiting = list(zip(self.wanted, places(self.wanted, self.gpus), strict=True))
            next_start = 0.0
            while len(self.done) < len(self.wanted):
                now = time.monotonic() - self.begin
                if waiting and now >= next_start:
                    self.jobs.append(start(*waiting.pop(0), Path(folder), self.platform))
                    next_start = now + GAP
                self._collect()
                preparing = sum(not (job.ready or job.over) for job in self.jobs)
                if (not waiting and not preparing) or now > patience:
                    for job in startable(self.jobs):
                        self.say(f"{job.cell.name}: its turn, {preparing} prepare")
                        job.go()
                self._give_up()
                if now > self.seconds:
                    break
                time.sleep(0.05)
            late = [job for job in self.jobs if not job.over]
            for job in late:
                job.kill()
            for job in late:
                job.listener.join(5)
            for cell, _ in waiting:
                self.say(f"{cell.name}: never started")
            for job in self.jobs:
                if job.cell.name not in self.done:
                    self._keep(job, f"not done after {self.seconds:g} s" if job in late else "")
        return len({row["cell"] for row in self.kept if "failed" in row or not row.get("passed", True)})

    @contextmanager
    def _none_left(self) -> Iterator[None]:
        """However this ends, also by an interrupt: the cells have sessions of their own, which it does not reach."""
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number)) if _main() else None
        try:
            yield
        finally:
            for job in self.jobs:
                job.kill()
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    def _look(self) -> None:
        """The environment, from a process of its own: this one must not open the GPUs."""
        code = "import json; from bampath.evaluation.results import environment as e; print(json.dumps(e()))"
        env = {**os.environ, **({"JAX_PLATFORMS": "cpu"} if self.platform == "cpu" else {})}
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
        if done.returncode == 0:
            self.env = json.loads(done.stdout.splitlines()[-1]) | {"nccl": _nccl(), "flags": self.wanted[0].flags}

    def _collect(self) -> None:
        for job in self.jobs:
            if job.over and job.cell.name not in self.done:
                self._keep(job, "")

    def _keep(self, job: Job, why: str) -> None:
        self.done.add(job.cell.name)
        for row in job.results(why):
            row = {**row, "cell": job.cell.name, "run": self.stamp, "at": round(time.monotonic() - self.begin, 1)}
            self.kept.append(row)
            self.say(show(row))
        self._write()

    def _write(self) -> None:
        from bampath.evaluation.results import write_results

        used = {row["run"] for row in self.kept}
        runs = {name: env for name, env in {**self.runs, self.stamp: self.env}.items() if name in used}
        write_results(self.out, self.env, self.kept, runs=runs)

    def _give_up(self) -> None:
        for job in self.jobs:
            if job.busy and job.started is not None and time.monotonic() - job.started > TURN:
                self.say(f"{job.cell.name}: given up after {TURN:g} s")
                job.kill()


def _main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _nccl() -> dict[str, str]:
    """The environment variables that steer NCCL."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}


def show(row: dict[str, Any]) -> str:
    """A row in one line."""
    if "failed" in row:
        return f"{row['cell']} FAILED: {row['failed'][-700:]}"
    if row["pass"] == "losses":
        apart = f"{row['apart']:.1e} from one GPU" if "apart" in row else f"losses {row['losses']}"
        return f"{row['cell']} {row['mesh']} {row['dtype']}: {apart}"
    if row["pass"] == "trainer":
        return f"{row['cell']}: passed {row['passed']}, apart {row.get('apart')}, {row['runs']}"
    rate = f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu'] or 0:.1%}" if "tokens_per_second" in row else ""
    rate = rate or f"{row['tflops_per_gpu']:.0f} TFLOP/s per GPU"
    where = {name: round(row["where"][name], 2) for name in ("step", "collectives", "exposed") if name in row["where"]}
    memory = max((n or 0 for n in row["memory_bytes"]), default=0) / 2**30
    return f"{row['cell']} {row['pass']}: {row['ms']:.2f} ms, {rate}, {memory:.1f} GiB, {where}"


def gpus_here() -> int:
    """How many GPUs `nvidia-smi` lists; 0 without it."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.multi_gpu.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, help="GPUs of this machine to use (default: all of them)")
    parser.add_argument("--counts", type=int, nargs="+", help="numbers of GPUs (default: 1, 2, 4, … up to --gpus)")
    parser.add_argument("--cells", nargs="+", metavar="TEXT", help="only cells whose name has one of these texts")
    parser.add_argument("--seconds", type=float, default=900, help="limit for everything (default 900)")
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds before the first turn, unless all are ready"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="results (default results.json beside this file)")
    parser.add_argument("--dry-run", action="store_true", help="list the cells and stop")
    parser.add_argument("--table", action="store_true", help="put the results into docs/scaling.md and stop")
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu", help="cpu: a rehearsal with tiny cells")
    options = parser.parse_args(argv)
    if options.table:
        from experiments.multi_gpu.report import write_tables

        write_tables(options.out)
        return
    gpus = options.gpus or (2 if options.platform == "cpu" else gpus_here())
    wanted = chosen(gpus, options)
    if options.dry_run:
        print("\n".join(f"{cell.name:<55} {cell.flags}" for cell in wanted))
        return
    if options.platform == "cpu" and options.out == RESULTS:
        raise ValueError(f"--platform cpu needs --out: rows of a rehearsal do not belong into {RESULTS.name}")
    options.out = file_to_write(options.out, "--out")
    failed = Study(wanted, gpus, options.out, options.seconds, options.platform).run(options.patience)
    if failed:
        raise SystemExit(1)


def chosen(gpus: int, options: argparse.Namespace) -> list[Cell]:
    """The cells that the command line asks for. ValueError if there is none or one needs more GPUs than there are."""
    for name in ("seconds", "patience"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name} {getattr(options, name):g} must be positive")
    if gpus < 1:
        raise ValueError("no GPU was found here; --dry-run --gpus 4 lists the cells, --platform cpu rehearses")
    counts = options.counts or sorted({1 << n for n in range(gpus.bit_length()) if 1 << n <= gpus} or COUNTS)
    if min(counts) < 1:
        raise ValueError(f"--counts {min(counts)} must be at least 1")
    if max(counts) > gpus:
        raise ValueError(f"--counts {max(counts)} needs more GPUs than the {gpus} there are")
    every = list(SMOKE) if options.platform == "cpu" else cells(counts)
    found = [cell for cell in every if not options.cells or any(text in cell.name for text in options.cells)]
    if not found:
        raise ValueError(f"--cells {' '.join(options.cells)} matches none of the cells that --dry-run lists")
    return found


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
