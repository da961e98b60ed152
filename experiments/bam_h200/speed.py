"""Tokens per second of the train step beside an equivalent PyTorch model, in one run:

    python -m experiments.bam_h200.speed                     every cell, about 15 minutes on one H200
    python -m experiments.bam_h200.speed --shapes 432m 1.1b
    python -m experiments.bam_h200.speed --minutes 5         start no shape after that; call again to go on

A cell is a model shape and what trains it: a positional scheme of bampath or PyTorch (transformers' Llama with RoPE,
torch.compile, bfloat16 autocast, SDPA, fused AdamW). Each runs in a process of its own; those of a shape compile side
by side and are then timed one at a time: a process makes its state when it is its turn, and ends after it. Rows go to a
file (--out); a shape whose rows are all there is not run again. A cell that fails has a row too, with the reason;
--retry runs the shapes again that have one, and what was there of a shape stays until all of its new rows are; where a
case fails that was measured before, it stays altogether, and a line says so. `ratio` is tokens per second over those of
PyTorch, and of our RoPE, at the same shape in the same run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bampath.command import fail_gracefully, file_to_write
from bampath.config import Config, get
from experiments.studies import read_kept, refuse_counts
from kernels.attention.bench import need_gpu

HERE = Path(__file__).parent
RESULTS = HERE / "speed.json"
SCHEMES = ("rope", "bam+ssmax", "path+fox")
WINDOWS, WINDOW_SECONDS, WARM_UP = 5, 1.0, 3
READY = "READY"
NAMES_ERROR = re.compile(r"error: |([A-Za-z_]\w*\.)*\w*(Error|Exception|Interrupt)\b")


@dataclass(frozen=True)
class Shape:
    """A named configuration with `heads` heads, trained on `batch` rows of `length` tokens."""

    name: str
    base: str
    heads: int
    batch: int
    length: int

    def config(self, scheme: str) -> Config:
        """What bampath trains: AdamW as in PyTorch, rows of one document as PyTorch's model takes them."""
        return get(
            self.base,
            f"model.heads={self.heads}",
            f"position={scheme}",
            f"data.sequence_length={self.length}",
            f"data.batch_size={self.batch}",
            "data.document_mask=false",
            "train.accumulate=1",
            "optim.name=adamw",
        )


SHAPES = (
    Shape("120m-heads-of-48", "l12", 16, 96, 512),
    Shape("120m-heads-of-64", "l12", 12, 96, 512),
    Shape("120m-long", "l12", 12, 12, 4096),
    Shape("432m", "l14.2", 24, 16, 2048),
    Shape("1.1b", "llama1b", 32, 4, 4096),
)


@dataclass(frozen=True)
class Cell:
    """A shape, and a scheme of bampath or "torch"."""

    shape: Shape
    what: str

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.what}"

    def config(self) -> Config:
        """What is trained; PyTorch's model has RoPE."""
        return self.shape.config("rope" if self.what == "torch" else self.what)


CELLS = tuple(Cell(shape, what) for shape in SHAPES for what in ("torch", *SCHEMES))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bam_h200.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shapes, cases = [shape.name for shape in SHAPES], ["torch", *SCHEMES]
    parser.add_argument("--shapes", nargs="+", default=shapes, choices=shapes, metavar="NAME", help=", ".join(shapes))
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases, metavar="NAME", help=", ".join(cases))
    parser.add_argument("--minutes", type=float, default=60.0, help="start no shape after this long (default 60)")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"results (default {RESULTS.name} beside this file)")
    parser.add_argument(
        "--retry",
        action="store_true",
        help="run a shape again of which a cell failed; its rows stay if a case fails that was measured before",
    )
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # how the parent starts a cell's own process
    options = parser.parse_args(argv)
    if options.cell:
        print(json.dumps(measure(named(options.cell))), flush=True)
        return
    cells = [cell for cell in CELLS if cell.shape.name in options.shapes and cell.what in options.cases]
    refuse_counts(options)
    if options.out == RESULTS:
        need_gpu(parser)
    run(cells, file_to_write(options.out, "--out"), options.minutes, options.retry)


def named(name: str) -> Cell:
    """The cell called `name`. ValueError if there is none."""
    for cell in CELLS:
        if cell.name == name:
            return cell
    raise ValueError(f"no cell is called {name!r}; there are: {', '.join(cell.name for cell in CELLS)}")


def run(cells: Sequence[Cell], out: Path, minutes: float, retry: bool = False) -> None:
    """Run the shapes that have no complete set of rows yet and write the file after each cell.

    A shape is done in one go, so that its ratios compare what ran side by side. retry: a row of a cell that failed does
    not count. Rows that a shape has from an earlier call stay in the file until all of its new ones take their place,
    which they do not if a case that was measured fails now: a line that is printed says which and why.
    ValueError before a shape is run again without a case that has a measured row.
    """
    from bampath.evaluation.results import write_results

    kept: dict[str, Any] = read_kept(out) if out.exists() else {"env": {}, "rows": []}
    begin = time.monotonic()
    for shape in dict.fromkeys(cell.shape for cell in cells):
        mine = [cell for cell in cells if cell.shape == shape]
        there = [row for row in kept["rows"] if row["shape"] == shape.name and not (retry and "failed" in row)]
        if {cell.what for cell in mine} <= {row["case"] for row in there}:
            continue
        if time.monotonic() - begin > 60 * minutes:
            print(f"{minutes:g} minutes are over; call again for the rest, from {shape.name}")
            break
        _refuse_loss(shape.name, mine, kept["rows"], out)
        older = [row for row in kept["rows"] if row["shape"] == shape.name]
        others = [row for row in kept["rows"] if row["shape"] != shape.name]
        made, envs = list[dict[str, Any]](), dict[str, Any]()
        for row, env in side_by_side(mine):
            made, envs = with_ratios([*made, row]), envs | env
            if not older or (len(made) == len(mine) and not _lost(older, made)):
                kept = {"env": kept["env"] | envs, "rows": [*others, *made]}
                write_results(out, kept["env"], kept["rows"])
            print(show(row), flush=True)
        for row in _lost(older, made):
            told = f"{row['case']}, which was measured before, failed now: {row['failed']}"
            print(f"{shape.name}: older rows stay and none of the new ones is taken, since {told}", flush=True)


def _lost(older: Sequence[dict[str, Any]], made: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows `made` of a shape that failed where an older one is measured."""
    measured = {row["case"] for row in older if "failed" not in row}
    return [row for row in made if "failed" in row and row["case"] in measured]


def _refuse_loss(shape: str, cells: Sequence[Cell], rows: Sequence[dict[str, Any]], out: Path) -> None:
    """ValueError if a shape has a measured row that `cells`, which replace all of its rows, would not make again."""
    asked = {cell.what for cell in cells}
    lost = [row["case"] for row in rows if row["shape"] == shape and "failed" not in row and row["case"] not in asked]
    if lost:
        raise ValueError(
            f"{out} has rows of {', '.join(lost)} at {shape}, which are lost when the shape is run without them: "
            f"name them in --cases as well, or choose another --out"
        )


def side_by_side(cells: Sequence[Cell]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(row, environment) of each cell: all are prepared, each in its own process, then timed in turn."""
    started = [Started(cell) for cell in cells]
    try:
        for one in started:
            one.wait()
        print(f"{cells[0].shape.name}: {len(cells)} cells prepared", flush=True)
        for one in started:
            result = one.finish()
            yield result["row"], result["env"]
    finally:
        for one in started:
            one.stop()


class Started:
    """A process that prepares a cell, says READY, and measures when it is told to; `--cell` is its side of this."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, it lives as long as the process
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ  # the cells of a shape share the device
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command_of(cell), stdin=pipe, stdout=pipe, stderr=self.errors, text=True, env=environment
        )

    def wait(self) -> None:
        """Until it is ready, or has failed."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == READY:
                return

    def finish(self) -> dict[str, Any]:
        """{"row", "env"} when the process has ended; a row says why it failed, after what it said is shown."""
        output, _ = self.process.communicate("go\n" if self.process.poll() is None else None)
        if self.process.returncode:
            self.errors.seek(0)
            said = self.errors.read()
            print(f"{self.cell.name} failed:\n" + "\n".join(said.splitlines()[-15:]), flush=True)
            return {"row": facts(self.cell) | {"failed": reason(said, self.process.returncode)}, "env": {}}
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.errors):
            if file is not None:
                file.close()


def command_of(cell: Cell) -> list[str]:
    """What starts a cell's process."""
    return [sys.executable, "-m", "experiments.bam_h200.speed", "--cell", cell.name]


def reason(errors: str, status: int, most: int = 400) -> str:
    """Why a process failed, in a line: the last one that names an error, else the last, else the exit status."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if NAMES_ERROR.match(line)]
    return (named or lines or [f"ended with status {status}"])[-1][:most]


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row's tokens per second over PyTorch's and over our RoPE's at its shape; nothing for what failed."""
    timed = [row for row in rows if "failed" not in row]
    rate = {(row["shape"], row["case"]): row["tokens_per_second"] for row in timed}
    for row in timed:
        peers = {peer: rate.get((row["shape"], peer)) for peer in ("torch", "rope")}
        row["ratio"] = {peer: row["tokens_per_second"] / value for peer, value in peers.items() if value}
    return rows


def show(row: dict[str, Any]) -> str:
    name = f"{row['shape']} {row['case']}"
    if "failed" in row:
        return f"{name:<32} failed: {row['failed']}"
    ratios = "  ".join(f"{value:.2f} × {peer}" for peer, value in row["ratio"].items())
    mfu = "   –" if row["mfu"] is None else f"{row['mfu']:.1%}"  # of a device whose peak is not known
    return (
        f"{name:<32} {row['tokens_per_second']:>9,.0f} tokens/s  {mfu} MFU  "
        f"{(row['memory_bytes'] or 0) / 2**30:.1f} GiB  {ratios}"
    )


def facts(cell: Cell) -> dict[str, Any]:
    """What a row says of its cell before it is timed."""
    shape = cell.shape
    return {
        "case": cell.what,
        "shape": shape.name,
        "impl": "torch" if cell.what == "torch" else "bampath",
        "pass": "train_step",
        "B": shape.batch,
        "T": shape.length,
        "H": shape.heads,
        "D": cell.config().model.head_dim,
        "dtype": "bfloat16",
    }


def measure(cell: Cell) -> dict[str, Any]:
    """{"row", "env"} of one cell, in this process, which waits for a line on standard input once it is prepared."""
    from bampath.flops import body_parameters, peak_flops, train_flops_per_token
    from experiments.bam_h200 import step_jax, step_torch

    shape, config = cell.shape, cell.config()
    begin = time.monotonic()
    runner = step_torch.build(config) if cell.what == "torch" else step_jax.build(config)
    compiled = time.monotonic() - begin
    print(READY, flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    runner.start()
    runner.steps(WARM_UP)
    started = time.monotonic() - begin
    tokens = shape.batch * shape.length
    count = max(1, round(WINDOW_SECONDS / max(1e-3, seconds(runner, 2) / 2)))
    rates = sorted(tokens * count / seconds(runner, count) for _ in range(WINDOWS))
    flops = train_flops_per_token(config.model, body_parameters(config.model), shape.length)
    peak = peak_flops(runner.device)
    row = facts(cell) | {
        "parameters": runner.parameters,
        "ms": 1e3 * tokens / rates[WINDOWS // 2],
        "ms_min": 1e3 * tokens / rates[-1],
        "ms_max": 1e3 * tokens / rates[0],
        "tokens_per_second": rates[WINDOWS // 2],
        "mfu": rates[WINDOWS // 2] * flops.causal / peak if peak else None,
        "mfu_all_pairs": rates[WINDOWS // 2] * flops.full / peak if peak else None,
        "memory_bytes": runner.memory(),
        "program_bytes": runner.needed,
        "waiting_bytes": runner.kept,  # what the process held while others were timed
        "setup_seconds": compiled + started,
        "loss": runner.loss(),
        "where": runner.profile(),
    }
    env = runner.environment()
    stamp = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z")} | ({"commit": env["commit"]} if "commit" in env else {})
    return {"row": row | stamp, "env": env}


def seconds(runner: Any, count: int) -> float:
    begin = time.perf_counter()
    runner.steps(count)
    return time.perf_counter() - begin


if __name__ == "__main__":
    fail_gracefully(main, sys.argv[1:])
